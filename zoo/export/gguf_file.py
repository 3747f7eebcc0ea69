"""GGUF, the files of llama.cpp: a model's tensors under its names, numbers and tokenizer."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from zoo.data.tokenizer import Tokenizer
from zoo.export import gguf_tokens
from zoo.export.architectures import Target, notes, numbers, target_of, wave_factors
from zoo.hf.family import Family
from zoo.hf.folder import family_of
from zoo.hf.layouts import LAYER
from zoo.publishing import PublishError
from zoo.publishing.tensors import parameters
from zoo.sharding.placement import gathered
from zoo.transformer.model import Transformer

Type = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
BLOCK = 32  # values that share a scale
logger = logging.getLogger(__name__)
# llama.cpp's names of what it has in other pieces than Hugging Face, whose names the package knows.
_OTHERS = {"blocks.attention.sinks": "ATTN_SINKS.weight"}
_LATENT = {"blocks.attention.wk": "ATTN_K_B.weight", "blocks.attention.wv": "ATTN_V_B.weight"}
_EXPERTS = {"blocks.mlp.bias.value": "FFN_EXP_PROBS_B.bias"} | {
    f"blocks.mlp.{kind}_{part}": f"FFN_{part.upper()}_EXP.{end}"
    for part in ("gate", "up", "down")
    for kind, end in (("w", "weight"), ("b", "bias"))
}


class Part(NamedTuple):
    """A parameter, or its share of one layer, that is a tensor or a part of one."""

    path: str
    layer: int | None


@dataclass(frozen=True)
class Source:
    """A model, and the architecture that it goes out as."""

    model: Transformer
    family: Family
    target: Target
    gguf: ModuleType

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """The parameters by their paths."""
        return parameters(self.model)

    def tensors(self) -> dict[str, list[Part]]:
        """The parts of each tensor, by its name.

        Raises:
            PublishError: the architecture has no place for a parameter.
        """
        constants, config = self.gguf.constants, self.model.config
        arch = {name: x for x, name in constants.MODEL_ARCH_NAMES.items()}[self.target.name]
        known = self.gguf.get_tensor_name_map(arch, config.num_layers)
        layouts = self.family.layouts(self.model, self.family.prefixes[0])
        others = _OTHERS | (_LATENT if config.attention.latent.kv_rank is not None else {})
        others |= _EXPERTS if config.experts.num_experts is not None else {}

        def named(path: str, place: int, layer: int | None) -> str | None:
            if path not in others:
                return known.get_name(layouts[path].name({LAYER: place}), (".weight", ".bias"))
            tensor, _, suffix = others[path].partition(".")
            kind = constants.MODEL_TENSOR[tensor]
            name = f"{constants.TENSOR_NAMES[kind].format(bid=layer)}.{suffix}"
            return name if kind in constants.MODEL_TENSORS[arch] else None

        found: dict[str, list[Part]] = {}
        for path in sorted(self.arrays, key=lambda path: layouts[path].tensor.share):
            layers: Any = layouts[path].layers or range(config.num_layers)
            for place, layer in enumerate(layers if path.startswith("blocks.") else [None]):
                if (name := named(path, place, layer)) is None:
                    raise PublishError(
                        f"llama.cpp's architecture {self.target.name!r} has no place for {path}: "
                        "take the folder of Hugging Face's format to another engine"
                    )
                part = Part(path, None if layer is None else place)
                found.setdefault(name, []).append(part)
        if self.model.head is None and self.target.head:
            found["output.weight"] = [Part("embedding.weight", None)]
        return found

    def shape(self, parts: list[Part]) -> tuple[int, ...]:
        """The shape of a tensor: […, out, in]."""
        shapes = []
        for path, layer in parts:
            shape = self.arrays[path].shape[layer is not None :]
            like = jax.ShapeDtypeStruct(shape, np.float32)
            shapes.append(jax.eval_shape(lambda x, path=path: self._turned(path, x), like).shape)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, parts: list[Part]) -> np.ndarray:
        """A tensor, in float32."""
        read = []
        for path, layer in parts:
            array = self.arrays[path]
            whole: list[Any] = [slice(None)] * array.ndim
            index = whole if layer is None else [layer, *whole[1:]]
            x = np.asarray(gathered(array, tuple(index)), np.float32)
            read.append(self._turned(path, x))
        return np.concatenate(read) if len(read) > 1 else np.ascontiguousarray(read[0])

    def _turned(self, path: str, x: Any) -> Any:
        """A parameter of a layer as llama.cpp has it: [out, in], rotary pairs in its order."""
        config, name = self.model.config, path.rpartition(".")[2]
        if name == "scale" and config.residual.norm.endswith("offset"):
            return x + 1
        if path.startswith("blocks.attention."):
            if config.attention.latent.kv_rank is not None and name in ("wk", "wv"):
                return x.transpose((1, 0, 2) if name == "wk" else (1, 2, 0))
            if name in ("wq_down", "w_down", "w_rotary"):
                return (x[:, self._pairs[-x.shape[1] :]] if name == "w_rotary" else x).T
            if name in ("wq", "wq_up", "wk", "bq", "bk") and self.target.interleaved:
                x = x[..., self._pairs]
            if name in ("wq", "wq_up", "wk", "wv"):
                return x.reshape(x.shape[0], -1).T
            return x.reshape(-1, x.shape[-1]).T if name == "wo" else x.ravel()
        if path == "blocks.shared_gate":
            return x.ravel()
        as_is = x.ndim < 2 or name.startswith("b_") or "embedding" in path
        return x if as_is else x.swapaxes(-1, -2)

    @cached_property
    def _pairs(self) -> np.ndarray:
        """The features of a head, with the two of each rotary pair side by side.

        For latent attention the ones that rotate come last.
        """
        config = self.model.config
        size = config.rotary_size if config.positions.kind == "rotary" else 0
        rotating = np.arange(size).reshape(2, -1).T.ravel()
        parts = [rotating, np.arange(size, config.head_size)]
        return np.concatenate(parts[:: 1 if config.attention.latent.kv_rank is None else -1])


def write(
    path: Path, model: Any, *, name: str, type: Type, tokenizer: Tokenizer | None
) -> list[str]:
    """Write a model as a GGUF file: all of it or nothing.

    Matrices are of `type`, and norms, biases, routers and tables of positions float32. With "q8_0"
    and "q4_0" rows that 32 does not divide are float16, and with "q4_0" the embedding and the head
    are "q8_0". Without a `tokenizer` the file has none: the engine takes and gives ids.

    Returns what the file does otherwise than the model, in sentences.

    Raises:
        PublishError: llama.cpp has no such model, or no such tokenizer; nothing is written.
    """
    gguf = package()
    family = family_of(model)
    if not isinstance(model, Transformer):
        raise PublishError(f"a model of the type {family.model_type!r} can't go out as GGUF")
    source = Source(model, family, target_of(family.model_type, model.config), gguf)
    tensors: dict[str, tuple[tuple[int, ...], Type, Callable[[], np.ndarray]]] = {}
    for key, parts in source.tensors().items():
        shape = source.shape(parts)
        tensors[key] = shape, _kind(key, shape, type), partial(source.read, parts)
    for key, factors in wave_factors(model.config).items():
        tensors[key] = factors.shape, "f32", partial(np.asarray, factors)
    arch = source.target.name
    values: dict[str, Any] = {
        "general.name": name,
        "general.file_type": int(
            gguf.LlamaFileType[f"{'ALL' if type == 'f32' else 'MOSTLY'}_{type.upper()}"]
        ),
    }
    values |= {f"{arch}.{x}": y for x, y in numbers(source.target, model.config).items()}
    described, other = gguf_tokens.describe(tokenizer, model.config, gguf.TokenType)
    if type in ("q8_0", "q4_0"):
        values["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    unfinished = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(None, arch)
    for key, value in {**values, **described}.items():
        add_value(writer, key, value)
    for key, (shape, kind, _) in tensors.items():
        _announce(writer, gguf, key, shape, kind)
    try:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, kind, read in tensors.values():
            values_of = gguf.GGMLQuantizationType[kind.upper()]
            writer.write_tensor_data(gguf.quantize(read(), values_of))
        writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return notes(source.target, model.config) + other


def package() -> ModuleType:
    """The package that writes GGUF.

    Raises:
        PublishError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise PublishError("GGUF is written by a package: pip install 'zoo[gguf]'") from error
    return gguf


def _kind(name: str, shape: tuple[int, ...], type: Type) -> Type:
    """How the values of a tensor are stored."""
    if len(shape) == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or "position" in name:
        return "f32"
    if type not in ("q8_0", "q4_0"):
        return type
    if shape[-1] % BLOCK:
        logger.warning("%s: 32 does not divide its rows of %d, which are float16", name, shape[-1])
        return "f16"
    return "q8_0" if name in ("token_embd.weight", "output.weight") else type


def _announce(writer: Any, gguf: ModuleType, name: str, shape: tuple[int, ...], kind: Type) -> None:
    """Tell the writer of a tensor whose values follow."""
    if kind in ("f32", "f16"):
        dtype = np.dtype(f"float{kind[1:]}")
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
        return
    of_values = gguf.GGMLQuantizationType[kind.upper()]
    of_bytes = gguf.quant_shape_to_byte_shape(shape, of_values)
    writer.add_tensor_info(name, of_bytes, np.dtype(np.uint8), int(np.prod(of_bytes)), of_values)


def add_value(writer: Any, key: str, value: Any) -> None:
    """Give the writer a value of the metadata, in the type of Python's."""
    if key == "tokenizer.chat_template":
        writer.add_chat_template(value)  # several become keys of their own
        return
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
