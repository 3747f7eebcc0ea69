"""Writes hf_quantized/: tiny quantised checkpoints, and what transformers computes from them.

Needs PyTorch, transformers and bitsandbytes, which the tests do not:
`python tests/golden/make_quantized_golden.py`. A folder a method. bitsandbytes' are written by
transformers itself; those of GPTQ and AWQ by the packers here, after the layouts of AutoGPTQ 0.7.1
and AutoAWQ 0.2.9. golden.npz has tokens, the logits of transformers in fp32, and every
eleventh row of some matrices, dequantised as [out, in]: by bitsandbytes, or by the formulas here.
Heads are narrower than any group.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "hf_quantized"
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KEPT = ("layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, np.ndarray]


def plain(**changes: int) -> transformers.LlamaForCausalLM:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(1 + 0.3 * noise if x.ndim == 1 else noise * 1.3 / math.sqrt(x.shape[-1]))
    return model


def linears(model: torch.nn.Module) -> dict[str, Any]:
    return {n: x for n, x in model.named_modules() if "_proj" in n and hasattr(x, "weight")}


def pack(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Integers packed into words of 32 bits along an axis, the first one lowest."""
    x = np.moveaxis(x, axis, -1).astype(np.uint32)
    words = x.reshape(*x.shape[:-1], -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(words.sum(-1, dtype=np.uint32), -1, axis)).view(
        np.int32
    )


def rounded(w: np.ndarray, groups: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    """Codes [in, out], zero points and scales [groups, out] of a matrix [in, out].

    Zero points from 1 on: the first layout of GPTQ has no way to write 0.
    """
    top = 2**bits - 1
    members = [w[groups == i] for i in range(groups.max() + 1)]
    low = np.stack([np.minimum(x.min(0), -1e-3) for x in members])
    high = np.stack([np.maximum(x.max(0), 1e-3) for x in members])
    scales = ((high - low) / (top - 1)).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 1, top)
    codes = np.clip(np.round(w / scales[groups]) + zeros[groups], 0, top)
    return codes.astype(np.int64), zeros.astype(np.int64), scales


def gptq(bits: int, group_size: int, act_order: bool, version: int) -> Callable[..., Any]:
    def convert(w: np.ndarray, name: str, rng: Any) -> tuple[Tensors, np.ndarray]:
        groups = np.arange(w.shape[0]) // group_size
        if act_order:
            groups = groups[rng.permutation(w.shape[0])]
        codes, zeros, scales = rounded(w, groups, bits)
        tensors = {
            f"{name}.qweight": pack(codes, bits, 0),
            f"{name}.qzeros": pack(zeros - (2 - version), bits, 1),
            f"{name}.scales": scales,
            f"{name}.g_idx": groups.astype(np.int32),
        }
        return tensors, (codes - zeros[groups]) * scales[groups].astype(np.float32)

    return convert


def awq(w: np.ndarray, name: str, rng: Any) -> tuple[Tensors, np.ndarray]:
    groups = np.arange(w.shape[0]) // 32
    codes, zeros, scales = rounded(w, groups, 4)
    order = np.arange(w.shape[1]).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
    tensors = {
        f"{name}.qweight": pack(codes[:, order], 4, 1),
        f"{name}.qzeros": pack(zeros[:, order], 4, 1),
        f"{name}.scales": scales,
    }
    return tensors, (codes - zeros[groups]) * scales[groups].astype(np.float32)


def packed_here(folder: Path, convert: Any, described: dict[str, Any], **changes: int) -> Any:
    """The folder of a layout that has no packer on a CPU, and the model of what it holds."""
    model, rng, tensors = plain(**changes), np.random.default_rng(1), {}
    for name, module in linears(model).items():
        w = module.weight.detach().numpy().T
        found, value = convert(w, name, rng)
        tensors |= found
        module.weight.data = torch.from_numpy(np.ascontiguousarray(value.T, np.float32))
    for name, x in model.named_parameters():
        if name.removesuffix(".weight") not in linears(model):
            x.data = x.data.half().float()
            tensors[name] = x.detach().half().numpy()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = model.config.to_diff_dict() | {"dtype": "float16", "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    return model, {name: x.weight.detach().numpy() for name, x in linears(model).items()}


def by_bitsandbytes(folder: Path, width: int, **options: Any) -> Any:
    """The folder as transformers saves it, and the model of what it holds.

    Not the model itself, whose products on a CPU round to bf16, or in int8 the activations too.
    """
    source, sizes = folder.with_name("plain"), {"num_hidden_layers": 1, "intermediate_size": width}
    twin = plain(**sizes)
    twin.save_pretrained(source)
    config = transformers.BitsAndBytesConfig(**options)
    # float32 throughout: bitsandbytes rounds what it dequantises to the model's dtype.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    shutil.rmtree(source)
    for name, x in linears(model).items():
        if config.load_in_4bit:
            # A block per row: on a CPU bitsandbytes 0.50 is wrong where one ends inside of a row.
            state = copy.copy(x.weight.quant_state)
            state.shape = torch.Size((math.prod(state.shape) // state.blocksize, state.blocksize))
            value = bnb.dequantize_4bit(x.weight.data, state).reshape(x.weight.quant_state.shape)
        else:
            value = bnb.int8_vectorwise_dequant(x.weight.data, x.weight.SCB)
        twin.get_submodule(name).weight.data = value
    return twin, {name: x.weight.detach().numpy() for name, x in linears(twin).items()}


def method(bits: int, group_size: int, **fields: Any) -> dict[str, Any]:
    return {"bits": bits, "group_size": group_size, **fields}


GPTQ = {"quant_method": "gptq", "sym": False, "damp_percent": 0.01, "true_sequential": True}
AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True}
CASES: dict[str, Callable[[Path], Any]] = {
    "gptq": lambda folder: packed_here(
        folder, gptq(4, 32, False, 1), method(4, 32, desc_act=False, **GPTQ)
    ),
    "gptq_act_order": lambda folder: packed_here(
        folder,
        gptq(8, 32, True, 2),
        method(8, 32, desc_act=True, checkpoint_format="gptq_v2", **GPTQ),
        num_hidden_layers=1,
    ),
    "awq": lambda folder: packed_here(
        folder, awq, method(4, 32, modules_to_not_convert=None, **AWQ)
    ),
    "nf4": lambda folder: by_bitsandbytes(
        folder, 96, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda folder: by_bitsandbytes(folder, 128, load_in_4bit=True),
    "int8": lambda folder: by_bitsandbytes(folder, 64, load_in_8bit=True),
}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, make in CASES.items():
        model, matrices = make(FOLDER / name)
        tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, 17))
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
        kept = {x: matrices[f"model.{x}"][::11].astype(np.float32) for x in KEPT}
        arrays = {"tokens": tokens.astype(np.int32), "logits": logits, **kept}
        np.savez_compressed(FOLDER / name / "golden.npz", **arrays)
        size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
        print(f"{name:15} {size:8,} bytes, logits to {np.abs(logits).max():.1f}")


if __name__ == "__main__":
    main()
