"""A norm, an activation and a gated MLP are what their formulas say, in every family."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from zoo import losses, mlp, rnn, transformer
from zoo.nn.layers import make_norm
from zoo.transformer import blocks

key, rng = jax.random.key(0), np.random.default_rng(0)

# The formulas. ScaleNorm has one parameter, and keeps the directions of vectors.
x = rng.normal(size=(2, 3, 8)).astype(np.float32)
want = np.sqrt(8) * x / np.linalg.norm(x, axis=-1, keepdims=True)
np.testing.assert_allclose(make_norm("scale", 8)(jnp.asarray(x)), want, rtol=1e-5)
sizes = {"vocab_size": 16, "d_model": 8, "num_layers": 2, "num_heads": 4, "d_ff": 16}
for kind, activation in (("reglu", lambda x: x), ("log_relu", np.log1p)):
    config = transformer.Config(
        mlp=kind, residual=transformer.ResidualConfig(norm="scale"), **sizes
    )
    part = blocks.MLP(config, key=key)
    up = x @ np.asarray(part.w_up)
    gate = up if part.w_gate is None else x @ np.asarray(part.w_gate)
    hidden = activation(np.maximum(gate, 0)) * (1 if part.w_gate is None else up)
    want = hidden @ np.asarray(part.w_down)
    np.testing.assert_allclose(part(jnp.asarray(x)), want, rtol=1e-4, atol=1e-5)
    assert (part.w_gate is None) == (kind == "log_relu")

# The families, with batches of theirs.
tokens = rng.integers(0, 16, (8, 7)).astype(np.int32)
texts = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((8, 6), np.float32)}
rows = {
    "inputs": rng.normal(size=(8, 16)).astype(np.float32),
    "labels": rng.integers(0, 4, 8).astype(np.int32),
    "weights": np.ones(8, np.float32),
}
CASES = [
    (
        transformer.Transformer,
        transformer.Config(mlp="reglu", residual=transformer.ResidualConfig(norm="scale"), **sizes),
        losses.next_token,
        texts,
    ),
    (
        rnn.RNN,
        rnn.Config(vocab_size=16, hidden_size=8, num_layers=1, norm="scale"),
        losses.next_token,
        texts,
    ),
    (
        mlp.MLP,
        mlp.Config(16, 4, hidden_size=8, num_layers=3, norm="scale", activation="log_relu"),
        losses.classification,
        rows,
    ),
]


def run(case, mesh):
    """The losses of a few steps, and the model."""
    family, config, loss, batch = case
    mesh, optimizer = zoo.make_mesh(mesh), optax.adam(1e-2)
    state = zoo.init_state(lambda key: family(config, key=key), optimizer, key=key, mesh=mesh)
    step = zoo.make_train_step(loss, optimizer, mesh=mesh, precision="fp32")
    found = []
    for _ in range(5):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found, state.model


for case in CASES:
    alone, model = run(case, "")
    assert alone[-1] < alone[0] - 0.02, (case[1], alone)
    sharded, _ = run(case, "fsdp=2,tensor=2")
    np.testing.assert_allclose(sharded, alone, rtol=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(f"{folder}/model", model)
        again = zoo.load(f"{folder}/model")
    assert again.config == case[1]
    leaves = jax.tree.leaves(model), jax.tree.leaves(again)
    assert all(map(np.array_equal, *leaves))
print("done")
