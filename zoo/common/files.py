"""Files and folders: local paths, and writes that survive a power cut."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def local_path(path: str | os.PathLike[str], name: str) -> Path:
    """The path, with `~` as the home folder.

    Raises:
        ValueError: a path `scheme://…` of another machine; the message names the field `name`.
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


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically by the one that `write(temporary)` writes.

    Whenever this process dies or the power fails, `path` is the whole old or the whole new file.
    """
    temporary = path.with_name(path.name + ".tmp")
    with named(path):
        write(temporary)
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
    """A context in which OSErrors without a file name, as of a full disk, name this file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
