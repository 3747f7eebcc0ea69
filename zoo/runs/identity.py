"""The data, the optimizer, the loss and the base of a run, told apart from others at a resume.

An optimizer of optax and a loss of one's own are functions. They are told apart by the source of
one's own, and by the values that functions hold: in closures, partial applications, and variables
of their module. A library's functions count by their names.
"""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zoo.common import checksums
from zoo.data import datasets
from zoo.runs.checkpoint import read_meta
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.training.description import Training

DATA, LOSS, OPTIMIZER = "fingerprint", "loss_fn", "optimizer"  # in the meta of a checkpoint
BASE = "base"  # likewise: the checksum of the model that the run began with, "" without one
UNKNOWN = "unknown"
_LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "numpy", "zoo", "functools", "jaxtyping")
_PLAIN = bool | int | float | complex | str | bytes | None | np.generic | np.dtype | type
_MOST, _SHOWN = 1000, 6  # values that are compared, and differences that are named
_SMALL = 2**20  # bytes of an array that is compared


def of_training(training: Training) -> dict[str, Any]:
    """The identity of a training in a checkpoint, to compare with a later start's."""
    return {
        BASE: training.base,
        DATA: training.fingerprint or datasets.fingerprint(training.data),
        LOSS: described(LOSS, training.loss_fn),
        OPTIMIZER: described(OPTIMIZER, training.optimizer),
    }


def check_base(run: Run, training: Training) -> None:
    """Raise a RunError if a run has checkpoints, and began with another model than this one."""
    meta = read_meta(run.folder / "checkpoints")
    if meta is None or (begun := meta.get(BASE, "")) == training.base:
        return
    texts = [f"checksum {x[:12]}" if x else "no checksum" for x in (training.base, begun)]
    raise RunError(
        f"{training.pretrained.flag if training.base else '--model'} is not the base this run "
        f"began with: its weights have {texts[0]}, and that of the checkpoints of {run.address} "
        f"{texts[1]}. Put that model back, or start anew with another --run-dir."
    )


def check(run: Run, step: int, meta: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse other data than a checkpoint's, and say where the optimizer or the loss is another.

    Raises:
        RunError: other data.
    """
    if meta[DATA] != found[DATA]:
        raise RunError(
            f"the data of {run.address} has changed since step {step}: the same batches can't "
            "be made again. Put the files back, or start anew with another --run-dir."
        )
    for name in (OPTIMIZER, LOSS):
        # A schedule is laid out anew over another number of steps, which the run says.
        other_steps = meta["config"]["steps"] != run.config.steps and name == OPTIMIZER
        if lines := differences(meta[name], found[name], schedules=not other_steps):
            run.say("\n".join([f"the {name} has changed since step {step}, and goes on:", *lines]))
        if unknown := [path for path, value in found[name].items() if value.startswith(UNKNOWN)]:
            run.say(
                f"whether {unknown[0]} ({found[name][unknown[0]]}) has changed since step "
                f"{step} cannot be told" + f", and {len(unknown) - 1} more" * (len(unknown) > 1)
            )


def differences(old: Mapping[str, str], new: Mapping[str, str], *, schedules: bool) -> list[str]:
    """A line per value that differs or that one side lacks; no line without `old`."""
    paths = [path for path in {**old, **new} if old and old.get(path) != new.get(path)]
    if not schedules:
        paths = [path for path in paths if not any(x in path for x in _SCHEDULES)]
    lines = [
        f"  {path}: was {old.get(path, 'absent')}, is {new.get(path, 'absent')}"
        for path in paths[:_SHOWN]
    ]
    return lines + [f"  … and {len(paths) - _SHOWN} more"] * (len(paths) > _SHOWN)


_SCHEDULES = ("learning_rate", "step_size_fn", "schedule")


def described(name: str, value: Any) -> dict[str, str]:
    """The values that a function or an optimizer holds, as texts by dotted paths."""
    found: dict[str, str] = {}
    for path, text in _walk(name, value, set()):
        found[path] = text
        if len(found) == _MOST:
            break
    return found


def _walk(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        yield path, getattr(value, "__qualname__", repr(value))
    elif isinstance(value, np.ndarray | jax.Array):
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable
        is_small = is_here and value.nbytes < _SMALL and not _is_key(value)
        kind = f"{value.dtype}{list(value.shape)}"
        if is_small:
            yield path, f"{kind}, {checksums.of_values([np.asarray(value)])}"
        else:
            yield path, f"{UNKNOWN}: the values of {kind}"
    elif id(value) not in seen:
        seen.add(id(value))
        parts = _parts(value)
        if parts is None:
            yield path, f"{UNKNOWN}: a {type(value).__qualname__}"
            return
        yield path, _title(value)
        for name, part in parts.items():
            yield from _walk(f"{path}.{name}", part, seen)


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _title(value: Any) -> str:
    """The name of a function, with a hash of its source if it is one's own; else of a class."""
    if not inspect.isfunction(value):
        return type(value).__qualname__
    if _is_of_library(value):
        return value.__qualname__
    try:
        source = inspect.getsource(value).encode()
    except (OSError, TypeError):  # typed in
        source = value.__code__.co_code
    return f"{value.__qualname__}, source {hashlib.sha256(source).hexdigest()[:12]}"


def _is_of_library(function: Any) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _parts(value: Any) -> dict[str, Any] | None:
    """The values inside a value by name; None where they cannot be told."""
    if isinstance(value, functools.partial):
        return {"func": value.func, **_numbered(value.args), **value.keywords}
    if inspect.ismethod(value):
        return {"func": value.__func__, "self": value.__self__}
    if inspect.isfunction(value):
        return _held(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, tuple | list):
        return _numbered(value)
    if isinstance(value, Mapping):
        return {str(name): x for name, x in value.items()}
    if isinstance(value, set | frozenset):
        return _numbered(sorted(map(repr, value)))
    if dataclasses.is_dataclass(value):
        return {x.name: getattr(value, x.name, None) for x in dataclasses.fields(value)}
    if hasattr(value, "__wrapped__"):  # by a decorator, such as jax.jit
        return {"wrapped": value.__wrapped__}
    return {} if inspect.isbuiltin(value) or isinstance(value, np.ufunc) else None


def _numbered(values: Any) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(values)}


def _held(function: Any) -> dict[str, Any]:
    """The values of a function's closure and, if it is one's own, of the module that it reads."""
    code, found = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    if not _is_of_library(function):
        given = {
            name: function.__globals__[name]
            for name in code.co_names
            if name in function.__globals__
        }
        plain = (bool, int, float, str, tuple)
        found |= {n: x for n, x in given.items() if isinstance(x, plain) or inspect.isfunction(x)}
    return found
