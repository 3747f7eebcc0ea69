"""Folders of models for tests: tokenizers, packages, bits that flip, and what a save fetches."""

import importlib.util
import json
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import processors

from zoo.data.tokenizer import BPETokenizer

SPECIAL = ("<bos>", "<eos>", "<eot>", "<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def flip_bit(path, at=None, bit=2):
    """Change a bit of a file, in its midst unless a place is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    path.write_bytes(content)


def write_tokenizer(folder, *, begins=True, config=(), template=None, **beside):
    """A folder like a published model's: byte pairs, special tokens, and JSON files beside them.

    Returns the ids of the special tokens by their names.
    """
    inner = BPETokenizer.train(["some text to train on, 12 times"] * 9, 300).tokenizer
    inner.add_special_tokens(list(SPECIAL[:-2]))
    inner.add_tokens(list(SPECIAL[-2:]))  # no special ones, as Qwen's
    ids = {token: inner.token_to_id(token) for token in SPECIAL}
    if begins:  # as Llama's
        first = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
        blanks = processors.ByteLevel(trim_offsets=True)
        inner.post_processor = processors.Sequence([blanks, first])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<eot>", "special": True}
    names = {"bos_token": "<bos>", "eos_token": end, "pad_token": "<pad>"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    beside = {"tokenizer_config": {**names, **dict(config)}, **beside}
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return ids


def write_esm(folder: Path) -> None:
    """A folder like one of ESM-2's, of random weights and small: the example project's."""
    path = Path(__file__).parents[1] / "docs" / "examples" / "proteins" / "proteins.py"
    spec: Any = importlib.util.spec_from_file_location("proteins", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_base(folder)


def write_package(folder, module, program, entries):
    """Install a package of one module, of that program, with these entry points, into a folder."""
    (folder / f"{module}.py").write_text(program)
    installed = folder / f"{module}-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(entries)


class FetchedSizes:
    """Watches what a save fetches from the devices by the `gathered` that a module calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any):
        self.count = self.largest = self.most_at_once = self._alive = 0
        fetch = module.gathered

        def gathered(array: jax.Array, index: Any) -> np.ndarray:
            fetched = np.array(fetch(array, index))
            self.count += 1
            self.largest = max(self.largest, fetched.nbytes)
            self._alive += fetched.nbytes
            self.most_at_once = max(self.most_at_once, self._alive)
            weakref.finalize(fetched, self._free, fetched.nbytes)
            return fetched

        monkeypatch.setattr(module, "gathered", gathered)

    def _free(self, size: int) -> None:
        self._alive -= size
