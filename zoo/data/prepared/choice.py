"""Where a configuration's text is: in a prepared folder, in files for memory, or in too many."""

from zoo.base.addresses import Location, files_matching, is_remote, location
from zoo.data.prepared.format import MANIFEST, SHARDS, DamagedError

IN_MEMORY = 32 * 2**20  # bytes of files
BY_ITSELF = 4 * 2**30
COMPRESSED = (".gz", ".zst")


def prepared_folder(files: str) -> Location | None:
    """The folder that `data.files` names, if it is one of `python -m zoo prepare`.

    Raises:
        DamagedError: preparing it was not finished.
    """
    if not files or "," in files:
        return None
    folder = location(files, "data.files")
    if (folder / MANIFEST).is_file():
        return folder
    if (folder / SHARDS).is_dir():
        raise DamagedError(
            f"data.files={files!r} has shards and no {MANIFEST}: `python -m zoo prepare` has not "
            "finished it; run the same command again, which goes on where it was"
        )
    return None


def is_for_memory(files: str) -> bool:
    """Whether text files are few enough to be held in memory.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: they are too many to be prepared at the start of a run.
    """
    found: dict[Location, str] = {}
    for pattern in files.split(","):
        found |= files_matching(pattern.strip(), "data.files")
    size = sum(path.stat().st_size for path in found)
    if size > BY_ITSELF:
        raise ValueError(
            f"data.files={files!r} has {size / 2**30:,.1f} GiB in {len(found):,} files: above "
            f"{BY_ITSELF / 2**30:.0f} GiB a run does not tokenize by itself. Do it once, on all "
            f"cores: python -m zoo prepare {files!r} --out FOLDER, and then give --data FOLDER"
        )
    plain = not any(is_remote(path) or str(path).endswith(COMPRESSED) for path in found)
    return size <= IN_MEMORY and plain
