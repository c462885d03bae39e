"""The append-only record of the exact tokens of a rollout: written by `Ledger`, checked by `verify_ledger`."""

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names
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

if TYPE_CHECKING:
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

# Only runs that are token-exact have a ledger to verify.
__getattr__, __dir__ = lazy_names(__name__, {"verify_ledger": "verify"})
