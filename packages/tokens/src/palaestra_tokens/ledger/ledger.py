"""The growing ledger of one rollout, which appends turns, returns rows and makes prompts.

Invariants: appended tokens never change (T1); every trained token was sampled, with the engine's own log-probability
(T3, T4); a turn is appended whole or not at all, at a cost that grows with its new tokens only.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, overload

import msgspec

from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger.records import (
    DIGEST_BYTES,
    PROMPT_LOGPROB,
    LedgerRecord,
    LedgerTurn,
    SampledPiece,
    SampledTurn,
    SegmentReason,
    SegmentRecord,
    SpanKind,
    TokenRow,
    TokenSpan,
    feed_digest,
    packed,
    token_row,
    unpacked_ids,
    unpacked_logprobs,
)

if TYPE_CHECKING:
    from palaestra_tokens.tokenizers import Tokenizer

LONG_PROMPT = 2048
"""Segments with at least this many ids keep their JSON, which takes more memory than the ids. Shorter segments need no
stored JSON, because encoding them takes less than 0.03 ms."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One answer of the engine (`sampled`), and the CRC-32 of the ids that the engine received (`sent`)."""

    sampled: Sampled
    sent: int


def pieces_of(turn: SampledTurn) -> list[Piece]:
    """Return a recorded model call as the engine's answers. All answers but the last were aborted."""
    ends = ["abort"] * (len(turn.pieces) - 1) + [turn.finish_reason]
    return [
        Piece(Sampled(unpacked_ids(piece.ids), unpacked_logprobs(piece.logprobs), end, piece.version), piece.sent)
        for piece, end in zip(turn.pieces, ends, strict=True)
    ]


@dataclass(slots=True)
class _Segment:
    """`tokens[T]`, the `logprobs[S]` of the sampled tokens, the running hash over both, and the tokens' checksum.
    `branch` is the number of the segment's conversation. `json` holds the first `json_count` tokens as JSON numbers."""

    reason: SegmentReason
    branch: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[TokenSpan] = field(default_factory=list)
    hasher: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
    finish_reason: str = ""
    checksum: int = 0
    json: bytearray = field(default_factory=bytearray)
    json_count: int = 0

    def append(self, turn: int, ids: array[int], logprobs: array[float], piece: Piece | None) -> None:
        """Add one span with one log-probability per id. `piece` is the answer that holds the span, or None for prompt
        tokens."""
        start = len(self.tokens)
        kind: SpanKind = "sampled" if piece else "prompt"
        version = piece.sampled.policy_version if piece else ""
        # Two sampled spans in a row: the engine has aborted the reply for new weights, and was asked to continue it.
        resumed = bool(piece and self.spans and self.spans[-1].kind == "sampled")
        self.tokens.extend(ids)
        self.checksum = sent_checksum(ids, self.checksum)
        if piece:
            self.logprobs.extend(logprobs)
        feed_digest(self.hasher, kind, version, packed(ids), packed(logprobs))
        self.spans.append(
            TokenSpan(
                kind=kind,
                start=start,
                stop=len(self.tokens),
                turn=turn,
                digest=self.hasher.hexdigest(),
                version=version,
                sent=piece.sent if piece else 0,
                reason=SegmentReason.ABORT_RESUME if resumed else "",
            )
        )

    def record(self, spans: Sequence[TokenSpan]) -> SegmentRecord:
        """Return the segment in its form on disk, cut after `spans`, which are its first spans."""
        mask, logprobs, taken = bytearray(), array("f"), 0
        for span in spans:
            length = span.stop - span.start
            if span.kind == "sampled":
                mask += b"\1" * length
                logprobs += self.logprobs[taken : taken + length]
                taken += length
            else:
                mask += bytes(length)
                logprobs += _unsampled(length)
        tokens = packed(self.tokens[: len(mask)])
        return SegmentRecord(
            reason=self.reason, tokens=tokens, mask=bytes(mask), logprobs=packed(logprobs), spans=list(spans)
        )

    def continued(self, shared: int) -> _Segment:
        """Return a segment with the same tokens, in which everything up to the end of turn `shared` is part of the
        first later prompt. The later turns are numbered from 1. The segment is empty if there is no later turn."""
        found = _Segment(self.reason, self.branch, finish_reason=self.finish_reason)
        prompt: array[int] | None = None
        taken = 0
        for span in self.spans:
            ids = self.tokens[span.start : span.stop]
            sampled = self.logprobs[taken : taken + len(ids)] if span.kind == "sampled" else _unsampled(len(ids))
            taken += len(ids) * (span.kind == "sampled")
            if span.turn <= shared:
                found.reason = SegmentReason.BRANCH
            if span.turn <= shared or span.kind == "prompt":
                prompt = (prompt or array("i")) + ids
                continue
            if prompt is not None:
                found.append(span.turn - shared, prompt, _unsampled(len(prompt)), None)
                prompt = None
            found.append(span.turn - shared, ids, sampled, Piece(Sampled(ids, sampled, "", span.version), span.sent))
        return found

    def row(self, number: int, spans: int | None = None) -> TokenRow:
        """Return the training row of the first `spans` spans, or of all spans if `spans` is None."""
        return token_row(self.record(self.spans[:spans]), number, self.finish_reason)


