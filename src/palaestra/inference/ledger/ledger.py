"""The ledger of one rollout, growing: append a turn, read the rows.

Not for deciding what is appended (`managed` does) nor for judging a stored one (`verify`). Invariants: what was
appended never changes (T1); every token that is marked as trained was sampled, with the engine's own log-probability
(T3, T4); a turn is appended whole or not at all, at a cost that grows with its new tokens only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

import msgspec

from palaestra.inference.engine import Sampled
from palaestra.inference.ledger.prompts import Prompt, WrittenIds, sent_checksum
from palaestra.inference.ledger.records import (
    PROMPT_LOGPROB,
    UNTRAINED,
    Kind,
    LedgerRecord,
    Reason,
    Row,
    SampledPiece,
    SampledTurn,
    SegmentRecord,
    Span,
    Turn,
    packed,
    unpacked,
)

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One answer of the engine, and the CRC-32 of the ids it was given (`sent_checksum`)."""

    sampled: Sampled
    sent: int


def pieces_of(turn: SampledTurn) -> list[Piece]:
    """A recorded model call as the engine's answers. All but the last were broken off."""
    ends = ["abort"] * (len(turn.pieces) - 1) + [turn.finish_reason]
    return [
        Piece(
            Sampled(
                ids=cast("array[int]", unpacked("i", piece.ids)),
                logprobs=cast("array[float]", unpacked("f", piece.logprobs)),
                finish_reason=finish_reason,
                policy_version=piece.version,
            ),
            piece.sent,
        )
        for piece, finish_reason in zip(turn.pieces, ends, strict=True)
    ]


@dataclass(slots=True)
class _Segment:
    """`tokens[T]`, the `logprobs[S]` of those that were sampled, the running hash over it; the tokens' checksum and
    JSON. `branch` is the conversation that it is of."""

    reason: Reason
    branch: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    hasher: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    finish_reason: str = ""
    checksum: int = 0
    written: WrittenIds = field(default_factory=WrittenIds)

    def append(self, turn: int, ids: array[int], logprobs: array[float], piece: Piece | None) -> None:
        """One span, with one log-probability per id; `piece` is where it was sampled, None for prompt tokens."""
        start = len(self.tokens)
        kind: Kind = "sampled" if piece else "prompt"
        version = piece.sampled.policy_version if piece else ""
        resumed = bool(piece and self.spans and self.spans[-1].kind == "sampled")
        self.tokens.extend(ids)
        self.checksum = sent_checksum(ids, self.checksum)
        if piece:
            self.logprobs.extend(logprobs)
        feed(self.hasher, kind, version, packed(ids), packed(logprobs))
        self.spans.append(
            Span(
                kind=kind,
                start=start,
                stop=len(self.tokens),
                turn=turn,
                digest=self.hasher.hexdigest(),
                version=version,
                sent=piece.sent if piece else 0,
                reason=Reason.ABORT_RESUME if resumed else "",
            )
        )

    def columns(self) -> tuple[bytearray, array[float]]:
        """`mask[T]`, 1 where sampled, and `logprobs[T]` of all tokens."""
        mask, logprobs, taken = bytearray(), array("f"), 0
        for span in self.spans:
            length = span.stop - span.start
            if span.kind == "sampled":
                mask += b"\1" * length
                logprobs += self.logprobs[taken : taken + length]
                taken += length
            else:
                mask += bytes(length)
                logprobs += _unsampled(length)
        return mask, logprobs

    def record(self, numbers: Mapping[int, int]) -> SegmentRecord:
        """The segment as it is stored, its turns with these numbers."""
        mask, logprobs = self.columns()
        return SegmentRecord(
            reason=self.reason,
            tokens=packed(self.tokens),
            mask=bytes(mask),
            logprobs=packed(logprobs),
            spans=[msgspec.structs.replace(span, turn=numbers[span.turn]) for span in self.spans],
        )


def _unsampled(length: int) -> array[float]:
    return array("f", [PROMPT_LOGPROB]) * length


