"""zoo.common.configuration: values of the types that fields are annotated with."""

import copy
import dataclasses
import inspect
import json
import math
import typing
from typing import Any, Literal

import jax
import numpy as np
import pytest
from helpers import drawn_transformer

import recipes.finetune
import recipes.generate
import recipes.lm
import recipes.mlp
import recipes.rnn
from zoo import Sampling, lora, mlp, rnn, tabular, text, transformer
from zoo.alignment import distillation
from zoo.common import configuration
from zoo.tasks import finetuning
from zoo.wrappers.classifier import Classifier

# A small configuration of each family, and values that none of its fields can have.
CONFIGS = {
    "transformer": transformer.Config(vocab_size=8, d_model=16, num_layers=1, num_heads=2),
    "rnn": rnn.Config(vocab_size=8, hidden_size=4),
    "mlp": mlp.Config(in_size=2, out_size=2),
}
OTHERS: dict[str, Any] = {
    "attention": transformer.AttentionConfig(),
    "positions": transformer.PositionsConfig(),
    "residual": transformer.ResidualConfig(),
    "encoder": transformer.EncoderConfig(),
    "lora": lora.Config(),
    "sampling": Sampling(),
}
NO_VALUES = ([], {}, "foo", math.nan, -math.inf, 2**32, b"rms", ("rms",), object())


def changed(config: Any, **changes: Any) -> Any:
    """The configuration with other values, past the tests' own checks of what is constructed."""
    config = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_wrong_type_are_refused(name: str):
    config = CONFIGS[name]
    assert len(dataclasses.fields(config)) > 5
    for field in dataclasses.fields(config):
        for value in NO_VALUES:
            kind = configuration.annotations(type(config))[field.name]
            if (kind in (float, float | None) and value == 2**32) or (
                kind is str and value == "foo"
            ):
                continue
            with pytest.raises(ValueError, match=f"^{field.name}="):
                changed(config, **{field.name: value})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("residual", {"norm": "foo"}, r"residual.norm='foo': .* \['rms', 'lay"),
        ("transformer", {"causal": "false"}, "causal='false':"),
        ("transformer", {"num_layers": True}, "num_layers=True:"),
        ("transformer", {"d_ff": "4"}, "d_ff='4':"),
        ("positions", {"scaling": (1.0,)}, r"positions.scaling=.* RopeScaling"),
        ("lora", {"targets": ("a", None)}, "must be a tuple, of a text each"),
        ("attention", {"window_pattern": ("far",)}, "must be a tuple, of 'local' or 'global'"),
        ("sampling", {"temperature": "warm"}, "temperature='warm':"),
        ("sampling", {"stop_tokens": [1.5]}, r"stop_tokens=\(1.5,\): .* tuple"),
        ("sampling", {"logit_bias": {1: "a"}}, r"logit_bias\[1\]='a': .* number"),
        ("encoder", {"num_token_types": -1}, "encoder.num_token_types=-1: must be 0 at least"),
    ],
    ids=str,
)
def test_errors_name_field_value_and_choices(config: str, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        changed({**CONFIGS, **OTHERS}[config], **changes)


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match=r"pooling='max': .*'last', 'first'"):
        # Past the tests' own check of arguments.
        inspect.unwrap(Classifier.__init__)(
            object(), drawn_transformer(), 3, pooling="max", key=jax.random.key(0)
        )


@dataclasses.dataclass(frozen=True)
class Small:
    size: int
    rates: tuple[float, ...] = ()
    scale: float | None = None
    kind: Literal["a", "b"] | None = None


def test_numpy_and_integer_values_are_accepted():
    configuration.check(Small(np.int64(8), (1, np.float32(2)), np.float64(3)))
    for value in (np.float32(math.nan), math.inf, 10**400):
        with pytest.raises(ValueError, match=r"scale=.*: .* finite .* None"):
            configuration.check(Small(8, (), value))


