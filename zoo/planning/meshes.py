"""All meshes of a target for a model, compared by hand before the best ones are compiled.

A step takes its products at the chip's peak, then what the memory moves between the products of
experts, the transfers of parameters and gradients, and those of activations, each over the links
that its axis of the mesh has on the target. What a compiler hides of them is left out.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from zoo import sharding
from zoo.nn.attention.context_parallel import Exchange
from zoo.nn.attention.masks import Mask
from zoo.nn.grouped_products import SHARED_ROWS
from zoo.planning.collectives import Collective, Kind, Topology, topology_of
from zoo.planning.targets import Target
from zoo.sharding import MESH_AXES, ShardingError
from zoo.training.chips import Chip
from zoo.transformer.config import Config as Sizes
from zoo.transformer.dispatch import dispatch_for

_BYTES = 2  # of the compute dtype
Seconds = Callable[[Kind, float, str], float]  # of a collective, by the bytes of its whole


def _axes(name: str) -> tuple[str, ...]:
    """The mesh axes that split a logical axis."""
    found = sharding.RULES[name]
    axes = found.mesh if isinstance(found, sharding.Axis) else found
    return (axes,) if isinstance(axes, str) else axes or ()


_SPLIT, _ROWS, _TOKENS = _axes("heads"), _axes("batch"), _axes("seq")
_EXPERTS = tuple(axis for axis in _axes("experts") if axis not in _SPLIT)


@dataclass(frozen=True)
class Candidate:
    """A mesh, and its step by hand, in seconds."""

    mesh: str
    state: float
    """Bytes of parameters, gradients and optimizer per device."""
    compute: float
    rows: float
    """Reading and writing rows of experts."""
    parameters: float
    """The transfers of parameters and gradients."""
    activations: float
    """The transfers of activations, keys and tokens of experts."""

    @property
    def seconds(self) -> float:
        """The step."""
        return self.compute + self.rows + self.parameters + self.activations


def candidates(
    config: Sizes,
    num_parameters: int,
    held: float,
    flops: float,
    rows: int,
    seq_len: int,
    target: Target,
) -> list[Candidate]:
    """Every mesh of a target that divides the model and the batch, the fastest by hand first.

    `held` are the bytes of parameters, gradients and optimizer, and `flops` those of a step, of all
    devices together.
    """
    found = []
    for sizes in _meshes(config, rows, seq_len, target):
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        try:
            devices = sharding.make_mesh(mesh, target.devices()).devices
        except ShardingError:
            continue
        where = topology_of(target.chip, target.shape, tuple(devices.flat))
        seconds = functools.partial(_seconds, where, np.arange(devices.size).reshape(devices.shape))
        kind = devices.flat[0].device_kind
        numbers = num_parameters, held, flops, rows * seq_len
        found.append(_by_hand(config, *numbers, sizes, seconds, where, kind))
    return sorted(found, key=lambda each: (each.seconds, each.state, each.mesh))


def _meshes(config: Sizes, rows: int, seq_len: int, target: Target) -> Iterator[dict[str, int]]:
    """The sizes of axes that divide what they split."""
    divided = dict.fromkeys(_SPLIT, math.gcd(*_split_sizes(config)))
    divided |= dict.fromkeys(_EXPERTS, config.experts.num_experts or 1)
    divided |= dict.fromkeys(_TOKENS, seq_len if rows < target.num_devices else 1)
    n = target.num_devices
    factors = [
        [size for size in range(1, n + 1) if n % size == 0 and divided.get(axis, size) % size == 0]
        for axis in MESH_AXES
    ]
    for sizes in itertools.product(*factors):
        named = dict(zip(MESH_AXES, sizes, strict=True))
        abstract = {axis: size for axis, size in named.items() if size > 1}
        if (config.experts.num_experts or 0) % math.prod(named[axis] for axis in _axes("experts")):
            continue
        if math.prod(sizes) == n and not (
            rows % sharding.num_batch_parts(sharding.abstract_mesh(abstract, n))
        ):
            yield named


def _split_sizes(config: Sizes) -> list[int]:
    """The sizes that a mesh axis of heads has to divide."""
    settings = config.mixer.recurrence
    sizes = [config.kv_heads] if "attention" in config.mixers else []
    sizes += [config.hidden_size] if config.mlp != "none" else []
    if "recurrence" in config.mixers:
        sizes += [settings.num_heads]
        sizes += [settings.num_key_heads or 0] if config.mixer.kind == "gated_deltanet" else []
    return sizes


def _seconds(where: Topology, ids: np.ndarray, kind: Kind, whole: float, axis: str) -> float:
    """The seconds of one collective over an axis, by the bytes of its whole."""
    groups = np.moveaxis(ids, MESH_AXES.index(axis), -1)
    n = groups.shape[-1]
    if n == 1:
        return 0.0
    members = tuple(map(tuple, groups.reshape(-1, n).tolist()))
    spread = [len({where.places[x][k] for x in members[0]}) > 1 for k in range(len(where.shape))]
    # Over all three dimensions of a slice the compiler makes an all-reduce of a gather
    # (benchmarks/results/2026-11-23-scaling-llama3-8b-v6e.md).
    is_twice = kind == "all-reduce" or (kind == "all-gather" and len(spread) == 3 and all(spread))
    sent = whole * (n - 1) / n * (2 if is_twice else 1)
    return where.transfer(Collective(kind, sent, 1, n, members)).seconds


def _by_hand(
    config: Sizes,
    num_parameters: int,
    held: float,
    flops: float,
    tokens: int,
    sizes: dict[str, int],
    seconds: Seconds,
    where: Topology,
    kind: str,
) -> Candidate:
    def parts(axes: Collection[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    experts = config.has_experts.count(True) * (config.experts.num_experts or 0) * _expert(config)
    local = tokens / parts({*_ROWS, *_TOKENS})
    width = config.d_model
    heads, kv_heads = (n // parts(_SPLIT) for n in (config.num_heads, config.kv_heads))

    # Gathered forward and backward, gradients scattered; what is kept twice is summed.
    parameters, stored = 0.0, (num_parameters - experts) / parts(_SPLIT)
    for axis in _EXPERTS:  # over which all but the experts are gathered
        parameters += 3 * seconds("all-gather", stored * _BYTES, axis)
        stored /= sizes[axis]
    stored += experts / parts({*_EXPERTS, *_SPLIT})
    for axis in sorted(sharding.STORAGE_AXES):
        parameters += 3 * seconds("all-gather", stored * _BYTES, axis)
        stored /= sizes[axis]
    for axis in set(_ROWS) - sharding.STORAGE_AXES - set(_EXPERTS):
        parameters += seconds("all-reduce", stored * _BYTES, axis)
    activations = 0.0
    for axis in _SPLIT:  # behind each part, forward, backward, and attention again
        activations += (5 * config.num_parts / 2 + 2) * seconds(
            "all-reduce", local * width * _BYTES, axis
        )
    layers = config.mixers.count("attention")
    for axis in _TOKENS:  # of attention: forward, again, and backward
        head = local * config.head_size * _BYTES
        exchange = Exchange((), sizes[axis], heads, kv_heads)
        if exchange.sends_less(1, Mask(config.causal, None), 0):
            moved = 2 * (heads + exchange.copies * kv_heads) * head
            activations += 3 * layers * seconds("all-to-all", moved, axis)
        else:
            moved = 2 * kv_heads * sizes[axis] * head  # and gradients in fp32, but none again
            activations += 4 * layers * seconds("all-gather", moved, axis)
    products, rows, links = _of_experts(config, local, sizes, seconds, where.chip, kind)
    return Candidate(
        mesh=",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1),
        state=held * stored / num_parameters,
        compute=flops / (where.chip.flops or math.inf) / math.prod(sizes.values()) + products,
        rows=rows,
        parameters=parameters,
        activations=activations + links,
    )


def _expert(config: Sizes) -> int:
    """The parameters of one expert."""
    return (3 if config.gated else 2) * config.d_model * config.hidden_size


# How often a step reads or writes an array of rows between the products of experts, fitted on plans
# of Qwen3-30B-A3B for a v5p:4x4x4; rows from other devices are put in order once more.
_PASSES, _AGAIN = 20, 1.5


def _of_experts(
    config: Sizes,
    tokens: float,
    sizes: dict[str, int],
    seconds: Seconds,
    chip: Chip,
    kind: str,
) -> tuple[float, float, float]:
    """Seconds of experts beside their FLOPs: of products, of memory between them, of links.

    A group of rows shares a tile with the next, so that products of few rows per expert take
    longer, and what has no rows of its own in arrays of rows is read and written too.
    """
    experts, layers = config.experts, config.has_experts.count(True)
    if experts.num_experts is None:
        return 0.0, 0.0, 0.0
    (axis,) = _EXPERTS
    parts, vectors = sizes[axis], tokens * config.d_model * _BYTES
    others = math.prod(sizes[x] for x in _axes("experts")) // parts
    shared = (experts.num_experts / (parts * others) - 1) * SHARED_ROWS
    products = 4 * layers * 2 * shared * _expert(config) / (chip.flops or math.inf)
    room = float(parts)
    if dispatch_for(experts.dispatch, parts, experts.per_token, kind) == "all_to_all":
        room = 1 + _AGAIN * min(experts.buffer / others, parts)
        # There and back: forward, again, and backward.
        links = 6 * seconds("all-to-all", experts.per_token * vectors, axis)
    else:  # tokens forward, again, and their results' gradients; sums of both
        links = 3 * seconds("all-gather", parts * vectors, axis)
        links += 2 * seconds("reduce-scatter", parts * vectors, axis)
    moved = _PASSES * room * experts.per_token * vectors
    return products, layers * moved / (chip.bandwidth or math.inf), layers * links
