"""ddgs: public search engines without a key, through the library of the extra `web`.

It reads pages made for people, so it is slower than an API and is refused sooner. Only for who names it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from dataclasses import dataclass

from palaestra.core.errors import ToolUnavailable
from palaestra.core.types import JSON
from palaestra.tools.net.json_client import text
from palaestra.tools.web.provider import Found

TIMEOUT_S = 20


def missing() -> str | None:
    """Why it cannot be used here."""
    if importlib.util.find_spec("ddgs") is None:
        return "web_provider ddgs needs the extra `web`: pip install 'palaestra[web]'"
    return None


@dataclass(frozen=True, slots=True)
class Ddgs:
    """Text search. `lane` bounds how many searches are under way at once."""

    lane: asyncio.Semaphore

    async def search(self, query: str, limit: int) -> list[Found]:
        async with self.lane:
            return [
                Found(text(row, "title"), text(row, "href"), text(row, "body"))
                for row in await asyncio.to_thread(_results, query, limit)
            ]


def _results(query: str, limit: int) -> list[dict[str, JSON]]:
    library = importlib.import_module("ddgs")
    failures = importlib.import_module("ddgs.exceptions")
    try:
        found: list[dict[str, JSON]] = library.DDGS(timeout=TIMEOUT_S).text(query, max_results=limit)
        return found
    except failures.DDGSException as error:
        if "no results" in str(error).lower():
            return []
        raise ToolUnavailable(f"ddgs could not search: {type(error).__name__}: {error}") from error
