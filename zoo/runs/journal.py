"""A file of results that grows by a line per batch, from which a long computation resumes."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zoo.base import files

Values = list[Any]  # in JSON


class ResultsError(ValueError):
    """A file of results that is damaged, or of something else."""


class Journal:
    """The results so far of a computation with this fingerprint, by their index.

    Where there is a `path`, process 0 keeps them there, and each process gets those of an earlier
    start that was stopped. `fingerprint` has all that results depend on, by name, in JSON.

    Raises:
        ResultsError: the file is damaged, or of another fingerprint.
    """

    def __init__(self, path: Path | None, fingerprint: Mapping[str, Any]):
        self.path = path
        self.known: dict[int, Values] = {}
        if path is None:
            return
        found: dict[str, Any] = {}
        if jax.process_index() == 0:
            try:
                found["known"] = [*_open(path, fingerprint).items()]
            except ResultsError as error:  # which the other processes wait for
                found["error"] = str(error)
        found = from_first(found)
        if "error" in found:
            raise ResultsError(found["error"])
        self.known = dict(found["known"])

    def add(self, batch: Mapping[int, Values]) -> None:
        """Keep the results of a batch; they are on the disk when this returns."""
        self.known |= batch
        if self.path is None or jax.process_index() > 0:
            return
        with files.named(self.path), self.path.open("ab") as file:
            file.write(_line({"results": {str(at): values for at, values in batch.items()}}))
            file.flush()
            files.sync(self.path)


def _open(path: Path, fingerprint: Mapping[str, Any]) -> dict[int, Values]:
    """The results in a file, which begins with its fingerprint; a torn last line is cut off."""
    header = _line({"fingerprint": dict(fingerprint)})
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1] or data
    if header.startswith(data):  # none, or killed in its first line
        files.replace(path, lambda temporary: temporary.write_bytes(header))
        return {}
    known: dict[int, Values] = {}
    for number, line in enumerate(whole.splitlines(keepends=True), start=1):
        content = _content(path, number, line)
        if number == 1:
            _check_fingerprint(path, content, fingerprint)
            continue
        known |= {int(at): values for at, values in content["results"].items()}
    if whole != data:
        files.replace(path, lambda temporary: temporary.write_bytes(whole))
    return known


def _line(content: dict[str, Any]) -> bytes:
    """A line with a checksum of what is in it."""
    text = json.dumps(content)
    return json.dumps({"crc32": zlib.crc32(text.encode()), **content}).encode() + b"\n"


def _content(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
        if _line({name: x for name, x in content.items() if name != "crc32"}) != line:
            raise ValueError("its checksum is another")
        if ("fingerprint" if number == 1 else "results") not in content:
            raise ValueError("it is no such line")
        return content
    except (ValueError, AttributeError) as error:
        what, then = "is damaged", "remove the line, to compute what is in it again"
        if number == 1:
            what, then = "is damaged, or is none", "give another --out, or move it away"
        raise ResultsError(
            f"{path}, line {number}: this file of results {what} ({error}): {then}"
        ) from error


def _check_fingerprint(path: Path, content: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    found = content["fingerprint"]
    if differing := [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]:
        name = differing[0]
        raise ResultsError(
            f"{path} has results with {name}={found.get(name)!r}, and this evaluation has "
            f"{wanted.get(name)!r}: give another --out, or remove the file"
        )


def from_first(content: dict[str, Any]) -> dict[str, Any]:
    """The content of process 0, in every process."""
    if jax.process_count() == 1:
        return content
    data = np.frombuffer(json.dumps(content).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    mine = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return json.loads(sent.astype(np.uint8).tobytes())
