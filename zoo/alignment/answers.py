"""The answers that a run's model gives, their rewards, and pass@1 on held-out prompts."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from zoo.alignment.policy import Advantage
from zoo.alignment.policy import Config as PolicyConfig
from zoo.alignment.prompts import Data, Prompt
from zoo.alignment.rewards import Item, Reward, rewarding
from zoo.alignment.rollouts import Rollouts, in_dtype, rollouts
from zoo.common.configuration import may_differ, require
from zoo.data.tokenizer import Tokenizer
from zoo.nn.precision import compute_dtype
from zoo.runs.metrics import MetricsLog, kept_records
from zoo.runs.processes import from_first
from zoo.runs.run import Run
from zoo.tasks import finetuning

PUZZLES = "zoo.alignment.puzzles:right"  # the reward of prompts made in place


@dataclass(frozen=True, kw_only=True)
class Config(finetuning.Config):
    """The fields of fine-tuning, a reward, and how answers are drawn and learnt from."""

    reward: str = ""
    """Function of a prompt, an answer and the prompt's row that returns a number, or numbers by
    name, which are added up: MODULE:NAME. Without files, that of the puzzles."""
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


class Answers:
    """The answers that a run's model gives, and their rewards; `open` while it trains.

    Rewards are kept in `samples.jsonl`, a line per step, with the answers to its first prompt.
    """

    def __init__(self, run: Run[Config], tokenizer: Tokenizer, stop_tokens: Sequence[int]):
        self.run, self._tokenizer, self._stops = run, tokenizer, tuple(stop_tokens)
        self._rewards: Callable[[list[Item]], list[Reward]] | None = None
        self._kept: dict[int, dict[str, Any]] = {}
        self._log: MetricsLog | None = None
        self._has_failed = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A context in which process 0 has the processes of the reward function."""
        config, path = self.run.config, self.run.folder / "samples.jsonl"
        if not self.run.is_main or config.plan:
            yield
            return
        workers, seconds = config.reward_workers, config.reward_seconds
        made = rewarding(config.reward or PUZZLES, workers=workers, seconds=seconds)
        with made as self._rewards:
            known = kept_records(path, 2**62)  # also of steps that are not saved yet
            self._kept = {line["step"]: line for line in known}
            with contextlib.closing(MetricsLog(path, resume_step=2**62)) as self._log:
                yield

    def draw(
        self, model: PyTree, prompts: Sequence[Prompt], group: int, key: Key[Array, ""]
    ) -> tuple[Rollouts, list[Item]]:
        """Answers to prompts, as ids and as what a reward function takes."""
        config = self.run.config
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

    def key(self, stream: int, number: int) -> Key[Array, ""]:
        """The key of the answers of a step (stream 0), or to held-out prompts from one on (1)."""
        root = jax.random.fold_in(jax.random.key(self.run.config.seed), 2**31 - 1 - stream)
        return jax.random.fold_in(root, number)

    def evaluate(self, prompts: Sequence[Prompt], model: PyTree, whole: bool) -> dict[str, float]:
        """The pass@1, pass@N and mean reward of a model on held-out prompts."""
        config = self.run.config
        size, samples = config.data.batch_size, config.eval_samples
        most = config.final_eval_batches if whole else config.eval_batches
        count = len(prompts) if most is None else min(len(prompts), most * size)
        values, lengths, cut = list[float](), list[int](), list[bool]()
        for first in range(0, count, size):
            self.run.signals.check()
            held = prompts[first : min(first + size, count)]
            full = [*held, *[held[-1]] * (size - len(held))]  # one program for all
            found, items = self.draw(model, full, samples, self.key(1, first))
            rows = slice(0, len(held) * samples)
            values += [reward.value(config.reward_on_error) for reward in self.of(items[rows])]
            lengths += map(len, found.answers[rows])
            cut += found.cut[rows].tolist()
        right = (np.array(values) >= config.solved).reshape(-1, samples)
        by_prompt = {
            "pass@1": right.mean(1),
            f"pass@{samples}": right.any(1),
            "eval_answer_tokens": np.reshape(lengths, right.shape).mean(1),
        }
        return {
            **{name: float(x.mean()) for name, x in by_prompt.items()},
            **{f"{name}_interval": half_interval(x) for name, x in by_prompt.items()},
            "eval_reward": float(np.mean(values)),
            "eval_cut": float(np.mean(cut)),
        }

    def rewards(self, step: int, items: list[Item]) -> list[Reward]:
        """The rewards of a step's answers: written down before they are used, or read again."""
        config, kept = self.run.config, self._kept.get(step, {})
        digest = hashlib.sha256(json.dumps([answer for _, answer, _ in items]).encode()).hexdigest()
        is_known = kept.get("answers") == digest
        found = self.of(items, kept["rewards"] if is_known else None)
        if self._log is not None and not is_known:
            shown = zip(items[: config.group_size], found, strict=False)
            lines = (f"{x[0]}{x[1]} → {r.value(config.reward_on_error):g}" for x, r in shown)
            told = [list(reward) for reward in found]
            self._log.write(step, answers=digest, rewards=told, text="\n".join(lines))
        failed = [reward.problem for reward in found if reward.problem]
        if failed and not self._has_failed:
            self._has_failed = True
            self.run.say(
                f"step {step}: {len(failed)} of {len(found)} rewards by {config.reward} failed, "
                f"the first one: {failed[0]}; each counts {config.reward_on_error:g} (later ones "
                "are in samples.jsonl and counted as reward_failures)"
            )
        return found

    def of(self, items: list[Item], known: list[Any] | None = None) -> list[Reward]:
        """The rewards of answers, the `known` ones or new, from process 0 in all processes."""
        told: dict[str, Any] = {}
        if self.run.is_main:
            assert self._rewards is not None
            told = {"rewards": known or self._rewards(items)}
        return [Reward(*reward) for reward in from_first(told)["rewards"]]


def half_interval(of_prompts: np.ndarray) -> float:
    """Half of the 95% interval of a mean over prompts, by a bootstrap of 1,000 draws."""
    count = len(of_prompts)
    drawn = np.random.default_rng(0).integers(count, size=(1000, count))
    low, high = np.quantile(of_prompts[drawn].mean(1), [0.025, 0.975])
    return float(high - low) / 2
