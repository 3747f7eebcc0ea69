"""Fine-tuning on preferences: pairs of answers, of which one was chosen and the other rejected."""

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32, PyTree

from zoo.alignment import reward_model
from zoo.alignment.pair_losses import (
    Reference,
    apo,
    check,
    dpo,
    ipo,
    kto,
    orpo,
    reference_values,
    simpo,
)
from zoo.alignment.pair_losses import log_probabilities as log_probabilities
from zoo.alignment.pairs import PairDataset
from zoo.alignment.reward_model import Scorer as Scorer
from zoo.alignment.reward_model import bradley_terry as bradley_terry
from zoo.common import checksums
from zoo.common.configuration import require
from zoo.data import text
from zoo.runs import evaluation
from zoo.runs.config import Config as RunConfig
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.tasks import finetuning, language
from zoo.tasks.finetuning.config import PREFERENCES
from zoo.training import optimizers
from zoo.training.description import Training
from zoo.training.loss_values import LossFunction

REFERENCE = "reference"  # a folder of the run


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """The fields of fine-tuning, and of its loss where the data are preferences."""

    objective: Literal["dpo", "ipo", "apo_zero", "apo_down", "orpo", "simpo", "kto", "reward"] = (
        "dpo"
    )
    """Loss of preferences: DPO, IPO or APO (for chosen answers better than the model's, or worse),
    whose reference is the model to begin with; or ORPO or SimPO, which have none; or KTO, of
    answers with a label each (data.format unpaired); or a reward model's (reward), which puts a new
    head on the model, by which answers have a score."""
    beta: float = 0.1
    """For a loss with a reference, the strength of the pull to it; for ORPO, the weight of the odds
    ratio; for SimPO, the factor of the answers' log-probabilities, usually 2."""
    gamma: float = 0.5
    """For SimPO, the margin between the answers."""
    label_smoothing: float = 0.0
    """Share of the preferences that DPO takes to be the wrong way round."""
    desirable_weight: float = 1.0
    """For KTO, the weight of desirable answers."""
    undesirable_weight: float = 1.0
    """For KTO, the weight of undesirable answers, as data may have more of one kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.beta, self.label_smoothing)
        has = {
            "beta": self.objective != "reward",
            "gamma": self.objective == "simpo",
            "label_smoothing": self.objective == "dpo",
            "desirable_weight": self.objective == "kto",
            "undesirable_weight": self.objective == "kto",
        }
        names = [x for x in ("objective", *has) if getattr(self, x) != getattr(Config, x)]
        given = {name: f"{name}={getattr(self, name)!r}" for name in names}
        for name, told in given.items():
            require(
                has.get(name, True),
                f"{told}: objective={self.objective!r} has none; leave it out",
            )
        wanted = "unpaired" if self.objective == "kto" else "preferences"
        require(
            self.data.format == wanted or not given,
            f"{', '.join(given.values())}: only data.format={wanted!r} (now "
            f"{self.data.format!r}) has that",
        )
        require(
            self.data.format != "unpaired" or self.objective == "kto",
            f"data.format='unpaired': objective={self.objective!r} needs pairs; give "
            "objective='kto'",
        )
        require(
            self.objective != "kto" or self.accumulate == 1,
            f"accumulate={self.accumulate}: objective='kto' has a mean over the whole batch in "
            "each row's loss; give accumulate=1, and fewer rows if they need too much memory",
        )


def train(run: Run[Config], base: finetuning.Base, data: text.Text) -> None:
    """Fine-tune a language model on text or on preferences; save and show it."""
    pairs = run.config.data.format in PREFERENCES
    if run.config.objective == "reward":
        return reward_model.train(run, base, data)
    describe = functools.partial(training, base) if pairs else language.training
    finetuning.train(run, base, data, describe)


def training(
    base: finetuning.Base,
    run: Run[Config],
    optimizer: optimizers.Config,
    data: text.Text,
    make_model: Callable[..., PyTree],
) -> Training:
    """The training on pairs, with its held-out loss, accuracy and margin.

    The reference is the base under the adapters; without adapters it is the base, whose
    log-probabilities are made once, at the run's first start, and kept by the run.
    """
    config = run.config
    loss_fn = loss_of(config)
    if config.objective not in ("orpo", "simpo") and config.method != "lora":
        datasets: dict[str, Any] = {"train": data.train, "held_out": data.held_out}
        if config.plan:
            found = {name: np.zeros((dataset.num_pairs, 2)) for name, dataset in datasets.items()}
        else:
            found = _stored_reference(run, base, data, datasets)
        new: Any = {name: dataset.with_reference(found[name]) for name, dataset in datasets.items()}
        data = dataclasses.replace(data, **new)
    plain = language.training(run, optimizer, data, make_model)
    return dataclasses.replace(plain, loss_fn=loss_fn, evaluate=data.held_out)


def loss_of(config: Config) -> LossFunction:
    """The loss that a configuration names."""
    beta = config.beta
    reference: Reference = "base" if config.method == "lora" else "batch"
    match config.objective:
        case "orpo":
            return orpo(beta=beta)
        case "simpo":
            return simpo(beta=beta, gamma=config.gamma)
        case "kto":
            return kto(
                beta=beta,
                desirable_weight=config.desirable_weight,
                undesirable_weight=config.undesirable_weight,
                reference=reference,
            )
        case "ipo":
            return ipo(beta=beta, reference=reference)
        case "apo_zero":
            return apo("zero", beta=beta, reference=reference)
        case "apo_down":
            return apo("down", beta=beta, reference=reference)
    return dpo(beta=beta, label_smoothing=config.label_smoothing, reference=reference)


def _stored_reference(
    run: Run[Config], base: finetuning.Base, data: text.Text, datasets: dict[str, PairDataset]
) -> dict[str, np.ndarray]:
    fingerprint = checksums.of_values([base.pretrained.checksum, data.fingerprint])
    there = np.int32(run.is_main and (run.folder / REFERENCE).exists())
    values: dict[str, np.ndarray] = {}
    if not multihost_utils.broadcast_one_to_all(there):
        model = base.load()
        for name, dataset in datasets.items():
            values[name] = reference_log_probabilities(run, model, dataset)
        del model  # whose room the training takes
        run.say(f"the reference's log-probabilities are in {run.address}/{REFERENCE}")

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        np.savez(folder / "log_probabilities.npz", **values)  # type: ignore[arg-type]
        (folder / "made_of.json").write_text(json.dumps({"fingerprint": fingerprint}))

    folder = run.once(REFERENCE, write)
    if json.loads((folder / "made_of.json").read_text())["fingerprint"] != fingerprint:
        raise RunError(
            f"{folder} has the log-probabilities of another model than {run.config.model}, or of "
            "other pairs: remove it to have them made again, or start anew with another --run-dir"
        )
    with np.load(folder / "log_probabilities.npz") as stored:
        return {name: stored[name] for name in datasets}


def reference_log_probabilities(
    run: Run[RunConfig], model: PyTree, dataset: PairDataset
) -> Float32[np.ndarray, "pairs 2"]:
    """The log-probabilities under a model of the answers of all pairs in a dataset's batches.

    They are NaN for pairs that the dataset leaves out.

    Raises:
        RunError: one is not finite.
    """
    evaluator = evaluation.Evaluator(run, reference_values, dataset)
    found = np.full((dataset.num_pairs, 2), np.nan, np.float32)
    for k, metrics in evaluator.results(model, True, bounded=False):
        pairs, values = dataset.pairs(k), np.asarray(jax.device_get(metrics["reference"]))
        if not np.isfinite(values[pairs >= 0]).all():
            wrong = int(pairs[(pairs >= 0) & ~np.isfinite(values).all(1)][0])
            raise RunError(
                f"the reference's log-probability of the pair {dataset.corpus.name(2 * wrong)} is "
                f"not finite in {run.precision}: give --precision fp32, or look at the model"
            )
        found[pairs[pairs >= 0]] = values[pairs >= 0]
    return found
