"""`ToolRuntime`: the tools of one rollout. Every call of a rollout's tools goes through it.

    outcome = await runtime.call("terminal", '{"command": "ls"}')     # JSON text of a model, or a mapping
    outcome.text, outcome.failed

The agent loop does the same in two steps: `check` before a batch starts, then `run`.

Invariants (R1): mistakes of the model and failures of a tool are outcomes; infrastructure failures (`InfraError`) and
configuration errors (`ConfigError`) are raised. The slot is acquired once, when a tool first needs it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from palaestra.tools.arguments import InvalidArguments
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import States, Tool, ToolMistake, ToolOutcome, ToolRun, ToolSchema, run_tool
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

JUDGING: ContextVar[bool] = ContextVar("judging", default=False)
"""Whether a check makes the calls: equal questions that a check asks a model have one verdict in a run."""


@dataclass(slots=True)
class CheckedCall:
    """A call that may run: the tool exists, and `arguments` fit its schema (`call_tool` leaves this check to its
    caller).

    `conversation` is copied from the runtime. `by_agent` is false for a call from code, that is, from a program, a hook
    or another tool. `call_id` is the id that the model gave the agent's call.
    """

    tool: Tool
    arguments: Mapping[str, JSON]
    run: ToolRun
    conversation: str = ""
    by_agent: bool = False
    call_id: str = ""

    @property
    def name(self) -> str:
        return self.tool.name


Next: TypeAlias = Callable[[CheckedCall], Awaitable[ToolOutcome]]
ToolMiddleware: TypeAlias = Callable[[CheckedCall, Next], Awaitable[ToolOutcome]]
"""`await middleware(call, next)` answers a call; it may use `await next(call)`. Raises `PalaestraError`."""


class ToolRecordings(Protocol):
    """Recorded answers for the trajectories of a `ToolExecutor` or `ToolSession`. `open_world` creates one."""

    @property
    def replayed(self) -> bool:
        """Whether all answers come from a recording, so that the tools need no key and no network."""
        ...

    def rollout(self, rollout_id: str, /) -> ToolMiddleware:
        """Return the middleware of one trajectory, starting at the beginning of its recording."""
        ...

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        ...


class ToolRuntime(ToolRun):
    """The tools of a registry, for one rollout or one of its conversations.

    `slot_source` hands out the sandbox. If it is None, tools that need a sandbox fail. `middleware` wraps every call,
    including those of sub-agents and programs; the first one is the outermost. `shared` defaults to the registry's.
    `conversation` names a sub-agent or another part of the rollout, and is empty for the rollout's main agent.
    `process_task` is the task of the background processes, by default `task_id`. `aclose` does not end the slot.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        slot_source: Callable[[], Awaitable[Slot]] | None = None,
        task_id: str = "",
        user_task: str = "",
        timeout_s: float = 120.0,
        *,
        middleware: Sequence[ToolMiddleware] = (),
        shared: States | None = None,
        conversation: str = "",
        process_task: str | None = None,
    ) -> None:
        super().__init__(task_id, user_task, timeout_s, shared if shared is not None else registry.shared)
        self.process_task = process_task or task_id
        self.registry = registry
        self.replayed = registry.replayed
        self.middleware = tuple(middleware)
        self.conversation = conversation
        self.parallel_safe: frozenset[str] = registry.parallel_safe()
        self._slot_once = None if slot_source is None else _SlotOnce(slot_source)
        self._answer: Next = lambda call: run_tool(call.tool, call.arguments, call.run)
        for each in reversed(self.middleware):
            self._answer = _surrounded(each, self._answer)

    async def slot(self) -> Slot:
        return await (super().slot() if self._slot_once is None else self._slot_once.get())

    def schemas(self) -> list[ToolSchema]:
        """Return the schemas of the tools that are available here."""
        registry = self.registry
        return [tool.schema for tool in registry.tools() if registry.missing_reason(tool.name) is None]

    def check(
        self,
        name: str,
        arguments: Mapping[str, JSON] | str | None,
        *,
        by_agent: bool = False,
        timeout_s: float | None = None,
    ) -> CheckedCall:
        """Check a call. `timeout_s` replaces the default time limit. Raises `ToolMistake` for an unknown tool, and its
        subclass `InvalidArguments`."""
        tool = self.registry.get(name)
        if tool is None:
            names = [schema.name for schema in self.schemas()]
            raise ToolMistake(f"Unknown tool '{name}'. Available tools: {names}")
        checked = self.registry.argument_schema(name).parse(arguments)
        run = self if timeout_s is None else self._limited(timeout_s)
        return CheckedCall(tool, checked, run, self.conversation, by_agent)

    def run(self, call: CheckedCall) -> Awaitable[ToolOutcome]:
        """Run a checked call through the middleware. Raises `PalaestraError`."""
        return self._answer(call)

    def call_tool(self, tool: Tool, arguments: Mapping[str, JSON]) -> Awaitable[ToolOutcome]:
        return self._answer(CheckedCall(tool, arguments, self, self.conversation))

    async def call(
        self,
        name: str,
        arguments: Mapping[str, JSON] | str | None,
        *,
        by_agent: bool = False,
        timeout_s: float | None = None,
    ) -> ToolOutcome:
        """Check a call and run it. Raises `PalaestraError`; the outcome reports every other failure.

        If `timeout_s` is given, an external tool is ended after it; other tools end their own commands.
        """
        try:
            call = self.check(name, arguments, by_agent=by_agent, timeout_s=timeout_s)
        except InvalidArguments as mistake:
            reason = self.registry.missing_reason(name)
            return ToolOutcome.refused(str(mistake) if reason is None else f"{name} cannot be used here: {reason}")
        except ToolMistake as mistake:
            return ToolOutcome.refused(str(mistake))
        try:
            async with asyncio.timeout(timeout_s if call.tool.schema.external else None) as limit:
                return await self._answer(call)
        except TimeoutError:
            # `ToolStuck` is a timeout too, but an infrastructure failure that the model must not see.
            if not limit.expired():
                raise
            return ToolOutcome.refused(f"The tool did not answer within {timeout_s:g} s.")

    async def handle(self, name: str, args: Mapping[str, JSON], task_id: str | None = None) -> str:
        """Make a call and return the text that the model reads. The parameters are those of a `tool_handler` in the
        project's interface contract."""
        return (await self.call(name, args)).text

    def _limited(self, timeout_s: float) -> ToolRun:
        """Return a copy of this runtime with a different time limit. It shares the slot and all state."""
        # A copy, because other calls of this runtime run concurrently with their own limits.
        limited = copy.copy(self)
        limited.timeout_s = timeout_s
        return limited


