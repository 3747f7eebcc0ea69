"""Mixed precision: fp32 master weights, bf16 or fp16 compute, fp32 reductions, and dynamic scale.

In "int8" a step computes in bf16, but for the products of blocks: see `zoo.nn.rounded_products`.
Products with weights go through `matmul` or `product`, which choose how a platform multiplies;
those of experts, through `zoo.nn.grouped_products`, are the exception.
"""

import contextlib
import functools
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from zoo.nn import stateful
from zoo.nn.derivatives import Static, custom_vjp
from zoo.nn.parameters import (
    Operand,
    casts_at_use,
    casts_inputs,
    computing_in,
    gather_foreign,
    resolve_for_use,
)
from zoo.sharding.axes import keystr

Tree = TypeVar("Tree")
DTypeName = Literal["bf16", "fp16", "fp32"]
Precision = Literal[DTypeName, "int8"]

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

# Entries of a batch that are compared with outputs or weigh them, and so are never cast.
KEPT = frozenset({"weights", "weight", "labels", "label", "targets", "target"})


def compute_dtype(precision: Precision) -> Any:
    """The dtype of activations, and of products but for those of blocks in "int8".

    Raises:
        ValueError: another name.
    """
    names = (*DTYPES, "int8")
    if precision not in names:
        raise ValueError(f"precision={precision!r}: choose one of {sorted(names)}")
    return DTYPES.get(precision, jnp.bfloat16)


def check_precision(precision: Precision, mesh: Mesh | None) -> None:
    """Refuse an unknown precision, or one that the devices of a mesh (or JAX's) lack.

    Products of int8 came to Cloud TPUs with v4, and to NVIDIA's GPUs with compute capability 7.5
    (Turing). CPUs have the same numbers by way of bf16; and bf16 and fp16 are computed everywhere,
    if by way of fp32.

    Raises:
        ValueError: such a precision, with those to take instead.
    """
    compute_dtype(precision)
    if precision != "int8":
        return
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    is_old_gpu = re.fullmatch(r"\d+\.\d+", capability) is not None and float(capability) < 7.5
    if is_old_gpu or re.match(r"TPU v[23]\b", device.device_kind):
        others = "fp16 or fp32" if is_old_gpu else "bf16 or fp32"
        raise ValueError(
            f"precision={precision!r}: {device.device_kind} has no products of int8; take {others} "
            "there, or a TPU from v4 on or a GPU from Turing on"
        )


def native_precision() -> Precision:
    """bf16 where the devices multiply it: GPUs, TPUs, and CPUs with instructions for it; or fp32.

    Where they do not, XLA converts every operand, and bf16 takes twice as long as fp32.
    """
    if jax.default_backend() != "cpu":
        return "bf16"
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return "bf16" if words & {"avx512_bf16", "amx_bf16"} else "fp32"


# A context of JAX's own, so that what was traced in one precision is not taken for another.
_rounds_blocks = jax.make_user_context(default_value=False)


def rounds_blocks() -> bool:
    """Whether the step around multiplies the matrices of blocks in int8."""
    return bool(_rounds_blocks.value)


@contextlib.contextmanager
def in_precision(model: Tree, precision: Precision) -> Iterator[Tree]:
    """The model as a step computes with it: cast as a whole, or within by itself (`CastsAtUse`).

    An `eqx.nn.State` keeps its dtypes, and the layers that have one compute in fp32. It enters
    `exact_products`, which a gradient also needs around the function that it is of.
    """
    dtype, rounds = compute_dtype(precision), precision == "int8"
    with computing_in(dtype), exact_products(precision), _rounds_blocks(rounds):
        if not casts_at_use(model):
            model = stateful.cast_around(resolve_for_use(model), dtype)
        yield gather_foreign(model)


