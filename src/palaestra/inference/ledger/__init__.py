"""The append-only record of the exact tokens of a rollout: written by `Ledger`, checked by `verify_ledger`."""

from palaestra.inference.ledger.ledger import Ledger, Piece, Prompt, SequenceNode, ids_json, pieces_of
from palaestra.inference.ledger.records import (
    HIGHEST_LOGPROB,
    LEDGER_SCHEMA,
    UNTRAINED,
    LedgerRecord,
    LedgerTurn,
    SampledTurn,
    SegmentReason,
    SegmentRecord,
    TokenRow,
    TokenSpan,
    record_rows,
    row_sizes,
)
from palaestra.inference.ledger.verify import LedgerVerdict, Violation, verify_ledger

__all__ = [
    "HIGHEST_LOGPROB",
    "LEDGER_SCHEMA",
    "UNTRAINED",
    "Ledger",
    "LedgerRecord",
    "LedgerTurn",
    "LedgerVerdict",
    "Piece",
    "Prompt",
    "SampledTurn",
    "SegmentReason",
    "SegmentRecord",
    "SequenceNode",
    "TokenRow",
    "TokenSpan",
    "Violation",
    "ids_json",
    "pieces_of",
    "record_rows",
    "row_sizes",
    "verify_ledger",
]
