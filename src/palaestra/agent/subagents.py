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
from typing import Protocol

from palaestra.agent.budget import Budget
from palaestra.agent.loop import HermesAgentLoop, OnTurn
from palaestra.agent.result import AgentResult, Subagent
from palaestra.core.errors import ConfigError, ContextExceeded
from palaestra.core.types import Message, Outcome
from palaestra.inference.chat_server import ChatServer, chat_server
from palaestra.processes.registry import ProcessRegistry
from palaestra.tools.builtin.delegate_task import Assignment, Delegation, SubagentReport
from palaestra.tools.builtin.execute_code import Programs
from palaestra.tools.human.approval import Approvals
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.registry.toolsets import TOOLSETS, resolve_toolsets
from palaestra.tools.runtime.inner_calls import InnerCalls
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import ToolMistake

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


@dataclass(frozen=True, slots=True)
class Post:
    """What a new sub-agent is given: whom it asks, its tools, its work and its limits."""

    server: ChatServer
    tools: ToolRuntime
    work: str
    max_turns: int
    budget: Budget
    on_turn: OnTurn


class Agent(Protocol):
    """One that gives work: whom it asks, and how another like it is set up."""

    @property
    def server(self) -> ChatServer: ...

    def another(self, post: Post) -> SubagentConversation: ...


class SubagentConversation(Protocol):
    """One that is ready to begin. After `run`, however that ended, `loop.result` is as the model saw it."""

    @property
    def agent(self) -> Agent: ...

    @property
    def loop(self) -> HermesAgentLoop: ...

    async def run(self) -> AgentResult: ...


@dataclass(frozen=True, slots=True)
class Calling:
    """An agent that is its loop: its calls are structured. As a conversation, it begins with `messages`."""

    loop: HermesAgentLoop
    messages: list[Message] = field(default_factory=list)

    @property
    def agent(self) -> Agent:
        return self

    @property
    def server(self) -> ChatServer:
        return self.loop.server

    def another(self, post: Post) -> SubagentConversation:
        above, tools = self.loop, post.tools
        loop = HermesAgentLoop(
            post.server,
            tools.registry.definitions(),
            set(tools.registry.list_tools()),
            max_turns=post.max_turns,
            task_id=above.task_id,
            temperature=above.temperature,
            max_tokens=above.max_tokens,
            extra_body=above.extra_body,
            tool_handler=tools,
            max_context_tokens=above.max_context_tokens,
            parallel_safe=tools.parallel_safe,
            on_turn=post.on_turn,
            clock=above.clock,
            budget=post.budget,
        )
        return Calling(loop, [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": post.work}])

    async def run(self) -> AgentResult:
        return await self.loop.run(self.messages)


@dataclass(slots=True)
class Subagents:
    """The sub-agents of one agent. `loop` and `tools` are that agent's; `moved` is called at every turn of theirs.

    `agent` makes them, where that is not the loop itself. `depth` is how many agents stand above them. `numbers` counts
    over the whole rollout, from 1. `wall_s` is how long each may take, where no clock above ends them.
    """

    loop: HermesAgentLoop
    tools: ToolRuntime
    moved: Callable[[], None] = lambda: None
    depth: int = 0
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    agent: Agent | None = None
    wall_s: float | None = None

    def offer(self) -> None:
        """Let the agent's `delegate_task` find them, where it has that tool."""
        if self.tools.registry.get(_NAME) is not None:
            self.tools.share(Delegation(self.work))

    async def work(self, assignments: Sequence[Assignment]) -> list[SubagentReport]:
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
        return ToolRegistry(tools, replayed=own.replayed)

    def _started(self, assignment: Assignment, registry: ToolRegistry, together: int) -> _One:
        """A sub-agent that is ready to go, and in the record already."""
        number, above = next(self.numbers), self.loop
        own = self.tools
        tools = ToolRuntime(
            registry,
            own.slot,
            own.task_id,
            assignment.goal,
            own.timeout_s,
            middleware=own.middleware,
            shared=own.shared,
            conversation=f"subagent-{number}",
        )
        tools.share(own.state(ProcessRegistry))
        if (approvals := own.found_state(Approvals)) is not None:
            tools.share(approvals)
        tools.share(Programs(f"subagent-{number}-"))
        giver = self.agent or Calling(above)
        server = chat_server(giver.server).child(number)

        def turned(*_: object) -> None:
            if (calls := tools.found_state(InnerCalls)) is not None:
                record.inner_calls.extend(calls.taken(talk.loop.result.turns_used))
            self.moved()

        work = f"{assignment.goal}\n\n{assignment.context}" if assignment.context else assignment.goal
        most = min(assignment.max_turns or above.max_turns, above.max_turns)
        budget = replace(above.budget.left(above.used(), together), wall_s=self.wall_s)
        talk = giver.another(Post(server, tools, work, most, budget, turned))
        record = Subagent(number, above.result.turns_used, assignment.goal, talk.loop.result)
        replace(self, loop=talk.loop, tools=tools, depth=self.depth + 1, agent=talk.agent).offer()
        above.result.subagents.append(record)
        return _One(talk, tools, record, above, server, turned)


@dataclass(slots=True)
class _One:
    """One sub-agent at work."""

    talk: SubagentConversation
    tools: ToolRuntime
    record: Subagent
    above: HermesAgentLoop
    server: ChatServer
    turned: Callable[[], None]

    async def run(self) -> SubagentReport:
        """Do the work and report. Raises what the world did to it."""
        try:
            await self.talk.run()
        finally:
            self._account()
            await self._close()
        result, failure = self.talk.loop.result, self.talk.loop.failure
        if result.outcome.scored:
            return _report(result)
        if isinstance(failure, ContextExceeded):  # the work itself is told at too great length, which can be mended
            return replace(_report(result), outcome=Outcome.LENGTH.value)
        assert failure is not None
        raise failure

    def _account(self) -> None:
        """What it used is the rollout's; what it did is in the record."""
        self.record.result = self.talk.loop.result
        self.turned()
        self.record.segments = list(self.server.segments)
        self.above.delegated(self.talk.loop)

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


def _report(result: AgentResult) -> SubagentReport:
    return SubagentReport(
        result.final_response, result.outcome.value, result.turns_used, result.tool_calls_attempted, result.error
    )
