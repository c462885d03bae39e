"""Sub-agents: further conversations in a rollout, each with an agent loop of its own. Each sub-agent does one piece of
work and reports.

A sub-agent has its own messages, tool state and limits, and shares the slot, the background processes, the model server
and the budget of the rollout. With a token-exact server, the tokens of a sub-agent go into segments of the rollout's
ledger (T2), so they are trained exactly once (T3).

The tool is `tools/builtin/delegate_task.py`. Invariants: a sub-agent never outlives the call that started it; an
infrastructure failure in a sub-agent fails the rollout and is never shown to the model (R1), unless the assignment
itself exceeds the model's context; the rollout's result contains the record of every sub-agent, however the sub-agent
ends (A3).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from palaestra.agent.budget import Budget
from palaestra.agent.loop import AgentLoop, OnTurn
from palaestra.agent.result import AgentResult, Subagent
from palaestra.tools.builtin.delegate_task import Assignment, Delegation, SubagentReport
from palaestra.tools.builtin.execute_code import Programs
from palaestra.tools.human.approval import Approvals
from palaestra.tools.inner_calls import InnerCalls
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.registry.toolsets import TOOLSETS, resolve_toolsets
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import RolloutState, ToolMistake
from palaestra_slots.core.errors import ConfigError, ContextExceeded
from palaestra_slots.core.types import Message, Outcome
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_tokens.chat_server import ChatServer, chat_server

MAX_DEPTH = 1
"""The maximum nesting depth of sub-agents. A sub-agent at this depth has no `delegate_task`."""

NOT_FOR_SUBAGENTS = frozenset({"clarify", "memory", "session_search", "send_message"})
"""Tools that address a person or use data from outside the conversation. Sub-agents do not have them."""

SYSTEM_PROMPT = (
    "You are a sub-agent: another agent has given you one piece of work and waits for your report. Do that work with "
    "the tools you have, and nothing beyond it. Nobody can answer questions. When you are done, reply without a call: "
    "that reply is all that the other agent reads, so say what you did, what you found, and what is left or went wrong."
)

logger = logging.getLogger(__name__)

_NAME = "delegate_task"
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class SubagentSetup:
    """The server, tools, work and limits of a new sub-agent."""

    server: ChatServer
    tools: ToolRuntime
    work: str
    max_turns: int
    budget: Budget
    on_turn: OnTurn


class Agent(Protocol):
    """An agent that delegates work. It has a server, and creates sub-agents of the same kind as itself."""

    @property
    def server(self) -> ChatServer: ...

    def new_subagent(self, setup: SubagentSetup) -> SubagentConversation: ...


class SubagentConversation(Protocol):
    """A conversation that is ready to run. After `run`, however it ended, `loop.result` has the conversation as the
    model saw it."""

    @property
    def agent(self) -> Agent: ...

    @property
    def loop(self) -> AgentLoop: ...

    async def run(self) -> AgentResult: ...


@dataclass(frozen=True, slots=True)
class LoopAgent:
    """An agent that uses the plain loop with structured calls. As a conversation, it starts with `messages`."""

    loop: AgentLoop
    messages: list[Message] = field(default_factory=list)

    @property
    def agent(self) -> Agent:
        return self

    @property
    def server(self) -> ChatServer:
        return self.loop.server

    def new_subagent(self, setup: SubagentSetup) -> SubagentConversation:
        above = self.loop
        settings = replace(above.settings, max_turns=setup.max_turns, budget=setup.budget, beyond=frozenset())
        loop = AgentLoop(setup.server, setup.tools, settings, on_turn=setup.on_turn, clock=above.clock)
        return LoopAgent(loop, [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": setup.work}])

    async def run(self) -> AgentResult:
        return await self.loop.run(self.messages)


@dataclass(slots=True)
class Subagents:
    """The sub-agents of the agent with this `loop` and these `tools`. `on_progress` is called after each turn of a
    sub-agent and at its end.

    `agent` creates the sub-agents; if it is None, each of them uses a plain loop with the settings of `loop`. `depth`
    is 0 for the rollout's own agent. `numbers` counts from 1 over the whole rollout. `wall_s` is the time limit of each
    sub-agent. If it is None, only the time limit of a parent agent, if there is one, applies.
    """

    loop: AgentLoop
    tools: ToolRuntime
    on_progress: Callable[[], None] = lambda: None
    depth: int = 0
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    agent: Agent | None = None
    wall_s: float | None = None

    def offer(self) -> None:
        """Connect the agent's `delegate_task` to these sub-agents if the agent has that tool."""
        if self.tools.registry.get(_NAME) is not None:
            self.tools.share(Delegation(self.work))

    async def work(self, assignments: Sequence[Assignment]) -> list[SubagentReport]:
        """Run all assignments concurrently. Raises `ToolMistake` for an invalid assignment before any sub-agent starts,
        and the error of a sub-agent that fails."""
        registries = [self._registry(assignment) for assignment in assignments]
        started = [
            self._prepare_subagent(assignment, registry, len(assignments))
            for assignment, registry in zip(assignments, registries, strict=True)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                reports = [group.create_task(each.run()) for each in started]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for each in started:
                # A task that is cancelled before its first step never enters `run`, which would close the tools.
                await each.tools.aclose()
        return [report.result() for report in reports]

    def _registry(self, assignment: Assignment) -> ToolRegistry:
        """Return the parent agent's tools that the assignment requests. Raises `ToolMistake`."""
        own = self.tools.registry
        names = [name for name in own.list_tools() if name not in NOT_FOR_SUBAGENTS]
        # The deepest sub-agents cannot delegate, so a chain of delegations ends.
        if self.depth + 1 >= MAX_DEPTH:
            names = [name for name in names if name != _NAME]
        tools = [tool for name in names if (tool := own.get(name)) is not None]
        if assignment.toolsets is not None:
            wanted = _members(assignment.toolsets, {tool.toolset for tool in tools})
            tools = [tool for tool in tools if tool.name in wanted or tool.toolset in assignment.toolsets]
        return ToolRegistry(tools, replayed=own.replayed)

    def _prepare_subagent(self, assignment: Assignment, registry: ToolRegistry, together: int) -> _Running:
        """Return a sub-agent that is ready to run. Its record is already in the parent agent's result."""
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
        if (state := own.found_state(RolloutState)) is not None:
            tools.share(state)
        tools.share(Programs(f"subagent-{number}-"))
        parent = self.agent or LoopAgent(above)
        server = chat_server(parent.server).child(number)

        def on_turn(*_: object) -> None:
            if (calls := tools.found_state(InnerCalls)) is not None:
                # `record` and `conversation` are set below, before the first turn.
                record.inner_calls.extend(calls.taken(conversation.loop.result.turns_used))
            self.on_progress()

        work = f"{assignment.goal}\n\n{assignment.context}" if assignment.context else assignment.goal
        most = min(assignment.max_turns or above.settings.max_turns, above.settings.max_turns)
        budget = replace(above.settings.budget.left(above.used(), together), wall_s=self.wall_s)
        conversation = parent.new_subagent(SubagentSetup(server, tools, work, most, budget, on_turn))
        record = Subagent(number, above.result.turns_used, assignment.goal, conversation.loop.result)
        replace(self, loop=conversation.loop, tools=tools, depth=self.depth + 1, agent=conversation.agent).offer()
        above.result.subagents.append(record)
        return _Running(conversation, tools, record, above, server, on_turn)


@dataclass(slots=True)
class _Running:
    """A running sub-agent."""

    conversation: SubagentConversation
    tools: ToolRuntime
    record: Subagent
    above: AgentLoop
    server: ChatServer
    on_turn: Callable[[], None]

    async def run(self) -> SubagentReport:
        """Do the work and report. Raises the infrastructure failure that ended the work, but reports an assignment that
        is too long for the context."""
        try:
            await self.conversation.run()
        finally:
            self._account()
            await self._close_tools()
        result, failure = self.conversation.loop.result, self.conversation.loop.failure
        if result.outcome.scored:
            return _subagent_report(result)
        if isinstance(failure, ContextExceeded):  # the assignment itself is too long, which the agent can correct
            return replace(_subagent_report(result), outcome=Outcome.LENGTH.value)
        assert failure is not None
        raise failure

    def _account(self) -> None:
        """Count the sub-agent's turns, tokens and output for the rollout, and complete its record."""
        # Each run of a loop begins a new result, so the record still has the one from before.
        self.record.result = self.conversation.loop.result
        self.on_turn()
        self.record.segments = list(self.server.segments)
        self.above.delegated(self.conversation.loop)

    async def _close_tools(self) -> None:
        """Close the sub-agent's own tools, such as browser pages, even when it is cancelled."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self.tools.aclose())
        except TimeoutError:
            logger.warning("the tools of sub-agent %d could not be closed in time", self.record.number)


def _members(toolsets: Sequence[str], brought: Collection[str]) -> set[str]:
    """Return the names of the package's tools in these toolsets. `brought` names the toolsets of the agent's tools,
    which need not be the package's. Raises `ToolMistake` for an unknown toolset."""
    try:
        return set(resolve_toolsets([name for name in toolsets if name in TOOLSETS or name not in brought]))
    except ConfigError as error:
        raise ToolMistake(f"{error}. Nothing was started") from None


def _subagent_report(result: AgentResult) -> SubagentReport:
    return SubagentReport(
        result.final_response, result.outcome.value, result.turns_used, result.tool_calls_attempted, result.error
    )
