import dataclasses
import functools
import math
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import flash, make_transformer, small_config
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from zoo import losses, optimizers, sharding, transformer
from zoo.nn import remat
from zoo.nn.attention import attention, masks
from zoo.nn.attention.masks import Mask
from zoo.nn.attention.splash import Blocks
from zoo.planning import (
    collectives,
    command,
    costs,
    flops,
    hlo,
    planner,
    report,
    roofline,
    search,
    sizes,
    targets,
)
from zoo.planning import job as planning_job
from zoo.planning.job import CompilerError, Job, Memory, make_estimate, wanted_bytes
from zoo.quantization.matrix import quantize
from zoo.sharding.axes import ShardingError, is_parameter
from zoo.training import chips, compiled
from zoo.training.state import Blueprint, init_state
from zoo.training.step import make_train_step
from zoo.transformer.dispatch import RARELY

TEXTS = Path(__file__).parents[1] / "golden" / "hlo"
MiB = 2**20
KEY = jax.random.key(0)


def job(rows=8, seq=16, mesh="fsdp=8", **changes):
    sizes = small_config(**changes.pop("model", {}))
    training = zoo.Training(
        make_model=lambda key: transformer.Transformer(sizes, key=key),
        optimizer=optimizers.make_optimizer(optimizers.Config(), 100),
        loss_fn=losses.next_token,
        data=command.TokenRows(rows, seq),
        evaluate=lambda model, whole: {},
        flops_per_token=transformer.num_flops_per_token(sizes, seq),
        remat=changes.get("remat"),
        remat_flag="--remat",
    )
    return Job(**{"training": training, "mesh": mesh, "precision": "fp32", **changes})


@functools.cache
def small_estimate():
    """One plan for the tests that read it alone."""
    return make_estimate(job(), targets.parse("cpu:8"))


# The reader of compiled programs.


def test_async_gpu_collectives_are_counted():
    # 3 turns, each gathers f32[4,256] of f32[1,256] (starts once), and reduces f32[4,256] in parts.
    program = hlo.read((TEXTS / "gpu.txt").read_text())
    found = collectives.collectives(program)
    assert [(c.kind, c.times, c.group_size, c.bytes) for c in found] == [
        ("all-reduce", 1, 2, 2 * 4 * 10 / 2),
        ("all-gather", 3, 4, 3 * 1024),
        ("reduce-scatter", 3, 4, 4096 * 3 / 4),
    ]
    assert hlo.unknown_loops(program) == []


def test_fused_tpu_collectives_are_counted():
    program = hlo.read((TEXTS / "tpu.txt").read_text())
    found = collectives.collectives(program)
    # The gather's channel is in three fusions of a body that runs 5 times, and is one collective;
    # the ring's counter goes to 8 by a step of 2 that the loop is given: 4 turns in each of the 5.
    assert [(c.kind, c.times, c.group_size, c.bytes) for c in found] == [
        ("all-gather", 5, 16, 15 * 2 * 256),
        ("collective-permute", 5 * 4, 16, 2 * 256),
    ]


def test_collectives_of_one_channel_count_each():
    """As `shard_map` gives all of its own the first."""
    text = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %x = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %r = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
}
"""
    found = collectives.collectives(hlo.read(text))
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 2 * 64 * 3 / 4)] * 2
    chip = chips.CHIPS["v5e"]
    where = collectives.Topology(chip, (4, 1), (0,) * 4, tuple((x, 0) for x in range(4)))
    seconds = [where.transfer(each).seconds for each in found]
    assert roofline.times(hlo.read(text), where, {}).links == pytest.approx(sum(seconds))


def test_gradients_that_are_scattered_in_fusions_of_one_channel_count_each():
    """As a TPU's compiler makes them of the sums of a `shard_map`."""
    fused = """%scatter.N (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  %sum.N = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  %at = s32[] constant(0)
  ROOT %cut.N = f32[4]{0} dynamic-slice(%sum.N, %at), dynamic_slice_sizes={4}
}

"""
    text = """ENTRY %main (p: f32[16]) -> (f32[4], f32[4]) {
  %p = f32[16]{0} parameter(0)
  %y = f32[4]{0} fusion(%p), kind=kCustom, calls=%scatter.1
  %z = f32[4]{0} fusion(%p), kind=kCustom, calls=%scatter.2
  ROOT %r = (f32[4]{0}, f32[4]{0}) tuple(%y, %z)
}
"""
    both = "".join(fused.replace(".N", f".{number}") for number in (1, 2))
    found = collectives.collectives(hlo.read(f"HloModule m\n\n{both}{text}"))
    assert [(c.kind, c.bytes) for c in found] == [("reduce-scatter", 64 * 3 / 4)] * 2


def test_unknown_loops_count_once_and_a_plan_refuses_them():
    text = (TEXTS / "gpu.txt").read_text().replace("known_trip_count", "no_count")
    program = hlo.read(text.replace("constant(3)", "parameter(1)"))
    assert hlo.unknown_loops(program) == ["loop"]
    assert {c.times for c in collectives.collectives(program)} == {1}
    with pytest.raises(hlo.HLOError, match=r"\['loop'\].*jax.lax.scan"):
        planning_job._traffic(program, {})


def test_lines_after_a_kernel_are_read():
    text = """HloModule m

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  %k = f32[16]{0} custom-call(%p), custom_call_target="tpu_custom_call", attributes={metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %r = f32[16]{0} negate(%k)
}
"""
    program = hlo.read(text)
    assert program.entry.root.name == "r"
    assert program.entry.instructions["k"].op_name == "jit(f)/kernel"
    assert costs.memory_traffic(program) == 2 * 64  # the kernel's is counted by its blocks


def test_text_without_program_is_refused():
    with pytest.raises(hlo.HLOError, match="no ENTRY computation"):
        hlo.read("hello")


