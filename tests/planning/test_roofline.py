"""The bound by instruction: what a compiled program overlaps, and the links that it has."""

import dataclasses
import itertools

import pytest

from zoo.planning import collectives, costs, hlo, roofline, targets
from zoo.planning.collectives import Collective, Topology, groups, pairs
from zoo.planning.efficiency import EFFICIENCIES, PEAKS, Efficiency, efficiency
from zoo.training import chips

# Round numbers: 1 TFLOP/s, 1 GB/s of memory, and four links of 0.25 GB/s each.
CHIP = dataclasses.replace(
    chips.CHIPS["v5e"], flops=1e12, bandwidth=1e9, interconnect=1e9, network=1e8
)
NOWHERE = hlo.Computation("main", hlo.Program())
LINE = Topology(CHIP, (2, 1), (0, 0), ((0, 0), (1, 0)))


def grid(name, shape, num_slices=1):
    places = [*itertools.product(*map(range, shape))]
    slices = [k for k in range(num_slices) for _ in places]
    return Topology(chips.CHIPS[name], shape, tuple(slices), tuple(places * num_slices))


def collective(kind, sent, *members, pairs=()):
    return Collective(kind, sent, 1, len(members[0]) if members else 2, members, pairs)


# Who takes part.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("{}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['x'=2,'y'=4] {'x'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['x'=2,'y'=4] {'x','y'}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (
            "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}",
            [(0, 2, 4, 6), (1, 3, 5, 7)],
        ),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_members_of_groups(text, expected):
    line = f"%r = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={text}, to_apply=%add"
    assert list(groups(hlo._instruction(line, NOWHERE), 8)) == expected


def test_pairs_of_permutes():
    line = "%r = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}"
    assert pairs(hlo._instruction(line, NOWHERE)) == ((0, 1), (1, 0))


# Links.


def test_rings_are_where_a_slice_has_all_of_a_dimension():
    rings = {
        ("v5e", (4, 4)): (False, False),
        ("v5e", (8, 16)): (False, True),
        ("v6e", (16, 16)): (True, True),
        ("v5p", (2, 2, 4)): (False, False, False),
        ("v5p", (4, 4, 8)): (True, True, True),
    }
    assert {key: grid(*key).rings for key in rings} == rings


@pytest.mark.parametrize(
    ("name", "shape", "members", "links"),
    [
        ("v5e", (4, 4), range(16), 2),  # a corner has no more
        ("v5e", (4, 4), range(4), 1),
        ("v5e", (16, 16), range(256), 4),
        ("v5e", (16, 16), range(16), 2),
        ("v5e", (16, 16), range(0, 16, 2), 1),  # two groups on each ring
        ("v5e", (8, 16), range(128), 3),
        ("v5p", (4, 4, 4), range(64), 6),
        ("v5p", (4, 4, 4), range(16), 4),
    ],
)
def test_a_gather_has_the_links_of_its_dimensions(name, shape, members, links):
    where = grid(name, shape)
    transfer = where.transfer(collective("all-gather", 1e9, tuple(members)))
    assert transfer.seconds == pytest.approx(1e9 / (links * where.link))
    assert where.link == chips.CHIPS[name].interconnect / (4 if name == "v5e" else 6)


def test_an_all_to_all_is_bound_by_the_middle():
    # Of 4 in a line each half sends half of what its two have over one link; of a ring over two.
    line = grid("v5e", (4, 4)).transfer(collective("all-to-all", 3e9, (0, 1, 2, 3)))
    assert line.seconds == pytest.approx(4e9 / 50e9)
    ring = grid("v5p", (4, 4, 4)).transfer(collective("all-to-all", 3e9, (0, 1, 2, 3)))
    assert ring.seconds == pytest.approx(2e9 / 100e9)


def test_a_permute_takes_its_way_over_links():
    where = grid("v5e", (4, 4))
    neighbours = collective("collective-permute", 1e9, pairs=((0, 1), (1, 2)))
    assert where.transfer(neighbours).seconds == pytest.approx(1e9 / 50e9)
    assert where.transfer(neighbours).links == {"1+1"}
    back = collective("collective-permute", 1e9, pairs=((0, 1), (1, 2), (2, 3), (3, 0)))
    assert where.transfer(back).links == {"1+1", "1-1"}
    shared = collective("collective-permute", 1e9, pairs=((0, 2), (1, 3)))
    assert where.transfer(shared).seconds == pytest.approx(2e9 / 50e9)  # both from 1 to 2
    wrapped = collective("collective-permute", 1e9, pairs=((0, 15),))
    assert grid("v5e", (16, 16)).transfer(wrapped).links == {"1-1"}


