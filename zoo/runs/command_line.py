"""The command line of a recipe: from flags to a configuration, and errors as messages."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, TypeVar

import tyro

from zoo.publishing.errors import PublishError
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.config import Config
from zoo.runs.processes import RunError

T = TypeVar("T")


def cli(config_class: type[T] | UnionType, main: Callable[[T], object], module: str) -> None:
    """Parse the command line of `python -m module` into a configuration, and run `main` with it.

    Of a union of configurations the command line names one.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec and spec.name == f"zoo.{module}":  # the wheel has the recipes there
        module = spec.name
    with cli_errors():
        choices: Any = config_class
        config: T = tyro.cli(choices, prog=f"python -m {module}")
    left = "stopped"
    if isinstance(config, Config):
        left = "left at once; the same command resumes from the last checkpoint"
    with cli_errors(left):
        main(config)


@contextlib.contextmanager
def cli_errors(left: str = "stopped") -> Iterator[None]:
    """Within, an error that the user can mend is shown as its message alone, and ends the program.

    ZOO_TRACEBACK=1 shows where it came from. Ctrl-C is answered by the message `left`.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, RunError, CheckpointError, PublishError) as error:
        if os.environ.get("ZOO_TRACEBACK"):
            raise
        notes = getattr(error, "__notes__", [])
        notes = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]  # of tracebacks
        lines = [f"error: {error}", *notes]
        print("\n".join(lines) + "\n(ZOO_TRACEBACK=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(left, file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
