"""zoo.planning.hlo and costs: what they read of a compiled program's text, and count."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from zoo.planning import (
    collectives,
    costs,
    hlo,
    roofline,
)
from zoo.planning import job as planning_job
from zoo.training import chips

TEXTS = Path(__file__).parents[1] / "golden" / "hlo"
REDUCED = "channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add"


def program_of(main, **computations):
    """A program of instructions, a line each, and of further computations by their names."""
    bodies = {**{f"%{name}": body for name, body in computations.items()}, "ENTRY %main": main}
    text = [f"{name} (x: f32[]) -> f32[] {{{body}}}\n" for name, body in bodies.items()]
    return hlo.read("\n".join(["HloModule m\n", *text]))


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
    program = program_of(f"""
  %p = f32[16]{{0}} parameter(0)
  %x = f32[16]{{0}} all-reduce(%p), {REDUCED}
  ROOT %r = f32[16]{{0}} all-reduce(%x), {REDUCED}
""")
    found = collectives.collectives(program)
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", 2 * 64 * 3 / 4)] * 2
    chip = chips.CHIPS["v5e"]
    where = collectives.Topology(chip, (4, 1), (0,) * 4, tuple((x, 0) for x in range(4)))
    seconds = [where.transfer(each).seconds for each in found]
    assert roofline.times(program, where, {}).links == pytest.approx(sum(seconds))


def test_gradients_that_are_scattered_in_fusions_of_one_channel_count_each():
    """As a TPU's compiler makes them of the sums of a `shard_map`."""
    fused = f"""
  %x = f32[16]{{0}} parameter(0)
  %sumN = f32[16]{{0}} all-reduce(%x), {REDUCED}
  %at = s32[] constant(0)
  ROOT %cutN = f32[4]{{0}} dynamic-slice(%sumN, %at), dynamic_slice_sizes={{4}}
"""
    main = """
  %p = f32[16]{0} parameter(0)
  %y = f32[4]{0} fusion(%p), kind=kCustom, calls=%scatter1
  %z = f32[4]{0} fusion(%p), kind=kCustom, calls=%scatter2
  ROOT %r = (f32[4]{0}, f32[4]{0}) tuple(%y, %z)
"""
    both = {f"scatter{number}": fused.replace("N", number) for number in "12"}
    found = collectives.collectives(program_of(main, **both))
    assert [(c.kind, c.bytes) for c in found] == [("reduce-scatter", 64 * 3 / 4)] * 2


def test_unknown_loops_count_once_and_a_plan_refuses_them():
    text = (TEXTS / "gpu.txt").read_text().replace("known_trip_count", "no_count")
    program = hlo.read(text.replace("constant(3)", "parameter(1)"))
    assert hlo.unknown_loops(program) == ["loop"]
    assert {c.times for c in collectives.collectives(program)} == {1}
    with pytest.raises(hlo.HLOError, match=r"\['loop'\].*jax.lax.scan"):
        planning_job._traffic(program, {})


def test_lines_after_a_kernel_are_read():
    program = program_of("""
  %p = f32[16]{0} parameter(0)
  %k = f32[16]{0} custom-call(%p), custom_call_target="tpu_custom_call", attributes={metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %r = f32[16]{0} negate(%k)
""")
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
    other_layout = """
  %p = s8[100,64]{1,0:T(32,128)} parameter(0)
  ROOT %copy = s8[100,64]{1,0:T(8,128)} copy(%p)
"""
    fused = """
  %p = s8[100,64]{1,0:T(32,128)} parameter(0)
  %i = s32[2]{0} parameter(1)
  %same = s8[100,64]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%other_layout
  %wide = f32[100,64]{1,0} convert(%same)
  ROOT %rows = f32[2,64]{1,0} gather(%wide, %i), offset_dims={1}
"""
    main = """
  %t = s8[100,64]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  %w = bf16[32,8]{1,0} parameter(2)
  %few = s8[2,64]{1,0} gather(%t, %i), offset_dims={1}
  %copy-start = (bf16[32,8]{1,0:S(1)}, bf16[32,8]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[32,8]{1,0:S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[32,8]{1,0}), bf16[4,8]{1,0}, s32[]{:S(2)}) slice-start(%w), slice={[0:4]}
  %slice-done = bf16[4,8]{1,0} slice-done(%slice-start)
  ROOT %rows = f32[2,64]{1,0} fusion(%t, %i), kind=kLoop, calls=%fused
"""
    gather, copy, part = 2 * 2 * 64 + 2 * 4, 2 * 32 * 8, 2 * 2 * 4 * 8
    fusion = 2 * 64 + 2 * 4 + 4 * 2 * 64
    program = program_of(main, other_layout=other_layout, fused=fused)
    assert costs.memory_traffic(program) == gather + copy + part + fusion


def test_a_fusion_in_a_fusion_reads_what_it_slices():
    inner = """
  %q = f32[10,64] parameter(0)
  %j = s32[] parameter(1)
  ROOT %slice = f32[1,64] dynamic-slice(%q, %j, %j), dynamic_slice_sizes={1,64}
"""
    fused = """
  %p = f32[10,64] parameter(0)
  %i = s32[] parameter(1)
  %one = f32[1,64] fusion(%p, %i), kind=kLoop, calls=%inner
  ROOT %twice = f32[1,64] add(%one, %one)
"""
    main = """
  %t = f32[10,64] parameter(0)
  %k = s32[] parameter(1)
  ROOT %r = f32[1,64] fusion(%t, %k), kind=kLoop, calls=%fused
"""
    program = program_of(main, inner=inner, fused=fused)
    assert costs.memory_traffic(program) == 64 * 4 + 4 + 64 * 4
