"""Decoding: its speed by sequence length, and compared with a loop without a cache."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from benchmarks.report import Table
from benchmarks.timing import Timing, median_ratio
from zoo import rnn, transformer
from zoo.nn import parameters, precision

Model = Literal["transformer", "window", "lstm"]


@dataclass(frozen=True)
class Options:
    """Decoding."""

    models: tuple[Model, ...] = ("transformer", "window", "lstm")
    """Families: full attention, a sliding window of 256, and an LSTM."""
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    """Capacities of the cache in positions, powers of two; the prompt is half as long."""
    without_cache: tuple[int, ...] = (128, 256, 512)
    """Lengths at which the loop without a cache runs too."""
    batch_size: int = 1
    """Number of sequences."""
    d_model: int = 512
    """Width of the transformers and of the LSTM."""
    num_layers: int = 8
    """Layers of the transformers; the LSTM has two."""
    vocab_size: int = 2048
    """Number of token ids."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the parameters, the activations and the cache."""


NEW_TOKENS = 32


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table of lengths per model, and one of the loop without a cache."""
    tables = [_against_length(options, timing, name) for name in options.models]
    tables.append(_against_no_cache(options, timing))
    return tables


def _against_length(options: Options, timing: Timing, name: Model) -> Table:
    model = _make(options, name)
    calls = {length: _decoding(options, model, length) for length in options.lengths}
    seconds: dict[int, list[float]] = {length: [] for length in options.lengths}
    for _ in range(timing.rounds):
        for length, seconds_per_token in calls.items():
            seconds[length].append(seconds_per_token())
    table = Table(f"decoding, {name}, {options.dtype}: speed by the capacity of the cache")
    shortest = options.lengths[0]
    for length, times in seconds.items():
        table.rows.append(
            {
                "positions": length,
                "tokens/s": options.batch_size / statistics.median(times),
                f"time / {shortest} positions": median_ratio(times, seconds[shortest]),
            }
        )
    table.print()
    return table


def _against_no_cache(options: Options, timing: Timing) -> Table:
    table = Table(f"decoding, transformer, {options.dtype}: with and without a cache")
    model = _make(options, "transformer")
    for length in options.without_cache:
        cached, prompt = _decoding(options, model, length), _prompt(options, length)
        padded = jnp.pad(prompt, ((0, 0), (0, length - prompt.shape[1])))

        def uncached(padded: Any = padded, start: int = prompt.shape[1]) -> np.ndarray:
            return np.asarray(_without_cache(model, padded, start, 4))

        few = zoo.generate(model, prompt, max_new_tokens=4, temperature=0.0)
        if not (uncached()[:, : few.shape[1]] == np.asarray(few)).all():
            table.failures.append(
                f"{length} positions: the tokens with and without the cache differ"
            )
        times: list[float] = []
        slow_times: list[float] = []
        for _ in range(timing.rounds):
            times.append(cached())
            slow_times.append(_seconds(uncached) / 4)
        table.rows.append(
            {
                "positions": length,
                "tokens/s": options.batch_size / statistics.median(times),
                "tokens/s without a cache": options.batch_size / statistics.median(slow_times),
                "speedup": median_ratio(slow_times, times),
            }
        )
    table.print()
    return table


@eqx.filter_jit
def _without_cache(model: Any, tokens: jax.Array, start: int, num_tokens: int) -> jax.Array:
    """The simplest loop: per token, the causal model on the whole row."""

    def add(position: Any, tokens: jax.Array) -> jax.Array:
        logits = jax.lax.dynamic_index_in_dim(model(tokens), position - 1, 1, keepdims=False)
        token = logits.argmax(-1).astype(jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(tokens, token, position, 1)

    return jax.lax.fori_loop(start, start + num_tokens, add, tokens)


def _decoding(options: Options, model: Any, length: int) -> Callable[[], float]:
    """A function that measures the median seconds per token of `zoo.stream`, compiled already."""
    prompt = _prompt(options, length)

    def seconds_per_token() -> float:
        tokens = zoo.stream(model, prompt, max_new_tokens=NEW_TOKENS, temperature=0.0)
        times = [time.perf_counter() for _ in tokens]
        return statistics.median(b - a for a, b in itertools.pairwise(times[1:]))

    seconds_per_token()
    return seconds_per_token


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _prompt(options: Options, length: int) -> jax.Array:
    shape = (options.batch_size, length // 2)
    return jax.random.randint(jax.random.key(1), shape, 0, options.vocab_size, jnp.int32)


def _make(options: Options, name: Model) -> Any:
    key, width, vocab_size = jax.random.key(0), options.d_model, options.vocab_size
    model: Any
    if name == "lstm":
        config = rnn.Config(vocab_size=vocab_size, hidden_size=width, num_layers=2)
        model = rnn.RNN(config, key=key)
    else:
        model = transformer.Transformer(
            transformer.Config(
                vocab_size=vocab_size,
                d_model=width,
                num_layers=options.num_layers,
                max_seq_len=max(options.lengths),
                attention=transformer.AttentionConfig(window=256 if name == "window" else None),
            ),
            key=key,
        )
    return parameters.cast(model, precision.compute_dtype(options.dtype))
