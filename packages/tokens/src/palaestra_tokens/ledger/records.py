"""The form of a ledger on disk, and the training rows made from it. No I/O.

A rollout's tokens are in segments, which only grow: every turn appends a prompt span (the tokens added since the last
sampled token) and one sampled span, or several if the request was aborted and resumed. A rewritten history begins a new
segment with its reason.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

LEDGER_SCHEMA = "palaestra.ledger/1"
DIGEST_BYTES = 8
ITEM_BYTES = 4

PROMPT_LOGPROB = 1.0
"""The stored log-probability of a token that was not sampled; the log-probability of a sampled token is never clearly
above 0."""

HIGHEST_LOGPROB = 1e-3
"""The highest log-probability that is accepted: rounding may raise one slightly above 0."""

ENCODED = "encoded"
"""The source of a row whose tokens were encoded from text."""

UNTRAINED = -100
"""The mask of a token that is not trained on. Trainers expect this value."""

SpanKind: TypeAlias = Literal["prompt", "sampled"]


class SegmentReason(StrEnum):
    """Why a segment began, or why a sampled span follows another. `ABORT_RESUME` is the reason of a span that continues
    an aborted request in the same row. `BRANCH` is the reason of another sample after the same history."""

    START = "start"
    TEMPLATE_REWRITE = "template_rewrite"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    HISTORY_EDIT = "history_edit"
    BRANCH = "branch"
    ABORT_RESUME = "abort_resume"


SEGMENT_REASONS = frozenset(SegmentReason) - {SegmentReason.START, SegmentReason.ABORT_RESUME}
"""Reasons for which a segment after the first may begin."""


class TokenSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `start` to `stop` of a segment. `turn` counts from 1 over the whole rollout.

    Sampled spans have the policy `version`, `sent` (the CRC-32 of the ids that the engine received, little-endian
    int32) and, if they continue an aborted request, `reason` abort_resume. `digest` is the BLAKE2b-64 of everything in
    the segment up to `stop`: kinds, versions, ids and log-probabilities.
    """

    kind: SpanKind
    start: int
    stop: int
    turn: int
    digest: str
    version: str = ""
    sent: int = 0
    reason: str = ""


class LedgerTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model call: its segment and its token counts. `prompt_tokens` counts the whole prompt."""

    number: int
    segment: int
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str


class SampledPiece(msgspec.Struct, frozen=True, array_like=True):
    """The sample of one request: `ids[N]` and `logprobs[N]` as little-endian int32 and float32, the policy `version`,
    and `sent`, the CRC-32 of the ids that the engine received."""

    ids: bytes
    logprobs: bytes
    version: str
    sent: int


class SampledTurn(msgspec.Struct, frozen=True, array_like=True):
    """One recorded model call: its pieces (several if it was aborted) and how it ended. The prompt is rendered again
    from the messages, and `sent` shows whether it is the same prompt."""

    finish_reason: str
    pieces: list[SampledPiece]


class SegmentRecord(msgspec.Struct, kw_only=True):
    """`tokens[T]` and `logprobs[T]` as little-endian int32 and float32, `mask[T]` as bytes, 1 where trained."""

    reason: str
    tokens: bytes
    mask: bytes
    logprobs: bytes
    spans: list[TokenSpan]


class LedgerRecord(msgspec.Struct, kw_only=True):
    """A whole ledger on disk. `stop_ids` are the tokens that end a turn."""

    schema: str = LEDGER_SCHEMA
    stop_ids: list[int]
    segments: list[SegmentRecord]
    turns: list[LedgerTurn]


class SequenceSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where `length` tokens of a row come from: positions from `offset` of a sampled sequence (`sampled`), or of the
    prompt that the engine continued with that sequence (`prompt`). A sequence is one answer of the engine. Its id has
    the rollout, the turn and, if the reply was aborted and resumed, the piece: `000003-fix/0:2`, `000003-fix/0:2.1`.
    """

    kind: SpanKind
    sequence_id: str
    offset: int
    length: int


class TokenRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One training row: `tokens[T]`, `masks[T]` (-100 if not trained, else the id), `logprobs[T]` (1.0 if not sampled;
    the whole list is None if log-probabilities are unknown).

    `source` is `engine` if the ids were sampled, `encoded` if they were encoded from text, `placeholder` if no tokens
    were recorded (such a row trains nothing), and `environment` if the environment made the row. A row of a ledger also
    has its segment's number and reason, and the finish reason of its last turn. Its `versions` give start, stop and
    policy version of each sampled span; its `spans` cover the row without gaps. Only the first four fields are on disk
    (`Trajectory.row`).
    """

    tokens: list[int]
    masks: list[int]
    logprobs: list[float] | None = msgspec.field(default_factory=lambda: None)  # a factory, so that None is written
    source: str = msgspec.field(default_factory=lambda: "placeholder")
    segment: int = 0
    reason: str = "start"
    versions: list[tuple[int, int, str]] = []
    spans: list[SequenceSpan] = []
    finish_reason: str = ""


def packed(values: array[int] | array[float]) -> bytes:
    """Return an array of 4-byte items as little-endian bytes."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpacked_ids(raw: bytes) -> array[int]:
    """Return the inverse of `packed` for token ids. Raises `ValueError` if the bytes end inside an item."""
    return _unpacked(array("i"), raw)


def unpacked_logprobs(raw: bytes) -> array[float]:
    """Return the inverse of `packed` for log-probabilities. Raises `ValueError` if the bytes end inside an item."""
    return _unpacked(array("f"), raw)


def _unpacked(values: array, raw: bytes) -> array:  # type: ignore[type-arg]
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def feed_digest(hasher: hashlib.blake2b, kind: str, version: str, tokens: bytes, logprobs: bytes) -> None:
    # The length keeps ids and log-probabilities apart: without it, different spans could feed the same bytes.
    hasher.update(b"".join((f"{kind}\0{version}\0{len(tokens)}\0".encode(), tokens, logprobs)))


def sequence_spans(spans: Sequence[TokenSpan], rollout_id: str) -> list[SequenceSpan]:
    """Return where the tokens of a segment come from; spans without tokens are left out. The prompt of a turn belongs
    to the turn's first sequence."""
    found, piece = [], 0
    for span in spans:
        piece = piece + 1 if span.reason else 0
        sequence = f"{rollout_id}:{span.turn}.{piece}" if piece else f"{rollout_id}:{span.turn}"
        if length := span.stop - span.start:
            found.append(SequenceSpan(span.kind, sequence, span.start if span.kind == "prompt" else 0, length))
    return found


def token_row(segment: SegmentRecord, number: int, finish_reason: str, rollout_id: str = "") -> TokenRow:
    """Return the training row of a segment. Raises `ValueError` if the stored bytes are not arrays of equal length."""
    tokens, logprobs = unpacked_ids(segment.tokens).tolist(), unpacked_logprobs(segment.logprobs).tolist()
    if len(tokens) != len(logprobs):
        raise ValueError(f"segment {number} has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    return TokenRow(
        tokens=tokens,
        masks=[token if trained else UNTRAINED for token, trained in zip(tokens, segment.mask, strict=True)],
        logprobs=logprobs,
        source="engine",
        segment=number,
        reason=segment.reason,
        versions=[(span.start, span.stop, span.version) for span in segment.spans if span.kind == "sampled"],
        spans=sequence_spans(segment.spans, rollout_id),
        finish_reason=finish_reason,
    )


def record_rows(record: LedgerRecord, rollout_id: str = "") -> list[TokenRow]:
    """Return the training rows, one for each segment with a sampled span, in the order in which the segments began.
    `rollout_id` is the first part of the sequences' ids. Raises `ValueError` for a damaged record."""
    finished = {turn.segment: turn.finish_reason for turn in record.turns}
    numbers = _row_segments(record)
    return [token_row(record.segments[number], number, finished.get(number, ""), rollout_id) for number in numbers]


def row_sizes(record: LedgerRecord) -> list[tuple[int, int]]:
    """Return the numbers of tokens and of trained tokens in each row of `record_rows`, without making the rows."""
    rows = (record.segments[number] for number in _row_segments(record))
    return [(len(row.tokens) // ITEM_BYTES, len(row.mask) - row.mask.count(0)) for row in rows]


def _row_segments(record: LedgerRecord) -> list[int]:
    return [
        number
        for number, segment in enumerate(record.segments)
        if any(span.kind == "sampled" for span in segment.spans)
    ]
