"""Exa: searches and pages. Wire: https://exa.ai/docs/reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.core.types import JSON
from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.web.provider import Found, Page

BASE_URL = "https://api.exa.ai"


def headers(key: str) -> dict[str, str]:
    """How a request is signed."""
    return {"x-api-key": key}


@dataclass(frozen=True, slots=True)
class Exa:
    """`POST /search` with highlights as extracts, and `POST /contents`, which tells of each address how it went."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        told = await self.server.post(
            "/search", {"query": query, "numResults": limit, "contents": {"highlights": {"maxCharacters": 500}}}
        )
        return [
            Found(text(row, "title"), text(row, "url"), _extract(row)) for row in rows(self.server, told, "results")
        ]

    async def read(self, urls: Sequence[str]) -> list[Page]:
        told = await self.server.post("/contents", {"urls": list(urls), "text": True})
        done: dict[str, Page] = {}
        for row in rows(self.server, told, "results"):
            page = Page(text(row, "url"), text(row, "title"), text(row, "text"))
            done |= {text(row, "url"): page, text(row, "id"): page}
        why = {text(row, "id"): _reason(row) for row in rows(self.server, told, "statuses")}
        return [done.get(url) or Page(url, error=why.get(url) or "the provider could not read it") for url in urls]


def _extract(row: dict[str, JSON]) -> str:
    highlights = row.get("highlights")
    if isinstance(highlights, list):
        return " … ".join(str(each) for each in highlights)
    return text(row, "summary", "text")


def _reason(row: dict[str, JSON]) -> str:
    error = row.get("error")
    if not isinstance(error, dict):
        return ""
    status = error.get("httpStatusCode")
    return f"{text(error, 'tag') or 'it failed'}{f' (HTTP {status})' if status else ''}"