@pytest.mark.parametrize(
    ("type_", "size", "in_memory"),
    [
        ("f32[]", 4, 4),
        ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12, 12),
        ("(f32[4]{0}, pred[8]{0:T(256)S(1)}, s4[6])", 16 + 8 + 3, 16 + 3),
        ("token[]", 0, 0),
        ("f8e4m3fn[16]", 16, 16),
        ("c64[2]", 16, 16),
    ],
)
def test_bytes_of_hlo_types(type_, size, in_memory):
    assert hlo.num_bytes(type_) == size
    assert hlo.num_bytes(type_, in_main_memory=True) == in_memory


LAYERS = 5


def _scanned(mesh):
    """The compiled gradient of a scan over layers that are stored in 8 parts."""
    stored, whole = NamedSharding(mesh, P(None, "fsdp", None)), NamedSharding(mesh, P(None, None))

    def loss(ws, x):
        def body(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(body, x, ws)[0].sum()

    ws = jax.ShapeDtypeStruct((LAYERS, 64, 64), jnp.float32, sharding=stored)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))
    return jax.jit(loss).lower(ws, x).compile()


def test_a_scan_gathers_and_reads_each_layer_once():
    text = _scanned(zoo.make_mesh("fsdp=8")).as_text()
    gathers = [c for c in collectives.collectives(hlo.read(text)) if c.kind == "all-gather"]
    assert [(c.times, c.bytes) for c in gathers] == [(LAYERS, 64 * 64 * 4 * 7 / 8)]
    stack = LAYERS * 64 * 64 * 4 / 8
    moved = costs.memory_traffic(hlo.read(text))
    # Parts once, whole layers written and read: of the order of 2·8 + 1 stacks, not 5 times that.
    assert 2 * 8 * stack < moved < 4 * 8 * stack


def test_what_is_read_of_a_table_and_what_is_moved_is_counted():
    text = """HloModule m

%other_layout (p: s8[100,64]) -> s8[100,64] {
  %p = s8[100,64]{1,0:T(32,128)} parameter(0)
  ROOT %copy = s8[100,64]{1,0:T(8,128)} copy(%p)
}

%fused (p: s8[100,64], i: s32[2]) -> f32[2,64] {
  %p = s8[100,64]{1,0:T(32,128)} parameter(0)
  %i = s32[2]{0} parameter(1)
  %same = s8[100,64]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%other_layout
  %wide = f32[100,64]{1,0} convert(%same)
  ROOT %rows = f32[2,64]{1,0} gather(%wide, %i), offset_dims={1}
}

ENTRY %main (t: s8[100,64], i: s32[2], w: bf16[32,8]) -> f32[2,64] {
  %t = s8[100,64]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %w = bf16[32,8]{1,0} parameter(2)
  %few = s8[2,64]{1,0} gather(%t, %i), offset_dims={1}
  %copy-start = (bf16[32,8]{1,0:S(1)}, bf16[32,8]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[32,8]{1,0:S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[32,8]{1,0}), bf16[4,8]{1,0}, s32[]{:S(2)}) slice-start(%w), slice={[0:4]}
  %slice-done = bf16[4,8]{1,0} slice-done(%slice-start)
  ROOT %rows = f32[2,64]{1,0} fusion(%t, %i), kind=kLoop, calls=%fused
}
"""
    gather, copy, part = 2 * 2 * 64 + 2 * 4, 2 * 32 * 8, 2 * 2 * 4 * 8
    fusion = 2 * 64 + 2 * 4 + 4 * 2 * 64
    assert costs.memory_traffic(hlo.read(text)) == gather + copy + part + fusion


def test_a_fusion_in_a_fusion_reads_what_it_slices():
    text = """HloModule m

%inner (q: f32[10,64], j: s32[]) -> f32[1,64] {
  %q = f32[10,64] parameter(0)
  %j = s32[] parameter(1)
  ROOT %slice = f32[1,64] dynamic-slice(%q, %j, %j), dynamic_slice_sizes={1,64}
}

%fused (p: f32[10,64], i: s32[]) -> f32[1,64] {
  %p = f32[10,64] parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,64] fusion(%p, %i), kind=kLoop, calls=%inner
  ROOT %twice = f32[1,64] add(%one, %one)
}

ENTRY %main (t: f32[10,64], k: s32[]) -> f32[1,64] {
  %t = f32[10,64] parameter(0)
  %k = s32[] parameter(1)
  ROOT %r = f32[1,64] fusion(%t, %k), kind=kLoop, calls=%fused
}
"""
    assert costs.memory_traffic(hlo.read(text)) == 64 * 4 + 4 + 64 * 4


def test_fsdp_gathers_forward_and_backward():
    estimate = make_estimate(job(model={"num_layers": 6, "remat": "full"}), targets.parse("cpu:8"))
    times = [c.times for c in estimate.collectives if c.kind == "all-gather" and c.bytes > 64]
    assert times.count(6) == 2 * 9  # each parameter of a layer


# What a plan says.


def test_memory_estimate_matches_the_compiler():
    estimate = small_estimate()
    wanted = estimate.job
    mesh = zoo.make_mesh("fsdp=8")
    state = init_state(
        wanted.training.make_model, wanted.training.optimizer, key=jax.random.key(0), mesh=mesh
    )
    step = make_train_step(
        wanted.training.loss_fn, wanted.training.optimizer, mesh=mesh, precision="fp32"
    )
    batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.batch.items()}
    stats = step.lower(state, batch).compiled.memory_analysis()  # of arrays, as a run does
    assert estimate.memory.temporaries == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    arguments = stats.argument_size_in_bytes
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    program = stats.generated_code_size_in_bytes
    total = arguments + outputs + stats.temp_size_in_bytes + program
    assert estimate.memory.total == pytest.approx(total, rel=0.01)
    held = [
        sum(s.data.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
            for s in x.addressable_shards if s.device == mesh.devices.flat[0])
        for tree in (state.model, state.opt_state)
    ]  # fmt: skip
    assert [estimate.memory.parameters, estimate.memory.optimizer] == held
    assert estimate.memory.batch == 3 * 16 * 4
    assert estimate.memory.fits


def traced_flops(wanted, policy=None):
    """FLOPs without a compile."""
    with remat.overridden(policy):
        state = wanted.training.blueprint(jax.random.key(0), mesh=None).skeleton
        step = wanted.training.step(mesh=None, precision="fp32")
        return flops.count(step.trace(state, wanted.batch).jaxpr)


