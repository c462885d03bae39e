"""Resumes a rollout by executing its recorded turns again, with the recorded replies of the model.

The rollout runs as usual, in a fresh slot, but replies that are in the journal are not sampled again. So files,
counters and budgets become the same as before, and the ledger gets the same tokens. `replay.py` replays whole runs.

The model sees the recorded conversation, word for word. If the workspace cannot reproduce an observation, `failed` has
the reason and the rollout starts over. An observation may differ in dates, times, durations and the order of its lines
or words; the model then sees the recorded observation. Process ids, random names and commit ids must be the same,
because the agent may use them later.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import msgspec

from palaestra.agent.middleware import Ask, ChatCall
from palaestra.agent.result import Turn
from palaestra.rollouts.events import ReplyReceived, TurnTaken
from palaestra.rollouts.journal.journal import checksum
from palaestra.rollouts.records import Origin
from palaestra.rollouts.resume.state import CutOff
from palaestra_slots.core.errors import CannotResume
from palaestra_slots.core.types import JSON, Message
from palaestra_slots.sandbox.slot import Snapshot
from palaestra_tokens.engine import ChatChoice, ChatCompletion, CompletionUsage, assistant_message
from palaestra_tokens.ledger import Piece, SampledTurn, pieces_of

_ANSWER_START, _ANSWER_END = "<tool_response>", "</tool_response>"


class Mismatch(StrEnum):
    """The reason why an interrupted rollout starts over."""

    TOOLS = "its tools have changed"
    PROMPT = "its prompt has changed"
    OBSERVATION = "an observation differs"
    CONVERSATION = "the conversation differs"
    TOKENS = "its tokens differ"
    QUESTION = "the model would be asked a different question"
    BACKGROUND = "a process was running in the background"
    SETUP = "its set-up used the sandbox"


@dataclass(slots=True)
class _RecordedCall:
    """One call of the current recorded turn, with its answer."""

    name: str
    arguments: str
    observed: str


class RecordedTurns:
    """The recorded turns of one rollout, for one attempt at resuming it.

    If `forked`, the rollout begins with turns of another rollout. The calls in those turns are answered from the record
    and not run again. The slot starts from `snapshot`, which has the effects of these calls (None if they did not touch
    the slot).
    """

    def __init__(
        self, cut_off: CutOff, *, journalled: bool = True, forked: bool = False, snapshot: Snapshot | None = None
    ) -> None:
        self.forked = forked
        self.snapshot = snapshot
        self.failed: Mismatch | None = None
        self.evidence = ""
        self.cut_off = cut_off
        self.journalled = journalled
        """Whether the journal still counts these turns. False for the retry of a discarded attempt, which writes them
        again."""
        self.turns = sum(event.turn > 0 for event in cut_off.events)
        # A hook may continue an ended conversation, with opening messages and a time limit of their own: only the time
        # since then counts against the limit.
        started = max(place for place, event in enumerate(cut_off.events) if not event.turn)
        self.seconds = sum(sum(event.seconds) for event in cut_off.events[started:])
        self._events = cut_off.events
        self._at = 0
        self._went_on = False
        self._asked = False
        self._said: list[Message] = []
        self._calls: list[_RecordedCall] = []
        self._sampled: defaultdict[int, deque[SampledTurn]] = defaultdict(deque)
        self._given: Counter[int] = Counter()
        self._replies: defaultdict[tuple[int, str], deque[ReplyReceived]] = defaultdict(deque)
        pending = cut_off.pending
        self.replies = len(pending)
        known = [event.sampled for event in cut_off.events] + [reply.sampled for reply in pending]
        for sampled in chain.from_iterable(known):
            # By the checksum of the prompt: sub-agents ask concurrently, so the order of the record says nothing. Equal
            # prompts, which several of them may have, are answered in turn.
            self._sampled[sampled.pieces[0].sent].append(sampled)
        for place, reply in cut_off.replies:
            if not reply.sampled and (reply.branch or place >= len(cut_off.events)):
                self._replies[reply.branch, reply.asked].append(reply)

    def is_of_another_run(self, turn: int) -> bool:
        """Return whether the turn was taken, and counted, in the run whose rollout this one continues."""
        return self.origin is not None and 0 < turn <= self.shared

    @property
    def origin(self) -> Origin | None:
        """The point of another run at which the rollout begins, if it is counterfactual."""
        return None

    @property
    def shared(self) -> int:
        """The number of turns at the beginning that belong to a rollout of another run."""
        return 0

    @property
    def shared_samples(self) -> int:
        """The number of model calls in the shared turns that the rollout's ledger has too."""
        return self.shared

    @property
    def restarts(self) -> bool:
        """Whether the rollout starts over if these turns cannot be repeated."""
        return True

    @property
    def continues(self) -> bool:
        """Whether the rollout itself took some of these turns before, so that it is a continued one."""
        return not self.forked

    def answers_text(self, exact: bool) -> bool:
        """Return whether replies are given as messages and not as tokens. `exact` is true if the server keeps the exact
        tokens of its replies. Called when the rollout gets its server."""
        return not exact

    def answers(self, touches_world: bool) -> bool:
        """Return whether the record answers a call of the current turn, so that the call is not run again.
        `touches_world` is true for a call that reaches outside of this machine and restores no state."""
        return self.forked

    @property
    def caught_up(self) -> bool:
        """Whether every recorded turn has been used. Replies of the turn that was cut off may still be unused."""
        return self._at == len(self._events)

    @property
    def latest(self) -> TurnTaken:
        """The recorded turn that was matched last."""
        return self._events[self._at - 1]

    @property
    def replaying(self) -> bool:
        """Whether recorded turns or replies are still unused, or the turn that was cut off is not over."""
        return not self._went_on or any(self._sampled.values()) or any(self._replies.values())

    def answers_of_user(self, before: int) -> Sequence[Message] | None:
        """Return what the user said in the turn that is repeated now, after `before` messages of others: a message or
        nothing. None if no recorded turn is left."""
        return None if self.caught_up or self.failed is not None else self._events[self._at].messages[before:]

    def fail(self, reason: Mismatch, evidence: str = "") -> CannotResume:
        """Give up on resuming; only the first reason is kept. Returns the error to raise."""
        if self.failed is None:
            self.failed, self.evidence = reason, evidence
        return CannotResume(self.why)

    @property
    def why(self) -> str:
        """The reason why the turns cannot be repeated, with its evidence."""
        return f"{self.failed}: {self.evidence}" if self.evidence else str(self.failed)

    def pieces(self, sent: int) -> list[Piece] | None:
        """Return the tokens sampled after the prompt with this checksum, or None once every turn has been used.

        Raises `CannotResume` for a prompt that is not recorded.
        """
        waiting = self._sampled.get(sent)
        if self.failed is None and waiting:
            self._given[sent] += 1
            return pieces_of(waiting.popleft())
        if self.caught_up and self.failed is None:
            return None
        raise self.fail(Mismatch.QUESTION)

    def was_given(self, sampled: SampledTurn) -> bool:
        """Return whether these tokens came from the record. Call this only once for each sample, because each call
        counts one use."""
        sent = sampled.pieces[0].sent
        given = self._given[sent] > 0
        self._given[sent] -= given
        return given

    def pending_reply(self, branch: int, messages: Sequence[Message]) -> ChatCompletion | None:
        """Return the recorded reply to this conversation in the turn that was cut off, or None."""
        if self.failed is not None or not self._replies:
            return None
        waiting = self._replies.get((branch, checksum(messages)))
        return _completion(waiting.popleft()) if waiting else None

    def reply(self, messages: Sequence[Message]) -> ChatCompletion | None:
        """Return the recorded reply to this conversation, or None once every turn has been used.

        Raises `CannotResume` for a conversation that is not the recorded one.
        """
        if self.caught_up and self.failed is None:
            return None
        event = self._events[self._at] if self.failed is None else None
        if event is None or not event.turn or event.sampled or self._asked or not _same(messages, self._said):
            raise self.fail(Mismatch.QUESTION)
        # A second question before the reply was used would mean that the recorded conversation is not the one being
        # played.
        self._asked = True
        return _completion(event)

    async def answer(self, call: ChatCall, ask: Ask) -> ChatCompletion:
        """Answer a call as chat middleware: with the recorded reply or, once every turn has been used, with the
        server's reply."""
        recorded = self.reply(call.messages)
        return await ask(call) if recorded is None else recorded

    def expected_observation(self, name: str, arguments: Mapping[str, JSON]) -> str | None:
        """Return the recorded answer to the first unused call of this tool with these arguments or, if there is none,
        of this tool with any arguments. Returns None if the recorded turn has no further call of this tool. Call this
        in the order in which the tool calls started, also for parallel calls."""
        same = [call for call in self._calls if call.name == name]
        call = next((call for call in same if _json_or_none(call.arguments) == arguments), same[0] if same else None)
        if call is None:
            return None
        self._calls.remove(call)
        return call.observed

    def found_setup(self) -> None:
        """Take note that set-up has used the sandbox before the agent began. Raises `CannotResume` if the sandbox had
        the state of a later turn, which the set-up may have damaged."""

    def found_background(self) -> None:
        """Take note of a process that still runs after a repeated turn. Raises `CannotResume`, because the state of the
        process cannot be reproduced."""
        raise self.fail(Mismatch.BACKGROUND)

    def match_observation(self, expected: str, text: str, call: str = "") -> str:
        """Return the recorded answer `expected`, which the model sees in place of `text`. `call` describes the call.
        Raises `CannotResume` if the two do not match."""
        if text == expected:
            return expected
        from palaestra.rollouts.resume.observation_diff import HARMLESS, classify, first_difference  # few differ

        if classify(expected, text, asked="") in HARMLESS:
            return expected
        was, now = first_difference(expected, text)
        raise self.fail(Mismatch.OBSERVATION, f"{was!r} was recorded, but it is {now!r} now")

    def match_turn(self, turn: Turn | None, messages: Sequence[Message], sampled: Sequence[SampledTurn]) -> bool:
        """Match the turn that was just taken with the next recorded turn, and return True; return False if no recorded
        turn is left. If `turn` is None, `messages` are the opening messages.

        Raises `CannotResume` if the recorded turn is a different one.
        """
        if self.caught_up and self.failed is None:
            self._went_on = True
            return False
        event = self._events[self._at] if self.failed is None else None
        if (
            event is None
            or event.turn != (turn.number if turn is not None else 0)
            or not _same(messages, event.messages)
        ):
            raise self.fail(Mismatch.CONVERSATION if turn is not None else Mismatch.PROMPT)
        # Equal texts may come from other tokens, and the rollout would then be trained on tokens that nobody sampled.
        if _ordered(event.sampled) != _ordered(sampled):
            raise self.fail(Mismatch.TOKENS)
        if turn is not None:
            turn.model_s, turn.tool_s = event.seconds
        self._at += 1
        self._asked = False
        self._said += event.messages
        self._calls = [] if self.caught_up else list(_recorded_calls(self._events[self._at].messages))
        return True


