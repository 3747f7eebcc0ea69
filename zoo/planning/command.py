"""`python -m zoo plan`: will it fit, how fast can it be, and what bounds it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.common.configuration import check, require
from zoo.data.datasets import HostBatch, Row, SeededDataset, check_batch_size
from zoo.decoding.decoder import decoder_of
from zoo.nn.attention.attention import Implementation
from zoo.nn.precision import Precision
from zoo.nn.products import Kind
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.remat import Policy
from zoo.nn.stateful import cast
from zoo.planning import flops, report
from zoo.planning.job import Estimate, Job, make_estimate
from zoo.planning.meshes import candidates
from zoo.planning.search import fastest, suggest
from zoo.planning.targets import Target, prepare
from zoo.publishing import PublishError, models
from zoo.publishing.models import with_paths
from zoo.publishing.shelf import find
from zoo.publishing.tensors import quantized_skeleton
from zoo.sharding.axes import is_parameter
from zoo.training import losses, optimizers
from zoo.training.description import Training
from zoo.training.flags import Flags
from zoo.training.state import Pretrained
from zoo.transformer.config import Config as Sizes
from zoo.transformer.model import Transformer
from zoo.transformer.part_configs import AttentionConfig, ExpertsConfig, MixerConfig, ResidualConfig
from zoo.transformer.rotary import PositionsConfig
from zoo.wrappers import lora
from zoo.wrappers.lora import Config as LoraConfig

SEARCH = "search"
Base = Literal["stored", "int8", "int4", "nf4"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Compile a train step for devices you need not have: will it fit, and what bounds it?"""

    model: tyro.conf.Positional[str]
    """Published size (llama3-8b, -70b, qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b, -30b-a3b,
    mixtral-8x7b, qwen3-next-80b-a3b or qwen3.5-27b), a name on the shelf, a model's folder, or an
    id on the Hugging Face hub, of which no weights are fetched."""
    target: str
    """TPU slice, such as v5e:1x1, v5e:4x4, v5p:4x4x4 or v6e:16x16 (v4 too); or a number of GPUs, by
    name or by memory, or of virtual CPU devices, such as rtx4090:1, h200:8, 24GiB:1 or cpu:8.
    Several slices or machines: as 2xv5e:4x4."""
    method: Literal["full", "lora"] = "full"
    """Train the parameters themselves, or adapters of low rank beside them, which stay as they are
    in memory."""
    base: Base = "stored"
    """Of lora: the form of the matrices in memory, as stored (a published size in bf16), or in 8 or
    4 bits."""
    mesh: str = sharding.storage_mesh(-1)
    """Devices by axis, such as fsdp=8,tensor=2; -1 takes the remaining ones. With "search" the
    fastest, with the flags, remat, microbatches and kernel to go with it: each is compiled."""
    batch_size: int | None = None
    """Rows of a batch, on all devices together; one per part of the batch if not given."""
    seq_len: int = 4096
    """Tokens of a row."""
    remat: Policy = "full"
    """Rematerialisation in the backward pass: none, dots, dots_no_batch, full, or of names."""
    precision: Precision = "bf16"
    """Dtype of activations and products; master weights are fp32. int8: bf16, with the products of
    blocks in int8."""
    accumulate: int = 1
    """Microbatches per batch, computed one after the other."""
    sequence_parallel: bool = False
    """Split activations along the sequence between the tensor-parallel parts."""
    kernel: Implementation = "auto"
    """Attention kernel, as of recipes.lm."""
    xla: Flags = "default"
    """Set of the compiler's flags: no_windows or scatter_layouts (TPUs)."""
    optimizer: Literal["adamw", "adam", "lion", "adafactor", "muon"] = "adamw"
    """Update rule."""
    lora: LoraConfig = LoraConfig()
    suggest: bool = True
    """Where it does not fit, compile changes until one of them fits."""

    def __post_init__(self) -> None:
        check(self)
        require(
            self.base == "stored" or self.method == "lora",
            f"base={self.base!r}: matrices of few bits are not trained; add --method lora",
        )


def main(config: Annotated[Config, tyro.conf.arg(name="")]) -> None:
    """Compile a train step for devices you need not have: will it fit, and what bounds it?

    For example: python -m zoo plan llama3-8b --target v5e:4x4 --seq-len 8192
    """
    folder = locate(config.model)  # before a compiler for the target is looked for
    target = prepare(config.target)
    model, reason = skeleton_of(config, folder), ""
    if config.mesh == SEARCH:
        estimate, reason = search(config, model, target)
    else:
        job = make_job(config, model, target)
        print(f"compiling for {target.name} …", flush=True)
        estimate = make_estimate(job, target)
    report.show(estimate)
    if reason:
        print(reason)
    if config.suggest and not estimate.memory.fits:
        suggest(estimate, lighter(config, folder, target))


