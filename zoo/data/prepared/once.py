"""Folders of a cache, each made by one process of the machine while the others wait."""

import fcntl
from collections.abc import Callable
from pathlib import Path

from zoo.common import files


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, which `make(partial)` fills unless it is there: one that a kill left partly too.

    It gets its name when it is whole. A process that comes while another one makes it waits.
    """
    if folder.exists():
        return folder
    files.make_folder(folder.parent, "data.cache")
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its owner's end frees it
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            partial.mkdir(exist_ok=True)
            make(partial)
            files.sync_all(partial)
            partial.rename(folder)
            files.sync(folder.parent)
    return folder
