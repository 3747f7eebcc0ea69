"""Recurrences whose state is a matrix: by steps in NumPy and float64, by `step`, and by chunks."""

import functools
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, value_and_gradients

from zoo import sharding
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import Convolution, RecurrenceConfig, recur
from zoo.nn.recurrences.marks import Marks
from zoo.nn.stateful import cast
from zoo.sharding.axes import keystr

KEY = jax.random.key(0)
SLOW = pytest.mark.slow
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "recurrences.npz")
ROWS, HEADS, KEYS, VALUES = 2, 3, 4, 5
MODULES = {"gated_deltanet": gated_deltanet, "mamba2": mamba2, "mlstm": mlstm}
LAYERS = {
    "gated_deltanet": gated_deltanet.GatedDeltaNet,
    "mamba2": mamba2.Mamba2,
    "mlstm": mlstm.MLSTM,
}


@functools.cache
def made(name, config, *sizes):
    return eqx.filter_jit(lambda key: LAYERS[name](config, *sizes, "embed", key=key))(KEY)


def by_steps(name, state, tokens, restart, valid):
    """As the papers write them, one step and one row at a time; the outputs where they count."""
    state, tokens = jax.tree.map(lambda x: np.asarray(x, np.float64), (state, tokens))
    out = np.zeros((*tokens[2].shape[:3], VALUES))
    final = jax.tree.map(np.copy, state)
    for b in range(ROWS):
        for n in range(HEADS):
            s = jax.tree.map(lambda x: x[b, n], state)  # noqa: B023
            for t in np.nonzero(valid[b])[0]:
                token = [x[b, t, n] for x in tokens]
                if restart[b, t]:
                    s = jax.tree.map(np.zeros_like, s)
                s, out[b, t, n] = ONE_STEP[name](s, *token)
            for whole, part in zip(jax.tree.leaves(final), jax.tree.leaves(s), strict=True):
                whole[b, n] = part
    return final, out


def delta(s, q, k, v, log_decay, rate):
    s = np.exp(log_decay) * s
    s = s + np.outer(k, rate * (v - s.T @ k))
    return s, s.T @ q


def ssd(s, c, b, x, log_decay):
    s = np.exp(log_decay) * s + np.outer(b, x)
    return s, s.T @ c


def exponential(memory, q, k, v, log_forget, log_input):
    cell, m = memory
    new = max(log_forget + m, log_input)
    kept, added = np.exp(log_forget + m - new), np.exp(log_input - new)
    c = kept * cell[:, :-1] + added * np.outer(k, v)
    normaliser = kept * cell[:, -1] + added * k
    h = c.T @ q / (max(abs(normaliser @ q), np.exp(-new)) + 1e-6)
    return mlstm.Memory(np.concatenate([c, normaliser[:, None]], 1), new), h


ONE_STEP = {"gated_deltanet": delta, "mamba2": ssd, "mlstm": exponential}


def drawn(name, seq, gates="usual"):
    """A state, and tokens whose gates are usual ones, all but shut, or wide open."""
    rng = np.random.default_rng(seq)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    shape = (ROWS, seq, HEADS)
    q, k, v = normal(*shape, KEYS), normal(*shape, KEYS), normal(*shape, VALUES)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate, log_input = normal(*shape), 1 / (1 + np.exp(normal(*shape))), normal(*shape)
    log_decay = -np.log1p(np.exp(2 * log_decay))
    if gates == "shut":
        log_decay = np.where(log_decay < -1, np.float32(-90), log_decay)
        rate, log_input = 0 * rate, np.full_like(log_input, -15)
    if gates == "open":
        log_decay, rate = np.full_like(log_decay, -1e-6), np.full_like(rate, 2)
        log_input = np.where(log_input > 0, np.float32(15), log_input)
        q, k = np.abs(q), np.abs(k)  # or a sum near zero would be divided by
    q, k, v, log_decay, rate, log_input = map(jnp.asarray, (q, k, v, log_decay, rate, log_input))
    state = lambda more=0: jnp.asarray(normal(ROWS, HEADS, KEYS, VALUES + more))
    if name == "mamba2":
        return state(), mamba2.Tokens(q, k, v, log_decay)
    if name == "gated_deltanet":
        return state(), gated_deltanet.Tokens(q, k, v, log_decay, rate)
    memory = mlstm.Memory(state(1), jnp.asarray(normal(ROWS, HEADS)))
    return memory, mlstm.Tokens(q, k, v, log_decay, log_input)


