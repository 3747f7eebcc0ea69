"""Low-rank adapters (Hu et al. 2021) on the matrices of any family.

A product with an adapted matrix is x·W + scale · (x·down)·up, with the adapter sharded as W is, and
gathered a layer at a time. W is not trained, and has no gradient. Experts and recurrences, which
are no plain products, take W + scale · down·up, computed in fp32 a layer at a time.
"""

import dataclasses
import fnmatch
import math
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, DTypeLike, Float, Int, Key, PyTree, UInt32

from zoo.common.configuration import check, require
from zoo.nn.layers import dropout, look_up, normal
from zoo.nn.parameters import dropout_key, takes_operands
from zoo.nn.products import Operand, is_operand, matmul, transposed
from zoo.sharding.axes import Named, keystr, map_parameters, named_alone
from zoo.sharding.rules import is_hidden_matrix, is_matrix, matrix_axes
from zoo.wrappers.retrained import Retrained, retrained, retrained_in, value_of

Model = TypeVar("Model")


@dataclass(frozen=True)
class Config:
    """Which matrices have adapters, of which rank and kind."""

    rank: int = 8
    """Rank of the matrix that is added to each target."""
    alpha: float = 16.0
    """The added matrix is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Paths of matrices, such as blocks.attention.*; empty: all but embeddings and heads."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead, for high ranks (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each column of a matrix apart from its direction (Liu et al. 2024)."""
    dropout: float = 0.0
    """Rate of dropout on the input of each adapter in training."""
    tokens: tuple[int, ...] = ()
    """Ids of tokens whose rows in the embedding are trained too, such as new tokens."""
    whole: tuple[str, ...] = ()
    """Paths of the embedding or the head, to train the whole of them too."""

    def __post_init__(self) -> None:
        check(self)
        require(
            min(self.tokens, default=0) >= 0 and len({*self.tokens}) == len(self.tokens),
            f"tokens={self.tokens}: ids are not negative, and each is there once",
        )
        require(
            self.rank > 0 and self.alpha > 0,
            f"rank={self.rank}, alpha={self.alpha}: both must be positive",
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")


class Adapted(Operand):
    """A matrix with its adapter; stacked matrices have stacked ones.

    `down` takes the matrix's input axes to the rank, and `up` the rank to its output axes. A
    product with it is x·W + scale · (x·down)·up; only DoRA makes the sum of both matrices, for
    the lengths of its columns, at each use and in fp32: bf16 would round away the first updates
    (PEFT takes the dtype of the input). The matrix may be another operand: a quantised one, or one
    that has an adapter already.
    """

    weight: Float[Array, "*matrix"] | Operand
    down: Float[Array, "*inputs"]
    up: Float[Array, "*outputs"]
    magnitude: Float[Array, "*columns"] | None
    """The length of each column for DoRA, float32."""
    seed: UInt32[Array, "*stack"] | None
    """With dropout, a number per stacked matrix, so that no two have the same masks."""
    alpha: float = eqx.field(static=True)
    rank_stabilized: bool = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    num_inputs: int = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    named_by: str = eqx.field(static=True)
    frozen: bool = eqx.field(static=True, default=False)
    """Whether newer adapters were put on the model: this one is not trained then."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    @property
    def trained(self) -> list[Any]:
        """The arrays that are trained."""
        return [x for x in (self.down, self.up, self.magnitude) if x is not None]

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return self.down.shape[-1]

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def _inputs(self) -> tuple[int, ...]:
        """The input axes."""
        last = self.down.ndim - 1
        return tuple(range(last - self.num_inputs, last))

    def value(self) -> Float[Array, "..."]:
        """The matrix with its adapter merged, in the matrix's dtype; without dropout."""
        total = self._sum()
        if self.magnitude is not None:
            factor = self.magnitude / jax.lax.stop_gradient(_lengths(total, self._inputs))
            total = total * jnp.expand_dims(factor, self._inputs)
        return total.astype(self.dtype)

    def _sum(self) -> Float[Array, "..."]:
        """The sum of both matrices in fp32."""
        stacked = tuple(range(self._inputs[0]))
        added = jax.lax.dot_general(
            self.down.astype(jnp.float32),
            self.up.astype(jnp.float32),
            (((self.down.ndim - 1,), (len(stacked),)), (stacked, stacked)),
            precision=jax.lax.Precision.HIGHEST,
        )
        return value_of(self.weight).astype(jnp.float32) + self.scale * added

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)` with a single matrix, by way of the rank."""
        if contract != self.num_inputs:  # over other axes than the adapter reads
            return matmul(x, self.value().astype(x.dtype), contract=contract, dtype=dtype)
        low = matmul(self._dropped(x), self.down.astype(x.dtype), contract=contract)
        added = matmul(low * self.scale, self.up.astype(x.dtype), dtype=dtype)
        return self._with_lengths(matmul(x, self.weight, contract=contract, dtype=dtype) + added)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """The rows of a table with these ids; one beyond the last takes that row."""
        rows = look_up(self.weight, ids)
        low = look_up(self.down, ids).astype(rows.dtype)
        return self._with_lengths(rows + matmul(low * self.scale, self.up.astype(rows.dtype)))

    def transposed(self) -> Array | Operand:
        """The matrix with its two axes exchanged."""
        if self.magnitude is not None:  # whose columns are rows then
            return self.value().T
        names = {name: " ".join(reversed(axes.split())) for name, axes in self.axes}
        return dataclasses.replace(
            self,
            weight=transposed(self.weight),
            down=self.up.T,
            up=self.down.T,
            seed=None,
            dropout=0.0,
            num_inputs=1,
            axes=(
                ("*matrix", names["*matrix"]),
                ("*inputs", names["*outputs"]),
                ("*outputs", names["*inputs"]),
            ),
        )

    def cast(self, dtype: DTypeLike) -> Operand:
        """The matrix as it is used in a dtype; lengths stay as they are, to be exact."""
        new = super().cast(dtype)
        lengths = lambda x: x.magnitude  # noqa: E731
        return new if self.magnitude is None else eqx.tree_at(lengths, new, self.magnitude)

    def _dropped(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The input of the adapter, with dropout within a training step."""
        key = dropout_key()
        if key is None or self.seed is None or self.frozen:
            return x
        return dropout(x, self.dropout, jax.random.fold_in(key, self.seed))

    def _with_lengths(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """A product with the sum of both matrices, scaled to columns of the trained lengths."""
        if self.magnitude is None:
            return y
        factor = self.magnitude / jax.lax.stop_gradient(_lengths(self._sum(), self._inputs))
        factor = factor.reshape((1,) * (y.ndim - factor.ndim) + factor.shape)
        return (y.astype(jnp.float32) * factor).astype(y.dtype)


def _lengths(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    return jnp.sqrt(jnp.square(x).sum(axes))


def _adapted(
    weight: Float[Array, "..."] | Operand, named: Named, config: Config, key: Key[Array, ""]
) -> Adapted:
    """A matrix (or a stack) of the logical axes `named` with an adapter that adds nothing yet."""
    names, named_by = named
    inputs, outputs = matrix_axes(names)
    stacked = weight.shape[: inputs[0]]
    rows, columns = ([weight.shape[axis] for axis in axes] for axes in (inputs, outputs))
    # The axes of stacked layers or members are named from outside; the axis of experts is not.
    experts = [name for name in names[: inputs[0]] if name is not None]
    into, out = ([str(names[axis]) for axis in axes] for axes in (inputs, outputs))
    magnitude = seed = None
    if config.dora:
        magnitude = _lengths(value_of(weight).astype(jnp.float32), inputs)
    if config.dropout:
        seed = jax.random.bits(jax.random.fold_in(key, 1), stacked, jnp.uint32)
    return Adapted(
        weight,
        down=normal(key, (*stacked, *rows, config.rank), math.prod(rows)),
        # With zeros training begins with the model as it was.
        up=jnp.zeros((*stacked, config.rank, *columns)),
        magnitude=magnitude,
        seed=seed,
        alpha=config.alpha,
        rank_stabilized=config.rank_stabilized,
        dropout=config.dropout,
        num_inputs=len(inputs),
        axes=(
            ("*matrix", " ".join([*experts, *into, *out])),
            ("*inputs", " ".join([*experts, *into, "rank"])),
            ("*outputs", " ".join([*experts, "rank", *out])),
            ("*columns", " ".join([*experts, *out])),
            ("*stack", ""),
        ),
        named_by=named_by,
    )


def is_adapted(x: Any) -> bool:
    """Whether a node of a model is a matrix with its adapter, or one with retrained values."""
    return isinstance(x, Adapted | Retrained)


def adapt(model: Model, config: Config, *, key: Key[Array, ""]) -> Model:
    """The model with an adapter on each target, which adds nothing before training.

    Adapters that the model has already stay as they are from then on, as parts of what the new ones
    adapt: they are frozen, and have no dropout.

    Raises:
        ValueError: a target that matches no matrix, or with dropout one that cannot have it: an
            embedding, a head, experts, a recurrence; tokens that no embedding has, or a path of
            `whole` that is no embedding or head, or a target.
    """
    chosen, outline = targets(model, config), _outline(model)
    ends = {}
    if config.tokens or config.whole:
        ends = retrained_in(outline, config.tokens, config.whole)
    if both := sorted({*chosen} & {*ends}):
        raise ValueError(f"targets and tokens or whole: {both[0]} is in both; leave it out of one")

    def place(path: tuple, leaf: Any, node: Any) -> Any:
        name = keystr(path)
        if is_adapted(node):
            node = dataclasses.replace(node, frozen=True)
        if name not in chosen and name not in ends:
            return node
        named = named_alone(outline, path, leaf)
        if name in ends:
            return retrained(node, named, ends[name])
        if config.dropout and not (takes_operands(outline, path) and is_hidden_matrix(named.names)):
            raise ValueError(
                f"dropout={config.dropout}: {name} cannot have it, as it is no plain product of a "
                "hidden layer: leave dropout at 0, or choose other targets"
            )
        # By its name: a matrix's draw does not depend on which others are adapted.
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return _adapted(node, named, config, own)

    return jtu.tree_map_with_path(place, outline, model)


def _outline(model: Model) -> Model:
    """The model with a skeleton in the place of each operand, which is one matrix."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_operand(x) else x,
        model,
        is_leaf=is_operand,
    )


def matrices(model: PyTree) -> dict[str, bool]:
    """The dotted paths of a model's matrices, and whether each is a hidden one."""
    found: dict[str, bool] = {}

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        if is_matrix(names, field=keystr(path)):
            found[keystr(path)] = is_hidden_matrix(names)

    map_parameters(add, _outline(model))
    return found


def targets(model: PyTree, config: Config) -> list[str]:
    """The dotted paths of the matrices that a configuration chooses."""
    known = matrices(model)
    for pattern in config.targets:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"targets={pattern!r} matches no matrix; those are {[*known]}")
    found = [
        name
        for name, hidden in known.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.targets)
        or (hidden and not config.targets)
    ]
    if not found:
        raise ValueError(
            "targets=() chooses all but embeddings and heads, and the model has no other matrix: "
            f"name some of {[*known]}"
        )
    return found


def _adapters(model: PyTree) -> dict[str, Adapted | Retrained]:
    """The matrices with adapters that are not merged, by path, and the retrained ones."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_adapted)
    return {keystr(path): x for path, x in leaves if is_adapted(x)}


def has_adapters(model: PyTree) -> bool:
    """Whether a model has adapters that are not merged."""
    return bool(_adapters(model))


def has_trained_adapters(model: PyTree) -> bool:
    """Whether a model has adapters; only the newest train."""
    return not all(x.frozen for x in _adapters(model).values())


def merge(model: Model) -> Model:
    """The model without adapters that computes the same: each is added to its matrix."""
    return jax.tree.map(lambda x: x.value() if is_adapted(x) else x, model, is_leaf=is_adapted)


def base(model: Model) -> Model:
    """The model under the trained adapters, as it was before they were added."""
    return jax.tree.map(
        lambda x: x.weight if is_adapted(x) and not x.frozen else x, model, is_leaf=is_adapted
    )


def config_of(model: PyTree) -> Config:
    """The configuration of a model's trained adapters, whose targets are their paths.

    Raises:
        ValueError: a model without trained adapters.
    """
    newest = {path: x for path, x in _adapters(model).items() if not x.frozen}
    found = {path: x for path, x in newest.items() if isinstance(x, Adapted)}
    if not found:
        raise ValueError("the model has no adapters to save")
    one, ids = next(iter(found.values())), [getattr(x, "ids", ()) for x in newest.values()]
    return Config(
        one.rank,
        one.alpha,
        tuple(found),
        rank_stabilized=one.rank_stabilized,
        dora=one.magnitude is not None,
        dropout=one.dropout,
        tokens=next(filter(None, ids), ()),
        whole=tuple(path for path, x in zip(newest, ids, strict=True) if x is None),
    )


def trainable(model: PyTree) -> PyTree:
    """A tree of booleans, for `make_train_step`: only the adapters and new values are trained.

    Where there are adapters on adapters, only the newest are trained.
    """

    def mark(node: Any) -> Any:
        chosen = jax.tree.map(lambda _: False, node)
        if not is_adapted(node) or node.frozen:
            return chosen
        return eqx.tree_at(lambda x: x.trained, chosen, [True] * len(node.trained))

    return jax.tree.map(mark, model, is_leaf=is_adapted)
