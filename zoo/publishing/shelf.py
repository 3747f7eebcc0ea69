"""Where models are: the shelf, the folders of names, paths, addresses and hub ids, and of bases.

A model at an address is fetched into a cache on this machine: each file once, and verified.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.common import checksums, files
from zoo.common.files import Location, inside, is_remote, local_path
from zoo.common.store import Store, explained, places
from zoo.publishing import PublishError, formats
from zoo.publishing.formats import CACHE, CONFIG, METRICS, README, AdapterFormat, read_json
from zoo.publishing.replacing import SAVING

_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Card:
    """A published model's entry on the shelf; `text` is its README."""

    name: str
    folder: Path
    family: str
    num_parameters: int
    text: str
    metrics: dict


def published() -> dict[str, Card]:
    """The shelf: the card of each model that comes with the zoo, by name."""
    configs = sorted(_shelf().glob(f"*/{CONFIG}"))
    return {config.parent.name: _card(config.parent) for config in configs}


def _shelf() -> Path:
    """The models' folder: in an installation inside the package, in a checkout beside it."""
    package = Path(__file__).resolve().parents[1]  # an editable installation has a link
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _card(folder: Path) -> Card:
    description = read_json(folder / CONFIG)
    readme, metrics = folder / README, folder / METRICS
    return Card(
        name=folder.name,
        folder=folder,
        family=str(description.get("family", "unknown")),
        num_parameters=description.get("num_parameters", 0),
        text=readme.read_text(encoding="utf-8") if readme.is_file() else "",
        metrics=read_json(metrics) if metrics.is_file() else {},
    )


