"""Speculative decoding: how many drafted tokens are kept, and the speed beside plain decoding.

python -m benchmarks.speculative --draft runs/draft/model
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import zoo
from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from zoo.decoding import sampling

TEXT = "import argparse\nimport os\nimport sys\n\n\ndef main():\n"


@dataclass(frozen=True)
class Options:
    """Continuations with a draft and without, in turn."""

    model: str = "lm-python"
    """The model: what `zoo.load` takes."""
    draft: str = ""
    """A smaller model of the same tokenizer; if empty, the model itself, which is right always."""
    draft_tokens: tuple[int, ...] = (2, 4, 6)
    """Numbers of drafted tokens per step."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Numbers of rows."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """0 is greedy."""
    new_tokens: int = 128
    """Tokens per row, without stops."""

    def __post_init__(self) -> None:
        for name, least in (("draft_tokens", 1), ("batch_sizes", 1), ("new_tokens", 2)):
            if np.min(value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value} must be at least {least}")


def speculative(
    options: Annotated[Options, tyro.conf.arg(name="")] = Options(), timing: Timing = Timing()
) -> list[Table]:
    """Continuations with a draft and without, in turn: a table per temperature and batch size."""
    model = zoo.load(options.model, dtype="fp32")
    draft = zoo.load(options.draft, dtype="fp32") if options.draft else model
    tokenizer = zoo.tokenizer.load_tokenizer(zoo.published()["lm-python"].folder)
    ids = tokenizer.encode(TEXT)
    tables = []
    for temperature in options.temperatures:
        for batch in options.batch_sizes:
            prompts = np.asarray([np.roll(ids, row) for row in range(batch)], np.int32)
            tables.append(_table(options, timing, (model, draft), prompts, temperature))
    return tables


def _table(
    options: Options, timing: Timing, models: Any, prompts: np.ndarray, temperature: float
) -> Table:
    model, draft = models
    calls = {0: _continuation(options, model, None, 0, prompts, temperature)}
    for count in options.draft_tokens:
        calls[count] = _continuation(options, model, draft, count, prompts, temperature)
    plain = calls[0]()
    found = {count: call() for count, call in calls.items()}
    timed = {str(count): lambda call=call: call() and None for count, call in calls.items()}
    turns = in_turn(timed, timing.rounds, pause=0)
    seconds = {count: turns[str(count)] for count in calls}
    table = Table(f"speculative decoding, temperature {temperature}, batch {len(prompts)}, fp32")
    for count, times in seconds.items():
        tokens, steps = found[count]
        per_step = (options.new_tokens - 1) / steps
        table.rows.append(
            {
                "drafted per step": count,
                "kept": f"{(per_step - 1) / count:.0%}" if count else None,
                "tokens per step": per_step,
                "tokens/s": tokens.size / statistics.median(times),
                "speedup": median_ratio(seconds[0], times),
                "step / plain step": median_ratio(times, seconds[0]) * per_step,
            }
        )
        if temperature == 0 and (tokens != plain[0]).any():
            table.failures.append(f"{count} drafted: greedy tokens differ from those of the model")
    table.notes.append("a speed-up needs more tokens per step than a step takes of plain ones")
    return table


def _continuation(
    options: Options, model: Any, draft: Any, count: int, prompts: np.ndarray, temperature: float
) -> Callable[[], tuple[np.ndarray, int]]:
    """A function that gives the new tokens, and the number of the model's steps after the first."""
    num_tokens = options.new_tokens

    def call() -> tuple[np.ndarray, int]:
        rows = sampling.Rows(model, prompts, num_tokens, (), draft, count)
        key = None if temperature == 0 else jax.random.key(0)
        drawn = rows.sampler(zoo.Sampling(temperature=temperature), key)
        state, advance = sampling._begin(rows, drawn)
        state = advance(state, num_tokens)
        tokens = np.asarray(state.tokens)[:, :num_tokens]
        return tokens, num_tokens - 1 if state.steps is None else int(state.steps)

    return call


if __name__ == "__main__":
    main(speculative)
