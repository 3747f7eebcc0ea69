"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT has one adapter per module of transformers', A of [rank, in] and B of [out, rank]; the zoo has
one per matrix, for all layers together. Which module holds a matrix, and how its axes are joined
there, is known by the table of its family in `hf`; in a model that Hugging Face lacks, each matrix
is a module of its own, named by its path. A module of several matrices, as GPT-2's `c_attn`, has
their adapters side by side: its A has the ranks of all of them. A stack of experts has one adapter:
the rows of its A are [experts, rank], and the columns of its B [rank, experts].
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.hf import layouts, peft_config, peft_tables
from zoo.hf.layouts import Layout
from zoo.hf.peft_config import ADAPTER_CONFIG, ROOT, WEIGHTS, Linear, linears, matches, nested
from zoo.hf.weights import FLOATS
from zoo.publishing import PublishError
from zoo.publishing.formats import AdapterFormat, Base, Opened, Options
from zoo.publishing.models import ALL_LINEAR
from zoo.publishing.tensors import (
    Tensor,
    check_tensors,
    fill,
    outline,
    slice_reader,
    typed,
    write_file,
)
from zoo.sharding.axes import keystr
from zoo.sharding.placement import gathered
from zoo.wrappers import lora

ENDS = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def layout(path: str, linear: Linear, field: str, rank: int, prefix: str) -> Layout:
    """The place of an adapter's `down`, `up` or `magnitude` in the tensors of the modules."""
    stacked, axes = linear.stacked, [*linear.sizes]
    inside = [axis for axis in axes if axis in linear.inputs.split(".")]
    outside = [axis for axis in axes if axis in linear.outputs.split(".")]
    rows, columns = ("experts.rank", "rank.experts") if linear.parameter else ("rank", "rank")
    ours, theirs, split = {
        "down": ([*inside, "rank"], f"{rows} {linear.inputs}", ()),
        "up": (["rank", *outside], f"{linear.outputs} {columns}", linear.split),
        "magnitude": (outside, linear.outputs, linear.split),
    }[field]
    sizes = {**linear.sizes, "rank": rank}
    names = (*stacked, *ours)
    shape = tuple(sizes[axis] for axis in names)
    share = linear.part if len(split) else (0, 1)
    tensor = layouts.Tensor(f"{ROOT}{linear.module}.{ENDS[field]}", theirs, share)
    return Layout(path, shape, names, tensor, prefix, linear.layers, split)


