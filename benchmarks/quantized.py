"""The bytes that a decoded token of quantised models moves.

python -m benchmarks.quantized

They are counted in the compiled program of one step of decoding of one row: the reads and writes of
a device's memory. It is not run; for a TPU it is compiled without one (`zoo[plan]`).
"""

import dataclasses
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from benchmarks.harness import Table, main
from zoo import sharding
from zoo.decoding.decoder import decoder_of
from zoo.nn.products import Kind
from zoo.planning import hlo, targets
from zoo.planning.costs import memory_traffic
from zoo.planning.sizes import SIZES, published
from zoo.sharding.axes import is_parameter

KINDS: tuple[Kind | None, ...] = (None, *get_args(Kind))
MOST_BYTES: dict[Kind | None, float] = {"int8": 0.53, "int4": 0.3}  # as shares of bf16's
MB = 1e6


def quantized(
    sizes: tuple[str, ...] = ("qwen3-0.6b", "llama3-8b"),
    num_layers: int | None = None,
    target: str = "v5e:1x1",
    slots: int = 64,
) -> list[Table]:
    """Models in 8 and 4 bits beside themselves in bf16, compiled without weights.

    Args:
        sizes: published sizes.
        num_layers: layers that are compiled, to take less time; all if not given.
        target: chip that they are compiled for.
        slots: tokens that the cache of a decoder has room for.
    """
    device = targets.parse(target).devices()[0]
    tables = []
    for size in sizes:
        if num_layers is not None:
            SIZES[size] = dataclasses.replace(SIZES[size], num_layers=num_layers)
        table = Table(
            f"{size}, decoding of one row on {target}, {slots} slots: MB per token, counted in "
            "the compiled program"
        )
        for kind in KINDS:
            model = published(size, quantize=kind)
            leaves = filter(is_parameter, jax.tree.leaves(model))
            weights = sum(x.size * jnp.dtype(x.dtype).itemsize for x in leaves) / MB
            moved = memory_traffic(hlo.read(compiled_decode(model, device, slots))) / MB
            first = table.rows[0] if table.rows else {}
            table.add(
                **{
                    "matrices": kind or "bf16",
                    "weights, MB": weights,
                    "weights / bf16": weights / first.get("weights, MB", weights),
                    "MB per token": moved,
                    "per token / bf16": moved / first.get("MB per token", moved),
                    "goal": MOST_BYTES.get(kind),
                }
            )
        tables.append(table)
    return tables


def compiled_decode(model: PyTree, device: Any, slots: int) -> str:
    """The program of one step of decoding of one row, which writes its cache in place."""
    mesh = sharding.make_mesh("", [device])

    def placed(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh))

    with sharding.use(mesh):
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


if __name__ == "__main__":
    main(quantized)
