"""The axis "states" is sharded, and is part of the dimension before it for decay and Muon."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import zoo
from zoo import losses, optimizers
from zoo.nn.layers import Embedding, Linear, normal
from zoo.nn.parameters import unshard
from zoo.nn.products import matmul
from zoo.sharding import constrain
from zoo.sharding.axes import keystr
from zoo.training.state import standard_promotion

VOCAB, EMBED, STATES, MLP = 16, 8, 4, 16


class StateSpace(eqx.Module):
    """A language model in which each feature has several states, which fade at rates of their own.

    Suffixes: B batch, T time, E embed, S states.
    """

    embedding: Embedding
    rate: Float[Array, "embed states"]
    w_out: Float[Array, "embed states mlp"]
    head: Linear

    def __init__(self, key: Array):
        keys = jax.random.split(key, 4)
        self.embedding = Embedding(VOCAB, EMBED, key=keys[0])
        self.rate = normal(keys[1], (EMBED, STATES), 1)
        self.w_out = normal(keys[2], (EMBED, STATES, MLP), EMBED * STATES)
        self.head = Linear(MLP, VOCAB, in_axis="mlp", out_axis="vocab", bias=False, key=keys[3])

    def __call__(self, tokens: Int[Array, "batch seq"], **options: Array) -> Array:
        """The logits, float32[batch, seq, vocab]."""
        model = unshard(self)
        kept_ES = jax.nn.sigmoid(model.rate)
        x_BTE = 30 * model.embedding(tokens)

        def step(state_BES: Array, x_BE: Array) -> tuple[Array, Array]:
            state_BES = kept_ES[None] * state_BES + x_BE[:, :, None]
            state_BES = constrain(state_BES, "batch", "embed", "states")
            return state_BES, state_BES

        zeros = jnp.zeros((len(tokens), EMBED, STATES), x_BTE.dtype)
        states_BTES = jax.lax.scan(step, zeros, x_BTE.swapaxes(0, 1))[1].swapaxes(0, 1)
        hidden_BTM = jax.nn.silu(matmul(states_BTES, model.w_out, contract=2))
        return model.head(constrain(hidden_BTM, "batch", "inner_seq", "mlp")).astype(jnp.float32)


def make_optimizer(name):
    config = optimizers.Config(name, learning_rate=0.02, schedule="constant", warmup_steps=0)
    return optimizers.make_optimizer(config, steps=10)


def run(mesh):
    """The model at the start, and the losses of a few steps."""
    mesh, optimizer = zoo.make_mesh(mesh), make_optimizer("muon")
    state = zoo.init_state(StateSpace, optimizer, key=jax.random.key(0), mesh=mesh)
    start = jax.tree.map(lambda x: (np.array(x), x.sharding), state.model)
    step = zoo.make_train_step(losses.next_token, optimizer, mesh=mesh, precision="fp32")
    tokens, found = np.random.default_rng(0).integers(0, VOCAB, (8, 9)).astype(np.int32), []
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    for _ in range(4):
        state, metrics = step(state, batch | {"weights": np.ones((8, 8), np.float32)})
        found.append(float(metrics["loss"]))
    return start, found


# Each array lies as its axes say, and the losses are those of one device.
_, alone = run("")
start, sharded = run("fsdp=2,tensor=2")
assert alone[-1] < alone[0] - 0.02, alone
np.testing.assert_allclose(sharded, alone, rtol=1e-5)
mesh = zoo.make_mesh("fsdp=2,tensor=2")
for (value, where), spec in (
    (start.rate, ("fsdp", "tensor")),
    (start.w_out, ("fsdp", "tensor", None)),
):
    assert where.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), value.ndim), where

# The states of a feature are part of it: a rate per state is a vector, and does not decay.
model = StateSpace(jax.random.key(0))
optimizer = make_optimizer("adamw")
nothing = jax.tree.map(jnp.zeros_like, model)
with standard_promotion():
    updates, _ = optimizer.update(nothing, optimizer.init(model), model)
moved = {keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(updates) if x.any()}
assert moved == {"embedding.weight", "w_out", "head.weight"}, moved

# Muon makes of the features with their states the inputs of one matrix, and evens it out.
optimizer, rng = make_optimizer("muon"), np.random.default_rng(0)
grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) ** 3, x.dtype), model)
with standard_promotion():
    updates, _ = optimizer.update(grads, optimizer.init(model), model)


def spread(x):
    values = np.linalg.svd(np.asarray(x).reshape(EMBED * STATES, MLP), compute_uv=False)
    return values.max() / values.min()


assert spread(grads.w_out) > 3, spread(grads.w_out)
assert spread(updates.w_out) < 2, spread(updates.w_out)
print("done")