def test_step_flops_match_the_formula():
    sizes = {"num_layers": 3, "attention.kernel": "xla", "causal": False}
    wanted, config = job(model=sizes), small_config(**sizes)
    plain, again = traced_flops(wanted), traced_flops(wanted, "full")
    assert plain == pytest.approx(wanted.training.flops_per_token * wanted.tokens)
    head = 6 * config.d_model * config.vocab_size * wanted.tokens
    # Forward again: a third more, but for the head, and the last product of a layer.
    last = 2 * config.d_model * config.hidden_size * config.num_layers * wanted.tokens
    assert again == pytest.approx((plain - head) * 4 / 3 - last + head)


def test_flops_count_loops_and_branches():
    def f(x):
        x = jax.lax.fori_loop(0, 7, lambda _, x: x @ x, x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops.count(jax.make_jaxpr(f)(jnp.ones((4, 4)))) == (7 + 2) * 2 * 4**3


def test_a_branch_that_is_seldom_taken_is_left_out():
    """Of the FLOPs that are traced, and of the bytes and the time of the compiled program."""

    def f(x):
        def times(turns, x):
            return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x @ x), x).sum()

        def seldom(x):
            with jax.named_scope(RARELY):
                return times(50, x)

        return jax.lax.cond(x[0, 0] > 0, functools.partial(times, 2), seldom, x)

    x = jnp.ones((64, 64))
    assert flops.count(jax.make_jaxpr(jax.grad(f))(x)) == 2 * 3 * 2 * 64**3
    program = hlo.read(jax.jit(f).lower(x).compile().as_text())
    assert "conditional" in {x.opcode for x in program.entry.instructions.values()}
    assert costs.memory_traffic(program) < 30 * x.nbytes


def test_products_of_a_dtype_are_counted():
    def f(x, codes):
        y = jax.lax.dot(codes, codes, preferred_element_type=jnp.int32)
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x), y

    jaxpr = jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((5, 5), jnp.int8))
    assert flops.count(jaxpr) == 2 * (3 * 4**3 + 5**3)
    assert flops.count(jaxpr, of=jnp.int8) == 2 * 5**3


def test_products_of_int8_have_a_rate_of_their_own():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("h100:8"))
    some = dataclasses.replace(estimate, int8_flops=estimate.flops / 4)
    rest = estimate.flops / 8 / chips.CHIPS["h100"].flops * 3 / 4
    int8 = estimate.flops / 8 / 1979e12 / 4
    assert roofline.roofline(some).compute == pytest.approx(rest + int8)


def test_a_report_says_how_products_of_int8_count():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("h100:8"))
    remarks = {0.25: "25%, at 1,979 TOP/s; MFU is by the peak of bf16", 0: "counted as that"}
    for share, remark in remarks.items():
        in_int8 = dataclasses.replace(
            estimate, job=job(precision="int8"), int8_flops=share * estimate.flops
        )
        rows = {name: text for name, _, text in report.sections(in_int8)["compute per step"]}
        assert rows["of int8"].endswith(remark)
    assert "of int8" not in dict(x[:2] for x in report.sections(estimate)["compute per step"])


def test_a_loop_of_unknown_length_is_refused():
    f = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x)
    with pytest.raises(ValueError, match=r"a loop with products.*jax\.lax\.scan"):
        flops.count(jax.make_jaxpr(f)(jnp.ones((4, 4))))
    counted = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + x, x)
    assert flops.count(jax.make_jaxpr(counted)(jnp.ones((4, 4)))) == 0


def kernel_call(estimate=None):
    """A product by blocks: those of the left are kept along the second axis of the grid."""

    def kernel(x_ref, y_ref, z_ref):
        z_ref[...] = x_ref[...] @ y_ref[...]

    call = pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((8, 32), lambda i, j: (i, 0)),
            pl.BlockSpec((32, 16), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((32, 32), jnp.float32),
        cost_estimate=estimate,
    )
    return jax.make_jaxpr(call)(jnp.ones((32, 32)), jnp.ones((32, 32)))


def moved(jaxpr):
    return sum(size for _, size in flops.of_kernels(jaxpr).values())


def test_kernels_count_by_their_grid_or_their_estimate():
    assert flops.count(kernel_call()) == 2 * 32**3
    assert moved(kernel_call()) == 4 * (4 * 8 * 32 + 8 * 32 * 16 + 8 * 8 * 16)
    estimated = kernel_call(pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=9))
    assert (flops.count(estimated), moved(estimated)) == (7, 9)


