"""Entries of the cache folder: folders with checksums, put in place whole."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from zoo.base import checksums, files

logger = logging.getLogger(__name__)


def is_good(entry: Path) -> bool:
    """Whether an entry is there and undamaged; a damaged one is warned of."""
    if not entry.exists():
        return False
    if problems := checksums.problems(entry):
        logger.warning("the cache entry %s is replaced: %s", entry, "; ".join(problems))
    return not problems


def write(entry: Path, make: Callable[[Path], object]) -> None:
    """Put what `make(folder)` writes in place by a rename, so that no process sees part of it."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with files.unfinished(entry) as temporary:
        new, old = temporary / "new", temporary / "old"
        new.mkdir()
        make(new)
        checksums.write(new)
        with contextlib.suppress(OSError):  # another process may be doing the same
            if entry.exists() and checksums.problems(entry):
                entry.rename(old)
            new.rename(entry)  # fails where another process was faster
