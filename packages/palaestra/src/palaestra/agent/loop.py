"""The agent loop: ask the model, run the calls that it requests and append the results, until the model is done or a
limit is reached.

The server samples the replies, and the tool runtime runs the tools. Invariants: the history is the caller's own list
and only grows (A2); however a rollout ends, cancellation included, `loop.result` is a complete trajectory with an
outcome, and every call in it has an answer (A3).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from palaestra.agent.budget import Budget, Used, WallClock, estimated_tokens
from palaestra.agent.replies import Reply, read_reply
from palaestra.agent.result import ENDED_LOOPS, AgentResult, Turn
from palaestra.agent.tool_calls import ToolCalls
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ContextExceeded, EngineError, InfraError, ReplyWithheld
from palaestra_slots.core.types import JSON, Blame, Message, Outcome
from palaestra_tokens.chat_server import ChatServer, chat_server

Answer: TypeAlias = Callable[[list[Message]], Awaitable[Message | None]]
"""Returns the user's answer to a reply without tool calls; None if the conversation is over."""

OnTurn: TypeAlias = Callable[[Turn, list[Message]], Awaitable[None] | None]
"""Called after every turn with the turn and the messages that it added. It is not called for a turn that cancellation,
a configuration error or a bug cut short, or whose reply the user could not answer because the infrastructure failed."""


class _End(NamedTuple):
    """The reason why a rollout ended."""

    outcome: Outcome
    error: str = ""
    blame: Blame | None = None


