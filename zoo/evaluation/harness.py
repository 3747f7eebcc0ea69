"""The zoo's models in EleutherAI's lm-eval, whose tasks then run on them without PyTorch."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo.common import checksums
from zoo.data.chats import ChatTemplate
from zoo.data.tokenizer import FILE_NAME, Reading, Tokenizer, begun, end_id, load_tokenizer, reading
from zoo.evaluation.scorer import LogLikelihood, Scorer, precision_of
from zoo.nn.products import Kind
from zoo.publishing import models
from zoo.publishing.formats import METRICS, read_json
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise ImportError("an evaluation needs an extra: pip install 'zoo[eval]'") from error

NORMALIZED = ("until", "do_sample", "temperature", "max_gen_toks")
DRAWING = ("top_k", "top_p", "min_p")  # without effect on greedy answers
PENALTIES = ("repetition_penalty",)


class ZooLM(TemplateLM):
    """A model of the zoo for lm-eval: `lm_eval.simple_evaluate(model=ZooLM("lm-python"), …)`.

    `pretrained` is a name on the shelf, a folder, an address or a hub id; or a language model, with
    its `tokenizer`. `mesh`, `max_length` and `batch_tokens` are those of
    `zoo.evaluation.scorer.Scorer`, `dtype` and `quantize` those of `zoo.load`. `begin` puts the
    token that the tokenizer's texts begin with before each prompt, unless it is there. `seed` is
    the seed of sampled answers.

    The name of a special token in a text is that token, as for lm-eval's own models: chat templates
    write them so. A model with a classification head answers multiple choice whose choices are
    names of its classes, and nothing else; a name in its texts is plain characters, as in training.

    Each of several processes asks all of a task, and the mesh shares out the work.

    Raises:
        ValueError: a model without a next token or classes; a model without its tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Path | PyTree,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | None = None,
        dtype: str | None = None,
        quantize: Kind | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        begin: bool = True,
        seed: int = 0,
    ):
        super().__init__()
        info: dict[str, Any] = {}
        model: Any = pretrained
        classes: tuple[str, ...] = ()
        if isinstance(pretrained, str | Path):
            folder = find(pretrained)
            if not (nearest(folder, FILE_NAME) / FILE_NAME).is_file():
                raise ValueError(
                    f"{pretrained} has no tokenizer, and a task has texts: its recipe evaluates it"
                )
            tokenizer = tokenizer or load_tokenizer(nearest(folder, FILE_NAME))
            if (folder / METRICS).is_file():
                classes = tuple(read_json(folder / METRICS).get("classes", ()))
            model = models.load(folder, mesh=mesh, dtype=dtype, quantize=quantize)
            check_finite(model, folder)
            weights = models.weights_checksum(folder)
            info = {"pretrained": str(pretrained), "weights": weights, "quantize": quantize}
        elif tokenizer is None:
            raise ValueError("tokenizer: give that of the model, which is no name of one")
        elif dtype is not None or quantize is not None:
            raise ValueError(
                f"dtype={dtype!r}, quantize={quantize!r}: a model that is given stays as it is; "
                "leave them out"
            )
        self.classes = {str(name): i for i, name in enumerate(classes)}
        special_tokens: Reading = "text" if classes else "parse"
        self.tokenizer, self._read = tokenizer, reading(tokenizer, special_tokens)
        self._begin, self._key, self._ends = begin, jax.random.key(seed), list[str]()
        self.scorer = Scorer(
            model,
            tokenizer,
            mesh=mesh,
            max_length=max_length,
            batch_tokens=batch_tokens,
            classifies=bool(classes),
        )
        self._info = {
            **info,
            "dtype": precision_of(model),
            "max_length": self.max_length,
            "begin": begin,
        }

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[LogLikelihood]:
        """(nats, whether it is what greedy decoding gives) of each continuation of a context.

        Raises:
            ValueError: a continuation without a token, or one that is no class of a classifier.
        """
        if not self.classes:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        asked = [request.args for request in requests]
        if unknown := sorted({choice.strip() for _, choice in asked} - self.classes.keys()):
            raise ValueError(
                f"the choice {unknown[0]!r}: the model has the classes {', '.join(self.classes)}"
            )
        places: dict[str, list[int]] = {}
        for at, (text, _) in enumerate(asked):
            places.setdefault(text, []).append(at)

        def scores() -> Iterator[dict[int, LogLikelihood]]:
            texts = [*places]
            for batch in self.scorer.stream_classes([self.tok_encode(text) for text in texts]):
                found = {}
                for number, logs in batch.items():
                    for at in places[texts[number]]:
                        chosen = self.classes[asked[at][1].strip()]
                        found[at] = (logs[chosen], int(np.argmax(logs)) == chosen)
                yield found

        return self._gather("loglikelihood", asked, scores())

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[LogLikelihood]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        texts = [text for text, *_ in requests]
        return self._gather("loglikelihood", texts, self.scorer.stream(pairs))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The nats of each whole text, in lm-eval's windows where it is longer than a row."""
        self._check_language()
        asked = [request.args for request in requests]
        pairs, owners = [], list[int]()
        for at, (text,) in enumerate(asked):
            ids = self.tok_encode(text, add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(at)
        left = np.bincount(owners, minlength=len(asked))
        totals = [0.0] * len(asked)

        def whole() -> Iterator[dict[int, float]]:
            yield {at: 0.0 for at, count in enumerate(left) if count == 0}
            for batch in self.scorer.stream(pairs):
                for window, (total, _) in batch.items():
                    totals[owners[window]] += total
                    left[owners[window]] -= 1
                ended = {owners[window] for window in batch if not left[owners[window]]}
                yield {at: totals[at] for at in sorted(ended)}

        return self._gather("loglikelihood_rolling", asked, whole())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, greedy unless its options say `do_sample`.

        Raises:
            ValueError: an option that the zoo does not have.
        """
        self._check_language()
        groups: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(at)
        asked = [(places, generation(json.loads(text))) for text, places in groups.items()]
        found: list[str] = [""] * len(requests)
        for number, (places, options) in enumerate(asked):
            options["stops"] += self._ends
            if options["temperature"]:
                options["key"] = jax.random.fold_in(self._key, number)
            part = [requests[at].args for at in places]
            prompts = [self.tok_encode(text) for text, _ in part]
            texts = self.scorer.stream_texts(prompts, **options)
            for at, text in zip(places, self._gather("generate_until", part, texts), strict=True):
                found[at] = text
        return found

    def _gather(
        self, method: str, asked: Sequence[Any], batches: Iterable[Mapping[int, Any]]
    ) -> list[Any]:
        """The results in the order of their requests; lm-eval's cache gets each as it comes."""
        found: dict[int, Any] = {}
        with tqdm(total=len(asked), desc=f"Running {method} requests") as bar:
            for batch in batches:
                for at, result in batch.items():
                    self.cache_hook.add_partial(method, asked[at], result)
                found |= batch
                bar.update(len(batch))
        return [found[at] for at in range(len(asked))]

    def _check_language(self) -> None:
        if self.classes:
            raise ValueError(
                f"{self._info['pretrained']} has a classification head: give it multiple choice "
                f"among {', '.join(self.classes)}"
            )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text, after the token that texts begin with unless that is there."""
        ids = self._read.encode(string).tolist()
        return (
            begun(self.tokenizer, ids) if self._begin and add_special_tokens is not False else ids
        )

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return end_id(self.tokenizer)

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context: the begin of text, or its end."""
        return self.scorer.prefix_id

    @property
    def max_length(self) -> int:
        """The tokens of a row at most."""
        return self.scorer.max_length

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, up to where an answer begins, or goes on.

        Answers then end at the end of a turn too.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses the conversation.
        """
        template = self._template
        added = template.tokenizer.tokenizer.get_added_tokens_decoder()
        self._ends = [added[id].content for id in template.ends_of_turn]
        text = template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the tokenizer's chat template, which lm-eval writes down.

        Raises:
            ValueError: the tokenizer has none, or one is asked for by name.
        """
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ValueError(
                f"apply_chat_template={chat_template!r}: the zoo knows the default template of a "
                "tokenizer alone; give True"
            )
        return self._template.source

    @property
    def tokenizer_name(self) -> str:
        """A hash of the tokenizer and its chat template, by which lm-eval keeps requests."""
        return checksums.of_values([self._tokenizer_text, self.chat_template(True)])

    @property
    def fingerprint(self) -> str:
        """A hash of all that answers depend on beside the request and lm-eval's own seed."""
        key = jax.random.key_data(self._key).tolist()
        answers = {**self._info, "pretrained": None, "key": key}
        return checksums.of_values([self._tokenizer_text, answers])

    @property
    def _tokenizer_text(self) -> str:
        tokenizer = getattr(self.tokenizer, "tokenizer", None)
        return "bytes" if tokenizer is None else tokenizer.to_str()

    def get_model_info(self) -> dict[str, Any]:
        """The model's name, checksum, dtype and length, for lm-eval's file of results."""
        return self._info


def generation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Scorer.stream_texts` for a task's `generation_kwargs`, read as lm-eval does.

    Raises:
        ValueError: one that the zoo does not have.
    """
    options = dict(normalize_gen_kwargs(dict(given)))
    stops = options.pop("until", None) or []
    length = options.pop("max_gen_toks")
    temperature = float(options.pop("temperature", 0.0)) * options.pop("do_sample")
    if unknown := options.keys() - {*DRAWING, *PENALTIES}:
        known = ", ".join((*NORMALIZED, *DRAWING, *PENALTIES))
        raise ValueError(f"generation_kwargs: the zoo has no {min(unknown)!r}; it has {known}")
    used = PENALTIES if temperature == 0 else (*DRAWING, *PENALTIES)
    return {
        "stops": [stop for stop in stops if stop],
        "max_new_tokens": length,
        "temperature": temperature,
        **{name: options[name] for name in used if options.get(name) is not None},
    }