class TokenRows(SeededDataset):
    """Rows of tokens with nothing in them, to compile a step for."""

    def __init__(self, batch_size: int, seq_len: int):
        super().__init__(batch_size, seed=0, shuffle=False)
        self.buckets = (seq_len,)
        self.batches_per_epoch = 1

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
        return {name: ((bucket,), dtype) for name, dtype in dtypes.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        raise NotImplementedError("these rows have shapes alone")


def locate(model: str) -> Path | None:
    """The folder of a model, without its weights if the hub has it; None for a published size.

    Raises:
        PublishError: neither a published size nor a model.
    """
    if model.lower() in SIZES:
        return None
    try:
        return find(model, weights=False)
    except PublishError as error:
        sizes = ", ".join(SIZES)
        raise PublishError(f"{error}\n{model!r} is no published size either: {sizes}") from error


def skeleton_of(config: Config, folder: Path | None) -> PyTree:
    """The skeleton of the model to train, as it is in memory before that; nothing is loaded.

    Raises:
        PublishError: a folder that is no model.
        ValueError: a model that learns no next token, or of fewer positions than a row.
    """
    quantize = None if config.base == "stored" else config.base
    if folder is None:
        return published(config.model, quantize=quantize)
    model = models.skeleton(folder, quantize=quantize, weights=False)
    decoder_of(model).check_decoder(config.seq_len)
    return model


def make_job(config: Config, model: PyTree, target: Target) -> Job:
    """The job of a training that begins with a model of this skeleton."""
    mesh = sharding.make_mesh(config.mesh, target.devices())
    rows = config.batch_size or sharding.num_batch_parts(mesh) * config.accumulate
    check_batch_size(rows, mesh, config.accumulate)
    is_full = config.method == "full"
    adapters = config.lora if is_full else with_paths(config.lora, model)

    def make_model(key: Key[Array, ""], model: PyTree) -> PyTree:
        return model if is_full else lora.adapt(model, adapters, key=key)

    trained = eqx.filter_eval_shape(make_model, jax.random.key(0), model)
    training = Training(
        make_model=make_model,
        pretrained=Pretrained(model, load=_nothing),
        trainable=None if is_full else lora.trainable,
        loss_fn=losses.next_token,
        optimizer=optimizers.make_optimizer(optimizers.Config(name=config.optimizer), steps=10_000),
        data=TokenRows(rows, config.seq_len),
        evaluate=lambda model, whole: {},  # nothing is trained
        flops_per_token=flops.per_token(trained, config.seq_len),
        remat=config.remat,
        remat_flag="--remat",
    )
    return Job(
        training=training,
        mesh=config.mesh,
        precision=config.precision,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        remat=config.remat,
        kernel=None if config.kernel == "auto" else config.kernel,
        xla=config.xla,
    )


def search(config: Config, model: PyTree, target: Target) -> tuple[Estimate, str]:
    """The fastest settings of a training of a transformer, as an estimate, with the reason.

    Raises:
        ValueError: another model, a target without published peaks, or no mesh that fits.
    """
    if not isinstance(model, Transformer) or target.chip.flops is None:
        raise ValueError(
            f"mesh={SEARCH!r} compares the steps of a transformer by a chip's published peaks; "
            f"name a mesh for {config.model} on {target.name}"
        )
    rows = config.batch_size or target.num_devices * config.accumulate
    parameters = sum(x.size for x in jax.tree.leaves(model) if is_parameter(x))
    needed = flops.per_token(model, config.seq_len) or 0.0
    work = needed * rows * config.seq_len * (4 / 3 if config.remat == "full" else 1)
    found = candidates(
        model.config, parameters, work, rows // config.accumulate, config.seq_len, target
    )
    given = dataclasses.replace(config, batch_size=rows, mesh=sharding.storage_mesh(-1))
    return fastest(found, make_job(given, model, target), target)


def lighter(config: Config, folder: Path | None, target: Target) -> Iterator[tuple[str, Job]]:
    """Trainings that keep less in memory, by their flags: adapters, on bases of ever fewer bits."""
    bases: list[Base] = ["stored", "int8", "int4"]
    done = bases.index(config.base) + 1 if config.base in bases else len(bases)
    for base in bases[done if config.method == "lora" else 0 :]:
        changed = dataclasses.replace(config, method="lora", base=base)
        flags = "--method lora" + f" --base {base}" * (base != "stored")
        yield flags, make_job(changed, skeleton_of(changed, folder), target)


def _nothing() -> PyTree:
    raise NotImplementedError("a plan loads no weights")


# --- Published sizes -----------------------------------------------------------------------------

# From the `config.json` of each model on the Hugging Face hub: meta-llama/Meta-Llama-3-8B and -70B
# (Grattafiori et al. 2024), Qwen/Qwen3-0.6B to -32B and -30B-A3B (Yang et al. 2025),
# mistralai/Mixtral-8x7B-v0.1 (Jiang et al. 2024), and Qwen/Qwen3-Next-80B-A3B-Instruct; and the
# model card of Qwen/Qwen3.5-27B, its part for text.
_LLAMA3 = Sizes(
    vocab_size=128_256,
    max_seq_len=8192,
    attention=AttentionConfig(num_kv_heads=8),
    positions=PositionsConfig(theta=500_000.0),
    residual=ResidualConfig(norm_eps=1e-5),
)
_QWEN3 = Sizes(
    vocab_size=151_936,
    max_seq_len=40_960,
    attention=AttentionConfig(num_kv_heads=8, head_dim=128, qk_norm="per_head"),
    positions=PositionsConfig(theta=1_000_000.0),
)


def _sized(
    base: Sizes, d_model: int, layers: int, heads: int, d_ff: int, *, tied: bool = False
) -> Sizes:
    return dataclasses.replace(
        base, d_model=d_model, num_layers=layers, num_heads=heads, d_ff=d_ff, tie_embeddings=tied
    )


def _hybrid(
    width: int, layers: int, d_ff: int, *, num_heads: int, num_kv_heads: int, value_heads: int
) -> Sizes:
    """Three gated delta nets to one attention, as Qwen3-Next has them."""
    delta = RecurrenceConfig(num_heads=value_heads, num_key_heads=16, key_dim=128, value_dim=128)
    return dataclasses.replace(
        _sized(_QWEN3, width, layers, num_heads, d_ff),
        mixer=MixerConfig((*3 * ("gated_deltanet",), "attention"), delta),
        attention=dataclasses.replace(
            _QWEN3.attention, num_kv_heads=num_kv_heads, head_dim=256, output_gate=True
        ),
        positions=PositionsConfig(theta=10_000_000.0, rotary_fraction=0.25),
        residual=dataclasses.replace(_QWEN3.residual, norm="rms_offset"),
    )


SIZES: dict[str, Sizes] = {
    "llama3-8b": _sized(_LLAMA3, 4096, 32, 32, 14_336),
    "llama3-70b": _sized(_LLAMA3, 8192, 80, 64, 28_672),
    "qwen3-0.6b": _sized(_QWEN3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 12_288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 17_408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 25_600),
    "qwen3-30b-a3b": dataclasses.replace(
        _sized(_QWEN3, 2048, 48, 32, 768),
        attention=dataclasses.replace(_QWEN3.attention, num_kv_heads=4),
        experts=ExpertsConfig(num_experts=128, per_token=8),
    ),
    "mixtral-8x7b": dataclasses.replace(
        _sized(_LLAMA3, 4096, 32, 32, 14_336),
        vocab_size=32_000,
        max_seq_len=32_768,
        positions=PositionsConfig(theta=1_000_000.0),
        experts=ExpertsConfig(num_experts=8, per_token=2),
    ),
    "qwen3-next-80b-a3b": dataclasses.replace(
        _hybrid(2048, 48, 512, num_heads=16, num_kv_heads=2, value_heads=32),
        experts=ExpertsConfig(num_experts=512, per_token=10, num_shared=1, shared_gate=True),
    ),
    "qwen3.5-27b": dataclasses.replace(
        _hybrid(5120, 64, 17_408, num_heads=24, num_kv_heads=4, value_heads=48),
        vocab_size=248_320,
    ),
}


def published(name: str, *, quantize: Kind | None = None) -> PyTree:
    """The skeleton of a model of a published size, in bf16 as it is published, or quantised."""

    def make(key: Key[Array, ""]) -> Transformer:
        return cast(Transformer(SIZES[name.lower()], key=key), jnp.bfloat16)

    return quantized_skeleton(eqx.filter_eval_shape(make, jax.random.key(0)), quantize)