def test_kernels_over_groups_move_a_matrix_of_a_group_once():
    """Three groups of 1,024 rows: tiles of 128 rows, 512 inputs and 256 of 512 outputs."""
    rows, inner, outer, groups, tile, half = 1024, 512, 512, 3, 128, 256
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((groups, inner, outer), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((rows, outer), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    tiling, steps = (tile, inner, half), rows // tile + groups - 1

    def counted(product, *operands, share=""):
        def call(*args):
            with jax.numpy_dtype_promotion("standard"), jax.named_scope(share or "all"):
                return product(*args, jnp.bfloat16, tiling)

        jaxpr = jax.make_jaxpr(call)(*operands, sizes).jaxpr
        ((name, (executed, moved)),) = flops.of_kernels(jaxpr).items()
        assert name == product.__name__  # as the compiled program has it
        return flops.count(jaxpr), executed, moved / 2

    product = 2 * rows * inner * outer
    assert counted(gmm, x, w) == (
        product,
        product * steps * tile / rows,
        2 * rows * inner + groups * inner * outer + rows * outer,
    )
    # The rows go with each of two halves of the outputs, the gradients with the inputs once.
    assert counted(tgmm, jax.ShapeDtypeStruct((inner, rows), jnp.bfloat16), g) == (
        product,
        product * steps * tile / rows,
        2 * rows * inner + rows * outer + groups * inner * outer,
    )
    # With parts of the inputs, nothing stays from one step to the next but the outputs.
    tiling = (tile, half, outer)
    assert counted(gmm, x, w)[2] == (steps * tile * inner + steps * inner * outer + rows * outer)
    # Of rows of which half are for other devices' groups, half of the tiles.
    tiling = (tile, inner, half)
    assert counted(gmm, x, w, share="runs_1_of_2_steps") == (
        product / 2,
        product / 2 * steps * tile / rows,
        (2 * inner + outer) * tile * steps / 2 + groups * inner * outer,
    )


def test_a_kernel_without_a_table_of_its_steps_is_refused():
    def call(x, steps):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))

        def copy(x_ref, y_ref):
            y_ref[...] = x_ref[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            copy, grid=(steps,), in_specs=[spec], out_specs=spec, out_shape=shape
        )(x)

    jaxpr = jax.make_jaxpr(call)(jnp.ones((32, 128)), 4).jaxpr
    with pytest.raises(ValueError, match=r"copy.*its grid is known only as it runs"):
        moved(jaxpr)


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=4"])
@pytest.mark.parametrize("mask", [Mask(True, None), Mask(True, 600), Mask(False, None)])
def test_flash_attention_counts_the_blocks_that_it_sees(mask, mesh, monkeypatch):
    monkeypatch.setattr(masks, "CPU_CHUNK", 512)
    q = jax.ShapeDtypeStruct((2, 2048, 8, 128), jnp.float32)

    def counted(attend):
        total = lambda *qkv: attend(*qkv).sum()
        return flops.count(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q))

    options = {"causal": mask.causal, "window": mask.window, "scale": 1.0}
    own = counted(functools.partial(attention, **options, implementation="chunked"))
    with sharding.use(sharding.make_mesh(mesh, jax.devices()[: 8 if mesh else 1])):
        kernel = counted(flash(mask, blocks=Blocks(512, 512, 512)))
        fused = counted(flash(mask, blocks=Blocks(512, 512, 512), fused=True))
    # Of the same chunks; its two kernels of the backward pass both compute the logits.
    output_times_gradient = 2 * math.prod(q.shape)
    assert kernel == own * 9 / 7 + output_times_gradient
    if mask.window is None:  # else its steps over blocks which nothing sees count too
        assert fused == own + output_times_gradient


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=4"])
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_remat_runs_a_flash_kernel_forward_once(policy, mesh):
    q = jax.ShapeDtypeStruct((2, 256, 8, 128), jnp.bfloat16)
    attend = flash(Mask(True, None), blocks=BLOCKS)

    def counted(policy):
        call = remat.checkpoint(attend, policy)
        total = lambda *qkv: call(*qkv).astype(jnp.float32).sum()
        traced = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, q, q)
        return flops.count(traced), moved(traced)

    with sharding.use(sharding.make_mesh(mesh, jax.devices()[: 8 if mesh else 1])):
        assert counted(policy) == counted("none")
        assert counted("none")[0] > 0


BLOCKS = Blocks(128, 128, 128)
EXPERTS = {"attention.kernel": "xla", "causal": False, "mlp": "swiglu", "experts.num_experts": 4}


def test_products_of_experts_are_counted_on_any_mesh():
    wanted = job(model=EXPERTS)
    found = traced_flops(wanted)
    assert found == pytest.approx(wanted.training.flops_per_token * wanted.tokens)
    done = jax.jit(lambda x: x).lower(1.0).compile()  # in place of a step's program
    sharded = dataclasses.replace(wanted, mesh="fsdp=2,tensor=4")
    estimate = make_estimate(sharded, targets.parse("cpu:8"), compiled=done)
    assert estimate.flops == found


@pytest.mark.parametrize("model", [{"attention.kernel": "xla", "causal": False}, EXPERTS])
def test_useful_flops_of_adapters_leave_out_gradients_of_the_base(model):
    sizes, target = small_config(num_layers=3, **model), targets.parse("cpu:8")
    if (
        "experts.num_experts" in model
    ):  # whose adapters are merged, a product that the maths does not need
        only = {"lora": zoo.lora.Config(rank=2, targets=("blocks.attention.*",))}
    else:
        only = {"lora": zoo.lora.Config(rank=2)}
    config = command.Config(model="", target="", method="lora", seq_len=16, batch_size=8, **only)
    skeleton = eqx.filter_eval_shape(make_transformer(num_layers=3, **model), KEY)
    planned_job = command.make_job(config, skeleton, target)
    useful = planned_job.training.flops_per_token
    assert traced_flops(planned_job) == pytest.approx(useful * 8 * 16)
    assert useful < 0.85 * transformer.num_flops_per_token(sizes, 16)


def test_a_token_uses_the_adapters_of_its_own_experts():
    config = small_config(mlp="swiglu", **{"experts.num_experts": 4, "experts.per_token": 2})

    def per_token(*targets):
        adapters = zoo.lora.Config(rank=2, targets=("blocks.attention.*", *targets))
        make = lambda key: zoo.lora.adapt(
            transformer.Transformer(config, key=key), adapters, key=key
        )
        return flops.per_unit(eqx.filter_eval_shape(make, KEY), 16)

    one = 2 * (config.d_model + config.hidden_size)
    assert per_token("blocks.mlp.w_up") - per_token() == 6 * config.num_layers * 2 * one
    assert flops.per_unit(zoo.mlp.MLP(zoo.mlp.Config(in_size=4, out_size=2), key=KEY), 16) is None


def test_roofline_matches_hand_calculation():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("h100:8"))
    roof = roofline.roofline(estimate)
    chip = chips.CHIPS["h100"]
    sent = sum(c.total for c in estimate.collectives)
    assert roof.compute == estimate.flops / 8 / chip.flops
    assert roof.memory == estimate.traffic / chip.bandwidth
    assert roof.interconnect == pytest.approx(sent / chip.interconnect, rel=1e-9)
    assert roof.seconds == max(roof.compute, roof.memory, roof.interconnect)
    utilization = estimate.model_flops / roof.seconds / 8 / chip.flops
    assert estimate.utilization(roof.seconds) == pytest.approx(utilization)
    assert getattr(roof, roof.bound) == roof.seconds
    assert any("estimate" in line for line in report.caveats(estimate))


