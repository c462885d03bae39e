"""The append-only record of the exact tokens of a rollout: written by `Ledger`, judged by `verify_ledger`."""

from palaestra.inference.ledger.ledger import Ledger, Piece, RowView, pieces_of
from palaestra.inference.ledger.records import (
    LEDGER_SCHEMA,
    LedgerRecord,
    Reason,
    Row,
    SampledTurn,
    SegmentRecord,
    Span,
    Turn,
    record_rows,
)
from palaestra.inference.ledger.verify import Verdict, Violation, verify_ledger

__all__ = [
    "LEDGER_SCHEMA",
    "Ledger",
    "LedgerRecord",
    "Piece",
    "Reason",
    "Row",
    "RowView",
    "SampledTurn",
    "SegmentRecord",
    "Span",
    "Turn",
    "Verdict",
    "Violation",
    "pieces_of",
    "record_rows",
    "verify_ledger",
]
