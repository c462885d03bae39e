"""Taking a rollout up again where it was cut off: `Recall` gives back what was said in it, turn by turn.

Nothing of the rollout's state is stored. The environment sets it up, the one loop runs it, and its tools work in a
fresh slot, as they did before; only the model is not asked as long as its answers are in the journal. So counters,
budgets, to-do lists and files come out as they were, and the ledger has the same tokens. Not for playing a whole run
(`replay`).

Invariants: no recorded model call is made again; what the model was shown is what it is shown, word for word. Where the
world does not give that again, `failed` says why, and the rollout has to begin anew: it never goes on from a past that
it did not have. An observation may differ by times of day, durations and the order of lines, and stays as it was
recorded. Process ids, random names and commit ids must be the same, because the agent may name them later.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import msgspec

from palaestra.agent.hermes_text import exchanged
from palaestra.agent.result import Turn
from palaestra.core.errors import CannotGoOn
from palaestra.core.types import JSON, Message
from palaestra.inference.engine import AssistantMessage, ChatChoice, ChatCompletion, ChatServer, CompletionUsage
from palaestra.inference.ledger import Piece, SampledTurn, pieces_of
from palaestra.rollouts.journal.journal import Messages, Replied, plain
from palaestra.rollouts.resume.observation_diff import Kind, classify, first_difference
from palaestra.rollouts.resume.state import CutOff

HARMLESS = frozenset({Kind.TIME, Kind.ORDER})
"""The kinds of difference that may show by themselves in an observation."""


class Anew(StrEnum):
    """Why a rollout that was cut off begins again."""

    TOOLS = "its tools are others now"
    PROMPT = "its prompt is another now"
    OBSERVATION = "an observation differs"
    CONVERSATION = "the conversation differs"
    TOKENS = "its tokens differ"
    QUESTION = "the model would be asked something else"
    BACKGROUND = "a process was running in the background"


@dataclass(slots=True)
class _Call:
    """One recorded call of the turn at hand. `observed` is its answer."""

    name: str
    arguments: str
    observed: str


class Recall:
    """The recorded turns of one rollout, given back one after the other. Used by one attempt."""

    def __init__(self, cut_off: CutOff) -> None:
        self.failed: Anew | None = None
        self.evidence = ""
        self.cut_off = cut_off
        self.journalled = True
        self.turns = sum(event.turn > 0 for event in cut_off.events)
        begun = max(place for place, event in enumerate(cut_off.events) if not event.turn)
        self.seconds = sum(sum(event.seconds) for event in cut_off.events[begun:])
        self._events = cut_off.events
        self._at = 0
        self._asked = False
        self._said: list[Message] = []
        self._calls: list[_Call] = []
        self._sampled: defaultdict[int, deque[SampledTurn]] = defaultdict(deque)
        self._gave: Counter[int] = Counter()
        self._replies: defaultdict[tuple[int, str], deque[Replied]] = defaultdict(deque)
        pending = cut_off.pending
        self.replies = len(pending)
        known = [event.sampled for event in cut_off.events] + [reply.sampled for reply in pending]
        for sampled in chain.from_iterable(known):
            self._sampled[sampled.pieces[0].sent].append(sampled)
        for place, reply in cut_off.replies:
            if not reply.sampled and (reply.branch or place >= len(cut_off.events)):
                self._replies[reply.branch, reply.asked].append(reply)

    @property
    def caught_up(self) -> bool:
        """Whether every recorded turn has been given back: from here on the rollout is an ordinary one, but for what
        was said in the turn in which it was cut off."""
        return self._at == len(self._events)

    @property
    def repeats(self) -> bool:
        """Whether the rollout still does what it did before it was cut off."""
        return not self.caught_up or any(self._sampled.values()) or any(self._replies.values())

    def fail(self, reason: Anew, evidence: str = "") -> CannotGoOn:
        """Give up; the first reason counts. Returns the error to raise."""
        if self.failed is None:
            self.failed, self.evidence = reason, evidence
        return CannotGoOn(f"{self.failed}: {self.evidence}" if self.evidence else str(self.failed))

    def over(self, server: ChatServer) -> ChatServer:
        """The server as the rollout may ask it: what is recorded is not asked again."""
        if hasattr(server, "recalled"):
            server.recalled = self.pieces
            return server
        return server if isinstance(server, RecalledChat) else RecalledChat(server, self)

    def pieces(self, sent: int) -> list[Piece] | None:
        """What was sampled after a prompt of this checksum; None once all is given back. Raises `CannotGoOn`."""
        waiting = self._sampled.get(sent)
        if self.failed is None and waiting:
            self._gave[sent] += 1
            return pieces_of(waiting.popleft())
        if self.caught_up and self.failed is None:
            return None
        raise self.fail(Anew.QUESTION)

    def gave(self, sampled: SampledTurn) -> bool:
        """Whether this was given back, and not sampled now. To be asked once for each."""
        sent = sampled.pieces[0].sent
        given = self._gave[sent] > 0
        self._gave[sent] -= given
        return given

    def beside(self, branch: int, messages: Sequence[Message]) -> ChatCompletion | None:
        """What was said to this conversation in a turn that gave work away; None where that is not known."""
        if self.failed is not None or not self._replies:
            return None
        waiting = self._replies.get((branch, checksum(messages)))
        return _completion(waiting.popleft()) if waiting else None

    def reply(self, messages: Sequence[Message]) -> ChatCompletion | None:
        """What was said to this conversation; None once all is given back. Raises `CannotGoOn`."""
        if self.caught_up and self.failed is None:
            return None
        event = self._events[self._at] if self.failed is None else None
        if event is None or not event.turn or event.sampled or self._asked or not _same(messages, self._said):
            raise self.fail(Anew.QUESTION)
        self._asked = True
        return _completion(event)

    def expected(self, name: str, arguments: Mapping[str, JSON]) -> str | None:
        """What this call gave then; None where that is not known, or does not matter any more.

        Asked when a call starts. Calls start in the order in which they were made, also those that run together.
        """
        same = [call for call in self._calls if call.name == name]
        call = next((call for call in same if _decoded(call.arguments) == arguments), same[0] if same else None)
        if call is None:
            return None
        self._calls.remove(call)
        return call.observed

    def observed(self, expected: str, text: str) -> str:
        """What the model is shown of a call that gave `text`: the recorded answer. Raises `CannotGoOn`."""
        if text == expected or classify(expected, text, asked="") in HARMLESS:
            return expected
        was, now = first_difference(expected, text)
        raise self.fail(Anew.OBSERVATION, f"{was!r} was recorded and is {now!r} now")

    def took(self, turn: Turn | None, messages: Sequence[Message], sampled: Sequence[SampledTurn]) -> bool:
        """The rollout has taken a turn (None: its first messages): whether it is a recorded one. Raises `CannotGoOn`
        where another is recorded in its place."""
        if self.caught_up and self.failed is None:
            return False
        event = self._events[self._at] if self.failed is None else None
        if (
            event is None
            or event.turn != (turn.number if turn is not None else 0)
            or not _same(messages, event.messages)
        ):
            raise self.fail(Anew.CONVERSATION if turn is not None else Anew.PROMPT)
        if _ordered(event.sampled) != _ordered(sampled):
            raise self.fail(Anew.TOKENS)
        if turn is not None:
            turn.model_s, turn.tool_s = event.seconds
        self._at += 1
        self._asked = False
        self._said += event.messages
        self._calls = [] if self.caught_up else list(_calls(self._events[self._at].messages))
        return True

    def again(self) -> Recall:
        """The same for another attempt: the journal has thrown away this one, with its turns."""
        other = Recall(self.cut_off)
        other.journalled = False
        return other


class RecalledChat:
    """A chat server that gives the recorded replies first. Everything else of it is the server's own.

    Of conversations beside the rollout's (`child`) only those of sub-agents are recorded, which `branches` gives back:
    no other may begin before all is.
    """

    def __init__(self, server: ChatServer, recall: Recall) -> None:
        self._server = server
        self._recall = recall

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """The recorded reply, or the server's."""
        recalled = self._recall.reply(messages)
        return await self._server.chat_completion(messages=messages, **request) if recalled is None else recalled

    def __getattr__(self, name: str) -> object:
        found = getattr(self._server, name)
        return found if name != "child" else lambda **given: RecalledChat(found(**given), self._recall)


