"""The search of settings: meshes by hand, the best of them and other settings compiled."""

import dataclasses
import functools
import math
from unittest import mock

import equinox as eqx
import jax
import pytest
from helpers import hybrid, small_config
from planning_cases import job, small_estimate

from zoo import sharding, transformer
from zoo.common import configuration
from zoo.nn.recurrences.mixers import MIXERS
from zoo.planning import command, search, sizes, targets
from zoo.planning.job import CompilerError, Estimate, Job
from zoo.planning.meshes import Candidate, candidates
from zoo.planning.roofline import Times
from zoo.planning.search import fastest
from zoo.publishing.tensors import num_parameters
from zoo.training import chips
from zoo.training.description import Training

CHIP = dataclasses.replace(chips.CHIPS["h100"], memory=100.0)
TARGET = dataclasses.replace(targets.parse("h100:8"), chip=CHIP)
SIZES = small_config(num_heads=4, **{"attention.num_kv_heads": 2})


def by_hand(rows=8, seq_len=128, flops=1e9, parameters=10_000, target=TARGET, **sizes):
    config = configuration.replaced(SIZES, sizes)
    return candidates(config, parameters, 16.0 * parameters, flops, rows, seq_len, target)


def skeleton(**sizes):
    config = configuration.replaced(SIZES, sizes)
    make = functools.partial(transformer.Transformer, config)
    return eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0))


def test_all_meshes_that_divide_are_compared():
    found = {each.mesh for each in by_hand()}
    # Two heads of keys: no tensor=4; and every axis alone or with another.
    assert {"data=8", "fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "data=4,tensor=2"} <= found
    assert not any("tensor=4" in mesh or "tensor=8" in mesh for mesh in found)
    assert all("context" not in mesh for mesh in found)
    few = {each.mesh for each in by_hand(rows=4)}  # which are not cut in eight, but their tokens
    assert "fsdp=8" not in few
    assert {"fsdp=4,tensor=2", "fsdp=4,context=2"} <= few


def test_experts_lie_whole_on_all_axes_that_split_them():
    """So each mesh is one that a model takes."""
    sizes = {"num_heads": 8, "attention.num_kv_heads": 8, "experts.num_experts": 4}
    found, model = {each.mesh for each in by_hand(**sizes)}, skeleton(**sizes)
    assert {"fsdp=2,expert=4", "fsdp=2,expert=2,tensor=2", "fsdp=2,tensor=4"} <= found
    for mesh in found:
        sharding.shardings(model, sharding.make_mesh(mesh))


@pytest.mark.parametrize("kind", MIXERS)
def test_heads_of_recurrences_are_divided_too(kind):
    sizes = hybrid(kind, num_heads=8, **{"mixer.recurrence.num_heads": 2, "mlp": "none"})
    sizes |= {"d_ff": None, "attention.num_kv_heads": 8}
    found, model = {each.mesh for each in by_hand(**sizes)}, skeleton(**sizes)
    assert "fsdp=4,tensor=2" in found
    assert not any("tensor=4" in mesh or "tensor=8" in mesh for mesh in found)
    for mesh in found:
        sharding.shardings(model, sharding.make_mesh(mesh))


def test_a_step_by_hand():
    where = {each.mesh: each for each in by_hand(parameters=1_000_000)}
    link = CHIP.interconnect
    fsdp = where["fsdp=8"]
    assert fsdp.parameters == pytest.approx(3 * 2e6 * 7 / 8 / link)
    assert fsdp.state == 16e6 / 8
    assert (fsdp.activations, fsdp.compute) == (0, pytest.approx(1e9 / CHIP.flops / 8))
    assert where["data=8"].parameters == pytest.approx(2 * 2e6 * 7 / 8 / link)
    assert where["data=8"].state == 16e6
    both = where["fsdp=4,tensor=2"]
    assert both.parameters == pytest.approx(3 * 1e6 * 3 / 4 / link)
    local = 8 * 128 / 4 * SIZES.d_model * 2
    assert both.activations == pytest.approx((5 * SIZES.num_layers + 2) * local / link)
    assert both.rows == 0
    assert both.seconds == both.compute + both.parameters + both.activations


def test_experts_and_what_stores_all_else_by_hand():
    """An axis of experts stores the other parameters in parts too, and gathers them."""
    model = skeleton(**{"experts.num_experts": 8})
    parameters = num_parameters(model)
    found = {
        each.mesh: each for each in by_hand(parameters=parameters, **{"experts.num_experts": 8})
    }
    for mesh in ("fsdp=8", "expert=8", "fsdp=2,expert=4", "fsdp=2,expert=2,tensor=2"):
        where = sharding.shardings(model, sharding.make_mesh(mesh))
        held = sum(
            math.prod(place.shard_shape(x.shape))
            for x, place in zip(*map(jax.tree.leaves, (model, where)), strict=True)
        )
        assert found[mesh].state == pytest.approx(16 * held, rel=0.03), mesh
    own = 3 * SIZES.num_layers * 8 * SIZES.d_model * SIZES.hidden_size
    expected = 3 * 2 * (parameters - own) * 7 / 8 / CHIP.interconnect
    assert found["expert=8"].parameters == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dispatch", "room", "sent"),
    [
        ("all_reduce", 4, (3 + 2) * 3),  # tokens of all devices, and their sums
        ("all_to_all", 1 + 1.5 * 2, 6 * 2 * 3 / 4),  # a device's own, and what it has room for
    ],
)
def test_rows_of_experts_by_hand(dispatch, room, sent):
    sizes = {"experts.num_experts": 8, "experts.per_token": 2, "experts.dispatch": dispatch}
    found = {each.mesh: each for each in by_hand(**sizes)}
    plain, split, tensor = (found[x] for x in ("fsdp=8", "fsdp=2,expert=4", "fsdp=4,tensor=2"))
    layers, vectors = SIZES.num_layers, 8 * 128 / 8 * SIZES.d_model * 2  # of a device's tokens
    once = layers * 20 * 2 * vectors / CHIP.bandwidth
    assert (plain.rows, split.rows) == (pytest.approx(once), pytest.approx(room * once))
    assert plain.activations == 0
    assert split.activations == pytest.approx(layers * sent * vectors / CHIP.interconnect)
    # Each of the other experts shares a tile of 128 rows: forward, again, and for two gradients.
    one = 4 * layers * 2 * 128 * 3 * SIZES.d_model * SIZES.hidden_size / CHIP.flops
    even = 1e9 / CHIP.flops / 8
    products = [each.compute - even for each in (plain, split, tensor)]
    assert products == pytest.approx([7 * one, 1 * one, 3 * one])


