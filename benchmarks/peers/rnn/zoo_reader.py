"""The same layers as a classifier of the last state, whose outputs do not grow with the length."""

import dataclasses
from typing import Literal

from benchmarks.peers import zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape
from benchmarks.peers.rnn.zoo_model import sizes
from zoo import losses, rnn


def build(shape: Shape, precision: Precision, *, remat: Literal["none", "full"]) -> Built:
    config = dataclasses.replace(sizes(shape, remat), out_size=2, pooling="last")
    tokens, _ = given.batch(shape)
    batch = zoo_step.class_batch((tokens, tokens[:, 0] % 2))
    return zoo_step.build(
        losses.classification, lambda key: rnn.RNN(config, key=key), batch, precision
    )
