"""Tools that not every agent has: browser, web, pictures and sound, memory, skills, training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from palaestra_toolsets.tools.session_search import Sessions

_MODULES = {
    "Sessions": "tools.session_search",
}

__all__ = [
    "Sessions",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
