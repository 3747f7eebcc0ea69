"""Mixed precision: fp32 master weights, bf16 or fp16 compute, fp32 reductions, and dynamic scale.

A `Scheme` is a precision of another kind: "int8" computes in bf16, but for the products of blocks.
"""

import abc
import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32

from zoo.common import plugins
from zoo.nn import stateful
from zoo.nn.parameters import (
    casts_at_use,
    casts_inputs,
    computing_in,
    resolve_for_use,
    unshard_foreign,
)
from zoo.sharding.axes import keystr

Tree = TypeVar("Tree")
DTypeName = Literal["bf16", "fp16", "fp32"]
Precision = Literal[DTypeName, "int8"]

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

# Entries of a batch that are compared with outputs or weigh them, and so are never cast.
KEPT = frozenset({"weights", "weight", "labels", "label", "targets", "target"})


class Scheme(abc.ABC):
    """A precision that is no dtype: it puts operands of its own in the place of some matrices.

    An instance is a precision under the name of its plugin, in the group "zoo.precisions".
    """

    dtype: ClassVar[Any]
    """The dtype of activations, and of all other products."""

    @abc.abstractmethod
    def operands(self, layer: Tree) -> Tree:
        """A layer of a model's blocks, with operands for the matrices that it multiplies."""

    @abc.abstractmethod
    def check_device(self, device: Any) -> None:
        """Raise a ValueError, with precisions to take instead, for a device that lacks it."""

    @abc.abstractmethod
    def check_loss(self, jaxpr: Any) -> None:
        """Raise a ValueError for the jaxpr of a loss that multiplies nothing in this precision."""


def scheme_of(precision: Precision | str) -> Scheme | None:
    """The scheme of a precision; None if it is a dtype.

    Raises:
        ValueError: another name.
    """
    if precision in DTYPES:
        return None
    found = plugins.find("zoo.precisions", precision)
    if found is None:
        names = sorted((*DTYPES, *plugins.names("zoo.precisions")))
        raise ValueError(f"precision={precision!r}: choose one of {names}")
    return found


def compute_dtype(precision: Precision | str) -> Any:
    """The dtype of activations, and of products other than a `Scheme`'s.

    Raises:
        ValueError: another name.
    """
    scheme = scheme_of(precision)
    return DTYPES[precision] if scheme is None else scheme.dtype


def check_precision(precision: Precision | str, mesh: Mesh | None) -> None:
    """Refuse an unknown precision, or one that the devices of a mesh (or JAX's) lack.

    bf16 and fp16 are computed everywhere, in places by way of fp32.

    Raises:
        ValueError: such a precision, with those to take instead.
    """
    scheme = scheme_of(precision)
    if scheme is not None:
        scheme.check_device(jax.devices()[0] if mesh is None else mesh.devices.flat[0])


def native_precision() -> Precision:
    """bf16 where the devices multiply it: GPUs, TPUs, and CPUs with instructions for it; or fp32.

    Where they do not, XLA converts every operand, and bf16 takes twice as long as fp32.
    """
    if jax.default_backend() != "cpu":
        return "bf16"
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return "bf16" if words & {"avx512_bf16", "amx_bf16"} else "fp32"


@contextlib.contextmanager
def in_precision(model: Tree, precision: Precision | str) -> Iterator[Tree]:
    """The model as a step computes with it: cast as a whole, or casting itself (`CastsAtUse`).

    An `eqx.nn.State` keeps its dtypes, and the layers that have one compute in fp32. It enters
    `exact_products`, which a gradient needs around its function too.
    """
    scheme = scheme_of(precision)
    dtype, operands = compute_dtype(precision), None if scheme is None else scheme.operands
    with computing_in(dtype, operands), exact_products(precision):
        if not casts_at_use(model):
            model = stateful.cast_around(resolve_for_use(model), dtype)
        yield unshard_foreign(model)


def cast_inputs(
    model: Any, batch: Tree, precision: Precision | str, kept: Collection[str | int] = ()
) -> Tree:
    """The batch as a model in a precision gets it: floating-point entries in that dtype.

    `KEPT` entries and `kept` ones stay: keys of a dict, fields or indices, at any depth. All stay
    for a model that casts its inputs itself (`CastsInputs`).

    Raises:
        ValueError: a `kept` one that the batch does not have.
    """
    if casts_inputs(model):
        return batch
    dtype, paths = compute_dtype(precision), []

    def visit(path: tuple, x: Any) -> Any:
        names = {getattr(entry, "name", getattr(entry, "key", entry)) for entry in path}
        names |= {entry.idx for entry in path if isinstance(entry, jtu.SequenceKey)}
        paths.append(names)
        stays = names & KEPT or not names.isdisjoint(kept)
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_float and not stays else x

    cast_batch = jtu.tree_map_with_path(visit, batch)
    if missing := [name for name in kept if not any(name in names for names in paths)]:
        raise ValueError(
            f"keeps_dtype({missing[0]!r}): the batch has "
            f"{[keystr(path) for path, _ in jtu.tree_leaves_with_path(batch)]}"
        )
    return cast_batch


def exact_products(precision: Precision | str) -> contextlib.AbstractContextManager[Any]:
    """Within, products in "fp32" are of fp32: GPUs and TPUs multiply less precisely by default.

    JAX traces a gradient that is written out only after its function, so it has to be around both.
    """
    return jax.default_matmul_precision("highest" if precision == "fp32" else None)


class LossScale(eqx.Module):
    """Dynamic loss scaling (Micikevicius et al. 2018), which fp16 needs.

    The scale halves at an overflow, and doubles after `PERIOD` steps in a row without one.
    """

    PERIOD = 2000
    scale: Float[Array, ""]
    good_steps: Int32[Array, ""]

    @staticmethod
    def init() -> "LossScale":
        """The scale that training starts with: 2¹⁵."""
        return LossScale(jnp.float32(2.0**15), jnp.int32(0))

    def update(self, finite: Bool[Array, ""]) -> "LossScale":
        """The scale for the next step, given whether this step's gradient was finite."""
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= self.PERIOD
        scale = jnp.where(finite, jnp.where(grow, self.scale * 2, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grow, 0, good_steps))
