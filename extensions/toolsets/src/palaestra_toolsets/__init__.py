"""Tools that not every agent has: browser, web, pictures and sound, memory, skills, training runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra_toolsets.tools.session_search import Sessions

_MODULES = {
    "Sessions": "tools.session_search",
}

__all__ = [
    "Sessions",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra_toolsets' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value: object = getattr(
        import_module(module if module.startswith("palaestra") else f"palaestra_toolsets.{module}"), attribute or name
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
