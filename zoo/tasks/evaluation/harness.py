"""The zoo's models in EleutherAI's lm-eval, whose tasks then run on them without PyTorch.

from zoo.tasks.evaluation.harness import ZooLM

lm_eval.simple_evaluate(model=ZooLM("lm-python"), tasks=["lambada_openai"])
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo import sharding
from zoo.base import configuration
from zoo.data.chats import ChatTemplate
from zoo.data.special_tokens import begun
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer, reading
from zoo.nn.precision import DTypeName
from zoo.publishing import models
from zoo.publishing.adapters import nearest
from zoo.publishing.shelf import find
from zoo.tasks.evaluation.encoding import encode_pair
from zoo.tasks.evaluation.scorer import Scorer, precision_of

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError("lm-eval's tasks need an extra: pip install 'zoo[lm-eval]'") from error
with contextlib.suppress(ImportError):  # older releases import PyTorch there
    # First, as lm-eval registers its own models only where there is none yet.
    import lm_eval.models  # noqa: F401

MAX_NEW_TOKENS = 256  # of a task that does not say, as in lm-eval
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DRAWING = ("top_k", "top_p", "min_p")  # without effect on greedy answers
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
logger = logging.getLogger(__name__)


@register_model("zoo")
class ZooLM(LM):
    """A language model of the zoo, as lm-eval asks it.

    `pretrained` is a name on the shelf, a folder, an address or a hub id; or a model, with its
    `tokenizer`. `mesh`, `max_length` and `batch_tokens` are those of
    `zoo.tasks.evaluation.scorer.Scorer`; a mesh may be a text, as on the command line. `dtype` is
    "bf16", "fp16" or "fp32", by default as stored. `begin` puts the token that the tokenizer's
    texts begin with before each prompt, unless it is there. `seed` is that of sampled answers.

    The name of a special token in a text is that token, as for lm-eval's own models: chat templates
    write them so. lm-eval's `batch_size`, `max_batch_size` and `device` have no part in it. Each of
    several processes asks all of a task, and the mesh shares out the work.

    Raises:
        ValueError: a model without a next token; a model without its tokenizer.
    """

    def __init__(
        self,
        pretrained: str | Path | PyTree,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        begin: bool = True,
        seed: int = 0,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ):
        super().__init__()
        configuration.check_value("dtype", dtype, DTypeName | None)
        if isinstance(mesh, str):
            mesh = sharding.make_mesh(mesh) if mesh else None
        self._info: dict[str, Any] = {}
        model = pretrained
        if isinstance(pretrained, str | Path):
            folder = find(pretrained)
            tokenizer = tokenizer or load_tokenizer(nearest(folder, FILE_NAME))
            model = models.load(folder, mesh=mesh, dtype=dtype)
            weights = models.weights_checksum(folder)
            self._info = {"pretrained": str(pretrained), "weights": weights}
        elif tokenizer is None:
            raise ValueError("tokenizer: give that of the model, which is no name of one")
        elif dtype is not None:
            raise ValueError(f"dtype={dtype!r}: a model that is given stays as it is; leave it out")
        self.tokenizer, self._named, self._begin = tokenizer, reading(tokenizer, "parse"), begin
        self.scorer = Scorer(
            model, tokenizer, mesh=mesh, max_length=max_length, batch_tokens=batch_tokens
        )
        self._info |= {"dtype": precision_of(model), "max_length": self.scorer.max_length}
        self._key = jax.random.key(seed)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(nats, whether it is what greedy decoding gives) of each continuation of a context."""
        pairs = [self._pair(*request.args) for request in requests]
        batches = self.scorer.stream(pairs)
        scores = ({at: (x.total, x.greedy) for at, x in batch.items()} for batch in batches)
        return self._gather("loglikelihood", requests, scores)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The nats of each whole text, in windows where it is longer than a row."""
        texts = [self._ids(text) for (text,) in (request.args for request in requests)]
        scores = [score.total for score in self.scorer.rolling(texts)]
        return self._gather("loglikelihood_rolling", requests, [dict(enumerate(scores))])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each context, greedy unless its options say `do_sample`.

        Raises:
            ValueError: an option that the zoo does not have.
        """
        groups: dict[str, list[int]] = {}
        for at, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(at)
        asked = [(places, generation(json.loads(text))) for text, places in groups.items()]
        found: list[str] = [""] * len(requests)
        for number, (places, options) in enumerate(asked):
            if options["temperature"]:
                options["key"] = jax.random.fold_in(self._key, number)
            texts = self.scorer.stream_texts(
                [self._prompt(requests[at].args[0]) for at in places], **options
            )
            part = [requests[at] for at in places]
            for at, text in zip(places, self._gather("generate_until", part, texts), strict=True):
                found[at] = text
        return found

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, up to where an answer begins, or goes on.

        Raises:
            ValueError: the tokenizer has no chat template, or it refuses the conversation.
        """
        template = ChatTemplate(self.tokenizer)
        text = template(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]

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
        return ChatTemplate(self.tokenizer).source

    @property
    def tokenizer_name(self) -> str:
        """A hash of the tokenizer and its chat template, by which lm-eval keeps requests."""
        tokenizer = getattr(self.tokenizer, "tokenizer", None)
        text = "bytes" if tokenizer is None else tokenizer.to_str()
        return hashlib.sha256(f"{text}{self.chat_template(True)}".encode()).hexdigest()[:16]

    def get_model_info(self) -> dict[str, Any]:
        """The model's name, checksum, dtype and length, for lm-eval's file of results."""
        return self._info

    def _ids(self, text: str) -> list[int]:
        return self._named.encode_batch([text])[0].tolist()

    def _prompt(self, text: str) -> list[int]:
        return self._begun(self._ids(text))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, rest = encode_pair(self._named, context, continuation, begin=False)
        return self._begun(before), rest

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids after the token that texts begin with, which a chat template may have written."""
        return begun(self.tokenizer, ids) if self._begin else ids

    def _gather(
        self, method: str, requests: Sequence[Any], batches: Iterable[Mapping[int, Any]]
    ) -> list[Any]:
        """The results in the order of their requests; lm-eval's cache gets each as it comes."""
        found: dict[int, Any] = {}
        for batch in batches:
            for at, result in batch.items():
                self.cache_hook.add_partial(method, requests[at].args, result)
            found |= batch
        return [found[at] for at in range(len(requests))]


def generation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Scorer.generate` for the `generation_kwargs` of a task, read as lm-eval does.

    Raises:
        ValueError: one that the zoo does not have.
    """
    options = dict(given)
    stops = options.pop("until", None) or []
    lengths = [options.pop(name, None) for name in LENGTHS]
    length = next((x for x in lengths if x is not None), MAX_NEW_TOKENS)
    temperature = float(options.pop("temperature", 0.0))
    sampled = options.pop("do_sample", temperature > 0)
    if sampled and not temperature:
        logger.warning("do_sample without a temperature above 0: answers are greedy")
    if unknown := options.keys() - {*DRAWING, *PENALTIES}:
        known = ", ".join(("until", "do_sample", "temperature", *LENGTHS, *DRAWING, *PENALTIES))
        raise ValueError(f"generation_kwargs: the zoo has no {min(unknown)!r}; it has {known}")
    temperature = temperature if sampled else 0.0
    used = PENALTIES if temperature == 0 else (*DRAWING, *PENALTIES)
    return {
        "stops": [stops] if isinstance(stops, str) else list(stops),
        "max_new_tokens": int(length),
        "temperature": temperature,
        **{name: options[name] for name in used if options.get(name) is not None},
    }
