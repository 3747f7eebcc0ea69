"""Training on rewards: a model writes answers to prompts, and learns from what they are worth.

A step draws a group of answers to each of its prompts, has them rewarded, and makes one or several
updates of them (`zoo.alignment.policy`). Rollouts and updates are on the same weights, mesh and
processes. The answers of step k follow from the seed, k and the weights alone; rewards are written
down before the update, and read again by a resumed step, as a limit of time depends on the machine.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo import sharding
from zoo.alignment.answers import Answers, Config
from zoo.alignment.answers import PolicyConfig as PolicyConfig
from zoo.alignment.policy import Advantage as Advantage
from zoo.alignment.policy import PolicyLoss as PolicyLoss
from zoo.alignment.policy import advantages
from zoo.alignment.prompts import Data as Data
from zoo.alignment.prompts import Prompts, read_prompts
from zoo.alignment.rewards import Reward
from zoo.alignment.rollouts import Rollouts, rows_of
from zoo.alignment.rollouts import rollouts as rollouts
from zoo.common.configuration import require
from zoo.data.chats import ChatTemplate
from zoo.data.datasets import HostBatch, check_batch_size
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
class Reinforcement(Training):
    """A training whose step is on the model's own answers to its data, a dataset of `Prompts`."""

    data: Prompts
    answers: Answers

    def step(self, **options: Any) -> Any:
        """The train step; see `Training.step`."""
        return ReinforcedStep(self, super().step(**options))


class ReinforcedStep(CompiledStep):
    """A step of `zoo.fit`: answers of the model itself, their rewards, and updates by these."""

    def __init__(self, training: Reinforcement, update: CompiledStep):
        vars(self).update(vars(update))  # it is that step, on other batches than it is given
        self._prompts, self._answers = training.data, training.answers
        self._config, self._run = training.answers.config, training.answers.run
        run, loss = self._run, self._answers.loss
        self._scores: CompiledStep | None = None
        if not loss.on_policy or loss.scores_reference:
            self._scores = make_eval_step(loss.scores, mesh=run.layout, precision=run.precision)

    def accepted(self, state: TrainState) -> dict[str, Any]:
        """Any number of a prompt."""
        return {"prompt": None}

    def compile(self, state: TrainState, *batches: PyTree) -> None:
        """Compile an update ahead of time: all of them are alike."""
        super().compile(state, self._shapes())

    def check_sums(self, state: TrainState, batch: PyTree) -> None:
        """The loss is a sum, as tests show."""

    def trace(self, state: TrainState, batch: PyTree) -> jax.stages.Traced:
        """An update, of abstract arrays."""
        return super().trace(state, self._shapes())

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        count = self._config.data.batch_size * self._config.group_size
        empty = Rollouts([[0]] * count, [[0]] * count, [[0.0]] * count, np.zeros(count, bool))
        batch = self._batch(empty, np.zeros(count), None)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def _batch(
        self, found: Rollouts, gains: np.ndarray, scores: Mapping[str, np.ndarray] | None
    ) -> HostBatch:
        counted = ~found.cut if self._config.mask_cut else None
        batch = rows_of(found, gains, self._answers.seq_len, counted=counted)
        if not self._answers.loss.on_policy:
            batch["rescored"] = batch["drawn"] if scores is None else scores["rescored"]
        return batch

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """The state after the updates by the answers of a step, and its metrics."""
        config, answers = self._config, self._answers
        step = int(state.step) // config.updates
        prompts = [self._prompts.prompts[i] for i in self._prompts.chosen(step)]
        began = time.monotonic()
        key = jax.random.fold_in(answers.key(0), step)
        found, items = answers.draw(state.model, prompts, config.group_size, key)
        drawn = time.monotonic()
        rewards = answers.rewards(step + 1, items)
        values = np.array([reward.value(config.reward_on_error) for reward in rewards])
        metrics = self._described(found, rewards, values)
        num_tokens = sum(map(len, found.answers))
        metrics["rollout_tokens_per_second"] = num_tokens / (drawn - began)
        metrics["rewards_per_second"] = len(values) / max(time.monotonic() - drawn, 1e-9)
        scores = None
        if self._scores is not None:
            before = self._on_mesh(self._batch(found, np.zeros(len(values)), None))
            scores = jax.device_get(self._scores(state.model, before)[1])
            if "reference" in scores:
                weights = rows_of(found, values, answers.seq_len)["weights"]
                apart = ((scores["rescored"] - scores["reference"]) * weights).sum(1)
                values = values - config.policy.kl * apart
                metrics["kl"] = float(apart.sum() / weights.sum())
        gains = advantages(values.reshape(-1, config.group_size), config.advantage)
        placed = self._on_mesh(self._batch(found, gains.reshape(-1), scores))
        began = time.monotonic()
        for _ in range(config.updates):
            state, of_update = super().__call__(state, placed)
        jax.block_until_ready(of_update)  # the next answers need the weights
        seconds = time.monotonic() - began
        metrics["update_tokens_per_second"] = config.updates * num_tokens / seconds
        return state, {**of_update, **metrics}

    def _described(
        self, found: Rollouts, rewards: Sequence[Reward], values: np.ndarray
    ) -> dict[str, Any]:
        config, names = self._config, sorted({name for reward in rewards for name in reward.parts})
        spread = np.ptp(values.reshape(-1, config.group_size), axis=1)
        parts = {
            f"reward/{name}": float(np.mean([r.parts[name] for r in rewards if name in r.parts]))
            for name in names
            if name
        }
        return {
            "reward": float(values.mean()),
            **parts,
            "solved": float((values >= config.solved).mean()),
            "answer_tokens": sum(map(len, found.answers)) / len(values),
            "cut": float(found.cut.mean()),
            "groups_without_spread": float((spread == 0).mean()),
            "reward_failures": float(sum(bool(reward.problem) for reward in rewards)),
        }

    def _on_mesh(self, batch: HostBatch) -> PyTree:
        """A batch, which every process has as a whole, on the mesh."""
        layout = self._run.layout
        if layout.mesh is None:
            return batch
        return {
            name: jax.make_array_from_callback(
                x.shape, sharding.batch_sharding(layout, x.ndim), x.__getitem__
            )
            for name, x in batch.items()
        }


