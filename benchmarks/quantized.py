"""Quantised models: their held-out bits per byte, and the bytes that a decoded token moves.

Bytes are counted in the compiled program of one step of decoding, of one row: the reads and writes
of a device's memory. It does not run; for a TPU it is compiled without one, given libtpu.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

import zoo
from benchmarks.report import Table
from zoo import losses, sharding, text
from zoo.data.loader import batches
from zoo.decoding.decoder import decoder_of
from zoo.nn.codes import Kind
from zoo.nn.precision import native_precision
from zoo.planning import hlo, published, targets
from zoo.planning.traffic import memory_traffic
from zoo.publishing import models
from zoo.publishing.shelf import find
from zoo.sharding.axes import is_parameter

KINDS: tuple[Kind | None, ...] = (None, *get_args(Kind))
MOST_BITS: dict[Kind | None, float] = {"int8": 0.01, "int4": 0.05}  # more than as stored
MOST_BYTES: dict[Kind | None, float] = {"int8": 0.53, "int4": 0.3}  # of those of bf16
MB = 1e6


@dataclass(frozen=True)
class Options:
    """Models in 8 and 4 bits beside themselves in bf16."""

    model: str = "lm-python"
    """Name on the shelf, whose loss is measured on the held-out part of Python's own library."""
    sizes: tuple[str, ...] = ("qwen3-0.6b", "llama3-8b")
    """Published sizes whose decoding is compiled for the target, without weights."""
    num_layers: int | None = None
    """Layers of those, to compile less; all if not given."""
    target: str = "v5e:1x1"
    """Chip that these are compiled for."""
    slots: int = 64
    """Tokens that the cache of a decoder has room for."""


def measure(options: Options) -> list[Table]:
    """A table of losses, and a table of bytes per token for each model and chip."""
    stored = jax.default_backend() + ":1"
    tables = [_losses(options)]
    tables.append(_traffic(options, options.model, stored, _shelved(options.model)))
    for size in options.sizes:
        tables.append(_traffic(options, size, options.target, _published(size, options.num_layers)))
    return tables


def _losses(options: Options) -> Table:
    folder = find(options.model)
    data = text.read_text(
        text.Config(tokenizer=str(folder)), seed=0, tokenizer_folder=lambda make: folder
    )
    num_batches = data.held_out.batches_per_epoch
    table = Table(
        f"{options.model}: bits per byte of the whole held-out text "
        f"({len(data.held_out.corpus.tokens):,} tokens), computed in {native_precision()}"
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
    table.print()
    return table


Make = Callable[[Kind | None], PyTree]


def _traffic(options: Options, name: str, target: str, skeleton: Make) -> Table:
    table = Table(
        f"{name}, decoding of one row on {target}, {options.slots} slots: MB per token, counted in "
        "the compiled program"
    )
    try:
        device = targets.parse(target).devices()[0]
    except ImportError as error:
        table.notes.append(str(error))
        table.print()
        return table
    first: tuple[float, float] | None = None
    for kind in KINDS:
        model = skeleton(kind)
        weights, moved = _num_bytes(model), moved_per_token(model, device, options.slots)
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
    table.print()
    return table


def _shelved(name: str) -> Make:
    return lambda kind: models.skeleton(name, dtype=jnp.bfloat16, quantize=kind)


def _published(size: str, num_layers: int | None) -> Make:
    if num_layers is not None:
        sized = dataclasses.replace(published.named(size), num_layers=num_layers)
        published.SIZES[size] = sized
    return lambda kind: published.skeleton(size, quantize=kind)


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