def marked(seq):
    """Documents that begin anywhere, and padding before, between and behind them."""
    rng = np.random.default_rng(seq)
    restart, valid = rng.random((ROWS, seq)) < 0.1, np.ones((ROWS, seq), bool)
    if seq > 10:
        valid[0, :2] = valid[0, -3:] = valid[1, 5:9] = False
        restart[1, 9] = True
    return restart & valid, valid


def run(name, size):
    config = RecurrenceConfig(num_heads=HEADS, chunk=size)
    return jax.jit(functools.partial(read, name, config))


def read(name, config, *arguments):
    """The state behind rows, and the outputs of their steps."""
    state, out = recur(MODULES[name].RECURRENCE, config, *arguments)
    return state, normalised(name, out)


def normalised(name, out):
    return mlstm._normalised(out) if name == "mlstm" else out


def layer_of(name, golden):
    """The layer with a golden one's weights, or with their gradients."""
    w = {key: jnp.asarray(array) for key, array in golden.items()}
    sizes = {
        "gated_deltanet": {"num_heads": 4, "num_key_heads": 2, "key_dim": 5, "value_dim": 6},
        "mamba2": {"num_heads": 4, "num_key_heads": 2, "key_dim": 5, "value_dim": 6},
        "mlstm": {"num_heads": 2, "key_dim": 3, "value_dim": 6},
    }[name]
    taps = {} if name == "mlstm" else {"taps": 3}
    layer = made(name, RecurrenceConfig(**sizes, **taps, chunk=8), 12, 12)
    new = {"wo": w["out_proj.weight"].T.reshape(layer.wo.shape)}
    heads = lambda x, count: x.reshape(count, -1, 12).transpose(2, 0, 1)
    if name == "mlstm":
        new |= {"wq": heads(w["q.weight"], 2), "wk": heads(w["k.weight"], 2)}
        new |= {"wv": heads(w["v.weight"], 2), "wz": heads(w["ogate_preact.weight"], 2)}
        new |= {"wf": w["fgate_preact.weight"].T, "wi": w["igate_preact.weight"].T}
        new |= {"gates.forget": w["fgate_preact.bias"], "gates.input": w["igate_preact.bias"]}
        new |= {"norm_scale": w["multihead_norm.weight"].reshape(2, 6)}
    else:
        taps_first = lambda x: x[:, 0].T  # of conv1d, whose channels are the heads' in a row
        conv = taps_first(w["conv1d.weight"])
        new |= {"gates.log_rate": w["A_log"], "gates.bias": w["dt_bias"]}
    if name == "gated_deltanet":  # each key head with the values, and the gates, of its two heads
        parts = jnp.split(w["in_proj_qkvz.weight"].reshape(2, 34, 12), [5, 10, 22], axis=1)
        q, k, v, z = (x.transpose(2, 0, 1) for x in parts)
        b, a = jnp.split(w["in_proj_ba.weight"].reshape(2, 4, 12), 2, axis=1)
        new |= {"wq": q, "wk": k, "wv": v.reshape(12, 4, 6), "wz": z.reshape(12, 4, 6)}
        new |= {"wa": a.reshape(4, 12).T, "wb": b.reshape(4, 12).T, "norm.scale": w["norm.weight"]}
        conv_q, conv_k, conv_v = jnp.split(conv, [10, 20], axis=1)
        new |= {"conv_q.weight": conv_q.reshape(3, 2, 5), "conv_k.weight": conv_k.reshape(3, 2, 5)}
        new |= {"conv_v.weight": conv_v.reshape(3, 4, 6)}
    if name == "mamba2":
        z, x, b, c, dt = jnp.split(w["in_proj.weight"], [24, 48, 58, 68], axis=0)
        new |= {"wz": heads(z, 4), "wx": heads(x, 4), "wb": heads(b, 2), "wc": heads(c, 2)}
        new |= {"wdt": dt.T, "gates.skip": w["D"], "norm_scale": w["norm.weight"].reshape(4, 6)}
        for part, weight, bias in zip(
            ("conv_x", "conv_b", "conv_c"),
            jnp.split(conv, [24, 34], axis=1),
            jnp.split(w["conv1d.bias"], [24, 34]),
            strict=True,
        ):
            shape = getattr(layer, part).weight.shape
            new |= {
                f"{part}.weight": weight.reshape(shape),
                f"{part}.bias": bias.reshape(shape[1:]),
            }
    leaves = {keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(layer)}
    assert leaves.keys() == new.keys()
    assert {k: x.shape for k, x in leaves.items()} == {k: x.shape for k, x in new.items()}
    return jax.tree_util.tree_map_with_path(lambda path, _: new[keystr(path)], layer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients_are_those_of_transformers(name):
    golden = {k.removeprefix(f"{name}/"): GOLDEN[k] for k in GOLDEN.files if k.startswith(name)}
    layer = layer_of(name, golden)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(arguments):
        layer, x = arguments
        y = layer(x, layer.initial_state(2), Marks())[1]
        return (y * golden["dy"]).sum(), y

    (_, y), (d_layer, dx) = jax.jit(loss)((layer, jnp.asarray(golden["x"])))
    gradients = {k: golden.get(f"d_{k}", golden[k]) for k in golden}
    assert_close(y, golden["y"])
    assert_close((d_layer, dx), (layer_of(name, gradients), golden["dx"]), 2e-5)


def assert_close(found, expected, tolerance=1e-5, least=1.0):
    """Each array within the tolerance of its largest number, or of the `least` one."""
    leaves = jax.tree.leaves(found)
    assert leaves
    for x, y in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(least, np.abs(y).max()))


