"""Quantised models: their held-out bits per byte, and the bytes that a decoded token moves.

python -m benchmarks.quantized

Bytes are counted in the compiled program of one step of decoding of one row: the reads and writes
of a device's memory. It is not run; for a TPU it is compiled without one (`zoo[plan]`).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

import zoo
from benchmarks.harness import Table, main
from zoo import losses, sharding, text
from zoo.data.loader import batches
from zoo.decoding.decoder import decoder_of
from zoo.nn.precision import native_precision
from zoo.nn.products import Kind
from zoo.planning import hlo, targets
from zoo.planning.costs import memory_traffic
from zoo.planning.sizes import SIZES, published
from zoo.publishing import models
from zoo.publishing.shelf import find
from zoo.sharding.axes import is_parameter

KINDS: tuple[Kind | None, ...] = (None, *get_args(Kind))
MOST_BITS: dict[Kind | None, float] = {"int8": 0.01, "int4": 0.05}  # more than as stored
MOST_BYTES: dict[Kind | None, float] = {"int8": 0.53, "int4": 0.3}  # as shares of bf16's
MB = 1e6


def quantized(
    model: str = "lm-python",
    sizes: tuple[str, ...] = ("qwen3-0.6b", "llama3-8b"),
    num_layers: int | None = None,
    target: str = "v5e:1x1",
    slots: int = 64,
) -> list[Table]:
    """Models in 8 and 4 bits beside themselves in bf16.

    Args:
        model: name on the shelf, whose loss is measured on the held-out part of Python's library.
        sizes: published sizes whose decoding is compiled for the target, without weights.
        num_layers: layers that are compiled, to take less time; all if not given.
        target: chip that these are compiled for.
        slots: tokens that the cache of a decoder has room for.
    """
    here = jax.default_backend() + ":1"
    shelved = lambda kind: models.skeleton(model, dtype=jnp.bfloat16, quantize=kind)  # noqa: E731
    tables = [_losses(model), _traffic(slots, model, here, shelved)]
    for size in sizes:
        if num_layers is not None:
            sized = dataclasses.replace(SIZES[size], num_layers=num_layers)
            SIZES[size] = sized
        made = lambda kind, size=size: published(size, quantize=kind)  # noqa: E731
        tables.append(_traffic(slots, size, target, made))
    return tables


def _losses(name: str) -> Table:
    folder = find(name)
    data = text.read_text(
        text.Config(tokenizer=str(folder)), seed=0, tokenizer_folder=lambda make: folder
    )
    num_batches = data.held_out.batches_per_epoch
    table = Table(
        f"{name}: bits per byte of the whole held-out text "
        f"({data.held_out.corpus.num_tokens:,} tokens), computed in {native_precision()}"
    )
    first = None
    for kind in KINDS:
        step = zoo.make_eval_step(losses.next_token, precision=native_precision())
        model, sums = zoo.load(folder, quantize=kind), {"loss": 0.0, "tokens": 0.0}
        for _, batch in batches(data.held_out, stop=num_batches):
            found = step(model, batch)[1]
            sums = {name: total + float(found[name]) for name, total in sums.items()}
        bits = data.bits_per_byte(sums["loss"] / sums["tokens"])
        first = bits if first is None else first
        table.rows.append(
            {
                "matrices": kind or "as stored",
                "MB": _num_bytes(model) / MB,
                "bits per byte": f"{bits:.5f}",
                "more": f"{bits - first:+.5f}",
                "at most": MOST_BITS.get(kind),
            }
        )
        if bits - first > MOST_BITS.get(kind, float("inf")):
            table.failures.append(f"{kind}: {bits - first:.5f} bits per byte more than as stored")
    return table


def _traffic(slots: int, name: str, target: str, skeleton: Callable[[Any], PyTree]) -> Table:
    table = Table(
        f"{name}, decoding of one row on {target}, {slots} slots: MB per token, counted in "
        "the compiled program"
    )
    try:
        device = targets.parse(target).devices()[0]
    except ImportError as error:
        table.notes.append(str(error))
        return table
    first: tuple[float, float] | None = None
    for kind in KINDS:
        model = skeleton(kind)
        weights, moved = _num_bytes(model), moved_per_token(model, device, slots)
        first = (weights, moved) if first is None else first
        table.rows.append(
            {
                "matrices": kind or "bf16",
                "weights, MB": weights / MB,
                "weights / bf16": weights / first[0],
                "MB per token": moved / MB,
                "per token / bf16": moved / first[1],
                "goal": MOST_BYTES.get(kind),
            }
        )
    return table


def moved_per_token(model: PyTree, device: Any, slots: int) -> float:
    """Bytes between a device and its memory while the skeleton of a model decodes a token."""
    text = compiled_decode(model, device, slots)
    return memory_traffic(hlo.read(text))


def compiled_decode(model: PyTree, device: Any, slots: int) -> str:
    """The program of one step of decoding of one row, which writes its cache in place."""
    mesh = sharding.make_mesh("", [device])
    is_here = device in jax.devices()

    def placed(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh))

    with contextlib.nullcontext() if is_here else sharding.use(mesh):
        decoder = decoder_of(model)
        prompt = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1, 16), bool)
        _, cache = eqx.filter_eval_shape(lambda x, *y: x.prefill(*y, slots), decoder, *prompt)
        apart = eqx.filter_eval_shape(lambda x: x.for_decoding(), decoder)
        token = jax.ShapeDtypeStruct((1,), jnp.int32)
        args = jax.tree.map(placed, (cache, apart, token))
        arrays, static = eqx.partition(args, lambda x: isinstance(x, jax.ShapeDtypeStruct))

        def decode(cache: PyTree, others: PyTree) -> Any:
            cache, decoder, token = eqx.combine((cache, *others), static)
            return decoder.decode(token, cache)

        step = jax.jit(decode, donate_argnums=0)
        return step.lower(arrays[0], arrays[1:]).compile().as_text()


def _num_bytes(model: PyTree) -> int:
    leaves = filter(is_parameter, jax.tree.leaves(model))
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves)


if __name__ == "__main__":
    main(quantized)
