"""What several tests share: the families at their smallest, and comparisons of trees."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.extend import core

import zoo
from zoo import losses, mlp, rnn, sharding, transformer
from zoo.common import configuration
from zoo.nn.attention.context_parallel import on_each_device
from zoo.nn.attention.masks import Mask
from zoo.nn.attention.splash import Splash
from zoo.nn.stateful import cast
from zoo.sharding.axes import keystr
from zoo.transformer import blocks

VOCAB = 64
Batch = dict[str, np.ndarray]


class Family(NamedTuple):
    """A model family at its smallest, for the tests that hold for every one of them.

    `make_model(dropout)` gives what `init_state` takes. `make_batch(rows, size, seed)` gives rows
    of unequal weight, `size` being the length of a sequence. `pad` puts a batch into a larger
    bucket. `is_sequence` families take token batches. `num_masks` is how many dropout masks a
    step draws.
    """

    name: str
    make_model: Callable[[float], Callable[[Any], Any]]
    make_batch: Callable[..., Batch]
    pad: Callable[[Batch], Batch]
    loss: Callable[..., Any]
    is_sequence: bool
    num_masks: int


def small_config(**changes: Any) -> transformer.Config:
    """A transformer of two layers, in which eight devices divide an axis of every kind."""
    sizes: dict[str, Any] = {
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 8,
        "d_ff": 64,
        "attention.head_dim": 4,
    }
    return configuration.replaced(transformer.Config(VOCAB), {**sizes, **changes})


def hybrid(kind: str = "mamba2", **changes: Any) -> dict[str, Any]:
    """Layers of a recurrence and of attention in turn, three in all; heads that devices divide."""
    of_kind = {"mixer.recurrence.num_heads": 4, "mixer.recurrence.chunk": 4}
    pattern = {"mixer.pattern": (kind, "attention"), "num_layers": 3, "num_heads": 4}
    return {**pattern, **of_kind, "attention.head_dim": 8, **changes}


def make_transformer(**changes: Any) -> Callable[[Any], transformer.Transformer]:
    return lambda key: transformer.Transformer(small_config(**changes), key=key)


def drawn_transformer(**changes: Any) -> transformer.Transformer:
    """A transformer of numbers from numpy, none of which is zero or one by its start.

    The model's own start takes longer to compile than what most tests do with it.
    """
    return drawn_model(make_transformer(**changes))


def low() -> Any:
    return cast(drawn_transformer(), jnp.bfloat16)


def only_norms(model: Any) -> Any:
    return jtu.tree_map_with_path(lambda path, _: keystr(path).endswith("scale"), model)


def parameters(model: Any) -> dict[str, Any]:
    leaves = jtu.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {keystr(path): leaf for path, leaf in leaves}


def drawn_rnn(cell: str, **changes: Any) -> rnn.RNN:
    """A recurrent language model likewise, with layers that eight devices divide."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "cell": cell}
    config = rnn.Config(**{**sizes, **changes})
    # Large, or greedy tokens would come to one that repeats itself.
    return drawn_model(lambda key: rnn.RNN(config, key=key), 0.6)


def bert_config(vocab_size: int, **changes: Any) -> transformer.Config:
    """An encoder with the parts of BERT's, but for the head."""
    parts = {
        "mlp": "gelu_erf",
        "bias": True,
        "causal": False,
        "residual.norm": "layer",
        "residual.norm_placement": "stream",
        "residual.final_norm": False,
        "positions.kind": "learned",
        "encoder.embedding_norm": True,
        "encoder.num_token_types": 2,
        "encoder.head": "none",
        "d_model": 24,
        "num_layers": 1,
        "num_heads": 4,
    }
    return configuration.replaced(transformer.Config(vocab_size), {**parts, **changes})


def make_bert(vocab_size: int, **changes: Any) -> Callable[[Any], transformer.Transformer]:
    config = bert_config(vocab_size, **changes)
    return lambda key: transformer.Transformer(config, key=key)


def drawn_model(make_model: Callable[[Any], Any], scale: float = 0.2) -> Any:
    """Any model likewise."""
    rng = np.random.default_rng(0)

    def draw(path: tuple, x: Any) -> Any:
        mean = 1.0 if path[-1].name == "scale" else 0.0
        return jnp.asarray(mean + scale * rng.normal(size=x.shape), x.dtype)

    skeleton = eqx.filter_eval_shape(make_model, jax.random.key(0))
    return jtu.tree_map_with_path(draw, skeleton)


def as_subclass(module: Any, cls: type) -> Any:
    """The same parameters and static fields in a subclass of the module's class."""
    assert issubclass(cls, type(module))
    new = object.__new__(cls)
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, getattr(module, field.name))
    return new


