"""Packages whose exported names are imported when they are first asked for.

Importing torch and transformers takes seconds; most that a command line does needs neither.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that finds its exported names in its modules."""

    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        home = self.__dict__["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{home}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Once a module is loaded, the import system sets it here; what is exported under its name comes first.
        if isinstance(value, ModuleType) and self._homes.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def make_lazy(package: str, homes: Mapping[str, str]) -> None:
    """Let a package give each name from the module of it that is named for it; its ``__init__`` calls this.

    Type checkers read imports under ``TYPE_CHECKING`` beside the call.
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = dict(homes)
    module.__class__ = _LazyPackage
