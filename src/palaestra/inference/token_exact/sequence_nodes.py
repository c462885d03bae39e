"""Rows of a ledger in the shape that contract environments read: `managed.get_state()["nodes"]`.

Wire source: `SequenceNode` of atroposlib 0.4: -100 in the mask and 1.0 as log-probability where nothing was sampled.
"""

from __future__ import annotations

from functools import cached_property

from palaestra.core.types import JSON
from palaestra.inference.ledger import Ledger, Row, RowView
from palaestra.inference.tokenizers import Tokenizer


class SequenceNode:
    """One row: `tokens[T]`, `masked_tokens[T]`, `logprobs[T]`, `full_text`, `metadata`. Also reads as a dict.

    The lists are made when one of them is first asked for: a rollout whose tokens nobody looks at keeps them packed.
    """

    def __init__(self, view: RowView, tokenizer: Tokenizer) -> None:
        self.metadata: dict[str, JSON] = {
            "finish_reason": view.finish_reason,
            "segment": view.number,
            "reason": view.reason,
            "versions": view.versions,
        }
        self._view = view
        self._tokenizer = tokenizer

    @cached_property
    def _row(self) -> Row:
        return self._view.row()

    @cached_property
    def tokens(self) -> list[int]:
        """The ids."""
        return self._row.tokens

    @cached_property
    def masked_tokens(self) -> list[int]:
        """The ids where the model sampled them, -100 elsewhere."""
        return self._row.masks

    @cached_property
    def logprobs(self) -> list[float]:
        """The engine's log-probabilities, 1.0 where nothing was sampled."""
        return self._row.logprobs

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


def sequence_nodes(ledger: Ledger, tokenizer: Tokenizer) -> list[SequenceNode]:
    """All rows in which anything was sampled, in the order they began, those of conversations beside the rollout's own
    first: the last one is the latest of its own."""
    views = sorted(ledger.views(), key=lambda view: view.branch == 0)
    return [SequenceNode(view, tokenizer) for view in views if view.versions]
