"""The description of a training: all that `zoo.fit` trains from, and that a plan compiles."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.data.datasets import Dataset
from zoo.nn.precision import Precision
from zoo.nn.remat import Policy
from zoo.training.compiled import CompiledStep, Flags
from zoo.training.loss_values import LossFunction
from zoo.training.state import Blueprint, Pretrained, Trainable, TrainState, without_frozen
from zoo.training.step import make_train_step

Evaluate = Callable[[PyTree, bool], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, a loss, an optimizer, data, and how the model is evaluated."""

    make_model: Callable[..., PyTree]
    """From a key to the model; given `pretrained`, from a key and that."""
    loss_fn: LossFunction
    """From a model, a batch and a key to the summed loss, the summed weight and further sums."""
    optimizer: optax.GradientTransformation
    """Update rule, with its schedule."""
    data: Dataset
    """Batch k as a function of k."""
    evaluate: Evaluate | Dataset
    """Held-out data, for the means of the loss function; or a function from a model to held-out
    metrics, which given True too are those of the whole held-out part."""
    fingerprint: str = ""
    """Text that differs where the data do, as a run refuses to resume with others; if empty, the
    data's own, `zoo.data.datasets.fingerprint`."""
    schedule: optax.Schedule | None = None
    """The optimizer's learning rate by its updates, to be logged."""
    flops_per_token: float | None = None
    """FLOPs of the maths per unit of the data (a token, an example), forward and backward."""
    clips: bool = True
    """Clip the gradient's global norm; False where the optimizer does so by the same flag, as an
    ensemble's does. A run that clips nothing has the flag at None."""
    trainable: Trainable | None = None
    """From a model to a tree of booleans like it: what is trained; the rest stays as it is."""
    pretrained: PyTree = None
    """A model to begin with, or a `Pretrained`, which is evaluated before the first step."""
    axes: sharding.Axes | None = None
    """Names for arrays without an annotation, by patterns of paths; see `zoo.Layout`."""
    strict: bool = False
    """Refuse arrays that neither an annotation nor `axes` names."""
    remat: Policy | None = None
    """The policy that `remat_flag` chose, where there is that flag."""
    remat_flag: str = "--model.remat"

    def blueprint(self, key: Key[Array, ""], *, mesh: Mesh | sharding.Layout | None) -> Blueprint:
        """The state at step 0, not made yet."""
        return Blueprint(
            self.make_model,
            self.optimizer,
            key=key,
            mesh=self.layout(mesh),
            trainable=self.trainable,
            pretrained=self.pretrained,
        )

    def layout(self, mesh: Mesh | sharding.Layout | None) -> sharding.Layout:
        """The layout of this training's arrays on a mesh; its own `axes` come first."""
        found: sharding.Layout = sharding.layout_of(mesh)
        axes = found.axes if self.axes is None else self.axes
        return dataclasses.replace(found, axes=axes, strict=self.strict or found.strict)

    @property
    def base(self) -> str:
        """Checksum of the model to begin with; with one, checkpoints do without what is frozen."""
        return self.pretrained.checksum if isinstance(self.pretrained, Pretrained) else ""

    def saved(self, state: TrainState) -> TrainState:
        """The part of a state, or of a skeleton of one, that a checkpoint holds."""
        return without_frozen(state, self.trainable) if self.base else state

    def step(
        self,
        *,
        mesh: Mesh | sharding.Layout | None,
        precision: Precision | str,
        accumulate: int = 1,
        clip_norm: float | None = 1.0,
        xla: Flags = "default",
    ) -> CompiledStep:
        """The train step; see `make_train_step`."""
        return make_train_step(
            self.loss_fn,
            self.optimizer,
            mesh=self.layout(mesh),
            precision=precision,
            accumulate=accumulate,
            clip_norm=clip_norm if self.clips else None,
            trainable=self.trainable,
            xla=xla,
        )
