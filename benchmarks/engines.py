"""Engines that serve a folder in Hugging Face's format: the zoo and others, timed in turn.

Each engine, a module of benchmarks.peers.generate, has a process of its own.
"""

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.report import Table
from benchmarks.timing import PAUSE_SECONDS, Process, SkippedError, Timing, median_ratio

Name = Literal["zoo", "transformers", "ctranslate2"]
Model = Literal["lm-python", "random"]


@dataclass(frozen=True)
class Options:
    """Whole continuations by the zoo and by other engines."""

    engines: tuple[Name, ...] = ("zoo", "transformers", "ctranslate2")
    """Engines; ratios are to the second. One that is not installed is skipped."""
    models: tuple[Model, ...] = ("lm-python", "random")
    """The shelf's model, and one of the sizes below with random weights."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Numbers of prompts."""
    prompt_tokens: int = 128
    """Tokens per prompt."""
    new_tokens: int = 128
    """Tokens after each prompt, greedy, without stops."""
    d_model: int = 1024
    """Width of the random model."""
    num_layers: int = 16
    """Layers of the random model."""
    vocab_size: int = 32768
    """Token ids of the random model."""

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("batch_sizes", 1)):
            if np.min(value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if not self.engines:
            raise ValueError("engines is empty: name one of zoo, transformers, ctranslate2")


class Engine(Process):
    """The process of an engine, which has opened a folder; errors as of `Process`."""

    def __init__(self, name: str, folder: Path):
        super().__init__("benchmarks.engines", name, str(folder))
        try:
            self.ask({})
        except SkippedError:
            self.__exit__(None, None, None)
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, stop: bool = False
    ) -> tuple[list[list[int]], float]:
        """The greedy tokens after each prompt, and the seconds that they took."""
        request = {"prompts": [*map(list, prompts)], "num_tokens": num_tokens, "stop": stop}
        answer = self.ask(request)
        return answer["tokens"], answer["seconds"]

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The logits behind each token of each prompt, fp32[seq, vocab]."""
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/logits.npz"
            self.ask({"prompts": [*map(list, prompts)], "logits": path})
            with np.load(path) as found:
                return [found[f"arr_{index}"] for index in range(len(prompts))]


def main(name: str, folder: Path) -> None:
    """Answer requests on standard input, in the process of an engine."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, but not among the answers
    engine = importlib.import_module(f"benchmarks.peers.generate.{name}_model").Engine(folder)
    for request in map(json.loads, sys.stdin):
        answer: dict[str, Any] = {}
        if "logits" in request:
            np.savez(request["logits"], *engine.logits(request["prompts"]))
        elif request:
            start = time.perf_counter()
            tokens = engine.generate(request["prompts"], request["num_tokens"], request["stop"])
            answer = {"tokens": tokens, "seconds": time.perf_counter() - start}
        print(json.dumps(answer), file=answers, flush=True)


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per model and number of prompts."""
    tables = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            size = _export(options, name, Path(folder))
            notes, engines = [], {}
            for engine in options.engines:
                try:
                    engines[engine] = stack.enter_context(Engine(engine, Path(folder)))
                except SkippedError as error:
                    notes.append(f"{engine}: skipped: {error}")
            for batch in options.batch_sizes:
                prompts = _prompts(options, size, batch)
                title = f"greedy continuations, {name}, fp32, batch {batch}: {size:,} ids"
                table = _in_turn(title, options, timing, engines, prompts)
                table.notes += notes
                table.print()
                tables.append(table)
    return tables


def _in_turn(
    title: str,
    options: Options,
    timing: Timing,
    engines: dict[str, Engine],
    prompts: list[list[int]],
) -> Table:
    """Every engine once per round: all tokens, and the first one alone."""
    table, count = Table(title), options.new_tokens
    tokens = {name: engine.generate(prompts, count)[0] for name, engine in engines.items()}
    for engine in engines.values():
        engine.generate(prompts, 1)
    whole: dict[str, list[float]] = {name: [] for name in engines}
    first: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(timing.rounds):
        for name, engine in engines.items():
            time.sleep(PAUSE_SECONDS)
            first[name].append(engine.generate(prompts, 1)[1])
            whole[name].append(engine.generate(prompts, count)[1])
    baseline = [*engines][min(1, len(engines) - 1)] if engines else ""
    for name, seconds in whole.items():
        later = [max(a - b, 1e-9) for a, b in zip(seconds, first[name], strict=True)]
        table.rows.append(
            {
                "peer": name,
                "tokens/s": len(prompts) * count / statistics.median(seconds),
                f"time / {baseline}": median_ratio(seconds, whole[baseline]),
                "first token ms": 1000 * statistics.median(first[name]),
                "later tokens/s": len(prompts) * (count - 1) / statistics.median(later),
                f"tokens as {baseline}": _share(tokens[name], tokens[baseline]),
            }
        )
    return table


def _share(found: list[list[int]], wanted: list[list[int]]) -> str:
    """The number of tokens before the first that differs in each row, of all."""
    pairs = [*zip(found, wanted, strict=True)]
    equal = [sum(np.cumprod(np.equal(a, b[: len(a)]))) if a else 0 for a, b in pairs]
    return f"{sum(map(int, equal))} of {sum(map(len, wanted))}"


def _export(options: Options, name: Model, folder: Path) -> int:
    """Write the model in Hugging Face's format; the number of its ids."""
    import jax

    import zoo
    from zoo import transformer

    model: Any
    if name == "lm-python":
        model = zoo.load("lm-python", dtype="fp32")
        tokenizer = zoo.tokenizer.load_tokenizer(zoo.published()["lm-python"].folder)
    else:
        config = transformer.Config(
            vocab_size=options.vocab_size,
            d_model=options.d_model,
            num_layers=options.num_layers,
            num_heads=options.d_model // 64,
            d_ff=3 * options.d_model,
            tie_embeddings=True,
            attention=transformer.AttentionConfig(
                num_kv_heads=options.d_model // 128, qk_norm="per_head"
            ),
        )
        model = transformer.Transformer(config, key=jax.random.key(0))
        tokenizer = None
    zoo.save(folder, model, format="hf", tokenizer=tokenizer)
    return model.config.vocab_size


def _prompts(options: Options, vocab_size: int, batch: int) -> list[list[int]]:
    shape = (batch, options.prompt_tokens)
    return np.random.default_rng(1).integers(1, vocab_size, shape).tolist()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
