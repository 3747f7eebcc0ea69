"""Decoding beside the training's forward pass, latent beside plain attention, and with drafts.

python -m benchmarks.decoding sampler-gap
python -m benchmarks.decoding latent-cache
python -m benchmarks.decoding speculative --draft runs/draft/model
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import zoo
from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from zoo import reinforcement, transformer
from zoo.alignment.answers import in_dtype
from zoo.decoding import sampling
from zoo.decoding.decoder import decoder_of
from zoo.nn.precision import compute_dtype


@dataclass(frozen=True)
class Answers:
    """Answers, whose log-probabilities are computed a second time by the training's program."""

    model: str = "lm-python"
    """The model: what `zoo.load` takes."""
    precisions: tuple[str, ...] = ("bf16", "fp32")
    """Precisions of both programs."""
    rows: int = 8
    """Answers in all."""
    new_tokens: int = 256
    """Tokens of an answer; the table has the means of the first 16, 64 and all of them."""
    rescaled: float = 1.0
    """Factor of the temperature of the second program alone, to see what a mistake looks like."""


def sampler_gap(options: Annotated[Answers, tyro.conf.arg(name="")] = Answers()) -> list[Table]:
    """The difference of log-probabilities per token: sampling's, with a cache, and training's."""
    table = Table(f"log-probabilities of {options.model}, decoded and rescored")
    prompts = [[10, 100 + row, 101, 102] for row in range(options.rows)]
    for precision in options.precisions:
        model = in_dtype(zoo.load(options.model, dtype="fp32"), compute_dtype(precision))
        found = reinforcement.rollouts(
            model,
            prompts,
            group=1,
            max_new_tokens=options.new_tokens,
            stop_tokens=(),
            key=jax.random.key(0),
        )
        rows = reinforcement.rows_of(found, np.zeros(len(prompts)), options.new_tokens + 16)
        batch = jax.tree.map(jnp.asarray, rows)
        loss = reinforcement.PolicyLoss(temperature=options.rescaled)
        score = zoo.make_eval_step(loss.scores, precision=precision)
        rescored = np.asarray(score(model, batch)[1]["rescored"])
        apart = [
            np.abs(again[np.asarray(counted) > 0] - drawn)
            for again, counted, drawn in zip(
                rescored, rows["weights"], found.log_probs, strict=True
            )
        ]
        row: dict[str, Any] = {"precision": precision}
        for length in (16, 64, options.new_tokens):
            row[f"first {length}"] = f"{np.mean([x[:length] for x in apart]):.2g}"
        table.add(**row, largest=f"{np.max(apart):.2g}")
    return [table]


@dataclass(frozen=True)
class Latent:
    """Two models of one width: plain attention, and keys and values from a latent vector."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Tokens in the cache."""
    num_layers: int = 4
    """Layers of both models."""
    rows: int = 4
    """Texts that are continued at once."""


def latent_cache(
    options: Annotated[Latent, tyro.conf.arg(name="")] = Latent(), timing: Timing = Timing()
) -> list[Table]:
    """Bytes of a cache per token, and the time of a token, at 16 heads of 64 and a width of 1,024.

    The latent vector has 256 features, and the key that all heads share 32, as in DeepSeek-V3 by
    its width.
    """
    sizes = {"vocab_size": 512, "d_model": 1024, "num_layers": options.num_layers, "num_heads": 16}
    of_latent = transformer.LatentConfig(kv_rank=256, rotary_dim=32, value_dim=64)
    kinds = {
        "plain": transformer.AttentionConfig(),
        "grouped, 4 of keys": transformer.AttentionConfig(num_kv_heads=4),
        "latent": transformer.AttentionConfig(head_dim=64, latent=of_latent),
    }
    tables = []
    for length in options.lengths:
        calls, bytes_of = {}, {}
        for kind, attention in kinds.items():
            config = transformer.Config(**sizes, attention=attention, max_seq_len=length + 64)
            model = transformer.Transformer(config, key=jax.random.key(0))
            calls[kind], bytes_of[kind] = _step(model, options.rows, length)
        turns = in_turn(calls, timing.rounds, pause=0)
        table = Table(f"{options.rows} rows, {length:,} tokens in the cache, fp32")
        for kind, seconds in turns.items():
            table.add(
                attention=kind,
                **{"cache bytes per token": bytes_of[kind]},
                **{"ms per token": f"{1e3 * statistics.median(seconds):.1f}"},
            )
        tables.append(table)
    return tables


def _step(model: transformer.Transformer, rows: int, length: int) -> tuple[Any, int]:
    """A call that decodes one token behind `length` others, and the bytes of a token's cache."""
    decoder = decoder_of(model)
    tokens, mask = np.zeros((rows, 16), np.int32), np.ones((rows, 16), bool)
    prefill = jax.jit(lambda decoder: decoder.prefill(tokens, mask, length)[1])
    cache = prefill(decoder)
    size = sum(x.nbytes for layer in cache.layers for x in jax.tree.leaves(layer))
    absorbed = decoder.for_decoding()
    token = jnp.zeros(rows, jnp.int32)
    decode = jax.jit(lambda decoder, cache: decoder.decode(token, cache), donate_argnums=1)
    caches = [cache]

    def call() -> None:
        logits, caches[0] = decode(absorbed, caches[0])
        jax.block_until_ready(logits)

    return call, size // (rows * length)


# --- Drafts -------------------------------------------------------------------------------------

TEXT = "import argparse\nimport os\nimport sys\n\n\ndef main():\n"


@dataclass(frozen=True)
class Drafts:
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
    options: Annotated[Drafts, tyro.conf.arg(name="")] = Drafts(), timing: Timing = Timing()
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
    options: Drafts, timing: Timing, models: Any, prompts: np.ndarray, temperature: float
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
    options: Drafts, model: Any, draft: Any, count: int, prompts: np.ndarray, temperature: float
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
    main(sampler_gap, latent_cache, speculative)
