"""Asking one of the servers, as a client elsewhere does."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import aiohttp

from palaestra_slots.core.types import JSON


class Client:
    """One client of a server; every answer is its status and its JSON."""

    def __init__(self, url: str, token: str | None = None, headers: dict[str, str] | None = None) -> None:
        own = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(url, headers={**own, **(headers or {})})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> tuple[int, JSON]:
        async with self._session.get(path) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: JSON) -> tuple[int, JSON]:
        async with self._session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def call(self, trajectory_id: str, name: str, arguments: JSON, **more: JSON) -> JSON:
        """A tool call that is answered with a result."""
        tool = {"name": name, "arguments": arguments, "uniq_id": "u1"}
        status, result = await self.post("/execute", {"trajectory_id": trajectory_id, "tool": tool, **more})
        assert status == 200, result
        assert result["uniq_id"] == "u1"
        return result

    async def bash(self, trajectory_id: str, command: str, **more: JSON) -> str:
        """The output of a command."""
        return str((await self.call(trajectory_id, "bash", {"command": command}, **more))["output"])
