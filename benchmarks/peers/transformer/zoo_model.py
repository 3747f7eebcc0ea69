"""The zoo's transformer."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.transformer import given
from benchmarks.peers.transformer.given import Shape
from zoo import losses, transformer
from zoo.nn.remat import Policy


def init(config: transformer.Config, shape: Shape, key: Array) -> transformer.Transformer:
    """The model with the weights of all peers."""
    arrays = {name: jnp.asarray(w) for name, w in given.weights(shape).items()}
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


def sizes(shape: Shape, remat: Policy, scan: bool) -> transformer.Config:
    """The zoo's configuration of those sizes."""
    return transformer.Config(
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        mlp="gelu",
        remat=remat,
        tie_embeddings=shape.tied,
        scan_layers=scan,
        residual=transformer.ResidualConfig(norm_eps=given.NORM_EPS),
        positions=transformer.PositionsConfig(theta=given.ROPE_THETA),
    )


def build(shape: Shape, precision: Precision, *, remat: Policy, scan: bool) -> Built:
    config = sizes(shape, remat, scan)
    batch = zoo_step.token_batch(given.batch(shape))
    return zoo_step.build(losses.next_token, lambda key: init(config, shape, key), batch, precision)
