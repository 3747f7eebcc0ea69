"""Plug-ins: parts that rooms around the core, and other packages, bring; imported when asked for.

`zoo/__init__` names what the zoo's own rooms bring; a package beside it has entry points of the
same groups. Each of `zoo.formats` is a `zoo.publishing.formats.Format`, and each of `zoo.families`
a class as `zoo.register` takes it, named as folders name it. Each of `zoo.precisions` is a
`zoo.nn.precision.Scheme`, and each of `zoo.quantizations` a module like `zoo.quantization.loading`:
`quantized_skeleton(skeleton, kind)` puts skeletons of `zoo.nn.products.Quantized` in the place of
matrices, and `quantize_parts(matrix, names, read)` makes such a matrix from the stored one. Each of
`zoo.row_datasets` is the dataset of a format of rows. Each of `zoo.planners`, of which the last is
taken, is a module like `zoo.planning.planner`, and each of `zoo.commands` a function: the command
`python -m zoo NAME` calls it with arguments from the command line, by its annotations.
"""

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

_own: list[EntryPoint] = []


def register(group: str, **homes: str) -> None:
    """Name objects of a group, each by where it is: `module`, or `module:attribute`."""
    _own.extend(EntryPoint(name, home, group) for name, home in homes.items())


def names(group: str) -> list[str]:
    """The names of a group, the zoo's own first."""
    return [*dict.fromkeys(x.name for x in _all(group))]


def find(group: str, name: str) -> Any:
    """The object of this name, or None; the zoo's own wins."""
    return next((x.load() for x in _all(group) if x.name == name), None)


def _all(group: str) -> list[EntryPoint]:
    return [x for x in _own if x.group == group] + _installed(group, (*sys.path,))


@functools.cache  # it takes milliseconds, and more with each package that is installed
def _installed(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    return [*entry_points(group=group)]
