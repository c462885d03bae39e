"""One rollout: set up, act, seal, grade, record. This module sets the outcome and the blame in a rollout's record.

A slot is leased when something first needs it, and it is sealed or released exactly once. Whatever happens,
cancellation included, `run` leaves a complete `trajectory` (invariant A3), and an infrastructure failure never becomes
a reward (invariant R1). Hooks such as `act` and `grade` get the rollout as the argument `rollout`. `group.py` decides
about retries.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra.agent.budget import WallClock
from palaestra.agent.loop import HermesAgentLoop
from palaestra.agent.result import AgentResult, Turn
from palaestra.agent.subagents import Agent, Subagents
from palaestra.agent.tool_calls import handler_runtime
from palaestra.core.errors import (
    EngineError,
    GraderError,
    InfraError,
    PalaestraError,
    PrepareError,
    SandboxError,
    SlotEnded,
    SlotLost,
    TaskError,
)
from palaestra.core.redaction import redacted
from palaestra.core.types import JSON, Blame, Label, Message, Outcome, Score, Task, number
from palaestra.core.user_code import call_hook, run_hook, told
from palaestra.inference.chat_server import ChatServer, SessionContext, chat_server
from palaestra.inference.ledger import Ledger
from palaestra.rollouts.events import Graded, TurnTaken
from palaestra.rollouts.grading.reward import decide
from palaestra.rollouts.limits import CutShort
from palaestra.rollouts.middleware import MiddlewareServer, freezing
from palaestra.rollouts.recorded_tools.recorded_session import RolloutWorld
from palaestra.rollouts.records import Beside, Fork, Trajectory, inner_calls_of, subagents_of, tool_errors_of, turns_of
from palaestra.rollouts.resume.recorded_turns import RecordedTurns, described
from palaestra.rollouts.spec import AgentSettings, Phase, Projection, RolloutSpec, RunContext, image_of
from palaestra.rollouts.turn_log import TakenTurn, TurnLog
from palaestra.rollouts.watchdog import Stage, Stages
from palaestra.sandbox.slot import Rung, Slot, SlotSpec, Snapshot, View
from palaestra.tools.builtin.delegate_task import DELEGATE_TASK, Delegation
from palaestra.tools.builtin.memory import Notes
from palaestra.tools.builtin.session_search import Sessions
from palaestra.tools.inner_calls import InnerCall, InnerCalls
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolMiddleware, ToolRuntime
from palaestra.tools.tool import ToolOutcome

logger = logging.getLogger(__name__)

CLEAN_UP_S = 30.0
"""How long releasing a slot may take; after that, the slot is left to the backend's clean-up at the end of the run."""

HIGHEST_REWARD = 1e100
"""Rewards with a larger absolute value are refused, so that sums of their squares cannot overflow."""

SLOT_ENDED = (
    "The sandbox has ended, because its processes used up its memory or killed its first process. No further command "
    "can run in it."
)
"""The answer to the agent's calls after its own commands have ended its slot."""

RolloutTool: TypeAlias = Callable[[str, Mapping[str, JSON], str | None], Awaitable[str]]
"""Runs one call, given the tool's name, its arguments and the rollout's id; returns the text that the model reads."""


CURRENT: ContextVar[Rollout | None] = ContextVar("rollout", default=None)
"""The rollout for which an environment's own code is running: code that collects rollouts or runs the agent itself."""


class TurnWatcher(Protocol):
    """Follows the turns of a rollout. `trees.ForkPoints`, which imports this module, implements it."""

    turns: list[TurnTaken]
    points: dict[int, Snapshot | None]

    def begin(self) -> None: ...

    def take(self, turn: int, messages: Sequence[Message]) -> Awaitable[None]: ...


class RolloutHooks(Protocol):
    """The hooks of an environment for its rollouts. `Environment` implements them."""

    @property
    def agent(self) -> AgentSettings: ...

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec: ...

    async def begin(self, rollout: Rollout) -> None: ...

    async def act(self, rollout: Rollout) -> AgentResult: ...

    async def grade(self, rollout: Rollout) -> Score: ...

    def project(self, rollout: Rollout, score: Score | None) -> Projection: ...