def test_gpus_of_a_machine_have_a_switch():
    chip = chips.CHIPS["h100"]
    where = Topology(chip, (8,), (0,) * 8 + (1,) * 8, tuple((x,) for x in range(8)) * 2)
    inside = collective("all-gather", 9e9, (0, 1, 2, 3))
    assert where.transfer(inside).seconds == pytest.approx(9e9 / 450e9)
    across = collective("all-gather", 9e9, (0, 8))
    assert where.between(across) == 9e9
    assert where.transfer(across).seconds == pytest.approx(9e9 / 50e9)


def test_bytes_between_slices_go_once():
    where = grid("v5e", (2, 2), num_slices=2)
    # 7 of 8 parts are fetched: one from the other slice, which has it fetched by one of four.
    whole = collective("all-gather", 7e9, tuple(range(8)))
    assert where.between(whole) == pytest.approx(1e9)
    assert where.between(collective("all-reduce", 2e9, (0, 4), (1, 5))) == 2e9
    assert where.between(collective("all-gather", 3e9, (0, 1, 2, 3), (4, 5, 6, 7))) == 0
    assert where.between(collective("all-to-all", 7e9, tuple(range(8)))) == pytest.approx(4e9)
    assert where.between(collective("collective-permute", 1e9, pairs=((0, 1), (3, 4)))) == 1e9
    assert where.between(collective("collective-permute", 1e9, pairs=((0, 1), (4, 5)))) == 0
    network = chips.CHIPS["v5e"].network
    assert where.transfer(whole).seconds == pytest.approx(1e9 / network)
    assert "network" in where.transfer(whole).links


def test_virtual_devices_stand_in_the_order_of_their_ids():
    target = targets.parse("h200:16")
    assert (target.num_slices, target.shape, target.num_devices) == (2, (8,), 16)

    @dataclasses.dataclass(frozen=True)
    class Device:
        id: int

    found = collectives.topology_of(target.chip, target.shape, [Device(9), Device(0), Device(8)])
    assert found.slices == (0, 0, 0)
    many = [Device(id) for id in (*range(8, 16), *range(8))]
    assert collectives.topology_of(target.chip, (8,), many).slices == (1,) * 8 + (0,) * 8


def test_the_host_reduces_between_slices():
    text = """HloModule m, num_partitions=4

ENTRY %main (p: f32[1000]) -> f32[1000] {
  %p = f32[1000] parameter(0)
  %t = token[] after-all()
  %s = (f32[1000], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, ATTRIBUTES
  %r = (f32[1000], u32[], token[]) recv(%t), channel_id=3, is_host_transfer=true, ATTRIBUTES
  %sent = token[] send-done(%s)
  %got = (f32[1000], token[]) recv-done(%r)
  ROOT %x = f32[1000] get-tuple-element(%got), index=0
}
""".replace(
        "ATTRIBUTES",
        'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}',
    )
    program = hlo.read(text)
    [found] = collectives.collectives(program)
    assert (found.kind, found.bytes, found.group_size) == ("all-reduce", 4000, 2)
    assert found.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    where = grid("v5e", (2, 2), num_slices=2)
    assert where.between(found) == 4000
    assert roofline.times(program, where, {}).links == pytest.approx(
        4000 / where.chip.network, rel=0.01
    )


# Products.


def total_flops(text):
    program = hlo.read(text)
    here = program.entry
    return sum(costs.flops(x) for x in here.instructions.values())