def with_config(model: Any, config: Any) -> Any:
    """The same parameters with another configuration."""
    new = as_subclass(model, type(model))
    object.__setattr__(new, "config", config)
    return new


class LoudMLP(blocks.MLP):
    """The MLP of a transformer's layer, with another formula for the same parameters."""

    def __call__(self, x_BTE: Any) -> Any:
        return 3 * super().__call__(x_BTE)


def with_loud_mlp(model: transformer.Transformer) -> transformer.Transformer:
    """The model with another class of MLP in its blocks, and nothing else changed."""
    loud = as_subclass(model.blocks.mlp, LoudMLP)
    return eqx.tree_at(lambda model: model.blocks.mlp, model, loud)


def token_batch(rows: int = 8, size: int = 16, seed: int = 0) -> Batch:
    """Rows of one or two documents, and then padding of a length of its own in each row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (rows, size + 1)).astype(np.int32)
    lengths = rng.integers(2, size + 1, (rows, 1))
    first, index = size // 3, np.broadcast_to(np.arange(size), (rows, size))
    segment_ids = np.where(index < lengths, 1 + (index >= first), 0)
    return {
        "tokens": np.where(segment_ids > 0, tokens[:, :-1], 0),
        "targets": tokens[:, 1:],
        "weights": (segment_ids > 0).astype(np.float32),
        "segment_ids": segment_ids.astype(np.int32),
        "positions": np.where(index < first, index, index - first).astype(np.int32),
    }


def pad_tokens(batch: Batch) -> Batch:
    """The same documents in rows half as long again."""
    more = batch["tokens"].shape[1] // 2
    return {name: np.pad(x, ((0, 0), (0, more))) for name, x in batch.items()}


def make_rnn(dropout: float) -> Callable[[Any], rnn.RNN]:
    config = rnn.Config(vocab_size=VOCAB, hidden_size=128, num_layers=2, dropout=dropout)
    return lambda key: rnn.RNN(config, key=key)


def make_mlp(dropout: float) -> Callable[[Any], mlp.MLP]:
    config = mlp.Config(16, 8, hidden_size=256, num_layers=3, norm="layer", dropout=dropout)
    return lambda key: mlp.MLP(config, key=key)


def labelled_batch(rows: int = 8, size: int = 16, seed: int = 0) -> Batch:
    """Rows of 16 numbers with labels; there is no sequence, and so the size says nothing."""
    rng = np.random.default_rng(seed)
    return {
        "inputs": rng.normal(size=(rows, 16)).astype(np.float32),
        "labels": rng.integers(0, 8, rows).astype(np.int32),
        "weights": rng.uniform(0.2, 1, rows).astype(np.float32),
    }


def pad_rows(batch: Batch) -> Batch:
    """The same rows, and half as many more of weight 0."""
    more = len(batch["weights"]) // 2
    return {name: np.pad(x, ((0, more),) + ((0, 0),) * (x.ndim - 1)) for name, x in batch.items()}


FAMILIES = [
    Family(
        "transformer",
        lambda dropout: make_transformer(dropout=dropout),
        token_batch,
        pad_tokens,
        losses.next_token,
        is_sequence=True,
        num_masks=1 + 2 * 2,  # the embedding's, and two in each layer
    ),
    Family(
        "rnn",
        make_rnn,
        token_batch,
        pad_tokens,
        losses.next_token,
        is_sequence=True,
        num_masks=1 + 2,  # the embedding's, and one in each layer
    ),
    Family(
        "mlp",
        make_mlp,
        labelled_batch,
        pad_rows,
        losses.classification,
        is_sequence=False,
        num_masks=3,
    ),
]


def arrays(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, JAX's and numpy's, by dotted path; there is one at least."""
    leaves = [(keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(tree)]
    found = [(path, x) for path, x in leaves if isinstance(x, jax.Array | np.ndarray | np.generic)]
    assert found, f"no array in {tree!r}"
    assert len(dict(found)) == len(found), f"one path twice in {[path for path, _ in found]}"
    return dict(found)


def assert_trees_close(actual: Any, expected: Any, rtol: float, atol: float = 0.0) -> None:
    """The same arrays of the same shapes, each within `rtol` of its largest number, or `atol`.

    None is empty, and all that is expected is finite: there is something to compare.
    """
    actual, expected = arrays(actual), arrays(expected)
    assert actual.keys() == expected.keys(), f"one has {sorted(actual.keys() ^ expected.keys())}"
    for path, want in expected.items():
        got, want = np.asarray(actual[path]), np.asarray(want)
        assert got.shape == want.shape, path
        assert want.size, f"{path} is empty"
        assert np.isfinite(want).all(), f"{path} is expected to be {want}"
        allowed = max(rtol * np.abs(want).max(), atol)
        np.testing.assert_allclose(got, want, rtol=0, atol=allowed, err_msg=path)


def assert_same(actual: Any, expected: Any) -> None:
    """The same tree to the bit, in classes, static fields, dtypes and numbers."""
    assert arrays(expected).keys() == arrays(actual).keys()
    assert eqx.tree_equal(*jax.device_get((actual, expected)))


def covering(*axes: Sequence[Any], strength: int = 2) -> list[tuple]:
    """Few cases, always the same, with each combination of values of any `strength` of the axes.

    One bug rarely needs more than two or three values together; all of them are a product.
    """
    numbers = range(len(axes))
    left = {
        tuple(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(numbers, strength)
        for values in itertools.product(*(range(len(axes[axis])) for axis in chosen))
    }
    all_cases = [*itertools.product(*(range(len(axis)) for axis in axes))]
    covers = {
        case: {
            tuple((axis, case[axis]) for axis in chosen)
            for chosen in itertools.combinations(numbers, strength)
        }
        for case in all_cases
    }
    cases = []
    while left:
        best = max(all_cases, key=lambda case: len(covers[case] & left))  # the first of equals
        left -= covers[best]
        cases.append(best)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cases]


def copy(tree: Any) -> Any:
    """The tree with numpy arrays, which outlive a donation."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)


def value_and_gradients(function: Callable[..., Any], cotangent: Any, *arguments: Any) -> tuple:
    """The value and the gradient for each argument, compiled as one: quicker than op by op."""

    @jax.jit
    def run(cotangent: Any, *arguments: Any) -> tuple:
        value, vjp = jax.vjp(function, *arguments)
        return (value, *vjp(cotangent))

    return run(cotangent, *arguments)


def on_mesh(model: Any, mesh: Any, function: Callable[[Any], Any]) -> Any:
    """What a function of a model gives, compiled, where the model lies on a mesh or a layout."""
    layout = sharding.layout_of(mesh)
    with sharding.use(layout):
        placed = eqx.filter_shard(
            model, sharding.shardings(eqx.filter(model, eqx.is_array), layout)
        )
        return copy(eqx.filter_jit(function)(placed))


def loss_and_gradient(
    model: Any, batch: Batch, mesh: Any = "", loss: Callable[..., Any] = losses.next_token
) -> tuple[Any, Any]:
    """The sum of the losses, without dropout, and its gradient."""
    given = jax.tree.map(jnp.asarray, batch)
    total = lambda model: loss(model, given, None)[0]
    mesh = zoo.make_mesh(mesh) if isinstance(mesh, str) else mesh
    return on_mesh(model, mesh, eqx.filter_value_and_grad(total))


# The state of this one is the last gradient.
KEEP_GRADIENT = optax.trace(decay=0.0)


def state_and_step(
    make_model: Callable[..., Any], loss: Any, optimizer: Any = KEEP_GRADIENT, **options: Any
) -> tuple[zoo.TrainState, Any]:
    """A state, and a step of that loss in fp32 without clipping unless told otherwise.

    The options are those of `init_state` and `make_train_step`; the key is 0 if not given.
    """
    own = {name: options[name] for name in ("mesh", "trainable") if name in options}
    own |= {name: options.pop(name) for name in ("pretrained", "key") if name in options}
    state = zoo.init_state(make_model, optimizer, **{"key": jax.random.key(0), **own})
    options = {"precision": "fp32", "clip_norm": None, **options}
    return state, zoo.make_train_step(loss, optimizer, **options)


def one_step(
    make_model: Callable[..., Any], loss: Callable[..., Any], batch: Batch, **options: Any
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics of a step of plain descent in fp32, and the gradients, which it takes away.

    The options are those of `state_and_step`.
    """
    state, step = state_and_step(make_model, loss, optax.sgd(1.0), **options)
    before = arrays(copy(eqx.filter(state.model, eqx.is_inexact_array)))
    state, metrics = step(state, batch)
    after = arrays(copy(state.model))
    assert not metrics["skipped"]
    return (
        {name: float(x) for name, x in metrics.items()},
        {path: x - after[path] for path, x in before.items()},
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of loops, branches and called functions included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from equations(parameter)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def contents(folder: Path, names: str = "*") -> dict[str, bytes]:
    """The content of each file of a folder, by name; none if there is no folder."""
    found = sorted(path for path in folder.rglob(names) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def bytes_read() -> int:
    """The bytes that this process has read from files and pipes so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def flash(
    mask: Mask, segment_ids: Any = None, transfer: Any = "auto", **options: Any
) -> Callable[..., jax.Array]:
    """The kernel for TPUs, of queries, keys and values on each device of the mesh."""
    options = {"scale": 1.0, "soft_cap": None, **options}
    kernel = Splash(mask, **options)
    return lambda *qkv: on_each_device(kernel, *qkv, segment_ids, transfer)
