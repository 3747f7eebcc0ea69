"""Heads for classes: a `zoo.Classifier` as the `…ForSequenceClassification` of transformers.

A `zoo.TokenClassifier` is its `…ForTokenClassification`.
"""

# ruff: noqa: D102 (`Family` documents the methods)

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from zoo.common import configuration
from zoo.hf.family import HEADLESS, Family, Head
from zoo.hf.layouts import table
from zoo.publishing import PublishError, families
from zoo.publishing.formats import CONFIG, METRICS, json_object
from zoo.transformer import Transformer
from zoo.wrappers.classifier import Classifier

SEQUENCES, TOKENS = "ForSequenceClassification", "ForTokenClassification"


def head_at(pooling: str, module: str, *, pooler: str = "", bias: bool = True) -> Head:
    """A head by the module of its matrix, and of its pooler where that is not the model's."""
    places = f"head.weight {module}.* classes embed\n"
    places += f"pooler.weight {pooler}.*" * bool(pooler)
    return Head(pooling, bias, table(places, layer=""))


OF_DECODERS = {SEQUENCES: head_at("last", "score", bias=False), TOKENS: head_at("none", "score")}


@dataclass(frozen=True)
class UnderHead(Family):
    """A family under one of its heads; a `config` is that of the model without it."""

    head: Head = head_at("none", "classifier")
    end: str = ""
    """The end of the class's name in transformers."""
    num_classes: int = 0

    def skeleton(self, config: Any) -> PyTree:
        pooling, bias = self.head.pooling, self.head.bias
        around = {"num_classes": self.num_classes, "pooling": pooling, "head_bias": bias}
        return families.skeleton(self.model, config, around)

    def read(
        self,
        values: Mapping[str, Any],
        where: str,
        allowed: Collection[str] | None = (),
        names: Collection[str] | None = None,
    ) -> Any:
        bare = {**values, "architectures": [self.without_head]}
        return self.canonical(headless(super().read(bare, where, allowed, names), self.head))

    def prefix(self, config: Any) -> str:
        return self.prefixes[0]

    def write(self, config: Any) -> dict[str, Any]:
        name = self.architecture.partition("For")[0] + self.end
        return super().write(config) | {"architectures": [name], **labels(self.num_classes)}


def headless(config: Any, under: Head | Classifier) -> Any:
    """The configuration of a model under a head, which has no other, and a pooler if it is used."""
    pooler = under.pooling == "pooler"
    return configuration.replaced(config, {**HEADLESS, "encoder.pooler": pooler})


def under(family: Family, end: str, num_classes: int) -> UnderHead:
    """A family under its head of that name."""
    head, fields = family.heads[end], dict(vars(family))
    fields["tensors"] = {**family.tensors, **head.tensors}
    if head.pooling == "none":  # older versions wrote one
        poolers = (f"{prefix}pooler." for prefix in family.prefixes)
        fields["left_out"] = {**family.left_out, **dict.fromkeys(poolers, "an unused pooler")}
    return UnderHead(**fields, head=head, end=end, num_classes=num_classes)


def read(
    family: Family, values: Mapping[str, Any], where: str, allowed: Collection[str] | None
) -> Family:
    """The family under the head that a `config.json` names; itself if it names none.

    Raises:
        PublishError: a head that is not read, or a loss that is not that of classes.
    """
    names = values.get("architectures") or ()
    found = next(((x, end) for x in names for end in (SEQUENCES, TOKENS) if x.endswith(end)), None)
    if found is None:
        return family
    name, end = found
    if end not in family.heads:
        raise PublishError(
            f"{where}: architectures has {name!r}, whose head is not read: save the model under "
            "it, by transformers, AutoModel.from_pretrained(...).save_pretrained(folder), and put "
            "a new head on it (zoo.Classifier, recipes.finetune --label)"
        )
    problem = values.get("problem_type")
    is_allowed = allowed is None or "problem_type" in allowed
    if problem not in (None, "single_label_classification") and not is_allowed:
        raise PublishError(
            f"{where}: problem_type={problem!r}: the outputs are no logits of classes that exclude "
            "each other; to have them as they are, zoo.load(..., ignore=('problem_type',))"
        )
    return under(family, end, num_labels(values, where))


def of(model: PyTree, find: Callable[[PyTree], Family]) -> tuple[PyTree, Family]:
    """A model and its family, under its head if it has one; `find` gives that of the rest.

    Raises:
        PublishError: the family has no such head.
    """
    if not isinstance(model, Classifier):
        return model, find(model)
    bare: Any = model.body
    if isinstance(bare, Transformer):
        bare = families.with_config(bare, headless(bare.config, model))
    family, bias = find(bare), model.head.bias is not None
    model = eqx.tree_at(lambda model: model.body, model, bare)
    for end, head in family.heads.items():
        if (head.pooling, head.bias) == (model.pooling, bias):
            return model, under(family, end, model.num_classes)
    have = [f"pooling={x.pooling!r} and bias={x.bias}" for x in family.heads.values()]
    raise PublishError(
        f"transformers has no {family.model_type} with a head of pooling={model.pooling!r} and "
        f"bias={bias}, but {', or '.join(have) or 'none for classes'}: train one of these, or save "
        "it in the zoo's own format"
    )


def num_labels(values: Mapping[str, Any], where: str) -> int:
    """The number of classes by a `config.json`; two if it does not say."""
    labels = values.get("id2label") or {}
    named = len(labels) if isinstance(labels, dict) else -1
    count = values.get("num_labels", named or 2)
    if not isinstance(count, int) or count < 1 or named not in (0, count):
        raise PublishError(
            f"{where}: num_labels={count!r} and id2label={labels!r:.200} contradict each other, or "
            "are no number and no names of classes; remove the one that is wrong"
        )
    return count


def labels(names: int | Sequence[str]) -> dict[str, Any]:
    """The fields for the classes' names, or for so many classes without names."""
    names = [f"LABEL_{i}" for i in range(names)] if isinstance(names, int) else names
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def named(values: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """A `config.json`, with the names of the classes in a folder of any format, if it has some."""
    if folder is None or "id2label" not in values:
        return values
    theirs: dict[str, Any] = json_object(folder / CONFIG).get("id2label") or {}
    numbers = map(str, range(len(theirs)))  # a file may be sorted as text
    names: Any = json_object(folder / METRICS).get("classes") or [*map(theirs.get, numbers)]
    is_whole = len(names) == len(values["id2label"]) and None not in names
    return {**values, **(labels(names) if is_whole else {})}
