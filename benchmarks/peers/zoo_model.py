"""The zoo's models, with the weights of all peers, in the zoo's own train step."""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import zoo
from benchmarks.peers import given, jax_step
from benchmarks.peers.given import MLP, RNN, Batch, Built, Precision, Remat, Transformer
from zoo import losses
from zoo.training.loss_values import LossFunction


def step_of(
    loss: LossFunction,
    make_model: Callable[[Array], Any],
    batch: dict[str, np.ndarray],
    precision: Precision,
    *,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float | None = given.CLIP_NORM,
) -> Built:
    """A step by `zoo.make_train_step`; the default optimizer is that of all peers."""
    optimizer = jax_step.optimizer() if optimizer is None else optimizer
    # Given as a whole: what `make_model` reads would be constants of the program that it is.
    model = make_model(jax.random.key(0))
    state = zoo.init_state(
        lambda key, model: model, optimizer, key=jax.random.key(0), pretrained=model
    )
    del model
    step = zoo.make_train_step(loss, optimizer, precision=precision, clip_norm=clip_norm)
    on_device = jax.device_put(batch)
    start = time.perf_counter()
    step.compile(state, on_device)
    seconds = time.perf_counter() - start
    [program] = step.programs

    def run(state: zoo.TrainState, batch: dict[str, Array]) -> tuple[zoo.TrainState, Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Built(run, state, on_device, seconds, jax_step.planned_bytes(program))


def token_batch(batch: Batch) -> dict[str, np.ndarray]:
    """A batch for `zoo.losses.next_token`."""
    tokens, targets = batch
    return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}


def class_batch(batch: Batch) -> dict[str, np.ndarray]:
    """A batch for `zoo.losses.classification`."""
    inputs, labels = batch
    return {"inputs": inputs, "labels": labels, "weights": np.ones(labels.shape, np.float32)}


def init_transformer(
    config: zoo.transformer.Config, shape: Transformer, key: Array
) -> zoo.transformer.Transformer:
    """The model with the weights of all peers."""
    arrays = {name: jnp.asarray(w) for name, w in shape.weights().items()}
    heads = (shape.num_layers, shape.d_model, shape.num_heads, shape.head_dim)
    model = zoo.transformer.Transformer(config, key=key)
    return eqx.tree_at(
        lambda m: (
            m.embedding.weight,
            m.blocks.attention.wq,
            m.blocks.attention.wk,
            m.blocks.attention.wv,
            m.blocks.attention.wo,
            m.blocks.mlp.w_up,
            m.blocks.mlp.w_down,
            *(() if shape.tied else (m.head.weight,)),
        ),
        model,
        (
            arrays["embedding"],
            *(arrays[name].reshape(heads) for name in ("wq", "wk", "wv")),
            arrays["wo"].reshape(heads[0], *heads[2:], heads[1]),
            arrays["w_up"],
            arrays["w_down"],
            *(() if shape.tied else (arrays["head"],)),
        ),
    )


def transformer_sizes(shape: Transformer, remat: Remat, scan: bool) -> zoo.transformer.Config:
    """The zoo's configuration of these sizes."""
    return zoo.transformer.Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        mlp="gelu",
        remat=remat,
        tie_embeddings=shape.tied,
        scan_layers=scan,
        residual=zoo.transformer.ResidualConfig(norm_eps=given.NORM_EPS),
        positions=zoo.transformer.PositionsConfig(theta=given.ROPE_THETA),
    )


def transformer(shape: Transformer, precision: Precision, *, remat: Remat, scan: bool) -> Built:
    config = transformer_sizes(shape, remat, scan)
    batch = token_batch(shape.batch())
    if (documents := shape.documents()) is not None:
        batch["segment_ids"] = documents
    return step_of(
        losses.next_token, lambda key: init_transformer(config, shape, key), batch, precision
    )


def _init_rnn(config: zoo.rnn.Config, shape: RNN, key: Array) -> zoo.rnn.RNN:
    """The model with the weights of all peers."""
    arrays = {name: jnp.asarray(w) for name, w in shape.weights().items()}
    gates = (shape.num_layers, shape.hidden_size, 4, shape.hidden_size)
    arrays["ih"], arrays["hh"] = arrays["ih"].reshape(gates), arrays["hh"].reshape(gates)
    arrays["bias"] = arrays["bias"].reshape(shape.num_layers, 4, -1)

    def parameters(model: zoo.rnn.RNN) -> list[Array]:
        directions = [layer.directions[0] for layer in model.layers]
        layers = [w for d in directions for w in (d.weight_ih, d.weight_hh, d.bias)]
        return [model.embedding.weight, model.head.weight, model.head.bias, *layers]

    layers = [arrays[name][i] for i in range(shape.num_layers) for name in ("ih", "hh", "bias")]
    outer = [arrays[name] for name in ("embedding", "head", "head_bias")]
    return eqx.tree_at(parameters, zoo.rnn.RNN(config, key=key), [*outer, *layers])


def rnn(shape: RNN, precision: Precision) -> Built:
    config = rnn_sizes(shape)
    batch = token_batch(shape.batch())
    return step_of(losses.next_token, lambda key: _init_rnn(config, shape, key), batch, precision)


def rnn_sizes(shape: RNN) -> zoo.rnn.Config:
    """The zoo's configuration of these sizes."""
    return zoo.rnn.Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
    )


def mlp_sizes(shape: MLP) -> zoo.mlp.Config:
    """The zoo's configuration of these sizes."""
    return zoo.mlp.Config(
        in_size=shape.in_size,
        out_size=shape.out_size,
        hidden_size=shape.hidden_size,
        num_layers=2,
        activation="relu",
    )


def _init_mlp(shape: MLP, weights: list, key: Array) -> zoo.mlp.MLP:
    """A model of these weights."""

    def parameters(model: zoo.mlp.MLP) -> list[Array]:
        linears = (model.first.linear, model.last.linear, model.head)
        return [x for linear in linears for x in (linear.weight, linear.bias)]

    arrays = [jnp.asarray(x) for pair in weights for x in pair]
    return eqx.tree_at(parameters, zoo.mlp.MLP(mlp_sizes(shape), key=key), arrays)


def mlp(shape: MLP, precision: Precision) -> Built:
    batch = class_batch(shape.batch())
    weights = shape.weights()
    return step_of(
        losses.classification, lambda key: _init_mlp(shape, weights, key), batch, precision
    )
