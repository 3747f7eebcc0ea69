"""Continue texts with a model: one of the shelf, of a folder, or of a run.

    python -m recipes.generate lm-python "def "

The first text appears as its tokens come; the others, which are generated in the same batch, after
it. Without a text the model begins a document of its own. `--num-beams 4` searches for the
likeliest continuations in place of sampling.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import jax
import tyro

import zoo
from zoo.base import configuration
from zoo.data.tokenizer import TextStream, Tokenizer, load_tokenizer
from zoo.publishing.shelf import find
from zoo.runs.command_line import cli
from zoo.runs.run import check_seed

RULE = "─" * 20


@dataclass(frozen=True)
class Config:
    """Continue texts with a model."""

    model: tyro.conf.Positional[str] = "lm-python"
    """Name on the shelf, folder of a model, or folder of a run."""
    prompts: tyro.conf.Positional[tuple[str, ...]] = ("",)
    """Texts to continue."""
    max_new_tokens: int = 256
    """Tokens to add at most."""
    temperature: float = 0.8
    """Divides the logits: 0 is greedy, 1 samples the model's own probabilities."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities add up to p."""
    stop: tuple[str, ...] = ()
    """Texts of one token that end a continuation, as the end of the document does."""
    num_beams: int = 1
    """More than one: beam search of that width, with the score of each beam."""
    seed: int = 0
    """Seed of the sampling."""
    mesh: str = ""
    """Devices by axis, such as tensor=2; empty is one."""
    quantize: Literal["int8", "int4", "nf4"] | None = None
    """Bits of the model's matrices, which are quantised as they are read."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        configuration.check(self)
        count = self.num_beams
        configuration.require(count >= 1, f"num_beams={count}: must be at least 1")


def main(config: Config) -> None:
    """Load, generate and print."""
    folder = find(config.model)
    tokenizer = load_tokenizer(folder)
    mesh = zoo.make_mesh(config.mesh) if config.mesh else None
    model = zoo.load(folder, mesh=mesh, quantize=config.quantize)
    # Every document that the model was trained on begins with the separator.
    prompts = [[tokenizer.separator_id, *tokenizer.encode(p).tolist()] for p in config.prompts]
    stop_tokens = [tokenizer.separator_id, *(one_token(tokenizer, text) for text in config.stop)]
    if config.num_beams > 1:
        print_beams(config, model, tokenizer, prompts, stop_tokens)
    else:
        print_samples(config, model, tokenizer, prompts, stop_tokens)


def one_token(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token."""
    ids = tokenizer.encode(text).tolist()
    if len(ids) != 1:
        raise ValueError(f"stop={text!r} is {len(ids)} tokens of this model's, and has to be one")
    return ids[0]


def print_samples(
    config: Config, model: Any, tokenizer: Tokenizer, prompts: list[list[int]], stops: list[int]
) -> None:
    """Print the first text as its tokens come, and then the others."""
    tokens = zoo.stream(
        model,
        prompts,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_tokens=stops,
        key=jax.random.key(config.seed),
    )
    streams = [TextStream(tokenizer) for _ in prompts]
    texts = [stream.add(*ids) for stream, ids in zip(streams, prompts, strict=True)]
    stopped, times = [False] * len(prompts), []
    print(texts[0], end="", flush=True)
    for step in tokens:
        times.append(time.perf_counter())
        for row, token in enumerate(step.tolist()):
            new = "" if stopped[row] else streams[row].add(token)
            stopped[row] |= token in stops
            texts[row] += new
            if row == 0:
                print(new, end="", flush=True)
    print(streams[0].end())
    for text, stream in zip(texts[1:], streams[1:], strict=True):
        print(f"{RULE}\n{text}{stream.end()}")
    if len(times) > 2:  # the second compiles
        speed = len(prompts) * (len(times) - 2) / (times[-1] - times[1])
        print(f"({speed:.0f} tokens/s)", file=sys.stderr)


def print_beams(
    config: Config, model: Any, tokenizer: Tokenizer, prompts: list[list[int]], stops: list[int]
) -> None:
    """Print the beams of each text, best first, with their log-probabilities."""
    tokens, scores = zoo.beam_search(
        model,
        prompts,
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
        stop_tokens=stops,
    )
    for beams, beam_scores in zip(tokens, scores.tolist(), strict=True):
        for ids, score in zip(beams, beam_scores, strict=True):
            print(f"{RULE} log-probability {score:.2f}\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    cli(Config, main, "recipes.generate")
