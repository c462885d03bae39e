"""Writes the turns of one rollout to the journal, and answers its model calls and tool calls from recorded turns, such
as those of an earlier part of the run.

A turn is written when it ends. A turn that delegates work is long and has many replies, so these are written before the
turn ends: the rollout's own reply when its first sub-agent calls the model, and each reply to a sub-agent when it
arrives. So a resumed rollout does not repeat a model call whose reply was written. The journal has a turn once for each
attempt that took it, so a rollout can be resumed repeatedly.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.agent.budget import WallClock
from palaestra.agent.middleware import Ask, ChatCall, MiddlewareServer
from palaestra.agent.replies import read_reply
from palaestra.agent.result import Turn
from palaestra.agent.seat import Seat
from palaestra.rollouts.events import CostSpent, ReplyReceived, RolloutResumed, TokensSpent, TurnTaken
from palaestra.rollouts.journal.journal import checksum
from palaestra.rollouts.records import KNOWN_REPLIES, MODEL_CALLS, MODEL_COST
from palaestra.rollouts.resume.recorded_turns import RecordedTurns, described
from palaestra.rollouts.spec import RecordedTools, RunContext
from palaestra.rollouts.watchdog import Stages
from palaestra.rollouts.workspaces import RolloutWorkspace
from palaestra.tools.inner_calls import InnerCall
from palaestra.tools.runtime.runtime import CheckedCall, Next
from palaestra.tools.tool import RolloutState, ToolOutcome
from palaestra_slots.core.errors import ReplyWithheld, SlotEnded
from palaestra_slots.core.types import JSON, Message, Prices
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.ledger import SampledTurn

if TYPE_CHECKING:
    from palaestra.rollouts.recorded_tools.recorded_session import RolloutWorld

SLOT_ENDED = (
    "The sandbox has ended, because its processes used up its memory or killed its first process. No further command "
    "can run in it."
)
"""The answer to the agent's calls after its own commands have ended its slot."""


class RolloutCalls:
    """The tool calls of one rollout, as middleware: their stage, and recorded answers in place of their own."""

    def __init__(
        self, rollout_id: str, recordings: RecordedTools, stages: Stages, recorded: RecordedTurns | None
    ) -> None:
        self.under_way = 0
        """The number of the agent's calls that are running."""
        self.slot_ended = False
        """Whether the agent's own commands have ended its slot. Its files are still sealed and scored."""
        self._rollout_id = rollout_id
        self._recordings = recordings
        self._stages = stages
        self._recorded = recorded
        self._matching = True
        self._world: RolloutWorld | None = None

    def end_slot(self) -> None:
        """Record that the agent's own commands have ended its slot."""
        self.slot_ended = True

    def leave_matching(self) -> None:
        """Leave the comparison with recorded observations to the agent, which compares them as text."""
        self._matching = False

    async def by_agent(self, call: CheckedCall, then: Next) -> ToolOutcome:
        """Time the agent's own calls; while recorded turns are replayed, answer with recorded results. This is tool
        middleware."""
        if not call.by_agent or call.conversation:
            return await then(call)
        recorded = self._recorded if self._matching else None
        # Before anything is awaited: parallel calls take their recorded answers in the order in which they start.
        expected = recorded.expected_observation(call.name, call.arguments) if recorded is not None else None
        outside = call.tool.touches_world and not call.tool.world_session
        if recorded is not None and expected is not None and recorded.answers(outside):
            return ToolOutcome.of(expected)  # another rollout ran the call, and the slot has its effects
        self.under_way += 1
        try:
            with self._stages.stage("tool"):
                outcome = await then(call)
        except SlotEnded:
            self.end_slot()
            outcome = ToolOutcome.refused(SLOT_ENDED)
        finally:
            self.under_way -= 1
        if recorded is None or expected is None:
            return outcome
        return ToolOutcome.of(recorded.match_observation(expected, outcome.text, described(call.name, call.arguments)))

    def recorded(self, call: CheckedCall, then: Next) -> Awaitable[ToolOutcome]:
        """Apply the run's recording policy to the calls of tools that reach outside this machine. This is tool
        middleware."""
        if not call.tool.touches_world:
            return then(call)
        if self._world is None:
            self._world = self._recordings.rollout(
                self._rollout_id, lambda: self._recorded is not None and self._recorded.replaying
            )
        return self._world(call, then)


