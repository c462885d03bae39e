"""`ChatService`: model clients, tools, slots, background processes and the store, for all conversations in a process.

    async with ChatService(APIServerConfig(base_url="http://127.0.0.1:8000/v1"), store) as service:
        conversation = Conversation.begin(service, People(approve=ask_person))
        async for event in conversation.send("What is in this folder?"):
            ...
        await conversation.close()

A terminal has one conversation, an editor a few, a gateway hundreds. Each part of the service starts when it is first
needed: the first message connects to the model server, the first command starts the backend. Use a service in one event
loop only.

If the backend's slots outlive the process (`LocalBackend(service=…)`) and there is a `checkpoint` file for background
processes, the next service takes over the slots and processes of a service that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from palaestra.agent.budget import Budget
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import Tool
from palaestra_chat.hooks import Hooks
from palaestra_chat.store import ConversationStore
from palaestra_slots.core.errors import ConfigError, EngineError, SandboxError
from palaestra_slots.core.types import JSON, Prices
from palaestra_slots.processes.notifications import Notifications
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import ProcessSession
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Mount, Slot, SlotSpec, Snapshot
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.engines.token_engine import TokenServer
from palaestra_tokens.http.chat_completions import listed_models
from palaestra_tokens.server_group import Server, ServerGroup

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = (
    "You are a helpful agent with tools. Do what the user asks: look before you change things, use the tools for what "
    "they can find out, check your work, and answer briefly. Commands run in an isolated sandbox."
)
TOOLSETS = ("terminal", "file")

BuildTools: TypeAlias = Callable[[Sequence[str]], ToolRegistry]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of the conversations of a service.

    `max_turns` is the maximum number of model calls for one message, and `budget` limits tokens and cost for one
    message. `context_tokens` is the size of the model's context window, or None for what the server reports. `spec`
    describes the slots, `missing_tools` names programs of the user's PATH that they lack, and `prepare` puts files into
    each new slot; `workdir` is a folder of this machine that each
    new slot gets a copy of, instead. `checkpoints` is the maximum number of turns of a conversation whose files can be
    restored. `mode` is the permission mode (`permissions.py`), and `rules_folder` the folder for which approvals are
    kept, or None to keep them for all folders. `hooks` are the user's commands around tool calls. `models` are further
    model servers by name. `tools` are added to the
    tools of every toolset; `provided` replace built-in tools of the same name; `build_tools` replaces
    `build_tool_registry`. `memory` is the folder of the `memory` tool's notes. `shared` are objects that tools find by
    type (`ToolRun.state`).
    """

    system_prompt: str | None = SYSTEM_PROMPT
    toolsets: Sequence[str] = TOOLSETS
    tools: Sequence[Tool] = ()
    provided: Sequence[Tool] = ()
    build_tools: BuildTools | None = None
    tool_settings: ToolSettings | None = None
    max_turns: int = 60
    temperature: float = 1.0
    max_tokens: int | None = None
    context_tokens: int | None = None
    extra_body: Mapping[str, JSON] | None = None
    budget: Budget | None = None
    prices: Prices | None = None
    tool_timeout_s: float = 120.0
    spec: SlotSpec = field(default_factory=SlotSpec)
    memory: Path | None = None
    prepare: Callable[[Slot], Awaitable[None]] | None = None
    workdir: Path | None = None
    checkpoints: int = 0
    mode: str = "auto"
    rules_folder: Path | None = None
    missing_tools: Sequence[str] = ()
    hooks: Hooks | None = None
    models: Mapping[str, APIServerConfig] = field(default_factory=dict)
    shared: Sequence[object] = ()


