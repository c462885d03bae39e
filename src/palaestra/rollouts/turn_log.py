"""Writes the turns of one rollout to the journal, and answers model calls from recorded turns, such as those of an
earlier part of the run.

A turn is written when it ends. A turn that delegates work is long and has many replies, so these are written before the
turn ends: the rollout's own reply when its first sub-agent calls the model, and each reply to a sub-agent when it
arrives. So a resumed rollout does not repeat a model call whose reply was written. The journal has a turn once for each
attempt that took it, so a rollout can be resumed repeatedly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from palaestra.agent.replies import read_reply
from palaestra.agent.result import Turn
from palaestra.core.types import Message, Prices
from palaestra.inference.chat_server import ChatServer
from palaestra.inference.engine import ChatCompletion
from palaestra.inference.ledger import SampledTurn
from palaestra.rollouts.events import ReplyReceived, RolloutResumed, TokensSpent, TurnTaken
from palaestra.rollouts.journal.journal import EventStream, checksum
from palaestra.rollouts.middleware import Ask, ChatCall, MiddlewareServer
from palaestra.rollouts.resume.recorded_turns import RecordedTurns


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
        self, rollout_id: str, events: EventStream, prices: Prices | None, recorded: RecordedTurns | None
    ) -> None:
        self.recorded = recorded
        self.turns: list[TurnTaken] | None = None
        """All turns, if they are kept for rollouts that continue this one."""
        self._rollout_id = rollout_id
        self._events = events
        self._prices = prices
        self._server: ChatServer | None = None
        self._own: _Reply | None = None
        self._turns_kept = self._turns_noted = 0

    def follow(self, server: ChatServer) -> ChatServer:
        """Return the server for the agent to call. If there are recorded turns, it answers from them first."""
        self._server = server
        if self.recorded is None:
            return server
        answers = self.recorded.answers_text(server.ledger is not None)
        if server.ledger is not None:
            server.recorded = self.recorded.pieces
        return MiddlewareServer(server, [self.recorded.answer]) if answers else server

    async def chat(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Answer a model call as chat middleware. Raises `CannotResume`, and `EngineReplyError` for an invalid reply in
        a turn with sub-agents."""
        if call.branch and self._own is not None and not self._own.noted:
            self._note(0, self._own)
        count, recorded = len(call.messages), self.recorded
        completion = None if recorded is None else recorded.pending_reply(call.branch, call.messages)
        known = completion is not None
        if completion is None:
            completion = await ask(call)
        known = known or (recorded is not None and not recorded.caught_up)
        reply = _Reply(call.messages, count, completion, known)
        if call.branch:
            self._note(call.branch, reply)
        else:
            self._own = reply
        return completion

    def match(self, turn: Turn | None, messages: list[Message]) -> TakenTurn:
        """Return the turn that was just taken; it is `known` if it is a recorded one. If `turn` is None, `messages` are
        the opening messages.

        Raises `CannotResume` if a different turn is recorded in place of this turn.
        """
        own, self._own = self._own, None
        taken = TakenTurn(turn or Turn(0, None, 0, 0, 0.0, 0.0), messages, self._sampled_in_turn())
        taken.recalled = own is not None and own.known
        if self.recorded is not None and self.recorded.match_turn(turn, messages, taken.sampled):
            taken.known = True
        return taken

    def write(self, taken: TakenTurn) -> None:
        """Write a turn to the journal unless the journal already has it, and count the turn's cost unless it has been
        counted. After the last recorded turn, also write that the rollout continues."""
        turn, recorded = taken.turn, self.recorded
        of_another_run = recorded is not None and recorded.origin is not None and 0 < turn.number <= recorded.shared
        if taken.known and recorded is not None and recorded.journalled:
            event = recorded.latest
        else:
            event = TurnTaken(
                at=time.time(),
                rollout_id=self._rollout_id,
                turn=turn.number,
                messages=taken.messages,
                finish_reason=turn.finish_reason,
                tokens=(turn.prompt_tokens, turn.completion_tokens),
                seconds=(round(turn.model_s, 6), round(turn.tool_s, 6)),
                sampled=taken.sampled,
                cost=None if of_another_run else self._cost(turn.prompt_tokens, turn.completion_tokens),
                recalled=taken.recalled or of_another_run,
            )
            self._events.emit(event)
        if self.turns is not None:
            self.turns.append(
                msgspec.structs.replace(event, messages=list(event.messages))
            )  # copied, because the agent loop's own list grows
        if not taken.known and not taken.recalled:
            self._events.announce(TokensSpent(self._rollout_id, turn.prompt_tokens, turn.completion_tokens))
        elif taken.known and recorded is not None and recorded.caught_up and recorded.continues:
            if not recorded.turns and not recorded.replies:
                return
            resumed = RolloutResumed(
                at=time.time(), rollout_id=self._rollout_id, turns=recorded.turns, replies=recorded.replies
            )
            self._events.emit(resumed)

    def _note(self, branch: int, reply: _Reply) -> None:
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
                rollout_id=self._rollout_id,
                branch=branch,
                asked=checksum(said),
                message={} if sampled else read.message(),
                finish_reason=read.finish_reason,
                tokens=tokens,
                cost=self._cost(*tokens),
                sampled=sampled,
            )
            self._events.emit(event)
        if branch and not reply.known:
            self._events.announce(TokensSpent(self._rollout_id, *tokens))

    def _sampled_in_turn(self) -> list[SampledTurn]:
        """Return the samples since the last turn, if the server keeps a ledger."""
        ledger = self._server.ledger if self._server is not None else None
        if ledger is None:
            return []
        before, self._turns_kept = self._turns_kept, len(ledger.turns)
        self._turns_noted = self._turns_kept
        return ledger.sampled_since(before)

    def _sampled_since_note(self) -> list[SampledTurn]:
        """Return the samples since the last turn or reply that was written."""
        ledger = self._server.ledger if self._server is not None else None
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
