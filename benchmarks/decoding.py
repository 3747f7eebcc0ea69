"""Decoding beside the training's forward pass, and latent attention beside plain attention.

python -m benchmarks.decoding sampler-gap
python -m benchmarks.decoding latent-cache
"""

import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import zoo
from benchmarks.harness import Table, Timing, in_turn, main
from zoo import reinforcement, transformer
from zoo.alignment.answers import in_dtype
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


if __name__ == "__main__":
    main(sampler_gap, latent_cache)
