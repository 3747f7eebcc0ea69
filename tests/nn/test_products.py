"""Forward mode, and Hessian-vector products forward over reverse, through every family."""

import traceback
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_model, drawn_rnn, drawn_transformer, make_bert, token_batch

import zoo
from zoo import losses, mlp, sharding, transformer
from zoo.nn import attention, products
from zoo.nn.layers import gelu
from zoo.nn.recurrences.mixers import MIXERS


def tokens() -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in token_batch(2, 8).items()}


def of_tokens(model: Any) -> Any:
    return losses.next_token(model, tokens(), None)[0]


def of_classes(model: Any) -> Any:
    batch = {
        "inputs": jnp.linspace(-1, 1, 12).reshape(3, 4),
        "labels": jnp.array([0, 1, 1]),
        "weights": jnp.array([1.0, 0.5, 2.0]),
    }
    return losses.classification(model, batch, None)[0]


def make_mlp(norm: str) -> mlp.MLP:
    sizes = {"in_size": 4, "out_size": 2, "hidden_size": 8, "num_layers": 2}
    config = mlp.Config(**sizes, norm=norm, activation="gelu")
    return drawn_model(lambda key: mlp.MLP(config, key=key), 0.5)


def small_bert() -> transformer.Transformer:
    return drawn_model(make_bert(512, num_heads=12))


def of_bert(model: transformer.Transformer) -> Any:
    batch = tokens()
    logits = model(batch["tokens"], mask=batch["weights"] > 0)
    return losses.cross_entropy(logits, batch["targets"], batch["weights"])[0]


def small_transformer(**changes: Any) -> transformer.Transformer:
    return drawn_transformer(num_layers=1, **changes)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "mlp": (lambda: make_mlp("layer"), of_classes),
    **{
        cell: (lambda cell=cell: drawn_rnn(cell, num_layers=1), of_tokens)
        for cell in ("lstm", "gru", "mingru", *MIXERS)
    },
    "transformer": (
        lambda: small_transformer(
            mlp="geglu",
            **{"attention.qk_norm": "per_head", "attention.window": 3, "attention.soft_cap": 5.0},
        ),
        of_tokens,
    ),
    "moe": (lambda: small_transformer(**{"experts.num_experts": 4}), of_tokens),
    "bert": (small_bert, of_bert),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "mlp" else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_forward_mode_agrees_with_the_written_gradients(name, monkeypatch):
    """⟨gradient, v⟩ and reverse over reverse are by the rules that training takes."""
    if name == "transformer":
        monkeypatch.setattr(losses, "LOGITS_BYTES", 1)
    make, loss = CASES[name]
    params, static = eqx.partition(make(), eqx.is_inexact_array)
    rng = np.random.default_rng(1)
    v = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)

    def f(params: Any) -> Any:
        return loss(eqx.combine(params, static))

    def along_v(params: Any) -> Any:
        products = jax.tree.map(lambda g, d: (g * d).sum(), jax.grad(f)(params), v)
        return sum(jax.tree.leaves(products))

    @jax.jit
    def forward(params: Any) -> Any:
        _, slope = jax.jvp(f, (params,), (v,))
        return slope, jax.jvp(jax.grad(f), (params,), (v,))[1]

    if name == "moe":  # JAX has no reverse over reverse of its ragged products
        gradient, step, close = jax.jit(jax.grad(f)), 1e-3, 3e-3
        ahead, back = (
            gradient(jax.tree.map(lambda x, d, s=s: x + s * d, params, v)) for s in (step, -step)
        )
        want = jax.jit(along_v)(params)
        want_product = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, back)
    else:
        close = 1e-4
        want, want_product = jax.jit(jax.value_and_grad(along_v))(params)
    with pytest.raises(TypeError, match="forward-mode"):
        forward(params)
    with zoo.forward_mode():
        slope, product = forward(params)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-4)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want_product))
    assert scale > 1e-2
    for got, expected in zip(jax.tree.leaves(product), jax.tree.leaves(want_product), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=close * scale)


def test_compiled_functions_know_the_mode():
    f, one = jax.jit(gelu), jnp.ones(())
    want = jax.grad(f)(one)
    with zoo.forward_mode():
        np.testing.assert_allclose(jax.jvp(f, (one,), (one,))[1], want, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(f)(one), want, rtol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (one,), (one,))
    assert jax.grad(f)(one) == want


def test_the_traceback_of_forward_mode_says_the_way_out():
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(gelu, (jnp.ones(()),), (jnp.ones(()),))
    assert "use zoo.forward_mode()" in "".join(traceback.format_exception(error.value))


def test_kernels_without_a_rule_are_refused_by_name():
    q = jnp.ones((1, 2, 2, 8))
    with zoo.forward_mode(), pytest.raises(ValueError, match=r"'cudnn' .* forward mo"):
        attention.attention(q, q, q, causal=True, implementation="cudnn")


def test_the_chip_is_that_of_the_mesh():
    chip = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        assert (products.platform(), products.device_kind()) == ("tpu", "TPU v5 lite")
    here = jax.devices()[0]
    assert (products.platform(), products.device_kind()) == (here.platform, here.device_kind)


@pytest.mark.parametrize(
    ("mesh", "copies"), [("data=2,fsdp=4", 2), ("data=2,expert=2,fsdp=2", 2), ("data=8", 1)]
)
def test_gradients_of_weights_are_summed_over_slices_last(mesh, copies, monkeypatch):
    monkeypatch.setattr(products, "platform", lambda: "tpu")
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape) for shape in ((8, 3, 5), (5, 4), (8, 3, 4)))

    def loss(w: Any, x: Any) -> Any:
        return (products.matmul(x, w) * jnp.float32(g)).sum()

    placed = sharding.make_mesh(mesh)
    with sharding.use(placed):
        assert sharding.num_copies() == copies
        x_on_mesh = jax.device_put(jnp.float32(x), sharding.batch_sharding(placed, 3))
        gradient = jax.jit(jax.grad(loss))
        found = gradient(jnp.float32(w), x_on_mesh)
        text = gradient.lower(jnp.float32(w), x_on_mesh).as_text()
    np.testing.assert_allclose(found, np.einsum("bmk,bmn->kn", x, g), rtol=1e-5, atol=1e-5)
    assert ("batching_dims = [0]" in text) == (copies > 1)
