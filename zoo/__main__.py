"""The zoo on the command line: `python -m zoo`, and its commands (`… describe`, `… prepare`, …)."""

import sys
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from zoo import sharding
from zoo.common import checksums, plugins
from zoo.common.files import is_remote, local_path
from zoo.common.store import explained
from zoo.data.prepared import command as preparing
from zoo.hf.model_types import MODEL_TYPES
from zoo.publishing import PublishError, formats
from zoo.publishing.families import body_of
from zoo.publishing.formats import README, AdapterFormat
from zoo.publishing.models import load
from zoo.publishing.shelf import find, model_at, published
from zoo.runs import checkpoint, environment
from zoo.runs.command_line import cli_errors, console, parse
from zoo.wrappers import lora


def list_models() -> None:
    """List the published models, and the types of Hugging Face's folders that open too."""
    cards = published()
    table = Table("name", "family", "parameters", "MB", "description", box=None)
    for card in cards.values():
        lines = (line.strip() for line in card.text.splitlines())
        summary = next((line for line in lines if line and not line.startswith("#")), "")
        megabytes = f"{folder_bytes(card.folder) / 1e6:.1f}"
        table.add_row(card.name, card.family, f"{card.num_parameters:,}", megabytes, summary)
    console().print(table if cards else "The shelf is empty.")
    types = ", ".join(sorted(MODEL_TYPES))
    console().print(f"\nFolders and hub ids of Hugging Face's open too, of these types: {types}.")


def describe(model: tyro.conf.Positional[str], mesh: str = "") -> None:
    """Show a model's card, and where each of its parameters goes.

    Args:
        model: Name on the shelf, folder or address of a model or of adapters, or id on the Hugging
            Face hub.
        mesh: Devices by axis, such as fsdp=4,tensor=2; empty is one.
    """
    devices = sharding.make_mesh(mesh)
    folder = find(model)
    readme = folder / README
    if readme.is_file():
        print(readme.read_text(encoding="utf-8"))
    loaded = load(folder, mesh=devices)
    if (config := getattr(body_of(loaded), "config", None)) is not None:
        print(config, end="\n\n")
    if isinstance(format := formats.of(folder), AdapterFormat):
        base, chosen = format.base(folder), lora.config_of(loaded)
        print(f"adapters of {base.name}, weights {base.checksum or 'without a checksum'}")
        print(chosen, end="\n\n")
    print(sharding.placement_table(loaded, devices))


def verify(models: tyro.conf.Positional[tuple[str, ...]] = ()) -> None:
    """Verify the checksums of every file.

    Args:
        models: Names on the shelf, folders or addresses of models, folders of prepared corpora or
            of a checkpoint's step; without any, the whole shelf.
    """
    damaged = []
    for name in models or published():
        files, problems = verified(name)
        print(f"{name}: " + ("; ".join(problems) or f"{files} files are as they were written"))
        damaged += [name] if problems else []
    if damaged:
        raise PublishError(f"damaged: {', '.join(damaged)}")


def verified(name: str) -> tuple[int, list[str]]:
    """(how many files a model or a prepared corpus has, a line per damaged one)."""
    if not is_remote(name) and preparing.is_prepared(local_path(name, "models")):
        return preparing.verify(local_path(name, "models"))
    folder = model_at(name) if is_remote(name) else find(name)
    if not is_remote(name) and checkpoint.is_checkpoint(folder):
        return len(checksums.listed(folder)), checkpoint.problems(folder)
    with explained(folder):
        return len(checksums.listed(folder)), checksums.problems(folder)


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def report(run: tyro.conf.Positional[str] = "") -> None:
    """Print versions, devices and settings, to paste into a bug report.

    Args:
        run: Folder or address of a run, to print its checkpoints and last numbers too.
    """
    print(environment.report(run))


COMMANDS: dict[str, Any] = {
    "list": list_models,
    "describe": describe,
    "verify": verify,
    "prepare": preparing.main,
    "report": report,
}


def commands() -> dict[str, Any]:
    """All commands by their names, of rooms around the core and of other packages too."""
    found = {name: plugins.find("zoo.commands", name) for name in plugins.names("zoo.commands")}
    return found | COMMANDS


def main(arguments: list[str]) -> None:
    """Run the command that the arguments begin with; without any, list the models."""
    name, *rest = arguments or ["list"]
    if command := COMMANDS.get(name) or plugins.find("zoo.commands", name):
        # Parsed alone: with several commands, tyro's hints name other ones, or none.
        parse(command, f"python -m zoo {name}", rest)
        return
    tyro.extras.subcommand_cli_from_dict(
        commands(),
        prog="python -m zoo",
        description="List, describe and verify models, plan a training, prepare a corpus, …",
        args=arguments,
    )


if __name__ == "__main__":
    with cli_errors():
        main(sys.argv[1:])