@pytest.mark.parametrize(
    ("operands", "instruction", "expected"),
    [
        (("f32[6,5]", "f32[5,7]"), "f32[6,7] dot({}), lhs_contracting_dims={{1}}", 6 * 5 * 7),
        (("bf16[6,5]", "bf16[5,7]"), "bf16[6,7] convolution({}), dim_labels=bf_io->bf", 6 * 5 * 7),
        *(
            (
                (f"{dtype}[6,5]", f"{dtype}[5,7]"),
                "f32[6,7] convolution({}), dim_labels=bf_io->bf, operand_precision={{"
                + name
                + "}}",
                passes * 6 * 5 * 7,
            )
            for dtype, name, passes in (
                ("f32", "highest,highest", 6),
                ("f32", "high,high", 3),
                ("bf16", "highest,highest", 1),
            )
        ),
        (
            # Heads as the places of a window that meet one value each: the rest is padding.
            ("bf16[6,5,1]", "bf16[8,16,5]"),
            "bf16[6,8,16] convolution({}), window={{size=8 pad=7_7 rhs_reversal=1}}, "
            "dim_labels=bf0_0oi->b0f",
            6 * 5 * 8 * 16,
        ),
        (
            ("bf16[6,8,5]", "bf16[8,5,9]"),
            "bf16[6,9,1] convolution({}), window={{size=8}}, dim_labels=b0f_0io->bf0",
            6 * 8 * 5 * 9,
        ),
        (
            # A batch of 8 products: the input is spread, and the window goes from one to the next.
            ("bf16[8,6,5]", "bf16[8,5,7]"),
            "bf16[8,6,7] convolution({}), window={{size=8 stride=7 pad=0_0 lhs_dilate=8}}, "
            "dim_labels=0bf_0io->0bf",
            8 * 6 * 5 * 7,
        ),
        (("f32[6]", "f32[6]"), "f32[6] add({})", 0),
    ],
)
def test_flops_of_products(operands, instruction, expected):
    left, right = operands
    text = f"""HloModule m

ENTRY %main (a: {left}, b: {right}) -> f32[] {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %r = {instruction.format("%a, %b")}
}}
"""
    assert total_flops(text) == 2 * expected


# Instruction after instruction.