def test_meshes_of_experts_stand_in_the_order_of_their_plans():
    """As compiled: benchmarks/results/2026-11-26-plan-qwen3-30b-a3b-experts.md."""
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    target, model = targets.parse("v5p:4x4x4"), sizes.published("qwen3-30b-a3b")
    work = 6.05e15 * 4 / 3
    count = num_parameters(model)
    found = candidates(model.config, count, 16.0 * count, work, 64, 4096, target)
    order = [each.mesh for each in found if each.state < target.chip.memory]
    assert order.index("fsdp=16,expert=4") < 3
    known = ["fsdp=16,expert=4", "fsdp=4,expert=16", "fsdp=8,expert=8", "fsdp=64"]
    assert sorted(known, key=order.index) == known


def test_split_tokens_send_keys_and_values_around():
    [split] = [each for each in by_hand(rows=1, parameters=8) if each.mesh == "context=8"]
    keys = 2 * SIZES.kv_heads * SIZES.head_size * 128 * 2
    expected = 4 * SIZES.num_layers * keys * 7 / 8 / CHIP.interconnect
    assert split.activations == pytest.approx(expected)


def test_the_fastest_by_hand_comes_first():
    # Little to compute, many parameters: the links decide. Much to compute: they are hidden.
    assert by_hand(parameters=10**9, flops=1.0)[0].mesh != "data=8"
    found = by_hand(flops=1e18)
    assert found[0].activations == 0
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


