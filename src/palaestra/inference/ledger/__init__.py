"""The append-only record of the exact tokens of a rollout: written by `Ledger`, checked by `verify_ledger`."""

from palaestra.inference.ledger.ledger import Ledger, Piece, Prompt, ids_json, pieces_of
from palaestra.inference.ledger.records import (
    HIGHEST_LOGPROB,
    UNTRAINED,
    LedgerRecord,
    SampledTurn,
    SegmentReason,
    SequenceSpan,
    TokenRow,
    TokenSpan,
    record_rows,
    row_sizes,
    sequence_spans,
)
from palaestra.inference.ledger.verify import verify_ledger

__all__ = [
    "HIGHEST_LOGPROB",
    "UNTRAINED",
    "Ledger",
    "LedgerRecord",
    "Piece",
    "Prompt",
    "SampledTurn",
    "SegmentReason",
    "SequenceSpan",
    "TokenRow",
    "TokenSpan",
    "ids_json",
    "pieces_of",
    "record_rows",
    "row_sizes",
    "sequence_spans",
    "verify_ledger",
]