class Rollout:
    """One attempt at a rollout. `meta` holds data that the environment passes from set-up to scoring.

    `recorded` has the turns that this attempt repeats: those of an attempt that was cut off or, for a branch, those
    that it shares with another rollout. `run` plays the rollout once; after that, `trajectory` returns the complete
    record.
    """

    def __init__(
        self, hooks: RolloutHooks, run: RunContext, spec: RolloutSpec, recorded: RecordedTurns | None = None
    ) -> None:
        self.run_context = run
        self.spec = spec
        self.task = spec.task
        self.rollout_id = spec.rollout_id
        self.group_id = spec.group_id
        self.index = spec.index
        self.kit = spec.kit
        self.snapshot = spec.snapshot
        self.settings = hooks.agent
        self.meta: dict[str, JSON] = {}
        self.result: AgentResult | None = None
        self.outcome = Outcome.CANCELLED
        self.blame: Blame | None = Blame.RUN
        self.error = "the run was interrupted"
        self.score: Score | None = None
        self.projection = Projection()
        self.rung: Rung | None = None
        self.inner_calls: list[InnerCall] = []
        self.stages = Stages(self.rollout_id, run.events.alive, run.settings.idle_limits)
        self.recorded = recorded
        context = SessionContext(
            self.rollout_id, spec.task, spec.index, spec.sampling or spec.seeded, tools=spec.kit.names
        )
        self.matches_observations = True
        """Whether this object matches recorded observations; False for an agent that itself compares them as text."""
        self.closers: list[Callable[[], Awaitable[None]]] = []
        """Called when the rollout ends, the last one first, to release what its grading holds."""
        self._hooks = hooks
        self._slot_spec = hooks.slot_spec(spec.task, Phase.AGENT)
        if run.program is not None:
            self._slot_spec = replace(self._slot_spec, mounts=(*self._slot_spec.mounts, *run.program.mounts))
        self._log = TurnLog(self.rollout_id, run.events, self.settings.prices, recorded)
        self.server = run.engine.session(context)
        self._started_at = time.time()
        self._duration_s = 0.0
        self._wall: WallClock | None = None
        self._has_turns = self._foreign_result = self._own_handler = False
        self._calls_under_way = 0
        self._slot_ended = False  # whether the agent's own commands have ended its slot
        self._subagent_numbers = itertools.count(1)
        self._slot: Slot | None = None
        self._kept: Path | None = None
        self._restored: Snapshot | None = None
        self._forked = recorded.snapshot if recorded is not None else None
        self._fork_points: TurnWatcher | None = None
        self._leasing = asyncio.Lock()
        self._tools: ToolRuntime | None = None
        self._bound_tools: list[ToolRuntime] = []
        self._world: RolloutWorld | None = None

    async def run(self) -> None:
        """Play the rollout. Raises only on cancellation, for bugs, and for errors that end the run (`ConfigError` and
        `DiskError`). Every other failure is in the record."""
        started = time.perf_counter()
        try:
            async with self.stages.watched():
                await self._play()
        except CutShort as error:  # handled like a cancellation
            self.error = str(error)
        except InfraError as error:
            self.fail(error, error.blame)
        except TaskError as error:
            self.fail(error, Blame.TASK)
        finally:
            await self._give_back()
            self._duration_s = time.perf_counter() - started

    async def _play(self) -> None:
        hooks = self._hooks
        self.check_start()
        with self.stage("setup"):
            await run_hook(PrepareError, hooks.begin(self), f"setting up {self.rollout_id}")
        with self.stage("agent", shown="model"):
            result = await self._act()
        if not isinstance(result, AgentResult):  # a subclass's own method may return anything
            raise TaskError(f"playing {self.rollout_id} returned {result!r:.100}, not an AgentResult")
        self._foreign_result = result is not self.result
        self.result = result
        if result.outcome.scored:
            with self.stage("grade"):
                self.score = self._decided(await hooks.grade(self))
                self.run_context.events.announce(Graded(self.rollout_id, self.score.reward))
        self._take_outcome(result)
        self.projection = call_hook(
            TaskError, lambda: hooks.project(self, self.score), f"making the row of {self.rollout_id}"
        )

    async def _act(self) -> AgentResult:
        """Let the agent work. If it ends its own slot, its conversation up to then counts."""
        try:
            return await self._hooks.act(self)
        except SlotEnded:
            if self.result is None:
                raise
            self.record_slot_end()
            return self.result

    def record_slot_end(self) -> None:
        """Record that the agent's own commands have ended its slot. Its files are still sealed and scored."""
        self._slot_ended = True

    async def regrade(self, result: AgentResult, sealed: Snapshot | None) -> Score:
        """Score recorded work: the agent's conversation and its sealed workspace. The agent does not run, but the
        environment's set-up does, in a workspace that is discarded. Raises the errors of set-up and grading."""
        self._has_turns = True
        try:
            async with self.stages.watched():
                await run_hook(PrepareError, self._hooks.begin(self), f"setting up {self.rollout_id}")
                await self.aclose()
                self.result, self._restored = result, sealed
                return self._decided(await self._hooks.grade(self))
        finally:
            await self._give_back()

    def _decided(self, score: object) -> Score:
        checked = checked_score(score, f"scoring {self.rollout_id}")
        if self._slot_ended:
            checked = replace(checked, detail={**checked.detail, "slot_ended": SLOT_ENDED})
        if checked.official is None and not checked.labels:
            return checked
        return decide(checked, self.settings.reward, self.settings.strict_labels)

    def _take_outcome(self, result: AgentResult) -> None:
        self.outcome, self.error, self.blame = result.outcome, result.error, None
        if result.outcome is Outcome.API_ERROR:
            self.blame = Blame.ENGINE
        elif result.outcome is Outcome.INFRA_ERROR:
            self.blame = result.blame or Blame.SANDBOX
        elif result.outcome is not Outcome.NATURAL:
            self.blame = Blame.MODEL

    def fail(self, error: Exception, blame: Blame) -> None:
        """Set the outcome and the blame from this failure, and drop the score."""
        self.score = None
        self.outcome = Outcome.API_ERROR if isinstance(error, EngineError) else Outcome.INFRA_ERROR
        self.blame = blame
        self.error = redacted(told(error))

    async def _give_back(self) -> None:
        """Release the rollout's slot and tools. This is shielded from cancellation, and has a time limit, so that it
        cannot hang the run."""

        async def close_all() -> None:
            try:
                while self.closers:
                    await self.closers.pop()()
            finally:
                await self.aclose()

        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await asyncio.shield(close_all())
        except (PalaestraError, TimeoutError) as error:
            logger.warning("releasing the slot of %s failed: %s", self.rollout_id, error)

    def drop_unrecordable(self, reason: ValueError) -> bool:
        """Drop environment-made data that the journal refused, and fail the rollout. A call drops the projection or, if
        there is none, the agent's conversation. Returns False if nothing is left to drop."""
        if self.projection == Projection() and self.result is None:
            return False
        if self.projection == Projection():
            self.result = None
        self.projection = Projection()
        self.fail(TaskError(f"the result of {self.rollout_id} cannot be recorded: {reason}"), Blame.TASK)
        return True

    @property
    def has_own_record(self) -> bool:
        """Whether the record has environment-made data, which the journal may refuse."""
        own_score = self.score is not None and bool(self.score.detail)
        return own_score or self._foreign_result or self.projection != Projection()

    def trajectory(self) -> Trajectory:
        """Return the rollout's record so far."""
        result = self.result or AgentResult(messages=self.opening())
        prices, ledger, spec, recorded = self.settings.prices, self.ledger, self.spec, self.recorded
        prompt_tokens, completion_tokens = self._own_tokens(result)
        if recorded is not None and recorded.shared_samples and ledger is not None:
            ledger = ledger.forked(recorded.shared_samples)
        return Trajectory(
            rollout_id=self.rollout_id,
            group_id=spec.group_id,
            task_id=spec.task.id,
            index=spec.index,
            messages=result.messages,
            outcome=self.outcome,
            reward=self.score.reward if self.score else None,
            blame=self.blame,
            error=self.error,
            official=self.score.official if self.score else None,
            labels=list(self.score.labels) if self.score else [],
            metrics=dict(self.score.metrics) if self.score else {},
            detail=dict(self.score.detail) if self.score else {},
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=prices.cost(prompt_tokens, completion_tokens) if prices else None,
            turns=turns_of(result),
            tool_calls_attempted=result.tool_calls_attempted,
            tool_calls_schema_valid=result.tool_calls_schema_valid,
            tool_errors=tool_errors_of(result),
            inner_calls=inner_calls_of(self.inner_calls),
            subagents=subagents_of(result, ledger.places() if ledger else {}),
            row=self.projection.row,
            ledger=ledger.record() if ledger is not None and ledger.turns else None,
            parent=self.parent,
            fork_points=self._points_taken(result),
            origin=recorded.origin if recorded is not None else None,
            extra=self.projection.extra,
            beside=Beside(
                started_at=self._started_at,
                duration_s=round(self._duration_s, 6),
                stages={name: round(seconds, 6) for name, seconds in self.stages.seconds.items()},
                turn_s=[(round(turn.model_s, 6), round(turn.tool_s, 6)) for turn in result.turns],
                sandbox=({"rung": self.rung.label} if self.rung is not None else {})
                | ({"workspace": str(self._kept)} if self._kept is not None else {}),
            ),
        )

    @property
    def parent(self) -> Fork | None:
        """The point at which this rollout continues another one; None if it starts from its own beginning."""
        return self.recorded.cut_off.parent if self.recorded is not None and self.recorded.failed is None else None

    def _own_tokens(self, result: AgentResult) -> tuple[int, int]:
        """Return the numbers of tokens read and written, without the turns that this rollout shares with the rollout
        that it continues."""
        used = result.usage.prompt_tokens, result.usage.completion_tokens
        last = self.recorded.shared if self.recorded is not None else 0
        shared = [turn for turn in result.turns if turn.number <= last]
        read, written = (sum(turn.prompt_tokens for turn in shared), sum(turn.completion_tokens for turn in shared))
        return used[0] - read, used[1] - written

    def _points_taken(self, result: AgentResult) -> list[int]:
        """Return the turns after which other rollouts can continue this one; never the last turn, because no model call
        follows it."""
        taken = self._fork_points.points if self._fork_points is not None else ()
        return [turn for turn in sorted(taken) if turn < len(result.turns)]

    def watch_turns(self, points: TurnWatcher) -> None:
        """Call `points` after every turn, so that other rollouts can continue this one."""
        self._fork_points, self._log.turns = points, points.turns

    @property
    def has_plain_tools(self) -> bool:
        """Whether the agent's tools keep all their state in the slot, and its calls can be answered from a record."""
        stateful = self._tools is not None and self._tools.has_state
        elsewhere = stateful or self._bound_tools or self._own_handler or self._world is not None
        return self.matches_observations and not elsewhere

    @property
    def server(self) -> ChatServer:
        """The server that the agent calls. An environment may set a different server before the agent starts."""
        return self._server

    @server.setter
    def server(self, server: object) -> None:
        self._asked = chat_server(server)
        self._server = self._log.follow(self._asked)

    @property
    def rng(self) -> random.Random:
        """The rollout's own random generator, which depends on the run's seed."""
        return self.spec.seeded()

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self.result.messages if self.result is not None else []

    @property
    def final_response(self) -> str:
        """The text of the agent's last reply."""
        return self.result.final_response if self.result is not None else ""

    @property
    def ledger(self) -> Ledger | None:
        """The exact tokens so far, from the server that the agent used; None if that server returned no tokens."""
        state = (self.result.managed_state if self.result is not None else None) or {}
        ledger = state.get("ledger", self.server.ledger)
        return ledger if isinstance(ledger, Ledger) and ledger.turns else None

    def stage(self, name: str, shown: str = "") -> Stage:
        """Return a context manager that times a part of the rollout and shows it as the current stage."""
        return self.stages.stage(name, shown)

    def check_start(self) -> None:
        """Raise `CutShort` if the rollout has no turn yet and the run no longer starts rollouts."""
        if not self._has_turns:
            self.run_context.limits.check(begun=False)

    async def sandbox(self) -> Slot:
        """Return the rollout's slot. The first call leases it, from the group's prepared workspace or, for a branch,
        from the copy at its fork point."""
        async with self._leasing:
            if self._slot is None:
                forked, self._forked = self._forked, None
                self._slot = await self.lease(self.rollout_id, self._slot_spec, forked or self.snapshot)
                self.rung = self._slot.rung
            return self._slot

    def use_image(self, image: str) -> None:
        """Make the rollout's slot from this image. Raises `TaskError` if it has its slot already."""
        if self._slot is not None and image != self._slot_spec.image:
            raise TaskError(f"{self.rollout_id} has its slot already: register its image before the first command")
        self._slot_spec = replace(self._slot_spec, image=image)

    @property
    def has_slot(self) -> bool:
        """Whether the rollout has a slot that has been neither sealed nor released."""
        return self._slot is not None

    async def lease(self, name: str, spec: SlotSpec, snapshot: Snapshot | None) -> Slot:
        """Lease a slot for this rollout or its grading. Raises `CutShort` if the rollout may not start."""
        with image_of(self.task):
            return await self.run_context.workspaces.lease(name, spec, snapshot, self.stages, self.check_start)

    @property
    def tools(self) -> ToolRuntime:
        """The group's tools, bound to this rollout's slot."""
        if self._tools is None:
            self._tools = self._runtime(self.sandbox, _first_user_text(self.task.messages()))
            self._tools.share(Notes(self.settings.memory))
            self._tools.share(Sessions(self.settings.sessions))
        return self._tools

    def bind_tools(self, sandbox: Callable[[], Awaitable[Slot]], user_task: str) -> ToolRuntime:
        """Return the group's tools, bound to another view of the slot. The rollout closes them when the agent has
        ended."""
        tools = self._runtime(sandbox, user_task)
        self._bound_tools.append(tools)
        return tools

    def _runtime(self, sandbox: Callable[[], Awaitable[Slot]], user_task: str) -> ToolRuntime:
        timeout_s = self.settings.tool_timeout_s
        middleware = self._tool_middleware()
        return ToolRuntime(self.kit.registry, sandbox, self.rollout_id, user_task, timeout_s, middleware=middleware)

    def _tool_middleware(self) -> list[ToolMiddleware]:
        spans = (make(self.rollout_id) for make in self.run_context.middleware.tool)
        return [self._agent_call, *spans, self.recorded_call]

    def recorded_call(self, call: CheckedCall, then: Next) -> Awaitable[ToolOutcome]:
        """Apply the run's recording policy to the calls of tools that reach outside this machine. This is tool
        middleware."""
        if not call.tool.touches_world:
            return then(call)
        if self._world is None:
            self._world = self.run_context.recorded_tools.rollout(
                self.rollout_id, lambda: self.recorded is not None and self.recorded.replaying
            )
        return self._world(call, then)

    async def _agent_call(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Time the agent's own calls; while recorded turns are replayed, answer with recorded results. This is tool
        middleware."""
        if not call.by_agent or call.conversation:
            return await then(call)
        recorded = self.recorded if self.matches_observations else None
        expected = recorded.expected_observation(call.name, call.arguments) if recorded is not None else None
        outside = call.tool.touches_world and not call.tool.world_session
        if recorded is not None and expected is not None and recorded.answers(outside):
            return ToolOutcome.of(expected)  # another rollout ran the call, and the slot has its effects
        self._calls_under_way += 1
        try:
            with self.stage("tool"):
                outcome = await then(call)
        except SlotEnded:
            self.record_slot_end()
            outcome = ToolOutcome.refused(SLOT_ENDED)
        finally:
            self._calls_under_way -= 1
        if recorded is None or expected is None:
            return outcome
        return ToolOutcome.of(recorded.match_observation(expected, outcome.text, described(call.name, call.arguments)))

    def continue_from(self, snapshot: Snapshot) -> None:
        """Make the next slot a fork of this snapshot, with new tools."""
        if self._tools is not None:
            self._bound_tools.append(self._tools)
        self.snapshot, self._tools = snapshot, None

    def opening(self) -> list[Message]:
        """Return the messages from which the agent starts: the system prompt, if there is one, and the task's
        messages."""
        messages = self.task.messages()
        if self.settings.system_prompt:
            messages.insert(0, {"role": "system", "content": self.settings.system_prompt})
        return messages

    async def run_agent(
        self,
        messages: list[Message] | None = None,
        *,
        server: object = None,
        tool_handler: ToolRuntime | RolloutTool | None = None,
        after: AgentResult | None = None,
    ) -> AgentResult:
        """Run the agent loop, or the run's agent program, on this rollout's conversation or on `messages`.

        `after` is the result of an earlier part of the conversation, which this call continues with the limits of a new
        rollout; an agent program cannot continue one. The rollout's `result` is set even if the call is cancelled.
        """
        if self.run_context.program is not None:
            if after is not None:
                raise TaskError(f"agent {self.run_context.program.name} cannot continue an ended conversation")
            return await self.run_context.program.play(self, self.opening() if messages is None else messages)
        loop = self.loop(server=server, tool_handler=tool_handler)
        opening = self.opening() if messages is None else messages
        self.record(None, opening if after is None else opening[-1:])
        try:
            return await loop.run(opening, after=after)
        finally:
            self.ended(loop.result)

    async def continue_agent(
        self, message: Message, *, tool_handler: ToolRuntime | RolloutTool | None = None
    ) -> AgentResult:
        """Send another message to an agent that has ended, let the agent continue, and return the result."""
        assert self.result is not None
        self.result.messages.append(message)
        return await self.run_agent(self.result.messages, tool_handler=tool_handler, after=self.result)

    def loop(self, *, server: object = None, tool_handler: ToolRuntime | RolloutTool | None = None) -> HermesAgentLoop:
        """Return the agent loop, set up for this rollout."""
        settings, names = self.settings, self.kit.names
        tools = tool_handler or self.tools
        if not isinstance(tools, ToolRuntime):
            self._own_handler = True
            middleware = self._tool_middleware()
            tools = handler_runtime(tools, self.kit.definitions, names, self.rollout_id, middleware)
        loop = HermesAgentLoop(
            self.conversation(server),
            self.kit.definitions,
            set(names),
            max_turns=settings.max_turns,
            task_id=self.rollout_id,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            extra_body=settings.extra_body,
            tool_handler=tools,
            max_context_tokens=settings.max_context_tokens,
            parallel_safe=self.tools.parallel_safe,
            on_turn=self.record,
            budget=settings.budget,
            beyond=settings.beyond,
        )
        self.attend(loop, tools=tools if tools in self._bound_tools else self.tools)
        return loop

    def conversation(self, server: object = None) -> MiddlewareServer:
        """Return the model server, wrapped in the middleware, for the rollout's agent."""
        asked = self._log.follow(self._asked if server is None else chat_server(server))
        middleware = [self._log.chat, *(make(self.rollout_id) for make in self.run_context.middleware.chat)]
        if self.settings.freeze:
            middleware.append(freezing(lambda: None if self._calls_under_way else self._slot))
        return MiddlewareServer(asked, middleware)

    def attend(self, loop: HermesAgentLoop, agent: Agent | None = None, *, tools: ToolRuntime | None = None) -> None:
        """Use this loop's clock for the rollout, and let the agent delegate work if it has the tool for that. Pass
        `agent` if the agent is not the loop itself."""
        self._wall = loop.wall
        bound = self.tools if tools is None else tools
        if bound.registry.get(DELEGATE_TASK.name) is not None:
            Subagents(loop, bound, self.stages.sign_of_life, numbers=self._subagent_numbers, agent=agent).offer()

    def record(self, turn: Turn | None, messages: list[Message]) -> Awaitable[None] | None:
        """Write the messages that a turn added or, if `turn` is None, the opening messages. If this returns an
        awaitable, await it.

        Raises `CannotResume` if different messages are recorded in their place, and `CutShort` if no further turn may
        follow.
        """
        self.stages.sign_of_life()
        if turn is None and self._slot is not None and self.recorded is not None:
            self.recorded.found_setup()
        taken = self._log.match(turn, messages)
        self._take_inner_calls(taken.turn.number)
        if taken.known and turn is not None:
            return self._check_resumed(taken)
        self._write_turn(taken)
        if self._fork_points is None:
            return None
        if turn is None:
            self._fork_points.begin()
            return None
        return self._fork_points.take(turn.number, messages)

    async def _check_resumed(self, taken: TakenTurn) -> None:
        """Accept a recorded turn only if no background process is running, because the state of such a process cannot
        be reproduced."""
        recorded = self.recorded
        assert recorded is not None
        for process in await self._slot.processes() if self._slot is not None and not self._slot_ended else ():
            if (await process.status()).running:
                recorded.found_background()
        if recorded.caught_up and self._wall is not None:
            self._wall.charge(recorded.seconds)
        self._write_turn(taken)
        if self._fork_points is not None:
            await self._fork_points.take(taken.turn.number, taken.messages)

    def _write_turn(self, taken: TakenTurn) -> None:
        self._has_turns = self._has_turns or taken.turn.number > 0
        self._log.write(taken)
        if taken.turn.number and taken.messages and taken.messages[-1].get("role") != "assistant":
            self.run_context.limits.check(begun=True)

    def ended(self, result: AgentResult) -> None:
        """Store the result of the agent's conversation, however it ended."""
        self.result = result
        self._take_inner_calls(result.turns_used)
        for tools in self._every_tools():
            tools.share(Delegation())  # the old delegation refers to the loop, which refers to the tools

    def _take_inner_calls(self, turn: int) -> None:
        for tools in self._every_tools():
            if (calls := tools.found_state(InnerCalls)) is not None:
                self.inner_calls += calls.taken(turn)

    def _every_tools(self) -> list[ToolRuntime]:
        return [*self._bound_tools, *(() if self._tools is None else (self._tools,))]

    async def seal(self, view: View | None = None) -> Snapshot | None:
        """End the agent's slot and return a snapshot of its changes, limited to `view`; None if there is no slot. When
        recorded work is graded again, return the recorded snapshot instead."""
        await self._end_tools()
        if self._forked is not None:  # the work of the continued rollout counts, even if this one added nothing
            await self.sandbox()
        slot, self._slot = self._slot, None
        if self._restored is not None:
            restored, self._restored = self._restored, None
            return restored if view is None else await self.run_context.workspaces.pool.view(restored, view)
        if slot is None:
            keep = self.run_context.workspaces.keep
            self._kept = await keep(self.group_id, self.index, self.snapshot, sealed=False)
            return None
        with self.stage("seal"):
            sealed = await self.run_context.workspaces.pool.seal(slot, view)
            self._kept = await self.run_context.workspaces.keep(self.group_id, self.index, sealed, sealed=True)
            return sealed

    async def checkpoint(self) -> Snapshot | None:
        """Return a snapshot of the agent's changes, as `seal` does, but leave the agent's slot and its processes
        running; None if there is no slot or a running slot cannot be copied."""
        if self._forked is not None:  # as in `seal`
            await self.sandbox()
        if self._slot is None or self._restored is not None:
            return None
        workspaces = self.run_context.workspaces
        with self.stage("seal"):
            try:
                snapshot = await workspaces.pool.checkpoint(self._slot)
            except SlotLost:
                raise
            except SandboxError as error:
                logger.warning("%s: its running sandbox cannot be copied: %s", self.rollout_id, error)
                return None
            self._kept = await workspaces.keep(self.group_id, self.index, snapshot, sealed=True)
            return snapshot

    async def keep_files(self) -> None:
        """Before work is graded in its own slot, keep a copy of its files if the run keeps workspaces."""
        workspaces = self.run_context.workspaces
        if workspaces.kept is None:
            return
        sealed = self._slot is not None
        snapshot = self.snapshot if self._slot is None else await workspaces.pool.checkpoint(self._slot)
        try:
            self._kept = await workspaces.keep(self.group_id, self.index, snapshot, sealed=sealed)
        finally:
            if sealed and snapshot is not None:
                await workspaces.pool.forget(snapshot)

    async def aclose(self) -> None:
        """Close the tools and release the slot."""
        slot, self._slot = self._slot, None
        try:
            await self._end_tools()
        finally:
            if slot is not None:
                await self.run_context.workspaces.pool.release(slot)

    async def _end_tools(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            self._bound_tools.append(tools)
        while self._bound_tools:
            await self._bound_tools.pop().aclose()


def _first_user_text(messages: list[Message]) -> str:
    for message in messages:
        if message.get("role") == "user":
            return str(message.get("content") or "")
    return ""


class UnusableLabels(GraderError):
    """Raised if labels have the wrong form, which only the author of the check can cause."""

    certain = True


def checked_score(score: object, doing: str) -> Score:
    """Return the score with plain numbers. Metrics that are not finite numbers are moved into the detail, because they
    cannot be averaged.

    Raises `GraderError` if the value is not a score, or has no usable reward, official verdict or labels.
    """
    if not isinstance(score, Score) or not isinstance(score.metrics, Mapping) or not isinstance(score.detail, Mapping):
        raise GraderError(f"{doing} returned {score!r:.100}, not a Score")
    reward = _checked_number(score.reward, "a reward", doing)
    official = None if score.official is None else _checked_number(score.official, "an official verdict", doing)
    if not isinstance(score.labels, Sequence) or not all(map(_is_label, score.labels)):
        raise UnusableLabels(
            f"{doing} returned the labels {score.labels!r:.200}: return a list of Label(name, evidence), whose names "
            "consist of letters, digits, _, - and ., and whose evidence is text"
        )
    score = replace(score, reward=reward, official=official, labels=tuple(score.labels))
    found = {str(name): number(value) for name, value in score.metrics.items()}
    metrics = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    left_out = {str(name): f"{value!s:.100}" for name, value in score.metrics.items() if str(name) not in metrics}
    if not left_out:
        return replace(score, metrics=metrics)
    logger.warning("%s returned metrics that are not finite numbers, which are left out: %s", doing, left_out)
    return replace(score, metrics=metrics, detail={**score.detail, "metrics_left_out": left_out})


def _checked_number(value: object, what: str, doing: str) -> float:
    found = number(value)
    if found is None or not abs(found) <= HIGHEST_REWARD:  # the comparison is also false for NaN
        raise GraderError(
            f"{doing} returned {_short(value)}, which is not {what}: {what} is a finite number of at most "
            f"{HIGHEST_REWARD:g} in absolute value"
        )
    return found


def _is_label(label: object) -> bool:
    return (
        isinstance(label, Label)
        and isinstance(label.name, str)
        and re.fullmatch(r"[\w.-]+", label.name) is not None
        and isinstance(label.evidence, str)
    )


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.100}"
