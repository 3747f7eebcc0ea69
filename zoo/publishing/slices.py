"""Slices of tensors in safetensors files, read with bounded memory."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from zoo.publishing.errors import PublishError

_MAPPED_BYTES = 64 * 2**20


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """A safetensors file, open for reading; a PublishError if it is missing or damaged."""
    with _explained(path), safetensors.safe_open(path, "numpy") as opened:
        yield opened


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise PublishError(f"{path} is missing") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise PublishError(
            f"{path} is damaged, or no safetensors file: {error}. Get it again from its source"
        ) from error


@contextlib.contextmanager
def slice_reader() -> Iterator[Callable[[Path, str, Any], np.ndarray]]:
    """A context with `read(path, name, slices)`, which returns a copy of a slice of a tensor.

    Files are mapped into memory, and pages that were read count as the process's memory while the
    file is open: it is opened again after every 64 MiB.
    """
    files: dict[Path, tuple[contextlib.ExitStack, Any]] = {}
    num_read: dict[Path, int] = {}

    def read(path: Path, name: str, slices: Any) -> np.ndarray:
        if num_read.get(path, 0) >= _MAPPED_BYTES:
            files.pop(path)[0].close()
            num_read[path] = 0
        if path not in files:
            stack = contextlib.ExitStack()
            files[path] = (stack, stack.enter_context(open_file(path)))
        file = files[path][1]
        with _explained(path):
            part = file.get_slice(name)
            # get_slice refuses an empty array.
            found = file.get_tensor(name) if 0 in part.get_shape() else part[slices]
        num_read[path] = num_read.get(path, 0) + found.nbytes
        return found

    try:
        yield read
    finally:
        for stack, _ in files.values():
            stack.close()
