"""A minimal gated unit is what its formula says, trains, decodes, and is saved."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.test_util import check_grads

import zoo
from zoo import losses, rnn

config = rnn.Config(vocab_size=16, hidden_size=8, num_layers=1, cell="mgu")
model = rnn.RNN(config, key=jax.random.key(0))
rng = np.random.default_rng(0)
tokens = jnp.asarray(rng.integers(0, 16, (2, 6)), jnp.int32)

# The formula, step by step.
weights = model.layers[0].directions[0]
ih, hh, bias = (np.asarray(x) for x in (weights.weight_ih, weights.weight_hh, weights.bias))
x, h = np.asarray(model.embedding.weight)[np.asarray(tokens)], np.zeros((2, 8))
for t in range(tokens.shape[1]):
    of_input = np.einsum("bi,igh->gbh", x[:, t], ih)
    of_state = np.einsum("bi,igh->gbh", h, hh)
    f = 1 / (1 + np.exp(-(of_input[0] + of_state[0] + bias[0])))
    h = (1 - f) * h + f * np.tanh(of_input[1] + bias[1] + f * (of_state[1] + bias[2]))
state = model.run(tokens)[1].layers[0][0][0]
np.testing.assert_allclose(state, h, atol=1e-6)

# Its gradient, by finite differences.
arrays, static = eqx.partition(model, eqx.is_array)


def output(arrays):
    return jnp.tanh(eqx.combine(arrays, static)(tokens)).sum()


check_grads(jax.jit(output), (arrays,), order=1, modes=["rev"], atol=0.02, rtol=0.02)

# Padding at either end makes no difference.
mask = jnp.asarray([[False, *[True] * 6, False]] * 2)
padded = jnp.pad(tokens, ((0, 0), (1, 1)), constant_values=5)
np.testing.assert_allclose(model(padded, mask=mask)[:, 1:-1], model(tokens), atol=1e-6)

# It trains, continues tokens, and opens again.
optimizer = optax.adam(1e-2)
made = zoo.init_state(lambda key: rnn.RNN(config, key=key), optimizer, key=jax.random.key(0))
step = zoo.make_train_step(losses.next_token, optimizer, precision="fp32")
batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "weights": jnp.ones((2, 6))}
found = []
for _ in range(10):
    made, metrics = step(made, batch)
    found.append(float(metrics["loss"]))
assert found[-1] < found[0] - 0.1, found
[greedy] = zoo.generate(made.model, [[1, 2, 3]], max_new_tokens=4, temperature=0.0)
row = [1, 2, 3]
for _ in range(4):
    row.append(int(made.model(jnp.asarray([row], jnp.int32))[0, -1].argmax()))
assert list(greedy) == row, (greedy, row)
with tempfile.TemporaryDirectory() as folder:
    zoo.save(f"{folder}/model", made.model)
    again = zoo.load(f"{folder}/model")
assert again.config == config
np.testing.assert_array_equal(again(tokens), made.model(tokens))
print("done")
