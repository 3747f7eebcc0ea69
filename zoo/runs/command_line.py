"""The command line of a recipe: from flags to a configuration, and errors as messages."""

import contextlib
import io
import itertools
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

import jax
import tyro
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from zoo.common import startup
from zoo.publishing import PublishError
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.config import Config
from zoo.runs.processes import RunError

T = TypeVar("T")

# Our flags by their names in other programs; near names, and ends of ours, tyro finds itself.
_NAMES = {
    "optimizer.learning-rate": "lr",
    "optimizer.weight-decay": "wd",
    "optimizer.warmup-steps": "warmup",
    "data.batch-size": "batch bs per-device-train-batch-size",
    "data.seq-len": "block-size context-length max-length max-seq-length",
    "data.files": "train-file dataset",
    "accumulate": "gradient-accumulation-steps grad-accum",
    "clip-norm": "max-grad-norm grad-clip",
    "steps": "max-steps max-iters iterations",
    "epochs": "num-epochs num-train-epochs",
    "model.d-model": "hidden-dim n-embd",
    "model.num-layers": "n-layer",
    "model.num-heads": "n-head",
    "model": "model-name-or-path",
    "precision": "dtype",
    "run-dir": "output-dir out-dir output",
    "log-every": "logging-steps",
    "eval-every": "eval-steps",
    "checkpoint-every": "save-steps",
    "keep-checkpoints": "save-total-limit",
    "mesh": "gpus devices",
    "track": "report-to",
    "max-new-tokens": "max-tokens",
    "target": "gpu",
}
_ELSEWHERE = {name: ours for ours, names in _NAMES.items() for name in names.split()}

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _paths(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Paths: an empty text, as from a variable that is not set, is refused."""

    def path(given: list[str]) -> Path:
        if not given[0]:
            raise ValueError("'' is no path; '.' is the working directory")
        return Path(given[0])

    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=path,
        is_instance=lambda x: isinstance(x, Path),
        str_from_instance=lambda x: [str(x)],
    )


def parse(function: Any, prog: str, arguments: Sequence[str] | None = None) -> Any:
    """`tyro.cli`, whose errors also translate flags of other programs to the command's own."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return tyro.cli(function, prog=prog, args=arguments, registry=_REGISTRY)
    except SystemExit as error:
        flags = _flags(function, arguments) if error.code else set()
        for argument in arguments:
            given = argument.partition("=")[0].replace("_", "-")
            ours = _ELSEWHERE.get(given.rpartition(".")[2].removeprefix("--"))
            if given.startswith("--") and f"--{ours}" in flags:
                print(f"{given}: did you mean --{ours}?", file=sys.stderr)
        raise


def _flags(function: Any, arguments: Sequence[str]) -> set[str]:
    """The flags of a command, or of the one among several that the arguments name, by its help."""
    shown, is_word = io.StringIO(), lambda argument: not argument.startswith("-")
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        names = itertools.takewhile(is_word, arguments)
        tyro.cli(function, args=[*names, "--help"], registry=_REGISTRY)
    return {*re.findall(r"^\W*(--[\w.-]+)", shown.getvalue(), re.MULTILINE)}


def cli(config_class: type[T] | UnionType, main: Callable[[T], object], module: str) -> None:
    """Parse the command line of `python -m module` into a configuration, and run `main` with it.

    Of a union of configurations the command line names one.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec and spec.name == f"zoo.{module}":  # the wheel has the recipes there
        module = spec.name
    with cli_errors():
        config: T = parse(config_class, f"python -m {module}")
    left = "stopped"
    if isinstance(config, Config):
        left = "left at once; the same command resumes from the last checkpoint"
    with cli_errors(left):
        main(config)


def console() -> Console:
    """A terminal as wide as it is, or a file or a pipe whose lines do not wrap."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fits else 240)


@contextlib.contextmanager
def cli_errors(left: str = "stopped") -> Iterator[None]:
    """Within, an error that the user can mend is shown as its message alone, and ends the program.

    ZOO_TRACEBACK=1 shows where it came from. Ctrl-C is answered by the message `left`, and a reader
    of the output that has left, as `head` does, by silence.
    """
    startup.as_usual()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # and not at Python's end
    except (ValueError, OSError, ImportError, RunError, CheckpointError, PublishError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        _show(error)
    except (AssertionError, RuntimeError) as error:
        if _has_devices():
            raise
        asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}"
        _show(
            ValueError(
                f"{asked}: JAX finds no such device here; unset it, set it to cpu, or install "
                "JAX for that platform, such as jax[cuda13]"
            ),
            error,
        )
    except KeyboardInterrupt:
        print(left, file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def _show(error: Exception, cause: Exception | None = None) -> None:
    if os.environ.get("ZOO_TRACEBACK"):
        raise cause or error
    notes = getattr(error, "__notes__", [])
    notes = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]  # of tracebacks
    lines = [f"error: {error}", *notes]
    print("\n".join(lines) + "\n(ZOO_TRACEBACK=1 shows where)", file=sys.stderr)
    raise SystemExit(1) from None


def _reader_has_left() -> bool:
    """Whether nobody reads standard output, or standard error, any more."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _has_devices() -> bool:
    try:
        return bool(jax.devices())
    except (AssertionError, RuntimeError):
        return False
