"""The zoo's own train step, through its public names."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import zoo
from benchmarks.peers import common, xla
from benchmarks.peers.common import Built, Precision, Remat, Shape
from zoo import losses, transformer


def init(config: transformer.Config, shape: Shape, key: Array) -> transformer.Transformer:
    """The model with the weights of all peers."""
    given = {name: jnp.asarray(w) for name, w in common.weights(shape).items()}
    heads = (shape.num_layers, shape.d_model, shape.num_heads, shape.head_dim)
    model = transformer.Transformer(config, key=key)
    return eqx.tree_at(
        lambda m: (
            m.embedding.weight,
            m.blocks.attention.wq,
            m.blocks.attention.wk,
            m.blocks.attention.wv,
            m.blocks.attention.wo,
            m.blocks.mlp.w_up,
            m.blocks.mlp.w_down,
            m.head.weight,
        ),
        model,
        (
            given["embedding"],
            *(given[name].reshape(heads) for name in ("wq", "wk", "wv")),
            given["wo"].reshape(heads[0], *heads[2:], heads[1]),
            given["w_up"],
            given["w_down"],
            given["head"],
        ),
    )


def build(shape: Shape, precision: Precision, remat: Remat, *, scan: bool) -> Built:
    config = transformer.Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        mlp="gelu",
        norm_eps=common.NORM_EPS,
        rope_theta=common.ROPE_THETA,
        remat=remat,
        scan_layers=scan,
    )
    optimizer = xla.optimizer()
    state = zoo.init_state(lambda key: init(config, shape, key), optimizer, key=jax.random.key(0))
    step = zoo.make_train_step(
        losses.next_token, optimizer, precision=precision, clip_norm=common.CLIP_NORM
    )
    tokens, targets = common.token_batch(shape)
    batch = jax.device_put(
        {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    )
    start = time.perf_counter()
    step.compile(state, batch)
    seconds = time.perf_counter() - start
    planned_bytes = xla.planned_bytes(step.lower(state, batch))

    def run(state: zoo.TrainState, batch: dict[str, Array]) -> tuple[zoo.TrainState, Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Built(run, state, batch, seconds, planned_bytes)
