import functools
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.experimental.rnn
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_model, equations
from jax.test_util import check_grads

import zoo
from zoo import lora, rnn, sharding
from zoo.nn.products import is_quantized
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.mixers import MIXERS
from zoo.quantization.loading import quantized_skeleton
from zoo.rnn import recurrence
from zoo.rnn.cells import CELLS
from zoo.rnn.model import _use_cudnn
from zoo.sharding.axes import keystr

KEY = jax.random.key(0)
VOCAB = 16
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "rnn.npz")
RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, VOCAB, (8, 11)), jnp.int32)
# One, two or three documents, with padding at either end or between.
SEGMENTS = jnp.asarray(
    [
        [1] * 11,
        [1] * 4 + [2] * 7,
        [1] * 3 + [2] * 5 + [0] * 3,
        [0] * 2 + [1] * 9,
        [0] + [1] * 2 + [0] * 2 + [2] * 3 + [3] * 3,
        [1] + [2] + [3] * 9,
        [1] * 2 + [0] * 9,
        [0] * 11,
    ],
    jnp.int32,
)


def make(**changes) -> rnn.RNN:
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_layers": 1}
    config = rnn.Config(**{**sizes, **changes})
    return drawn_model(lambda key: rnn.RNN(config, key=key), 0.3)


@eqx.filter_jit
def call(model, inputs, **kwargs):
    return model(inputs, **kwargs)


@eqx.filter_jit
def gradient(model, inputs=TOKENS, segment_ids=SEGMENTS, key=None):
    """Of a loss in which each output has a weight of its own, zero at padding."""

    def loss(model):
        outputs = model(inputs, segment_ids=segment_ids, key=key)
        index = jnp.arange(8.0)[:, None] + jnp.arange(outputs.size // 8, dtype=jnp.float32)[None]
        weights = jnp.cos(index).reshape(outputs.shape)
        if outputs.ndim == 3:
            weights = jnp.where((segment_ids > 0)[:, :, None], weights, 0.0)
        return (outputs * weights).sum()

    return eqx.filter_value_and_grad(loss)(model)


def assert_close(a, b, tolerance=1e-5):
    """Within the tolerance, times the largest number of an array where that is more than one."""
    leaves = jax.tree_util.tree_leaves_with_path(a)
    assert leaves
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape, keystr(path)
        assert np.isfinite(y).all(), keystr(path)
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=keystr(path))


# Parity with PyTorch


def from_torch(cell: str, golden: dict, suffix: str) -> recurrence.Weights:
    """PyTorch has a bias a product; the zoo has one a term, which is the sum of those that meet."""

    def gates(x):
        return np.moveaxis(x.reshape(-1, 5, *x.shape[1:]), (0, 1), (-2, -1))

    bias = np.zeros((CELLS[cell].num_terms, 5), np.float32)
    np.add.at(bias, [*CELLS[cell].input_terms], gates(golden[f"bias_ih{suffix}"]))
    np.add.at(bias, [*CELLS[cell].state_terms], gates(golden[f"bias_hh{suffix}"]))
    weights = (gates(golden[f"weight_{kind}{suffix}"]) for kind in ("ih", "hh"))
    return recurrence.Weights(*map(jnp.asarray, (*weights, bias)))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
