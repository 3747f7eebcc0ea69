"""The search of a mesh: all by hand, the best few compiled."""

import dataclasses
import functools
import math
from unittest import mock

import equinox as eqx
import jax
import pytest
from helpers import small_config

from zoo import sharding, transformer
from zoo.common import configuration
from zoo.planning import command, planner, targets
from zoo.planning.job import CompilerError, Estimate, Job
from zoo.planning.planner import Candidate, candidates, search
from zoo.planning.roofline import Times
from zoo.publishing.tensors import num_parameters
from zoo.training import chips

CHIP = dataclasses.replace(chips.CHIPS["h100"], memory=100.0)
TARGET = dataclasses.replace(targets.parse("h100:8"), chip=CHIP)
SIZES = small_config(num_heads=4, **{"attention.num_kv_heads": 2})


def by_hand(rows=8, seq_len=128, flops=1e9, parameters=10_000, target=TARGET, **sizes):
    config = configuration.replaced(SIZES, sizes)
    return candidates(config, parameters, flops, rows, seq_len, target)


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


def test_a_step_by_hand():
    where = {each.mesh: each for each in by_hand(parameters=1_000_000)}
    link = CHIP.interconnect
    fsdp = where["fsdp=8"]
    assert fsdp.parameters == pytest.approx(3 * 2e6 * 7 / 8 / link)
    assert fsdp.state == 12e6 / 8
    assert (fsdp.activations, fsdp.compute) == (0, pytest.approx(1e9 / CHIP.flops / 8))
    assert where["data=8"].parameters == pytest.approx(2 * 2e6 * 7 / 8 / link)
    assert where["data=8"].state == 12e6
    both = where["fsdp=4,tensor=2"]
    assert both.parameters == pytest.approx(3 * 1e6 * 3 / 4 / link)
    local = 8 * 128 / 4 * SIZES.d_model * 2
    assert both.activations == pytest.approx((5 * SIZES.num_layers + 2) * local / link)
    assert both.seconds == max(both.compute, both.parameters) + both.activations


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
        assert found[mesh].state == pytest.approx(12 * held, rel=0.03), mesh
    own = 3 * SIZES.num_layers * 8 * SIZES.d_model * SIZES.hidden_size
    expected = 3 * 2 * (parameters - own) * 7 / 8 / CHIP.interconnect
    assert found["expert=8"].parameters == pytest.approx(expected)


def test_split_tokens_gather_keys_and_values():
    [split] = [each for each in by_hand(rows=1, parameters=8) if each.mesh == "context=8"]
    keys = 2 * SIZES.kv_heads * SIZES.head_size * 128 * 2
    expected = 3 * SIZES.num_layers * keys * 7 / 8 / CHIP.interconnect
    assert split.activations == pytest.approx(expected)


def test_the_fastest_by_hand_comes_first():
    # Little to compute, many parameters: the links decide. Much to compute: they are hidden.
    assert by_hand(parameters=10**9, flops=1.0)[0].mesh != "data=8"
    found = by_hand(flops=1e18)
    assert found[0].activations == 0
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


def compiled(monkeypatch, times, too_large=(), broken=()):
    """A compiler that takes times by their mesh; and what the search says, and compiles."""
    said, made = [], []

    def make_job(mesh):
        return mock.NonCallableMagicMock(spec=Job, mesh=mesh)

    def make(job, target):
        made.append(job.mesh)
        if job.mesh in broken:
            raise CompilerError("it aborted")
        memory = mock.Mock(fits=job.mesh not in too_large, total=50.0)
        return mock.NonCallableMagicMock(spec=Estimate, job=job, memory=memory)

    def roofline(estimate):
        return mock.Mock(by_op=Times(compute=times[estimate.job.mesh]))

    monkeypatch.setattr(planner, "roofline", roofline)
    found = [Candidate(mesh, 10.0, 1.0, 0.5, 0.1) for mesh in times]
    large = Candidate("data=8", 1000.0, 0.1, 0.0, 0.0)
    monkeypatch.setattr(planner, "make_estimate", make)
    monkeypatch.setattr(planner, "say", said.append)
    result = search([large, *found], make_job, TARGET)
    return result, said, made


def test_the_best_few_are_compiled_and_the_fastest_is_taken(monkeypatch):
    times = {"a": 3.0, "b": 2.0, "c": 4.0, "d": 1.0}
    (estimate, reason), said, made = compiled(monkeypatch, times)
    assert made == ["a", "b", "c"]  # not what does not fit by its state, nor more than three
    assert estimate.job.mesh == "b"
    assert reason == "--mesh b: 2.000 s by instruction, the least of 3; a takes 1.50 of its time"
    assert said[0] == "5 meshes divide the model and the batch; the state of 4 fits"
    assert "by hand 1.100 s (products 1.000, parameters 0.500, activations 0.100)" in said[1]


def test_meshes_that_do_not_fit_or_compile_are_passed_over(monkeypatch):
    times = {"a": 3.0, "b": 2.0, "c": 4.0, "d": 1.0}
    (estimate, _), said, made = compiled(monkeypatch, times, too_large={"a"}, broken={"b"})
    assert made == ["a", "b", "c", "d"]
    assert estimate.job.mesh == "d"
    assert any("it cannot be: it aborted" in line for line in said)
    many = dict.fromkeys("abcdefgh", 1.0)
    with pytest.raises(ValueError, match=r"'search': none of the 6 meshes .* of h100:8, fits"):
        compiled(monkeypatch, many, too_large=set(many))


def test_a_search_needs_peaks(monkeypatch):
    monkeypatch.setitem(command.SIZES, "small", small_config())
    with pytest.raises(
        ValueError, match=r"mesh='search' compares .* name a mesh for small on cpu:8"
    ):
        command.main(command.Config(model="small", target="cpu:8", mesh="search"))
