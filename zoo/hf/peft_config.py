"""PEFT's `adapter_config.json`: which modules of a model have adapters, of which rank and scale.

A module holds a matrix, or several. Modules are those of the model's family in Hugging Face's
format: `q_proj`, `c_attn`; in a model that it lacks, each matrix is a module of its own, named by
its path. Experts are parameters of one module, stacked: `mlp.experts.gate_up_proj` and `down_proj`.
"""

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from zoo.common import configuration
from zoo.hf.folder import family_of
from zoo.hf.layouts import LAYER, filled
from zoo.hf.rules import words
from zoo.nn.products import dequantize
from zoo.publishing import PublishError
from zoo.publishing.formats import Base, read_json
from zoo.publishing.models import ALL_LINEAR
from zoo.publishing.tensors import open_file
from zoo.sharding.axes import keystr, map_parameters
from zoo.sharding.rules import is_matrix, matrix_axes
from zoo.wrappers import lora

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME, REVISION = "base_model_name_or_path", "revision"  # of the base
ROOT = "base_model.model."  # before the names of modules
METADATA = "zoo"  # in the header of the weights, which PEFT does not read
# Without effect on what the adapters compute.
_IGNORED = words(
    """
    auto_mapping base_model_name_or_path corda_config eva_config fan_in_fan_out inference_mode
    init_lora_weights loftq_config lora_ga_config megatron_core peft_type peft_version
    qalora_group_size revision runtime_config task_type
    """
)
# The other ways to begin change the matrices of the base too.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_ENDS: dict[tuple, str] = {
    ("vocab", "embed"): "embedding",
    ("embed", "vocab"): "head",
}  # by their logical axes
# The experts that files have one by one, and transformers stacks in two parameters of a module: the
# parameter of each, and which of how many matrices in it.
_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.\{experts\}\.(\w+)")
_PARAMETERS = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", (0, 2))),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", (1, 2))),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", (0, 1))),
}
_INSIDE = ".base_layer"
_OF_EXPERTS = re.compile(r"\.(gate|up|down)_proj$")
_TAKEN = "in a model with experts PEFT takes a module of this name for theirs"
_NOTHING: tuple[Any, ...] = (None, False, "none", [], {})


