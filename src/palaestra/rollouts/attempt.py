"""One rollout from start to record, and the only place where what went wrong becomes an outcome and a blame.

The order is fixed: set up, act, seal, score. Whatever happens, cancellation included, the slot is given back and a
complete `Trajectory` comes out (invariant A3); a fault of the world never becomes a reward (invariant R1).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from palaestra.agent.result import AgentResult
from palaestra.core.errors import (
    ConfigError,
    EngineError,
    GraderError,
    InfraError,
    PalaestraError,
    PrepareError,
    TaskError,
)
from palaestra.core.literals import number
from palaestra.core.types import Blame, Outcome, Score
from palaestra.core.user_code import ForeignError, foreign, place, told
from palaestra.rollouts.environment import Environment, Phase, Projection
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.limits import CutShort
from palaestra.rollouts.records import (
    Beside,
    InnerCallRecord,
    SubagentRecord,
    ToolErrorRecord,
    Trajectory,
    TurnRecord,
)
from palaestra.rollouts.rollout import Rollout
from palaestra.tools.runtime.inner_calls import InnerCall

logger = logging.getLogger(__name__)

CLEAN_UP_S = 30.0
"""How long giving back a slot may take; after that the backend's own end-of-run clean-up has it."""

HIGHEST_REWARD = 1e100
"""Beyond it, on both sides, sums of squares are no numbers any more."""

T = TypeVar("T")


class Attempt:
    """One try at one rollout. `run` does it once; `trajectory` is complete from then on, however `run` ended."""

    def __init__(self, env: Environment, rollout: Rollout) -> None:
        self.env = env
        self.rollout = rollout
        self.started_at = time.time()
        self.outcome = Outcome.CANCELLED
        self.blame: Blame | None = Blame.RUN
        self.error = "the run was interrupted"
        self.score: Score | None = None
        self.projection = Projection()
        self.duration_s = 0.0

    async def run(self) -> None:
        """Play the rollout. Only cancellation and our own bugs get out; all else is in the record."""
        started = time.perf_counter()
        grading: Grading | None = None
        try:
            grading = Grading(self.rollout, self.env.slot_spec(self.rollout.task, Phase.GRADE))
            async with self.rollout.at.watched():
                await self._play(grading)
        except CutShort as error:  # as if it had been cancelled
            self.error = str(error)
        except InfraError as error:
            self._failed(error, error.blame)
        except TaskError as error:
            self._failed(error, Blame.TASK)
        finally:
            await self._give_back(grading)
            self.rollout.let_go()
            self.duration_s = time.perf_counter() - started

    async def _play(self, grading: Grading) -> None:
        rollout = self.rollout
        rollout.check_begin()
        with rollout.stage("setup"):
            await blaming(PrepareError, self.env.begin(rollout), f"setting up {rollout.rollout_id}")
        with rollout.stage("agent", shown="model"):
            result = await self.env.act(rollout)
        if not isinstance(result, AgentResult):  # what a subclass has overridden may give anything
            raise TaskError(f"playing {rollout.rollout_id} gave {result!r:.100}, not an AgentResult")
        rollout.result = result
        if result.outcome.scored:
            with rollout.stage("grade"):
                score = await blaming(GraderError, self.env.score(rollout, grading), f"scoring {rollout.rollout_id}")
                await grading.sound()
            self.score = _with_numbers(score, f"scoring {rollout.rollout_id}")
            rollout.tracing.graded(self.score)
        self._acted(result)
        self.projection = await blaming(TaskError, self._project(), f"making the row of {rollout.rollout_id}")

    async def _project(self) -> Projection:
        return self.env.project(self.rollout, self.score)

    def _acted(self, result: AgentResult) -> None:
        self.outcome, self.error, self.blame = result.outcome, result.error, None
        if result.outcome is Outcome.API_ERROR:
            self.blame = Blame.ENGINE
        elif result.outcome is Outcome.INFRA_ERROR:
            self.blame = result.blame or Blame.SANDBOX
        elif result.outcome is not Outcome.NATURAL:
            self.blame = Blame.MODEL

    def _failed(self, error: Exception, blame: Blame) -> None:
        self.score = None
        self.outcome = Outcome.API_ERROR if isinstance(error, EngineError) else Outcome.INFRA_ERROR
        self.blame = blame
        self.error = told(error)

    async def _give_back(self, grading: Grading | None) -> None:
        """Shielded, so that a cancelled rollout still returns its slot, and bounded, so that it cannot hang the run."""

        async def both() -> None:
            try:
                if grading is not None:
                    await grading.aclose()
            finally:
                await self.rollout.aclose()

        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await asyncio.shield(both())
        except (PalaestraError, TimeoutError) as error:
            logger.warning("giving back the slot of %s failed: %s", self.rollout.rollout_id, error)

    def strip(self, reason: ValueError) -> bool:
        """Leave out of the record what the environment has made itself, which for this reason cannot be recorded: its
        row first, then the agent's conversation. False when there is nothing of that kind left."""
        if self.projection == Projection() and self.rollout.result is None:
            return False
        if self.projection == Projection():
            self.rollout.result = None
        self.projection = Projection()
        self._failed(TaskError(f"what came of {self.rollout.rollout_id} is no record: {reason}"), Blame.TASK)
        return True

    def trajectory(self) -> Trajectory:
        """The record."""
        rollout = self.rollout
        result = rollout.result or AgentResult(messages=rollout.opening())
        usage, prices, ledger = result.usage, rollout.settings.prices, rollout.ledger
        return Trajectory(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            task_id=rollout.task.id,
            index=rollout.index,
            messages=result.messages,
            outcome=self.outcome,
            reward=self.score.reward if self.score else None,
            blame=self.blame,
            error=self.error,
            metrics=dict(self.score.metrics) if self.score else {},
            detail=dict(self.score.detail) if self.score else {},
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost=prices.cost(usage.prompt_tokens, usage.completion_tokens) if prices else None,
            turns=_turns(result),
            tool_calls_attempted=result.tool_calls_attempted,
            tool_calls_schema_valid=result.tool_calls_schema_valid,
            tool_errors=_tool_errors(result),
            inner_calls=_inner_calls(rollout.inner_calls),
            subagents=_subagents(result, ledger.places() if ledger else {}),
            row=self.projection.row,
            ledger=ledger.record() if ledger else None,
            extra=self.projection.extra,
            beside=self._beside(result),
        )

    def _beside(self, result: AgentResult) -> Beside:
        stages = {name: round(seconds, 6) for name, seconds in self.rollout.stages.items()}
        rung = self.rollout.rung
        return Beside(
            started_at=self.started_at,
            duration_s=round(self.duration_s, 6),
            stages=stages,
            turn_s=[(round(turn.model_s, 6), round(turn.tool_s, 6)) for turn in result.turns],
            sandbox={"rung": rung.label} if rung is not None else {},
        )


