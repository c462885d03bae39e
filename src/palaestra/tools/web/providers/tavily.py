"""Tavily: searches and pages. Wire: https://docs.tavily.com/documentation/api-reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.web.provider import Found, Page

BASE_URL = "https://api.tavily.com"


def headers(key: str) -> dict[str, str]:
    """How a request is signed."""
    return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class Tavily:
    """`POST /search` and `POST /extract`."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        told = await self.server.post("/search", {"query": query, "max_results": limit})
        return [
            Found(text(row, "title"), text(row, "url"), text(row, "content"))
            for row in rows(self.server, told, "results")
        ]

    async def read(self, urls: Sequence[str]) -> list[Page]:
        told = await self.server.post("/extract", {"urls": list(urls), "format": "markdown"})
        done = {
            text(row, "url"): Page(text(row, "url"), text(row, "title"), text(row, "raw_content"))
            for row in rows(self.server, told, "results")
        }
        why = {text(row, "url"): text(row, "error") for row in rows(self.server, told, "failed_results")}
        return [done.get(url) or Page(url, error=why.get(url) or "the provider could not read it") for url in urls]