def described(name: str, arguments: Mapping[str, JSON]) -> str:
    """Return a call as text for an error message."""
    return f"{name} {msgspec.json.encode(arguments).decode()[:200]}"


def _completion(event: TurnTaken | ReplyReceived) -> ChatCompletion:
    said = event.messages[0] if isinstance(event, TurnTaken) else event.message
    message = assistant_message(said)
    prompt, completion = event.tokens
    return ChatCompletion(
        choices=[ChatChoice(message=message, finish_reason=event.finish_reason)],
        usage=CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion),
    )


def _recorded_calls(messages: Sequence[Message]) -> list[_RecordedCall]:
    """Return the calls of a recorded turn, in order, each with its answer."""
    if messages and not messages[0].get("tool_calls"):
        return [_RecordedCall(*each) for each in exchanged(messages)]
    answers = {message.get("tool_call_id"): message.get("content") for message in messages[1:]}
    asked = messages[0].get("tool_calls") or () if messages else ()
    return [
        _RecordedCall(call["function"]["name"], call["function"]["arguments"], str(answers.get(call["id"], "")))
        for call in asked
    ]


def exchanged(messages: Sequence[Message]) -> Iterator[tuple[str, str, str]]:
    """Yield three strings for each call of one turn, in order: the call's name, its arguments, and the
    `<tool_response>` element that answers it.

    Yields nothing unless the messages are a reply with calls and a user turn that answers each of them.
    """
    from palaestra_tokens.parsers import get_parser  # imported here, because few runs go on from recorded turns

    said, *seen = [str(message.get("content") or "") for message in messages]
    calls = get_parser("hermes").parse(said, tools=(), cut=False).all_tool_calls or ()
    answers = list(_elements(seen[0])) if len(seen) == 1 else []
    if len(calls) == len(answers):
        for call, answer in zip(calls, answers, strict=True):
            yield call.function.name, call.function.arguments, answer


