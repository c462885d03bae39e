"""SearXNG: one's own search engine, without a key. Wire: https://docs.searxng.org/dev/search_api.html.

The instance must allow JSON: `search: formats: [html, json]` in its settings.yml; it answers 403 where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.web.provider import Found


def headers(key: str) -> dict[str, str]:
    """A key is for a proxy before the instance, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class Searxng:
    """`GET /search?format=json`. It has no limit of its own; a page has some twenty results."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        told = await self.server.get("/search", {"q": query, "format": "json"})
        return [
            Found(text(row, "title"), text(row, "url"), text(row, "content"))
            for row in rows(self.server, told, "results")
        ][:limit]