def checksum(messages: Sequence[Message]) -> str:
    """Which conversation this is."""
    try:
        encoded = msgspec.json.encode(messages)
    except (TypeError, ValueError, RecursionError):
        encoded = msgspec.json.encode(plain(list(messages)))
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()


def _completion(event: Messages | Replied) -> ChatCompletion:
    said = event.messages[0] if isinstance(event, Messages) else event.message
    message = msgspec.convert(said, AssistantMessage)
    prompt, completion = event.tokens
    return ChatCompletion(
        choices=[ChatChoice(message=message, finish_reason=event.finish_reason)],
        usage=CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
    )


def _calls(messages: Sequence[Message]) -> list[_Call]:
    """The calls of a recorded turn, in order, each with its answer."""
    if messages and not messages[0].get("tool_calls"):
        return [_Call(*each) for each in exchanged(messages)]
    answers = {message.get("tool_call_id"): message.get("content") for message in messages[1:]}
    asked = messages[0].get("tool_calls") or () if messages else ()
    return [
        _Call(call["function"]["name"], call["function"]["arguments"], str(answers.get(call["id"], "")))
        for call in asked
    ]


def _same(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Whether messages are the recorded ones. What was written to the journal came back as plain JSON."""
    return list(messages) == list(recorded) or _decoded(msgspec.json.encode(messages)) == list(recorded)


def _ordered(sampled: Sequence[SampledTurn]) -> list[bytes]:
    """What was sampled in a turn, in one order: sub-agents that work at the same time take turns in any."""
    return sorted(msgspec.json.encode(each) for each in sampled)


def _decoded(text: str | bytes) -> JSON:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
