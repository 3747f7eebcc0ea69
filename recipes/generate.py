"""Continue texts, or a conversation, with a model: from the shelf, a folder or a run.

    python -m recipes.generate lm-python "def "

The first text appears as its tokens come; the others, which are generated in the same batch, after
it. Without a text the model begins a document of its own. `--num-beams 4` searches for the
likeliest continuations in place of sampling.

    python -m recipes.generate runs/chat "Who are you?" --chat

is a conversation by the chat template of the model's tokenizer. Each line of standard input is the
next turn, until its end.
"""

import zoo  # isort: skip  # first: from here on Ctrl-C ends it, in the midst of imports too

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from zoo.common import configuration
from zoo.data.chats import with_chat_template
from zoo.data.tokenizer import FILE_NAME, Reading, Tokenizer, load_tokenizer
from zoo.publishing import formats
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest, sampling, whole
from zoo.runs.command_line import cli
from zoo.runs.config import check_seed
from zoo.tasks import generation
from zoo.tasks.generation import Chat, Stops

RULE = "─" * 20


@dataclass(frozen=True)
class Config:
    """Continue texts, or a conversation, with a model."""

    model: tyro.conf.Positional[str] = "lm-python"
    """Name on the shelf, folder of a model, of adapters or of a run, or a hub id."""
    prompts: tyro.conf.Positional[tuple[str, ...]] = ("",)
    """Texts to continue; with --chat the user's first turns."""
    chat: bool = False
    """A conversation by the tokenizer's template, continued by the lines of standard input."""
    system: str | None = None
    """The system's message, which a conversation begins with."""
    chat_template: str = ""
    """File of a chat template (Jinja) in place of the tokenizer's own."""
    special_tokens: Reading | None = None
    """Reading of special tokens' names in what is given, such as <|im_end|>: parse, as those
    tokens; or text, as plain characters. If not given, parse, and text for turns of a chat."""
    max_new_tokens: int = 256
    """Tokens to add at most."""
    sampling: Annotated[zoo.Sampling, tyro.conf.OmitArgPrefixes] = zoo.Sampling()
    """The first five default to the model's generation_config.json."""
    draft: str | None = None
    """A smaller model with the same tokenizer, whose proposals this one judges: the same
    distribution, with fewer steps."""
    draft_tokens: int = 4
    """Tokens that the draft proposes at a time."""
    stop: tuple[str, ...] = ()
    """Special tokens, by name, or texts that end a continuation, as the model's own ends do."""
    num_beams: int = 1
    """More than one: beam search of that width, with the score of each beam."""
    length_penalty: float = 0.0
    """Scores of beams are divided by their length to that power; 1 is the mean."""
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
        configuration.require(
            self.draft is None or count == 1,
            f"num_beams={count}: a draft is for sampling, leave one of them out",
        )
        configuration.require(
            not self.chat or count == 1, f"num_beams={count}: a chat is sampled, leave it out"
        )
        options = {name for name, x in vars(self.sampling).items() if x is not None}
        drawn = ", ".join(sorted(options - {"stop_tokens"}))
        configuration.require(
            count == 1 or not drawn,
            f"num_beams={count}: a search draws no token, leave out {drawn}",
        )
        configuration.require(
            self.system is None or self.chat, f"system={self.system!r}: needs --chat"
        )
        configuration.require(
            not self.chat_template or self.chat,
            f"chat_template={self.chat_template!r}: needs --chat",
        )

    def completed(self, folder: Path) -> "Config":
        """The configuration, with the settings of a model's folder where none is given.

        Raises:
            ValueError: one of the folder's is no number.
        """
        if self.num_beams > 1:  # they are for tokens that are drawn
            return self
        source, found = sampling(folder)
        new = {name: x for name, x in found.items() if getattr(self.sampling, name) is None}
        if new:
            listed = ", ".join(f"{name}={x}" for name, x in new.items())
            print(f"(by {source.name}: {listed})", file=sys.stderr)
        try:
            return dataclasses.replace(self, sampling=dataclasses.replace(self.sampling, **new))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `zoo.stream` but for the key."""
        names = ("max_new_tokens", "sampling", "draft_tokens")
        return {name: getattr(self, name) for name in names}


def main(config: Config) -> None:
    """Load, generate and print."""
    folder = find(config.model)
    config = config.completed(folder)
    is_hugging_face = formats.name_of(whole(folder)) != "zoo"
    tokenizer = load_tokenizer(nearest(folder, FILE_NAME))
    tokenizer = with_chat_template(tokenizer, config.chat_template)
    chat = None
    if config.chat:
        chat = Chat(tokenizer, config.system, config.special_tokens or "text")
    given = config.special_tokens or "parse"
    encode = partial(generation.encode_prompt, tokenizer, as_stored=is_hugging_face)
    prompts = [] if chat else [encode(text, given) for text in config.prompts]
    if chat is not None:
        for text in filter(str.strip, config.prompts[:1]):
            chat.check(text)  # before the model is read
    mesh = zoo.make_mesh(config.mesh) if config.mesh else None
    draft_folder = None if config.draft is None else find(config.draft)
    if draft_folder is not None:
        other = load_tokenizer(nearest(draft_folder, FILE_NAME))
        configuration.require(
            generation.have_same_tokens(tokenizer, other),
            f"draft={config.draft!r}: its tokenizer, of {other.vocab_size} ids, has other tokens "
            f"than the model's, of {tokenizer.vocab_size}; give a draft with the same one",
        )
    model = zoo.load(folder, mesh=mesh, quantize=config.quantize)
    check_finite(model, folder)
    draft = None if draft_folder is None else zoo.load(draft_folder, mesh=mesh)
    stops = generation.make_stops(model, tokenizer, config.stop, config.sampling.stop_tokens)
    if chat is not None:
        print_chat(config, model, tokenizer, chat, stops, draft)
    elif config.num_beams > 1:
        print_beams(config, model, tokenizer, prompts, stops)
    else:
        print_samples(config, model, tokenizer, prompts, stops, draft)


def print_samples(
    config: Config,
    model: Any,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    stops: Stops,
    draft: Any = None,
) -> None:
    """Print the first text as its tokens come, and then the others."""
    key = jax.random.key(config.seed)
    rows, steps = generation.stream_texts(
        model, tokenizer, prompts, stops, key=key, draft=draft, **config.options
    )
    print(rows[0].prompt, end="", flush=True)
    times = []
    for first, *_ in steps:
        times.append(time.perf_counter())
        print(first, end="", flush=True)
    print(rows[0].end())
    for row in rows[1:]:
        row.end()
        print(f"{RULE}\n{row.prompt}{row.text}")
    if len(times) > 2:  # the second compiles
        speed = len(prompts) * (len(times) - 2) / (times[-1] - times[1])
        print(f"({speed:.0f} tokens/s)", file=sys.stderr)


def print_chat(
    config: Config, model: Any, tokenizer: Tokenizer, chat: Chat, stops: Stops, draft: Any = None
) -> None:
    """Print each answer as its tokens come; Ctrl-C ends an answer."""
    stops = stops._replace(ids=(*stops.ids, *chat.template.ends_of_turn))
    for turn, text in enumerate(turns(config.prompts)):
        key = jax.random.fold_in(jax.random.key(config.seed), turn)
        [row], steps = generation.stream_texts(
            model, tokenizer, [chat.ask(text)], stops, key=key, draft=draft, **config.options
        )
        try:
            for [new] in steps:
                print(new, end="", flush=True)
        except KeyboardInterrupt:  # ends the answer, and at a terminal not the conversation
            print()
            if not is_typed():
                raise
        else:
            print(row.end(), flush=True)
        chat.hear(row.text)


def is_typed() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def turns(given: tuple[str, ...]) -> Iterator[str]:
    """The user's turns: those given, and then the lines of standard input."""
    typed = is_typed()
    lines = () if typed or sys.stdin is None else sys.stdin
    for text in itertools.chain(given, lines):
        if text := text.strip():
            print(f"> {text}")
            yield text
    while typed:
        try:
            if text := input("> ").strip():
                yield text
        except (EOFError, KeyboardInterrupt):
            print()
            return


def print_beams(
    config: Config, model: Any, tokenizer: Tokenizer, prompts: list[list[int]], stops: Stops
) -> None:
    """Print the beams of each text, best first, with their scores."""
    generation.check_stop_tokens(tokenizer, stops)
    tokens, scores = zoo.beam_search(
        model,
        prompts,
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
        length_penalty=config.length_penalty,
        stop_tokens=stops.ids,
    )
    for beams, beam_scores in zip(tokens, scores.tolist(), strict=True):
        for ids, score in zip(beams, beam_scores, strict=True):
            kind = "log-probability" if config.length_penalty == 0 else "score"
            print(f"{RULE} {kind} {score:.2f}\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    cli(Config, main, "recipes.generate")