def searched(monkeypatch, times, too_large=(), broken=(), rows=8, target="v6e:2x4", **settings):
    """A search by a compiler that takes times, by flags as they are said.

    Its result, or None; what it says, and the flags that it compiled.
    """
    said, made = [], []
    monkeypatch.setattr(search, "say", said.append)
    where = dataclasses.replace(targets.parse(target), chip=dataclasses.replace(TPU, memory=100.0))
    training = {"data": mock.Mock(batch_size=rows), "remat": "full", "remat_flag": "--remat"}
    given = Job(
        training=mock.NonCallableMagicMock(spec=Training, **training),
        **{"mesh": "fsdp=-1", "remat": "full"} | settings,
    )

    def make(job, target):
        made.append(search.describe(given, job))
        if made[-1] in broken:
            raise CompilerError("it aborted")
        memory = mock.Mock(fits=made[-1] not in too_large, total=50.0, limit=100.0)
        return mock.NonCallableMagicMock(spec=Estimate, job=job, memory=memory, compile_seconds=1.0)

    def roofline(estimate):
        return mock.Mock(by_op=Times(compute=times(search.describe(given, estimate.job))))

    monkeypatch.setattr(search, "roofline", roofline)
    monkeypatch.setattr(search, "make_estimate", make)
    meshes = ["fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "data=8"]
    found = [Candidate(mesh, 10.0, 1.0, 0.0, 0.5, 0.1) for mesh in meshes]
    large = Candidate("data=4,fsdp=2", 1000.0, 0.1, 0.0, 0.0, 0.0)
    try:
        return fastest([large, *found], given, where), said, made
    except ValueError as error:
        return error, said, made


TPU = chips.CHIPS["v6e"]
FSDP, MIXED, TENSOR = "--mesh fsdp=8", "--mesh data=2,fsdp=4", "--mesh fsdp=4,tensor=2"


def test_settings_are_searched_one_kind_after_another(monkeypatch):
    worth = {"no_windows": 0.7, "remat dots_no_batch": 0.9, "splash_fused": 0.8, "data=2": 0.95}

    def times(given):
        return 10.0 * math.prod(share for name, share in worth.items() if name in given)

    (estimate, reason), said, made = searched(monkeypatch, times)
    flags, remat = " --xla no_windows", "--remat dots_no_batch "
    assert made == [
        FSDP,
        FSDP + flags,
        f"{FSDP} --xla scatter_layouts",
        f"{FSDP} --xla gathers",
        f"--remat save:query,key,value {FSDP}{flags}",
        f"{remat}{FSDP}{flags}",
        f"--remat dots {FSDP}{flags}",
        f"--remat none {FSDP}{flags}",
        f"{remat}{FSDP} --kernel splash_fused{flags}",
        f"{remat}{MIXED} --kernel splash_fused{flags}",
        f"{remat}{TENSOR} --kernel splash_fused{flags}",
    ]
    job = estimate.job
    assert (job.xla, job.remat, job.kernel) == ("no_windows", "dots_no_batch", "splash_fused")
    assert job.mesh == "data=2,fsdp=4"
    lines = reason.splitlines()
    assert lines[0] == f"{made[-2]}: 4.788 s by instruction"
    assert [line.split(";")[0] for line in lines[1:-1]] == [
        "  settings that fit: 10.000 s",
        "  flags of the compiler: 7.000 s",
        "  remat and microbatches: 6.300 s",
        "  attention kernel: 5.040 s",
        "  mesh: 4.788 s",
    ]
    assert lines[-1] == "50 B of 100 B are left over"
    assert said[0] == "5 meshes divide the model and the batch; the state of 4 fits"


def test_a_search_says_first_that_nothing_fits_as_given(monkeypatch):
    """And then compiles what needs less memory, before anything that is faster."""
    split = f"{TENSOR} --sequence-parallel --accumulate 2"
    (estimate, reason), said, made = searched(monkeypatch, lambda given: 1.0, too_large={FSDP})
    assert made[:2] == [FSDP, split]
    assert said.index("  50 B: does not fit") < said.index(f"{split}: compiling …")
    assert search.describe(estimate.job, estimate.job) == ""
    assert "  flags of the compiler: no gain; 3 compiled" in reason


def test_a_search_in_which_nothing_fits_or_compiles_is_an_error(monkeypatch):
    every = mock.MagicMock(__contains__=lambda self, given: True)
    error, _, made = searched(monkeypatch, lambda given: 1.0, too_large=every)
    assert str(error).startswith(f"mesh='search': none of the {len(made)} settings")
    assert len(made) == len(set(made)) == 6
    broken, said, _ = searched(monkeypatch, lambda given: 1.0, broken=every)
    assert isinstance(broken, ValueError)
    assert any("it cannot be: it aborted" in line for line in said)


def test_memory_that_is_left_takes_fewer_microbatches_and_less_remat(monkeypatch):
    """A policy that does not fit is tried in smaller microbatches, and the next only if it did."""

    def times(given):
        return 8.0 * (0.9 if "dots" in given else 1.0) * (1 if "accumulate" in given else 1.1)

    too_large = {f"--remat dots_no_batch {FSDP}", f"--remat dots {FSDP}"}
    given = {"rows": 16, "accumulate": 1}
    (estimate, _), _, made = searched(monkeypatch, times, too_large, **given)
    job = estimate.job
    assert (job.remat, job.accumulate) == ("dots_no_batch", 2)
    too_large = {*too_large, f"--remat dots_no_batch {FSDP} --accumulate 2"}
    _, _, made = searched(monkeypatch, times, too_large, **given)
    assert not any("remat dots " in each or "remat none" in each for each in made)
    fewer = searched(monkeypatch, lambda given: 1.0 if "1" in given else 2.0, rows=16, accumulate=2)
    assert fewer[0][0].job.accumulate == 1


def test_a_search_needs_peaks(monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "small", small_config())
    with pytest.raises(ValueError, match=r"mesh='search' compares .* cpu:8"):
        command.main(command.Config(model="small", target="cpu:8", mesh="search"))


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
