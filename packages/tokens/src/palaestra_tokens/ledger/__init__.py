"""The append-only record of the exact tokens of a rollout: written by `Ledger`, checked by `verify_ledger`."""

from palaestra_tokens.ledger.ledger import Ledger, Piece, Prompt, ids_json, pieces_of
from palaestra_tokens.ledger.records import (
    ENCODED,
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
from palaestra_tokens.ledger.verify import verify_ledger

__all__ = [
    "ENCODED",
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
