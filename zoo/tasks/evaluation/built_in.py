"""Tasks that come with the zoo, by name."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class BuiltIn(NamedTuple):
    """A task made by a function, the same on every call; `settings` are as in a `.toml` file."""

    records: Callable[[], Iterable[dict[str, Any]]]
    settings: Mapping[str, Any] = MappingProxyType({})


TASKS: dict[str, BuiltIn] = {}