async def blaming(kind: type[PalaestraError], hook: Awaitable[T], doing: str) -> T:
    """Await an environment's hook; what its author did not foresee becomes `kind`, with the original as its cause.

    Errors that already say whose fault they are pass through, as `foreign` has it. One that ends the run though only
    something of it was being done is told with that.
    """
    try:
        return await foreign(hook)
    except ConfigError as error:
        if type(error) is not ConfigError or kind is ConfigError:
            raise
        raise ConfigError(f"{doing}: {error}") from error
    except ForeignError as error:
        logger.debug("%s failed", doing, exc_info=True)
        cause = error.__cause__
        raise kind(f"{doing} failed with {error}{place(cause) if cause is not None else ''}") from cause


def _with_numbers(score: object, doing: str) -> Score:
    """The score with plain numbers, without the metrics that are none, as 0/0 is: those could be neither averaged nor
    read again. Raises `GraderError` for what is no score."""
    if not isinstance(score, Score) or not isinstance(score.metrics, Mapping) or not isinstance(score.detail, Mapping):
        raise GraderError(f"{doing} gave {score!r:.100}, which is no Score")
    reward = number(score.reward)
    if reward is None or not abs(reward) <= HIGHEST_REWARD:  # also true for what is no number
        raise GraderError(f"{doing} gave {_short(score.reward)}, which is no reward")
    found = {str(name): number(value) for name, value in score.metrics.items()}
    metrics = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    left_out = {str(name): str(value) for name, value in score.metrics.items() if str(name) not in metrics}
    if not left_out:
        return Score(reward, metrics, score.detail)
    logger.warning("%s gave metrics that are no numbers, which are left out: %s", doing, left_out)
    return Score(reward, metrics, {**score.detail, "metrics_left_out": left_out})


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.100}"


def _turns(result: AgentResult) -> list[TurnRecord]:
    return [
        TurnRecord(
            number=turn.number,
            finish_reason=turn.finish_reason,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            tools=turn.tool_names,
        )
        for turn in result.turns
    ]


def _tool_errors(result: AgentResult) -> list[ToolErrorRecord]:
    return [
        ToolErrorRecord(turn=error.turn, tool=error.tool_name, arguments=error.arguments, error=error.error)
        for error in result.tool_errors
    ]


def _inner_calls(calls: Sequence[InnerCall]) -> list[InnerCallRecord]:
    return [
        InnerCallRecord(turn=call.turn, tool=call.tool, arguments=call.arguments, reply=call.reply) for call in calls
    ]


def _subagents(result: AgentResult, places: Mapping[int, int]) -> list[SubagentRecord]:
    """Those of one agent; `places` are the numbers that segments of the ledger have in its record."""
    return [
        SubagentRecord(
            number=each.number,
            turn=each.turn,
            goal=each.goal,
            messages=each.result.messages,
            outcome=each.result.outcome,
            error=each.result.error,
            turns=_turns(each.result),
            tool_errors=_tool_errors(each.result),
            inner_calls=_inner_calls(each.inner_calls),
            subagents=_subagents(each.result, places),
            segments=[places[segment] for segment in each.segments],
        )
        for each in result.subagents
    ]
