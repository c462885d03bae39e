"""`Seat`: what an agent works with: a model session, a slot, tools bound to that slot, sub-agents.

Rollouts, conversations and programs that call `Agent` put their agents into a seat; what they add (a score and a
record, a stored history) is theirs. Invariants: the slot is leased when something first needs it, and it is handed over
or released exactly once; tools are closed before their slot ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from palaestra.agent.loop import AgentLoop, Answer, LoopSettings, OnTurn
from palaestra.agent.tool_calls import ToolHandler, handler_runtime
from palaestra.tools.inner_calls import InnerCall, InnerCalls
from palaestra.tools.registry.registry import Kit
from palaestra.tools.runtime.runtime import ToolMiddleware, ToolRuntime
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.chat_server import ChatServer, chat_server

if TYPE_CHECKING:
    from palaestra.agent.subagents import Agent

_DELEGATE = "delegate_task"


class SlotPlace(Protocol):
    """Where a seat's slot comes from, and where it goes when the seat is closed."""

    async def lease(self) -> Slot: ...

    async def release(self, slot: Slot) -> None: ...


def _ignored() -> None:
    pass


@dataclass(slots=True, eq=False)
class Seat:
    """One agent's seat. `name` is the id by which its tools, slot and processes are known.

    `timeout_s` is the default time limit of a command, and `user_task` the beginning of what the user asked. Every tool
    call passes through `middleware`, the outermost first. Tools find the objects in `shares` by their type. If
    `session_key` is set, it names the chat to which messages of the tools belong. `on_progress` is called when a
    sub-agent takes a turn.
    """

    name: str
    kit: Kit
    place: SlotPlace
    server: ChatServer | None = None
    user_task: str = ""
    timeout_s: float = 120.0
    middleware: Sequence[ToolMiddleware] = ()
    shares: Sequence[object] = ()
    session_key: str = ""
    on_progress: Callable[[], None] = _ignored
    slot: Slot | None = field(default=None, init=False)
    """The slot, if it was leased and neither handed over nor released."""
    _tools: ToolRuntime | None = field(default=None, init=False)
    _others: list[ToolRuntime] = field(default_factory=list, init=False)
    """Tools bound to other views of the slot, those of an earlier slot, and those that a handler runs."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1), init=False)
    _leasing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def use_server(self, server: object) -> None:
        """Let the agent call this model server from now on."""
        self.server = chat_server(server)

    def offer(self, kit: Kit, user_task: str | None = None) -> None:
        """Offer these tools to the agent the next time that tools are bound. `user_task` is what the user asks."""
        self.kit = kit
        self.user_task = self.user_task if user_task is None else user_task

    async def sandbox(self) -> Slot:
        """Return the slot; the first call leases it."""
        async with self._leasing:
            if self.slot is None:
                self.slot = await self.place.lease()
            return self.slot

    @property
    def tools(self) -> ToolRuntime:
        """The tools of the kit, bound to the slot."""
        if self._tools is None:
            self._tools = self._bound(self.sandbox, self.user_task)
            for thing in self.shares:
                self._tools.share(thing)
        return self._tools

    def share(self, thing: object) -> None:
        """Let tools find this object by its type."""
        self.shares = (*self.shares, thing)
        if self._tools is not None:
            self._tools.share(thing)

    def bind_tools(self, sandbox: Callable[[], Awaitable[Slot]], user_task: str) -> ToolRuntime:
        """Return the tools of the kit, bound to another view of the slot. The seat closes them with its own."""
        tools = self._bound(sandbox, user_task)
        self._others.append(tools)
        return tools

    def _bound(self, sandbox: Callable[[], Awaitable[Slot]], user_task: str) -> ToolRuntime:
        tools = ToolRuntime(
            self.kit.registry, sandbox, self.name, user_task, self.timeout_s, middleware=self.middleware
        )
        tools.session_key = self.session_key
        return tools

    def loop(
        self,
        server: ChatServer,
        settings: LoopSettings,
        *,
        on_turn: OnTurn | None = None,
        user: Answer | None = None,
        tool_handler: ToolRuntime | ToolHandler | None = None,
    ) -> AgentLoop:
        """Return an agent loop on `server`, whose calls `tool_handler` runs, by default the seat's tools. The agent
        may delegate work if the kit has the tool for that. `user` answers its replies without tool calls."""
        kit, tools = self.kit, tool_handler or self.tools
        if isinstance(tools, ToolRuntime):
            runtime = tools
        else:
            # The handler's calls are checked against the definitions that the model sees.
            runtime = handler_runtime(tools, kit.definitions, kit.names, self.name, self.middleware)
        loop = AgentLoop(
            server,
            runtime,
            settings,
            definitions=kit.definitions,
            names=kit.names,
            parallel_safe=self.tools.parallel_safe,
            on_turn=on_turn,
            user=user,
        )
        self.attend(loop, tools=runtime if runtime in self._others else self.tools)
        if runtime is not tools:
            self._others.append(runtime)
        return loop

    def attend(self, loop: AgentLoop, agent: Agent | None = None, *, tools: ToolRuntime | None = None) -> None:
        """Let the agent of this loop delegate work, if it has the tool for that. Pass `agent` if the agent is not the
        loop itself."""
        bound = tools or self.tools
        if bound.registry.get(_DELEGATE) is not None:
            from palaestra.agent.subagents import Subagents  # imported here, because few agents delegate work

            Subagents(loop, bound, self.on_progress, numbers=self._numbers, agent=agent).offer()

    def next_branch(self) -> int:
        """Return the number of a further conversation with the model server, next to those of sub-agents."""
        return next(self._numbers)

    def ended(self) -> None:
        """End what a loop offered: the delegation refers to the loop, which refers to the tools."""
        for tools in self._every():
            if tools.registry.get(_DELEGATE) is not None:
                from palaestra.tools.builtin.delegate_task import Delegation  # imported here, as above

                tools.share(Delegation())

    def take_inner_calls(self, turn: int) -> list[InnerCall]:
        """Return the calls that programs of the agent have made since the last time, as those of this turn."""
        found = (tools.found_state(InnerCalls) for tools in self._every())
        return [call for calls in found if calls is not None for call in calls.taken(turn)]

    def _every(self) -> list[ToolRuntime]:
        return [*self._others, *(() if self._tools is None else (self._tools,))]

    def move(self) -> None:
        """Let the next use of the tools bind new ones. The earlier ones are closed when the seat is."""
        if self._tools is not None:
            self._others.append(self._tools)
        self._tools = None

    async def end_tools(self) -> None:
        """Close all tools."""
        self.move()
        while self._others:
            await self._others.pop().aclose()

    async def leave(self) -> Slot | None:
        """Close the tools and hand over the slot; None if there is none. A later use leases another slot."""
        await self.end_tools()
        slot, self.slot = self.slot, None
        return slot

    async def aclose(self) -> None:
        """Close the tools and release the slot. Idempotent; the seat may be used again."""
        # Taken first, so that the slot is released exactly once, even if `aclose` is called again meanwhile.
        slot, self.slot = self.slot, None
        try:
            await self.end_tools()
        finally:
            if slot is not None:
                await self.place.release(slot)