def _unsampled(length: int) -> array[float]:
    return array("f", [PROMPT_LOGPROB]) * length


class Prompt(Sequence[int]):
    """The ids `[T]` of one request: a segment as it is now and `rest` after it. The segment is not copied, because it
    only grows. `checksum` is the CRC-32 of the ids (`sent_checksum`)."""

    __slots__ = ("_kept", "_rest", "_segment", "checksum")

    def __init__(self, segment: _Segment, rest: array[int]) -> None:
        self.checksum = sent_checksum(rest, segment.checksum)
        self._segment, self._kept, self._rest = segment, len(segment.tokens), rest

    def __len__(self) -> int:
        return self._kept + len(self._rest)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._segment.tokens, self._kept), self._rest)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self))[index]
        return self._segment.tokens[at] if at < self._kept else self._rest[at - self._kept]

    def grow(self, ids: array[int]) -> None:
        self._rest = self._rest + ids
        self.checksum = sent_checksum(ids, self.checksum)

    def json(self) -> bytes:
        """Return the ids as a JSON list. The JSON of a long segment is kept and extended."""
        segment, kept = self._segment, self._kept
        if kept < LONG_PROMPT or segment.json_count > kept:  # or the segment has grown since
            return msgspec.json.encode((segment.tokens[:kept] + self._rest).tolist())
        if segment.json_count < kept:
            segment.json += _encoded_ids(segment.tokens[segment.json_count : kept], first=not segment.json_count)
            segment.json_count = kept
        return b"".join((b"[", segment.json, _encoded_ids(self._rest, first=False), b"]"))


def sent_checksum(ids: array[int], before: int = 0) -> int:
    """Return the CRC-32 of the ids that an engine receives; `before` is the CRC-32 of the preceding ids."""
    return zlib.crc32(packed(ids), before)


def ids_json(ids: Sequence[int]) -> bytes:
    return ids.json() if isinstance(ids, Prompt) else msgspec.json.encode(list(ids))


def _encoded_ids(ids: array[int], *, first: bool) -> bytes:
    text = msgspec.json.encode(ids.tolist())[1:-1]
    return text if first or not text else b"," + text


