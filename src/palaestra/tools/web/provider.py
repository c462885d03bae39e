"""What searches the web and what reads pages: two small Protocols and their values. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """One result of a search, best first. `description` is a short extract of the page."""

    title: str
    url: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """One page as text, or why it could not be read. `note` says what of it was left out before it became text."""

    url: str
    title: str = ""
    content: str = ""
    error: str = ""
    note: str = ""


class Searcher(Protocol):
    """Searches the web."""

    async def search(self, query: str, limit: int) -> list[Found]:
        """The best results, `limit` at most. Raises `ToolUnavailable`, or `ToolMistake` for a query that is refused."""
        ...


class PageReader(Protocol):
    """Reads pages as text."""

    async def read(self, urls: Sequence[str]) -> list[Page]:
        """One page for each address, in their order. Raises `ToolUnavailable`."""
        ...
