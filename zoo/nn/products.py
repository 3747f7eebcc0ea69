"""The one way to multiply: `matmul` takes arrays, and operands: matrices of another form.

An `Operand` says how it is multiplied: one with an adapter by way of other products, and one of
codes by a product and a gradient of its own, for which `multiply` has the rule. Experts are the
exception, `zoo.nn.grouped_products`.

Products, and other functions by `custom_vjp`, have a gradient that is written out, for reverse mode
alone. Within `forward_mode` each is differentiated by its own operations, for `jax.jvp`.
"""

import abc
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, DTypeLike, Float

from zoo.sharding import num_copies

Model = TypeVar("Model")

Kind = Literal["int8", "int4", "nf4"]  # of `Quantized` matrices, as flags show them

# The `checkpoint_name` of products that JAX does not know as such: a remat policy that keeps
# products keeps them too.
PRODUCT = "operand_product"

# A context of JAX's own: what was traced outside is not taken from a cache inside, nor the reverse.
_forward_mode = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Within, `jax.jvp`, `jax.jacfwd`, `jax.linearize` and `jax.hessian` go through any model.

    For example `jax.jvp(jax.grad(loss), (params,), (direction,))` is a Hessian-vector product. The
    gradients inside are by autodiff: the same values but for rounding, slower, and with more
    memory, as attention and losses keep all logits. Compiled steps outside do not change.
    """
    with _forward_mode(True):
        yield


def in_forward_mode() -> bool:
    """Whether functions are differentiated by their own operations here."""
    return bool(_forward_mode.value)


class Static(eqx.Module):
    """A value that is no array, among the residuals of a gradient."""

    value: Any = eqx.field(static=True)


class custom_vjp:
    """`jax.custom_vjp`, for a function whose own operations can be differentiated too."""

    def __init__(self, function: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()):
        functools.update_wrapper(self, function)
        self._plain, self._nondiff_argnums = function, nondiff_argnums
        self._with_rule = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    def defvjp(
        self,
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[..., Any],
        *,
        by_need: bool = False,
    ) -> None:
        """Give the rule, as `jax.custom_vjp.defvjp` takes it.

        With `by_need`, `forward` gets one more argument, `needed`: the differentiable inputs with a
        boolean for each array: whether its gradient is asked for, as a frozen parameter's is not.
        `backward` gives None for one that is not.
        """
        if not by_need:
            self._with_rule.defvjp(forward, backward)
            return

        @functools.wraps(forward)
        def forward_by_need(*args: Any) -> tuple[Any, Any]:
            inputs = tuple(x for i, x in enumerate(args) if i not in self._nondiff_argnums)
            needed = _map(CustomVJPPrimal, lambda x: x.perturbed, inputs)
            return forward(*_map(CustomVJPPrimal, lambda x: x.value, args), needed=needed)

        @functools.wraps(backward)
        def backward_by_need(*args: Any) -> Any:
            return backward(*_map(SymbolicZero, lambda x: jnp.zeros(x.shape, x.dtype), args))

        self._with_rule.defvjp(forward_by_need, backward_by_need, symbolic_zeros=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if in_forward_mode():
            return self._plain(*args, **kwargs)
        # JAX's error of forward mode shows the line in its traceback, so the line says the way out.
        return self._with_rule(*args, **kwargs)  # for forward mode, use zoo.forward_mode()


def _map(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with a function of each node of a class in its place."""
    is_one = lambda x: isinstance(x, cls)  # noqa: E731
    return jax.tree.map(lambda x: function(x) if is_one(x) else x, tree, is_leaf=is_one)


class Operand(eqx.Module):
    """A matrix that a product takes as it is, without making the whole of it.

    It stays in the place of a parameter whose annotation says so, as `weight: Float[Array, "embed
    mlp"] | Operand`; elsewhere `unshard` and the cast put its value. Its leading axes may stack it.
    """

    @abc.abstractmethod
    def value(self) -> Array:
        """The matrix as an array."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The dtype of the matrix."""

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @abc.abstractmethod
    def times(self, x: Array, *, contract: int = 1, dtype: DTypeLike | None = None) -> Array:
        """The product `matmul(x, self, contract=contract, dtype=dtype)`."""

    def rows(self, ids: Array) -> Array:
        """The rows of the matrix, as of a table: [...] ids as [..., embed], clipped."""
        return self.value().at[ids].get(mode="clip")

    def transposed(self) -> "Array | Operand":
        """The matrix with its two axes exchanged."""
        return self.value().T

    def cast(self, dtype: DTypeLike) -> "Operand":
        """The matrix as it is used in a dtype: its floating-point arrays are cast."""
        return jax.tree.map(
            lambda x: cast_array(x, dtype), self, is_leaf=lambda x: x is not self and is_operand(x)
        )


