"""Tasks that come with the zoo, by name."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zoo.base import files
from zoo.tasks.evaluation import standard_library


class BuiltIn(NamedTuple):
    """A task made by a function, the same on every call; `settings` are as in a `.toml` file."""

    records: Callable[[], Iterable[dict[str, Any]]]
    settings: Mapping[str, Any] = MappingProxyType({})


TASKS: dict[str, BuiltIn] = {
    "python-bodies": BuiltIn(standard_library.python_bodies, {"delimiter": ""}),
    "python-signatures": BuiltIn(
        standard_library.python_signatures,
        {"delimiter": "", "max_new_tokens": 48, "stop": ["\n"]},
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write a task's examples to `<name>.jsonl` in a folder, and beside it the `.toml` to give.

    Returns the path of the latter.

    Raises:
        ValueError: there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"{name!r} is no task that comes with the zoo: {', '.join(TASKS)}")
    lines = "".join(json.dumps(record) + "\n" for record in TASKS[name].records())
    settings = {"data": f"{name}.jsonl", **TASKS[name].settings}
    # A text, a number or a list of texts is in TOML as it is in JSON.
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    files.make_folder(folder, "folder")
    files.replace(folder / settings["data"], lambda path: path.write_text(lines))
    files.replace(folder / f"{name}.toml", lambda path: path.write_text(text))
    return folder / f"{name}.toml"
