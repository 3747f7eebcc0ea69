"""Files and folders: their names, and local writes that survive a power cut."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

Location: TypeAlias = Any  # a Path, or a upath.UPath: see `zoo.common.store`


class AddressError(ValueError):
    """An address that cannot be read or written, with the reason and what to do about it."""


def scheme_of(path: object) -> str | None:
    """The scheme of an address, in lower case; None for a local path."""
    match = re.match(r"([A-Za-z][\w+.-]+):/+", str(path))
    return match[1].lower() if match else None


def is_remote(path: object) -> bool:
    """Whether a path or location is an address."""
    return scheme_of(path) not in (None, "file")


def local_path(path: str | os.PathLike[str], name: str) -> Path:
    """The path, with `~` as the home folder.

    Raises:
        ValueError: an address `scheme://…`; the message names the field `name`.
    """
    # `Path` makes one slash of the two.
    if remote := re.match(r"([A-Za-z][\w+.-]*):/+(.*)", os.fspath(path), re.DOTALL):
        raise ValueError(
            f"{name}='{remote[1]}://{remote[2]}': only local files and folders can be read and "
            "written; copy it here, or mount it, and give the local path"
        )
    return Path(os.path.expanduser(path))


def make_folder(path: Path, name: str) -> None:
    """Make a folder, and those above it, if they are missing.

    Raises:
        ValueError: a file is in the place of one of them; the message names the field `name`.
        OSError: they cannot be made, as on a read-only disk; a note names the field.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        above = (path, *path.parents)
        file = next(place for place in above if os.path.lexists(place) and not place.is_dir())
        raise ValueError(
            f"{name}='{path}': {file} is a file, and has to be a folder; move it away, or give "
            "another path"
        ) from None
    except OSError as error:
        error.add_note(f"{name}='{path}': give a folder that can be made")
        raise


def inside(folder: Location, name: Any, listing: object) -> Location:
    """The place in `folder` of a name from outside, such as one in a listing or a file.

    A name is relative, and its parts are between single slashes: no ".", "..", backslash, NUL or
    drive. In a local folder no link may lead to a folder elsewhere.

    Raises:
        AddressError: another name; the message says which, and that `listing` has it.
    """
    reason = (
        "names are relative, with single slashes, and without '.', '..', backslashes, NUL, drives"
    )
    parts = name.split("/") if isinstance(name, str) else [""]
    is_plain = not {"", ".", ".."} & {*parts} and not _TRICKS.match(name)
    if is_plain and not is_remote(folder) and leaves(folder, (folder / name).parent):
        is_plain, reason = False, f"a link leads to {os.path.realpath((folder / name).parent)}"
    if not is_plain:
        raise AddressError(
            f"{listing} lists {name!r}, outside of the folder ({reason}): nothing is read or "
            "written there; remove that entry, or get the files from a source that you trust"
        )
    return folder / name


# Drives, and characters that separate or end a name, or that no file name can have.
_TRICKS = re.compile(r"[A-Za-z]:|.*[\\\0\ud800-\udfff]", re.DOTALL)


def leaves(folder: Path, path: Path) -> bool:
    """Whether links lead from a path in a local folder to a place outside of it.

    A snapshot in a Hub's cache consists of links to the blobs beside it, which are its own.
    """
    root, found = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_blob = root.parent.name == "snapshots" and found.parent == root.parents[1] / "blobs"
    return not (found.is_relative_to(root) or is_blob)


def replace(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Replace a file atomically by this content, or by the file that `content(temporary)` writes.

    Whenever this process dies or the power fails, `path` is the whole old or the whole new file.
    """
    temporary = path.with_name(path.name + ".tmp")
    with named(path):
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A folder `.<name>.<random>` beside `target`, for what takes its place; removed at the end.

    The new content is made as `new` in it, and what was there goes to `old`. The process holds a
    lock in it meanwhile. What killed processes left of the same name is removed first.
    """
    remove_unfinished(target.parent, target.name)
    with contextlib.ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                stack.enter_context(_locked(folder))
            except (BlockingIOError, FileNotFoundError):
                continue  # another process took it for a killed one's, and removes it
            except OSError:
                pass  # a file system without locks, on which no one removes it
            break
        try:
            yield folder
        finally:
            _clear(folder, target)


def remove_unfinished(parent: Path, name: str | None = None) -> None:
    """Remove what killed processes left of `unfinished` in a folder, of one name or of all.

    A folder whose lock is held is being written now, and stays; so does one with other files, or
    on a file system without locks.
    """
    form = re.compile(rf"\.({'.+' if name is None else re.escape(name)})\.[a-z0-9_]{{8}}")
    for folder in parent.iterdir():
        found = form.fullmatch(folder.name)
        if not found or folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} <= {"new", "old", _LOCK}:
                with _locked(folder):
                    _clear(folder, parent / found[1])
                folder.rmdir()  # gone already, but on NFS, which keeps an open file


_LOCK = "lock"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within, a folder of `unfinished` is this process's.

    Raises:
        BlockingIOError, FileNotFoundError: it is another's, or was removed by one.
        OSError: the file system has no locks.
    """
    with open(folder / _LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its owner's end frees it
        (folder / _LOCK).stat()
        yield


def _clear(folder: Path, target: Path) -> None:
    """Remove a folder of `unfinished`; between its two renames the second is made first."""
    if (folder / "old").exists() and not target.exists():
        (folder / "new").rename(target)
    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that syncs no folders, as SMB's
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """`sync` each file and folder below `folder`, then `folder` itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def remove(path: Path) -> None:
    """Remove a folder and its contents, or a file; do nothing if there is neither."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """A context in which OSErrors without a file name, as from a full disk, name this file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def made_once(folder: Path, make: Callable[[Path], object], name: str) -> Path:
    """A folder, which `make(partial)` fills unless it is there whole.

    It gets its name when it is whole. A process of this machine that comes while another one makes
    it waits. Errors of the folders above it name the field `name`.
    """
    if folder.exists():
        return folder
    make_folder(folder.parent, name)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its owner's end frees it
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.part")
            partial.mkdir(exist_ok=True)
            make(partial)
            sync_all(partial)
            partial.rename(folder)
            sync(folder.parent)
    return folder


class Transfer:
    """A progress bar of a transfer by any number of threads: how much, and how fast.

    Nothing is shown without a title; off a terminal, a line every 15 s, and one at the end.
    """

    def __init__(self, title: str, total: int):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            disable=not (title and console.is_terminal),
        )
        self._task = self._progress.add_task(title, total=total)
        self._has_lines = bool(title) and not console.is_terminal
        self._told, self._lock = monotonic(), threading.Lock()

    def __enter__(self) -> "Transfer":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._has_lines:
            self._say()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._progress.update(self._task, advance=num_bytes)
        with self._lock:
            if self._has_lines and monotonic() - self._told >= 15:
                self._told = monotonic()
                self._say()

    def _say(self) -> None:
        [task] = self._progress.tasks
        done, total = task.completed / 1e6, (task.total or 0) / 1e6
        print(f"{task.description}: {done:,.1f} of {total:,.1f} MB", file=sys.stderr, flush=True)