class _Adapters:
    """A folder of adapters for a model, checked: their configuration, and their arrays.

    Matrices whose adapters are of a lower rank than others' get that of the others, and a scale
    other than theirs goes into `up`; a layer without an adapter gets one of zeros. So the model
    computes what PEFT does.

    Raises:
        PublishError: it names the option, target or tensor that does not fit the model.
    """

    def __init__(self, folder: Path, base: PyTree):
        self.path, self._where = folder / WEIGHTS, folder / ADAPTER_CONFIG
        self.options = peft_config.read(self._where)
        prefixes, _, table, _ = linears(base)
        self._stored = outline(self.path)
        self.prefix = _prefix(prefixes, table, self._stored)
        self.table = {path: linear for path, linear in table.items() if any(self._has(linear))}
        self._check_targets(table)
        self.table = nested(self.table)
        chosen = peft_tables.chosen(base, self.options, table, self.prefix, self._where)
        self._new = {
            f"{path}.new": peft_tables.layout(path, table[path], ids, self.prefix)
            for path, ids in chosen.items()
        }
        found = [
            (name, linear, target)
            for linear in self.table.values()
            for name, target in zip(
                linear.names(self.prefix), linear.targets(self.prefix), strict=True
            )
            if self.options.has(target, is_parameter=bool(linear.parameter))
        ]
        self._modules = {name: linear for name, linear, _ in found}
        self._targets = {name: target for name, _, target in found}
        fields = [x for x in ENDS if x != "magnitude" or self.options.use_dora]
        wanted = {
            f"{ROOT}{name}.{ENDS[field]}": layout(
                "", linear, field, self.options.rank(self._targets[name]), self.prefix
            ).tensor_shape
            for name, linear in self._modules.items()
            for field in fields
        }
        wanted |= {name: x.tensor_shape for x in self._new.values() for name, _ in x.names()}
        wanted |= {x: y for x, y in self._copies().items() if x in self._stored}
        check_tensors(f"{self.path}", {x: y.shape for x, y in self._stored.items()}, wanted)
        first = max(self._targets.values(), key=self.options.rank)
        self._scale = self.options.scale(first)
        # Dropout is for training, and only hidden matrices have it.
        has_dropout = all(map(lora.matrices(base).get, self.table))
        try:
            self.config = lora.Config(
                rank=self.options.rank(first),
                alpha=self.options.alpha(first),
                targets=tuple(self.table),
                rank_stabilized=self.options.use_rslora,
                dora=self.options.use_dora,
                dropout=self.options.lora_dropout if has_dropout else 0.0,
                tokens=next(filter(None, chosen.values()), ()),
                whole=tuple(path for path, ids in chosen.items() if ids is None),
            )
        except ValueError as error:
            raise PublishError(f"{self._where}: {error}") from error

    def opened(self, base: PyTree, options: Options) -> Opened:
        """The base with the adapters, for `zoo.load`."""
        key, on = jax.random.key(0), sharding.layout_of(options.mesh)
        whole = eqx.filter_eval_shape(lora.adapt, base, self.config, key=key)
        dtype = lambda name: self._dtype(self._layout(name), options.dtype)  # noqa: E731
        own = typed(eqx.filter(whole, lora.trainable(whole)), dtype)

        def load(skeleton: PyTree) -> PyTree:
            with slice_reader() as read:
                tensor = lambda name, at: self._tensor(read, name)[at]  # noqa: E731
                part = lambda name, at, dtype: self._layout(name).read(at, dtype, tensor)  # noqa: E731
                arrays = fill(own, on.mesh, part, quantize=False)
            with sharding.use(on.without_mesh):
                adapted = eqx.combine(arrays, lora.adapt(base, self.config, key=key))
                if on.mesh is not None:  # the seeds of dropout, which are new
                    adapted = eqx.filter_shard(adapted, sharding.shardings(adapted, on.mesh))
            return adapted

        return Opened(eqx.combine(own, whole), load)

    def _has(self, linear: Linear) -> list[bool]:
        """Whether each layer of a matrix has an adapter."""
        has = partial(self.options.has, is_parameter=bool(linear.parameter))
        return [has(target) for target in linear.targets(self.prefix)]

    def _check_targets(self, table: dict[str, Linear]) -> None:
        if not self.table:
            modules = sorted({linear.targets(self.prefix)[0] for linear in table.values()})
            raise PublishError(
                f"{self._where}: target_modules={self.options.target_modules!r} matches no matrix "
                f"of the model; its modules are {', '.join(modules)}"
            )
        known = {x for y in self.table.values() if y.parameter for x in y.targets(self.prefix)}
        for name in self.options.target_parameters or ():
            if not any(matches((name,), target) for target in known):
                raise PublishError(
                    f"{self._where}: target_parameters has {name!r}, and the zoo reads adapters on "
                    "mlp.experts.gate_up_proj and mlp.experts.down_proj of a model that has them"
                )
        refused = {path: linear.refusal for path, linear in self.table.items() if linear.refusal}
        if refused and self.options.target_modules != ALL_LINEAR:
            raise PublishError(f"{self._where}: {_refusal(*next(iter(refused.items())))}")
        self.table = {path: x for path, x in self.table.items() if path not in refused}
        partly = [path for path, linear in self.table.items() if not all(self._has(linear))]
        if partly and self.options.use_dora:
            raise PublishError(
                f"{self._where}: use_dora=True and adapters on some layers of {partly[0]} only; "
                "the zoo has them on all layers, and the missing ones would be trained too"
            )

    def _copies(self) -> dict[str, tuple[int, ...]]:
        """Tensors that PEFT stores a second time, with their shapes: the base's head under an
        adapter, and a retrained embedding that is the head too."""
        copies = {}
        for name, linear in self._modules.items():
            if linear.end == "head":
                found = peft_tables.layout("", linear, None, self.prefix)
                copies[f"{ROOT}{name}.base_layer.weight"] = found.tensor_shape
        for found in self._new.values() if self.options.ensure_weight_tying else ():
            copies[peft_tables.TIED] = found.tensor_shape
        return copies

    def _layout(self, name: str) -> Layout:
        if name in self._new:
            return self._new[name]
        path, _, field = name.rpartition(".")
        return layout(name, self.table[path], field, self.config.rank, self.prefix)

    def _dtype(self, found: Layout, dtype: DTypeLike | None) -> Any:
        """`dtype`, or that of the tensors; the widest one if they differ."""
        if dtype is not None:
            return jnp.dtype(dtype)
        types = {self._stored[name].dtype for name, _ in found.names() if name in self._stored}
        if unknown := {*map(str, types)} - {*FLOATS}:
            raise PublishError(
                f"{self.path}: tensors of type {', '.join(sorted(unknown))}, and adapters have to "
                f"be {', '.join(FLOATS)}"
            )
        return max(types, key=lambda x: x.itemsize)

    def _tensor(self, read: Callable[..., np.ndarray], name: str) -> np.ndarray:
        """A tensor, of the common rank and for the common scale."""
        field = next((field for field, end in ENDS.items() if name.endswith(end)), None)
        if field is None:  # of what is retrained
            return read(self.path, name, ())
        module, rank = name.removeprefix(ROOT).removesuffix(f".{ENDS[field]}"), self.config.rank
        if module not in self._modules:
            linear = next(x for x in self.table.values() if module in x.names(self.prefix))
            return np.zeros(layout("", linear, field, rank, self.prefix).tensor_shape, np.float32)
        target, count = self._targets[module], self._modules[module].num_experts
        tensor, lacking = read(self.path, name, ()), rank - self.options.rank(target)
        factor = self.options.scale(target) / self._scale
        if field == "up" and factor != 1:
            tensor = tensor.astype(np.float32) * np.float32(factor)
        if lacking and field == "down":
            by_expert = tensor.reshape(count, -1, tensor.shape[1])
            whole = np.pad(by_expert, ((0, 0), (0, lacking), (0, 0)))
            return whole.reshape(count * rank, -1)
        return np.pad(tensor, ((0, 0), (0, lacking * count))) if field == "up" else tensor


