"""Training on rewards: a model writes answers to prompts, and learns from what they are worth.

A step draws a group of answers to each of its prompts, has them rewarded, and makes one or several
updates of them (`zoo.alignment.policy`). Rollouts and updates are on the same weights, mesh and
processes. The answers of step k follow from the seed, k and the weights alone; rewards are written
down before the update, and read again by a resumed step, as a limit of time depends on the machine.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.alignment.policy import Advantage, PolicyLoss, advantages
from zoo.alignment.policy import Config as PolicyConfig
from zoo.alignment.prompts import Data, Prompt, Prompts, read_prompts
from zoo.alignment.rewards import Item, Reward, Rewards
from zoo.alignment.rollouts import Rollouts, in_dtype, rollouts, rows_of
from zoo.common.configuration import may_differ, require
from zoo.data.chats import ChatTemplate
from zoo.data.datasets import HostBatch, check_batch_size
from zoo.data.tokenizer import Tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.nn.precision import compute_dtype
from zoo.publishing.families import choose_eos_ids
from zoo.runs import loop
from zoo.runs.metrics import MetricsLog, kept_records
from zoo.runs.processes import from_first
from zoo.runs.run import Run
from zoo.tasks import finetuning
from zoo.tasks.finetuning.training import from_base, prepare, save, saver, say_before_and_after
from zoo.training import optimizers
from zoo.training.compiled import CompiledStep
from zoo.training.description import Evaluate, Training
from zoo.training.state import TrainState
from zoo.training.step import make_eval_step


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """The fields of fine-tuning, a reward, and how answers are drawn and learnt from."""

    reward: str = ""
    """Function of a prompt, an answer and the prompt's row that returns a number, or numbers by
    name, which are added up: MODULE:NAME."""
    reward_seconds: float = may_differ(10.0)
    """Time for one call of it."""
    reward_workers: int = may_differ(2)
    """Processes that call it."""
    reward_on_error: float = 0.0
    """Reward where the function fails, or takes too long."""
    group_size: int = 8
    """Answers to each prompt."""
    max_new_tokens: int = 64
    """Tokens of an answer, at most."""
    temperature: float = 1.0
    """Temperature that answers are drawn, and their log-probabilities computed, at."""
    advantage: Advantage = "group"
    """Advantage of an answer over its group: less the mean, over the standard deviation (group) or
    not (group_mean), or less the mean of the others (leave_one_out)."""
    updates: int = 1
    """Updates of the same answers; with more than one the first rescores them."""
    mask_cut: bool = False
    """Learn nothing from answers that did not end within max_new_tokens."""
    policy: PolicyConfig = PolicyConfig()
    solved: float = 1.0
    """Reward from which an answer counts as right."""
    dropout: float | None = 0.0
    """Rate of dropout in updates, which then learn of another model than the one that answered;
    None: that of the stored model."""
    eval_samples: int = may_differ(8)
    """Answers to each held-out prompt: pass@1 is the share that is right, and pass@N, of so many,
    the share of the prompts with a right one."""
    data: Data = Data()  # type: ignore[assignment]

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

    def completed(self, stored: Mapping[str, Any]) -> "Config":
        """The configuration with the numbers of its optimizer."""
        optimizer = self.optimizer
        if isinstance(optimizer, finetuning.Optimizer):
            optimizer = optimizer.completed(self.method, stored.get("optimizer", {}))
        return dataclasses.replace(self, optimizer=optimizer)

    @property
    def row_lengths(self) -> Mapping[str, tuple[int, ...]]:
        """The tokens of a prompt with its answer, as in a row of an update."""
        longest = self.data.max_prompt_tokens + self.max_new_tokens - 1
        return {"data.max_prompt_tokens + max_new_tokens": (-(-longest // 16) * 16,)}


@dataclass(frozen=True, kw_only=True)
class Reinforcement(Training):
    """A training whose step is on the model's own answers to its data, a dataset of `Prompts`."""

    data: Prompts
    answers: "Answers"

    def step(self, **options: Any) -> Any:
        """The train step; see `Training.step`."""
        return ReinforcedStep(self, super().step(**options))