class Ledger:
    """The tokens of one rollout. `stop_ids` are the tokens that end a turn; they are stored for the verifier."""

    def __init__(self, stop_ids: Iterable[int] = ()) -> None:
        self.stop_ids = tuple(stop_ids)
        self.turns: list[Turn] = []
        self._segments: list[_Segment] = []

    def __len__(self) -> int:
        """How many segments there are."""
        return len(self._segments)

    def open(self, reason: Reason, branch: int = 0) -> int:
        """Begin a segment and say why; its number. The first one's reason is `START` whatever is given.

        `branch` is the number of the conversation beside the rollout's own that it is of, 0 for that itself.
        """
        if not self._segments:
            reason = Reason.START
        elif reason in (Reason.START, Reason.ABORT_RESUME):
            raise ValueError(f"'{reason}' is no reason for a further segment")
        self._segments.append(_Segment(reason, branch))
        return len(self._segments) - 1

    def prompt(self, segment: int | None, delta: Sequence[int]) -> Prompt:
        """What the engine is asked to continue: the segment so far (None: one to be opened) and `delta`."""
        known = _Segment(Reason.START) if segment is None else self._segments[segment]
        return Prompt(known.tokens, known.checksum, known.written, array("i", delta))

    def last_token(self, segment: int) -> int | None:
        """The last token of a segment."""
        tokens = self._segments[segment].tokens
        return tokens[-1] if tokens else None

    def append(self, segment: int, delta: Sequence[int], pieces: Sequence[Piece]) -> int:
        """One whole turn: the new prompt tokens and what was sampled after them; the turn's number.

        Several pieces are one reply whose request was aborted and taken up again. Raises `ValueError` when a piece does
        not have one log-probability per token, and then nothing was appended.
        """
        for piece in pieces:
            if len(piece.sampled.ids) != len(piece.sampled.logprobs):
                raise ValueError(f"{len(piece.sampled.ids)} ids with {len(piece.sampled.logprobs)} log-probabilities")
        prompt, sampled = (
            array("i", delta),
            [(array("i", p.sampled.ids), array("f", p.sampled.logprobs)) for p in pieces],
        )
        number, into = len(self.turns) + 1, self._segments[segment]
        into.append(number, prompt, _unsampled(len(prompt)), None)
        prompt_tokens = len(into.tokens)
        for piece, (ids, logprobs) in zip(pieces, sampled, strict=True):
            into.append(number, ids, logprobs, piece)
        into.finish_reason = pieces[-1].sampled.finish_reason
        self.turns.append(
            Turn(
                number=number,
                segment=segment,
                prompt_tokens=prompt_tokens,
                sampled_tokens=len(into.tokens) - prompt_tokens,
                finish_reason=into.finish_reason,
            )
        )
        return number

    def rows(self) -> list[Row]:
        """The training rows, one per segment with anything in it, in the order they began."""
        return [view.row() for view in self.views()]

    def views(self) -> list[RowView]:
        """The same rows, each made when it is asked for: as Python lists they take ten times what they take here."""
        return [RowView(number, segment) for number, segment in enumerate(self._segments) if segment.tokens]

    def sampled_since(self, turns: int) -> list[SampledTurn]:
        """What was sampled in the turns after the first `turns`, in order."""
        return [SampledTurn(turn.finish_reason, self._pieces(turn)) for turn in self.turns[turns:]]

    def _pieces(self, turn: Turn) -> list[SampledPiece]:
        segment = self._segments[turn.segment]
        pieces, stop = [], len(segment.logprobs)
        for span in takewhile(lambda span: span.turn >= turn.number, reversed(segment.spans)):
            if span.kind != "sampled":
                continue
            start = stop - (span.stop - span.start)
            if span.turn == turn.number:
                ids, logprobs = segment.tokens[span.start : span.stop], segment.logprobs[start:stop]
                pieces.append(SampledPiece(packed(ids), packed(logprobs), span.version, span.sent))
            stop = start
        return pieces[::-1]

    def record(self) -> LedgerRecord:
        """The ledger as it is stored: the same whichever of several conversations at a time was faster (D2)."""
        turns, places = self._in_order(), self.places()
        numbers = {turn.number: number for number, turn in enumerate(turns, 1)}
        return LedgerRecord(
            stop_ids=list(self.stop_ids),
            segments=[self._segments[segment].record(numbers) for segment in places],
            turns=[
                msgspec.structs.replace(turn, number=numbers[turn.number], segment=places[turn.segment])
                for turn in turns
            ],
        )

    def places(self) -> dict[int, int]:
        """The numbers that the segments have in the record, by their own."""
        return {
            segment: place for place, segment in enumerate(dict.fromkeys(turn.segment for turn in self._in_order()))
        }

    def _in_order(self) -> list[Turn]:
        """The turns; between two of the rollout's own, one conversation beside it after the other."""
        own, keys = 0, {}
        for turn in self.turns:
            branch = self._segments[turn.segment].branch
            own += not branch
            keys[turn.number] = own, branch
        return sorted(self.turns, key=lambda turn: keys[turn.number])


def feed(hasher: hashlib.blake2b, kind: str, version: str, tokens: bytes, logprobs: bytes) -> None:
    """Add one span to a segment's running hash."""
    hasher.update(b"".join((f"{kind}\0{version}\0{len(tokens)}\0".encode(), tokens, logprobs)))


class RowView:
    """A segment as it is now, whatever is appended to it later: history only grows."""

    def __init__(self, number: int, segment: _Segment) -> None:
        self.number = number
        self.branch = segment.branch
        self.reason = segment.reason
        self.finish_reason = segment.finish_reason
        self.versions = [(span.start, span.stop, span.version) for span in segment.spans if span.kind == "sampled"]
        self._segment = segment
        self._count = len(segment.tokens)

    def row(self) -> Row:
        """The row, as lists."""
        segment, count = self._segment, self._count
        tokens = segment.tokens[:count].tolist()
        mask, logprobs = segment.columns()
        trained = zip(tokens, mask[:count], strict=True)
        return Row(
            segment=self.number,
            reason=self.reason,
            tokens=tokens,
            masks=[token if sampled else UNTRAINED for token, sampled in trained],
            logprobs=logprobs[:count].tolist(),
            versions=self.versions,
            finish_reason=self.finish_reason,
        )