def test_networks_match_pytorch(cell, directions):
    prefix = f"{cell}_{'one' if directions == 1 else 'both'}/"
    golden = {k.removeprefix(prefix): GOLDEN[k] for k in GOLDEN.files if k.startswith(prefix)}
    suffixes = [f"_l{i}{end}" for i in range(2) for end in ("", "_reverse")[:directions]]
    config = rnn.Config(
        in_size=3,
        out_size=5 * directions,
        hidden_size=5,
        num_layers=2,
        cell=cell,
        bidirectional=directions == 2,
        implementation="scan",
    )
    fields = lambda d: (d.weight_ih, d.weight_hh, d.bias)
    where = lambda m: [
        *(x for layer in m.layers for d in layer.directions for x in fields(d)),
        m.head.weight,
        m.head.bias,
    ]
    weights = [x for suffix in suffixes for x in from_torch(cell, golden, suffix)]
    # A head that copies.
    made = drawn_model(lambda key: rnn.RNN(config, key=key))
    model = eqx.tree_at(where, made, [*weights, jnp.eye(5 * directions), jnp.zeros(5 * directions)])
    mask = jnp.arange(7)[None] < jnp.asarray(GOLDEN["lengths"])[:, None]

    def stack(name):
        """PyTorch's [layer·direction, batch, hidden] arrays as the states of a network."""
        parts = [golden[f"{name}{i}"] for i in range(CELLS[cell].num_states)]
        states = [tuple(jnp.asarray(p[j]) for p in parts) for j in range(2 * directions)]
        layers = (tuple(states[:directions]), tuple(states[directions:]))
        return rnn.State(layers, jnp.zeros(4, jnp.int32))

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def loss(args):
        model, x, layers = args
        outputs, final = model.run(x, rnn.State(layers, jnp.zeros(4, jnp.int32)), mask=mask)
        pairs = [(outputs, jnp.asarray(golden["d_outputs"]))]
        pairs += zip(*map(jax.tree.leaves, (final.layers, stack("d_final").layers)), strict=True)
        return sum((y * g).sum() for y, g in pairs), (outputs, final)

    args = (model, jnp.asarray(golden["x"]), stack("state").layers)
    (_, (outputs, final)), (d_model, dx, d_state) = loss(args)
    np.testing.assert_allclose(outputs, golden["outputs"], atol=1e-5)
    np.testing.assert_allclose(dx, golden["dx"], atol=1e-5)
    assert_close(final.layers, stack("final").layers)
    assert_close(d_state, stack("d_state").layers)
    for suffix, d in zip(
        suffixes, (d for layer in d_model.layers for d in layer.directions), strict=True
    ):
        for kind, terms in (("ih", CELLS[cell].input_terms), ("hh", CELLS[cell].state_terms)):
            weight = np.asarray(getattr(d, f"weight_{kind}"))
            weight = np.moveaxis(weight, 0, -1).reshape(-1, weight.shape[0])
            np.testing.assert_allclose(weight, golden[f"d_weight_{kind}{suffix}"], atol=1e-5)
            bias = np.asarray(d.bias)[[*terms]].reshape(-1)
            np.testing.assert_allclose(bias, golden[f"d_bias_{kind}{suffix}"], atol=1e-5)


# Padding, segments, streams; of cells with a matrix as state tests/nn/test_recurrences.py has more


SIZES = {"num_heads": 4, "key_dim": 3, "chunk": 4}  # of rows of 11 steps
OPTIONS = {
    "lstm": {"num_layers": 2},
    "gru": {"cell": "gru"},
    "elman": {"cell": "elman"},
    "mingru": {"cell": "mingru"},
    "minlstm": {"cell": "minlstm"},
    "delta": {"cell": "gated_deltanet", "recurrence": RecurrenceConfig(**SIZES, num_key_heads=2)},
    "mamba2": {"cell": "mamba2", "num_layers": 2, "recurrence": RecurrenceConfig(**SIZES)},
    "mlstm": {"cell": "mlstm", "norm": "rms", "recurrence": RecurrenceConfig(**SIZES)},
    "both-delta": {
        "cell": "gated_deltanet",
        "bidirectional": True,
        "recurrence": RecurrenceConfig(num_heads=2, negative_eigenvalues=True),
    },
    "both": {"bidirectional": True, "norm": "layer", "num_layers": 2},
    "both-min": {"bidirectional": True, "cell": "mingru"},
    "chunks": {"remat": "full", "norm": "rms", "num_layers": 2},
    "last": {"out_size": 3, "pooling": "last", "cell": "gru", "norm": "layer"},
    "mean": {"out_size": 3, "pooling": "mean", "bidirectional": True},
    "both-last": {"out_size": 3, "pooling": "last", "bidirectional": True, "remat": "full"},
}
NAMES = [*OPTIONS]


@pytest.mark.parametrize("name", ["mingru", "both", "chunks", "last", "mean", "delta"])
def test_padding_makes_no_difference(name):
    model = make(**OPTIONS[name])
    # Other tokens in the padding, wherever it lies, and more of it.
    tokens = jnp.where(SEGMENTS == 0, VOCAB - 1 - TOKENS, TOKENS)
    padded = gradient(model, *(jnp.pad(x, ((0, 0), (0, 5))) for x in (tokens, SEGMENTS)))
    assert_close(padded, gradient(model), tolerance=1e-6)