@pytest.mark.parametrize("name", MODULES)
def test_steps_are_those_of_the_paper(name):
    """The last of them through `recur`, as texts are continued."""
    restart, valid = marked(24)
    always = np.ones((ROWS, 1), bool)
    steps = jax.jit(functools.partial(in_float64, name))
    one = jax.jit(functools.partial(read, name, RecurrenceConfig()))
    for gates in ("usual", "shut", "open"):
        state, tokens = drawn(name, 24, gates)
        with jax.enable_x64(True):
            found, out = steps(state, tokens, restart, valid)
        expected = by_steps(name, state, tokens, restart, valid)
        assert_close((found, np.where(valid[..., None, None], out, 0)), expected)
        state, tokens = drawn(name, 1, gates)
        found = one(state, tokens, Marks())
        assert_close(found, by_steps(name, state, tokens, ~always, always))


def in_float64(name, state, tokens, restart, valid):
    """`step` after step, in float64, with the outputs of `read`."""
    module = MODULES[name]

    def one(state, inputs):
        token, restart, valid = inputs
        where = lambda mark, x, y: jnp.where(mark.reshape(-1, *[1] * (x.ndim - 1)), x, y)
        begun = jax.tree.map(lambda x: where(restart, jnp.zeros_like(x), x), state)
        after, out = module.step(begun, token)
        return jax.tree.map(functools.partial(where, valid), after, state), out

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (state, tokens))
        steps = jax.tree.map(lambda x: x.swapaxes(0, 1), (wide[1], restart, valid))
        state, out = jax.lax.scan(one, wide[0], steps)
        return state, normalised(name, out.swapaxes(0, 1))


@pytest.mark.parametrize("seq", [1, 75, *(pytest.param(n, marks=SLOW) for n in (63, 500, 1000))])
@pytest.mark.parametrize("name", MODULES)
def test_chunks_and_their_gradients_are_those_of_steps(name, seq):
    """Outputs, final states and all gradients, of gates of each kind and of documents in rows."""
    marks = marked(seq)

    def loss(function, arguments):
        leaves = jax.tree.leaves(function(*arguments))
        leaves[-1] = jnp.where(marks[1][..., None, None], leaves[-1], 0)
        weights = (jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in leaves)
        return sum((x * w).sum() for x, w in zip(leaves, weights, strict=True)), leaves

    def gradients(function):
        return jax.jit(jax.value_and_grad(functools.partial(loss, function), has_aux=True))

    chunks = gradients(
        lambda *inputs: run(name, 16)(*inputs, Marks(*map(jnp.asarray, marks[::-1])))
    )
    steps = gradients(lambda *inputs: in_float64(name, *inputs, *marks))
    for gates in ("usual", "shut", "open"):
        arguments = drawn(name, seq, gates)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
            (_, expected), wanted = steps(wide)
        (_, found), gradient = chunks(arguments)
        assert_close(found, expected, least=0.01)
        assert_close(gradient, wanted, least=0.01)


