"""Finds modules by the names that they had before they moved to packages of their own, for existing scripts.

`import palaestra.suites.swe.swe_row` returns the module `palaestra_suites.swe.swe_row` itself, so a class has one
identity under both names. `palaestra` asks for `find` only if it has no such module.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_MOVED = {
    "cloud": "palaestra_cloud",
    "cluster": "palaestra_cloud.cluster",
    "contract": "palaestra_contract",
    "core": "palaestra_slots.core",
    "doors.acp": "palaestra_chat.acp",
    "doors.batch": "palaestra_chat.batch",
    "doors.chat": "palaestra_chat",
    "doors.e2b": "palaestra_e2b",
    "doors.gateway": "palaestra_gateway",
    "images": "palaestra_slots.images",
    "inference": "palaestra_tokens",
    "integrations": "palaestra_integrations",
    "processes": "palaestra_slots.processes",
    "sandbox": "palaestra_slots.sandbox",
    "suites": "palaestra_suites",
    "testing": "palaestra_tokens.testing",
    "trainers": "palaestra_train",
    "viewer": "palaestra_view",
}
"""The packages that were folders of `palaestra`."""


class _Alias(Loader):
    """Loads a module under its old name; None stands for a folder that only contained others."""

    def __init__(self, new: str | None) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self._new is None:
            return ModuleType(spec.name)
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._new is not None:
            module.__spec__ = self._spec  # that of the alias has replaced it


def find(name: str) -> ModuleSpec | None:
    """Return the spec of the module that was called `name`; None if there is none, or its package is not installed.
    From the first use on, all imports ask this module first: a moved package has a path of its own, on which its
    modules would be found once more, under the old names."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return _FINDER.find_spec(name)


class _Finder(MetaPathFinder):
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("palaestra."):
            return None
        old = name.removeprefix("palaestra.")
        if any(each.startswith(f"{old}.") for each in _MOVED):
            return ModuleSpec(name, _Alias(None), is_package=True)
        for folder, package in _MOVED.items():
            if old == folder or old.startswith(f"{folder}."):
                return _alias(name, package + old.removeprefix(folder))
        return None


_FINDER = _Finder()


def _alias(name: str, new: str) -> ModuleSpec | None:
    try:
        real = find_spec(new)
    except ModuleNotFoundError:
        real = None
    if real is None:
        return None
    return ModuleSpec(name, _Alias(new), is_package=real.submodule_search_locations is not None)
