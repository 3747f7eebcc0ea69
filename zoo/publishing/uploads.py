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
from zoo.common.addresses import AddressError, scheme_of
from zoo.common.store import Store, sizes
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
    store = Store(address, "folder")
    staging = files.local_path(CACHE, "cache") / "saving"
    files.make_folder(staging, "cache")
    with files.unfinished(staging / store.place.name) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        try:
            _copy(new, store, last)
        except (AddressError, OSError) as error:
            kept = new.rename(Path(tempfile.mkdtemp(dir=staging)) / store.place.name)
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
    store = Store(address, "folder")
    if scheme_of(store.address) in ("http", "https"):
        raise PublishError(
            f"folder='{store.address}': a web server is only read; save to s3:// or gs://"
        )
    known = {*json.loads(store.read(SAVING) or "[]"), *unlisted, SAVING, checksums.NAME}
    content = store.read(checksums.NAME) or b""
    with contextlib.suppress(ValueError):  # a damaged list
        known |= checksums.parse(content).keys()
    if others := sorted({*store.names()} - known):
        raise PublishError(
            f"{store.address} has files that are not part of a model: {', '.join(others)}. Move "
            "them away, or save elsewhere"
        )


def _copy(folder: Path, store: Store, last: str) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    old = {*store.names()}
    store.write(SAVING, json.dumps(sorted(names | old)).encode())
    for name in (checksums.NAME, last):
        store.remove([name])
    title = f"copying to {store.address}"
    store.put(folder, sizes(folder, sorted(names - {checksums.NAME, last})), title=title)
    store.remove(old - names - {SAVING, checksums.NAME, last})
    for name in (last, checksums.NAME):
        store.put(folder, sizes(folder, names & {name}))
    store.remove([SAVING])