class Answers:
    """The answers that a run's model gives, and their rewards; `open` while it trains.

    Rewards are kept in `samples.jsonl`, a line per step, with the answers to its first prompt.
    """

    def __init__(self, run: Run[Config], tokenizer: Tokenizer, stop_tokens: Sequence[int]):
        self.run, self.config, self._stops = run, run.config, tuple(stop_tokens)
        self._tokenizer = tokenizer
        [self.seq_len] = max(self.config.row_lengths.values())
        on_policy = self.config.updates == 1
        self.loss = PolicyLoss(self.config.policy, self.config.temperature, on_policy)
        self._rewards: Rewards | None = None
        self._kept: dict[int, dict[str, Any]] = {}
        self._log: MetricsLog | None = None
        self._has_failed = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A context in which process 0 has the processes of the reward function."""
        config, path = self.config, self.run.folder / "samples.jsonl"
        with contextlib.ExitStack() as stack:
            if self.run.is_main and not config.plan:
                seconds, workers = config.reward_seconds, config.reward_workers
                made = Rewards(config.reward, workers=workers, seconds=seconds)
                self._rewards = stack.enter_context(made)
                known = kept_records(path, 2**62)  # also of steps that are not saved yet
                self._kept = {line["step"]: line for line in known}
                self._log = MetricsLog(path, resume_step=2**62)
                stack.callback(self._log.close)
            yield

    def draw(
        self, model: PyTree, prompts: Sequence[Prompt], group: int, key: Array
    ) -> tuple[Rollouts, list[Item]]:
        """Answers to prompts, as ids and as what a reward function takes."""
        config = self.config
        found = rollouts(
            in_dtype(model, compute_dtype(self.run.precision)),
            [prompt.ids for prompt in prompts],
            group=group,
            max_new_tokens=config.max_new_tokens,
            key=key,
            temperature=config.temperature,
            stop_tokens=self._stops,
        )
        items = []
        for row, answer in enumerate(found.answers):
            prompt, ids = prompts[row // group], answer if found.cut[row] else answer[:-1]
            items.append((prompt.text, self._tokenizer.decode(ids), prompt.row))
        return found, items

    def key(self, stream: int) -> Key[Array, ""]:
        """The key of the answers to train on (0), or of the held-out ones (1)."""
        return jax.random.fold_in(jax.random.key(self.config.seed), 2**31 - 1 - stream)

    def evaluator(self, prompts: Sequence[Prompt]) -> Evaluate:
        """From a model to its pass@1, pass@N and mean reward on held-out prompts."""
        config, size, samples = self.config, self.config.data.batch_size, self.config.eval_samples

        def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
            most = config.final_eval_batches if whole else config.eval_batches
            count = len(prompts) if most is None else min(len(prompts), most * size)
            values, lengths, cut = [], [], []
            for first in range(0, count, size):
                self.run.signals.check()
                held = prompts[first : min(first + size, count)]
                full = [*held, *[held[-1]] * (size - len(held))]  # one program for all
                key = jax.random.fold_in(self.key(1), first)
                found, items = self.draw(model, full, samples, key)
                rows = slice(0, len(held) * samples)
                values += [reward.value(config.reward_on_error) for reward in self.of(items[rows])]
                lengths += [len(answer) for answer in found.answers[rows]]
                cut += found.cut[rows].tolist()
            right = (np.array(values) >= config.solved).reshape(-1, samples)
            return {
                "pass@1": float(right.mean()),
                f"pass@{samples}": float(right.any(1).mean()),
                "eval_reward": float(np.mean(values)),
                "eval_answer_tokens": float(np.mean(lengths)),
                "eval_cut": float(np.mean(cut)),
            }

        return evaluate

    def rewards(self, step: int, items: list[Item]) -> list[Reward]:
        """The rewards of a step's answers: written down before they are used, or read again."""
        digest = hashlib.sha256(json.dumps([answer for _, answer, _ in items]).encode()).hexdigest()
        kept = self._kept.get(step, {})
        found = self.of(items, kept["rewards"] if kept.get("answers") == digest else None)
        if self._log is not None and kept.get("answers") != digest:
            first = [[prompt, answer] for prompt, answer, _ in items[: self.config.group_size]]
            self._log.write(step, answers=digest, rewards=[list(x) for x in found], first=first)
        self._say_problem(step, found)
        return found

    def of(self, items: list[Item], known: list[Any] | None = None) -> list[Reward]:
        """The rewards of answers, the `known` ones or new, from process 0 in all processes."""
        told: dict[str, Any] = {}
        if self.run.is_main:
            assert self._rewards is not None
            told = {"rewards": known or self._rewards(items)}
        return [Reward(*reward) for reward in from_first(told)["rewards"]]

    def _say_problem(self, step: int, found: Sequence[Reward]) -> None:
        failed = [reward.problem for reward in found if reward.problem]
        if failed and not self._has_failed:
            self._has_failed = True
            self.run.say(
                f"step {step}: {len(failed)} of {len(found)} rewards by {self.config.reward} "
                f"failed, the first one: {failed[0]}; each counts {self.config.reward_on_error:g} "
                "(later ones are in samples.jsonl and counted as reward_failures)"
            )


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
        for _ in range(config.updates):
            state, of_update = super().__call__(state, placed)
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
    require(bool(config.reward), "reward='': name a function by --reward MODULE:NAME")
    check_batch_size(config.data.batch_size * config.group_size, run.mesh, config.accumulate)
    base = finetuning.Base(run)
    longest = config.data.max_prompt_tokens + config.max_new_tokens
    decoder_of(base.skeleton).check_decoder(longest)
    data, held_out = read_prompts(config.data, base.tokenizer, config.seed)
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