def _failed(outcome: Outcome, error: InfraError) -> _End:
    return _End(outcome, f"{type(error).__name__}: {error}", error.blame)


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Sampling settings and limits of one conversation.

    `max_turns` limits the model calls, `max_tokens` one reply, `max_context_tokens` the conversation, and `budget` the
    whole rollout. The tools `memory` and `session_search`, which use data from outside the conversation, are refused
    unless `beyond` names them, because rollouts must not learn from each other.
    """

    max_turns: int = 30
    temperature: float = 1.0
    max_tokens: int | None = None
    extra_body: Mapping[str, JSON] | None = None
    max_context_tokens: int | None = None
    budget: Budget = field(default_factory=Budget)
    beyond: Collection[str] = frozenset()


class AgentLoop:
    """One conversation of one agent. `run` may be called again after it has returned.

    `tools` runs the calls. `definitions` are the OpenAI function schemas that the model sees, and `names` the tools
    that it may call; both default to those of `tools`. Calls of the `parallel_safe` tools may run concurrently, by
    default those of `tools`. `user` answers replies without tool calls. `failure` is the infrastructure failure that
    ended the latest run, or None. `context_full` is true if that run ended because the conversation had reached
    `max_context_tokens`, and not because a reply was cut off. `wall` is the clock of the run.
    """

    def __init__(
        self,
        server: ChatServer,
        tools: ToolRuntime,
        settings: LoopSettings | None = None,
        *,
        definitions: Sequence[Mapping[str, JSON]] | None = None,
        names: Collection[str] | None = None,
        parallel_safe: Collection[str] | None = None,
        on_turn: OnTurn | None = None,
        user: Answer | None = None,
        clock: Clock | None = None,
    ) -> None:
        registry = tools.registry
        self.server = chat_server(server)
        self.settings = settings or LoopSettings()
        self.definitions = registry.definitions() if definitions is None else definitions
        self.result = AgentResult(messages=[], outcome=Outcome.CANCELLED)
        self.failure: InfraError | None = None
        self.context_full = False
        self.clock = clock or SystemClock()
        self.wall = WallClock(self.clock)
        self._calls = ToolCalls(
            tools,
            set(registry.list_tools() if names is None else names),
            tools.parallel_safe if parallel_safe is None else parallel_safe,
            self.settings.beyond,
        )
        self._on_turn = on_turn
        self._user = user
        self._delegated_turns = 0
        self._context_tokens = 0
        self._output_bytes = 0
        self._turns_before = 0
        self._unreported: tuple[Turn, int] | None = None

    async def run(
        self, messages: list[Message], *, after: AgentResult | None = None, settings: LoopSettings | None = None
    ) -> AgentResult:
        """Converse until the model is done or a limit is reached, and append the new messages to `messages`.

        Infrastructure failures are outcomes of the result. Cancellation, configuration errors and bugs are raised, and
        `self.result` is still complete.

        `settings` replace those of the loop from this run on. `after` is the result of an earlier part of the
        conversation. The budget's limits on turns, tokens and cost
        include that earlier part. `max_turns` and the budget's limits on time and output cover only the new part.
        """
        self.settings = settings or self.settings
        result = self.result = AgentResult(messages=messages, outcome=Outcome.CANCELLED)
        if after is not None:
            result = self.result = replace(after, messages=messages, outcome=Outcome.CANCELLED, error="", blame=None)
        self._turns_before = result.turns_used
        self.wall.start()
        self._context_tokens, self._unreported = 0, None
        self._output_bytes = 0
        self.failure, self.context_full, self._delegated_turns = None, False, 0
        try:
            result.outcome, result.error, result.blame = await self._within_time(result)
            await self._report()
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            result.outcome = Outcome.CANCELLED if cancelled else Outcome.INFRA_ERROR
            result.error = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
            result.blame = None if cancelled else Blame.RUN
            raise
        finally:
            # In `finally`, because whoever catches the error reads the result of what was played until then.
            result.finished_naturally = result.outcome is Outcome.NATURAL
            result.managed_state = self._managed_state()
            if (ended := ENDED_LOOPS.get()) is not None:
                ended.append(result)
        return result

    def used(self) -> Used:
        """Return the amounts that count towards the budget so far, including those of sub-agents that have ended."""
        return Used(
            turns=self.result.turns_used + self._delegated_turns,
            prompt_tokens=self.result.usage.prompt_tokens,
            completion_tokens=self.result.usage.completion_tokens,
            output_bytes=self._output_bytes,
            elapsed_s=self.wall.elapsed_s,
        )

    def delegated(self, loop: AgentLoop) -> None:
        """Count a sub-agent's turns, tokens and output towards this rollout."""
        used = loop.used()
        self.result.usage.merge(loop.result.usage)
        self._delegated_turns += used.turns
        self._output_bytes += used.output_bytes

    async def _within_time(self, result: AgentResult) -> _End:
        """Converse within the wall-clock budget. Infrastructure failures become outcomes."""
        try:
            async with self.wall.limited(self.settings.budget.wall_s) as limit:
                end = self._limit_reached(result)
                while end is None:
                    end = await self._turn(result) or self._limit_reached(result)
                return end
        except ContextExceeded as error:
            self.failure = error
            # A prompt that never fit is the run's mistake; a conversation that grew too long is the agent's.
            return _End(Outcome.LENGTH, str(error)) if result.turns_used else _failed(Outcome.API_ERROR, error)
        except EngineError as error:
            self.failure = error
            if isinstance(error, ReplyWithheld):
                result.usage.add(*error.tokens)
            return _failed(Outcome.API_ERROR, error)
        except InfraError as error:
            # Before TimeoutError: `ToolStuck` and `AcquireTimeout` are also timeouts, but not those of the budget.
            self.failure = error
            return _failed(Outcome.INFRA_ERROR, error)
        except TimeoutError:
            if not limit.expired():
                raise
            return _End(Outcome.BUDGET, f"budget of {self.settings.budget.wall_s:g} seconds used up")

    def _limit_reached(self, result: AgentResult) -> _End | None:
        """Return the reason to end if a limit forbids another turn, otherwise None."""
        if result.turns_used - self._turns_before >= self.settings.max_turns:
            return _End(Outcome.MAX_TURNS)
        if used_up := self.settings.budget.used_up(self.used()):
            return _End(Outcome.BUDGET, used_up)
        most = self.settings.max_context_tokens
        if most is not None and self._context_tokens >= most:
            self.context_full = True
            return _End(Outcome.LENGTH, f"context of {most} tokens is full ({self._context_tokens})")
        return None

    async def _turn(self, result: AgentResult) -> _End | None:
        """Make one model call and run its tool calls. Returns why the rollout ended, or None if it continues."""
        asked_s = self.clock.monotonic()
        request = self._request(result)
        reply = read_reply(await self.server.chat_completion(**request), result.turns_used + 1)
        turn = self._record_turn(result, reply, self.clock.monotonic() - asked_s)
        place = len(result.messages)
        any_valid = await self._answer_calls(result, reply, turn) if reply.calls else False
        natural = not reply.calls and not reply.cut_off
        if natural and self._user is not None:
            # After the last turn that the limits allow, an answer could not be replied to.
            last = self._limit_reached(result) is not None
            natural = self.server.is_over(result.messages) if last else not await self._ask_user(result, turn)
        self._measure_context(result, reply, result.messages[place:])
        await self._report()
        # Also after a reply that was cut off: its complete calls have run, and the model continues with their results.
        if any_valid:
            return None
        if reply.cut_off:
            used_up = self.settings.budget.used_up(self.used())  # the budget may have shortened the reply
            why = reply.cut_off_text(request.get("max_tokens"))
            return _End(Outcome.BUDGET, used_up) if used_up else _End(Outcome.LENGTH, why)
        # If all calls were malformed, the model gets the errors and another turn.
        return _End(Outcome.NATURAL) if natural else None

    async def _ask_user(self, result: AgentResult, turn: Turn) -> bool:
        """Let the user answer the reply; return whether the conversation goes on."""
        assert self._user is not None
        started_s = self.wall.elapsed_s
        try:
            said = await self._user(result.messages)
        except InfraError:
            # A turn without an answer would read as the end of the conversation, so a resumed rollout asks again.
            self._unreported = None
            raise
        finally:
            turn.tool_s = self.wall.elapsed_s - started_s
        if said is not None:
            result.messages.append(said)
        return said is not None

    def _request(self, result: AgentResult) -> dict[str, JSON]:
        request: dict[str, JSON] = {"messages": result.messages, "n": 1, "temperature": self.settings.temperature}
        if self.definitions:
            request["tools"] = self.definitions
        max_tokens = self.settings.budget.reply_tokens(self.settings.max_tokens, result.usage.completion_tokens)
        if max_tokens is not None:
            request["max_tokens"] = max_tokens
        if self.settings.extra_body:
            request["extra_body"] = self.settings.extra_body
        return request

    def _record_turn(self, result: AgentResult, reply: Reply, model_s: float) -> Turn:
        result.turns_used += 1
        names = tuple(call.name for call in reply.calls)
        used = reply.prompt_tokens, reply.completion_tokens
        turn = Turn(result.turns_used, reply.finish_reason, *used, model_s, 0.0, names)
        self._unreported = turn, len(result.messages)
        result.messages.append(reply.message())
        result.reasoning_per_turn.append(reply.reasoning)
        result.usage.add(*used)
        result.turns.append(turn)
        return turn

    async def _answer_calls(self, result: AgentResult, reply: Reply, turn: Turn) -> bool:
        """Run the calls and append their answers, even if a call raises an error. Returns whether any call was
        valid."""
        answers = self._calls.check(reply.calls, cut_off=reply.cut_off)
        valid = sum(answer.checked is not None for answer in answers)
        result.tool_calls_attempted += len(answers)
        result.tool_calls_schema_valid += valid
        started_s = self.wall.elapsed_s
        try:
            await self._calls.run(answers)
        finally:
            turn.tool_s = self.wall.elapsed_s - started_s
            # Also if a call raises or is cancelled: servers and templates refuse a call without an answer.
            result.messages.extend(answer.message() for answer in answers)
            if self.settings.budget.output_bytes is not None:
                texts = (answer.outcome.text for answer in answers if answer.outcome is not None)
                self._output_bytes += sum(len(text.encode(errors="replace")) for text in texts)
            result.tool_errors.extend(answer.tool_error(turn.number) for answer in answers if answer.error)
        return valid > 0

    def _measure_context(self, result: AgentResult, reply: Reply, fresh: list[Message]) -> None:
        """Estimate the tokens of the next prompt: the server's count plus an estimate for the messages added since. If
        the server reported no count, all messages are estimated."""
        if self.settings.max_context_tokens is None:
            return
        counted = reply.prompt_tokens + reply.completion_tokens
        self._context_tokens = counted + estimated_tokens(fresh if counted else result.messages)

    async def _report(self) -> None:
        """Pass the latest turn to `on_turn` unless that has been done, even if a budget or a failure cut the turn
        short."""
        if self._unreported is None:
            return
        (turn, first), self._unreported = self._unreported, None
        if self._on_turn is not None:
            waiting = self._on_turn(turn, self.result.messages[first:])
            if inspect.isawaitable(waiting):
                await waiting

    def _managed_state(self) -> dict[str, JSON] | None:
        """Return the token record of a token-exact server; None for others."""
        return self.server.get_state()
