"""The zoo's models, with the weights of all peers, in the zoo's own train step."""

import time
from collections.abc import Callable
from typing import Any

import jax
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
    batch = token_batch(shape.batch())
    if (documents := shape.documents()) is not None:
        batch["segment_ids"] = documents
    first = shape.weights()
    weights = {f"{name}.weight": first.pop(name) for name in ("embedding", "head") if name in first}
    for name, array in first.items():
        part = "attention" if name in given.ATTENTION else "mlp"
        weights[f"blocks.{part}.{name}"] = array
    config = transformer_sizes(shape, remat, scan)
    return step_of(
        losses.next_token,
        lambda key: jax_step.with_weights(zoo.transformer.Transformer(config, key=key), weights),
        batch,
        precision,
    )


def rnn(shape: RNN, precision: Precision) -> Built:
    first = shape.weights()
    weights = {f"{name}.weight": first[name] for name in ("embedding", "head")}
    weights["head.bias"] = first["head_bias"]
    for i in range(shape.num_layers):
        for ours, name in (("weight_ih", "ih"), ("weight_hh", "hh"), ("bias", "bias")):
            weights[f"layers.{i}.directions.0.{ours}"] = first[name][i]
    return step_of(
        losses.next_token,
        lambda key: jax_step.with_weights(zoo.rnn.RNN(rnn_sizes(shape), key=key), weights),
        token_batch(shape.batch()),
        precision,
    )


def rnn_sizes(shape: RNN) -> zoo.rnn.Config:
    """The zoo's configuration of these sizes."""
    return zoo.rnn.Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
    )


def mlp(shape: MLP, precision: Precision) -> Built:
    inputs, labels = shape.batch()
    weights = {}
    for layer, pair in zip(("first.linear", "last.linear", "head"), shape.weights(), strict=True):
        weights |= {f"{layer}.weight": pair[0], f"{layer}.bias": pair[1]}
    return step_of(
        losses.classification,
        lambda key: jax_step.with_weights(zoo.mlp.MLP(mlp_sizes(shape), key=key), weights),
        {"inputs": inputs, "labels": labels, "weights": np.ones(labels.shape, np.float32)},
        precision,
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
