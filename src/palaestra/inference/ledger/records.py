"""The ledger's words and its form on disk. Pure data.

A rollout's tokens lie in segments. Within a segment history only grows: every turn appends a prompt span (what was
added since the last sampled token) and one sampled span, or several where the request was aborted under way and taken
up again. Where the history was rewritten, a new segment begins, and says why.

From a stored ledger back to training rows. What `Ledger.rows` gives while it lives, this gives from its record.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias, cast

import msgspec

LEDGER_SCHEMA = "palaestra.ledger/1"

PROMPT_LOGPROB = 1.0
"""What stands for a log-probability where nothing was sampled; no real one is above 0."""

UNTRAINED = -100
"""The mask of a token that is not trained, as trainers expect it."""

Kind: TypeAlias = Literal["prompt", "sampled"]


class Reason(StrEnum):
    """Why a segment began, or why a sampled span follows another.

    An aborted request rewrites nothing: its tokens are continued where they ended, so `ABORT_RESUME` is declared on the
    span that goes on, and the row stays whole. `BRANCH`: another sample after the same history.
    """

    START = "start"
    TEMPLATE_REWRITE = "template_rewrite"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"
    HISTORY_EDIT = "history_edit"
    BRANCH = "branch"
    ABORT_RESUME = "abort_resume"


SEGMENT_REASONS = frozenset(Reason) - {Reason.START, Reason.ABORT_RESUME}
"""Reasons for which a segment after the first may begin."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `start` to `stop` of a segment. `turn` counts from 1 over the whole rollout.

    Sampled spans have the policy `version`, `sent` (the CRC-32 of the ids that the engine was given, little-endian
    int32) and `reason` abort_resume where they continue an aborted request. `digest` is the BLAKE2b-64 of everything in
    the segment up to `stop`: kinds, versions, ids and log-probabilities.
    """

    kind: Kind
    start: int
    stop: int
    turn: int
    digest: str
    version: str = ""
    sent: int = 0
    reason: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model call: where it lies and how many tokens it had. `prompt_tokens` is the whole prompt."""

    number: int
    segment: int
    prompt_tokens: int
    sampled_tokens: int
    finish_reason: str


class SampledPiece(msgspec.Struct, frozen=True, array_like=True):
    """What one request sampled: `ids[N]` and `logprobs[N]` as little-endian int32 and float32, the policy `version`,
    and `sent`, the CRC-32 of the ids that the engine was given."""

    ids: bytes
    logprobs: bytes
    version: str
    sent: int


class SampledTurn(msgspec.Struct, frozen=True, array_like=True):
    """One model call as it can be given back: its pieces (several where it was aborted under way), and how it ended.

    The prompt is not in it: it is made of the messages again, and `sent` tells whether it is the same.
    """

    finish_reason: str
    pieces: list[SampledPiece]


class SegmentRecord(msgspec.Struct, kw_only=True):
    """`tokens[T]` and `logprobs[T]` as little-endian int32 and float32, `mask[T]` as bytes, 1 where trained."""

    reason: str
    tokens: bytes
    mask: bytes
    logprobs: bytes
    spans: list[Span]


class LedgerRecord(msgspec.Struct, kw_only=True):
    """A whole ledger as it is stored. `stop_ids` are the tokens that end a turn."""

    schema: str = LEDGER_SCHEMA
    stop_ids: list[int]
    segments: list[SegmentRecord]
    turns: list[Turn]


@dataclass(frozen=True, slots=True)
class Row:
    """One segment as a trainer takes it: `tokens[T]`, `masks[T]` (the id where trained, else -100), `logprobs[T]` (1.0
    where not sampled). `versions` are (start, stop, policy version) of the sampled spans.
    """

    segment: int
    reason: str
    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, str]] = field(default_factory=list)
    finish_reason: str = ""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.masks) == len(self.logprobs)


def packed(values: array[int] | array[float]) -> bytes:
    """An array of 4-byte items as little-endian bytes."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpacked(typecode: Literal["i", "f"], raw: bytes) -> array[int] | array[float]:
    """The inverse of `packed`. Raises `ValueError` when the bytes do not divide into items."""
    values: array[int] | array[float] = array("i") if typecode == "i" else array("f")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def record_rows(record: LedgerRecord) -> list[Row]:
    """One row for each segment in which anything was sampled, in the order they began.

    Raises `ValueError` where the stored bytes are not arrays of one length; `verify_ledger` says more.
    """
    finished = {turn.segment: turn.finish_reason for turn in record.turns}
    rows = []
    for number, segment in enumerate(record.segments):
        tokens = cast("list[int]", unpacked("i", segment.tokens).tolist())
        sampled = [span for span in segment.spans if span.kind == "sampled"]
        if not sampled:
            continue
        rows.append(
            Row(
                segment=number,
                reason=segment.reason,
                tokens=tokens,
                masks=[token if mask else UNTRAINED for token, mask in zip(tokens, segment.mask, strict=True)],
                logprobs=cast("list[float]", unpacked("f", segment.logprobs).tolist()),
                versions=[(span.start, span.stop, span.version) for span in sampled],
                finish_reason=finished.get(number, ""),
            )
        )
    return rows
