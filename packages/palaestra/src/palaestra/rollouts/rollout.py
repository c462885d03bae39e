"""One rollout: set up, act, grade, record. This module sets the outcome and the blame in a rollout's record.

The agent's slot and tools are its `seat`, and `workspace` seals what it leaves. Whatever happens, cancellation
included, `run` leaves a complete `trajectory` (invariant A3), and an infrastructure failure never becomes a reward
(invariant R1). After `play`, `release` may run while the record is written. Hooks such as `act` and `grade` get the
rollout as the argument `rollout`. `group.py` decides about retries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from palaestra.agent.loop import AgentLoop
from palaestra.agent.middleware import MiddlewareServer, freezing
from palaestra.agent.result import AgentResult
from palaestra.agent.seat import Seat
from palaestra.rollouts.events import Graded
from palaestra.rollouts.grading.reward import decide
from palaestra.rollouts.limits import CutShort
from palaestra.rollouts.records import (
    Beside,
    Trajectory,
    inner_calls_of,
    own_tokens_of,
    subagents_of,
    tool_errors_of,
    turns_of,
)
from palaestra.rollouts.resume.recorded_turns import RecordedTurns
from palaestra.rollouts.spec import AgentSettings, Phase, Projection, RolloutSpec, RunContext
from palaestra.rollouts.turn_log import SLOT_ENDED, RolloutCalls, TurnLog
from palaestra.rollouts.watchdog import Stages
from palaestra.rollouts.workspaces import RolloutWorkspace
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolMiddleware, ToolRuntime
from palaestra.tools.tool import RolloutState, ToolOutcome
from palaestra_slots.core.errors import (
    EngineError,
    GraderError,
    InfraError,
    PalaestraError,
    PrepareError,
    SlotEnded,
    TaskError,
)
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome, Score, Task
from palaestra_slots.core.user_code import ForeignError, call_hook, checked_score, foreign, leaves, run_hook, told
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot
from palaestra_tokens.chat_server import ChatServer, SessionContext, chat_server
from palaestra_tokens.finish_reasons import ending_of
from palaestra_tokens.ledger import Ledger

if TYPE_CHECKING:
    from palaestra.agent.subagents import Agent

logger = logging.getLogger(__name__)

CLEAN_UP_S = 30.0
"""How long releasing a slot may take; after that, the slot is left to the backend's clean-up at the end of the run."""

RolloutTool: TypeAlias = Callable[[str, Mapping[str, JSON], str | None], Awaitable[str]]
"""Runs one call, given the tool's name, its arguments and the rollout's id; returns the text that the model reads."""


CURRENT: ContextVar[Rollout | None] = ContextVar("rollout", default=None)
"""The rollout for which an environment's own code is running: code that collects rollouts or runs the agent itself."""


class RolloutHooks(Protocol):
    """The hooks of an environment for its rollouts. `Environment` implements them."""

    def agent_of(self, task: Task) -> AgentSettings: ...

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec: ...

    async def begin(self, rollout: Rollout) -> None: ...

    @property
    def has_user(self) -> bool: ...

    @property
    def user_works(self) -> bool: ...

    async def next_message(self, rollout: Rollout, messages: Sequence[Message]) -> Message | None: ...

    async def act(self, rollout: Rollout) -> AgentResult: ...

    async def grade(self, rollout: Rollout) -> Score: ...

    def project(self, rollout: Rollout, score: Score | None) -> Projection: ...


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """Why a rollout ended, and which component is at fault if it is not scored."""

    outcome: Outcome
    error: str = ""
    blame: Blame | None = None


