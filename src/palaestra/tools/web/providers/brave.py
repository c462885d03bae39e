"""Brave Search: searches. Wire: https://api-dashboard.search.brave.com/documentation."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.web.provider import Found

BASE_URL = "https://api.search.brave.com"

_MOST = 20
"""How many results one request gives at most."""
_QUERY_CHARS = 400
_MARKUP = re.compile(r"</?[a-z][^>]*>", re.IGNORECASE)


def headers(key: str) -> dict[str, str]:
    """How a request is signed."""
    return {"X-Subscription-Token": key}


@dataclass(frozen=True, slots=True)
class Brave:
    """`GET /res/v1/web/search`. It marks the words it found with HTML, which is taken out."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        asked = {"q": query[:_QUERY_CHARS], "count": str(min(limit, _MOST))}
        told = await self.server.get("/res/v1/web/search", asked)
        return [
            Found(_plain(text(row, "title")), text(row, "url"), _plain(text(row, "description")))
            for row in rows(self.server, told, "web", "results")
        ]


def _plain(marked: str) -> str:
    return html.unescape(_MARKUP.sub("", marked))
