"""A reward model: any model under a head of one output, which gives answers a score.

It learns from pairs, whose chosen answer is to have the higher score (Bradley and Terry 1952;
Ouyang et al. 2022). The score is read at the token that ends an answer, so that it is of the whole.

Legend of suffixes: B batch, T time, E embed, S sides (chosen, rejected).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from zoo.alignment.pair_losses import Metrics, is_pair
from zoo.common.configuration import require
from zoo.data import text
from zoo.data.chats import ChatTemplate, Part
from zoo.data.rows import encode_parts
from zoo.data.tokenizer import begun, end_id, load_tokenizer
from zoo.publishing import models
from zoo.publishing.shelf import find
from zoo.runs import loop
from zoo.runs.run import Run
from zoo.tasks import finetuning, language
from zoo.tasks.finetuning.training import from_base, merge, prepare, say_before_and_after
from zoo.training import losses
from zoo.wrappers.classifier import Classifier

_MORE = 16  # places of a row for the tokens that end its two examples; a multiple, for kernels


@losses.OF_TOKENS
def bradley_terry(
    model: PyTree, batch: dict[str, Array], key: Array | None
) -> tuple[Array, Array, Metrics]:
    """The loss of a reward model on pairs, -log σ(score(chosen) - score(rejected)).

    It is as `make_train_step` takes it, for a `Classifier` of one class and the batches of a
    `PairDataset`. The metrics are means over pairs: `accuracy`, the share whose chosen answer has
    the higher score, `margin`, the difference, and `score`, of both answers.

    Raises:
        ValueError: another model, or a batch without pairs.
    """
    losses.check_names(batch, "tokens", "targets", "segment_ids")
    require(
        isinstance(model, Classifier) and model.num_classes == 1,
        "a reward model is a zoo.Classifier(model, 1, pooling='last', key=key)",
    )
    scores_BS, is_pair_B = _scores(model, batch, key), is_pair(batch)
    margins_B = scores_BS[:, 0] - scores_BS[:, 1]
    summed = lambda x_B: jnp.where(is_pair_B, x_B, 0.0).sum()  # noqa: E731
    metrics = {
        "accuracy": summed((margins_B > 0).astype(jnp.float32)),
        "margin": summed(margins_B),
        "score": summed(scores_BS.mean(1)),
    }
    return summed(-jax.nn.log_sigmoid(margins_B)), summed(jnp.ones_like(margins_B)), metrics


def _scores(
    model: Classifier, batch: dict[str, Array], key: Array | None
) -> Float[Array, "batch 2"]:
    """The scores of both answers of each pair.

    The token that ends an example is among its targets alone. Here each of the two segments of a
    row, of lengths a and b, has one more token: the ends are at a and a + 1 + b.
    """
    segments_BT, width = batch["segment_ids"], batch["tokens"].shape[1]
    a_B1, b_B1 = ((segments_BT == side).sum(1, keepdims=True) for side in (1, 2))
    ends_BS = jnp.concatenate([a_B1, a_B1 + 1 + b_B1], 1)
    place_1T = jnp.arange(width + _MORE, dtype=jnp.int32)[None]
    second_BT = (place_1T > a_B1).astype(jnp.int32)
    is_end_BT = (place_1T == ends_BS[:, :1]) | (place_1T == ends_BS[:, 1:])
    source_BT = place_1T - second_BT
    index_BT = jnp.where(is_end_BT, width + source_BT - 1, jnp.minimum(source_BT, width - 1))
    both_BT = jnp.concatenate([batch["tokens"], batch["targets"]], 1)
    is_there_BT = (place_1T <= ends_BS[:, 1:]) & is_pair(batch)[:, None]
    x_BTE = model.body.hidden(
        jnp.take_along_axis(both_BT, index_BT, 1),
        segment_ids=jnp.where(is_there_BT, 1 + second_BT, 0),
        positions=place_1T - second_BT * (a_B1 + 1),
        key=key,
    )
    ends_BSE = jnp.take_along_axis(x_BTE, ends_BS[:, :, None], 1)
    return model.logits(ends_BSE.reshape(-1, x_BTE.shape[-1])).reshape(-1, 2)


def train(run: Run[Any], base: finetuning.Base, data: text.Text) -> None:
    """Train a reward model on pairs; save it; show its held-out accuracy before and after."""
    make_model = lambda key, model: prepare(run.config, model, key, 1)  # noqa: E731
    plain = language.training(run, run.config.optimizer, data, make_model)
    described = dataclasses.replace(plain, loss_fn=bradley_terry, evaluate=data.held_out)

    def save(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
        whole = base.as_stored(merge(run, model))
        models.save(folder, whole, tokenizer=base.tokenizer, metrics=metrics)

    trained = loop.fit(run, from_base(described, run.config, base), save=save)
    after = trained.model_metrics
    save(run.folder / "model", trained.model, {**after, "steps": int(trained.state.step)})
    run.say(f"the reward model is in {run.address}/model")
    say_before_and_after(run, after)


class Scorer:
    """The scores that the reward model of a folder gives answers: a function for `--reward`.

    With `chat`, prompts are messages that the tokenizer's template has written out.
    """

    def __init__(self, folder: str, *, chat: bool = False):
        self._model = models.load(folder)
        self._tokenizer, self._is_chat = load_tokenizer(find(folder)), chat
        ends = ChatTemplate(self._tokenizer).ends_of_turn if chat else ()
        self._end = next(iter(ends), end_id(self._tokenizer))
        self._score = eqx.filter_jit(lambda model, ids, mask: model(ids, mask=mask)[0, 0])

    def __call__(self, prompt: str, answer: str, row: Mapping[str, Any]) -> float:
        """The score of an answer, with the token that ends it."""
        parts: list[Part] = [(prompt, False), (answer, True)]
        ids, _ = encode_parts(self._tokenizer, parts, is_chat=self._is_chat)
        whole = begun(self._tokenizer, ids.tolist())
        whole += [self._end] * (whole[-1] != self._end)
        limit = getattr(self._model.config, "max_seq_len", np.inf)
        size = min(-(-len(whole) // 64) * 64, max(limit, len(whole)))  # few programs
        mask = np.arange(size) < len(whole)
        padded = np.zeros(mask.shape, np.int32)
        padded[: len(whole)] = whole
        return float(self._score(self._model, padded[None], mask[None]))
