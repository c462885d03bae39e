"""Checks that the tokens of a stored ledger are the sampled ones, and that each of them is trained on exactly once.

Everything is derived again from the record: the layout of the spans, the mask, the checksums of the prompts and the
running hash. The engine's honesty cannot be checked. Only the first violation is reported, with its location.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from palaestra_tokens.ledger.records import (
    DIGEST_BYTES,
    HIGHEST_LOGPROB,
    ITEM_BYTES,
    LEDGER_SCHEMA,
    PROMPT_LOGPROB,
    SEGMENT_REASONS,
    LedgerRecord,
    SegmentReason,
    SegmentRecord,
    TokenSpan,
    feed_digest,
    packed,
    unpacked_ids,
    unpacked_logprobs,
)

_ONE = packed(array("f", [PROMPT_LOGPROB]))
_FINISHES = ("stop", "length")
_BEFORE_FIRST = TokenSpan("sampled", 0, 0, -1, "")
"""Stands before the first span, which follows no other: turns count from 1."""

IMPOSSIBLE = math.log(1e-9)
"""The log-probability below which an event counts as practically excluded."""
_LEAST_REPLIES = 4


@dataclass(frozen=True, slots=True)
class Violation:
    """The broken invariant (T1 to T4), where it is broken, and the problem."""

    invariant: str
    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} is broken at {self.place}: {self.what}"


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    """How much was checked, and the first violation, if any."""

    segments: int
    turns: int
    tokens: int
    trained: int
    violation: Violation | None = None

    @property
    def ok(self) -> bool:
        return self.violation is None


def verify_ledger(record: LedgerRecord, *, forked: bool = False) -> LedgerVerdict:
    """Check T1 to T4 in one pass over the tokens. `forked` is true if the rollout was forked from another one."""
    violation = next(_violations(record, forked), None)
    return LedgerVerdict(
        segments=len(record.segments),
        turns=len(record.turns),
        tokens=sum(len(segment.tokens) // ITEM_BYTES for segment in record.segments),
        trained=sum(sum(segment.mask) for segment in record.segments),
        violation=violation,
    )


def _violations(record: LedgerRecord, forked: bool) -> Iterator[Violation]:
    if record.schema != LEDGER_SCHEMA:
        yield Violation("T1", "the record", f"its schema is '{record.schema}', but this version reads {LEDGER_SCHEMA}")
        return
    for number, segment in enumerate(record.segments):
        first = number == 0 and not forked
        yield from _SegmentCheck(number, segment, frozenset(record.stop_ids), first).violations()
    yield from _check_turns(record)


def _check_turns(record: LedgerRecord) -> Iterator[Violation]:
    """Check that every turn is in exactly one segment, and that all sampled spans belong to a turn."""
    found: dict[int, tuple[int, int, int]] = {}
    for number, segment in enumerate(record.segments):
        for span in segment.spans:
            at, prompt, sampled = found.get(span.turn, (number, 0, 0))
            if at != number:
                yield Violation("T3", f"turn {span.turn}", f"it is in segments {at} and {number}: trained twice")
            if span.kind == "prompt":
                found[span.turn] = (number, span.stop, sampled)
            else:
                found[span.turn] = (number, prompt, sampled + span.stop - span.start)
    if sorted(found) != [turn.number for turn in record.turns]:
        yield Violation("T3", "the list of turns", "it does not name each turn of the spans once, in order")
    for turn in record.turns:
        listed = turn.segment, turn.prompt_tokens, turn.sampled_tokens
        # No KeyError: only the first violation is read, and a turn that the spans lack is one, above.
        if listed != found[turn.number]:
            what = f"its (segment, prompt, sampled) is {listed}, but the spans have {found[turn.number]}"
            yield Violation("T3", f"turn {turn.number}", what)
        if turn.finish_reason not in _FINISHES:
            yield Violation("T2", f"turn {turn.number}", f"it ended with '{turn.finish_reason}' and was not resumed")


class _SegmentCheck:
    """The checks of one segment, cheapest first."""

    def __init__(self, number: int, segment: SegmentRecord, stop_ids: frozenset[int], first: bool) -> None:
        self.number = number
        self.first = first
        self.segment = segment
        self.stop_ids = stop_ids

    def violations(self) -> Iterator[Violation]:
        yield from self._reason()
        if violation := self._lengths():
            yield violation
            return  # the checks below need equal lengths
        self.tokens = unpacked_ids(self.segment.tokens)
        self.logprobs = unpacked_logprobs(self.segment.logprobs)
        yield from self._layout()
        for span in self.segment.spans:
            yield from self._values(span)
        yield from self._ends()
        yield from self._hashes()

    def _at(self, invariant: str, what: str, span: TokenSpan | None = None) -> Violation:
        place = f"segment {self.number}"
        if span is not None:
            place += f", turn {span.turn}, {span.kind} tokens {span.start} to {span.stop}"
        return Violation(invariant, place, what)

    def _reason(self) -> Iterator[Violation]:
        reason = self.segment.reason
        if self.first and reason != SegmentReason.START:
            yield self._at("T2", f"the first segment begins with '{reason}', not with '{SegmentReason.START}'")
        if not self.first and reason not in SEGMENT_REASONS:
            yield self._at("T2", f"'{reason}' is not a reason for a further segment")

    def _lengths(self) -> Violation | None:
        if len(self.segment.tokens) % ITEM_BYTES or len(self.segment.logprobs) % ITEM_BYTES:
            return self._at("T3", "tokens or log-probabilities end inside an item")
        tokens, logprobs = (len(raw) // ITEM_BYTES for raw in (self.segment.tokens, self.segment.logprobs))
        masks = len(self.segment.mask)
        if not tokens == masks == logprobs:
            return self._at("T3", f"{tokens} tokens, {masks} masks, {logprobs} log-probabilities")
        return None

    def _layout(self) -> Iterator[Violation]:
        """Check that spans cover the segment without gaps, and that a turn is one prompt span and its sampled spans."""
        at, before = 0, _BEFORE_FIRST
        for span in self.segment.spans:
            if span.start != at or span.stop < span.start:
                yield self._at("T3", f"the span should begin at {at}", span)
            at = span.stop
            # New weights abort a reply, which is then resumed, so a turn may have several sampled spans.
            follows = before.kind == "sampled" and before.turn == span.turn
            if span.kind == "prompt":
                if before.kind != "sampled" or before.turn >= span.turn:
                    yield self._at("T3", "the turns are out of order", span)
                if span.reason:
                    yield self._at("T2", "a prompt span has a reason", span)
            elif before is _BEFORE_FIRST or before.turn != span.turn:
                yield self._at("T3", "sampled tokens without the prompt of their turn", span)
            elif follows != (span.reason == SegmentReason.ABORT_RESUME):
                yield self._at("T2", "the declared aborts do not match the pieces in which the turn was sampled", span)
            before = span
        if at != len(self.tokens):
            yield self._at("T3", f"the spans end at {at}, the tokens at {len(self.tokens)}")
        if before.kind == "prompt":
            yield self._at("T3", "a prompt without sampled tokens after it", before)

    def _values(self, span: TokenSpan) -> Iterator[Violation]:
        length, sampled = span.stop - span.start, span.kind == "sampled"
        if self.segment.mask[span.start : span.stop] != (b"\1" if sampled else b"\0") * length:
            wrong = "a sampled token is not trained" if sampled else "a token that was not sampled is trained"
            yield self._at("T3", wrong, span)
        ids, logprobs = self.tokens[span.start : span.stop], self.logprobs[span.start : span.stop]
        if length and min(ids) < 0:
            yield self._at("T1", "a negative token id", span)
        if not sampled:
            if self.segment.logprobs[span.start * ITEM_BYTES : span.stop * ITEM_BYTES] != _ONE * length:
                yield self._at("T4", "a log-probability for a token that was not sampled", span)
        # A NaN anywhere makes the sum NaN, while `max` misses one that is not the first value.
        elif length and not (math.isfinite(sum(logprobs)) and max(logprobs) <= HIGHEST_LOGPROB):
            yield self._at("T4", "a sampled token without a log-probability", span)

    def _ends(self) -> Iterator[Violation]:
        """Check that no end-of-turn token is doubled between two turns."""
        for before, span in zip(self.segment.spans, self.segment.spans[1:], strict=False):
            # Both the model and the template write the end of a turn, and only one
            # of them may stay (`TurnRenderer.step`).
            both = before.start < before.stop and span.start < span.stop
            if both and before.kind == "sampled" and span.kind == "prompt":
                last = self.tokens[span.start - 1]
                if last in self.stop_ids and self.tokens[span.start] == last:
                    yield self._at("T1", f"the end-of-turn token {last} is doubled", span)

    def _hashes(self) -> Iterator[Violation]:
        """Check that the engine received the recorded tokens, and that nothing has changed since."""
        hasher, checksum = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        for span in self.segment.spans:
            part = slice(span.start * ITEM_BYTES, span.stop * ITEM_BYTES)
            if span.kind == "sampled" and span.sent != checksum:
                yield self._at("T1", "the engine did not receive the tokens that the record has before the span", span)
            tokens = self.segment.tokens[part]
            checksum = zlib.crc32(tokens, checksum)
            feed_digest(hasher, span.kind, span.version, tokens, self.segment.logprobs[part])
            if hasher.hexdigest() != span.digest:
                yield self._at("T1", "tokens, log-probabilities or versions are not those that were recorded", span)


@dataclass(slots=True)
class RepeatedReplies:
    """Collects the first replies of rollouts. A server that applies settings of its own, such as `top_k 1` from a
    model's `generation_config.json`, gives the same reply again and again, although its log-probabilities say that the
    model would choose others too."""

    prompts: dict[int, list[tuple[bytes, float]]] = field(default_factory=dict)

    def add(self, record: LedgerRecord) -> None:
        """Add the first reply of a ledger whose log-probabilities are the model's own at temperature 1."""
        segment = record.segments[0] if record.segments else None
        span = next((each for each in segment.spans if each.kind == "sampled"), None) if segment else None
        if segment is None or span is None:
            return
        part = slice(span.start * ITEM_BYTES, span.stop * ITEM_BYTES)
        sampled = segment.tokens[part], sum(unpacked_logprobs(segment.logprobs[part]))
        self.prompts.setdefault(span.sent, []).append(sampled)

    @property
    def notice(self) -> str:
        """The notice if no prompt has two different replies, and that is practically excluded; else an empty string."""
        repeated = [replies for replies in self.prompts.values() if len(replies) > 1]
        if any(len({ids for ids, _ in replies}) > 1 for replies in repeated):
            return ""
        # The first reply may be any; each further one repeats it with the probability that the log-probabilities give.
        chance = sum((len(replies) - 1) * replies[0][1] for replies in repeated)
        if chance >= IMPOSSIBLE or sum(map(len, repeated)) < _LEAST_REPLIES:
            return ""
        return (
            f"all replies to the same prompt are identical ({len(repeated)} prompts), which their log-probabilities "
            "practically exclude: the server did not sample as it reports; palaestra doctor URL checks it"
        )
