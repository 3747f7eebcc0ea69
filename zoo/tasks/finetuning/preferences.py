"""Fine-tuning on preferences: the training, and the reference model's log-probabilities."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32, PyTree

from zoo.data import text
from zoo.data.preferences import PairPlan
from zoo.runs import evaluation
from zoo.runs.config import Config as RunConfig
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.tasks.finetuning.base import Base
from zoo.tasks.finetuning.config import Config
from zoo.training import optimizers, preferences
from zoo.training.description import Training
from zoo.training.loss_values import LossFunction

REFERENCE = "reference"  # a folder of the run


def training(
    run: Run[Config],
    base: Base,
    data: text.Text,
    make_model: Callable[..., PyTree],
) -> Training:
    """The training on pairs, with its held-out loss, accuracy and margin.

    The reference of DPO is the base under the adapters; without adapters it is the base, whose
    log-probabilities are made once, at the run's first start.
    """
    steps, config = run.steps_of(data.train), run.config
    if config.objective == "dpo" and config.method != "lora":
        data = _with_reference(run, base, data)
    loss_fn = loss_of(config)
    return Training(
        make_model=optimizers.initialise(config.optimizer, make_model),
        loss_fn=loss_fn,
        optimizer=optimizers.make_optimizer(config.optimizer, steps),
        schedule=optimizers.make_schedule(config.optimizer, steps),
        data=data.train,
        fingerprint=data.fingerprint,
        evaluate=data.held_out,
    )


def loss_of(config: Config) -> LossFunction:
    """The loss that a configuration names."""
    if config.objective == "orpo":
        return preferences.orpo(beta=config.beta)
    return preferences.dpo(
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        reference="base" if config.method == "lora" else "batch",
    )


def _with_reference(run: Run[Config], base: Base, data: text.Text) -> text.Text:
    """The same pairs with the base's log-probabilities, which the run keeps."""
    plans = {"train": data.train, "held_out": data.held_out}
    if run.config.plan:
        found = {name: np.zeros((_pairs(plan).num_pairs, 2)) for name, plan in plans.items()}
    else:
        found = _stored_reference(run, base, data, plans)
    new: dict[str, Any] = {
        name: _pairs(plan).with_reference(found[name]) for name, plan in plans.items()
    }
    return dataclasses.replace(data, **new)


def _pairs(plan: Any) -> PairPlan:
    assert isinstance(plan, PairPlan)
    return plan


def _stored_reference(
    run: Run[Config], base: Base, data: text.Text, plans: dict[str, Any]
) -> dict[str, np.ndarray]:
    made_of = f"{base.pretrained.checksum} {data.fingerprint}"
    fingerprint = hashlib.sha256(made_of.encode()).hexdigest()
    there = np.int32(run.is_main and (run.folder / REFERENCE).exists())
    values: dict[str, np.ndarray] = {}
    if not multihost_utils.broadcast_one_to_all(there):
        model = base.load()
        for name, plan in plans.items():
            values[name] = reference_log_probabilities(run, model, plan)
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
        return {name: stored[name] for name in plans}


def reference_log_probabilities(
    run: Run[RunConfig], model: PyTree, plan: PairPlan
) -> Float32[np.ndarray, "pairs 2"]:
    """The log-probabilities under a model of the answers of all pairs of a plan, in the plan's
    batches; NaN for pairs that it leaves out.

    Raises:
        RunError: one is not finite.
    """
    evaluator = evaluation.Evaluator(run, preferences.reference_values, plan)
    found = np.full((plan.num_pairs, 2), np.nan, np.float32)
    for k, metrics in evaluator.results(model, True, bounded=False):
        pairs, values = plan.pairs(k), np.asarray(jax.device_get(metrics["reference"]))
        if not np.isfinite(values[pairs >= 0]).all():
            wrong = pairs[(pairs >= 0) & ~np.isfinite(values).all(1)][0]
            raise RunError(
                f"the reference's log-probability of the pair {plan.corpus.name(2 * wrong)} is not "
                f"finite in {run.precision}: give --precision fp32, or look at the model"
            )
        found[pairs[pairs >= 0]] = values[pairs >= 0]
    return found
