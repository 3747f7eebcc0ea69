"""`python -m zoo plan`: will it fit, how fast can it be, and what bounds it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import equinox as eqx
import jax
import numpy as np
import tyro
from jaxtyping import Array, Key, PyTree

from zoo import sharding
from zoo.common.configuration import check, require
from zoo.data.datasets import HostBatch, Row, SeededDataset, check_batch_size
from zoo.decoding.decoder import decoder_of
from zoo.nn.attention.attention import Implementation
from zoo.nn.precision import Precision
from zoo.nn.remat import Policy
from zoo.planning import flops, report
from zoo.planning.job import Estimate, Job, device_bytes, make_estimate
from zoo.planning.meshes import candidates
from zoo.planning.search import fastest, suggest
from zoo.planning.sizes import NUM_CLASSES, SIZES, published
from zoo.planning.targets import Target, prepare
from zoo.publishing import PublishError, models
from zoo.publishing.models import with_paths
from zoo.publishing.shelf import find
from zoo.publishing.tensors import num_parameters
from zoo.training import losses, optimizers
from zoo.training.compiled import Flags
from zoo.training.description import Training
from zoo.training.state import Pretrained, trained_leaves
from zoo.transformer.model import Transformer
from zoo.transformer.vision import VisionConfig, VisionTransformer
from zoo.wrappers import lora
from zoo.wrappers.lora import Config as LoraConfig

SEARCH = "search"
Base = Literal["stored", "int8", "int4", "nf4"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Compile a train step for devices you need not have: will it fit, and what bounds it?"""

    model: tyro.conf.Positional[str]
    """Published size (llama3-8b, -70b, qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b, -30b-a3b,
    -235b-a22b, mixtral-8x7b, qwen3-next-80b-a3b or qwen3.5-27b; vit-s16, -b16 or -l16), a name on
    the shelf, a model's folder, or an id on the Hugging Face hub, of which no weights are fetched.
    A vision transformer classifies, into 1,000 classes where it has no head."""
    target: str
    """TPU slice, such as v5e:1x1, v5e:4x4, v5p:4x4x4 or v6e:16x16 (v4 too); or a number of GPUs, by
    name or by memory, or of virtual CPU devices, such as rtx4090:1, h200:8, 24GiB:1 or cpu:8.
    Several slices or machines: 2xv5e:4x4."""
    method: Literal["full", "lora"] = "full"
    """Train the parameters themselves, or adapters of low rank beside them, which stay as they are
    in memory."""
    base: Base = "stored"
    """For lora: the form of the matrices in memory, as stored (a published size in bf16), or in 8
    or 4 bits."""
    mesh: str = sharding.storage_mesh(-1)
    """Devices by axis, such as fsdp=8,tensor=2; -1 takes the remaining ones. "search" finds the
    fastest, with the flags, remat, microbatches and kernel to go with it, by compiling each."""
    batch_size: int | None = None
    """Rows of a batch, on all devices together; one per part of the batch if not given."""
    seq_len: int = 4096
    """Tokens of a row; a picture has those of the model's image size."""
    remat: Policy = "full"
    """Rematerialisation in the backward pass: none, dots, dots_no_batch, full, or names."""
    precision: Precision = "bf16"
    """Dtype of activations and products; master weights are fp32. int8: bf16, with the products of
    blocks in int8."""
    accumulate: int = 1
    """Microbatches per batch, computed one after the other."""
    sequence_parallel: bool = False
    """Split activations along the sequence between the tensor-parallel parts."""
    kernel: Implementation = "auto"
    """Attention kernel, as in recipes.lm."""
    xla: Flags = "default"
    """Set of the compiler's flags: no_windows, scatter_layouts or gathers (TPUs)."""
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


class PictureRows(TokenRows):
    """Pictures and their classes, likewise."""

    unit = "examples"

    def __init__(self, batch_size: int, config: VisionConfig):
        super().__init__(batch_size, config.num_tokens)
        self._shape = (config.image_size, config.image_size, config.channels)

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        of_row: Row = {"labels": ((), np.int32), "weights": ((), np.float32)}
        return {"inputs": (self._shape, np.float32), **of_row}


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
        ValueError: a model that learns neither classes of pictures nor the next token, or one of
            fewer positions than a row.
    """
    quantize = None if config.base == "stored" else config.base
    if folder is None:
        return published(config.model, quantize=quantize)
    model = models.skeleton(folder, quantize=quantize, weights=False)
    if isinstance(model, VisionTransformer):
        with_head = lambda key, model: model.with_head(NUM_CLASSES, key=key)  # noqa: E731
        is_headless = model.head is None
        return eqx.filter_eval_shape(with_head, jax.random.key(0), model) if is_headless else model
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
    data, loss_fn = TokenRows(rows, config.seq_len), losses.next_token
    if isinstance(model, VisionTransformer):
        data, loss_fn = PictureRows(rows, model.config), losses.classification
    training = Training(
        make_model=make_model,
        pretrained=Pretrained(model, load=_nothing),
        trainable=None if is_full else lora.trainable,
        loss_fn=loss_fn,
        optimizer=optimizers.make_optimizer(optimizers.Config(name=config.optimizer), steps=10_000),
        data=data,
        evaluate=lambda model, whole: {},  # nothing is trained
        flops_per_token=flops.per_unit(trained, config.seq_len),
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
    if not isinstance(model, Transformer | VisionTransformer) or target.chip.flops is None:
        raise ValueError(
            f"mesh={SEARCH!r} compares the steps of a transformer by a chip's published peaks; "
            f"name a mesh for {config.model} on {target.name}"
        )
    rows = config.batch_size or target.num_devices * config.accumulate
    given = dataclasses.replace(config, batch_size=rows, mesh=sharding.storage_mesh(-1))
    job = make_job(given, model, target)
    state = job.training.blueprint(jax.random.key(0), mesh=None).skeleton
    trained = lambda model: trained_leaves(model, job.training.trainable)  # noqa: E731
    chosen = eqx.filter_eval_shape(trained, state.model)
    held = device_bytes((state, eqx.partition(state.model, chosen)[0]))  # gradients are as large
    if isinstance(model, VisionTransformer):
        parts, length, units = model.config.parts, model.config.num_tokens, 1
    else:
        parts, length, units = model.config, config.seq_len, config.seq_len
    needed = flops.per_unit(model, config.seq_len) or 0.0
    work = needed * rows * units * (4 / 3 if config.remat == "full" else 1)
    count, rows = num_parameters(model), rows // config.accumulate
    return fastest(candidates(parts, count, held, work, rows, length, target), job, target)


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
