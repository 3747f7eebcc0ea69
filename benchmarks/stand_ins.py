"""Stand-ins for packages that a bare GPU machine may lack, and that `benchmarks.gpu` does not use.

Modules of the zoo import them for command lines, input pipelines and terminals.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from unittest import mock

OPTIONAL = ("grain", "tyro", "rich")


def install() -> list[str]:
    """Install stand-ins for missing packages, and return their names."""
    missing = []
    for name in OPTIONAL:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        sys.meta_path.insert(0, _Finder(missing))
    return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]):
        self._packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None):
        if fullname.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")