@dataclass(slots=True)
class _Reply:
    """A reply and the conversation that it answers: the first `count` messages of a list that grows later."""

    messages: Sequence[Message]
    count: int
    completion: ChatCompletion
    known: bool
    noted: bool = False


class TurnLog:
    """The turns of one attempt at a rollout. `recorded` answers model calls while it has replies left."""

    def __init__(
        self,
        run: RunContext,
        seat: Seat,
        workspace: RolloutWorkspace,
        calls: RolloutCalls,
        prices: Prices | None,
        recorded: RecordedTurns | None,
    ) -> None:
        self.recorded = recorded
        self.inner_calls: list[InnerCall] = []
        """The calls that programs of the agent have made, and those of a third-party agent."""
        self.state: RolloutState | None = None
        self.model_calls: dict[str, float] = {}
        """The calls of models that the environment asked: their number, tokens and cost."""
        self._model_calls_kept: dict[str, float] = {}
        self._run = run
        self._events = run.events
        self._seat = seat
        self._workspace = workspace
        self._calls = calls
        self._prices = prices
        self._wall: WallClock | None = None
        self._server: ChatServer | None = None
        self._own: _Reply | None = None
        self._turns_kept = self._turns_noted = 0

    def time(self, wall: WallClock) -> None:
        """Charge the time of recorded turns to this clock."""
        self._wall = wall

    def follow(self, server: ChatServer | None) -> ChatServer:
        """Return the server for the agent to call, by default the one of its seat, and record the tokens of that
        server."""
        self._server = server
        return self.answering(self._followed)

    @property
    def _followed(self) -> ChatServer:
        server = self._server or self._seat.server
        assert server is not None
        return server

    def answering(self, server: ChatServer) -> ChatServer:
        """Return this server or, if there are recorded turns, one that answers from them first."""
        if self.recorded is None:
            return server
        answers = self.recorded.answers_text(server.ledger is not None)
        if server.ledger is not None:
            server.recorded = self.recorded.pieces
        return MiddlewareServer(server, [self.recorded.answer]) if answers else server

    async def chat(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Answer a model call as chat middleware. Raises `CannotResume`, and `EngineReplyError` for an invalid reply in
        a turn with sub-agents."""
        if call.branch:
            self.note_reply()
        count, recorded = len(call.messages), self.recorded
        completion = None if recorded is None else recorded.pending_reply(call.branch, call.messages)
        known = completion is not None
        if completion is None:
            try:
                completion = await ask(call)
            except ReplyWithheld as error:
                # Without counts, it is the error of a filter, which says nothing about the replies of the server.
                if any(error.tokens):
                    self._events.announce(TokensSpent(self._seat.name, *error.tokens))
                raise
        known = known or (recorded is not None and not recorded.caught_up)
        reply = _Reply(call.messages, count, completion, known)
        if call.branch:
            self._write_reply(call.branch, reply)
        else:
            self._own = reply
        return completion

    def note_reply(self) -> None:
        """Write the rollout's own reply before its turn has ended, because another model is asked meanwhile."""
        if self._own is not None and not self._own.noted:
            self._write_reply(0, self._own)

    def record(self, turn: Turn | None, messages: list[Message]) -> Awaitable[None] | None:
        """Write the messages that a turn added or, if `turn` is None, the opening messages. If this returns an
        awaitable, await it.

        Raises `CannotResume` if different messages are recorded in their place, and `CutShort` if no further turn may
        follow.
        """
        self._workspace.stages.sign_of_life()
        if turn is None and self._seat.slot is not None and self.recorded is not None:
            # The opening messages are recorded before the agent's first call, so only set-up can have leased the slot.
            self.recorded.found_setup()
        taken = self._match(turn, messages)
        self.take_inner_calls(taken.turn.number)
        if taken.known and turn is not None:
            return self._check_resumed(taken)
        self._finish_turn(taken)
        return None

    async def _check_resumed(self, taken: TakenTurn) -> None:
        """Accept a recorded turn only if no background process is running, because the state of such a process cannot
        be reproduced."""
        recorded, slot = self.recorded, self._seat.slot
        assert recorded is not None
        for process in await slot.processes() if slot is not None and not self._calls.slot_ended else ():
            if (await process.status()).running:
                recorded.found_background()
        # The recorded turns took this time when they were taken. The limit of the rollout must not begin again with
        # each resume.
        if recorded.caught_up and self._wall is not None:
            self._wall.charge(recorded.seconds)
        self._finish_turn(taken)

    def _finish_turn(self, taken: TakenTurn) -> None:
        if taken.turn.number:
            self._workspace.begin()
        self._write_turn(taken)
        # Only after the turn is written, so that a resumed run continues after it. A turn without results ends the
        # rollout anyway.
        if taken.turn.number and taken.messages and taken.messages[-1].get("role") != "assistant":
            self._run.limits.check(begun=True)

    def take_inner_calls(self, turn: int) -> None:
        """Record the calls that programs of the agent have made since the last time, as those of this turn."""
        self.inner_calls += self._seat.take_inner_calls(turn)

    def _match(self, turn: Turn | None, messages: list[Message]) -> TakenTurn:
        """Return the turn that was just taken; it is `known` if it is a recorded one. If `turn` is None, `messages` are
        the opening messages.

        Raises `CannotResume` if a different turn is recorded in place of this turn.
        """
        own, self._own = self._own, None
        taken = TakenTurn(turn or Turn(0, None, 0, 0, 0.0, 0.0), messages, self._sampled_in_turn())
        taken.recalled = own is not None and own.known
        if self.recorded is not None and self.recorded.match_turn(turn, messages, taken.sampled):
            taken.known = True
            if self.state is not None:
                self.state.follow(self.recorded.latest.state)
            self._model_calls_kept = self.recorded.latest.model_calls or self._model_calls_kept
            self.model_calls = dict(self._model_calls_kept)
        return taken

    def _write_turn(self, taken: TakenTurn) -> None:
        """Write a turn to the journal unless the journal already has it, and count the turn's cost unless it has been
        counted. After the last recorded turn, also write that the rollout continues."""
        turn, recorded = taken.turn, self.recorded
        of_another_run = recorded is not None and recorded.is_of_another_run(turn.number)
        if not (taken.known and recorded is not None and recorded.journalled):
            event = TurnTaken(
                at=time.time(),
                rollout_id=self._seat.name,
                turn=turn.number,
                messages=taken.messages,
                finish_reason=turn.finish_reason,
                tokens=(turn.prompt_tokens, turn.completion_tokens),
                seconds=(round(turn.model_s, 6), round(turn.tool_s, 6)),
                sampled=taken.sampled,
                cost=None if of_another_run else self._cost(turn.prompt_tokens, turn.completion_tokens),
                recalled=taken.recalled or of_another_run,
                state=self._state(taken),
                model_calls=self._new_model_calls(taken),
            )
            self._events.emit(event)
        # The opening messages are no reply. A reply that was recorded before its turn ended has already been counted,
        # as one of a turn with sub-agents.
        if turn.number and not taken.known and not taken.recalled:
            self._events.announce(TokensSpent(self._seat.name, turn.prompt_tokens, turn.completion_tokens))
        elif taken.known and recorded is not None and recorded.caught_up and recorded.continues:
            self._tell_resumed(recorded)

    def _tell_resumed(self, recorded: RecordedTurns) -> None:
        if recorded.turns or recorded.replies:
            resumed = RolloutResumed(
                at=time.time(), rollout_id=self._seat.name, turns=recorded.turns, replies=recorded.replies
            )
            self._events.emit(resumed)

    def _state(self, taken: TakenTurn) -> JSON:
        """Return the state if this turn has changed it. A repeated turn has the state of its record."""
        if self.state is None:
            return None
        return self.recorded.latest.state if taken.known and self.recorded is not None else self.state.record()

    def _new_model_calls(self, taken: TakenTurn) -> dict[str, float]:
        """Return the calls so far if this turn has made some. A repeated turn has those of its record."""
        if taken.known and self.recorded is not None:
            return self.recorded.latest.model_calls
        if self.model_calls == self._model_calls_kept:
            return {}
        self._model_calls_kept = dict(self.model_calls)
        return self._model_calls_kept

    def count_model_call(self, tokens: Sequence[int], prices: Prices | None) -> None:
        """Count a call of a model that the environment asked."""
        added = {MODEL_CALLS: 1.0, "model_prompt_tokens": tokens[0], "model_completion_tokens": tokens[1]}
        if prices is not None:
            added[MODEL_COST] = prices.cost(tokens[0], tokens[1])
            if not (self._run.recorded_tools.replayed or (self.recorded is not None and self.recorded.replaying)):
                self._events.announce(CostSpent(self._seat.name, added[MODEL_COST]))
        for name, amount in added.items():
            self.model_calls[name] = self.model_calls.get(name, 0.0) + amount

    def count_known_reply(self) -> None:
        """Count a question to a model whose reply the run had already."""
        self.model_calls[KNOWN_REPLIES] = self.model_calls.get(KNOWN_REPLIES, 0.0) + 1.0

    def _write_reply(self, branch: int, reply: _Reply) -> None:
        """Write one reply of a turn that delegates work. The rollout's own reply is counted when its turn ends."""
        reply.noted = True
        recorded, sampled = self.recorded, self._sampled_since_note()
        if sampled and recorded is not None:
            given = [recorded.was_given(each) for each in sampled]
            reply.known = reply.known or all(given)
        said = list(reply.messages[: reply.count])
        read = read_reply(reply.completion, 1 + sum(message.get("role") == "assistant" for message in said))
        tokens = read.prompt_tokens, read.completion_tokens
        if not reply.known or (recorded is not None and not recorded.journalled):
            event = ReplyReceived(
                at=time.time(),
                rollout_id=self._seat.name,
                branch=branch,
                asked=checksum(said),
                # Sampled tokens are the message, and the parser makes it from them again.
                message={} if sampled else read.message(),
                finish_reason=read.finish_reason,
                tokens=tokens,
                cost=self._cost(*tokens),
                sampled=sampled,
            )
            self._events.emit(event)
        if branch and not reply.known:
            self._events.announce(TokensSpent(self._seat.name, *tokens))

    def _sampled_in_turn(self) -> list[SampledTurn]:
        """Return the samples since the last turn, if the server keeps a ledger."""
        ledger = self._followed.ledger
        if ledger is None:
            return []
        before, self._turns_kept = self._turns_kept, len(ledger.turns)
        self._turns_noted = self._turns_kept
        return ledger.sampled_since(before)

    def _sampled_since_note(self) -> list[SampledTurn]:
        """Return the samples since the last turn or reply that was written."""
        ledger = self._followed.ledger
        if ledger is None:
            return []
        before, self._turns_noted = self._turns_noted, len(ledger.turns)
        return ledger.sampled_since(before)

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        spent = prompt_tokens or completion_tokens
        return self._prices.cost(prompt_tokens, completion_tokens) if self._prices and spent else None


@dataclass(slots=True)
class TakenTurn:
    """One turn and its samples. If `known`, the whole turn was recorded before; if `recalled`, its reply was."""

    turn: Turn
    messages: list[Message]
    sampled: list[SampledTurn]
    known: bool = False
    recalled: bool = False