def test_a_report_says_which_bound_is_which():
    estimate = dataclasses.replace(small_estimate(), target=targets.parse("2xh100:4"))
    rows = report.sections(estimate)
    overlapped, by_op = (
        {name: (amount, remark) for name, amount, remark in rows[f"bound {title}"]}
        for title in (
            "of full overlap, at the chip's peaks",
            "by instruction, overlapped as compiled",
        )
    )
    assert "all else hidden" in overlapped["step, at least"][1]
    assert "no overlap but the compiler's" in by_op["step, at least"][1]
    roof = roofline.roofline(estimate)
    assert roof.by_op.seconds > roof.seconds > 0
    assert by_op["step, at least"][0] != overlapped["step, at least"][0]
    assert "step, by published runs" not in by_op  # which are of TPUs
    assert estimate.utilization(roof.by_op.seconds) < estimate.utilization(roof.seconds)
    assert "8 × h100 in 2 machines (fsdp=8)" in report.title(estimate)
    sent = {name: amount for name, amount, _ in rows["bytes sent per device and step"]}
    # Of all gathers of 7 parts one is fetched from the other machine.
    assert sent["all"] != sent["of it, within a slice"]
    assert roof.interconnect > sum(c.total for c in estimate.collectives) / 7 / 50e9 * 0.99


def test_the_range_of_published_runs_is_that_of_the_calibration():
    [page] = (QUOTED.parents[2] / "benchmarks" / "results").glob("*-calibration.md")
    rows = re.findall(
        r"\| (dense|experts) \|.*\]\((https:[^)]*)\) \| \*\*([\d.]+)\*\* \|", page.read_text()
    )
    for kind, found in (("dense", "dense models"), ("experts", "models with experts")):
        ratios = [float(ratio) for name, _, ratio in rows if name == kind]
        assert (min(ratios), max(ratios), len(ratios)) == report.PUBLISHED[found]


def test_a_cpu_has_no_roofline():
    estimate = small_estimate()
    assert roofline.roofline(estimate) is None
    assert any("No peak" in line for line in report.caveats(estimate))


def test_tables_in_pipes_do_not_wrap(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    report.show(small_estimate())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert report.title(small_estimate()) in lines
    assert report.CONVENTION in lines


def test_estimates_allocate_no_arrays():
    small_estimate.cache_clear()
    before = {id(x) for x in jax.live_arrays()}
    small_estimate()
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(x.nbytes for x in new) < 4096 < small_estimate().memory.parameters


# What fits.


def limited(estimate, limit):
    return dataclasses.replace(
        estimate, memory=dataclasses.replace(estimate.memory, limit=float(limit))
    )


def test_suggestions_go_from_cheap_to_expensive(monkeypatch):
    wanted = job(rows=32, remat="none", mesh="data=8")
    estimate = dataclasses.replace(small_estimate(), job=wanted)
    tried = []

    def make(changed, target):
        tried.append(search.describe(wanted, changed))
        return limited(estimate, 0)

    # The state alone of data=8 is more than this: those that keep it are not compiled at all.
    limit = (estimate.memory.parameters + estimate.memory.optimizer) * 0.9
    monkeypatch.setattr(search, "make_estimate", make)
    found = search.suggest(limited(estimate, limit))
    assert found is None
    assert tried == [
        "--remat full --mesh fsdp=8",
        "--remat full --mesh fsdp=8 --accumulate 2",
        "--remat full --mesh fsdp=8 --accumulate 4",
        "--remat full --mesh fsdp=4,tensor=2 --sequence-parallel --accumulate 8",
        "--remat full --mesh fsdp=2,tensor=4 --sequence-parallel --accumulate 16",
    ]


def test_suggestions_for_slices_leave_only_gradients_between_them():
    target = targets.parse("2xv5e:4x4")
    found = list(search.changes(job(rows=64, mesh="data=32"), target))
    meshes = [changed.mesh for changed in found if changed.mesh != "data=32"]
    assert {"data=2,fsdp=16", "data=2,fsdp=8,tensor=2"} <= set(meshes)
    for mesh in meshes:
        assert sharding.abstract_mesh(mesh, 32).shape["data"] == 2


def test_suggestions_stop_after_a_few(capsys, monkeypatch):
    wanted = job(rows=2**12, mesh="data=8")
    estimate = dataclasses.replace(small_estimate(), job=wanted)
    make = lambda changed, target: limited(estimate, 0)
    monkeypatch.setattr(search, "make_estimate", make)
    assert search.suggest(limited(estimate, 1e12)) is None
    said = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(": compiling …") for line in said) == 6
    assert said[-1] == "Nothing that was tried fits: take more devices, or larger ones."