class Ledger:
    """The tokens of one rollout. `stop_ids` are the tokens that end a turn; they are stored for the verifier."""

    def __init__(self, stop_ids: Iterable[int] = ()) -> None:
        self.stop_ids = tuple(stop_ids)
        self.turns: list[LedgerTurn] = []
        self._segments: list[_Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def open(self, reason: SegmentReason, branch: int = 0) -> int:
        """Begin a segment with its reason; return its number. The first segment's reason is always `START`. `branch` is
        the number of the segment's conversation, 0 for the rollout's own."""
        if not self._segments:
            reason = SegmentReason.START
        elif reason in (SegmentReason.START, SegmentReason.ABORT_RESUME):
            raise ValueError(f"'{reason}' is not a reason for a further segment")
        self._segments.append(_Segment(reason, branch))
        return len(self._segments) - 1

    def prompt(self, segment: int | None, delta: Sequence[int]) -> Prompt:
        """Return the ids for the engine: those of the segment so far, followed by `delta`. `segment` is None if the
        segment is not open yet."""
        known = _Segment(SegmentReason.START) if segment is None else self._segments[segment]
        return Prompt(known, array("i", delta))

    def last_token(self, segment: int) -> int | None:
        tokens = self._segments[segment].tokens
        return tokens[-1] if tokens else None

    def append(self, segment: int, delta: Sequence[int], pieces: Sequence[Piece]) -> int:
        """Add a whole turn, that is, the new prompt tokens and the tokens sampled after them; return the turn's number.
        Several pieces are one reply whose request was aborted and resumed. Raises `ValueError`, without a change, if a
        piece does not have one log-probability per token."""
        for piece in pieces:
            if len(piece.sampled.ids) != len(piece.sampled.logprobs):
                raise ValueError(f"{len(piece.sampled.ids)} ids with {len(piece.sampled.logprobs)} log-probabilities")
        prompt = array("i", delta)
        sampled = [(array("i", piece.sampled.ids), array("f", piece.sampled.logprobs)) for piece in pieces]
        number, into = len(self.turns) + 1, self._segments[segment]
        into.append(number, prompt, _unsampled(len(prompt)), None)
        prompt_tokens = len(into.tokens)
        for piece, (ids, logprobs) in zip(pieces, sampled, strict=True):
            into.append(number, ids, logprobs, piece)
        into.finish_reason = pieces[-1].sampled.finish_reason
        self.turns.append(
            LedgerTurn(
                number=number,
                segment=segment,
                prompt_tokens=prompt_tokens,
                sampled_tokens=len(into.tokens) - prompt_tokens,
                finish_reason=into.finish_reason,
            )
        )
        return number

    def rows(self) -> list[TokenRow]:
        """Return the training rows, one per segment with a turn, in the order in which the segments began."""
        return [segment.row(number) for number, segment in enumerate(self._segments) if segment.tokens]

    def nodes(self, tokenizer: Tokenizer) -> list[SequenceNode]:
        """Return all rows with a sampled span, as the nodes that existing environments read. The nodes of other
        conversations come first, so the last node is the latest of the rollout's own conversation. Within each group,
        nodes are in the order in which their segments began."""
        order = sorted(enumerate(self._segments), key=lambda numbered: numbered[1].branch == 0)
        nodes = [SequenceNode(segment, number, tokenizer) for number, segment in order]
        return [node for node in nodes if node.metadata["versions"]]

    def sampled_since(self, turns: int) -> list[SampledTurn]:
        """Return the samples of the turns after the first `turns`, in order."""
        return [SampledTurn(turn.finish_reason, self._pieces(turn)) for turn in self.turns[turns:]]

    def _pieces(self, turn: LedgerTurn) -> list[SampledPiece]:
        segment = self._segments[turn.segment]
        # Backwards from the end, because the wanted turns are the latest. Only sampled tokens have a stored
        # log-probability, so its offset differs from the token's.
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
        """Return the ledger in its form on disk, which does not depend on the timing of concurrent conversations
        (D2)."""
        turns = self._in_order()
        numbers, places = {turn.number: number for number, turn in enumerate(turns, 1)}, _segment_order(turns)
        renumbered = msgspec.structs.replace
        segments = [self._segments[segment] for segment in places]
        return LedgerRecord(
            stop_ids=list(self.stop_ids),
            segments=[
                each.record([renumbered(span, turn=numbers[span.turn]) for span in each.spans]) for each in segments
            ],
            turns=[renumbered(turn, number=numbers[turn.number], segment=places[turn.segment]) for turn in turns],
        )

    def arranged(self, branches: Mapping[int, int]) -> Ledger:
        """Return a finished ledger of only the conversations that `branches` maps to new numbers. Segments keep their
        order. The first segment in the record has reason `START`, as in any ledger."""
        kept = [number for number, segment in enumerate(self._segments) if segment.branch in branches]
        places = {number: place for place, number in enumerate(kept)}
        found = Ledger(self.stop_ids)
        found._segments = [
            replace(self._segments[number], branch=branches[self._segments[number].branch]) for number in kept
        ]
        found.turns = [
            msgspec.structs.replace(turn, segment=places[turn.segment]) for turn in self.turns if turn.segment in places
        ]
        # The rollout's first conversation may be left out here, or be a sub-agent's now.
        first = next(iter(found.places()), None)
        for number, segment in enumerate(found._segments):
            if number == first:
                segment.reason = SegmentReason.START
            elif segment.reason is SegmentReason.START:
                segment.reason = SegmentReason.SUBAGENT
        return found

    def forked(self, shared: int) -> Ledger:
        """Return the finished ledger of a forked rollout without the first `shared` turns, which it shares with the
        original rollout. The original's ledger trains the tokens of these turns, so here they are part of a prompt.
        Segments keep their numbers."""
        found = Ledger(self.stop_ids)
        found._segments = [segment.continued(shared) for segment in self._segments]
        found.turns = [
            msgspec.structs.replace(turn, number=turn.number - shared) for turn in self.turns if turn.number > shared
        ]
        return found

    def places(self) -> dict[int, int]:
        """Return a map from each segment's number to its number in the record."""
        return _segment_order(self._in_order())

    def _in_order(self) -> list[LedgerTurn]:
        """Return the turns in the record's order: between two turns of the rollout's own conversation come those of the
        other conversations, one conversation after the other."""
        own, keys = 0, {}
        for turn in self.turns:
            # Between two turns of its own conversation, a rollout's sub-agents end
            # in an order that depends on timing (D2).
            branch = self._segments[turn.segment].branch
            own += not branch
            keys[turn.number] = own, branch
        return sorted(self.turns, key=lambda turn: keys[turn.number])


def _segment_order(turns: Iterable[LedgerTurn]) -> dict[int, int]:
    return {segment: place for place, segment in enumerate(dict.fromkeys(turn.segment for turn in turns))}


class SequenceNode:
    """One row as existing environments read it (`managed.get_state()["nodes"]`), as an object or as a dict.

    Its fields are `tokens[T]`, `masked_tokens[T]`, `logprobs[T]`, `full_text` and `metadata`. They are made when they
    are first read, because Python lists need ten times the memory. The format is that of `SequenceNode` in atroposlib
    0.4: unsampled tokens have mask -100 and log-probability 1.0.
    """

    def __init__(self, segment: _Segment, number: int, tokenizer: Tokenizer) -> None:
        self.metadata: dict[str, JSON] = {
            "finish_reason": segment.finish_reason,
            "segment": number,
            "reason": segment.reason,
            "versions": [(span.start, span.stop, span.version) for span in segment.spans if span.kind == "sampled"],
        }
        # The segment may grow; the node stays as it was when the state was read.
        self._segment, self._spans, self._tokenizer = segment, len(segment.spans), tokenizer

    @cached_property
    def _row(self) -> TokenRow:
        return self._segment.row(self.metadata["segment"], self._spans)

    @cached_property
    def tokens(self) -> list[int]:
        return self._row.tokens

    @cached_property
    def masked_tokens(self) -> list[int]:
        return self._row.masks

    @cached_property
    def logprobs(self) -> list[float]:
        assert self._row.logprobs is not None
        return self._row.logprobs

    @cached_property
    def full_text(self) -> str:
        return self._tokenizer.decode(self.tokens, skip_special_tokens=False)

    def __getitem__(self, key: str) -> JSON:
        if key.startswith("_") or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)

    def get(self, key: str, default: JSON = None) -> JSON:
        try:
            return self[key]
        except KeyError:
            return default
