"""zoo.planning.command: `python -m zoo plan`, and the sizes that it takes by name."""

import dataclasses
import math
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from helpers import make_transformer, small_config
from planning_cases import QUOTED

import zoo
from zoo import losses, optimizers, transformer
from zoo.planning import (
    command,
    roofline,
    sizes,
    targets,
)
from zoo.planning.job import Estimate, make_estimate
from zoo.publishing.tensors import num_parameters
from zoo.sharding.axes import is_parameter
from zoo.training import chips
from zoo.training.state import Blueprint
from zoo.training.step import make_train_step
from zoo.wrappers import lora

MiB = 2**20


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


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 16),  # bytes: the master, its gradient and two moments
        ({"optimizer": "lion"}, 12),
        ({"optimizer": "adafactor"}, 8),
        ({"method": "lora", "lora": lora.Config(rank=1)}, 2),  # the base in bf16
        ({"method": "lora", "lora": lora.Config(rank=1), "base": "int8"}, 1),
    ],
)
def test_a_search_counts_the_state_of_the_training(monkeypatch, changes, each):
    """As a mesh on which the state does not fit is not compiled."""
    monkeypatch.setitem(sizes.SIZES, "small", small_config(d_model=512, num_heads=8, d_ff=2048))
    found, no_estimate = [], mock.NonCallableMagicMock(spec=Estimate)
    monkeypatch.setattr(
        command, "fastest", lambda these, job, target: (found.extend(these), (no_estimate, ""))[1]
    )
    config, target = (
        command.Config(model="small", target="h100:8", **changes),
        targets.parse("h100:8"),
    )
    command.search(config, command.skeleton_of(config, None), target)
    states = {candidate.mesh: candidate.state for candidate in found}
    whole = each * num_parameters(sizes.published("small"))
    assert states["data=8"] == pytest.approx(whole, rel=0.1)
    assert states["fsdp=8"] == pytest.approx(whole / 8, rel=0.1)


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


def test_tracing_refuses_indivisible_rows():
    mesh = zoo.make_mesh("fsdp=4,tensor=2")
    optimizer = optimizers.make_optimizer(optimizers.Config(), 100)
    state = Blueprint(make_transformer(), optimizer, key=jax.random.key(0), mesh=mesh).skeleton
    step = make_train_step(losses.next_token, optimizer, mesh=mesh, precision="fp32")
    with pytest.raises(ValueError, match="has 6 rows"):
        step.trace(state, {"tokens": jax.ShapeDtypeStruct((6, 8), jnp.int32)})


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
