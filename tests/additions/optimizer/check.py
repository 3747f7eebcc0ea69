"""AdEMAMix by a recipe's flag: decays matrices only, descends, and is sharded as parameters are."""

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import zoo
from recipes import mlp as recipe
from zoo import losses, mlp, optimizers
from zoo.sharding.axes import keystr
from zoo.training.state import standard_promotion

config = tyro.cli(recipe.Config, args=["--optimizer.name", "ademamix"]).optimizer
assert config.name == "ademamix"
optimizer = optimizers.make_optimizer(config, steps=100)


def make_model(key):
    return mlp.MLP(mlp.Config(16, 8, hidden_size=16, norm="layer"), key=key)


def run(mesh):
    """The state at the start, and the losses and the state of a few steps."""
    mesh = zoo.make_mesh(mesh)
    start = zoo.init_state(make_model, optimizer, key=jax.random.key(0), mesh=mesh)
    before = jax.tree.map(np.array, start.model)
    step = zoo.make_train_step(losses.classification, optimizer, mesh=mesh, precision="fp32")
    rng, found, state = np.random.default_rng(0), [], start
    batch = {
        "inputs": rng.normal(size=(8, 16)).astype(np.float32),
        "labels": rng.integers(0, 8, 8).astype(np.int32),
        "weights": np.ones(8, np.float32),
    }
    for _ in range(8):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return before, found, state


model, alone, _ = run("")
_, sharded, state = run("fsdp=2,tensor=2")
assert alone[-1] < alone[0] - 0.05, alone
np.testing.assert_allclose(sharded, alone, rtol=1e-5)

# With no gradient only decay is left: of matrices, not of biases and norms.
nothing = jax.tree.map(jnp.zeros_like, model)
with standard_promotion():
    updates, _ = optimizer.update(nothing, optimizer.init(model), model)
moved = {keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(updates) if x.any()}
assert moved == {"first.linear.weight", "last.linear.weight", "head.weight"}, moved

# Each of its moments lies where its parameter does.
parameters = jax.tree_util.tree_leaves_with_path(state.model)
for path, x in parameters:
    found = [
        y.sharding
        for place, y in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if place[-len(path) :] == path
    ]
    assert len(found) == 3, keystr(path)
    assert all(where.is_equivalent_to(x.sharding, x.ndim) for where in found), keystr(path)
assert any(not x.sharding.is_fully_replicated for _, x in parameters)
print("done")
