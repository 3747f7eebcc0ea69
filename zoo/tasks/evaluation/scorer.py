"""Log-likelihoods and continuations of token ids by a model, in batches of a few shapes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo.data.tokenizer import Tokenizer

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, and of what continues it


class LogLikelihood(NamedTuple):
    """The log-probability of a continuation, summed over its tokens, in nats.

    `greedy` says whether each of its tokens is the likeliest one in its place.
    """

    total: float
    num_tokens: int
    greedy: bool


class Scorer:
    """A language model of any family that scores and continues token ids.

    Rows are padded to buckets of lengths, each compiled once, and lie over `mesh`, which is the
    model's own; a batch has about `batch_tokens` tokens. A row has `max_length` tokens at most,
    which are the model's positions if not given, or 2048 of a model without a limit. Results depend
    neither on the batch nor on the mesh, and every process gets all of them. The model computes in
    the dtype of its parameters.

    Raises:
        ValueError: a model without a next token, or a `max_length` beyond its positions.
    """

    def __init__(
        self,
        model: PyTree,
        tokenizer: Tokenizer,
        *,
        mesh: Mesh | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
    ):
        raise NotImplementedError

    @property
    def prefix_id(self) -> int:
        """The id that stands before a text without a context: the begin of text, or its end."""
        raise NotImplementedError

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        """The log-likelihood of each continuation after its context.

        An empty context stands for `prefix_id`. A row that is too long loses the beginning of its
        context, which is said once.

        Raises:
            ValueError: an empty continuation, one that is longer than a row, or an id that the
                model does not have.
        """
        raise NotImplementedError

    def rolling(self, texts: Sequence[Sequence[int]]) -> list[LogLikelihood]:
        """The log-likelihood of each whole text, the first token after `prefix_id`.

        A text longer than a row is cut into windows, those of lm-eval: each token is scored once,
        and the last window reaches back as far as it can.
        """
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stops: Sequence[str] = (),
        max_new_tokens: int,
        **sampling: Any,
    ) -> list[str]:
        """The continuation of each prompt as text, up to the model's own end or one of `stops`.

        Neither is part of it. `sampling` are options of `zoo.generate`; greedy without any. A
        prompt that leaves no room for `max_new_tokens` loses its beginning, which is said once.
        """
        raise NotImplementedError


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, *, begin: bool = True
) -> tuple[list[int], list[int]]:
    """The ids of a context and of its continuation, tokenised together as lm-eval does.

    Blanks at the end of the context move to the continuation; the whole is encoded, and split at
    the length of the context alone. With `begin`, the token that the tokenizer's texts begin with
    comes first, as it does in training. An empty context has no ids (the scorer's `prefix_id`).
    """
    raise NotImplementedError