@pytest.mark.parametrize("name", ["mingru", "both", "chunks", "both-delta"])
def test_packed_documents_match_separate_rows(name):
    model = make(**OPTIONS[name])
    packed = np.asarray(call(model, TOKENS, segment_ids=SEGMENTS))
    documents = [(1, 1), (1, 2), (2, 2), (4, 1), (4, 2), (4, 3), (5, 2), (5, 3)]
    where = [np.nonzero(np.asarray(SEGMENTS[row]) == segment)[0] for row, segment in documents]
    rows = np.zeros((8, 11), np.int32)
    for i, (row, _) in enumerate(documents):
        rows[i, : len(where[i])] = TOKENS[row, where[i]]
    lengths = np.asarray([len(steps) for steps in where])
    alone = call(model, jnp.asarray(rows), mask=jnp.asarray(np.arange(11) < lengths[:, None]))
    for i, (row, _) in enumerate(documents):
        np.testing.assert_allclose(packed[row, where[i]], alone[i, : lengths[i]], atol=1e-5)


@pytest.mark.parametrize("name", ["mingru", "chunks", "last", "delta"])
def test_streamed_pieces_match_whole_sequence(name):
    model = make(**OPTIONS[name])
    run = eqx.filter_jit(lambda *args, **kwargs: model.run(*args, **kwargs))
    initial = state = model.initial_state(8)
    whole, final = run(TOKENS[:, :8], initial, segment_ids=SEGMENTS[:, :8])
    pieces = []
    for start in (0, 2, 4, 6):
        part = slice(start, start + 2)
        piece, state = run(TOKENS[:, part], state, segment_ids=SEGMENTS[:, part])
        pieces.append(piece)
    outputs = pieces[-1] if model.config.pooling == "last" else jnp.concatenate(pieces, 1)
    np.testing.assert_allclose(outputs, whole, atol=1e-5)
    assert_close(state, final)


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_parallel_cells_match_sequential_form(cell):
    model = make(cell=cell, num_layers=1, in_size=3, vocab_size=None, out_size=8)
    x = jax.random.normal(KEY, (2, 9, 3))
    w = model.layers[0].directions[0]
    h, outputs = jnp.zeros((2, 8)), []
    for t in range(9):
        terms = jnp.einsum("bi,igh->gbh", x[:, t], w.weight_ih) + w.bias[:, None]
        if cell == "mingru":
            z = jax.nn.sigmoid(terms[0])
            h = (1 - z) * h + z * terms[1]
        else:
            f, i = jax.nn.sigmoid(terms[0]), jax.nn.sigmoid(terms[1])
            h = f / (f + i) * h + i / (f + i) * terms[2]
        outputs.append(h @ model.head.weight + model.head.bias[None])
    np.testing.assert_allclose(call(model, x), jnp.stack(outputs, 1), atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_linear_recurrence_gradient_matches_numerical(reverse):
    keys = jax.random.split(KEY, 3)
    a, b = (jax.random.uniform(k, (2, 5, 3)) for k in keys[:2])
    h = jax.random.uniform(keys[2], (2, 3))
    function = jax.jit(lambda a, b, h: recurrence.linear_recurrence(a, b, h, reverse))
    check_grads(function, (a, b, h), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["lstm", "mingru", "both", "delta"])
def test_outputs_depend_on_visible_inputs(name):
    model = make(vocab_size=None, in_size=3, out_size=4, **OPTIONS[name])
    x = jax.random.normal(KEY, (2, 8, 3))
    mask = jnp.ones((2, 8), bool).at[1, 2].set(False).at[1, 6:].set(False)
    dx = jax.jit(jax.grad(lambda x: model(x, mask=mask)[:, 4].sum()))(x)
    reached = np.abs(np.asarray(dx)).max(-1) > 0
    after = name == "both"
    np.testing.assert_array_equal(reached[0], [True] * 5 + [after] * 3)
    np.testing.assert_array_equal(reached[1], [True, True, False, True, True, after, False, False])


# The ways to run


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lstm", {"hoist": True, "unroll": 3}),
        ("gru", {"hoist": True, "unroll": 2, "remat": "full", "dropout": 0.3}),
        ("mingru", {"remat": "full"}),
        ("both", {"remat": "full", "hoist": True}),
        ("delta", {"remat": "full"}),
    ],
)
def test_execution_options_give_equal_gradients(name, changes):
    """Recomputed chunks have the same dropout."""
    key = KEY if "dropout" in changes else None
    plain = {**OPTIONS[name], "dropout": changes.get("dropout", 0.0)}
    expected = gradient(make(**plain), key=key)
    assert_close(gradient(make(**{**plain, **changes}), key=key), expected)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_truncation_stops_only_the_gradient(remat):
    sizes = {"vocab_size": None, "in_size": 3, "out_size": 4}
    model, whole = make(truncate=3, remat=remat, **sizes), make(**sizes)
    x = jax.random.normal(KEY, (2, 8, 3))
    np.testing.assert_allclose(call(model, x), call(whole, x), atol=1e-6)
    dx = jax.jit(jax.grad(lambda x: model(x)[:, 7].sum()))(x)
    np.testing.assert_array_equal(np.abs(dx).max((0, 2)) > 0, [False] * 6 + [True] * 2)