def test_plans_that_do_not_fit_look_for_lighter_trainings(monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    target = targets.parse("cpu:8")

    def flags(**changes):
        config = command.Config(model="small", target="cpu:8", **changes)
        return [flags for flags, _ in command.lighter(config, None, target)]

    all_of_them = ["--method lora", "--method lora --base int8", "--method lora --base int4"]
    assert flags() == all_of_them
    assert flags(method="lora", base="int8") == all_of_them[2:]
    assert flags(method="lora", base="nf4") == []


def test_other_trainings_are_tried_last(monkeypatch):
    wanted, tried = job(rows=16, mesh="data=8"), []
    estimate = dataclasses.replace(small_estimate(), job=wanted)

    def make(changed, target):
        tried.append(changed)
        return limited(estimate, 1e12 if changed is other else 0)

    other = job()
    big = dataclasses.replace(estimate.memory, total=2 * estimate.memory.total)
    monkeypatch.setattr(search, "make_estimate", make)
    too_large = limited(dataclasses.replace(estimate, memory=big), 1e12)
    found = search.suggest(too_large, [("--method lora", other)])
    assert found == "--method lora"
    assert len(tried) > 2
    assert tried[-1] is other


def test_out_of_memory_messages_are_parsed():
    gigabytes = {
        "Used 25.10G of 15.75G hbm. Exceeded hbm capacity by 9.35G.": 25.1 * 2**30,
        "Out of memory while trying to allocate 3.50GiB.": 3.5 * 2**30,
        "Out of memory allocating 123456 bytes.": 123456,
        "required for HLO temporaries (17.72G) exceeds available HBM (15.75G).": 17.72 * 2**30,
        "no more": None,
    }
    for message, size in gigabytes.items():
        assert wanted_bytes(message) == size
    memory = Memory(
        parameters=1.0,
        optimizer=1.0,
        batch=1.0,
        temporaries=None,
        program=0.0,
        total=9.0,
        limit=99.0,
        is_refused=True,
    )
    assert not memory.fits


# Targets, chips and sizes.


@pytest.mark.parametrize("text", ["v9:2x2", "v5e", "v5e:16", "h200:2x2", "cpu:0", "", "8", "24:1"])
def test_unknown_targets_list_known_ones(text):
    with pytest.raises(
        ValueError, match=r"v5e:4x4.*h200:8 or cpu:8.*24GiB:1.*v4, v5e, v5p, v6e, tpu7x, a10,"
    ):
        targets.parse(text)


def test_gpus_are_named_by_card_or_by_memory():
    """The sizes are those of `nvidia-smi`, in MiB."""
    sizes = {"rtx3090": 24_576, "rtx4090": 24_564, "rtx5090": 32_607, "l4": 23_034, "l40s": 46_068,
             "a10": 23_028, "a100-40": 40_960, "a100-80": 81_920, "h100": 81_559, "h200": 143_771,
             "b200": 183_359, "mi300x": 196_608, "24GiB": 24_576, "a100": 81_920}  # fmt: skip
    found = {name: targets.parse(f"{name}:1") for name in sizes}
    assert {name: x.chip.memory / 2**20 for name, x in found.items()} == sizes
    assert {x.chip.kind for x in found.values()} == {"gpu"}
    assert (found["24GiB"].chip.name, found["24GiB"].chip.flops) == ("24GiB", None)
    assert targets.parse("2x24gib:4").num_devices == 8


def test_targets_of_several_slices():
    target = targets.parse("2xV5E:4x4")
    assert (target.num_slices, target.shape, target.num_devices) == (2, (4, 4), 32)
    assert targets.parse("2xh100:8").num_devices == targets.parse("h100:16").num_devices == 16
    with pytest.raises(ValueError, match="as 2xv5e:4x4"):
        targets.parse("0xv5e:4x4")


def test_missing_virtual_devices_are_refused():
    target = targets.parse("cpu:512")
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count=512"):
        target.devices()


def test_missing_tpu_compiler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    target = targets.parse("v5e:4x4")
    with pytest.raises(ImportError, match=r"pip install 'zoo\[plan\]'"):
        target.devices()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"),
     ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"), ("NVIDIA A100-SXM4-80GB", "a100-80"),
     ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A10", "a10"), ("NVIDIA L4", "l4"),
     ("NVIDIA L40S", "l40s"), ("NVIDIA GB200", "NVIDIA GB200"),
     ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"),
     ("Some GPU", "Some GPU")],
)  # fmt: skip
def test_devices_map_to_chips(kind, name):
    class Device:
        platform, device_kind = "gpu", kind

        def memory_stats(self):
            return {"bytes_limit": 123}

    chip = targets.of_device(Device(), 1)
    assert (chip.name, chip.memory) == (name, 123)


# Of each model's own files: the numbers of elements in its safetensors.
PARAMETERS = {
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704, "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464, "vit-s16": 22_050_664, "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
}  # fmt: skip


def test_published_sizes_have_published_parameter_counts():
    def count(name):
        leaves = jax.tree.leaves(sizes.published(name))
        return sum(math.prod(x.shape) for x in leaves if is_parameter(x))

    assert {name: count(name) for name in sizes.SIZES} == PARAMETERS


# The command, and the recipes.


def test_the_command_plans_vision_transformers(capsys, monkeypatch):
    small = transformer.VisionConfig(
        image_size=16,
        patch_size=4,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_classes=5,
        kernel="xla",
    )
    monkeypatch.setitem(sizes.SIZES, "small", small)
    config = command.Config(
        model="small", target="cpu:8", batch_size=16, remat="none", precision="fp32"
    )
    command.main(config)
    output = capsys.readouterr().out
    for text in ("8 × cpu (fsdp=8)", "16 examples per step", "temporaries", "fits", "all-gather"):
        assert text in output
    model, target = sizes.published("small"), targets.prepare("cpu:8")
    job = command.make_job(config, model, target)
    estimate = make_estimate(job, target)
    # The first product's inputs, the pictures, have no gradient.
    needed = 16 * (transformer.num_flops_per_image(small) - 2 * 16 * 48 * 32)
    assert estimate.flops == needed
    found = []
    monkeypatch.setattr(
        command, "fastest", lambda these, job, target: (found.extend(these), (estimate, ""))[1]
    )
    gpus = targets.prepare("h100:8")
    command.search(config, model, gpus)
    assert {"tensor" in each.mesh for each in found} == {True, False}
    products = 16 * transformer.num_flops_per_image(small) / (8 * gpus.chip.flops)
    assert [each.compute for each in found] == pytest.approx([products] * len(found))


