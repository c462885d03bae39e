"""Creates engines from configs, and joins several servers into one, which environments call as `self.server`. An
engine's module is imported only if a config needs it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineUnavailable
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer, ServerEngine, SessionContext
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.engine import ChatCompletion, Sampled, TextCompletion, TokenEngine

if TYPE_CHECKING:
    from palaestra_tokens.token_exact.managed_chat import ManagedChat  # slow to import, and often not needed

T = TypeVar("T")

Server: TypeAlias = ServerBaseline | ServerEngine
"""The settings of a model server, or an engine that a program made itself, which is started and closed like a
configured one."""

ENGINES: Mapping[str, str] = {
    "openai": "palaestra_tokens.engines.openai:OpenAIEngine",
    "scripted": "palaestra_tokens.engines.scripted:ScriptedEngine",
    "sglang": "palaestra_tokens.engines.token_engine:SGLangEngine",
    "transformers": "palaestra_tokens.engines.transformers:TransformersEngine",
    "vllm": "palaestra_tokens.engines.token_engine:VLLMEngine",
}
"""The engine class of each server type. Its argument is the config."""


def create_engine(config: APIServerConfig) -> ServerEngine:
    """Return the engine for one config, not started yet. Raises `ConfigError` for an invalid config."""
    target = ENGINES.get(config.server_type)
    if target is None:
        raise ConfigError(
            f"Server type '{config.server_type}' is not available in this version; available: {', '.join(ENGINES)}."
        )
    module, _, name = target.partition(":")
    engine: ServerEngine = getattr(importlib.import_module(module), name)(config)
    return engine


class ServerGroup(ChatServer):
    """One or several model servers as one engine, and as one chat server for calls without a session.

    A session stays with its server, whose prefix cache holds the conversation; new sessions are assigned to the servers
    in turn. A call without a session goes to the least busy server. If a server stays unavailable after its retries,
    the call moves to the next server.
    """

    def __init__(self, configs: Server | Sequence[Server]) -> None:
        wanted = [configs] if isinstance(configs, ServerBaseline | ServerEngine) else list(configs)
        if not wanted:
            raise ConfigError("No model server is configured: pass at least one APIServerConfig.")
        self.servers: list[ServerEngine] = [
            each if isinstance(each, ServerEngine) else create_engine(_complete(each)) for each in wanted
        ]
        self._under_way = [0] * len(self.servers)
        self._sessions = 0
        self._learned_window: int | None = None

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(server.name for server in self.servers))

    @property
    def window_tokens(self) -> int | None:
        """The size of the smallest window of the servers' models, or None if no server has reported one."""
        known = [server.window_tokens for server in self.servers if server.window_tokens is not None]
        return self._learned_window or min(known, default=None)

    def learn_window(self, error: ContextExceeded) -> None:
        """Keep the window that a server reports in an error, which is more reliable than its list of models."""
        self._learned_window = error.window_tokens or self._learned_window

    async def start(self) -> None:
        """Start all servers. If one fails, close all of them and raise its error."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(server.start())
        except BaseExceptionGroup as failures:
            await self.aclose()
            raise failures.exceptions[0] from None

    async def probe(self, tools: Sequence[Mapping[str, JSON]]) -> None:
        """Send one request with tools to every server that might refuse them. Raises `EngineRefused`."""
        for server in self.servers:
            await server.probe(tools)

    async def aclose(self) -> None:
        for server in self.servers:
            await server.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def session(self, context: SessionContext) -> ChatServer:
        if self.token_exact:
            return self.managed_server(name=context.rollout_id)
        servers = self._in_turn()
        if len(servers) == 1:
            return servers[0].session(context)
        return _FirstAvailable([server.session(context) for server in servers])

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        async with self._least_busy() as session:
            return await session.chat_completion(messages=messages, **request)

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        async with self._least_busy() as session:
            return await session.completion(prompt=prompt, **request)

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[ServerEngine]:
        """Yield the least busy server, for several calls that are to meet the same prefix cache."""
        index = min(range(len(self.servers)), key=self._under_way.__getitem__)
        self._under_way[index] += 1
        try:
            yield self.servers[index]
        finally:
            self._under_way[index] -= 1

    @asynccontextmanager
    async def _least_busy(self) -> AsyncIterator[_FirstAvailable]:
        """Yield all servers, the one with the fewest calls in progress first."""
        order = sorted(range(len(self.servers)), key=self._under_way.__getitem__)
        self._under_way[order[0]] += 1
        try:
            yield _FirstAvailable([self.servers[i] for i in order])
        finally:
            self._under_way[order[0]] -= 1

    @property
    def token_exact(self) -> bool:
        """Whether every server continues token ids, so that `managed_server` and sessions are token-exact."""
        return all(server.token_exact for server in self.servers)

    def managed_server(self, **options: JSON) -> ManagedChat:
        """Return token-exact chat for one rollout. The options are `tokenizer`, `tool_call_parser` or `tool_parser`,
        and `history` or `preserve_think_blocks`.

        Raises `NotImplementedError` for servers without exact tokens, so that existing environments fall back to chat
        completions, and `ConfigError` for an unusable tokenizer, template or parser.
        """
        if not self.token_exact:
            kinds = ", ".join(dict.fromkeys(server.config.server_type for server in self.servers))
            raise NotImplementedError(
                f"Servers of type {kinds} do not return tokens; sglang, vllm and transformers do."
            )
        servers: list[JSON] = [*self._in_turn()]
        # One server's client renders the conversation, and any server may
        # continue it: ids mean the same at all of them.
        sampled_by: TokenEngine = servers[0] if len(servers) == 1 else _FirstAvailable(servers)
        managed: ManagedChat = servers[0].managed_server(engine=sampled_by, **options)
        return managed

    def _in_turn(self) -> list[ServerEngine]:
        """Return the servers, beginning with the one whose turn is next."""
        first = self._sessions % len(self.servers)
        self._sessions += 1
        return self.servers[first:] + self.servers[:first]


ServerManager = ServerGroup
"""The name under which existing environments import `ServerGroup`."""


def _complete(config: ServerBaseline) -> APIServerConfig:
    """Complete a server's settings. A baseline has no address; an engine that needs one reports that it is missing."""
    return config if isinstance(config, APIServerConfig) else APIServerConfig(**config.model_dump(exclude_unset=True))


class _FirstAvailable(ChatServer):
    """Calls the first server, whose prefix cache holds the conversation, and the others only if it is unavailable.
    Token ids have the same meaning at every server of one model."""

    def __init__(self, servers: Sequence[JSON]) -> None:
        self.servers = list(servers)
        self.features = frozenset.intersection(*(getattr(each, "features", frozenset()) for each in servers))

    @property
    def name(self) -> str:
        name: str = self.servers[0].name
        return name

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        return await self._first(lambda server: server.chat_completion(messages=messages, **request))

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        return await self._first(lambda server: server.completion(prompt=prompt, **request))

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        return await self._first(lambda server: server.generate(input_ids, sampling))

    async def _first(self, ask: Callable[[JSON], Awaitable[T]]) -> T:
        for server in tuple(self.servers):
            try:
                return await ask(server)
            except EngineUnavailable as error:
                failure = error
                # Of calls at the same time, only the first to fail makes the next server the first one.
                if self.servers[0] is server:
                    self.servers.append(self.servers.pop(0))
        raise failure
