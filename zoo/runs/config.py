"""The configuration of a run: the flags that every recipe has, stored, read and compared."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from zoo.common import configuration, files
from zoo.common.configuration import may_differ, require
from zoo.nn.precision import Precision
from zoo.runs.processes import RunError
from zoo.runs.remote import folder
from zoo.training.compiled import Flags

TRACKER_NAMES = ("wandb", "mlflow", "tensorboard", "trackio")
_POSITIVE = "steps accumulate log_every eval_every eval_batches final_eval_batches patience"
_POSITIVE += " checkpoint_every keep_checkpoints"
_AT_LEAST = {**dict.fromkeys(_POSITIVE.split(), 1), "norms_every": 0}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags that every recipe has."""

    run_dir: Path | str = may_differ()
    """Folder of the run, or its address on s3:// or gs://; the same command resumes it."""
    steps: int = may_differ()
    """Optimizer steps in all; more than before continues a finished run."""
    epochs: float | None = may_differ(None)
    """Passes over the training data, in the place of steps."""
    mesh: str = may_differ("")
    """Devices by axis, such as fsdp=4,tensor=2; also data, expert and context. data=-1 takes all
    devices; empty is one device."""
    precision: Precision | Literal["auto"] = "auto"
    """Dtype of activations and products; master weights are fp32. auto: bf16 where the hardware
    multiplies it, else fp32. int8: bf16, with the products of blocks in int8."""
    accumulate: int = 1
    """Microbatches per batch, computed one after the other to save memory."""
    clip_norm: float | None = 1.0
    """Global norm that gradients are clipped to; None does not clip."""
    seed: int = 0
    """Seed of the initialisation, dropout, and the order of the data."""
    on_nonfinite: Literal["stop", "skip"] = may_differ("stop")
    """On a loss, gradient or update that is not finite: stop the run, or skip the step."""
    average: float | None = None
    """Decay of a moving average of the weights, such as 0.999: it is evaluated beside the model,
    as average/eval_loss, and is what is published."""
    patience: int | None = may_differ(None)
    """Evaluations in a row without a better eval_loss, of the average if there is one, after which
    the run ends."""
    keep_best: str | None = may_differ(None)
    """Metric of the evaluations, such as eval_loss or average/eval_loss, by which the best model so
    far is kept as best/ in the run's folder; the highest accuracy, reward or pass@… is best, and
    the lowest of others."""
    log_every: int = may_differ(10)
    """Steps between lines of metrics.jsonl."""
    eval_every: int = may_differ(100)
    """Steps between evaluations on the held-out part."""
    eval_batches: int = may_differ(16)
    """Batches per evaluation during training."""
    final_eval_batches: int | None = may_differ(None)
    """Batches of the last evaluation, and of a pretrained model's before the first step; if not
    given, the whole held-out part."""
    checkpoint_every: int = may_differ(100)
    """Steps between checkpoints."""
    keep_checkpoints: int = may_differ(3)
    """Checkpoints kept, newest first."""
    work_dir: Path | None = may_differ(None)
    """Local folder in which each machine of a run at an address works; by default one in
    ~/.cache/zoo/runs."""
    xla: Flags = may_differ("default")
    """Set of the compiler's flags for the train step: no_windows, scatter_layouts, gathers (TPUs),
    overlap (GPUs), native_bf16 (CPUs). `python -m zoo plan --mesh search` tries those of TPUs."""
    sequence_parallel: bool = may_differ(False)
    """Split activations along the sequence between the tensor-parallel parts."""
    distributed: bool = may_differ(False)
    """One of several processes; docs/guides/launch.md lists the environment variables."""
    plan: str = may_differ("")
    """Train nothing: print the memory and the speed of a step on devices such as v5e:4x4,
    v5p:4x4x4, h200:8 or cpu:8. An empty --mesh is then fsdp=-1."""
    track: str = may_differ("")
    """Trackers to give the metrics to, with commas between them: wandb, mlflow, tensorboard,
    trackio (an extra each). They write local files, unless WANDB_MODE, MLFLOW_TRACKING_URI and
    such variables of theirs say otherwise."""
    norms_every: int = may_differ(0)
    """Steps between norms of each layer's parameters and updates in metrics.jsonl, a multiple of
    --log-every; 0: none."""
    profile: bool = may_differ(False)
    """Trace steps 10 to 15 of this start into the run folder."""
    compilation_cache: Path | None = may_differ(Path("~/.cache/zoo/jax"))
    """Folder that keeps compiled programs for the next start."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        configuration.check(self)
        for name, value in vars(self).items():
            if name in _AT_LEAST and value is not None:
                least = _AT_LEAST[name]
                require(value >= least, f"{name}={value}: must be at least {least}")
        require(self.epochs is None or self.epochs > 0, f"epochs={self.epochs}: must be positive")
        require(
            self.epochs is None or self.steps == getattr(type(self), "steps", self.steps),
            f"epochs={self.epochs} and steps={self.steps}: give one of them",
        )
        if self.average is not None:
            require(0 <= self.average < 1, f"average={self.average}: must be in [0, 1), as 0.999")
        require(
            self.average is not None or not (self.keep_best or "").startswith("average/"),
            f"keep_best={self.keep_best!r}: needs --average",
        )
        # A command line gives paths, and `Path` makes one slash of an address's two.
        object.__setattr__(self, "run_dir", folder.checked(self.run_dir, self.work_dir))
        if self.compilation_cache is not None:
            files.local_path(self.compilation_cache, "compilation_cache")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"clip_norm={self.clip_norm}: must be positive, or None for no clipping",
        )
        unknown = [name for name in self.trackers if name not in TRACKER_NAMES]
        require(
            not unknown, f"track={self.track!r}: no tracker {unknown}; known are {[*TRACKER_NAMES]}"
        )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names of the trackers, each of them once."""
        names = [name.strip() for name in self.track.split(",") if name.strip()]
        return tuple(dict.fromkeys(names))

    @property
    def batch_size(self) -> int | None:
        """Rows of a global batch, if `data` says it: checked before data is read."""
        return getattr(getattr(self, "data", None), "batch_size", None)

    @property
    def row_lengths(self) -> Mapping[str, tuple[int, ...]]:
        """The tokens that rows of text may have, by the field that says so, likewise."""
        return getattr(getattr(self, "data", None), "row_lengths", {})

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with its open fields filled in.

        `stored` is the configuration in the run's folder, or empty: open fields take its values.
        """
        return self


ConfigT = TypeVar("ConfigT", bound=Config, covariant=True)


def check_seed(seed: int) -> None:
    """Raise a ValueError where two seeds would give the same numbers."""
    # Of more bits JAX takes the lower 32, and of more than 64 none.
    require(0 <= seed < 2**32, f"seed={seed}: must be in 0 to {2**32 - 1}")


def differences(found: dict[str, Any], config: Config) -> list[str]:
    """The fields of a stored configuration that forbid a run to resume with this one."""
    old, new = configuration.flat(found), configuration.flat(as_json(config))
    differing = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    return [
        f"  {name}: was {old.get(name)!r}, is {new.get(name)!r}"
        for name in sorted(differing - configuration.names_that_may_differ(config))
    ]


def read_config(path: Path) -> dict[str, Any] | None:
    """The fields of a run's config.json; None without the file."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IsADirectoryError) as error:
        raise RunError(
            f"{path} is damaged ({error}); put it back (meta.json of each checkpoint has "
            "a copy), or use another --run-dir"
        ) from error


def as_json(config: Any) -> dict[str, Any]:
    """A configuration as JSON has it: paths as texts, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