class Rollout:
    """One attempt at a rollout. `meta` holds data that the environment passes from set-up to scoring.

    `recorded` has the turns that this attempt repeats: those of an attempt that was cut off or, for a branch, those
    that it shares with another rollout. `run` plays the rollout once; after that, `trajectory` returns the complete
    record. `seat` has the agent's slot and tools, `workspace` seals the work, `log` writes the turns.
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
        self.settings = settings = hooks.agent_of(spec.task)
        self.meta: dict[str, JSON] = {}
        self.state: RolloutState | None = None
        """The object that the environment's tools, user and scores share; None if it has none."""
        self.result: AgentResult | None = None
        # What is recorded if the rollout never gets to an ending of its own.
        self.ending = RolloutEnd(Outcome.CANCELLED, "the run was interrupted", Blame.RUN)
        self.score: Score | None = None
        self.check_is_wrong = False
        """Whether a bug in the code of the check is the failure, which another attempt of the agent would meet too."""
        self.projection = Projection()
        self.stages = Stages(self.rollout_id, run.events.alive, run.settings.idle_limits)
        self.hooks = hooks
        self._foreign_result = False
        slot_spec = hooks.slot_spec(spec.task, Phase.AGENT)
        if run.program is not None:
            slot_spec = replace(slot_spec, mounts=(*slot_spec.mounts, *run.program.mounts))
        self.workspace = RolloutWorkspace(
            run.workspaces,
            spec.task,
            spec.group_id,
            spec.index,
            slot_spec,
            self.stages,
            run.limits,
            spec.snapshot,
            recorded.snapshot if recorded is not None else None,
        )
        self.calls = RolloutCalls(self.rollout_id, run.recorded_tools, self.stages, recorded)
        context = SessionContext(
            self.rollout_id, spec.task, spec.index, spec.sampling or spec.seeded, tools=spec.kit.names
        )
        self.seat = Seat(
            self.rollout_id,
            spec.kit,
            self.workspace,
            chat_server(run.engine.session(context)),
            user_task=_first_user_text(spec.task.messages()),
            timeout_s=settings.tool_timeout_s,
            middleware=(
                _known_to_tools(self),
                self.calls.by_agent,
                *(make(self.rollout_id) for make in run.middleware.tool),
                self.calls.recorded,
            ),
            on_progress=self.stages.sign_of_life,
        )
        self.log = TurnLog(run, self.seat, self.workspace, self.calls, settings.prices, recorded)

    async def run(self) -> None:
        """Play the rollout as `play` does, and release its slots."""
        await self.play()
        await self.release()

    async def play(self) -> None:
        """Play the rollout; its slots are left to `release`. Raises only on cancellation, for bugs, and for errors that
        end the run (`ConfigError` and `DiskError`), and then releases them. Every other failure is in the record."""
        try:
            async with self.stages.watched():
                await self._play()
        except CutShort as error:  # handled like a cancellation
            self.ending = replace(self.ending, error=str(error))
        except InfraError as error:
            self.fail(error, error.blame)
        except TaskError as error:
            self.fail(error, Blame.TASK)
        except BaseException:
            await self.release()
            raise
        finally:
            self.stages.end()

    async def _play(self) -> None:
        hooks = self.hooks
        self.workspace.check_start()
        with self.stages.stage("setup"):
            await run_hook(PrepareError, hooks.begin(self), f"setting up {self.rollout_id}")
        with self.stages.stage("agent", shown="model"):
            try:
                result = await run_hook(TaskError, hooks.act(self), f"playing {self.rollout_id}")
            except SlotEnded:  # by the agent itself, and its conversation up to then counts
                if self.result is None:
                    raise
                self.calls.end_slot()
                result = self.result
        if not isinstance(result, AgentResult) or not isinstance(result.outcome, Outcome):
            # a subclass's own method may return anything
            raise TaskError(f"playing {self.rollout_id} returned {result!r:.100}, not an AgentResult")
        # A result that is not that of our own agent may have values that the journal refuses.
        self._foreign_result = result is not self.result
        self.result = result
        if result.outcome.scored:
            with self.stages.stage("grade"):
                self.score = await self._graded()
                self.run_context.events.announce(Graded(self.rollout_id, self.score.reward))
        # Not before the score: a rollout that is cancelled while it is graded has been cut off, and a resumed run
        # continues it.
        self.ending = _ending_of(result)
        self.projection = call_hook(
            TaskError, lambda: hooks.project(self, self.score), f"making the row of {self.rollout_id}"
        )

    async def regrade(self, result: AgentResult, sealed: Snapshot | None, state: JSON = None, lost: str = "") -> Score:
        """Score recorded work: the agent's conversation, its sealed workspace and its state. The agent does not run,
        but the environment's set-up does, in a workspace that is discarded. `lost` is as in `RolloutWorkspace.restore`.
        Raises the errors of set-up and grading."""
        self.workspace.begin()
        try:
            async with self.stages.watched():
                await run_hook(PrepareError, self.hooks.begin(self), f"setting up {self.rollout_id}")
                await self.seat.aclose()
                if self.state is not None:
                    self.state.follow(state)
                self.result = result
                self.workspace.restore(sealed, lost)
                return await self._graded()
        finally:
            await self.release()

    async def _graded(self) -> Score:
        doing = f"scoring {self.rollout_id}"
        checked = checked_score(await run_hook(GraderError, self.hooks.grade(self), doing), doing)
        if self.calls.slot_ended:
            checked = replace(checked, detail={**checked.detail, "slot_ended": SLOT_ENDED})
        if checked.official is None and not checked.labels:
            return checked
        return decide(checked, self.settings.reward, self.settings.strict_labels)

    def fail(self, error: Exception, blame: Blame) -> None:
        """Set the outcome and the blame from this failure, and drop the score."""
        self.score = None
        outcome = Outcome.API_ERROR if isinstance(error, EngineError) else Outcome.INFRA_ERROR
        self.ending = RolloutEnd(outcome, redacted(told(error)), blame)
        self.check_is_wrong = isinstance(error, GraderError) and _is_bug(error.__cause__)

    def keep_state(self, state: RolloutState) -> None:
        """Share this state with the tools, and write it to the journal. Call this before the agent starts."""
        self.state = self.log.state = state
        self.seat.share(state)

    def use_task(self, task: Task) -> None:
        """Play this task in place of the group's, of which it is a variant. Call this before the agent starts."""
        self.task = task

    def take_score(self, score: Score | None, projection: Projection) -> None:
        """Replace the score and the environment's additions, which an environment that collects whole groups knows only
        when the group has ended."""
        self.score, self.projection = score, projection

    async def release(self) -> None:
        """Release the rollout's slot and tools. This is shielded from cancellation, and has a time limit, so that it
        cannot hang the run. Idempotent."""

        async def close_all() -> None:
            while self.workspace.closers:
                await close(self.workspace.closers.pop())
            await close(self.seat.aclose)

        async def close(what: Callable[[], Awaitable[None]]) -> None:
            try:
                await foreign(what())
            except (PalaestraError, ForeignError) as error:
                logger.warning("releasing the slot of %s failed: %s", self.rollout_id, error)

        try:
            # At the limit, only this wait ends: the shielded work goes on in the background.
            async with asyncio.timeout(CLEAN_UP_S):
                await asyncio.shield(close_all())
        except TimeoutError:
            logger.warning("releasing the slot of %s took more than %g s", self.rollout_id, CLEAN_UP_S)

    def drop_unrecordable(self, reason: Exception) -> bool:
        """Drop environment-made data that the journal refused, and fail the rollout. A call drops the projection or, if
        there is none, the agent's conversation. Returns False if nothing is left to drop."""
        if self.projection == Projection() and self.result is None:
            return False
        if self.projection == Projection():
            self.result = None
        self.projection = Projection()
        self.fail(TaskError(f"the result of {self.rollout_id} cannot be recorded: {told(reason)}"), Blame.TASK)
        return True

    @property
    def has_own_record(self) -> bool:
        """Whether the record has environment-made data, which the journal may refuse."""
        own_score = self.score is not None and bool(self.score.detail)
        return own_score or self._foreign_result or self.projection != Projection()

    def trajectory(self) -> Trajectory:
        """Return the rollout's record so far."""
        result = self.result or AgentResult(messages=self.opening())
        prices, ledger, spec, recorded = self.settings.prices, self.ledger, self.spec, self.log.recorded
        # Turns that are shared with another run were counted there, and are trained on only there.
        prompt_tokens, completion_tokens = own_tokens_of(result, recorded.shared if recorded is not None else 0)
        if recorded is not None and recorded.shared_samples and ledger is not None:
            ledger = ledger.forked(recorded.shared_samples)
        score = self.score or _NO_SCORE
        return Trajectory(
            rollout_id=self.rollout_id,
            group_id=spec.group_id,
            task_id=spec.task.id,
            index=spec.index,
            messages=result.messages,
            outcome=self.ending.outcome,
            reward=self.score.reward if self.score else None,
            blame=self.ending.blame,
            error=self.ending.error,
            official=score.official,
            labels=[*score.labels, *_unknown_ends(result)] if self.score else [],
            metrics={**score.metrics, **self.log.model_calls},
            detail=dict(score.detail),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=prices.cost(prompt_tokens, completion_tokens) if prices else None,
            turns=turns_of(result),
            tool_calls_attempted=result.tool_calls_attempted,
            tool_calls_schema_valid=result.tool_calls_schema_valid,
            tool_errors=tool_errors_of(result),
            inner_calls=inner_calls_of(self.log.inner_calls),
            subagents=subagents_of(result, ledger.places() if ledger else {}),
            row=self.projection.row,
            ledger=ledger.record() if ledger is not None and ledger.turns else None,
            origin=recorded.origin if recorded is not None else None,
            state=self.state.recorded if self.state is not None else None,
            extra=self.projection.extra,
            beside=self._beside_of(result),
        )

    def _beside_of(self, result: AgentResult) -> Beside:
        rung, kept = self.workspace.rung, self.workspace.kept
        return Beside(
            started_at=self.stages.started_at,
            duration_s=round(self.stages.duration_s, 6),
            stages={name: round(seconds, 6) for name, seconds in self.stages.seconds.items()},
            turn_s=[(round(turn.model_s, 6), round(turn.tool_s, 6)) for turn in result.turns],
            sandbox=({"rung": rung.label} if rung is not None else {})
            | ({"workspace": str(kept)} if kept is not None else {}),
        )

    @property
    def server(self) -> ChatServer:
        """The server that the agent calls."""
        assert self.seat.server is not None
        return self.log.answering(self.seat.server)

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

    async def sandbox(self) -> Slot:
        """Return the rollout's slot. The first call leases it, from the group's prepared workspace or, for a branch,
        from the copy at its fork point."""
        return await self.seat.sandbox()

    @property
    def tools(self) -> ToolRuntime:
        """The group's tools, bound to this rollout's slot."""
        return self.seat.tools

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
        opening = self.opening() if messages is None else messages
        if self.run_context.program is not None:
            if after is not None:
                raise TaskError(f"agent {self.run_context.program.name} cannot continue an ended conversation")
            if self.hooks.has_user:
                raise TaskError(f"agent {self.run_context.program.name} cannot talk to the environment's user")
            return await self.run_context.program.play(self, opening)
        loop = self.seat.loop(
            self.conversation(server),
            self.settings.loop,
            on_turn=self.log.record,
            user=self._ask_user if self.hooks.has_user else None,
            tool_handler=tool_handler,
        )
        self.log.time(loop.wall)
        if after is None and self.hooks.has_user and not _begun_by_user(opening):
            said = await self._ask_user(opening, len(opening))
            opening += [] if said is None else [said]
        self.log.record(None, opening if after is None else opening[-1:])
        try:
            return await loop.run(opening, after=after)
        finally:
            self.ended(loop.result)

    async def _ask_user(self, messages: list[Message], prompt: int | None = None) -> Message | None:
        """Return the user's next message; None if the conversation is over. A recorded message is not asked for again,
        but a user that works in the sandbox must do its work again, as tools do. The message follows a reply or, to
        open the conversation, this number of messages of the prompt."""
        recorded = self.log.recorded
        known = None if recorded is None else recorded.answers_of_user(1 if prompt is None else prompt)
        if known is None or (self.hooks.user_works and not (recorded is not None and recorded.answers(False))):
            server = self.seat.server
            if prompt is None and server is not None and server.is_over(messages):
                return None
            from palaestra.rollouts.recorded_tools.recorded_session import in_user_turn  # few agents have a user

            self.log.note_reply()
            turn = sum(message.get("role") == "assistant" for message in messages)
            with self.stages.stage("user"), in_user_turn(turn):
                said = await run_hook(
                    TaskError, self.hooks.next_message(self, messages), f"the user of {self.rollout_id}"
                )
            if known is None:
                return said
        # The work was repeated for its effects. The conversation keeps the message that the record has.
        return next(iter(known), None)

    async def continue_agent(
        self, message: Message, *, tool_handler: ToolRuntime | RolloutTool | None = None
    ) -> AgentResult:
        """Send another message to an agent that has ended, let the agent continue, and return the result."""
        assert self.result is not None
        self.result.messages.append(message)
        return await self.run_agent(self.result.messages, tool_handler=tool_handler, after=self.result)

    def conversation(self, server: object = None) -> MiddlewareServer:
        """Return the model server, wrapped in the middleware, for the rollout's agent."""
        asked = self.log.follow(None if server is None else chat_server(server))
        middleware = [self.log.chat, *(make(self.rollout_id) for make in self.run_context.middleware.chat)]
        if self.settings.freeze:
            middleware.append(freezing(lambda: None if self.calls.under_way else self.seat.slot))
        return MiddlewareServer(asked, middleware)

    def attend(self, loop: AgentLoop, agent: Agent | None = None) -> None:
        """Let an agent with a loop of its own delegate work, and use the clock of its loop for the rollout. Pass
        `agent` if the agent is not the loop itself."""
        self.log.time(loop.wall)
        self.seat.attend(loop, agent)

    def ended(self, result: AgentResult) -> None:
        """Store the result of the agent's conversation, however it ended."""
        self.result = result
        self.log.take_inner_calls(result.turns_used)
        self.seat.ended()