@pytest.mark.parametrize(
    "spec",
    ["data=2,context=2,tensor=2", *(pytest.param(f"context={n}", marks=SLOW) for n in (4, 8))],
)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_in_parts_are_those_of_one_device(name, spec):
    """Outputs, final states and gradients; documents and padding go across the parts' borders.

    The third row has one document from the state before it on, the fourth a new one at a border.
    """
    layer = made(name, RecurrenceConfig(num_heads=2, key_dim=3, chunk=4), 8, 8)
    if name != "mlstm":  # or nothing would be left, behind a part, of the state before it
        layer = eqx.tree_at(lambda x: x.gates.log_rate, layer, replace_fn=lambda x: x - 4)
    valid = np.ones((4, 32), bool)
    valid[0, :5] = valid[1, 14:22] = False
    restart = np.zeros((4, 32), bool)
    restart[0, 9] = restart[0, 23] = restart[1, 22] = restart[3, 16] = True
    marks = Marks(jnp.asarray(valid), jnp.asarray(restart))
    x = jax.random.normal(KEY, (4, 32, 8))
    state = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape), layer.initial_state(4))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(arguments):
        layer, x, state = arguments
        final, y = layer(sharding.constrain(x, "batch", "inner_seq", "embed"), state, marks)
        y = jnp.where(marks.valid[:, :, None], y, 0)
        leaves = [y, *jax.tree.leaves(final)]
        weights = (jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in leaves)
        return sum((x * w).sum() for x, w in zip(leaves, weights, strict=True)), leaves

    (_, expected), gradients = jax.jit(loss)((layer, x, state))
    with sharding.use(sharding.make_mesh(spec)):
        (_, found), of_mesh = jax.jit(loss)((layer, x, state))
    assert_close(found, expected)
    assert_close(of_mesh, gradients)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_inverse_and_its_gradient_are_those_of_numpy(size):
    lower = np.tril(3 / size**0.5 * np.random.default_rng(0).normal(size=(2, size, size)), -1)
    weights = np.cos(np.arange(2.0 * size * size)).reshape(lower.shape)
    inverse, found = value_and_gradients(
        gated_deltanet.unit_lower_inverse, *(jnp.asarray(x, jnp.float32) for x in (weights, lower))
    )
    expected = np.linalg.inv(lower + np.eye(size))
    assert_close(inverse, expected)
    turned = expected.swapaxes(1, 2)
    assert_close(found, np.tril(-turned @ weights @ turned, -1))