def test_values_are_read_from_json():
    text = json.dumps({"size": 3, "rates": [1, 0.5], "scale": 2, "kind": "b"})
    config = configuration.from_json(Small, json.loads(text))
    assert config == Small(3, (1.0, 0.5), 2.0, "b")
    assert isinstance(config.scale, float)
    assert configuration.from_json(Small, {"size": 3}) == Small(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"field size .* missing"),
        ({"size": 1, "width": 2}, r"width \(known are size, rates, scale, kind\)"),
        ({"size": None}, "size=None:"),
        ({"size": 1, "kind": "c"}, r"kind='c': .*'a' or 'b'"),
        ({"size": 1, "rates": [[1.0]]}, r"rates=\(\[1.0\],\): .* tuple"),
    ],
    ids=str,
)
def test_invalid_json_values_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        configuration.from_json(Small, values)


# Configurations in configurations


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.0
    places: int = configuration.may_differ(1)

    def __post_init__(self) -> None:
        configuration.check(self, "inner.")


@dataclasses.dataclass(frozen=True)
class Outer:
    size: int
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"size": 1, "inner": {}}, Outer(1)),
        ({"size": 1, "inner": {"rate": 1}}, Outer(1, Inner(1.0))),
        ({"size": 1, "inner": {"rate": 1, "places": 2}}, Outer(1, Inner(1.0, 2))),
    ],
    ids=str,
)
def test_nested_fields_are_read(values: dict[str, Any], expected: Outer):
    given = copy.deepcopy(values)
    assert configuration.from_json(Outer, values) == expected
    assert values == given


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"speed": 1}, "size": 1}, r"inner.speed \(known are rate, places"),
        ({"size": 1, "inner": {"places": "a"}}, r"inner.places='a':"),
        ({"size": 1, "inner": "half"}, "inner='half':"),
        ({"inner": {}}, r"field size .* missing"),
    ],
    ids=str,
)
def test_nested_errors_name_the_path(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        configuration.from_json(Outer, values)


def test_dotted_names():
    config = Outer(1, Inner(0.5, 2))
    assert configuration.flat(config) == {"size": 1, "inner.rate": 0.5, "inner.places": 2}
    assert configuration.replaced(config, {"inner.rate": 0.25}) == Outer(1, Inner(0.25, 2))
    assert configuration.replaced(config, {"inner": {"places": 3}}) == Outer(1, Inner(0.5, 3))
    assert configuration.replaced(config, {"inner": Inner(), "size": 4}) == Outer(4)
    assert configuration.changed(config, {"inner.places": 3}) == Outer(1, Inner(0.5, 3))
    assert configuration.names_that_may_differ(config) == {"inner.places"}
    for changes in ({"inner.rate": 1.0}, {"inner": {"rate": 1.0}}):
        with pytest.raises(ValueError, match=r"inner.rate=1.0: inner.places"):
            configuration.changed(config, changes)
    with pytest.raises(ValueError, match="no field places"):
        configuration.replaced(config, {"places": 1})


@pytest.mark.parametrize("part", ["attention", "positions", "experts", "residual"])
def test_nested_parts_of_a_transformer_name_their_fields(part: str):
    config = getattr(CONFIGS["transformer"], part)
    for field in dataclasses.fields(config):
        with pytest.raises(ValueError, match=rf"^{part}\.{field.name}="):
            changed(config, **{field.name: object()})


def test_deeply_nested_values_are_refused():
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match=r"^size=\(\[\["):
        configuration.from_json(Small, {"size": value})
    with pytest.raises(ValueError, match="rank"):
        configuration.from_json(lora.Config, {"rank": value})


# Numbers that are not finite, in the configuration of every family and recipe


RECIPES = [
    recipes.lm.Config(),
    recipes.rnn.Config(),
    recipes.mlp.Config(),
    recipes.finetune.Config(),
    recipes.generate.Config(),
]


def float_fields(config: Any) -> list[tuple[Any, str]]:
    """The fields of floats, optional ones too, of a configuration and of those in it."""
    found = []
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            found += float_fields(value)
        elif kind in (float, float | None):
            found.append((config, name))
    return found