class Codes(Operand):
    """A matrix of codes, with a product and a gradient of its own: see `multiply`."""

    @abc.abstractmethod
    def product(
        self, rows: Float[Array, "rows k"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows n"]:
        """Rows times the matrix, whose first `contract` axes are its inputs."""

    @abc.abstractmethod
    def input_gradient(
        self, g: Float[Array, "rows n"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows k"]:
        """The gradient of the rows, in `dtype`, from that of the product."""


class Quantized(Codes):
    """A matrix of few bits per value in the place of a stored one; it is never trained."""

    kind: eqx.AbstractVar[str]
    codes: eqx.AbstractVar[Array]


def is_operand(x: Any) -> bool:
    """Whether a node of a model is a matrix that products take as it is."""
    return isinstance(x, Operand)


def is_quantized(x: Any) -> bool:
    """Whether a node of a model is a quantised matrix."""
    return isinstance(x, Quantized)


def dequantize(model: Model) -> Model:
    """The model with plain matrices in the place of quantised ones, in their dtypes."""
    return jax.tree.map(lambda x: x.value() if is_quantized(x) else x, model, is_leaf=is_quantized)


def transposed(x: Array | Operand) -> Array | Operand:
    """A matrix with its two axes exchanged."""
    return x.transposed() if isinstance(x, Operand) else x.T


def cast_array(x: Any, dtype: DTypeLike) -> Any:
    """A floating-point array or an operand in a dtype; anything else as it is."""
    if isinstance(x, Operand):
        return x.cast(dtype)
    is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if is_float else x


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
    return multiply(x, w, None, contract=contract, dtype=dtype)


def multiply(
    x: Float[Array, "..."],
    w: Float[Array, "..."] | None,
    codes: Codes | None,
    *,
    contract: int = 1,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """The product with a weight, as `matmul` has it, or with the codes in its place.

    With both, the codes give the product and the gradient of `x`, and the weight, which is not
    read, takes the gradient of a plain product. Codes alone have none.
    """
    matrix: Any = codes if w is None else w
    shape = matrix.shape
    batch, out = x.shape[: x.ndim - contract], shape[contract:]
    inner = math.prod(shape[:contract])
    rows = x.reshape(batch[0] if batch else 1, math.prod(batch[1:]), inner)
    w = None if w is None else w.reshape(inner, -1)
    y = _multiply(rows, w, codes, contract, jnp.dtype(x.dtype if dtype is None else dtype))
    return y.reshape(*batch, *out)


# Without a custom gradient, a product that returns fp32 would have fp32 inputs in its gradient, and
# codes would be kept as their values.
@functools.partial(custom_vjp, nondiff_argnums=(3, 4))
def _multiply(
    x: Float[Array, "b m k"],
    w: Float[Array, "k n"] | None,
    codes: Codes | None,
    contract: int,
    dtype: Any,
) -> Float[Array, "b m n"]:
    y = _forward(x, w, codes, contract, dtype, needed=(False, False, None))[0]
    if w is None or codes is None or not in_forward_mode():
        return y
    plain = _multiply(x, w, None, contract, dtype)  # for a derivative, of which codes have none
    return plain + lax.stop_gradient(y - plain)


def _forward(
    x: Array,
    w: Any,
    codes: Codes | None,
    contract: int,
    dtype: Any,
    *,
    needed: tuple[bool, bool | None, Any],
) -> tuple[Array, tuple[Array | None, Array | Codes | None, Static]]:
    # Not by way of `_multiply`: a remat policy does not see the products inside a custom gradient.
    b, m, k = x.shape
    rows = x.reshape(b * m, k)
    if codes is not None:
        result = codes.product(rows, contract, dtype)
    else:
        if b * m == 1 and low_on_cpu(x):
            # XLA for CPU converts a whole weight to fp32 to multiply it with one row, not with two.
            rows = jnp.pad(rows, ((0, 1), (0, 0)))
        result = product(rows, w, ((1,), (0,)), dtype)
    # What only the gradient of a frozen weight would take is not kept.
    other = (w if codes is None else codes) if needed[0] else None
    dtypes = Static((x.dtype, None if w is None else w.dtype))
    return result[: b * m].reshape(b, m, -1), (x if needed[1] else None, other, dtypes)


def _backward(
    contract: int,
    dtype: Any,
    residuals: tuple[Array | None, Array | Codes | None, Static],
    g: Array,
) -> tuple[Array | None, Array | None, None]:
    x, w, dtypes = residuals
    of_x, of_w = dtypes.value
    b, m, n = g.shape
    dx, low = None, g.astype(of_x)
    if isinstance(w, Codes):
        dx = w.input_gradient(g.reshape(b * m, n), contract, of_x).reshape(b, m, -1)
    elif w is not None:
        dx = product(low.reshape(b * m, n), w, ((1,), (1,)), of_x).reshape(b, m, -1)
    if x is None:
        return dx, None, None
    return dx, _weight_gradient(x, low, of_w), None


def _weight_gradient(
    x: Float[Array, "b m k"], g: Float[Array, "b m n"], dtype: Any
) -> Float[Array, "k n"]:
    b, m, k = x.shape
    copies = num_copies()
    if platform() == "tpu" and copies > 1 and b % copies == 0:
        # Each slice's product, and then their sum: XLA for TPU scatters the first within a slice
        # and sends parts between slices; for one product it would all-reduce over both.
        x, g = (y.reshape(copies, b // copies * m, -1) for y in (x, g))
        each = lax.dot_general(x, g, (((1,), (1,)), ((0,), (0,))), preferred_element_type=dtype)
        return lax.optimization_barrier(each).sum(0)
    if x.dtype == jnp.float32:
        return product(x.reshape(b * m, k), g.reshape(b * m, -1), ((0,), (0,)), dtype)
    # Two axes make XLA for CPU transpose x in memory, which its bf16 product needs.
    return product(x, g, ((0, 1), (0, 1)), dtype)


_multiply.defvjp(_forward, _backward, by_need=True)


def platform() -> str:
    """The platform of the program at hand, "cpu", "gpu" or "tpu": that of the mesh around it.

    It need not be this machine's: a program can be compiled for a TPU without one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """JAX's name of the chip that the program at hand is for, such as "TPU v5 lite"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def compute_capability(device: Any = None) -> float | None:
    """NVIDIA's number of a GPU's generation, such as 9.0; None if it is not known.

    That is of JAX's first device unless another one is given.
    """
    device = jax.devices()[0] if device is None else device
    found = str(getattr(device, "compute_capability", ""))
    return float(found) if re.fullmatch(r"\d+\.\d+", found) else None


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
