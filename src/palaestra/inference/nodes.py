"""Rows of a ledger in the shape that contract environments read: `managed.get_state()["nodes"]`.

Wire source: `SequenceNode` of atroposlib 0.4: -100 in the mask and 1.0 as log-probability where nothing was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from palaestra.core.types import JSON
from palaestra.inference.ledger import Row
from palaestra.inference.tokens import Tokenizer


class SequenceNode:
    """One row: `tokens[T]`, `masked_tokens[T]`, `logprobs[T]`, `full_text`, `metadata`. Also reads as a dict."""

    def __init__(self, row: Row, tokenizer: Tokenizer) -> None:
        self.tokens: list[int] = row.tokens
        self.masked_tokens: list[int] = row.masks
        self.logprobs: list[float] = row.logprobs
        self.metadata: dict[str, JSON] = {
            "finish_reason": row.finish_reason,
            "segment": row.segment,
            "reason": row.reason,
            "versions": row.versions,
        }
        self._tokenizer = tokenizer

    @cached_property
    def full_text(self) -> str:
        """The tokens as text, special ones included. Decoded when it is first asked for."""
        return self._tokenizer.decode(self.tokens, skip_special_tokens=False)

    def __getitem__(self, key: str) -> JSON:
        if key.startswith("_") or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)

    def get(self, key: str, default: JSON = None) -> JSON:
        """The field's value, or `default` where there is no such field."""
        try:
            return self[key]
        except KeyError:
            return default


def sequence_nodes(rows: Sequence[Row], tokenizer: Tokenizer) -> list[SequenceNode]:
    """All rows in which anything was sampled, in the order they began."""
    return [SequenceNode(row, tokenizer) for row in rows if row.versions]