def training(
    run: Run[Config], base: finetuning.Base, prompts: tuple[Prompts, Prompts], answers: Answers
) -> Reinforcement:
    """The training on the answers of a model to prompts, with pass@1 on the held-out ones."""
    config, (data, held_out) = run.config, prompts
    updates = run.steps_of(data) * config.updates
    schedule = optimizers.make_schedule(config.optimizer, updates)
    described = Reinforcement(
        make_model=lambda key, model: prepare(config, model, key),
        loss_fn=answers.loss.loss,
        optimizer=optimizers.make_optimizer(config.optimizer, updates),
        schedule=lambda step: schedule(step * config.updates),
        data=data,
        evaluate=answers.evaluator(held_out.prompts),
        answers=answers,
    )
    return from_base(described, config, base)


def train(run: Run[Config]) -> dict[str, float]:
    """Train a model on rewards, save it, and show pass@1 and pass@N before and after."""
    config = run.config
    require(
        bool(config.reward) or not config.data.files,
        "reward='': name a function by --reward MODULE:NAME",
    )
    check_batch_size(config.data.batch_size * config.group_size, run.mesh, config.accumulate)
    base = finetuning.Base(run)
    longest = config.data.max_prompt_tokens + config.max_new_tokens
    decoder_of(base.skeleton).check_decoder(longest)
    [seq_len] = max(config.row_lengths.values())
    tokens = config.group_size * seq_len
    data, held_out = read_prompts(config.data, base.tokenizer, config.seed, tokens)
    run.say(f"{len(data.prompts):,} prompts to train on, {len(held_out.prompts):,} held out")
    is_chat = any(prompt.is_chat for prompt in data.prompts)
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