FIELDS = {
    f"{type(config).__module__}.{name}": (config, name)
    for each in RECIPES
    for config, name in float_fields(each)
}


def test_non_finite_numbers_are_refused():
    assert {"zoo.training.optimizers.beta1", "recipes.lm.balance"} < FIELDS.keys()
    for config, name in FIELDS.values():
        for bad in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=rf"\b{name}={bad}\b"):
                dataclasses.replace(config, **{name: bad})


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize(
    "name",
    [
        "residual.norm_eps",
        "positions.theta",
        "positions.local_theta",
        "attention.scale",
        "attention.soft_cap",
        "logit_soft_cap",
    ],
)
def test_model_constants_must_be_positive(name: str, value: float):
    with pytest.raises(ValueError, match=rf"^{name}={value}: must be positive"):
        configuration.replaced(transformer.Config(vocab_size=8), {name: value})


@pytest.mark.parametrize("token", [-1, 8])
@pytest.mark.parametrize("config", [transformer.Config, rnn.Config])
def test_ids_out_of_the_vocabulary_are_refused(config: Any, token: int):
    assert config(vocab_size=8, eos_ids=(0, 7)).eos_ids == (0, 7)
    with pytest.raises(ValueError, match=rf"^eos_ids has the id {token}: .*vocab_size=8"):
        config(vocab_size=8, eos_ids=(1, token))


# --- What may differ between two starts of a run ------------------------------------------------

OF_A_RUN = """run_dir steps mesh on_nonfinite log_every eval_every eval_batches
    final_eval_batches checkpoint_every keep_checkpoints work_dir epochs
    sequence_parallel xla distributed plan track norms_every profile
    compilation_cache patience keep_best"""
OF_TEXT = "sample_tokens sample_every data.files data.cache data.special_tokens"
MAY_DIFFER = {
    recipes.lm: f"""{OF_A_RUN} {OF_TEXT} model.attention.kernel model.remat
        model.scan_layers model.experts.dispatch model.experts.buffer model.eos_ids model.origin
        model.mixer.recurrence.chunk""",
    recipes.rnn: f"""{OF_A_RUN} {OF_TEXT} model.remat model.implementation model.hoist model.unroll
        model.recurrence.chunk model.eos_ids""",
    recipes.mlp: f"{OF_A_RUN} data.file model.remat model.in_size model.out_size",
    recipes.finetune: f"{OF_A_RUN} {OF_TEXT} remat kernel scan_layers",
    recipes.generate: "",
}


@pytest.mark.parametrize("recipe", MAY_DIFFER, ids=lambda recipe: recipe.__name__)
def test_recipe_fields_that_may_differ_are_listed(recipe: Any):
    assert configuration.names_that_may_differ(recipe.Config()) == set(MAY_DIFFER[recipe].split())


def test_subclasses_keep_may_differ_marks():
    @dataclasses.dataclass(frozen=True)
    class Base:
        steps: int = configuration.may_differ()
        seed: int = 0

    @dataclasses.dataclass(frozen=True)
    class Middle(Base):
        steps: int = 5

    @dataclasses.dataclass(frozen=True)
    class Last(Middle):
        seed: int = 1

    with pytest.raises(TypeError, match=r"missing 1 .* 'steps'"):
        Base()
    assert configuration.names_that_may_differ(dataclasses.replace(Last(), seed=2)) == {"steps"}


@pytest.mark.parametrize("config", [text.Config(), tabular.Config()], ids=["text", "tabular"])
def test_data_of_wrong_type_is_refused(config: Any):
    with pytest.raises(ValueError, match=r"^data\.batch_size='x':"):
        changed(config, batch_size="x")
    with pytest.raises(ValueError, match=r"^data\.held_out=nan:"):
        changed(config, held_out=math.nan)


def test_a_namesake_is_refused_by_its_module():
    with pytest.raises(ValueError, match=r"^data=.*of zoo\.alignment\.\w+, not of zoo\.tasks"):
        configuration.check_value("data", finetuning.Data("*.txt"), distillation.Data)
