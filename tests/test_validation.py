"""zoo.validation: numbers that are not finite, in the configuration of every family and recipe."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

import recipes.finetune
import recipes.generate
import recipes.lm
import recipes.mlp
import recipes.rnn
from zoo import bert, mlp, rnn, transformer

CONFIGS = [
    recipes.lm.Config(),
    recipes.rnn.Config(),
    recipes.mlp.Config(),
    recipes.finetune.Config(),
    recipes.generate.Config(),
    bert.Config(vocab_size=8),
]


def float_fields(config: Any) -> list[tuple[Any, str]]:
    """The fields of floats, optional or in a tuple, of a configuration and of those in it."""
    found = []
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            found += float_fields(value)
        elif kind is float or float in typing.get_args(kind):
            found.append((config, name))
    return found


FIELDS = {
    f"{type(config).__module__}.{name}": (config, name)
    for each in CONFIGS
    for config, name in float_fields(each)
}


def test_there_are_fields_to_try():
    names = {"zoo.optimizers.beta1", "zoo.lora.alpha", "zoo.bert.norm_eps", "recipes.lm.balance"}
    names |= {"recipes.rnn.clip_norm", "zoo.transformer_config.rope_scaling", "zoo.text.held_out"}
    assert FIELDS.keys() >= names


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_is_not_finite_is_refused_by_name(field: str, bad: float):
    config, name = FIELDS[field]
    value = (bad,) if name == "rope_scaling" else bad
    with pytest.raises(ValueError, match=rf"\b{name}=\(?{bad}\b"):
        dataclasses.replace(config, **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize(
    "name",
    [
        "norm_eps",
        "rope_theta",
        "local_rope_theta",
        "attention_scale",
        "attention_soft_cap",
        "logit_soft_cap",
        "rope_scaling",
    ],
)
def test_numbers_that_the_maths_divides_by_are_positive(name: str, value: float):
    given = (value,) if name == "rope_scaling" else value
    with pytest.raises(ValueError, match=rf"^{name}=\(?{value}.* must be positive"):
        transformer.Config(vocab_size=8, **{name: given})
    if name == "norm_eps":
        with pytest.raises(ValueError, match=rf"^{name}={value}: must be positive"):
            bert.Config(vocab_size=8, norm_eps=value)


def test_finite_numbers_are_taken():
    assert transformer.Config(vocab_size=8, rope_scaling=(8.0, 1.0, 4.0, 8192.0), norm_eps=1e-6)
    assert rnn.Config(vocab_size=8, dropout=0.1).dropout == 0.1
    assert mlp.Config(2, 2, dropout=0.1).dropout == 0.1
    assert recipes.generate.Config(top_p=0.9).top_p == 0.9
    assert recipes.lm.Config(run_dir=Path("x")).clip_norm == 1.0
