"""Finds conversations that repeat an earlier one of the same export, so that a trainer does not read them twice.

Two conversations are compared by what their users, agents and tools said; system messages and the ids of calls do not
count, nor do letter case and white space. They are similar to the degree of the Jaccard index of their sets of five
successive words, estimated from MinHash signatures (Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from palaestra.rollouts.export.chat_messages import chat_messages
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import Message

if TYPE_CHECKING:
    from rensa import RMinHashDeduplicator

REPEATED = "its conversation repeats an earlier one"
"""The reason for leaving out a rollout that is equal or similar to an earlier one."""

_WORDS = 5
_HASHES = 128
"""Hash functions per signature: the standard error of the estimate is at most 0.5 / sqrt(128) = 0.044."""


class Duplicates:
    """Remembers conversations. `similarity` is in (0, 1]: 1 finds equal conversations, 0.8 those that share about four
    fifths of their word sequences.

    Raises `ConfigError` for any other number, and if a similarity below 1 lacks the package `rensa`.
    """

    def __init__(self, similarity: float = 1.0) -> None:
        if not 0 < similarity <= 1:
            raise ConfigError(f"--unique needs a similarity above 0 and up to 1, got {similarity:g}")
        self._equal: dict[bytes, str] = {}
        self._similar: RMinHashDeduplicator | None = None
        if similarity < 1:
            try:
                from rensa import RMinHashDeduplicator
            except ImportError:
                raise ConfigError(
                    f"--unique {similarity:g} needs rensa: {install_command('duplicates')} (--unique 1 does not)"
                ) from None
            self._similar = RMinHashDeduplicator(similarity, _HASHES, use_lsh=True)

    def repeats(self, rollout_id: str, messages: Sequence[Message]) -> str:
        """Return the id of an earlier rollout with this conversation. If there is none, return an empty string and
        remember the conversation."""
        words = _conversation_words(messages)
        digest = hashlib.sha256(" ".join(words).encode()).digest()
        if (earlier := self._equal.get(digest)) is not None:
            return earlier
        if self._similar is not None:
            sequences = _sequences(words)
            if not all(self._similar.add_pairs([(rollout_id, sequences)])):
                # A set has no order, and the same export must name the same rollout each time.
                ((first, *_),) = map(sorted, self._similar.get_duplicate_sets([sequences]))
                return str(first)
        self._equal[digest] = rollout_id
        return ""


def duplicates_of(meta: ExportMeta) -> Duplicates | None:
    """Return what finds the duplicates of a run with the setting `unique` (a batch); None for any other run."""
    similarity = (meta.config.get("env") or {}).get("unique")
    return None if similarity is None else Duplicates(float(similarity))


def _conversation_words(messages: Sequence[Message]) -> list[str]:
    said = []
    for message in chat_messages(messages):
        if message.role != "system":
            said += [message.role, message.reasoning, message.text]
            said += [f"{call.name} {call.arguments}" for call in message.calls]
    return " ".join(said).lower().split()


def _sequences(words: list[str]) -> list[str]:
    last = max(1, len(words) - _WORDS + 1)
    return [" ".join(words[start : start + _WORDS]) for start in range(last)]