@dataclass(frozen=True)
class Linear:
    """A matrix of a model, and the module whose weight it is, or a part of that."""

    module: str
    """The module's name, a template as in `Tensor`."""
    sizes: Mapping[str, int]
    """The sizes of the matrix's axes, in their order; those before `inputs` stack matrices."""
    inputs: str
    """The axes that are the module's input features, joined as in `Tensor`."""
    outputs: str
    """The axes that are its output features."""
    is_transposed: bool
    """Whether the weight is stored as [in, out], as a Conv1D's is."""
    part: tuple[int, int]
    """(i, n): the i-th of n matrices in the module."""
    refusal: str
    """Why PEFT's format has no adapter of this matrix; "" if it has."""
    split: Sequence[np.ndarray] = ()
    """The numbers of the module's outputs that each matrix has; () if there is one, in order."""
    layers: Sequence[int] | None = None
    """The layers that have the matrix; None if all have it."""
    end: str = ""
    """"embedding" or "head" where the matrix is that of tokens."""
    parameter: str = ""
    """The module's parameter, where that is a stack of experts; it is the weight otherwise."""

    def targets(self, prefix: str) -> list[str]:
        """The name in each layer by which a configuration chooses it."""
        names = (name.removesuffix(_INSIDE) for name in self.names(prefix))
        return [f"{name}.{self.parameter}" if self.parameter else name for name in names]

    @property
    def num_experts(self) -> int:
        """The matrices that are stacked in one adapter."""
        return self.sizes["experts"] if self.parameter else 1

    def names(self, prefix: str) -> list[str]:
        """The name of the module in each layer; where each expert has one, the first expert's."""
        layers = self.layers or range(self.sizes.get(LAYER, 1))
        return [filled(self.module, prefix, {"layer": i, "experts": 0}) for i in layers]

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes that stack matrices."""
        used = {*self.inputs.split("."), *self.outputs.split(".")}
        return tuple(axis for axis in self.sizes if axis not in used)


class Linears(NamedTuple):
    """The modules of a model."""

    prefixes: tuple[str, ...]
    """Possible prefixes of their names; the first is written."""
    task: str
    """The model's task in PEFT's words."""
    by_path: dict[str, Linear]
    """By the paths of the matrices."""
    is_of_family: bool


def linears(model: PyTree) -> Linears:
    """The modules of a model, with adapters or without."""
    plain = eqx.filter_eval_shape(lambda model: dequantize(lora.merge(model)), model)
    try:
        family = family_of(plain)
    except PublishError:
        family = None
    layouts = family.layouts(plain, "") if family else {}
    found = {}

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        key = keystr(path)
        if not is_matrix(names, field=key):
            return
        inputs, outputs = matrix_axes(names)
        axes, layout = [name or LAYER for name in names], layouts.get(key)
        stacked = axes[: inputs[0]]
        if layout is None:  # its axes may have the same name
            axes = [*stacked, *(f"axis{i}" for i in range(len(stacked), len(names)))]
        into, out = (".".join(axes[i] for i in group) for group in (inputs, outputs))
        groups = [".".join(group) for group in layout.factors] if layout else [into, out]
        first, *rest = key.removesuffix(".weight").split(".")
        name = ".".join([first, *["{layer}"] * bool(stacked), *rest])
        part, refusal, parameter = (0, 1), "", ""
        split: Sequence[np.ndarray] = ()
        if layout:
            name, part = layout.tensor.name.removesuffix(".weight"), layout.tensor.share
            split = layout.shares
        if layout and (expert := _EXPERT.fullmatch(name)):
            name, (parameter, part) = f"{expert[1]}mlp.experts", _PARAMETERS[expert[2]]
            split = np.split(np.arange(part[1] * leaf.shape[outputs[0]]), part[1])
        elif stacked not in ([], [LAYER]) or (layout and "routes" in axes):
            refusal = "versions of transformers name experts and their routers differently"
            if layout is None:
                refusal = f"a stack of matrices along {', '.join(stacked)}"
        elif "embedding" in key:
            refusal = "an embedding is no Linear"
        is_transposed = {*into.split(".")} <= {*groups[0].split(".")}
        found[key] = Linear(
            module=name,
            sizes=dict(zip(axes, leaf.shape, strict=True)),
            inputs=groups[not is_transposed],
            outputs=groups[is_transposed],
            is_transposed=is_transposed,
            part=part,
            refusal=refusal,
            split=split,
            layers=layout.layers if layout else None,
            end=_ENDS.get(names, ""),
            parameter=parameter,
        )

    map_parameters(add, plain)
    if any(linear.parameter for linear in found.values()):
        for path, linear in found.items():
            if not linear.parameter and _OF_EXPERTS.search(linear.module):
                found[path] = dataclasses.replace(linear, refusal=_TAKEN)
    is_lm = (
        family is not None
        and ("LM" in family.architecture and plain.config.causal)
        and not family.is_bare(plain.config)
    )
    task = "CAUSAL_LM" if is_lm else "FEATURE_EXTRACTION"
    first = family.prefix(plain.config) if family else ""
    prefixes = (first, *(x for x in (family.prefixes if family else ()) if x != first))
    return Linears(prefixes, task, found, family is not None)


def nested(chosen: Mapping[str, Linear]) -> dict[str, Linear]:
    """The matrices with adapters by path, in the modules that PEFT makes of them.

    It wraps a module once for each parameter, in their order, so that the first is inside.
    """
    outer = {x.module for x in chosen.values() if x.parameter == "down_proj"}
    return {
        path: dataclasses.replace(x, module=x.module + _INSIDE)
        if x.parameter == "gate_up_proj" and x.module in outer
        else x
        for path, x in chosen.items()
    }


def short_names(linear: Linear, others: Collection[Linear], prefix: str) -> list[str]:
    """The names that choose a module in all layers, and no other module."""
    names = linear.targets(prefix)
    modules = {other.targets(prefix)[0] for other in others} | {names[0]}
    words = re.sub(r".*\.\d+\.", "", names[0]).split(".")
    for start in reversed(range(len(words))):
        end = ".".join(words[start:])
        if [name for name in modules if f".{name}".endswith(f".{end}")] == [names[0]]:
            return [end]
    return names  # "output.dense" would mean "attention.output.dense" too


@dataclass(frozen=True)
class Options:
    """The fields of `adapter_config.json` that say what the adapters compute."""

    r: int = 8
    lora_alpha: float = 8.0
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: tuple[str, ...] | str | None = None
    rank_pattern: dict | None = field(default_factory=dict)
    alpha_pattern: dict | None = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    lora_dropout: float = 0.0
    target_parameters: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    trainable_token_indices: tuple[int, ...] | dict | None = None
    ensure_weight_tying: bool = False

    def rank(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def alpha(self, module: str) -> float:
        """The numerator of its scale."""
        return float(_by_pattern(self.alpha_pattern, module, self.lora_alpha))

    def scale(self, module: str) -> float:
        """The factor of its product."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def has(self, module: str, *, is_parameter: bool) -> bool:
        """Whether a module, or a parameter, has an adapter, as PEFT decides it."""
        if is_parameter:
            return matches(self.target_parameters or (), module)
        if self.exclude_modules and matches(self.exclude_modules, module):
            return False
        targets = self.target_modules
        if targets == ALL_LINEAR:
            return not module.endswith("lm_head")
        if not matches(targets, module):
            return False
        layers = self.layers_to_transform
        if isinstance(targets, str) or layers is None or layers == ():
            return True
        patterns = self.layers_pattern or r"[^.]*"
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(found[1]) in (layers if isinstance(layers, tuple) else (layers,))
        return False


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    found = (x for key, x in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def matches(names: tuple[str, ...] | str | None, module: str) -> bool:
    """Whether a module has one of these names, or whether a regular expression matches it."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names or ())


def read(path: Path) -> Options:
    """The options in an `adapter_config.json`.

    Raises:
        PublishError: adapters of another method, or an option that the zoo lacks, by its name.
    """
    values = read_json(path)
    if (kind := values.get("peft_type")) != "LORA":
        raise PublishError(f"{path}: peft_type={kind!r} is not supported, only 'LORA'")
    known = configuration.annotations(Options)
    unsupported = {
        name: value
        for name, value in values.items()
        if name not in known and name not in _IGNORED and value not in _NOTHING
    }
    if (beginning := values.get("init_lora_weights")) not in _BEGINNINGS:
        unsupported["init_lora_weights"] = beginning
    if unsupported:
        listed = ", ".join(f"{name}={reprlib.repr(x)}" for name, x in unsupported.items())
        raise PublishError(f"{path} has options that the zoo lacks: {listed}")
    try:
        given = {name: values[name] for name in known if name in values}
        options = Options(
            **{
                name: configuration.value_from_json(name, value, known[name])
                for name, value in given.items()
            }
        )
        _check(options)
        return options
    except (TypeError, ValueError, re.error) as error:
        raise PublishError(f"{path}: {error}") from error


def _check(options: Options) -> None:
    """Refuse what is no regular expression, and numbers that are not positive."""
    texts = [x for x in (options.target_modules, options.exclude_modules) if isinstance(x, str)]
    layers = options.layers_pattern or ()
    texts += [layers] if isinstance(layers, str) else layers
    for name, kind, given in (
        ("rank_pattern", int, options.rank_pattern),
        ("alpha_pattern", float, options.alpha_pattern),
    ):
        for key, value in (given or {}).items():
            configuration.check_value(f"{name}[{key!r}]", value, kind)
            configuration.require(value > 0, f"{name}[{key!r}]={value}: must be positive")
            texts.append(key)
    for text in texts:
        re.compile(text)
    r, alpha = options.r, options.lora_alpha
    configuration.require(r > 0 and alpha > 0, f"r={r}, lora_alpha={alpha}: must be positive")
    configuration.require(
        options.target_modules is not None or bool(options.target_parameters),
        "target_modules=None: PEFT's defaults change with its version; list the modules",
    )


def read_base(folder: Path) -> Base:
    """The base of the adapters in a folder; a PublishError names a field of another type."""
    read(folder / ADAPTER_CONFIG)  # refuses other methods before a base is opened
    values = read_json(folder / ADAPTER_CONFIG)
    with open_file(folder / WEIGHTS) as file:
        text = (file.metadata() or {}).get(METADATA, "{}")
    try:
        origin, name, revision = json.loads(text), values.get(NAME), values.get(REVISION)
        configuration.check_value(NAME, name, str | None)
        configuration.check_value(REVISION, revision, str | None)
        is_commit = revision is None or re.fullmatch(r"\w[\w.-]*", revision)
        configuration.require(bool(is_commit), f"{REVISION}={revision!r}: must be a commit")
        configuration.check_value("base", origin, dict)
        checksum, quantized = origin.get("weights"), origin.get("quantized")
        configuration.check_value("base.weights", checksum, str | None)
        quantized = quantized if quantized is None else tuple(quantized)
        configuration.check_value("base.quantized", quantized, tuple[str, ...] | None)
        eos_ids = tuple(origin.get("eos_ids", ()))
        configuration.check_value("base.eos_ids", eos_ids, tuple[int, ...])
    except (TypeError, ValueError) as error:
        raise PublishError(f"{folder / ADAPTER_CONFIG} or {WEIGHTS}: {error}") from error
    return Base(name or "", revision, checksum, quantized, eos_ids)


def fields(
    config: lora.Config, modules: Collection[Linear], others: Collection[Linear], prefix: str
) -> dict[str, Any]:
    """The fields of `adapter_config.json` for adapters on these modules of a model.

    Where several matrices with adapters are parts of one module, `modules` has one of them.
    """
    rank, alpha = config.rank, config.alpha
    root = math.sqrt if config.rank_stabilized else float  # what alpha is divided by
    names = {linear.module: short_names(linear, others, prefix) for linear in modules}
    chosen = [(name, bool(x.parameter)) for x in modules for name in names[x.module]]
    joined = {re.escape(x): y.part[1] for y in modules if y.part[1] > 1 for x in names[y.module]}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(name for name, is_parameter in chosen if not is_parameter),
        "target_parameters": sorted(name for name, is_parameter in chosen if is_parameter) or None,
        "rank_pattern": {name: rank * n for name, n in joined.items()},
        "alpha_pattern": {name: alpha * root(n) for name, n in joined.items()},
        "fan_in_fan_out": any(linear.is_transposed for linear in modules),
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "use_dora": config.dora,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": None,
    }