def _elements(text: str) -> Iterator[str]:
    """Yield the `<tool_response>` elements of a text. Their JSON may contain tags."""
    place = 0
    while text.startswith(_ANSWER_START, place):
        try:
            _, end = json.JSONDecoder().raw_decode(text, place + len(_ANSWER_START))
        except (ValueError, RecursionError):
            return
        yield text[place : end + len(_ANSWER_END)]
        place = end + len(_ANSWER_END) + len("\n")


def _same(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Return whether these messages equal the recorded ones, which the journal has as plain JSON."""
    return list(messages) == list(recorded) or _json_or_none(msgspec.json.encode(messages)) == list(recorded)


def _ordered(sampled: Sequence[SampledTurn]) -> list[bytes]:
    """Return the samples of a turn in sorted order, since concurrent sub-agents sample in any order."""
    return sorted(msgspec.json.encode(each) for each in sampled)


def _json_or_none(text: str | bytes) -> JSON:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


class Start:
    """How the rollouts of a run begin: with their opening messages."""

    def recorded(self) -> RecordedTurns | None:
        """Return the turns that every attempt at a rollout repeats first."""
        return None

    def resumed(self, cut_off: CutOff) -> RecordedTurns | None:
        """Return the turns of a rollout of this run that was cut off; None if it had no turn of its own."""
        return RecordedTurns(cut_off)

    def retried(self, recorded: RecordedTurns | None) -> RecordedTurns | None:
        """Return the turns that a retry repeats, in place of those of the failed attempt."""
        # Turns that the failed attempt did not reach are not lost. After them, a retry begins like any other.
        if recorded is None or recorded.caught_up:
            return None
        return RecordedTurns(recorded.cut_off, journalled=False)

    def seed_index(self, index: int) -> int:
        """Return the index in the group whose random choices a rollout repeats."""
        return index

    def sampling_seed(self, index: int) -> str:
        """Return the seed of what the model samples; empty if it is that of the other choices."""
        return ""

    def rebuild(self) -> None:
        """Use no kept workspace for further rollouts, because set-up would damage it."""


FROM_OPENING = Start()
