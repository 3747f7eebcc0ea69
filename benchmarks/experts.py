"""Experts: FLOPs of a layer over the useful ones, and bytes of both dispatches, by compiling alone.

python -m benchmarks.experts

compiles the mixture of experts of one layer of Qwen3-30B-A3B and Mixtral 8x7B in bf16, forward and
backward, for a TPU (`pip install 'zoo[plan]'`; no TPU is needed): on one chip by the kernel and by
`jax.lax.ragged_dot`, and over an expert axis by each dispatch.
"""

from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.harness import Table, in_process, main
from zoo import sharding
from zoo.nn import grouped_products
from zoo.nn.parameters import unshard
from zoo.nn.stateful import cast
from zoo.planning import flops, hlo, targets
from zoo.planning.collectives import bytes_by_kind, collectives
from zoo.transformer.config import Config
from zoo.transformer.dispatch import Dispatch
from zoo.transformer.moe import MoE
from zoo.transformer.part_configs import ExpertsConfig

SEQ = 4096

# Passes of a layer's rows over the network. The maths needs four: tokens to the experts and results
# back, then the results' gradients to the experts and the tokens' gradients back.
NEEDED = 4
# What the programs add by choice. all_to_all adds none where all rows go at once, which the counts
# take them to do. all_reduce would need none; of a layer by itself the compiler makes its two sums
# all-reduces, each of two passes.
ADDED = {"all_reduce": 2, "all_to_all": 0}

# The width, the width of an expert, the experts, and a token's choices.
LAYERS = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "Mixtral 8x7B": (4096, 14_336, 8, 2)}


def experts(
    chip: str = "v5p:1x1x1",
    slice: str = "v5p:2x2x2",
    parts: tuple[int, ...] = (8,),
    rows: int = 4,
    exchanged_rows: int = 1,
) -> list[Table]:
    """Compile experts, each in a process of its own.

    Args:
        chip: TPU of the products.
        slice: TPUs of the dispatches.
        parts: devices of the expert axis.
        rows: rows of 4,096 tokens on a device.
        exchanged_rows: the same for the dispatches.
    """
    return [products(chip, rows), dispatches(slice, parts, exchanged_rows)]


def products(chip: str, rows: int) -> Table:
    """Compiled over useful FLOPs on one chip."""
    found = Table(f"{chip}: {rows * SEQ:,} tokens, forward and backward")
    for name in LAYERS:
        for kernel in (True, False):
            made = in_process(compiled, chip, name, "", "auto", rows, kernel)
            useful = useful_flops(name, rows * SEQ)
            found.add(
                **{
                    "layer": name,
                    "products": "megablox" if kernel else "ragged_dot",
                    "useful TFLOP": useful / 1e12,
                    "compiled TFLOP": made["flops"] / 1e12,
                    "over useful": made["flops"] / useful,
                    "with shared tiles": made["executed"] / useful if kernel else None,
                    "temporaries GiB": made["temporaries"] / 2**30,
                }
            )
    found.notes.append(
        "compiled: the compiler's own count, by estimates of kernels; with shared tiles: what the "
        "kernels execute over useful, if every group ends inside of a tile"
    )
    return found


def dispatches(target: str, parts: tuple[int, ...], rows: int) -> Table:
    """Bytes that a device sends, beside the closed forms."""
    found = Table(f"{target}: bytes that a device sends, forward and backward, even load")
    cases = [(name, size, kind) for name in LAYERS for size in parts for kind in ADDED]
    for name, size, dispatch in cases:
        width, _, _, choices = LAYERS[name]
        made = in_process(compiled, target, name, f"expert={size}", dispatch, rows, True)
        tokens = 2.0 * rows * SEQ * width  # bytes of a device's own
        one = tokens * (size if dispatch == "all_reduce" else choices) * (size - 1) / size
        closed = (NEEDED + ADDED[dispatch]) * one
        passes = ", ".join(f"{kind} {sent / one:.2f}" for kind, sent in made["kinds"].items())
        found.add(
            **{
                "layer": name,
                "expert axis": size,
                "dispatch": dispatch,
                "sent MB": made["sent"] / 1e6,
                "closed form MB": closed / 1e6,
                "ratio": made["sent"] / closed,
                "needed by the maths MB": NEEDED * one / 1e6,
                "passes by kind": passes,
                "temporaries GiB": made["temporaries"] / 2**30,
            }
        )
    found.notes.append(
        "One pass is 2 bytes · tokens · width · (t - 1) of all_reduce, and · choices · (t - 1) / t "
        "of all_to_all, with t devices; break-even at t = choices. Four are needed"
    )
    return found


def useful_flops(name: str, tokens: int) -> float:
    """Two per multiply and add, thrice for the gradients, of the experts chosen and the router."""
    width, hidden, experts, choices = LAYERS[name]
    return 3 * 2.0 * tokens * width * (3 * choices * hidden + experts)


def compiled(
    target: str, name: str, spec: str, dispatch: Dispatch, rows: int, kernel: bool
) -> dict[str, Any]:
    """Compile one; what the compiler says of it."""
    jax.config.update("jax_platforms", "cpu")
    width, hidden, experts, choices = LAYERS[name]

    def make(key: Any) -> MoE:
        of_experts = ExpertsConfig(num_experts=experts, per_token=choices, dispatch=dispatch)
        config = Config(1, d_model=width, num_layers=1, d_ff=hidden, experts=of_experts)
        return cast(MoE(config, key=key), jnp.bfloat16)

    skeleton = eqx.filter_eval_shape(make, jax.random.key(0))
    mesh = sharding.make_mesh(spec, targets.parse(target).devices())
    product = grouped_products.grouped_product if kernel else jax.lax.ragged_dot
    with sharding.use(mesh), mock.patch("zoo.transformer.moe.grouped_product", product):
        batch = sharding.batch_sharding(mesh, 3)
        shape = (rows * mesh.shape["expert"], SEQ, width)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=batch)
        leaves, static = eqx.partition(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        leaves = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            leaves,
            sharding.shardings(leaves, mesh),
        )
        traced = jax.jit(step(static)).trace(leaves, x, x)
        program = traced.lower().compile()
    sent = collectives(hlo.read(program.as_text()))
    large = bytes_by_kind([each for each in sent if each.bytes > 2**20])
    executed = sum(done for done, _ in flops.of_kernels(traced.jaxpr).values())
    return {
        "flops": program.cost_analysis()["flops"],
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "executed": executed / mesh.size,
        "sent": sum(large.values()),
        "kinds": large,
    }


def step(static: Any) -> Any:
    """The output and the gradients of a layer."""

    def run(leaves: Any, x: Any, g: Any) -> Any:
        def forward(leaves: Any, x: Any) -> Any:
            return unshard(eqx.combine(leaves, static))(x, jnp.ones((1, SEQ), bool))[0]

        out, backward = jax.vjp(forward, leaves, x)
        return out, backward(g)

    return run


if __name__ == "__main__":
    main(experts)
