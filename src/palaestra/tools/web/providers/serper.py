"""Serper: Google's results. Wire: https://serper.dev."""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.tools.net.json_client import Server, rows, text
from palaestra.tools.web.provider import Found

BASE_URL = "https://google.serper.dev"


def headers(key: str) -> dict[str, str]:
    """How a request is signed."""
    return {"X-API-KEY": key}


@dataclass(frozen=True, slots=True)
class Serper:
    """`POST /search`."""

    server: Server

    async def search(self, query: str, limit: int) -> list[Found]:
        told = await self.server.post("/search", {"q": query, "num": limit})
        return [
            Found(text(row, "title"), text(row, "link"), text(row, "snippet"))
            for row in rows(self.server, told, "organic")
        ]
