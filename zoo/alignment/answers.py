"""The answers that a model gives to prompts, their rewards, and pass@1 on held-out prompts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Key, PyTree

from zoo.alignment.prompts import Prompt
from zoo.alignment.rewards import Item, Reward, rewarding
from zoo.common import checksums
from zoo.common.configuration import require
from zoo.data.datasets import HostBatch
from zoo.data.tokenizer import Tokenizer
from zoo.decoding import sampling
from zoo.nn.precision import compute_dtype
from zoo.nn.stateful import cast
from zoo.runs.metrics import MetricsLog, kept_records
from zoo.runs.processes import from_first
from zoo.runs.run import Run

PUZZLES = "zoo.alignment.puzzles:right"  # the reward of prompts made in place


class Rollouts(NamedTuple):
    """Answers to prompts: those to prompt i are rows i * group, i * group + 1, …"""

    prompts: list[list[int]]
    """The prompt of each row."""
    answers: list[list[int]]
    """The ids of each answer, with the one that ended it."""
    log_probs: list[list[float]]
    """The log-probability with which each was drawn."""
    cut: np.ndarray
    """bool[rows]: no end came within the tokens that an answer may have."""


def rollouts(
    model: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    max_new_tokens: int,
    key: Key[Array, ""],
    temperature: float = 1.0,
    stop_tokens: Sequence[int],
) -> Rollouts:
    """`group` answers to each prompt, drawn at a temperature from the whole distribution.

    They depend on the key, the places of the prompts and the weights, and not on the mesh. Every
    process of a mesh calls it with all prompts.

    Raises:
        ValueError: a temperature of 0, which explores nothing; as for `zoo.generate`.
    """
    require(temperature > 0, f"temperature={temperature}: must be positive, to draw answers")
    rows = [[*ids] for ids in prompts for _ in range(group)]
    texts, log_probs = sampling.generate(
        model,
        rows,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_tokens=tuple(stop_tokens),
        key=key,
        logprobs="scaled",
    )
    answers = [text[len(ids) :] for ids, text in zip(rows, texts, strict=True)]
    cut = np.array([answer[-1] not in {*stop_tokens} for answer in answers])
    return Rollouts(rows, answers, log_probs, cut)


def rows_of(found: Rollouts, gains: Float[np.ndarray, "rows"], seq_len: int) -> HostBatch:
    """A batch of `PolicyLoss`: a prompt and its answer per row, padded on the right."""
    shape = len(found.prompts), seq_len
    batch: HostBatch = {
        **{name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")},
        **{name: np.zeros(shape, np.float32) for name in ("weights", "drawn")},
        "positions": np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape).copy(),
        "advantages": np.asarray(gains, np.float32),
    }
    rows = zip(found.prompts, found.answers, found.log_probs, strict=True)
    for row, (prompt, answer, log_probs) in enumerate(rows):
        ids, end = [*prompt, *answer], len(prompt) + len(answer) - 1
        batch["tokens"][row, :end], batch["targets"][row, :end] = ids[:-1], ids[1:]
        batch["segment_ids"][row, :end] = 1
        answered = slice(len(prompt) - 1, end)
        batch["weights"][row, answered], batch["drawn"][row, answered] = 1, log_probs
    return batch


def in_dtype(model: PyTree, dtype: DTypeLike) -> PyTree:
    """The model in a dtype; what has it already is not copied: no frozen base is there twice."""
    like = eqx.filter_eval_shape(cast, model, dtype)
    wanted, structure = jax.tree.flatten(like)
    leaves = jax.tree.leaves(model)
    pairs = enumerate(zip(leaves, wanted, strict=True))
    others = {i: x for i, (x, y) in pairs if eqx.is_array(x) and x.dtype != y.dtype}
    found = eqx.filter_jit(cast)(others, dtype)
    return jax.tree.unflatten(structure, [found.get(i, x) for i, x in enumerate(leaves)])


class Answers:
    """The answers that a run's model gives, and their rewards; `open` while it trains.

    Rewards are kept in `samples.jsonl`, a line per step, with the answers to its first prompt.
    """

    def __init__(self, run: Run[Any], tokenizer: Tokenizer, stop_tokens: Sequence[int]):
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
        """The key of a step's answers (stream 0), or of held-out prompts' from a number on (1)."""
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
        digest = checksums.of_values(answer for _, answer, _ in items)
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
