"""Training on rewards: a model writes answers to prompts, and learns from what they are worth.

A step draws a group of answers to each of its prompts, has them rewarded, and makes one or several
updates of them (`zoo.alignment.policy`). Rollouts and updates are on the same weights, mesh and
processes. The answers of step k follow from the seed, k and the weights alone; rewards are written
down before the update, and read again by a resumed step, as a limit of time depends on the machine.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo import sharding
from zoo.alignment.answers import Answers, Rollouts, rows_of
from zoo.alignment.answers import rollouts as rollouts
from zoo.alignment.policy import Advantage, PolicyLoss, advantages
from zoo.alignment.policy import Config as PolicyConfig
from zoo.alignment.prompts import Data, Prompt, Prompts, read_prompts
from zoo.alignment.rewards import Reward
from zoo.common.configuration import may_differ, require
from zoo.data.chats import ChatTemplate
from zoo.decoding.decoder import decoder_of
from zoo.publishing.families import choose_eos_ids
from zoo.runs import loop
from zoo.runs.run import Run
from zoo.tasks import finetuning
from zoo.tasks.finetuning.training import from_base, prepare, save, saver, say_before_and_after
from zoo.training import optimizers
from zoo.training.compiled import CompiledStep
from zoo.training.description import Training
from zoo.training.state import TrainState
from zoo.training.step import make_eval_step


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """The fields of fine-tuning, a reward, and how answers are drawn and learnt from."""

    reward: str = ""
    """Function of a prompt, an answer and the prompt's row that returns a number, or numbers by
    name, which are added up: MODULE:NAME. Without files, that of the puzzles."""
    reward_seconds: float = may_differ(10.0)
    """Seconds that one call of it may take."""
    reward_workers: int = may_differ(2)
    """Processes that call it."""
    reward_on_error: float = 0.0
    """Reward where the function fails, or takes too long."""
    group_size: int = 8
    """Answers to each prompt."""
    max_new_tokens: int = 64
    """Tokens of an answer, at most."""
    temperature: float = 1.0
    """Temperature at which answers are drawn, and their log-probabilities computed."""
    advantage: Advantage = "group"
    """Advantage of an answer over its group: less the mean, over the standard deviation (group) or
    not (group_mean), or less the mean of the others (leave_one_out)."""
    updates: int = 1
    """Updates on the same answers; before more than one, they are rescored."""
    mask_cut: bool = False
    """Learn nothing from answers that did not end within max_new_tokens."""
    policy: PolicyConfig = PolicyConfig()
    solved: float = 1.0
    """Reward from which an answer counts as right."""
    dropout: float | None = 0.0
    """Rate of dropout in updates, which then learn from another model than the one that answered;
    None: that of the stored model."""
    eval_samples: int = may_differ(8)
    """Answers to each held-out prompt: pass@1 is the share that is right, and pass@N, of so many,
    the share of the prompts with a right one."""
    data: Data = Data()  # type: ignore[assignment]
    """Prompts, a row each, with the fields that a reward needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"reward_seconds": 0.001, "reward_workers": 1, "group_size": 2, "updates": 1}
        for name, value in {**least, "max_new_tokens": 1, "eval_samples": 1}.items():
            given = getattr(self, name)
            require(given >= value, f"{name}={given}: must be at least {value}")
        require(self.temperature > 0, f"temperature={self.temperature}: must be positive")
        for name in ("label", "sample_tokens", "sample_every"):
            given, default = getattr(self, name), getattr(finetuning.Config, name)
            require(
                given == default,
                f"{name}={given!r}: leave it out; samples.jsonl has answers of every step",
            )
        require(
            self.method == "lora" or self.policy.kl == 0,
            f"policy.kl={self.policy.kl}: its reference is the model under adapters; take "
            "--method lora, or leave it out",
        )

    @property
    def batch_size(self) -> int:
        """The rows of an update."""
        return self.data.batch_size * self.group_size

    @property
    def seq_len(self) -> int:
        """The tokens of a row: a prompt with its answer, but for the last token."""
        return -(-(self.data.max_prompt_tokens + self.max_new_tokens - 1) // 16) * 16

    @property
    def row_lengths(self) -> Mapping[str, tuple[int, ...]]:
        """The tokens of a row, by the fields that say so."""
        return {"data.max_prompt_tokens + max_new_tokens": (self.seq_len,)}


@dataclass(frozen=True, kw_only=True)
class Reinforcement(Training):
    """A training whose step is on the model's own answers to the prompts of its data."""

    data: Prompts
    answers: Answers
    loss: PolicyLoss

    def step(self, **options: Any) -> CompiledStep:
        """The train step; see `Training.step`."""
        return ReinforcedStep(self, super().step(**options))


class ReinforcedStep(CompiledStep):
    """A step of `zoo.fit`: answers of the model itself, their rewards, and updates by these."""

    def __init__(self, training: Reinforcement, update: CompiledStep):
        vars(self).update(vars(update))  # it is that step, on other batches than it is given
        self._prompts, self._answers = training.data, training.answers
        run, policy = training.answers.run, training.loss.config
        self._config = run.config
        self._scores: CompiledStep | None = None
        if not training.loss.on_policy or (policy.kl > 0 and not policy.has_term):
            scores = training.loss.scores
            self._scores = make_eval_step(scores, mesh=run.layout, precision=run.precision)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """The state after the updates by the answers of a step, and its metrics."""
        config, answers, group = self._config, self._answers, self._config.group_size
        step, began = int(state.step) // config.updates, time.monotonic()
        prompts = self._prompts.chosen(step)
        found, items = answers.draw(state.model, prompts, group, answers.key(0, step))
        drawn = time.monotonic()
        rewards = answers.rewards(step + 1, items)
        values = np.array([reward.value(config.reward_on_error) for reward in rewards])
        metrics = answer_metrics(config, found, rewards, values)
        num_tokens = sum(map(len, found.answers))
        metrics["rollout_tokens_per_second"] = num_tokens / (drawn - began)
        metrics["rewards_per_second"] = len(values) / max(time.monotonic() - drawn, 1e-9)
        rows = rows_of(found, values, config.seq_len)
        if self._scores is not None:
            scores = jax.device_get(self._scores(state.model, self._on_mesh(rows))[1])
            if "reference" in scores:
                apart = ((scores["rescored"] - scores["reference"]) * rows["weights"]).sum(1)
                values = values - config.policy.kl * apart
                metrics["kl"] = float(apart.sum() / rows["weights"].sum())
            if "rescored" in batch:
                rows["rescored"] = scores["rescored"]
        rows["advantages"][:] = advantages(values.reshape(-1, group), config.advantage).ravel()
        if config.mask_cut:
            rows["weights"][found.cut] = 0
        placed, began = self._on_mesh(rows), time.monotonic()
        for _ in range(config.updates):
            state, of_update = super().__call__(state, placed)
        jax.block_until_ready(of_update)  # the next answers need the weights
        seconds = time.monotonic() - began
        metrics["update_tokens_per_second"] = config.updates * num_tokens / seconds
        return state, {**of_update, **metrics}

    def _on_mesh(self, rows: dict[str, np.ndarray]) -> PyTree:
        """Rows that every process has, on the mesh."""
        over = lambda x: sharding.batch_sharding(self._layout, x.ndim)  # noqa: E731
        make = jax.make_array_from_callback
        return jax.tree.map(lambda x: make(x.shape, over(x), x.__getitem__), rows)


def answer_metrics(
    config: Config, found: Rollouts, rewards: Sequence[Reward], values: np.ndarray
) -> dict[str, Any]:
    """The metrics of answers and of their rewards."""
    spread = np.ptp(values.reshape(-1, config.group_size), axis=1)
    parts = dict[str, list[float]]()
    for reward in rewards:
        for name, value in reward.parts.items():
            parts.setdefault(f"reward/{name}", []).append(value)
    parts.pop("reward/", None)  # of a function that returns a number
    return {
        "reward": float(values.mean()),
        **{name: float(np.mean(parts[name])) for name in sorted(parts)},
        "solved": float((values >= config.solved).mean()),
        "answer_tokens": sum(map(len, found.answers)) / len(values),
        "cut": float(found.cut.mean()),
        "groups_without_spread": float((spread == 0).mean()),
        "reward_failures": float(sum(bool(reward.problem) for reward in rewards)),
    }


def training(
    run: Run[Config], base: finetuning.Base, prompts: tuple[list[Prompt], ...], answers: Answers
) -> Reinforcement:
    """The training on the answers of a model to prompts, with pass@1 on the held-out ones."""
    config, (to_train_on, held_out) = run.config, prompts
    loss = PolicyLoss(config.policy, config.temperature, on_policy=config.updates == 1)
    nothing = Rollouts([[0]], [[0]], [[0.0]], np.zeros(1, bool))
    empty = rows_of(nothing, np.zeros(1), config.seq_len)
    if not loss.on_policy:
        empty["rescored"] = empty["drawn"]
    size, group = config.data.batch_size, config.group_size
    data = Prompts(to_train_on, size, config.seed, group=group, empty=empty)
    updates = run.steps_of(data) * config.updates
    schedule = optimizers.make_schedule(config.optimizer, updates)
    described = Reinforcement(
        make_model=lambda key, model: prepare(config, model, key),
        loss_fn=loss.loss,
        optimizer=optimizers.make_optimizer(config.optimizer, updates),
        schedule=lambda step: schedule(step * config.updates),
        data=data,
        evaluate=functools.partial(answers.evaluate, held_out),
        answers=answers,
        loss=loss,
    )
    return from_base(described, config, base)


def train(run: Run[Config]) -> dict[str, float]:
    """Train a model on rewards, save it, and show pass@1 and pass@N before and after."""
    config = run.config
    require(
        bool(config.reward) or not config.data.files,
        "reward='': name a function by --reward MODULE:NAME",
    )
    base = finetuning.Base(run)
    longest = config.data.max_prompt_tokens + config.max_new_tokens
    decoder_of(base.skeleton).check_decoder(longest)
    data, held_out = read_prompts(config.data, base.tokenizer)
    run.say(f"{len(data):,} prompts to train on, {len(held_out):,} held out")
    is_chat = any(isinstance(prompt.row[config.data.prompt], list) for prompt in data)
    turns = ChatTemplate(base.tokenizer).ends_of_turn if is_chat else ()
    ends = (*choose_eos_ids(base.skeleton.config, base.tokenizer), *turns)
    answers = Answers(run, base.tokenizer, ends)
    new_ends = turns and ends
    with answers.open():
        described = training(run, base, (data, held_out), answers)
        trained = loop.fit(run, described, save=saver(run, base, new_ends))
    after = trained.model_metrics
    save(run, base, trained.model, {**after, "steps": config.steps}, new_ends)
    say_before_and_after(run, after)
    return after