HEAD = """HloModule m, is_scheduled=true, num_partitions=2

%fused (x: f32[1000,1000], y: f32[1000,1000]) -> f32[1000,1000] {
  %x = f32[1000,1000] parameter(0)
  %y = f32[1000,1000] parameter(1)
  ROOT %dot = f32[1000,1000] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
SECONDS = {"product": 12e-3, "copy": 8e-3, "gather": 4e6 / 0.25e9}  # the product is bound by memory


def timed(body, head=HEAD, kernels=None, chip=CHIP, shares=PEAKS, row=1):
    text = head + "ENTRY %main (p: f32[1000,1000]) -> f32[1000,1000] {\n"
    text += "  %p = f32[1000,1000] parameter(0)\n" + body + "}\n"
    where = dataclasses.replace(LINE, chip=chip)
    return roofline.times(hlo.read(text), where, kernels or {}, shares, row)


GROUPS = "channel_id=1, replica_groups={{0,1}}, dimensions={0}\n"
GATHER = f"%g = f32[2000,1000] all-gather(%p), {GROUPS}"
START = f"%s = (f32[1000,1000], f32[2000,1000]) all-gather-start(%p), {GROUPS}"
DONE = "%g = f32[2000,1000] all-gather-done(%s)\n"
PRODUCT = "%f = f32[1000,1000] fusion(%p, %p), kind=kOutput, calls=%fused\n"


def test_each_instruction_takes_the_longer_of_its_two():
    assert timed(PRODUCT).memory == pytest.approx(SECONDS["product"])
    fast = timed(PRODUCT, chip=dataclasses.replace(CHIP, bandwidth=1e12))
    assert (fast.compute, fast.memory) == (pytest.approx(2e-3), 0)


def test_a_product_of_int8_takes_its_own_rate():
    fast = dataclasses.replace(CHIP, bandwidth=1e12, int8=8e12)
    head = HEAD.replace("f32[1000,1000] parameter", "s8[1000,1000] parameter")
    assert timed(PRODUCT, head, chip=fast).compute == pytest.approx(2e9 / 8e12)
    assert timed(PRODUCT, chip=fast).compute == pytest.approx(2e9 / 1e12)
    unknown = dataclasses.replace(fast, int8=None)
    assert timed(PRODUCT, head, chip=unknown).compute == pytest.approx(2e9 / 1e12)


def test_only_what_the_compiler_overlaps_is_hidden():
    alone = timed(GATHER + PRODUCT)
    assert alone.links == pytest.approx(SECONDS["gather"])
    assert alone.seconds == pytest.approx(SECONDS["gather"] + SECONDS["product"])
    beside = timed(START + PRODUCT + DONE)
    assert beside.links == pytest.approx(SECONDS["gather"] - SECONDS["product"])
    assert beside.seconds == pytest.approx(SECONDS["gather"])
    two = PRODUCT + PRODUCT.replace("%f =", "%f2 =")
    assert timed(START + two + DONE).links == 0
    assert timed(START + DONE + two).links == pytest.approx(SECONDS["gather"])


def test_parts_of_a_collective_in_fusions_are_one_that_runs_beside_them():
    part = GATHER.partition("= ")[2].replace("%p", "%q").strip()
    head = HEAD + "".join(
        f"%{name} (q: f32[1000,1000]) -> f32[2000,1000] {{\n"
        "  %q = f32[1000,1000] parameter(0)\n"
        f'  ROOT %{name}.g = {part}, frontend_attributes={{chain_id="0"}}\n}}\n\n'
        for name in ("first", "last")
    )
    first = "%a = f32[2000,1000] fusion(%p), kind=kCustom, calls=%first\n"
    last = "%b = f32[2000,1000] fusion(%p), kind=kCustom, calls=%last\n"
    found = timed(first + PRODUCT + last, head)
    assert found.links == pytest.approx(SECONDS["gather"] - SECONDS["product"])
    assert timed(first + last + PRODUCT, head).links == pytest.approx(SECONDS["gather"])
    program = hlo.read(head + "ENTRY %m (p: f32[1000,1000]) -> f32[2000,1000] {\n"
                       "  %p = f32[1000,1000] parameter(0)\n" + first + last + "}\n")  # fmt: skip
    assert len(collectives.collectives(program)) == 1
    assert costs.memory_traffic(program) == 0  # it goes from memory to memory as it moves


def test_transfers_wait_for_those_with_the_same_links():
    permute = (
        "%c{0} = (f32[1000,1000], f32[1000,1000]) collective-permute-start(%p), channel_id={0}, "
        "source_target_pairs={{{{{1}}}}}\n"
    )
    done = "%d{0} = f32[1000,1000] collective-permute-done(%c{0})\n"
    ways = {"0,1": SECONDS["gather"], "1,0": SECONDS["gather"]}
    for other, slower in (("1,0", 1), ("0,1", 2)):
        both = permute.format(1, "0,1") + permute.format(2, other)
        found = timed(both + done.format(1) + done.format(2))
        assert found.links == pytest.approx(slower * ways[other])


def test_copies_run_while_the_memory_has_time():
    copy = "%s = (f32[1000,1000]{1,0:S(1)}, f32[1000,1000], u32[]) copy-start(%p)\n"
    done = "%d = f32[1000,1000]{1,0:S(1)} copy-done(%s)\n"
    assert timed(copy + PRODUCT + done).memory == pytest.approx(4e-3 + SECONDS["product"])
    slow = dataclasses.replace(CHIP, flops=1e11)  # 20 ms of products
    assert timed(copy + PRODUCT + done, chip=slow).memory == 0


def test_loops_count_as_often_as_they_run_and_hide_what_was_started():
    head = (
        HEAD
        + """%body (t: (s32[], f32[1000,1000])) -> (s32[], f32[1000,1000]) {
  %t = (s32[], f32[1000,1000]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x1 = f32[1000,1000] get-tuple-element(%t), index=1
  %f1 = f32[1000,1000] fusion(%x1, %x1), kind=kOutput, calls=%fused
  ROOT %o = (s32[], f32[1000,1000]) tuple(%i, %f1)
}

%condition (t2: (s32[], f32[1000,1000])) -> pred[] {
  %t2 = (s32[], f32[1000,1000]) parameter(0)
  ROOT %true = pred[] constant(true)
}

"""
    )
    loop = (
        "%z = s32[] constant(0)\n%in = (s32[], f32[1000,1000]) tuple(%z, %p)\n"
        "%w = (s32[], f32[1000,1000]) while(%in), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}\n'
    )
    assert timed(loop, head).memory == pytest.approx(5 * SECONDS["product"])
    hidden = timed(START + loop + DONE, head)
    assert hidden.seconds == pytest.approx(5 * SECONDS["product"])


def test_kernels_take_their_time_where_they_are_called():
    call = '%attend.1 = f32[1000,1000] custom-call(%p), custom_call_target="tpu_custom_call"\n'
    kernels = {"attend": (1e9, 5e7)}
    assert timed(call, kernels=kernels).memory == pytest.approx(0.05)
    assert timed(START + call + DONE, kernels=kernels).links == 0
    twice = call + call.replace(".1", ".2")
    assert timed(twice, kernels=kernels).seconds == pytest.approx(0.05)  # of all calls together
    # One that the program does not name is not forgotten.
    assert timed(PRODUCT, kernels=kernels).memory == pytest.approx(0.05 + SECONDS["product"])


def test_what_is_measured_of_a_chip_takes_longer_than_its_peaks():
    shares = Efficiency(
        products=((500, 0.25), (2000, 0.75)), flash=((4096, 0.2), (8192, 0.4)), grouped=0.5,
        memory=0.8, links=0.5, start=1e-3, per_key=1e-6, per_number=2e-6,
    )  # fmt: skip
    fast = dataclasses.replace(CHIP, bandwidth=1e15)
    assert timed(PRODUCT, chip=fast, shares=shares).compute == pytest.approx(2e-3 / 0.5)
    found = [shares.of_product(2.0 * n**3) for n in (10, 500, 2000, 9000)]
    assert found == pytest.approx([0.25, 0.25, 0.75, 0.75])
    assert timed(PRODUCT, shares=shares).memory == pytest.approx(SECONDS["product"] / 0.8)
    assert timed(GATHER, shares=shares).links == pytest.approx(1e-3 + SECONDS["gather"] / 0.5)
    kernels = {"splash_mha_fwd": (1e12, 1.0), "gmm": (1e12, 1.0), "other": (1e12, 1.0)}
    for row, share in ((4096, 0.2), (5793, 0.3), (2**17, 0.4)):
        found = timed("", kernels=kernels, shares=shares, row=row).compute
        assert found == pytest.approx(1 / share + 1 / 0.5 + 1 / 0.75, rel=1e-3)
    bound = timed("", kernels=kernels, shares=shares.best_flash, row=4096)
    assert bound.compute == pytest.approx(1 / 0.4 + 2)
    one = "%k = s32[1000,1000] iota(), iota_dimension=0\n"
    order = "%s = (s32[1000,1000], f32[1000,1000]) sort(%k, %p), dimensions={0}, to_apply=%less\n"
    assert timed(one + order, shares=shares).memory == pytest.approx(1.0)
    pick = "%g = f32[3000] gather(%p, %k), slice_sizes={{{}}}\n"
    assert timed(one + pick.format("1,1"), shares=shares).memory == pytest.approx(6e-3)
    rows = timed(one + pick.format("1,1000"), shares=shares).memory
    assert rows == timed(one + pick.format("1,1000"), shares=PEAKS).memory / 0.8
    assert all(x.products[-1][1] <= 1 and x.links < 1 and x.per_key for x in EFFICIENCIES.values())
    assert efficiency(CHIP) is EFFICIENCIES["v5e"]
    assert efficiency(dataclasses.replace(CHIP, name="h100")) is PEAKS


def test_another_core_moves_data_beside_this_one():
    """As a tpu7x has collectives and copies, in calls that it starts and ends."""
    called = """%called (c: f32[1000,1000]) -> f32[{rows},1000] {{
  %c = f32[1000,1000] parameter(0)
  ROOT %inner = {inner}
}}, execution_thread="sparsecore"

"""
    start = (
        "%s = ((f32[1000,1000]), f32[{rows},1000]) call-start(%p), "
        'async_execution_thread="sparsecore", to_apply=%called\n'
    )
    done = "%g = f32[{rows},1000] call-done(%s)\n"
    gather = {"rows": 2000, "inner": GATHER.partition("= ")[2].replace("%p", "%c").strip()}
    copy = {"rows": 1000, "inner": "f32[1000,1000] copy(%c)"}
    for found, taken in ((gather, SECONDS["gather"]), (copy, SECONDS["copy"])):
        head = HEAD + called.format(**found)
        start_, done_ = start.format(**found), done.format(**found)
        assert timed(start_ + done_ + PRODUCT, head).seconds == pytest.approx(
            taken + SECONDS["product"]
        )
        fast = dataclasses.replace(CHIP, flops=1e11)  # 20 ms of products
        beside = timed(start_ + PRODUCT + done_, head, chip=fast).seconds
        assert beside == pytest.approx(max(taken, 20e-3))
    alone = timed(start.format(**gather) + done.format(**gather), HEAD + called.format(**gather))
    assert alone.links == pytest.approx(SECONDS["gather"])
    text = HEAD + called.format(**gather) + "ENTRY %m (p: f32[1000,1000]) -> f32[2000,1000] {\n"
    text += "  %p = f32[1000,1000] parameter(0)\n" + start.format(**gather) + done.format(**gather)
    (found,) = collectives.collectives(hlo.read(text + "}\n"))
    assert (found.kind, found.bytes, found.times) == ("all-gather", 4e6, 1)