def test_convolutions_are_sums_over_the_steps_of_a_document():
    model = Convolution(3, 2, 1, axis="heads", bias=True, key=KEY)
    model = eqx.tree_at(lambda c: c.bias, model, jnp.asarray([[0.5], [-0.5]]))
    x = np.random.default_rng(0).normal(size=(3, 9, 2, 1)).astype("f4")
    documents = np.asarray([[1] * 9, [0, 0, 1, 1, 2, 2, 2, 0, 0], [1, 2, 0, 0, 3, 3, 3, 3, 3]])
    restart = np.zeros((3, 9), bool)
    restart[1, 4] = restart[2, 1] = restart[2, 4] = True
    before = np.random.default_rng(1).normal(size=(3, 2, 2, 1)).astype("f4")
    marks = Marks(jnp.asarray(documents > 0), jnp.asarray(restart))
    after, y = eqx.filter_jit(model)(jnp.asarray(x), jnp.asarray(before), marks)
    weight = np.asarray(model.weight)
    for row in range(3):
        read, current = list(before[row]), 1
        for t in np.nonzero(documents[row])[0]:
            if documents[row, t] != current:
                read, current = [np.zeros((2, 1))] * 2, documents[row, t]
            read = [*read[-2:], x[row, t]]
            z = sum(w * r for w, r in zip(weight, read, strict=True)) + model.bias
            np.testing.assert_allclose(y[row, t], z / (1 + np.exp(-z)), atol=1e-6)
        np.testing.assert_allclose(after[row], np.stack(read[-2:]), atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_bf16_keep_gates_and_states_in_fp32(name):
    config = RecurrenceConfig(num_heads=2, chunk=8)
    layer = made(name, config, 16, 16)
    low = cast(layer, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(low.gates)} == {jnp.dtype("float32")}
    assert {low.dtype, low.wo.dtype} == {jnp.dtype("bfloat16")}
    x = jax.random.normal(KEY, (2, 20, 16))

    def outputs(layer, x):
        return layer(x, layer.initial_state(2), Marks())

    state, y = eqx.filter_eval_shape(outputs, low, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert {s.dtype for s in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    found = equations(jax.make_jaxpr(lambda x: outputs(layer, x))(x))
    products = [e for e in found if e.primitive.name == "dot_general"]
    states = [e for e in products if e.params["dimension_numbers"][1][0]]  # with batch axes
    assert len(states) >= 4
    assert all("HIGHEST" in str(e.params["precision"]) for e in states)


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_in_bf16_round_as_steps_do(name):
    """Against fp32 of the same weights, at most twice as far off as the layer called step by step.

    Both the outputs and all gradients, by their norms.
    """
    groups = {} if name == "mlstm" else {"num_key_heads": 2}
    config = RecurrenceConfig(num_heads=4, **groups, chunk=16)
    low = cast(made(name, config, 32, 32), jnp.bfloat16)
    x = jax.random.normal(KEY, (2, 75, 32), jnp.bfloat16)

    def at_once(layer, x):
        return layer(x, layer.initial_state(2), Marks())[1]

    def by_step(layer, x):
        one = lambda state, x: layer(x[:, None], state, Marks())
        return jax.lax.scan(one, layer.initial_state(2), x.swapaxes(0, 1))[1][:, :, 0].swapaxes(
            0, 1
        )

    def all_of(function, dtype):
        def loss(arguments):
            y = function(*arguments).astype(jnp.float32)
            return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

        (_, y), gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(
            (cast(low, dtype), x.astype(dtype))
        )
        return [np.asarray(z.astype(jnp.float32)) for z in (y, *jax.tree.leaves(gradient))]

    truth = all_of(by_step, jnp.float32)
    chunks, steps = (all_of(function, jnp.bfloat16) for function in (at_once, by_step))
    for want, ours, reference in zip(truth, chunks, steps, strict=True):
        rounding = np.linalg.norm(reference - want)
        assert 0 < rounding < 0.05 * np.linalg.norm(want)
        assert np.linalg.norm(ours - want) < 2 * rounding


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_drawn_apart(name):
    layer = made(name, RecurrenceConfig(num_heads=2), 8, 8)
    drawn = [np.ravel(x) for x in jax.tree.leaves(layer) if x.ndim > 1 and np.std(x) > 0]
    assert len(drawn) >= 5
    assert len({x[:2].tobytes() for x in drawn}) == len(drawn)


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_counted(name):
    """Against the products of the program, for one chunk, but for those that are sums."""
    config = RecurrenceConfig(num_heads=2, key_dim=24, value_dim=40, chunk=64)
    layer = made(name, config, 24, 32)
    x = jax.ShapeDtypeStruct((3, 64, 24), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: layer(x, layer.initial_state(3), Marks()))(x)
    count = 0
    for e in equations(jaxpr):
        if e.primitive.name == "dot_general":
            (left, _), _ = e.params["dimension_numbers"]
            inner = np.prod([e.invars[0].aval.shape[axis] for axis in left])
            count += np.prod(e.outvars[0].aval.shape) * inner
    of_decays = 2 * 2 * 64  # the sums of each head's, in two parts
    tolerance = 0.006 if name == "gated_deltanet" else 1e-6  # of the inverse of a triangle
    assert count / (3 * 64) - of_decays == pytest.approx(
        MODULES[name].num_products(config, 24, 32, 64), rel=tolerance
    )


def test_temporaries_do_not_grow_with_the_square_of_a_row():
    layer = made("gated_deltanet", RecurrenceConfig(num_heads=2, chunk=16), 16, 16)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def temporary_bytes(seq):
        def loss(arrays, x):
            layer = eqx.combine(arrays, static)
            return layer(x, layer.initial_state(2), Marks())[1].sum()

        x = jax.ShapeDtypeStruct((2, seq, 16), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(arrays, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(512) < 2.2 * temporary_bytes(256)


def test_projections_on_a_mesh_are_split_by_heads():
    mesh = sharding.make_mesh("tensor=2")
    config = RecurrenceConfig(num_heads=2)
    for name in LAYERS:
        specs = sharding.shardings(eqx.filter(made(name, config, 16, 16), eqx.is_array), mesh)
        assert specs.wz.spec[1] == specs.wo.spec[0] == "tensor"