def test_recomputed_memory_grows_with_square_root():
    def temporary_bytes(seq, **changes):
        model = make(out_size=2, pooling="last", hidden_size=32, **changes)
        arrays, static = eqx.partition(model, eqx.is_array)
        loss = lambda arrays, tokens: eqx.combine(arrays, static)(tokens).sum()
        tokens = jax.ShapeDtypeStruct((8, seq), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(arrays, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    recomputed = temporary_bytes(1024, remat="full")
    assert recomputed < 2.5 * temporary_bytes(256, remat="full")
    assert recomputed < 0.2 * temporary_bytes(1024)


def test_dropout_mask_is_shared_over_time():
    model = make(dropout=0.5, num_layers=1, vocab_size=None, in_size=64, out_size=4)
    grad = eqx.filter_jit(jax.grad(lambda x, key: model(x, key=key).sum()))
    dx = grad(jax.random.normal(KEY, (2, 6, 64)), KEY)
    dropped = np.asarray(dx) == 0
    assert 0.3 < dropped.mean() < 0.7
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], dropped.shape))
    assert (dropped[0] != dropped[1]).any()
    assert (grad(jnp.ones((2, 6, 64)), None) != 0).all()


@pytest.mark.parametrize("name", [*NAMES, "tied", "features"])
def test_every_parameter_gets_a_gradient(name):
    extra = {
        "tied": {"tie_embeddings": True, "embed_size": 16, "bidirectional": True},
        "features": {"vocab_size": None, "in_size": 3, "out_size": 1, "dropout": 0.2},
    }
    model = make(**{**OPTIONS, **extra}[name])
    inputs = TOKENS if name != "features" else jax.random.normal(KEY, (8, 11, 3))
    key = KEY if model.config.dropout else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(model, inputs, key=key)[1]):
        assert np.isfinite(leaf).all(), keystr(path)
        # Of the embeddings some are of no token; of a bias each term's row has one.
        rows = np.abs(leaf).max(-1 if "bias" in keystr(path) else None)
        assert (rows > 0).all(), keystr(path)
    assert (model.head is None) == (name == "tied")


@pytest.mark.parametrize(("cell", "hoist"), [("lstm", False), ("gru", True), ("mingru", False)])
def test_bf16_products_take_bf16_and_are_near_fp32(cell, hoist):
    model = make(cell=cell, hoist=hoist)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    assert call(low, TOKENS).dtype == jnp.float32
    for a, b in zip(*map(jax.tree.leaves, (gradient(low)[1], gradient(model)[1])), strict=True):
        assert a.dtype == jnp.bfloat16
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < 0.03
    arrays, static = eqx.partition(low, eqx.is_array)
    loss = lambda arrays: eqx.combine(arrays, static)(TOKENS).sum()
    found = equations(jax.make_jaxpr(jax.grad(loss))(arrays))
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert len(products) >= 6
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_step_in_bf16_writes_its_part_alone(cell):
    """XLA for CPU would convert all steps of an array of bf16 to write one of them."""
    model = make(cell=cell)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    text = gradient.lower(low).compile().compiled.as_text()
    assert "while(" in text
    assert re.findall(r"(\w+)\[11,8,4,8\]\S* dynamic-update-slice\(", text) == ["u16", "u16"]


