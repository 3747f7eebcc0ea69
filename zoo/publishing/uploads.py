"""A model's folder copied to an address, so that a reader never takes half of it for a model.

Stores rename nothing. So `saving.json` comes first, and lists what the folder will have and had;
then the two files by which a model is known, its configuration and its checksums, are removed;
all others are copied, then the configuration, then the checksums, and `saving.json` is removed. A
save that was interrupted leaves that file: readers are told so, and the next save may replace the
folder.
"""

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from zoo.common import checksums, files
from zoo.common.addresses import (
    AddressError,
    Location,
    explained,
    files_below,
    location,
    read_if_there,
    scheme_of,
)
from zoo.common.progress import Transfer
from zoo.publishing import PublishError

CACHE = Path("~/.cache/zoo/models")
SAVING = "saving.json"


@contextlib.contextmanager
def uploading(address: object, *, last: str) -> Iterator[Path]:
    """A new local folder to fill, which is then copied to an address, in place of a model there.

    The file `last` is copied after the others, and before the checksums.

    Raises:
        PublishError: it could not be copied; the local folder, which the message names, is kept.
    """
    where = location(str(address), "folder")
    staging = files.local_path(CACHE, "cache") / "saving"
    files.make_folder(staging, "cache")
    with files.unfinished(staging / where.name) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        try:
            with explained(where):
                _copy(new, where, last)
        except (AddressError, OSError) as error:
            kept = new.rename(Path(tempfile.mkdtemp(dir=staging)) / where.name)
            raise PublishError(
                f"{error}\nThe model could not be copied there. Nothing is lost: all of it is in "
                f"{kept}"
            ) from error


def check_replaceable(address: object, unlisted: Collection[str]) -> None:
    """Raise a PublishError where a folder has files that no earlier save wrote.

    Those of the names in `unlisted` may be replaced though no checksums list them.

    Raises:
        AddressError: the store cannot be reached, or refuses.
    """
    where = location(str(address), "folder")
    if scheme_of(where) in ("http", "https"):
        raise PublishError(f"folder='{where}': a web server is only read; save to s3:// or gs://")
    with explained(where):
        found = _names(where)
        begun = json.loads(read_if_there(where / SAVING) or "[]")
        known = checksums.listed(where) | {*begun, *unlisted, SAVING, checksums.NAME}
    if others := sorted(found - known):
        raise PublishError(
            f"{where} has files that are not part of a model: {', '.join(others)}. Move them "
            "away, or save elsewhere"
        )


def _copy(folder: Path, where: Location, last: str) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    old = _names(where)
    (where / SAVING).write_text(json.dumps(sorted(names | old)))
    for name in (checksums.NAME, last):
        if name in old:
            (where / name).unlink()
    at_end = [name for name in (last, checksums.NAME) if name in names]
    sizes = {name: (folder / name).stat().st_size for name in names}
    with Transfer(f"copying to {where}", sum(sizes.values())) as transfer:
        for name in (*sorted(names - {*at_end}), *at_end):
            if name == at_end[0]:
                for other in old - names - {SAVING, checksums.NAME, last}:
                    (where / other).unlink()
            target = where / name
            target.fs.put_file(str(folder / name), target.path)
            if (found := target.stat().st_size) != sizes[name]:
                raise PublishError(f"{target} has {found} bytes instead of {sizes[name]}")
            transfer.add(sizes[name])
    (where / SAVING).unlink()


def _names(where: Location) -> set[str]:
    """The names of all files below a folder; none if there is no such folder."""
    return {*files_below(where)}
