"""The classes and functions that `config.json` may name: the zoo's, Equinox's and registered ones.

A folder only looks names up here: it imports nothing, and runs no constructor of a module.
"""

import dataclasses
import functools
import importlib
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo import bert, mlp
from zoo.nn import layers, readout
from zoo.publishing.errors import PublishError
from zoo.rnn import config as rnn_config
from zoo.rnn import model as rnn_model
from zoo.transformer import blocks, moe
from zoo.transformer import config as transformer_config
from zoo.transformer import model as transformer_model
from zoo.wrappers import classifier, ensemble

Named = TypeVar("Named", bound=Callable[..., Any])
Classes = Iterable[Any] | Mapping[str, Any]

_MODULES = (
    *(bert, mlp, layers, readout, rnn_config, rnn_model),
    *(blocks, moe, transformer_config, transformer_model, classifier, ensemble),
)
_registered: dict[str, Any] = {}


@overload
def register(target: str) -> Callable[[Named], Named]: ...
@overload
def register(target: Named) -> Named: ...
def register(target: Any) -> Any:
    """Let folders name a class of modules, a dataclass of settings, or a function: a decorator.

    `@zoo.register("my-project/swish-mlp")` gives it a name that stays when the code moves;
    `@zoo.register` names it `module:Class`. `zoo.save` then stores models that hold it, and
    `zoo.load` opens them in any process that has registered it.

    Raises:
        ValueError: the name is taken, or the target is neither a class nor a function.
    """
    if isinstance(target, str):
        return functools.partial(_register, target)
    return _register(_location(target) if hasattr(target, "__qualname__") else "", target)


def _register(name: str, target: Any) -> Any:
    if not _can_be_named(target):
        raise ValueError(
            f"register({reprlib.repr(target)}): it must be a class of Equinox modules, a dataclass "
            "or a function"
        )
    taken = {**known(), **_registered}.get(name, target)
    # A cell of a notebook that runs again defines the same class anew.
    if _location(taken) != _location(target):
        raise ValueError(f"register: the name {name!r} is taken, by {_location(taken)}")
    _registered[name] = target
    return target


def _can_be_named(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, eqx.Module) or dataclasses.is_dataclass(target)
    return callable(target) and hasattr(target, "__qualname__") and hasattr(target, "__module__")


def _location(target: Any) -> str:
    return f"{target.__module__}:{target.__qualname__}"


@functools.cache
def known() -> dict[str, Any]:
    """The modules, configurations and pure functions that need no registration, by name."""
    found: dict[str, Any] = {}
    for module in _MODULES:
        room = ".".join(module.__name__.split(".")[:2])
        found |= {f"{room}.{cls.__name__}": cls for cls in _classes(module, module.__name__)}
    found |= {f"equinox.nn.{cls.__name__}": cls for cls in _classes(eqx.nn, "equinox.nn")}
    found |= {f"zoo.nn.{name}": getattr(layers, name) for name in ("gelu", "gelu_erf")}
    for module, names in _FUNCTIONS.items():
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in names.split()}
    defaults = inspect.signature(eqx.nn.MLP.__init__).parameters
    for name in ("activation", "final_activation"):
        found[f"equinox.nn.MLP.{name}"] = defaults[name].default
    return found


_FUNCTIONS: dict[ModuleType, str] = {
    jax.nn: "celu elu gelu glu hard_sigmoid hard_silu hard_tanh identity leaky_relu log_sigmoid "
    "log_softmax mish relu relu6 selu sigmoid silu soft_sign softmax softplus squareplus",
    jnp: "abs cos exp sin square tanh",
    jax.lax: "add max min mul",
}


def _classes(module: ModuleType, home: str) -> list[type]:
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__.startswith(home) and _can_be_named(cls)
    ]


def name_of(target: Any) -> str | None:
    """The name by which folders know a class or function, or None."""
    return next((name for name, x in [*_registered.items(), *known().items()] if x is target), None)


def needs(names: Iterable[str]) -> dict[str, str]:
    """The names that have to be registered, with the place of each: `module:Class`."""
    return {name: _location(_registered[name]) for name in sorted(names) if name in _registered}


def lookup(
    needed: Mapping[str, str], classes: Classes = (), allow_import: Iterable[str] = ()
) -> dict[str, Any]:
    """The classes and functions that a folder may name, by name.

    `needed` is as `needs` gives it, `classes` are further classes, or a mapping from names to them,
    and `allow_import` names the modules that may be imported for a needed class.

    Raises:
        PublishError: a needed class is not there; the message says how to give it.
    """
    if isinstance(allow_import, str):
        allow_import = [allow_import]
    given = dict(classes) if isinstance(classes, Mapping) else {_given_name(x): x for x in classes}
    if wrong := [name for name, target in given.items() if not _can_be_named(target)]:
        raise PublishError(f"classes={wrong}: give classes, not instances")
    for name, place in needed.items():
        module, _, path = place.partition(":")
        if name not in {**_registered, **given} and module in allow_import:
            importlib.import_module(module)
            found: Any = sys.modules[module]
            for part in path.split("."):
                found = getattr(found, part, None)
            if name not in _registered and isinstance(found, type) and _can_be_named(found):
                given[name] = found
    found_all = {**known(), **_registered, **given}
    if missing := {name: place for name, place in needed.items() if name not in found_all}:
        raise PublishError(_missing(missing))
    return found_all


def _given_name(target: Any) -> str:
    if not _can_be_named(target):
        raise PublishError(f"classes=[{reprlib.repr(target)}]: give classes, not instances")
    return _location(target)


def _missing(missing: Mapping[str, str]) -> str:
    texts = {reprlib.repr(name): reprlib.repr(place) for name, place in missing.items()}
    name, place = next(iter(missing.items()))
    return (
        "the model needs classes that this process has not registered, and loading imports nothing "
        "by itself: "
        + ", ".join(f"{name} of {place}" for name, place in texts.items())
        + ". Import the module that registers them, or pass them, zoo.load(…, "
        f"classes={{{reprlib.repr(name)}: TheClass}}), or, if you trust its code, have it "
        f"imported, zoo.load(…, allow_import=[{reprlib.repr(place.partition(':')[0])}])"
    )