def test_forward_mode_goes_through_bf16():
    model = make(cell="lstm")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)
    arrays, static = eqx.partition(low, eqx.is_array)
    loss = lambda arrays: eqx.combine(arrays, static)(TOKENS)[:, -1].sum()
    along = jax.tree.map(jnp.ones_like, arrays)
    with zoo.forward_mode():
        slope = jax.jit(lambda a: jax.jvp(loss, (a,), (along,))[1])(arrays)
    want = sum(
        x.astype(jnp.float32).sum() for x in jax.tree.leaves(jax.jit(jax.grad(loss))(arrays))
    )
    np.testing.assert_allclose(slope, want, rtol=0.05)


def test_nan_padding_gives_finite_gradients():
    model = make(vocab_size=None, in_size=3, out_size=1)
    mask = jnp.arange(6)[None] < jnp.asarray([6, 2])[:, None]
    x = jnp.where(mask[:, :, None], jax.random.normal(KEY, (2, 6, 3)), jnp.nan)
    dx = jax.jit(jax.grad(lambda x: model(x, mask=mask).sum()))(x)
    assert np.isfinite(dx).all()


# Meshes


def on_mesh(model, mesh):
    return eqx.filter_shard(model, sharding.shardings(eqx.filter(model, eqx.is_array), mesh))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("lstm", "fsdp=8"),
        ("gru", "data=2,fsdp=2,tensor=2"),
        ("mingru", "tensor=4"),
        ("delta", "data=2,fsdp=2,tensor=2"),
    ],
)
def test_mesh_gives_equal_gradients(name, spec):
    mesh, model = sharding.make_mesh(spec), make(**OPTIONS[name])
    with sharding.use(mesh):
        sharded = gradient(on_mesh(model, mesh))
    assert_close(sharded, gradient(model))


def test_tensor_parallelism_gathers_only_the_state():
    mesh = sharding.make_mesh("tensor=4")
    model = make(num_layers=1)
    arrays, static = eqx.partition(on_mesh(model, mesh), eqx.is_array)
    with sharding.use(mesh):
        loss = lambda arrays: eqx.combine(arrays, static)(TOKENS).sum()
        text = jax.jit(jax.grad(loss)).lower(arrays).compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    assert any("/while/" in line and " f32[8,8]" in line for line in gathered)  # [batch, hidden]
    # Weights are [8, 4, 8], here and there merged to [8, 32].
    assert not any("[8,4,8]" in line or "[8,32]" in line for line in gathered)
    assert "all-to-all" not in text


# cuDNN, on whose place the reference that jax has for it stands here


@pytest.fixture
def reference(monkeypatch):
    module = jax.experimental.rnn

    def lstm(x, h, c, weights, lengths, *, dropout, **sizes):
        assert {a.dtype for a in (x, h, c, weights)} == {jnp.dtype("float32")}
        unpacked = module.unpack_lstm_weights(weights, **sizes)
        return module.lstm_ref(x, h, c, *unpacked, lengths, dropout=dropout, **sizes)

    monkeypatch.setattr(module, "lstm", lstm)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cudnn_matches_scan(bidirectional):
    lengths = jnp.asarray([11, 4, 7, 1, 2, 9, 3, 0])
    mask = jnp.arange(11)[None] < lengths[:, None]
    state = jax.tree.map(
        lambda x: x + 0.5 if x.ndim == 2 else x, make(bidirectional=bidirectional).initial_state(8)
    )
    results = []
    for implementation in ("cudnn", "scan"):
        model = make(bidirectional=bidirectional, implementation=implementation, norm="layer")
        results.append(eqx.filter_jit(model.run)(TOKENS, state, mask=mask))
    assert_close(*results)
    # In bf16 it computes in fp32, and gives bf16.
    low = [x.astype(jnp.bfloat16) for x in jax.tree.leaves(model.layers[0].directions[0])]
    assert len(low) == 3
    x = jnp.zeros((8, 11, 8), jnp.bfloat16)
    states = [tuple(jnp.zeros((8, 8)) for _ in range(2))]
    h = jax.eval_shape(recurrence.cudnn_lstm, x, [recurrence.Weights(*low)], states, None)[1]
    assert h.dtype == jnp.bfloat16


