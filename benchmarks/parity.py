"""Models of every kind in fp32, on this device and on the CPU: losses, gradients and tokens."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array

import zoo
from benchmarks import harness
from benchmarks.harness import Table
from zoo import lora, losses, rnn, transformer
from zoo.nn.precision import exact_products, in_precision
from zoo.transformer.vision import VisionConfig, VisionTransformer

VOCABULARY = 512
DEVICES = "here", "cpu"
LIMIT = 1e-4  # relative to an array's norm: for the order of fp32 sums
Loss = Callable[[Any, dict[str, Array], Any], tuple[Array, Array, Any]]
Sizes = tuple[int, int, int]  # layers, width, positions of a row


def check(table: Table, tiny: bool) -> None:
    """Each model's loss and gradient on this device and on the CPU, and what it writes."""
    sizes = (2, 64, 64) if tiny else (2, 256, 512)
    names = ["lstm"] if tiny else [*MODELS]
    table.title = (
        "{} layers of {}, rows of {}, fp32: this device compared with the CPU, relative"
    ).format(*sizes)
    with tempfile.TemporaryDirectory() as folder:

        def run(device: str) -> str:
            file = f"{folder}/{device}.npz"
            return harness.in_process(write, sizes, names, file, device, limit=900)

        with ThreadPoolExecutor() as pool:
            kinds = pool.map(run, DEVICES)
            table.notes += [f"{x}: {kind}" for x, kind in zip(DEVICES, kinds, strict=True)]
        here, cpu = (dict(np.load(f"{folder}/{name}.npz")) for name in DEVICES)
    assert here.keys() == cpu.keys(), "the files are of different models"
    for name in names:
        gradients = [key for key in here if key.startswith(f"{name}/gradient/")]
        worst = max(_apart(here[key], cpu[key]) for key in gradients)
        loss = _apart(here[f"{name}/loss"], cpu[f"{name}/loss"])
        row: dict[str, Any] = {"model": name, "loss": loss, "gradient": worst}
        if (key := f"{name}/written") in here:
            row["same tokens"] = f"{int((here[key] == cpu[key]).sum())} of {here[key].size}"
        table.rows.append(row)
        if not max(loss, worst) <= LIMIT:
            table.failures.append(f"{name} differs by {max(loss, worst)}, over {LIMIT}")


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    size = np.linalg.norm(b)
    return float(np.linalg.norm(a - b) / (size if size else 1.0))


def write(sizes: Sizes, names: list[str], file: str, device: str) -> str:
    """Write the losses, gradients and continuations of models on a device, "cpu" or "here"."""
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        model, loss, batch = MODELS[name](sizes)
        value, grads = _gradient(model, loss, jax.device_put(batch))
        arrays[f"{name}/loss"] = np.asarray(value)
        leaves = jax.tree.leaves(grads)
        arrays |= {f"{name}/gradient/{i}": np.asarray(x) for i, x in enumerate(leaves)}
        if name in WRITERS:
            with exact_products("fp32"):
                prompt = np.asarray(batch["tokens"][:, :17])
                written = zoo.generate(model, prompt, max_new_tokens=16, temperature=0)
            arrays[f"{name}/written"] = np.asarray(written)
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return jax.devices()[0].device_kind


def _gradient(model: Any, loss: Loss, batch: dict[str, Array]) -> tuple[Array, Any]:
    adapted = lora.has_adapters(model)
    trained, fixed = eqx.partition(
        model, lora.trainable(model) if adapted else eqx.is_inexact_array
    )

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss_and_gradient(trained: Any) -> Array:
        with in_precision(eqx.combine(trained, fixed), "fp32") as model:
            total, weight, _ = loss(model, batch, None)
        return total / weight

    with exact_products("fp32"):
        return loss_and_gradient(trained)


Made = tuple[Any, Loss, dict[str, Any]]


def _tokens(sizes: Sizes) -> dict[str, np.ndarray]:
    """Packed rows: documents of 100 tokens in the mean."""
    rng, shape = np.random.default_rng(0), (4, sizes[2])
    return {
        "tokens": (tokens := rng.integers(1, VOCABULARY, shape, np.int32)),
        "targets": np.roll(tokens, -1, 1),
        "weights": np.ones(shape, np.float32),
        "segment_ids": 1 + np.cumsum(rng.random(shape) < 0.01, 1, dtype=np.int32),
    }


def _transformer(sizes: Sizes, **parts: Any) -> Made:
    layers, width, _ = sizes
    config = transformer.Config(
        vocab_size=VOCABULARY, d_model=width, num_layers=layers, num_heads=4, **parts
    )
    model = transformer.Transformer(config, key=jax.random.key(0))
    return model, losses.next_token, _tokens(sizes)


def _hybrid(sizes: Sizes, kind: str) -> Made:
    return _transformer(sizes, mixer=transformer.MixerConfig(pattern=(kind, "attention")))


def _rnn(sizes: Sizes, cell: str) -> Made:
    config = rnn.Config(vocab_size=VOCABULARY, hidden_size=sizes[1], num_layers=2, cell=cell)
    return rnn.RNN(config, key=jax.random.key(0)), losses.next_token, _tokens(sizes)


def _vision(sizes: Sizes) -> Made:
    layers, width, _ = sizes
    config = VisionConfig(
        image_size=64, patch_size=8, num_classes=10, d_model=width, num_layers=layers, num_heads=4
    )
    rng = np.random.default_rng(0)
    batch = {
        "inputs": rng.normal(size=(8, 64, 64, 3)).astype(np.float32),
        "labels": rng.integers(0, 10, 8, np.int32),
        "weights": np.ones(8, np.float32),
    }
    return VisionTransformer(config, key=jax.random.key(0)), losses.classification, batch


def _adapters(sizes: Sizes) -> Made:
    base = zoo.load("lm-python", quantize="int4")
    model = lora.adapt(base, lora.Config(rank=4), key=jax.random.key(0))
    return model, losses.next_token, _tokens(sizes)


_Attention, _Experts = transformer.AttentionConfig, transformer.ExpertsConfig
_LATENT = transformer.LatentConfig(kv_rank=64, rotary_dim=8)
MODELS: dict[str, Callable[[Sizes], Made]] = {
    "grouped heads": partial(
        _transformer, attention=_Attention(num_kv_heads=2, qk_norm="per_head")
    ),
    "windows, sinks": partial(
        _transformer,
        attention=_Attention(window=100, window_pattern=("local", "global"), sinks=True),
    ),
    "soft caps": partial(_transformer, attention=_Attention(soft_cap=30.0), logit_soft_cap=20.0),
    "latent attention": partial(_transformer, attention=_Attention(latent=_LATENT)),
    "experts": partial(_transformer, experts=_Experts(num_experts=8, num_shared=1)),
    "encoder": partial(_transformer, causal=False),
    "vision transformer": _vision,
    **{f"{x}, attention": partial(_hybrid, kind=x) for x in ("gated_deltanet", "mamba2", "mlstm")},
    **{x: partial(_rnn, cell=x) for x in ("lstm", "gru", "minlstm")},
    "adapters over int4": _adapters,
}
WRITERS = [x for x in MODELS if x not in ("encoder", "vision transformer")]
