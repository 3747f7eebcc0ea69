"""Masked language models: encoders that fill in hidden tokens, trained from scratch on text."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo.common.configuration import require
from zoo.data import masking, text
from zoo.data.masking import MaskedDataset
from zoo.data.prepared.opening import is_mixture
from zoo.data.tokenizer import FILE_NAME, BPETokenizer, load_tokenizer
from zoo.publishing.models import save as save_model
from zoo.publishing.shelf import find, nearest
from zoo.runs import evaluation, loop
from zoo.runs.run import Run
from zoo.sharding.placement import gathered
from zoo.tasks import language
from zoo.training import losses, optimizers
from zoo.training.description import Training

Likeliest = list[tuple[str, float]]
FILLINGS = "fillings.txt"  # of the run folder
SHOWN = 96  # tokens of the text that is shown with its fillings


@dataclasses.dataclass(frozen=True)
class Masked:
    """A text whose tokenizer has a mask, and both of its parts with hidden tokens."""

    text: text.Text
    train: MaskedDataset
    held_out: MaskedDataset


def read_text(run: Run[language.Config], mask: masking.Config) -> Masked:
    """The run's text, as `language.read_text` reads it, with hidden tokens in each batch.

    Raises:
        ValueError: a mixture of sources, or a tokenizer that has and takes no mask.
    """
    config = run.config
    mixed = is_mixture(config.data.files)
    require(not mixed, f"data.files={config.data.files!r}: a mixture has no masked objective")
    data = language.read_text(run)
    tokenizer, mask_id = masking.with_mask(data.tokenizer)
    data = dataclasses.replace(data, tokenizer=tokenizer)
    hide = lambda part: MaskedDataset(part, mask, tokenizer, mask_id, config.seed)  # noqa: E731
    return Masked(data, hide(data.train), hide(data.held_out))


def training(
    run: Run[language.Config],
    optimizer: optimizers.Config,
    data: Masked,
    make_model: Callable[..., PyTree],
) -> Training:
    """The training of an encoder on hidden tokens; its `eval_loss` is in nats per hidden token.

    The tokens of the held-out part that are hidden never change.
    """
    mean_loss = evaluation.evaluator(run, losses.next_token, data.held_out)

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        loss = mean_loss(model, whole)["loss"]
        return {"eval_loss": loss, "perplexity": float(np.exp(loss))}

    # The loss of the next token is over the positions of weight 1, whose targets are the tokens.
    of_text = language.training(run, optimizer, data.text, make_model)
    return dataclasses.replace(of_text, data=data.train, fingerprint="", evaluate=evaluate)


def train(run: Run[language.Config], data: Masked, training: Training) -> dict[str, Any]:
    """Train an encoder, save it, and show a held-out text with its fillings. Returns metrics."""

    def save(folder: Any, model: PyTree, metrics: dict[str, Any]) -> None:
        save_model(folder, model, tokenizer=data.text.tokenizer, metrics=metrics)

    trained = loop.fit(run, training, save=save)
    model, result = trained.model, trained.model_metrics
    save(run.folder / "model", model, {**result, "steps": int(trained.state.step)})
    run.say(f"held out: {result['eval_loss']:.3f} nats per hidden token")
    shown = fillings(model, data)
    if run.is_main:
        (run.folder / FILLINGS).write_text(shown, encoding="utf-8")
    run.say(f"the model is in {run.address}/model; a text with [what it filled in] is in")
    run.say(f"{FILLINGS} beside it:\n\n{shown}")
    return result


def fillings(model: PyTree, data: Masked) -> str:
    """The beginning of held-out text with a model's likeliest tokens in the places of hidden ones.

    A right one is [filled in], a wrong one [filled in|hidden]. All processes call it.
    """
    batch = data.held_out.batch(0)
    row = int(batch["weights"].sum(1).argmax())  # others may be padding
    names = ("tokens", "segment_ids", "positions")
    forward = eqx.filter_jit(lambda model, tokens, **ids: model(tokens, **ids).argmax(-1))
    tokens, segments, positions = (jnp.asarray(batch[name]) for name in names)
    likeliest = forward(model, tokens, segment_ids=segments, positions=positions)
    found = gathered(likeliest, (row, slice(0, SHOWN)))
    decode, words = data.text.tokenizer.decode, list[str]()
    hidden, counts = batch["targets"][row].tolist(), batch["weights"][row].tolist()
    for given, wanted, weight in zip(found.tolist(), hidden, counts, strict=False):
        text, right = decode([wanted]), given == wanted
        filled = text if right else f"{decode([given])}|{text}"
        words.append(f"[{filled}]" if weight else text)
    return "".join(words)


def tokenizer_of(name: str) -> BPETokenizer:
    """The tokenizer of a model that `zoo.load` takes, with a mask, its own or a new one."""
    return masking.with_mask(load_tokenizer(nearest(find(name), FILE_NAME)))[0]


def fill(model: PyTree, tokenizer: BPETokenizer, text: str, top: int = 5) -> list[Likeliest]:
    """For each mask in a text, the likeliest tokens and their probabilities, the likeliest first.

    The mask is written as the tokenizer has it, such as [MASK] or <mask>.

    Raises:
        ValueError: a text without a mask.
    """
    name = tokenizer.tokens["mask_token"]
    ids = np.asarray(tokenizer.tokenizer.encode(text).ids, np.int32)
    (places,) = np.nonzero(ids == tokenizer.tokenizer.token_to_id(name))
    require(len(places) > 0, f"text={text!r}: has no {name}; write it where a token is missing")
    logits = eqx.filter_jit(lambda model, tokens: model(tokens))(model, jnp.asarray(ids)[None])
    found = []
    for probabilities in np.asarray(jax.nn.softmax(logits[0, places])):
        order = np.argsort(-probabilities, kind="stable")[:top].tolist()
        found.append([(tokenizer.decode([id]), float(probabilities[id])) for id in order])
    return found
