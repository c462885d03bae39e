"""Loads the public names of a package when they are used, so that importing the package loads none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package. `modules` has the module below the package in which each name
    is, or the whole name of a module of another package, with `:ATTRIBUTE` if the name is another one there."""

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = modules[name].partition(":")
        found = import_module(module if module.startswith("palaestra") else f"{package}.{module}")
        value: object = getattr(found, attribute or name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, listed
