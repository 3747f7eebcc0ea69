"""The model that a run began with: of its checkpoints it is a part that is not written."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp

from zoo.nn.parameters import cast
from zoo.runs.checkpoint import read_meta
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.training.description import Training
from zoo.training.pretrained import Pretrained

BASE = "base"  # in the meta of a checkpoint: the checksum of the model that the run began with


def as_begun(run: Run[Config], training: Training) -> Training:
    """The training, with checkpoints of the kind that the run has.

    Raises:
        RunError: the run began with another model.
    """
    meta = read_meta(run.folder / "checkpoints")
    if meta is None or not (training.base or BASE in meta):
        return training
    if BASE not in meta:  # of an earlier version: they hold all of the state, in fp32
        given = training.pretrained
        in_fp32 = eqx.filter_eval_shape(lambda model: cast(model, jnp.float32), given.skeleton)
        whole = Pretrained(in_fp32, lambda: cast(given.load(), jnp.float32))
        return dataclasses.replace(training, pretrained=whole)
    if meta[BASE] != training.base:
        given = f"checksum {training.base[:12]}" if training.base else "no checksum"
        flag = training.pretrained.flag if training.base else "--model"
        raise RunError(
            f"{flag} is not the base this run began with: its weights have {given}, and the "
            f"checkpoints of {run.address} were begun with {meta[BASE][:12]}. Put that model back, "
            "or start anew with another --run-dir."
        )
    return training
