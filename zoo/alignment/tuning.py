"""Fine-tuning on pairs of answers: fields, training, and the reference's log-probabilities."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float32, PyTree

from zoo.alignment import preferences
from zoo.alignment.pairs import PairPlan
from zoo.common.configuration import require
from zoo.data import text
from zoo.runs import evaluation
from zoo.runs.config import Config as RunConfig
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.tasks import finetuning, language
from zoo.training import optimizers
from zoo.training.description import Training

REFERENCE = "reference"  # a folder of the run


@dataclass(frozen=True)
class Data(finetuning.Data):
    """Text to fine-tune on, or pairs of answers, in the tokens of the model's own tokenizer."""

    format: Literal["text", "completions", "chats", "preferences"] = "text"  # type: ignore[assignment]
    """text; or rows (.jsonl, .json, .csv, .parquet) of prompts with completions, which alone count
    in the loss; or of chats, by the tokenizer's own template, in which the assistant's answers
    count; or of preferences, each a prompt, chosen and rejected. The columns show the form: texts
    or messages, ShareGPT's or Alpaca's."""
    rows: Literal["packed", "bucketed"] | None = None  # type: ignore[assignment]
    """Documents packed into rows of seq_len, prompts in one piece; or each in a row of its own, cut
    and padded to the next of the buckets. If not given, packed, and bucketed for preferences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.format != "preferences" or self.rows != "packed",
            "data.rows='packed': a pair of preferences has a row of its own; give 'bucketed'",
        )

    def completed(self) -> "Data":
        """The same with a kind of rows: if none is given, that of the format."""
        pairs = self.format == "preferences"
        return dataclasses.replace(self, rows=self.rows or ("bucketed" if pairs else "packed"))


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """The fields of fine-tuning, and of its loss where the data are pairs of answers."""

    objective: Literal["dpo", "orpo"] = "dpo"
    """Loss of preferences: DPO, whose reference is the model to begin with, or ORPO, which has
    none."""
    beta: float = 0.1
    """Of DPO, the strength of the pull to the reference; of ORPO, the weight of the odds ratio."""
    label_smoothing: float = 0.0
    """Share of the preferences that DPO takes to be the wrong way round."""
    data: Data = Data()

    def __post_init__(self) -> None:
        super().__post_init__()
        preferences.check(self.beta, self.label_smoothing)
        require(
            self.label_smoothing == 0 or self.objective == "dpo",
            f"label_smoothing={self.label_smoothing}: objective={self.objective!r} has none; "
            "leave it out",
        )
        given = [
            f"{name}={getattr(self, name)!r}"
            for name in ("objective", "beta", "label_smoothing")
            if getattr(self, name) != getattr(Config, name)
        ]
        require(
            self.data.format == "preferences" or not given,
            f"{', '.join(given)}: only data.format='preferences' (now {self.data.format!r}) has "
            "that",
        )

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with the rows of its data and the numbers of its optimizer."""
        config = dataclasses.replace(super().completed(stored), data=self.data.completed())
        assert isinstance(config, Config)
        return config


def train(run: Run[Config], base: finetuning.Base, data: text.Text) -> None:
    """Fine-tune a language model, on pairs of answers where the data are some; save and show it."""
    pairs = run.config.data.format == "preferences"
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

    The reference of DPO is the base under the adapters; without adapters it is the base, whose
    log-probabilities are made once, at the run's first start, and kept by the run.
    """
    config = run.config
    if config.objective == "orpo":
        loss_fn = preferences.orpo(beta=config.beta)
    else:
        loss_fn = preferences.dpo(
            beta=config.beta,
            label_smoothing=config.label_smoothing,
            reference="base" if config.method == "lora" else "batch",
        )
        if config.method != "lora":
            plans = {"train": _pairs(data.train), "held_out": _pairs(data.held_out)}
            if config.plan:
                found = {name: np.zeros((plan.num_pairs, 2)) for name, plan in plans.items()}
            else:
                found = _stored_reference(run, base, data, plans)
            new: Any = {name: plan.with_reference(found[name]) for name, plan in plans.items()}
            data = dataclasses.replace(data, **new)
    plain = language.training(run, optimizer, data, make_model)
    return dataclasses.replace(plain, loss_fn=loss_fn, evaluate=data.held_out)


def _pairs(plan: Any) -> PairPlan:
    assert isinstance(plan, PairPlan)
    return plan


def _stored_reference(
    run: Run[Config], base: finetuning.Base, data: text.Text, plans: dict[str, PairPlan]
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
