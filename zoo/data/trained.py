"""Trained tokenizers, kept in the cache: training is the longest part of a start."""

import hashlib
import importlib.metadata
import shutil
from collections.abc import Sequence
from pathlib import Path

from zoo.base import checksums
from zoo.base.files import local_path
from zoo.data import entries
from zoo.data.tokenizer import PRE_TOKENS, BPETokenizer


def save_trained(
    folder: Path, texts: Sequence[str], vocab_size: int, cache_folder: Path | None
) -> None:
    """Write the files of the tokenizer that `BPETokenizer.train` makes of texts to a folder.

    They are kept in `cache_folder`, if it is given, under a hash of the texts and of all else that
    training depends on.
    """
    if cache_folder is None:
        BPETokenizer.train(texts, vocab_size).save(folder)
        return
    cache = local_path(cache_folder, "cache_folder")
    entry = cache / f"tokenizer-{_cache_key(texts, vocab_size)}"
    if entries.is_good(entry):
        ignored = shutil.ignore_patterns(checksums.NAME)
        shutil.copytree(entry, folder, ignore=ignored, dirs_exist_ok=True)
    else:
        tokenizer = BPETokenizer.train(texts, vocab_size)
        entries.write(entry, tokenizer.save)
        tokenizer.save(folder)


def _cache_key(texts: Sequence[str], vocab_size: int) -> str:
    version = importlib.metadata.version("tokenizers")
    digest = hashlib.sha256(f"{version} {PRE_TOKENS} {vocab_size}".encode())
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "big"))  # so that the boundaries count
        digest.update(content)
    return digest.hexdigest()
