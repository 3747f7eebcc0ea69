"""The model to learn from, and its checks before anything is computed."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from zoo.common.configuration import require
from zoo.data import text
from zoo.data.tokenizer import FILE_NAME, Tokenizer, get_tokenizer, load_tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.publishing import models
from zoo.publishing.models import check_finite
from zoo.publishing.shelf import find, nearest
from zoo.rnn.config import num_flops_per_token as rnn_flops
from zoo.rnn.model import RNN
from zoo.runs.run import Run
from zoo.tasks import language
from zoo.tasks.distillation.config import Config
from zoo.tasks.generation import have_same_tokens
from zoo.transformer.config import num_flops_per_token as transformer_flops
from zoo.transformer.model import Transformer


class Teacher:
    """The model to learn from: its folder, its skeleton, its tokenizer; nothing is loaded yet.

    Raises:
        ValueError: it is no language model, has fewer positions than a row, or too few ids.
    """

    def __init__(self, run: Run[Config]):
        config = self._config = run.config
        weights = not config.plan  # which fetches none
        self._run = run
        self.folder = find(config.teacher, weights=weights)
        self.skeleton: Any = models.skeleton(
            self.folder, quantize=config.teacher_quantize, weights=weights
        )
        try:
            decoder_of(self.skeleton).check_decoder(0)
        except ValueError as error:
            raise ValueError(
                f"teacher={config.teacher!r} is no language model, and has no next token to "
                f"learn: {error}"
            ) from error
        self._check_length()
        self.vocab_size = int(self.skeleton.config.vocab_size)
        self.tokenizer = self._load_tokenizer()
        require(
            self.tokenizer.vocab_size <= self.vocab_size,
            f"teacher={config.teacher!r} has {self.vocab_size} ids, and its tokenizer "
            f"{self.tokenizer.vocab_size}: they do not go together",
        )
        require(
            (config.top_k or 1) <= self.vocab_size,
            f"top_k={config.top_k}: teacher={config.teacher!r} has {self.vocab_size} ids; give "
            "that many at most",
        )

    def _check_length(self) -> None:
        data, limit = self._config.data, getattr(self.skeleton.config, "max_seq_len", None)
        flag, longest = "data.seq_len", data.seq_len
        if data.rows == "bucketed":
            flag, longest = "data.buckets", max(data.buckets)
        require(
            limit is None or longest <= limit,
            f"{flag}={longest}: teacher={self._config.teacher!r} has {limit} positions (its "
            f"max_seq_len); give rows of at most {limit} tokens",
        )

    def _load_tokenizer(self) -> Tokenizer:
        folder, given = nearest(self.folder, FILE_NAME), self._config.data.tokenizer
        if not (folder / FILE_NAME).is_file():
            require(
                bool(given),
                f"teacher={self._config.teacher!r} has no {FILE_NAME}: name its tokenizer by "
                "--data.tokenizer, or 'bytes'",
            )
            return get_tokenizer(given)
        own = load_tokenizer(folder)
        if given:
            self.check_tokenizer(get_tokenizer(given), f"data.tokenizer={given!r}", own)
        return own

    def check_tokenizer(
        self, tokenizer: Tokenizer, what: str, own: Tokenizer | None = None
    ) -> None:
        """Raise a ValueError for a tokenizer that gives other ids than the teacher's."""
        own = own or self.tokenizer
        require(
            have_same_tokens(own, tokenizer),
            f"{what}, of {tokenizer.vocab_size} ids, has another vocabulary than "
            f"teacher={self._config.teacher!r}, of {own.vocab_size}: both need one tokenizer, so "
            "leave --data.tokenizer out, and take text that is prepared with the teacher's, or "
            "not prepared",
        )

    def load(self) -> PyTree:
        """The teacher on the run's mesh, in its own dtypes.

        Raises:
            ValueError: a parameter that is not finite.
        """
        quantize = self._config.teacher_quantize
        model = models.load(self.folder, mesh=self._run.mesh, quantize=quantize)
        check_finite(model, self.folder)
        return model

    @property
    def checksum(self) -> str:
        """Checksum of its weights' files; of a plan, which fetches none, it is empty."""
        return "" if self._config.plan else models.weights_checksum(self.folder)

    def flops_per_token(self, seq_len: int) -> float | None:
        """FLOPs of a forward pass per token: a third of a training's; None for other families."""
        if isinstance(self.skeleton, Transformer):
            return transformer_flops(self.skeleton.config, seq_len) / 3
        return rnn_flops(self.skeleton.config) / 3 if isinstance(self.skeleton, RNN) else None


def read_text(run: Run[Config], teacher: Teacher) -> text.Text:
    """The run's text in the teacher's tokens; without files, the source code of Python's library.

    Raises:
        ValueError: text that is prepared with another tokenizer.
    """
    fields = [field.name for field in dataclasses.fields(text.Source)]
    given = {name: getattr(run.config.data, name) for name in fields}
    folder = nearest(teacher.folder, FILE_NAME)
    spec = str(folder) if (folder / FILE_NAME).is_file() else run.config.data.tokenizer
    data = language.read_text(run, source=text.Config(**given, tokenizer=spec))
    what = "the text" if data.prepared is None else f"{data.prepared.folder}"
    teacher.check_tokenizer(data.tokenizer, f"the tokenizer of {what}")
    return data