def cast_inputs(
    model: Any, batch: Tree, precision: Precision, kept: Collection[str | int] = ()
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


def exact_products(precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Within, products in "fp32" are of fp32: GPU and TPU multiply less precisely by default.

    JAX traces the gradients that are written out only after the function that they belong to.
    """
    return jax.default_matmul_precision("highest" if precision == "fp32" else None)


def platform() -> str:
    """The platform of the program at hand, "cpu", "gpu" or "tpu": that of the mesh around it.

    They need not be this machine's: a program can be compiled for a TPU without one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """JAX's name of the chip that the program at hand is for, such as "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def low_on_cpu(x: Array) -> bool:
    """Whether x is bf16 or fp16 on a CPU, where XLA is fast in some forms of a product only."""
    return x.dtype.itemsize < 4 and platform() == "cpu"


def product(
    x: Float[Array, "..."],
    y: Float[Array, "..."],
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Contract axes of x with axes of y, and return `dtype`; without a gradient rule of its own.

    XLA for CPU uses the bf16 instructions only where a product of bf16 returns fp32; an
    accelerator accumulates in fp32 anyway, and writes half as much.
    """
    preferred = jnp.float32 if low_on_cpu(x) else dtype
    z = lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=preferred)
    return z.astype(dtype)


# A custom gradient, or a product that returns fp32 would have fp32 inputs in its gradient.
@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _matmul(
    x: Float[Array, "b m k"], w: Float[Array, "k n"], dtype: DTypeLike
) -> Float[Array, "b m n"]:
    return _matmul_forward(x, w, dtype, needed=(False, False))[0]


def _matmul_forward(
    x: Array, w: Array, dtype: DTypeLike, *, needed: tuple[bool, ...]
) -> tuple[Array, tuple[Array | None, Array | None, Static]]:
    # Not by way of `_matmul`: a remat policy does not see the products inside a custom gradient.
    b, m, k = x.shape
    rows = x.reshape(b * m, k)
    if b * m == 1 and low_on_cpu(x):
        # XLA for CPU converts the whole weight to fp32 to multiply it with one row, not with two.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    result = product(rows, w, ((1,), (0,)), dtype)
    # What only the gradient of a frozen weight would take is not kept.
    kept = (x if needed[1] else None, w if needed[0] else None, Static((x.dtype, w.dtype)))
    return result[: b * m].reshape(b, m, -1), kept


def _matmul_backward(
    dtype: DTypeLike, residuals: tuple[Array | None, Array | None, Static], g: Array
) -> tuple[Array | None, Array | None]:
    x, w, dtypes = residuals
    of_x, of_w = dtypes.value
    b, m, n = g.shape
    g = g.astype(of_x)
    dx = None
    if w is not None:
        dx = product(g.reshape(b * m, n), w, ((1,), (1,)), of_x).reshape(b, m, -1)
    return dx, None if x is None else weight_gradient(x, g, of_w)


def weight_gradient(
    x: Float[Array, "b m k"], g: Float[Array, "b m n"], dtype: DTypeLike
) -> Float[Array, "k n"]:
    """The gradient of a product's weight, from its input and the gradient of its result."""
    if x.dtype == jnp.float32:
        return product(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), ((0,), (0,)), dtype)
    # Two axes make XLA for CPU transpose x in memory, which its bf16 product needs.
    return product(x, g, ((0, 1), (0, 1)), dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward, by_need=True)


def matmul(
    x: Float[Array, "..."],
    w: Float[Array, "..."] | Operand,
    *,
    contract: int = 1,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Contract the last `contract` axes of an activation with the first ones of a weight.

    Both have the same dtype, which is also the result's (or `dtype`, for fp32 logits) and that of
    the gradient's products. `matmul(x_BTE, wq_ENH)` is [B, T, N, H], and
    `matmul(y_BTNH, wo_NHE, contract=2)` is [B, T, E].
    """
    if isinstance(w, Operand):
        return w.times(x, contract=contract, dtype=dtype)
    batch, out = x.shape[: x.ndim - contract], w.shape[contract:]
    inner = math.prod(w.shape[:contract])
    rows = x.reshape(batch[0] if batch else 1, math.prod(batch[1:]), inner)
    y = _matmul(rows, w.reshape(inner, -1), x.dtype if dtype is None else dtype)
    return y.reshape(*batch, *out)


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