@dataclass(frozen=True, slots=True)
class TaskTools:
    """The tools of the current rollout, for code that the rollout's environment runs, such as a reward function."""

    task_id: str
    tools: Callable[[], ToolRuntime]
    loop: asyncio.AbstractEventLoop


TASK_TOOLS: ContextVar[TaskTools | None] = ContextVar("task_tools", default=None)

REFUSED_SLOTS: ContextVar[dict[str, TaskError] | None] = ContextVar("refused_slots", default=None)
"""The tasks, by id, that could get no slot because of their image, with the errors. An environment whose code catches
such an error could otherwise turn it into a score."""


def tools_of_task(task_id: str | None) -> TaskTools | None:
    """Return the tools of the current rollout if `task_id` is None or names its task. Return None for another task,
    which has its own slot, and outside a rollout."""
    found = TASK_TOOLS.get()
    return found if found is not None and task_id in (None, found.task_id) else None


def _surrounded(middleware: ToolMiddleware, then: Next) -> Next:
    return lambda call: middleware(call, then)


class _SlotOnce:
    """Acquires a slot on the first call. After a failure, the next call tries again."""

    def __init__(self, source: Callable[[], Awaitable[Slot]]) -> None:
        self._source = source
        self._slot: Slot | None = None
        self._acquiring = asyncio.Lock()

    async def get(self) -> Slot:
        # Concurrent first calls must not acquire two slots.
        async with self._acquiring:
            if self._slot is None:
                self._slot = await self._source()
            return self._slot
