"""Firecrawl, hosted or one's own: searches and pages. Wire (v2): https://docs.firecrawl.dev/api-reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.core.types import JSON
from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.tool import ToolMistake
from palaestra.tools.web.provider import Found, Page

BASE_URL = "https://api.firecrawl.dev"


def headers(key: str) -> dict[str, str]:
    """How a request is signed."""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class Firecrawl:
    """`POST /v2/search`, and `POST /v2/scrape` for each address."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        told = await self.server.post("/v2/search", {"query": query, "limit": limit})
        return [
            Found(text(row, "title"), text(row, "url"), text(row, "description", "snippet"))
            for row in rows(self.server, told, "data", "web")
        ]

    async def read(self, urls: Sequence[str]) -> list[Page]:
        pages = await asyncio.gather(*(self._page(url) for url in urls), return_exceptions=True)
        for page in pages:
            if isinstance(page, BaseException):  # only now: nothing goes on behind the caller's back
                raise page
        return [page for page in pages if isinstance(page, Page)]

    async def _page(self, url: str) -> Page:
        try:
            told = await self.server.post("/v2/scrape", {"url": url, "formats": ["markdown"]})
        except ToolMistake as refused:  # this address alone
            return Page(url, error=str(refused))
        data: JSON = told.get("data") if isinstance(told, dict) else None
        if not isinstance(data, dict):
            raise self.server.malformed(told)
        about = data.get("metadata")
        about = about if isinstance(about, dict) else {}
        status = about.get("statusCode")
        if isinstance(status, int) and status >= 400:
            return Page(url, error=f"the page answers HTTP {status}")
        return Page(url, text(about, "title"), text(data, "markdown"))