def find(name_or_folder: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model, given its path or address, its name on the shelf or its hub id.

    A run's folder stands for the model in it. A model at an address is fetched into a cache, and
    that folder returned. With a hub id, `revision` may name a commit, and `weights=False` downloads
    no weights.

    Raises:
        PublishError: no such model.
        AddressError: the store at an address cannot be reached, or refuses.
    """
    at_address = is_remote(name_or_folder)
    if not at_address:
        given = local_path(name_or_folder, "model")
        if (folder := _local(name_or_folder)) is not None:
            return folder
        formats.check_finished(given)
        if Path(name_or_folder).is_file():
            raise PublishError(f"{name_or_folder} is a file: a model is a folder with a {CONFIG}")
        if Path(name_or_folder).exists():
            raise PublishError(f"{name_or_folder} is not a model of the zoo: it has no {CONFIG}")
    if (hub := formats.of_id(name_or_folder)) is not None:
        return hub.fetch(str(name_or_folder), revision=revision, weights=weights)
    if at_address:
        return fetched(name_or_folder)
    raise PublishError(
        f"{str(name_or_folder)!r} is neither a folder nor on the shelf, which has: "
        + (", ".join(published()) or "nothing")
    )


def find_here(name_or_folder: str | Path) -> Path | None:
    """The folder of a model as `find` gives it, if it is on this machine; nothing is downloaded."""
    at_address = is_remote(name_or_folder)
    if not at_address and (
        (folder := _local(name_or_folder)) is not None or Path(name_or_folder).exists()
    ):
        return folder
    if (hub := formats.of_id(name_or_folder)) is not None:
        return hub.cached(str(name_or_folder))
    return cached(name_or_folder) if at_address else None


def _local(name_or_folder: str | Path) -> Path | None:
    """The folder of a path or of a name on the shelf."""
    given = local_path(name_or_folder, "model")
    folders = (given / "model", given, _shelf() / name_or_folder)
    files = formats.config_files()
    return next((x for x in folders if any((x / file).is_file() for file in files)), None)


def chain(folder: Path) -> Iterator[Path]:
    """A model's folder; for adapters, then that of the model they are on, down to a whole model's.

    Each is found when it is asked for.

    Raises:
        PublishError: adapters name no model, or the models below them lead back to one of them.
    """
    found = [folder]
    yield folder
    while isinstance(format := formats.of(folder), AdapterFormat):
        base = format.base(folder)
        if not base.name:
            raise PublishError(
                f"{folder / format.config} names no {format.base_field}: load that model, and put "
                "these adapters on it by zoo.load_adapters"
            )
        below = find(base.name, revision=base.revision)
        if any(below.samefile(other) for other in found):
            round = " on ".join(map(str, [*found, below]))
            raise PublishError(
                f"{folder}: the base of its adapters, {base.name!r}, is "
                + ("this folder itself" if len(found) == 1 else f"on them again ({round})")
                + f": name a whole model as {format.base_field} in {format.config}"
            )
        found.append(folder := below)
        yield folder


def nearest(folder: Path, file: str) -> Path:
    """The first of the folders in the `chain` that has a file, or else the whole model's."""
    for folder in chain(folder):  # noqa: B020
        if (folder / file).is_file():
            break
    return folder


def whole(folder: Path) -> Path:
    """The folder of a whole model: that which adapters are on in the end, or the folder itself."""
    return [*chain(folder)][-1]


def weights_checksum(folder: Path) -> str:
    """One checksum of the weights in a model's folder: of what its `checksums.json` says of their
    files, or else of their bytes; for adapters, with that of their base.
    """
    folders = reversed([*chain(folder)])
    sums = (checksums.digest(x, formats.of(x).weight_files(x)) for x in folders)
    return functools.reduce(checksums.joined, sums)


def sampling(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with a model's settings of sampling, and these by the names of `zoo.Sampling`.

    Adapters without any take the nearest base's; without a file the result is empty.
    """
    for at in chain(folder):
        found = (x.sampling(at) for x in formats.formats().values())
        if settings := next((x for x in found if x is not None), None):
            return settings
    return folder, {}


class _ChangedError(Exception):
    """A file is not the one that the list names: damaged, or replaced meanwhile."""


@dataclasses.dataclass(frozen=True)
class _Listing:
    """The files of a model at an address: their sizes and, in a folder of `save`, checksums."""

    store: Store
    files: Mapping[str, dict[str, Any]]
    digest: str

    @property
    def cached(self) -> Path:
        """Its folder in the cache, which is keyed by the address and by the files' digest."""
        where = self.store.place
        key = checksums.of_values([str(where), self.digest])[:16]
        return inside(files.local_path(CACHE, "cache") / key, where.name or "model", where)


def fetched(address: object) -> Path:
    """The local copy of the model at an address, or of the model of a run there; made if missing.

    A model that is replaced while it is read is read again.

    Raises:
        PublishError: there is no model, or a part of one, or a damaged one.
        AddressError: the store cannot be reached, or refuses, or a name leads out of the folder.
    """
    for _ in range(_TRIES):
        listing = _listing(address)
        with contextlib.suppress(_ChangedError):
            return files.made_once(listing.cached, functools.partial(_fetch, listing), "cache")
    raise PublishError(
        f"{listing.store.address} is damaged, or was being replaced: its files do not match "
        f"its {checksums.NAME}. `python -m zoo verify {address}` names them; publish the model "
        "again"
    )


def cached(address: object) -> Path | None:
    """The local copy of the model at an address, as it is there now; None if it is not fetched."""
    folder = _listing(address).cached
    return folder if folder.is_dir() else None


def model_at(address: object) -> Location:
    """The folder of the model at an address, or of the model of a run there."""
    return _listing(address).store.place


def _listing(address: object) -> _Listing:
    given = Store(address, "model")
    stores = (given, Store(given.place / "model", "model"))
    for store in stores:
        if (content := store.read(checksums.NAME)) is not None:
            return _Listing(store, *_parsed(content, store.place))
    for store in stores:
        if store.read(SAVING) is not None:
            raise PublishError(
                f"{store.address} is being saved, or that was interrupted: wait, or save it again"
            )
    with explained(given.place):
        formats.check_finished(given.place)
    for store in reversed(stores):
        if any(store.read(name) is not None for name in formats.config_files()):
            return _plain(store)
    raise PublishError(f"{given.address} is not a model of the zoo: it has no {checksums.NAME}")


def _parsed(content: bytes, where: Location) -> tuple[dict, str]:
    """The files that `checksums.json` lists, with the card, which it does not, and a digest."""
    try:
        listed = checksums.parse(content)
    except ValueError as error:
        raise PublishError(f"{where} is damaged: {error}; publish the model again") from None
    for name in listed:
        inside(where, name, where / checksums.NAME)
    return {README: {}} | listed, checksums.sha256(content)


def _plain(store: Store) -> _Listing:
    """A folder without checksums: its files by their sizes and the store's own tags."""
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "updated", "mtime", "created")
    tags = {
        name: [info["size"], next((str(info[x]) for x in names if info.get(x)), "")]
        for name, info in sorted(store.listing().items())
    }
    sizes = {name: {"bytes": size} for name, (size, _) in tags.items()}
    return _Listing(store, sizes, checksums.of_values([tags]))


def _fetch(listing: _Listing, folder: Path) -> None:
    """Fetch the files that an earlier process, which was killed, has not fetched already."""
    store, targets = listing.store, places(folder, listing.files, listing.store.address)
    wanted = {name: listing.files[name] for name, at in targets.items() if not at.exists()}
    problems = store.get(folder, wanted, title=f"fetching {store.address}")
    if problems.keys() - {README}:
        raise _ChangedError
    content = store.read(checksums.NAME)
    if content is not None:
        if checksums.sha256(content) != listing.digest:
            raise _ChangedError
        (folder / checksums.NAME).write_bytes(content)
