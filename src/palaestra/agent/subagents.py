"""Sub-agents: conversations beside the rollout's own, over the same loop, that do a piece of work and report.

A sub-agent has its own messages, tool state and limits, and shares what the rollout has: its slot, its background
processes, its engine and its budget. With a token-exact engine its tokens go into the rollout's ledger, in a segment
of their own that says so (T2), so they are trained once like all others (T3).

Not for how it is asked for (`tools/builtin/delegate_task.py`). Invariants: a sub-agent never outlives the call that
started it; the world's failure in one is the rollout's, never something that the model reads (R1); whatever happens,
what it did is in the rollout's result (A3).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from palaestra.agent.loop import HermesAgentLoop
from palaestra.agent.result import AgentResult, Subagent
from palaestra.core.errors import ConfigError, ContextExceeded
from palaestra.core.types import Outcome
from palaestra.inference.base import ChatServer
from palaestra.processes.registry import ProcessRegistry
from palaestra.tools.approval import Approvals
from palaestra.tools.binding import SlotTools
from palaestra.tools.builtin.execute_code import Programs
from palaestra.tools.delegation import Assignment, Delegation, Report
from palaestra.tools.inside import Inside
from palaestra.tools.registry import ToolRegistry
from palaestra.tools.schema import ToolMistake
from palaestra.tools.toolsets import TOOLSETS, resolve_toolsets

MAX_DEPTH = 1
"""How many sub-agents may stand below each other; one that stands lowest has no `delegate_task`."""

NOT_FOR_SUBAGENTS = frozenset({"clarify", "memory", "session_search", "send_message"})
"""Tools that speak to a person or for one: they are the rollout's own agent's."""

SYSTEM_PROMPT = (
    "You are a sub-agent: another agent has given you one piece of work and waits for your report. Do that work with "
    "the tools you have, and nothing beyond it. Nobody can answer questions. When you are done, reply without a call: "
    "that reply is all that the other agent reads, so say what you did, what you found, and what is left or went wrong."
)

logger = logging.getLogger(__name__)

_NAME = "delegate_task"
_CLOSE_S = 30.0


class _Forking(Protocol):
    """A server that keeps conversations apart: what a token-exact one does."""

    def child(self, *, number: int) -> ChatServer: ...


@dataclass(slots=True)
class Subagents:
    """The sub-agents of one agent. `loop` and `tools` are that agent's; `moved` hears of every turn of theirs,
    and `served` makes of a server the one that they ask.

    `depth` is how many agents stand above them. `numbers` counts over the whole rollout, from 1.
    """

    loop: HermesAgentLoop
    tools: SlotTools
    moved: Callable[[], None] = lambda: None
    served: Callable[[ChatServer], ChatServer] = lambda server: server
    depth: int = 0
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def offer(self) -> None:
        """Let the agent's `delegate_task` find them, where it has that tool."""
        if self.tools.registry.get(_NAME) is not None:
            self.tools.share(Delegation(self.work))

    async def work(self, assignments: Sequence[Assignment]) -> list[Report]:
        """Have all of them done at the same time. Raises `ToolMistake` before any is started, and `PalaestraError`."""
        registries = [self._registry(assignment) for assignment in assignments]
        started = [
            self._started(assignment, registry, len(assignments))
            for assignment, registry in zip(assignments, registries, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                reports = [group.create_task(each.run()) for each in started]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for each in started:
                await each.tools.aclose()
        return [report.result() for report in reports]

    def _registry(self, assignment: Assignment) -> ToolRegistry:
        """The tools of the one who gives the work, as far as they are asked for. Raises `ToolMistake`."""
        own = self.tools.registry
        names = [name for name in own.list_tools() if name not in NOT_FOR_SUBAGENTS]
        if self.depth + 1 >= MAX_DEPTH:
            names = [name for name in names if name != _NAME]
        tools = [tool for name in names if (tool := own.get(name)) is not None]
        if assignment.toolsets is not None:
            wanted = _members(assignment.toolsets, {tool.toolset for tool in tools})
            tools = [tool for tool in tools if tool.name in wanted or tool.toolset in assignment.toolsets]
        return ToolRegistry(tools)

    def _started(self, assignment: Assignment, registry: ToolRegistry, together: int) -> _One:
        """A sub-agent that is ready to go, and in the record already."""
        number, above = next(self.numbers), self.loop
        own = self.tools
        world = None if own.world is None else own.world.beside(f"subagent-{number}")
        tools = SlotTools(registry, own.slot, own.task_id, assignment.goal[:500], own.timeout_s, world, own.shared)
        tools.share(own.state(ProcessRegistry))
        tools.share(own.state(Approvals))
        tools.share(Programs(f"subagent-{number}-"))
        server = self._server(number)

        def turned(*_: object) -> None:
            record.inner_calls.extend(tools.state(Inside).taken(loop.result.turns_used))
            self.moved()

        loop = HermesAgentLoop(
            server,
            registry.definitions(),
            set(registry.list_tools()),
            max_turns=min(assignment.max_turns or above.max_turns, above.max_turns),
            task_id=above.task_id,
            temperature=above.temperature,
            max_tokens=above.max_tokens,
            extra_body=above.extra_body,
            tool_handler=tools.handle,
            max_context_tokens=above.max_context_tokens,
            parallel_safe=tools.parallel_safe,
            on_turn=turned,
            clock=above.clock,
            budget=above.budget.left(above.used(), together),
        )
        record = Subagent(number, above.result.turns_used, assignment.goal, loop.result)
        replace(self, loop=loop, tools=tools, depth=self.depth + 1).offer()
        above.result.subagents.append(record)
        return _One(assignment, loop, tools, record, above, server, turned)

    def _server(self, number: int) -> ChatServer:
        server = self.loop.server
        return self.served(cast("_Forking", server).child(number=number)) if hasattr(server, "child") else server


@dataclass(slots=True)
class _One:
    """One sub-agent at work."""

    assignment: Assignment
    loop: HermesAgentLoop
    tools: SlotTools
    record: Subagent
    above: HermesAgentLoop
    server: ChatServer
    turned: Callable[[], None]

    async def run(self) -> Report:
        """Do the work and report. Raises what the world did to it."""
        work = self.assignment
        prompt = f"{work.goal}\n\n{work.context}" if work.context else work.goal
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": prompt}]
        try:
            await self.loop.run(messages)
        finally:
            self._account()
            await self._close()
        result, failure = self.loop.result, self.loop.failure
        if result.outcome.scored:
            return _report(result)
        if isinstance(failure, ContextExceeded):  # the work itself is told at too great length, which can be mended
            return replace(_report(result), outcome=Outcome.LENGTH.value)
        assert failure is not None
        raise failure

    def _account(self) -> None:
        """What it used is the rollout's; what it did is in the record."""
        self.record.result = self.loop.result
        self.turned()
        self.record.segments = list(getattr(self.server, "segments", ()))
        self.above.delegated(self.loop)

    async def _close(self) -> None:
        """End what its own tools hold, such as pages of a browser, also when it is cancelled."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self.tools.aclose())
        except TimeoutError:
            logger.warning("what the tools of sub-agent %d hold could not be closed in time", self.record.number)


def _members(toolsets: Sequence[str], brought: Collection[str]) -> set[str]:
    """The tools of the package's own toolsets among these; others are known by the tools that they `brought`."""
    try:
        return set(resolve_toolsets([name for name in toolsets if name in TOOLSETS or name not in brought]))
    except ConfigError as error:
        raise ToolMistake(f"{error}. Nothing was started") from None


def _report(result: AgentResult) -> Report:
    return Report(
        result.final_response, result.outcome.value, result.turns_used, result.tool_calls_attempted, result.error
    )