def test_a_plan_has_one_total_and_a_verdict_against_the_card(capsys, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    config = command.Config(model="small", target="24GiB:1", seq_len=32, method="lora")
    command.main(config)
    memory, _, rest = capsys.readouterr().out.partition("compute per step")
    assert "32 tokens" in memory
    [total] = [line for line in memory.splitlines() if " of " in line]
    assert re.search(r"^  all  .* of 24\.00 GiB, 0%: fits", total)
    assert "peak" not in memory
    assert "no bound on the speed" in rest
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in rest


def test_command_refuses_indivisible_batches(monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    config = command.Config(
        model="small", target="cpu:8", mesh="fsdp=8", accumulate=2, batch_size=24
    )
    with pytest.raises(ValueError, match=r"batch_size=24 .* 16"):
        command.main(config)


@pytest.mark.slow
def test_command_suggests_fitting_settings(capsys, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    small = dataclasses.replace(chips.CHIPS["h100"], memory=4.0 * MiB)
    monkeypatch.setitem(chips.CHIPS, "h100", small)
    command.main(
        command.Config(model="small", target="h100:8", seq_len=64, batch_size=64, remat="none")
    )
    first, second = capsys.readouterr().out.split("This fits: --remat full")
    assert "does not fit" in first
    assert "does not fit" not in second


def test_command_errors_have_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "plan", "llama9", "--target", "v5e:2x2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no published size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_running_out_of_memory_is_explained(capsys, monkeypatch):
    wanted = job(rows=16)
    little = dataclasses.replace(targets.cpu(8), memory=small_estimate().memory.total * 1.2)
    monkeypatch.setattr(targets, "cpu", lambda devices: little)
    monkeypatch.setattr(planner, "make_job", lambda run, training: wanted)
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB."
    run = object.__new__(zoo.Run)
    run.mesh = zoo.make_mesh("fsdp=8")
    reason = planner.explain(run, wanted.training, message, [])
    assert re.search(r"memory .*2.00 GiB; this fits: --accumulate 2", reason)
    assert "does not fit" in capsys.readouterr().out


def test_tracing_refuses_indivisible_rows():
    mesh = zoo.make_mesh("fsdp=4,tensor=2")
    optimizer = optimizers.make_optimizer(optimizers.Config(), 100)
    state = Blueprint(make_transformer(), optimizer, key=jax.random.key(0), mesh=mesh).skeleton
    step = make_train_step(losses.next_token, optimizer, mesh=mesh, precision="fp32")
    with pytest.raises(ValueError, match="has 6 rows"):
        step.trace(state, {"tokens": jax.ShapeDtypeStruct((6, 8), jnp.int32)})


# TPUs.


def test_tpu_slices_are_planned_without_tpus():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    wanted = job(
        rows=8, seq=128, mesh="fsdp=4,tensor=2", precision="bf16",
        model={"d_model": 512, "d_ff": 1024, "num_layers": 3, "attention.head_dim": 128},
    )  # fmt: skip
    estimate = make_estimate(dataclasses.replace(wanted, remat="full"), targets.parse("v5e:2x4"))
    assert estimate.memory.fits
    assert "splash_mha_fwd" in estimate.text
    layer_gathers = [
        c for c in estimate.collectives
        if c.kind == "all-gather" and c.times == 3 and c.group_size == 4 and c.bytes > 10_000
    ]  # fmt: skip
    # Each of a layer's parameters in bf16, forward and backward, half of it with two tensor parts.
    matrices = 512 * 128 * 8 * 4 + 3 * 512 * 1024
    expected_gathers = 2 * 3 * matrices * 2 / 2 * 3 / 4
    assert sum(c.total for c in layer_gathers) == pytest.approx(expected_gathers, rel=0.02)
    # Gradients are reduced to the parts that are stored.
    scattered = [c for c in estimate.collectives if c.kind == "reduce-scatter" and c.times == 3]
    assert sum(c.total for c in scattered) > 0.3 * expected_gathers / 2
    rows = report.sections(estimate)["bound by instruction, overlapped as compiled"]
    seconds, basis = {name: x for name, *x in rows}["step, by published runs"]
    assert seconds.count(" ms") == 2
    least, most = map(float, re.findall(r"[\d.]+", seconds))
    roof = roofline.roofline(estimate)
    assert roof.expected.seconds > roof.by_op.seconds
    low, high, runs = report.PUBLISHED["dense models"]
    expected = [1e3 * ratio * roof.expected.seconds for ratio in (low, high)]
    assert (least, most) == pytest.approx(expected, abs=1e-3)
    assert f"{low} to {high} of that: {runs} runs of dense models" in basis
    experts = dataclasses.replace(estimate, kernels={"gmm": (1.0, 1.0)})
    assert report._expected(experts, roof)[2].endswith("runs of models with experts")
    # A tpu7x has collectives on another core; they are counted there too.
    halves = make_estimate(dataclasses.replace(wanted, remat="full"), targets.parse("tpu7x:2x2x1"))
    assert 'execution_thread="sparsecore"' in halves.text
    assert sum(c.total for c in halves.collectives) > expected_gathers


def test_partial_slice_meshes_are_refused():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    with pytest.raises(ShardingError, match="7 of the 8 devices"):
        sharding.make_mesh("fsdp=7", targets.parse("v5e:2x4").devices())


def test_nonexistent_tpu_slices_are_refused():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    target = targets.parse("v5e:3x3")
    with pytest.raises(ValueError, match=r"v5e:3x3.*no such slice.*v5e:4x4"):
        target.devices()
    assert len(targets.parse("v4:2x2x2").devices()) == 8  # chips, not cores
    for name in ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1"):
        assert len(targets.parse(name).devices()) == 1, name


@pytest.mark.parametrize("name", ["v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_the_memory_of_a_tpu_is_what_its_compiler_has(name):
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    target = targets.parse(name)
    one = jax.sharding.SingleDeviceSharding(target.devices()[0])
    large = jax.ShapeDtypeStruct((1 << 17, 1 << 20), jnp.bfloat16, sharding=one)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        jax.jit(lambda x: jnp.sort(jnp.sort(x, 0), 1) + x).lower(large).compile()
    [available] = re.findall(r"available HBM \(([\d.]+)G\)", str(error.value))
    assert float(available) == pytest.approx(target.chip.memory / 2**30)


def test_a_chip_of_tpu7x_is_two_devices():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    target = targets.parse("tpu7x:2x2x1")
    assert target.num_devices == len(target.devices()) == 8
    found = collectives.topology_of(target.chip, target.shape, target.devices())
    assert sorted(set(found.places)) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    estimate = make_estimate(job(rows=8, mesh="fsdp=8", precision="bf16"), target)
    assert estimate.memory.limit == 94.75 * 2**30
    assert roofline.roofline(estimate).by_op.links > 0


def test_slices_of_tpus_say_where_they_are():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    target = targets.parse("2xv5e:2x2")
    found = collectives.topology_of(target.chip, target.shape, target.devices())
    assert found.slices == (0, 0, 0, 0, 1, 1, 1, 1)
    assert set(found.places) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.slow
def test_gradients_are_scattered_within_a_slice():
    """And their parts are added up between slices: all-reduces within one are of scalars alone."""
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    model = {"d_model": 2048, "d_ff": 4096, "num_layers": 3, "attention.head_dim": 128}
    wanted = job(rows=8, seq=2048, mesh="data=2,fsdp=4", precision="bf16", model=model)
    estimate = make_estimate(dataclasses.replace(wanted, remat="full"), targets.parse("2xv5e:2x2"))
    where, matrices = estimate.topology, 3 * (2048 * 128 * 8 * 4 + 3 * 2048 * 4096)
    sums = [c for c in estimate.collectives if c.kind == "all-reduce"]
    outside = sum(where.between(c) * c.times for c in sums)
    assert outside == pytest.approx(2 * matrices / 4, rel=0.2)
    assert sum(c.total for c in sums) - outside < 0.05 * 2 * matrices


QUOTED = Path(__file__).parents[2] / "docs" / "tutorials" / "plan.md"
GIB = r"\*?\*?([\d.]+) GiB"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "options"),
    [
        (rf"^  all +{GIB}  of 31.25 GiB, 43%: fits$", {"target": "v6e:4x4", "mesh": "fsdp=16"}),
        (rf"^  all +{GIB}  of 15.75 GiB, 110%: does not fit$",
         {"target": "v5e:4x4", "mesh": "fsdp=16", "seq_len": 8192}),
        (rf"lora, stored \(bf16\) .* {GIB}\*\* \|$", {"target": "v6e:1x1"}),
        (rf"lora, `--base int8` .* {GIB}\*\* \|$", {"target": "v6e:1x1", "base": "int8"}),
        (rf"lora, `--base int4` .* {GIB}\*\* \|$", {"target": "v5e:1x1", "base": "int4"}),
        (rf"`--optimizer adafactor` .* {GIB}\*\* \|$",
         {"model": "qwen3-1.7b", "target": "v6e:1x1", "optimizer": "adafactor"}),
    ],
    ids=["8b", "8b-too-large", "lora", "int8", "int4", "adafactor"],
)  # fmt: skip
def test_quoted_plans_are_those_of_today(line, options):
    """Within 2% of the documentation's, compiled as training compiles them."""
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    [quoted] = re.findall(line, QUOTED.read_text(), re.MULTILINE)
    given = {"model": "llama3-8b", "method": "lora", "seq_len": 1024, "batch_size": 1}
    if "mesh" in options:
        given |= {"method": "full", "seq_len": 4096, "batch_size": None}
    elif "optimizer" in options:
        given |= {"method": "full"}
    config = command.Config(**given | options)
    target = targets.parse(config.target)
    model = command.skeleton_of(config, command.locate(config.model))
    estimate = make_estimate(command.make_job(config, model, target), target)
    assert estimate.memory.total / 2**30 == pytest.approx(float(quoted), rel=0.02)
    assert estimate.memory.fits == ("does not fit" not in line)
    if "43%" in line:  # of which the page has all
        [seconds] = re.findall(
            r"^  step, at least +([\d.]+) s  no overlap", QUOTED.read_text(), re.MULTILINE
        )
        assert roofline.roofline(estimate).by_op.seconds == pytest.approx(float(seconds), rel=0.02)


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_products_of_few_bits_keep_no_wider_codes(kind):
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    [chip] = targets.parse("v5e:1x1").devices()
    one = jax.sharding.SingleDeviceSharding(chip)
    outline = functools.partial(jax.ShapeDtypeStruct, sharding=one)
    matrix = eqx.filter_eval_shape(
        quantize, jax.ShapeDtypeStruct((1024, 16_384), jnp.bfloat16), ("embed", "mlp"), kind
    )
    codes = jax.tree.map(lambda x: outline(x.shape, x.dtype), matrix)
    compiled = jax.jit(lambda x, w: w.times(x)).lower(outline((256, 1024), jnp.bfloat16), codes)
    kept = compiled.compile().memory_analysis().temp_size_in_bytes
    assert kept <= 1.2 * 1024 * 16_384 * 2  # the matrix in bf16, and no int32 or float32 of it


@pytest.mark.parametrize(
    ("found", "pin", "is_other"),
    [
        ("0.0.42.1", "libtpu==0.0.42.*", False),
        ("0.0.43", "libtpu==0.0.42.*", True),
        ("0.0.421", "libtpu==0.0.42", True),
        (None, "libtpu==0.0.42.*", False),
        ("0.0.42", "libtpu>=0.0.1", False),
    ],
)
def test_another_compiler_than_jax_asks_for_is_a_warning(found, pin, is_other, monkeypatch):
    monkeypatch.setattr(targets, "compiler_version", lambda: found)
    pins = lambda name: ["jaxlib==1", f'{pin}; extra == "tpu"']
    monkeypatch.setattr(targets.importlib.metadata, "requires", pins)
    warning = "".join(targets.compiler_mismatch())
    assert (f"libtpu {found} is not the compiler that jax" in warning) == is_other


def test_a_job_is_compiled_with_its_flags_and_kernel(monkeypatch):
    """As names that the compiler and the platform do not know show; the report has both."""
    monkeypatch.setitem(compiled.FLAG_SETS, "cpu", {"overlap": {"xla_unheard_of": True}})
    where = targets.parse("cpu:8")
    with pytest.raises(CompilerError, match="xla_unheard_of"):
        make_estimate(job(xla="overlap"), where)
    with pytest.raises(ValueError, match=r"xla='no_windows'.*cpu"):
        make_estimate(job(xla="no_windows"), where)
    with pytest.raises(ValueError, match=r"kernel='splash_fused' needs a TPU"):
        make_estimate(job(kernel="splash_fused"), where)
    title = report.title(
        dataclasses.replace(small_estimate(), job=job(xla="overlap", kernel="xla"))
    )
    assert title.endswith("xla, --xla overlap")
    # The estimate of a GPU is of a program for CPUs, whose compiler has no use for them.
    assert make_estimate(job(xla="overlap"), targets.parse("24GiB:8")).memory.fits
