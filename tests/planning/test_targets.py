"""zoo.planning.targets: devices by name, whether they are here or not."""

import re
import sys

import jax
import jax.numpy as jnp
import pytest
from planning_cases import job

from zoo import sharding
from zoo.planning import (
    collectives,
    roofline,
    targets,
)
from zoo.planning.job import make_estimate
from zoo.sharding.axes import ShardingError

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
