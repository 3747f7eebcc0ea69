"""Tasks that come with the zoo, by name: each a function that makes the records of a task file."""

from collections.abc import Callable, Iterable
from typing import Any

# A record is a line of a task file (see `task`), and a task the same on every call.
MAKERS: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
