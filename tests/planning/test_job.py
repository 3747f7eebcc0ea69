"""zoo.planning.job and roofline: compiled steps, their memory, traffic and least time."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from planning_cases import job, small_estimate

import zoo
from zoo.planning import (
    planner,
    report,
    roofline,
    targets,
)
from zoo.planning.job import CompilerError, Memory, make_estimate, wanted_bytes
from zoo.quantization.matrix import quantize
from zoo.training import chips, compiled
from zoo.training.state import init_state
from zoo.training.step import make_train_step


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


def test_a_cpu_has_no_roofline():
    estimate = small_estimate()
    assert roofline.roofline(estimate) is None
    assert any("No peak" in line for line in report.caveats(estimate))


def test_estimates_allocate_no_arrays():
    small_estimate.cache_clear()
    before = {id(x) for x in jax.live_arrays()}
    small_estimate()
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(x.nbytes for x in new) < 4096 < small_estimate().memory.parameters


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