class OpenConversation(Protocol):
    """The part of a conversation that the service uses; `conversation.py` implements it."""

    def on_process(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        """Report on a background process of the conversation."""
        ...

    async def close(self, *, keep_slot: bool = False) -> None:
        """Interrupt the conversation and close it."""
        ...


class ChatService:
    """The parts that conversations share. A conversation uses `server` unless it specifies a different one. Slots come
    from `pool`, by default one of this machine. The file `checkpoint` hands
    background processes over to the next service. The caller closes `store`. Raises `ConfigError` for unusable server
    settings."""

    def __init__(
        self,
        server: Server | Sequence[Server],
        store: ConversationStore,
        settings: ChatSettings | None = None,
        *,
        pool: SlotPool | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        ServerGroup(server)  # checks the settings early
        self.store = store
        self.settings = settings or ChatSettings()
        self.server = server
        self.pool = SlotPool() if pool is None else pool
        self.processes = ProcessRegistry(
            checkpoint_path=checkpoint, notifications=_Routed(self._route_notification), report_ends=True
        )
        self.conversations: dict[str, OpenConversation] = {}
        """The open conversations by id."""
        self._lasting = self.pool.backend if getattr(self.pool.backend, "stays", False) else None
        self._kept: dict[str, Slot] = {}
        self._groups: list[tuple[Server | Sequence[Server], ServerGroup, asyncio.Task[None]]] = []
        self._registries: dict[tuple[str, ...], ToolRegistry] = {}
        self._starting = asyncio.Lock()
        self._started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Interrupt and close every conversation, end the slots unless they outlive the process, and close the
        connections. Idempotent."""
        for conversation in list(self.conversations.values()):
            await conversation.close(keep_slot=self._lasting is not None)
        await self.processes.aclose()
        for _, group, starting in self._groups:
            starting.cancel()
            await group.aclose()
        self._groups.clear()
        self._registries.clear()
        if self._started:
            await self.pool.aclose()
            self._started = False

    def registry(self, toolsets: Sequence[str], more: Sequence[Tool] = ()) -> ToolRegistry:
        """Return the tools of these toolsets, built once, and those of `more` that have other names. Raises
        `ConfigError` for an unknown toolset."""
        key = tuple(toolsets)
        if key not in self._registries:
            self._registries[key] = self._build(key)
        registry = self._registries[key]
        more = [tool for tool in more if tool.name not in registry]
        return registry.with_tools([*registry.tools(), *more]) if more else registry

    def _build(self, toolsets: Sequence[str]) -> ToolRegistry:
        if self.settings.build_tools is not None:
            return self.settings.build_tools(toolsets)
        settings = self.settings
        return build_tool_registry(
            list(toolsets), extra=settings.tools, settings=settings.tool_settings, provided=settings.provided
        )

    async def engine(self, server: Server | Sequence[Server]) -> ServerGroup:
        """Return the client for these model servers, and start it if necessary. Raises `EngineError` if a server does
        not answer; the next call tries again."""
        for known, group, starting in self._groups:  # noqa: B007
            if known == server:
                break
        else:
            group = ServerGroup(server)
            starting = asyncio.ensure_future(group.start())
            self._groups.append((server, group, starting))
        try:
            await asyncio.shield(starting)
        except BaseException:
            if starting.done() and (starting.cancelled() or starting.exception() is not None):
                self._groups = [each for each in self._groups if each[2] is not starting]
            raise
        return group

    async def start(self) -> None:
        """Start the backend, and take over the slots and processes of an earlier service. Idempotent. Without this
        call, the first command starts the backend. Raises `IsolationUnavailable` and `SandboxError`."""
        async with self._starting:
            if self._started:
                return
            await self.pool.start()
            self._started = True
            if self._lasting is not None:
                slots: list[Slot] = self._lasting.leases()  # type: ignore[attr-defined]
                for slot in slots:
                    self.pool.leases.take_up(slot)
                    self._kept[slot.trajectory_id] = slot
                await self.processes.recover_from_checkpoint(slots)

    async def lease(
        self,
        conversation: str,
        snapshot: Snapshot | None = None,
        workspace: str = "",
        copies: Callable[[], Awaitable[Sequence[Mount]]] | None = None,
    ) -> tuple[Slot, bool]:
        """Return a slot for a conversation, and whether it is the slot that the conversation had in an earlier
        service. If the backend can do that, a new slot has its workspace also at the path `workspace`, and begins with
        the folders that `copies` returns."""
        await self.start()
        kept = self._kept.pop(conversation, None)
        if kept is not None:
            return kept, True
        spec = self.settings.spec
        if workspace and getattr(self.pool.backend, "places_workspace", False):
            spec = replace(spec, workspace=workspace)
        if copies is not None and getattr(self.pool.backend, "copies_folders", False):
            with_folders = replace(spec, copies=tuple(await copies()))
            try:
                return await self.pool.acquire(conversation, spec=with_folders, snapshot=snapshot), False
            except SandboxError:  # some file systems cannot be the lower part of a slot's
                if not with_folders.copies:
                    raise
        return await self.pool.acquire(conversation, spec=spec, snapshot=snapshot), False

    async def release(self, slot: Slot) -> None:
        """Kill a conversation's processes, delete their records and release its slot."""
        await self.processes.kill_all(slot.trajectory_id)
        self.processes.forget(slot.trajectory_id)
        with contextlib.suppress(SandboxError):
            await self.pool.release(slot)

    @property
    def lasting(self) -> bool:
        """Whether slots outlive this process."""
        return self._lasting is not None

    def model_name(self, server: Server | Sequence[Server] | None = None) -> str:
        """Return the name of a server's model; for several servers, the names separated by commas."""
        server = self.server if server is None else server
        for known, group, _ in self._groups:
            if known == server:
                return group.name
        several = [server] if isinstance(server, ServerBaseline | ServerEngine) else server
        return ", ".join(each.name if isinstance(each, ServerEngine) else each.model_name for each in several)

    def running(self, conversation: str) -> int:
        """Return how many background processes of a conversation run."""
        return sum(session.running for session in self.processes.sessions(conversation))

    def server_for(self, model: str) -> Server:
        """Return the server of this name among the settings' `models`, or else the service's server with a different
        model. Raises `ConfigError` unless the service has exactly one `APIServerConfig`."""
        if model in self.settings.models:
            return self.settings.models[model]
        if not isinstance(self.server, APIServerConfig):
            raise ConfigError("the model can be changed only if exactly one model server is configured")
        return self.server.model_copy(update={"model_name": model})

    async def models(self) -> list[str]:
        """Return the models that the service's server lists. The result is empty if the server has no list or does not
        answer, and if the service has several servers."""
        if not isinstance(self.server, APIServerConfig):
            return []
        try:
            (engine,) = (await self.engine(self.server)).servers
            if not isinstance(engine, OpenAIEngine | TokenServer):
                return []
            reply = await engine.transport.list_models(engine.base_url / "models")
        except EngineError:
            return []
        return [model.id for model in listed_models(reply.body)] if reply.status == 200 else []

    def _route_notification(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        conversation = self.conversations.get(session.task_id)
        if conversation is not None:
            conversation.on_process(session, kind, text, exit_code)


class _Routed(Notifications):
    """Notifications that are also passed to the service."""

    def __init__(self, report: Callable[[ProcessSession, str, str, int | None], None]) -> None:
        super().__init__()
        self._route = report

    def add_event(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        super().add_event(session, kind, text, exit_code)
        self._route(session, kind, text, exit_code)
