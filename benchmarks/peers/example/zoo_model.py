"""The example project's network in the zoo's step."""

from benchmarks.peers import zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.example.given import Shape, project


def build(shape: Shape, precision: Precision) -> Built:
    """`zoo.make_train_step` with the project's loss and optimizer, which clips itself."""
    make_model, loss_fn, optimizer, batch = project(shape)
    return zoo_step.build(
        loss_fn, make_model, batch, precision, optimizer=optimizer, clip_norm=None
    )