@pytest.mark.usefixtures("reference")
def test_cudnn_is_chosen_where_supported():
    config = make().config
    marks = recurrence.Marks
    assert _use_cudnn(config, marks())
    assert not _use_cudnn(config, marks(valid=jnp.ones((1, 1), bool)))
    assert not _use_cudnn(make(remat="full").config, marks())
    assert not _use_cudnn(make(cell="gru").config, marks())
    assert not _use_cudnn(make(implementation="scan").config, marks())
    with sharding.use(sharding.make_mesh("data=8")):
        assert not _use_cudnn(config, marks())


def test_unsupported_cudnn_use_is_refused():
    model = make(implementation="cudnn")
    with pytest.raises(ValueError, match="'cudnn' needs an NVIDIA GPU"):
        model(TOKENS)
    with pytest.raises(ValueError, match="pass mask, not segment_ids"):
        model(TOKENS, segment_ids=SEGMENTS)
    model = make(implementation="cudnn", cell="gru")
    with pytest.raises(ValueError, match=r"cell='lstm' .* 'gru'"):
        model(TOKENS)
    assert recurrence.cudnn_refusal("lstm", packed=False) is not None


# The rest


def test_invalid_configurations_and_inputs_are_refused():
    pooled = {"bidirectional": True, "pooling": "last", "out_size": 2}
    for changes, message in (
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"truncate": 0}, "truncate=0"),
        ({"in_size": 3}, "vocab_size=16, in_size=3: give one"),
        ({"vocab_size": None}, "vocab_size=None, in_size=None: give one"),
        ({"vocab_size": None, "in_size": 3}, "need an out_size"),
        ({"pooling": "last"}, "pooling='last' need an out_size"),
        ({"tie_embeddings": True, "bidirectional": True}, "embed_size=16, and they are None and 8"),
        ({"implementation": "cudnn", "remat": "full"}, "no remat or truncate"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"recurrence": RecurrenceConfig(key_dim=4)}, r"recurrence.key_dim=4.*'lstm'"),
        ({"cell": "mlstm", "recurrence": RecurrenceConfig(taps=3)}, r"recurrence.taps=3.*'mlstm'"),
        ({"cell": "mamba2", "hidden_size": 6}, "num_heads=4 does not divide hidden_size=6"),
        ({"cell": "mlstm", **pooled}, "pooling='last'.*'mlstm'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)
    with pytest.raises(ValueError, match="in_size"):
        make()(jnp.zeros((2, 3, 4)))


@pytest.mark.parametrize("name", ["gru", "both", "minlstm", "last"])
def test_flops_are_six_per_weight(name):
    model = make(**OPTIONS[name], embed_size=12)
    weights = [
        x for layer in model.layers for d in layer.directions for x in (d.weight_ih, d.weight_hh)
    ]
    weights += [model.head.weight] if model.config.pooling == "none" else []
    expected = 6 * sum(x.size for x in weights if x is not None)
    assert rnn.num_flops_per_token(model.config) == expected


def test_masked_packed_tokens_are_padding():
    model, mask = make(cell="mingru"), TOKENS > 3
    got = call(model, TOKENS, segment_ids=SEGMENTS, mask=mask)
    expected = call(model, TOKENS, segment_ids=jnp.where(mask, SEGMENTS, 0))
    np.testing.assert_array_equal(got, expected)
    assert np.abs(got - call(model, TOKENS, segment_ids=SEGMENTS)).max() > 1e-3


@pytest.mark.parametrize("cell", MIXERS)
def test_matrices_of_layers_are_adapted_and_quantised(cell):
    model = make(cell=cell, hidden_size=32, recurrence=RecurrenceConfig(num_heads=2))
    adapted = lora.adapt(model, lora.Config(rank=2), key=KEY)
    layer = adapted.layers[0].directions[0]
    assert all(map(lora.is_adapted, (layer.wz, layer.wo)))
    np.testing.assert_allclose(call(adapted, TOKENS), call(model, TOKENS), atol=1e-6)
    kinds = quantized_skeleton(eqx.filter_eval_shape(lambda: model), "int8")
    assert all(map(is_quantized, (kinds.layers[0].directions[0].wz,)))
