"""Parity of a GPU with other devices: a train step in fp32, and attention by cuDNN."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import zoo_step
from benchmarks.peers.transformer import given, zoo_model
from zoo import losses
from zoo.nn.attention import attention
from zoo.nn.precision import exact_products, in_precision


def gradients(shape: dict[str, Any], file: str) -> Any:
    """Write the loss and each parameter's gradient on this process's device, in fp32."""
    sizes = given.Shape(**shape)
    model = zoo_model.init(zoo_model.sizes(sizes, "none", True), sizes, jax.random.key(0))
    batch = jax.device_put(zoo_step.token_batch(given.batch(sizes)))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss_and_gradient(model: Any) -> jax.Array:
        with in_precision(model, "fp32") as model:
            total, weight, _ = losses.next_token(model, batch, None)
        return total / weight

    with exact_products("fp32"):
        loss, grads = loss_and_gradient(model)
    arrays = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(grads))}
    np.savez(file, loss=np.asarray(loss), **arrays)
    return {"device": jax.devices()[0].device_kind, "loss": float(loss)}


def compare(here: str, there: str) -> dict[str, float]:
    """The largest differences between two files of `gradients`, relative to each array's norm."""
    ours, theirs = np.load(here), np.load(there)
    assert set(ours) == set(theirs), "the files are of different models"
    return {
        "loss": relative(ours["loss"], theirs["loss"]),
        "gradient": max(relative(ours[name], theirs[name]) for name in ours if name != "loss"),
    }


def relative(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def attention_errors(batch: int, seq_len: int, heads: int, head_dim: int, implementation: str):
    """The errors of an implementation in bf16, relative to fp32, forward and backward."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (batch, seq_len, heads, head_dim)) for key in keys)

    def run(implementation: Any, dtype: Any) -> list[np.ndarray]:
        @jax.jit
        def run(*inputs: jax.Array) -> tuple:
            out, pull = jax.vjp(
                lambda *qkv: attention(*qkv, causal=True, implementation=implementation),
                *(x.astype(dtype) for x in inputs[:3]),
            )
            return out, *pull(inputs[3].astype(dtype))

        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
            return [np.asarray(x, np.float32) for x in run(q, k, v, g)]

    exact, ours = run("xla", jnp.float32), run(implementation, jnp.bfloat16)
    names = ("output", "dq", "dk", "dv")
    return {name: relative(a, b) for name, a, b in zip(names, ours, exact, strict=True)}
