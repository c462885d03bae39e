"""Tools bound to one rollout: `SlotTools` runs them in the rollout's slot and answers the agent loop.

Not for sharing slots among trajectories (`executor.py`) and not for deciding which tools there are (`registry.py`).

Invariant (R1): the model sees its own mistakes and a tool's failure as a reply; the world's failure (`InfraError`) and
what was set up wrongly (`ConfigError`, such as an image that is not there) always propagate. The slot is acquired when
a tool first needs one, once, however many calls run at the same time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from palaestra.core.types import JSON
from palaestra.core.user_code import ForeignError, foreign
from palaestra.sandbox.slot import Slot
from palaestra.tools.arguments import InvalidArguments, parse_arguments
from palaestra.tools.call_text import encodable
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.recorded_calls import World
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.tool import StateT, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema

logger = logging.getLogger(__name__)


MAX_USER_TASK = 500
"""How many characters of what the agent is asked its tools are told."""


class SlotTools:
    """The tools of a registry, bound to one rollout. Implements `ToolRun`.

    `slot_source` hands out the rollout's slot; it is awaited at most once. `timeout_s` is the default time limit of a
    command. `world` answers for the tools that touch the world; without one they are simply run. `shared` is what the
    rollouts of a run have together, by default the registry's; where there is none, the binding has its own. `aclose`
    ends what tools have opened outside the slot; the slot is its owner's to end.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        slot_source: Callable[[], Awaitable[Slot]],
        task_id: str,
        user_task: str = "",
        timeout_s: float = 120.0,
        world: World | None = None,
        shared: States | None = None,
    ) -> None:
        self.registry = registry
        self.world = world
        given = shared if shared is not None else registry.shared
        self.shared = given if given is not None else States()
        self._own_shared = given is None
        self.parallel_safe: frozenset[str] = registry.parallel_safe()
        self._slot_source = slot_source
        self._slot: Slot | None = None
        self._acquiring = asyncio.Lock()
        self._task_id = task_id
        self._user_task = user_task
        self._timeout_s = timeout_s
        self._states = States()

    @property
    def task_id(self) -> str:
        return self._task_id

    @property
    def user_task(self) -> str:
        return self._user_task[:MAX_USER_TASK]

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    async def slot(self) -> Slot:
        """The rollout's slot, acquired on the first call."""
        async with self._acquiring:
            if self._slot is None:
                self._slot = await self._slot_source()
            return self._slot

    def state(self, kind: type[StateT]) -> StateT:
        """The rollout's one object of this type, made when first asked for."""
        return self._states.get(kind)

    def schemas(self) -> list[ToolSchema]:
        """The tools that can be used here."""
        tools = (self.registry.get(name) for name in self.registry.list_tools())
        replayed = self.world is not None and self.world.replayed
        return [
            tool.schema
            for tool in tools
            if tool is not None and ((replayed and tool.touches_world) or tool.missing() is None)
        ]

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolReply:
        """Run a tool for another one; see `reply`."""
        return await self.reply(name, arguments)

    async def reply(
        self, name: str, arguments: Mapping[str, JSON] | str, *, timeout_s: float | None = None
    ) -> ToolReply:
        """Run one tool and return what it returned; its mistakes and failures come back as a dict with `error`.

        `timeout_s` replaces the default time limit for this call. Raises `PalaestraError`.
        """
        tool = self.registry.get(name)
        if tool is None:
            return {"error": f"Unknown tool '{name}'. Available tools: {[schema.name for schema in self.schemas()]}"}
        world = self.world if tool.touches_world else None
        if world is None and (reason := tool.missing()) is not None:  # a recorded world needs nothing of a tool
            return {"error": f"{name} cannot be used here: {reason}"}
        try:
            checked = parse_arguments(arguments, tool.schema)
        except InvalidArguments as mistake:
            return {"error": str(mistake)}
        run: ToolRun = self if timeout_s is None else _Timed(self, timeout_s)
        if world is not None:
            return await world.call(tool, checked, run, lambda: self._run(tool, checked, run))
        return await self._run(tool, checked, run)

    async def _run(self, tool: Tool, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        try:
            return await foreign(tool.run(arguments, run), expected=(InvalidArguments, ToolMistake))
        except InvalidArguments as mistake:  # what the schema could not say
            return {"error": str(mistake)}
        except ToolMistake as mistake:
            return {"error": str(mistake), **mistake.details}
        except ForeignError as error:
            logger.warning("tool %s failed in task %s", tool.name, self._task_id, exc_info=True)
            return {"error": f"Tool execution failed: {error}"}

    async def handle(self, name: str, args: Mapping[str, JSON], task_id: str | None = None) -> str:
        """The agent loop's `tool_handler`: one call, answered with the JSON text that goes into the conversation.

        `task_id` is part of the loop's signature; the binding already knows whose slot it is. Raises `PalaestraError`.
        """
        return reply_text(await self.reply(name, args))

    def share(self, thing: object) -> None:
        """Make this the rollout's one object of its type: one that several conversations have together."""
        self._states.put(thing)

    async def aclose(self) -> None:
        """Close what the rollout's tools hold, such as pages of a browser. A later call opens anew. Idempotent."""
        await self._states.aclose()
        if self._own_shared:
            await self.shared.aclose()


@dataclass(frozen=True, slots=True)
class _Timed:
    """A rollout's tools as one call sees them, with a time limit of its own."""

    tools: SlotTools
    timeout_s: float

    @property
    def task_id(self) -> str:
        return self.tools.task_id

    @property
    def user_task(self) -> str:
        return self.tools.user_task

    @property
    def shared(self) -> States:
        return self.tools.shared

    async def slot(self) -> Slot:
        return await self.tools.slot()

    def state(self, kind: type[StateT]) -> StateT:
        return self.tools.state(kind)

    def schemas(self) -> list[ToolSchema]:
        return self.tools.schemas()

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> ToolReply:
        return await self.tools.call(name, arguments)


def reply_text(reply: ToolReply) -> str:
    """A tool's reply as text that can be encoded."""
    return encodable(reply if isinstance(reply, str) else json.dumps(dict(reply), ensure_ascii=False))
