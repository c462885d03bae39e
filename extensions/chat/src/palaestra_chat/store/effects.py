"""The journal of side effects: each tool call of the agent itself is stored before it begins and after it ends.

The process may be killed at any moment. The next process knows from the journal which calls had begun, and repeats none
of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from palaestra_chat.store.store_file import StoreFile, encoded
from palaestra_chat.store.stored_turns import StoredTurn
from palaestra_slots.core.types import JSON


@dataclass(frozen=True, slots=True)
class Effect:
    """One side effect. For a tool call, `kind` is tool and `key` is the id of the call; no other kind is written.

    `state` is begun, ended, interrupted, failed or unknown.
    """

    row: int
    kind: str
    key: str
    name: str
    payload: JSON
    state: str
    result: str


class EffectJournal:
    """The side effects of the turns in a store."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def begin(
        self, turn: StoredTurn, kind: str, key: str, name: str, payload: JSON, *, message: int | None = None
    ) -> Effect:
        """Record that a side effect begins. `message` is the row of the assistant message that requests it."""
        with self._file.writing():
            row = self._file.insert(
                "INSERT INTO effects (turn, message, kind, key, name, payload, state, started_at)"
                " VALUES (?, ?, ?, ?, ?, ?, 'begun', ?)",
                (turn.row, message, kind, key, name, encoded(payload), time.time()),
            )
        return Effect(row, kind, key, name, payload, "begun", "")

    def end(self, effect: Effect, result: str, state: str = "ended") -> None:
        """Record the end of a side effect."""
        with self._file.writing():
            self._file.execute(
                "UPDATE effects SET state = ?, result = ?, ended_at = ? WHERE id = ?",
                (state, result, time.time(), effect.row),
            )

    def of(self, turn: StoredTurn, *, kind: str | None = None, message: int | None = None) -> list[Effect]:
        """Return the side effects of a turn, in the order in which they began. If `kind` or `message` is given, return
        only side effects of this kind or message."""
        rows = self._file.execute(
            "SELECT id, kind, key, name, payload, state, result FROM effects"
            " WHERE turn = ?1 AND (?2 IS NULL OR kind = ?2) AND (?3 IS NULL OR message = ?3) ORDER BY id",
            (turn.row, kind, message),
        )
        return [
            Effect(row, kind, key, name, msgspec.json.decode(payload), state, result)
            for row, kind, key, name, payload, state, result in rows
        ]
