"""metrics.jsonl at an address: appended by objects that are never rewritten.

`metrics/<first step>-<n>.jsonl` is the n-th part. It comes after the lines of the parts before it
whose steps are below its first step: what a killed run had written beyond the step that is
resumed is dropped so, as in the file.
"""

import json
import re
from pathlib import Path

from zoo.runs.remote.store import Store

FOLDER = "metrics"


class MetricParts:
    """The lines of metrics.jsonl that are at the address, and the next part of them."""

    def __init__(self, store: Store):
        """Read the parts that are there."""
        self._store = store
        parts = sorted(
            (int(found[2]), int(found[1]), name)
            for name in store.names(FOLDER)
            if (found := re.fullmatch(r"(\d+)-(\d+)\.jsonl", name))
        )
        self._next = parts[-1][0] + 1 if parts else 0
        texts = store.read_all([f"{FOLDER}/{name}" for *_, name in parts])
        self.lines: list[bytes] = []
        """The lines of the file as the parts make it up."""
        for (_, first, _), text in zip(parts, texts, strict=True):
            self.lines = _before(self.lines, first) + text.splitlines(keepends=True)

    def append(self, lines: list[bytes]) -> None:
        """Write the lines of the file that the parts have not as the next part."""
        same = 0
        while same < min(len(lines), len(self.lines)) and lines[same] == self.lines[same]:
            same += 1
        kept, dropped = lines[:same], self.lines[same:]
        if dropped:
            first = min(map(_step, dropped))
            kept = _before(kept, first)
        else:
            first = _step(kept[-1]) + 1 if kept else 0
        new = lines[len(kept) :]
        if new or dropped:
            self._store.write(f"{FOLDER}/{first}-{self._next}.jsonl", b"".join(new))
            self._next, self.lines = self._next + 1, lines


def read_lines(path: Path) -> list[bytes]:
    """The whole lines of a file; none if it is missing."""
    content = path.read_bytes() if path.exists() else b""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _before(lines: list[bytes], first: int) -> list[bytes]:
    return [line for line in lines if _step(line) < first]


def _step(line: bytes) -> int:
    return json.loads(line)["step"]
