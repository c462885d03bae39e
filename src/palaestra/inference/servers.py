"""From configs to engines, and several servers behind one face: the contract's `self.server`.

Not for talking to a server: engines do. Invariant: an engine's module is imported only when a config asks for it.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.core.errors import ConfigError, EngineUnavailable
from palaestra.core.types import JSON, Message
from palaestra.inference.base import ChatCompletion, ChatServer, Engine, SessionContext
from palaestra.inference.config import APIServerConfig, ServerBaseline

ENGINES: Mapping[str, str] = {
    "openai": "palaestra.inference.engines.openai:OpenAIEngine",
    "scripted": "palaestra.inference.engines.scripted:ScriptedEngine",
}
"""Server type to the class of its engine, which takes the config."""


class Server(Engine, ChatServer, Protocol):
    """One engine that can also be asked directly."""

    config: APIServerConfig


def create_engine(config: APIServerConfig) -> Server:
    """The engine for one config, not started yet. Raises `ConfigError`."""
    target = ENGINES.get(config.server_type)
    if target is None:
        raise ConfigError(
            f"Server type '{config.server_type}' is not available in this version; there are {', '.join(ENGINES)}."
        )
    module, _, name = target.partition(":")
    engine: Server = getattr(importlib.import_module(module), name)(config)
    return engine


class ServerGroup:
    """One or several model servers as one engine, and as one chat server for code that asks without a session.

    A session stays with its server, whose prefix cache then holds the conversation; sessions go round the servers in
    turn. A call without a session goes to the server with the fewest such calls under way. Where a server stays
    unavailable after its retries, the call moves on to the next.
    """

    def __init__(self, configs: ServerBaseline | Sequence[ServerBaseline]) -> None:
        wanted = [configs] if isinstance(configs, ServerBaseline) else list(configs)
        if not wanted:
            raise ConfigError("No model server was named: give at least one APIServerConfig.")
        self.servers: list[Server] = [create_engine(_complete(config)) for config in wanted]
        self._under_way = [0] * len(self.servers)
        self._sessions = 0

    @property
    def name(self) -> str:
        """The models' names, each once."""
        return ", ".join(dict.fromkeys(server.name for server in self.servers))

    async def start(self) -> None:
        """Start all servers; the first failure closes all and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(server.start())
        except BaseExceptionGroup as failures:
            await self.aclose()
            raise failures.exceptions[0] from None

    async def aclose(self) -> None:
        """Close all servers. Idempotent."""
        for server in self.servers:
            await server.aclose()

    def session(self, context: SessionContext) -> ChatServer:
        """A session for one rollout."""
        first = self._sessions % len(self.servers)
        self._sessions += 1
        if len(self.servers) == 1:
            return self.servers[0].session(context)
        return _Session([server.session(context) for server in self.servers[first:] + self.servers[:first]])

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """One reply from the least busy server."""
        order = sorted(range(len(self.servers)), key=self._under_way.__getitem__)
        self._under_way[order[0]] += 1
        try:
            return await _Session([self.servers[i] for i in order]).chat_completion(messages=messages, **request)
        finally:
            self._under_way[order[0]] -= 1

    def managed_server(self, **options: JSON) -> ChatServer:
        """Token-exact sessions. Raises `NotImplementedError`, on which environments fall back to chat completions."""
        raise NotImplementedError("Token-exact servers are not available in this version.")


ServerManager = ServerGroup
"""The contract's name."""


def _complete(config: ServerBaseline) -> APIServerConfig:
    """A baseline says nothing about the address; that is then the engine's to miss."""
    return config if isinstance(config, APIServerConfig) else APIServerConfig(**config.model_dump(exclude_unset=True))


@dataclass(slots=True)
class _Session:
    """Asks the first server, and the others only when it is unavailable."""

    servers: list[ChatServer]

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        for _ in self.servers[1:]:
            try:
                return await self.servers[0].chat_completion(messages=messages, **request)
            except EngineUnavailable:
                self.servers.append(self.servers.pop(0))
        return await self.servers[0].chat_completion(messages=messages, **request)
