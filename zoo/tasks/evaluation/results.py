"""The results of a task's requests in a file that grows by a line per batch, and is read again."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zoo.base import files
from zoo.tasks.evaluation.scorer import LogLikelihood

Result = LogLikelihood | str


class ResultsError(ValueError):
    """A file of results that is damaged, or of something else."""


class Results:
    """The results so far of a task with this fingerprint, by the index of their request.

    Where there is a `path`, process 0 keeps them there, and each process gets those of an earlier
    evaluation that was stopped. `fingerprint` has all that results depend on, by name, in JSON.

    Raises:
        ResultsError: the file is damaged, or of another fingerprint.
    """

    def __init__(self, path: Path | None, fingerprint: Mapping[str, Any]):
        self.path = path
        self.known: dict[int, Result] = {}
        if path is None:
            return
        found: dict[str, Any] = {}
        if jax.process_index() == 0:
            try:
                found["known"] = [[at, *_plain(x)] for at, x in _open(path, fingerprint).items()]
            except ResultsError as error:  # which the other processes wait for
                found["error"] = str(error)
        found = _from_first(found)
        if "error" in found:
            raise ResultsError(found["error"])
        self.known = {at: _result(values) for at, *values in found["known"]}

    def add(self, batch: Mapping[int, Result]) -> None:
        """Keep the results of a batch; they are on the disk when this returns."""
        self.known |= batch
        if self.path is None or jax.process_index() > 0:
            return
        with files.named(self.path), self.path.open("ab") as file:
            file.write(_line({"results": {str(at): _plain(x) for at, x in batch.items()}}))
            file.flush()
            files.sync(self.path)


def _open(path: Path, fingerprint: Mapping[str, Any]) -> dict[int, Result]:
    """The results in a file, which begins with its fingerprint; a torn last line is cut off."""
    header = _line({"fingerprint": dict(fingerprint)})
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:  # none, or killed in its first line
        files.replace(path, lambda temporary: temporary.write_bytes(header))
        return {}
    known: dict[int, Result] = {}
    for number, line in enumerate(whole.splitlines(keepends=True), start=1):
        content = _content(path, number, line)
        if number == 1:
            _check_fingerprint(path, content, fingerprint)
            continue
        known |= {int(at): _result(values) for at, values in content["results"].items()}
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
        raise ResultsError(
            f"{path}, line {number}: this file of results is damaged ({error}): remove it to "
            "evaluate again, or the line alone, unless it is the first, to keep the others"
        ) from error


def _check_fingerprint(path: Path, content: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    found = content["fingerprint"]
    if differing := [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]:
        name = differing[0]
        raise ResultsError(
            f"{path} has results with {name}={found.get(name)!r}, and this evaluation has "
            f"{wanted.get(name)!r}: give another --out, or remove the file"
        )


def _plain(result: Result) -> list[Any]:
    return [result] if isinstance(result, str) else [*result]


def _result(values: list[Any]) -> Result:
    return values[0] if len(values) == 1 else LogLikelihood(*values)


def _from_first(content: dict[str, Any]) -> dict[str, Any]:
    """What process 0 has, in every process."""
    if jax.process_count() == 1:
        return content
    data = np.frombuffer(json.dumps(content).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    mine = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return json.loads(sent.astype(np.uint8).tobytes())