_NO_SCORE = Score(0.0)  # in place of None; its reward is never read
_BUGS = (AttributeError, ImportError, LookupError, NameError, NotImplementedError, TypeError, ValueError)
"""Errors of the code of a check that another attempt of the agent does not avoid."""


def _is_bug(error: BaseException | None) -> bool:
    found = [] if error is None else list(leaves(error))
    return bool(found) and all(isinstance(each, _BUGS) and not isinstance(each, OSError) for each in found)


def _ending_of(result: AgentResult) -> RolloutEnd:
    if result.outcome is Outcome.API_ERROR:
        return RolloutEnd(result.outcome, result.error, result.blame or Blame.ENGINE)
    if result.outcome is Outcome.INFRA_ERROR:
        return RolloutEnd(result.outcome, result.error, result.blame or Blame.SANDBOX)
    return RolloutEnd(result.outcome, result.error, None if result.outcome is Outcome.NATURAL else Blame.MODEL)


def _begun_by_user(opening: list[Message]) -> bool:
    """Return whether the model can reply to these messages. If not, the user opens the conversation."""
    return bool(opening) and opening[-1].get("role") not in ("system", "developer", "assistant")


def _first_user_text(messages: list[Message]) -> str:
    for message in messages:
        if message.get("role") == "user":
            return str(message.get("content") or "")
    return ""


def _known_to_tools(rollout: Rollout) -> ToolMiddleware:
    """Return middleware that lets a tool ask models for this rollout."""
    asking = weakref.ref(rollout)  # its seat has the middleware, and a cycle would keep its messages in memory

    async def known(call: CheckedCall, then: Next) -> ToolOutcome:
        token = CURRENT.set(asking())
        try:
            return await then(call)
        finally:
            CURRENT.reset(token)

    return known


def _unknown_ends(result: AgentResult) -> list[Label]:
    """Return a label if the last reply has an unknown finish reason. It says nothing about the work, so it is added
    after the reward was decided."""
    reason = result.turns[-1].finish_reason if result.turns else None
    if not reason or ending_of(reason) is not None:
        return []
    return [Label("unknown_finish_reason", f"turn {result.turns[-1].number} ended with '{reason:.80}'")]
