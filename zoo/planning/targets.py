"""The target of a plan: `v5e:4x4`, `2xv5e:4x4`, `h200:8`, `24GiB:1` or `cpu:8`."""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from zoo.nn.precision import Precision, native_precision
from zoo.training.chips import CHIPS, Chip, GiB, of_kind


@dataclass(frozen=True)
class Target:
    """Chips of one kind, and how many."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    """The shape of a slice, or the devices of a machine."""
    present: tuple[Any, ...] = ()
    """The devices, where they are this machine's."""
    num_slices: int = 1
    """Slices, or machines, with the slow network between them."""

    @property
    def num_devices(self) -> int:
        """The number of devices of a mesh of all of it."""
        return self.num_slices * math.prod(self.shape) * self.chip.devices

    @property
    def is_exact(self) -> bool:
        """Whether its own compiler runs without the hardware."""
        return self.chip.kind != "gpu" or bool(self.present)

    @property
    def precision(self) -> Precision:
        """The dtype that recipes compute in there by default."""
        return native_precision() if self.chip.kind == "cpu" else "bf16"

    def devices(self) -> list[Any]:
        """Devices to compile for: for a TPU its own, else virtual ones of this machine's CPU.

        Raises:
            ValueError: an unknown topology.
            ImportError: a TPU without its compiler, the package libtpu.
        """
        if self.present:
            return list(self.present)
        return self._tpus() if self.chip.kind == "tpu" else self._cpus()

    def _tpus(self) -> list[Any]:
        # Else libtpu asks the cloud what machine this is, prints that nobody answers, and lets
        # no second process compile at the same time.
        for name, value in (
            ("TPU_SKIP_MDS_QUERY", "1"),
            ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
            ("TPU_WORKER_HOSTNAMES", "localhost"),
        ):
            os.environ.setdefault(name, value)
        os.environ["TPU_ACCELERATOR_TYPE"] = f"{self.chip.name}-{math.prod(self.shape)}"
        try:
            import libtpu  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"target={self.name!r}: the compiler for TPUs is the package libtpu; "
                "pip install 'zoo[plan]' (no TPU is needed), or plan for cpu:N"
            ) from error
        from jax.experimental import topologies

        # The two cores of a chip are one device: of a v4 only if told so.
        options: dict[str, Any] = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        if math.prod(self.shape) == 1:  # else a host has four chips, and slices have whole hosts
            options["chips_per_host_bounds"] = (1, 1, 1)
        try:
            slice_ = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
            found = topologies.get_topology_desc(slice_, platform="tpu", **options).devices
        except Exception as error:  # of no common type
            like = "x".join(["4"] * (self.chip.links // 2))
            raise ValueError(
                f"target={self.name!r}: no such slice ({error}); slices are such as "
                f"{self.chip.name}:{like.replace('4', '1')} or {self.chip.name}:{like}"
            ) from error
        return list(found)

    def _cpus(self) -> list[Any]:
        wanted = self.num_devices
        with contextlib.suppress(RuntimeError):  # JAX has started, with as many as it has
            jax.config.update("jax_num_cpu_devices", wanted)
        found = jax.devices("cpu")
        if len(found) < wanted:
            raise ValueError(
                f"target={self.name!r} needs {wanted} virtual CPU devices, and JAX has started "
                f"with {len(found)}: XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
            )
        return found[:wanted]


def parse(text: str) -> Target:
    """A target from a text: a chip, a colon, and the shape of a slice or a number of devices.

    Raises:
        ValueError: an unknown target; the message lists the known ones.
    """
    given = text.strip().lower()
    match = re.fullmatch(r"(?:(\d+)x)?([a-z][a-z0-9-]*|\d+(?:\.\d+)?gib):(\d+(?:x\d+)*)", given)
    slices, name, sizes = match.groups() if match else (None, "", "")
    shape, num_slices = tuple(map(int, sizes.split("x"))) if sizes else (), int(slices or 1)
    chip = CHIPS.get({"a100": "a100-80"}.get(name, name))
    if name.endswith("gib"):
        chip = Chip(name.replace("gib", "GiB"), "gpu", float(name[:-3]) * GiB)
    if name == "cpu" and num_slices * math.prod(shape):
        chip = cpu(num_slices * math.prod(shape))
    if chip is None or 0 in (num_slices, *shape) or (len(shape) > 1) != (chip.kind == "tpu"):
        names = ", ".join((*CHIPS, "cpu"))
        raise ValueError(
            f"target={text!r}: write the shape of a TPU slice, such as v5e:4x4 or v5p:4x4x4, or "
            f"a number of GPUs or virtual CPU devices, such as h200:8 or cpu:8, with a GPU's name "
            f"or memory (24GiB:1); several slices or machines as 2xv5e:4x4; chips: {names}"
        )
    if chip.kind == "gpu" and num_slices == 1 and shape[0] % _GPUS == 0:
        num_slices, shape = shape[0] // _GPUS, (_GPUS,)
    return Target(given, chip, shape, num_slices=num_slices)


_GPUS = 8  # of a machine: the largest that NVLink's switch joins in a DGX or an HGX


def cpu(devices: int) -> Chip:
    """A virtual device of this machine: its share of the memory, and no peak to quote."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Chip("cpu", "cpu", memory / devices)


def of_device(device: Any, devices: int) -> Chip:
    """The chip that a device of JAX's is, with the memory that JAX may use of it."""
    if device.platform == "cpu":
        return cpu(devices)
    kind = device.device_kind
    chip = of_kind(kind) or Chip(kind, device.platform, math.inf)
    usable = (device.memory_stats() or {}).get("bytes_limit", chip.memory)
    return dataclasses.replace(chip, memory=float(usable))


def present(mesh: Mesh) -> Target:
    """The devices of a mesh that is at hand."""
    devices = tuple(mesh.devices.flat)
    chip = of_device(devices[0], len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    shape: tuple[int, ...] = (len(devices) // slices,)
    if chip.links:
        by_axis = zip(*(device.coords for device in devices), strict=True)
        shape = tuple(max(x) - min(x) + 1 for x in by_axis)[: chip.links // 2]
    return Target(f"{chip.name}:{len(devices)}", chip, shape, devices, slices)


def prepare(text: str) -> Target:
    """The target of a plan; from here on JAX computes nothing but on this machine's CPU.

    Raises:
        ValueError, ImportError: as `parse` and `Target.devices`.
    """
    jax.config.update("jax_platforms", "cpu")
    target = parse(text)
    target.devices()
    return target


def compiler_version() -> str | None:
    """The version of the TPU's compiler, such as "0.0.42.1"; None where it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_mismatch() -> list[str]:
    """A warning, where the TPU's compiler is not the one that this jax asks for."""
    found, requirements = compiler_version(), importlib.metadata.requires("jax") or []
    pins = [re.match(r"libtpu==([\d.]+?)(\.\*)?;", each) for each in requirements]
    wanted = next((pin[1] for pin in pins if pin), None)
    if found is None or wanted is None or f"{found}.".startswith(f"{wanted}."):
        return []
    return [
        f"libtpu {found} is not the compiler that jax {jax.__version__} asks for ({wanted}): it "
        "may give other figures of the memory, or abort"
    ]