def _prefix(prefixes: tuple[str, ...], table: dict[str, Linear], stored: Any) -> str:
    """The first of the family's prefixes that some tensor has."""
    for prefix in prefixes:
        roots = {f"{ROOT}{name}." for x in table.values() for name in x.names(prefix)}
        if any(name.rpartition("lora_")[0] in roots for name in stored):
            return prefix
    return prefixes[0]


def _refusal(path: str, reason: str) -> str:
    return f"PEFT's format has no adapters on {path}: {reason}; choose other targets"


class _Peft(AdapterFormat):
    """The format of PEFT, which opens what is written where Hugging Face has such a model."""

    config, base_field = ADAPTER_CONFIG, peft_config.NAME

    def describes(self, folder: Path) -> bool:
        return not any(folder.glob("model*.safetensors*"))

    def weight_files(self, folder: Path) -> list[str]:
        return [WEIGHTS]

    def base(self, folder: Path) -> Base:
        return peft_config.read_base(folder)

    def open(self, folder: Path, options: Options, base: PyTree = None) -> Opened:
        return _Adapters(folder, base).opened(base, options)

    def check(self, model: PyTree, config: lora.Config) -> None:
        for parts in _by_module(linears(model).by_path, config):
            count = next(iter(parts.values())).part[1]
            if config.dora and len(parts) < count:
                raise PublishError(
                    f"PEFT's format has DoRA for all {count} matrices of a module or for none, and "
                    f"here only {', '.join(parts)} would have it: adapt all of them, or leave out "
                    "dora"
                )

    def write_adapters(
        self, folder: Path | None, model: PyTree, config: lora.Config, base: Base
    ) -> None:
        (prefix, *_), task, table, _ = linears(model)
        modules = _by_module(table, config)
        leaves = jtu.tree_leaves_with_path(model, is_leaf=lora.is_adapted)
        nodes = {keystr(path): node for path, node in leaves if lora.is_adapted(node)}
        tensors: dict[str, Tensor] = peft_tables.tensors(model, nodes, table, prefix)
        for parts in modules:
            tensors |= _tensors({path: (nodes[path], x) for path, x in parts.items()}, prefix)
        if folder is not None:
            chosen = [next(iter(parts.values())) for parts in modules]
            values = {
                peft_config.NAME: base.name,
                peft_config.REVISION: base.revision,
                **peft_config.fields(config, chosen, table.values(), prefix),
                **peft_tables.fields(model, nodes, table, prefix),
                "task_type": task,
            }
            text = json.dumps(values, indent=2, sort_keys=True)
            (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
        origin = {"weights": base.checksum, "quantized": base.quantized, "eos_ids": base.eos_ids}
        metadata = {"format": "pt", peft_config.METADATA: json.dumps(origin)}
        write_file(folder and folder / WEIGHTS, tensors, metadata)

    def modules(self, model: PyTree) -> dict[str, str]:
        prefixes, _, table, is_of_family = linears(model)
        if not is_of_family:  # it has only paths
            return {}
        return {path: linear.targets(prefixes[0])[0] for path, linear in table.items()}


PEFT = _Peft()


def _by_module(table: dict[str, Linear], config: lora.Config) -> list[dict[str, Linear]]:
    """The matrices with adapters, by their paths, of one module after the other."""
    found: dict[str, dict[str, Linear]] = {}
    for path, linear in nested({path: table[path] for path in config.targets}).items():
        no_lengths = "it has no DoRA of experts" if config.dora and linear.parameter else ""
        if reason := linear.refusal or no_lengths:
            raise PublishError(_refusal(path, reason))
        found.setdefault(linear.module, {})[path] = linear
    return [*found.values()]


def _tensors(parts: dict[str, tuple[lora.Adapted, Linear]], prefix: str) -> dict[str, Tensor]:
    """The tensors of a module's adapters in all layers, given the matrices in it.

    With several, the ranks are one after the other in A, and B is zero where the rank of one meets
    the outputs of another; so are both where a matrix has no adapter.
    """
    nodes = {linear.part[0]: node for node, linear in parts.values()}
    any_linear = next(iter(parts.values()))[1]
    count, experts = any_linear.part[1], any_linear.num_experts
    one = next(iter(nodes.values()))
    fields = [field for field in ENDS if getattr(one, field) is not None]
    places = {
        (linear.part[0], field): layout(path, linear, field, one.rank, prefix)
        for path, (_, linear) in parts.items()
        for field in fields
    }

    def whole(field: str, at: Mapping[str, int], shape: tuple, dtype: Any) -> Iterator[np.ndarray]:
        made = np.zeros(shape, dtype)
        for number, node in nodes.items():
            found, ranks = places[number, field], slice(number * one.rank, (number + 1) * one.rank)
            rows = slice(None) if found.own is None else found.own
            part = found.write(at, gathered(getattr(node, field)[found.at(at)]))
            if field == "down":
                by_expert = made.reshape(experts, -1, shape[1])
                by_expert[:, ranks] = part.reshape(experts, one.rank, -1)
            elif field == "up":
                made.reshape(shape[0], -1, experts)[rows, ranks] = part.reshape(
                    -1, one.rank, experts
                )
            else:
                made[rows] = part
        yield made

    tensors = {}
    for field in fields:
        first = places[min(nodes), field]
        axis = {"down": 0, "up": 1}.get(field)  # of the rank
        shape = tuple(n * count if i == axis else n for i, n in enumerate(first.tensor_shape))
        dtype = np.result_type(*[getattr(node, field).dtype for node in nodes.values()])
        for name, at in first.names():
            tensors[name] = Tensor(shape, dtype, partial(whole, field, at, shape, dtype))
    return tensors
