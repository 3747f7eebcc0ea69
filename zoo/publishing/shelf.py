"""Where models are: the shelf, the folders of names, paths and hub ids, and of adapters' models."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.common import checksums
from zoo.common.addresses import is_remote
from zoo.common.files import local_path
from zoo.publishing import PublishError, downloads, formats
from zoo.publishing.formats import CONFIG, METRICS, README, read_json


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
    that folder returned. Of a hub id, `revision` may name a commit, and
    `weights=False` downloads none.

    Raises:
        PublishError: no such model.
        AddressError: the store at an address cannot be reached, or refuses.
    """
    at_address = is_remote(name_or_folder)
    if not at_address:
        given = local_path(name_or_folder, "model")
        if (folder := _local(name_or_folder)) is not None:
            return folder
        if (given / "checkpoints").is_dir():
            raise PublishError(f"{given} is a run that has not finished: it has no model yet")
        if Path(name_or_folder).is_file():
            raise PublishError(f"{name_or_folder} is a file: a model is a folder with a {CONFIG}")
        if Path(name_or_folder).exists():
            raise PublishError(f"{name_or_folder} is not a model of the zoo: it has no {CONFIG}")
    if (hub := formats.of_id(name_or_folder)) is not None:
        return hub.fetch(str(name_or_folder), revision=revision, weights=weights)
    if at_address:
        return downloads.fetched(name_or_folder)
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
    return downloads.cached(name_or_folder) if at_address else None


def _local(name_or_folder: str | Path) -> Path | None:
    """The folder of a path or of a name on the shelf."""
    given = local_path(name_or_folder, "model")
    folders = (given / "model", given, _shelf() / name_or_folder)
    files = formats.config_files()
    return next((x for x in folders if any((x / file).is_file() for file in files)), None)


def chain(folder: Path) -> Iterator[Path]:
    """A model's folder; of adapters next that of the model they are on, down to a whole model's.

    Each is found when it is asked for.

    Raises:
        PublishError: adapters name no model, or the models below them lead back to one of them.
    """
    found = [folder]
    yield folder
    while (format := formats.of_adapters(folder)) is not None:
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
    files, or else of their bytes; of adapters, with that of their base.
    """
    *upper, below = chain(folder)
    found = checksums.digest(below, formats.of(below).weight_files(below))
    for one in reversed(upper):
        format = formats.of_adapters(one)
        own = checksums.digest(one, format.weight_files(one) if format else [])
        found = checksums.joined(found, own)
    return found


def sampling(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with a model's settings of sampling, and they by the names of `zoo.Sampling`.

    Adapters without any take the nearest base's; without a file the result is empty.
    """
    for at in chain(folder):
        found = (x.sampling(at) for x in formats.formats().values())
        if settings := next((x for x in found if x is not None), None):
            return settings
    return folder, {}
