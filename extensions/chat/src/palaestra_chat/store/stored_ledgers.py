"""The token records of conversations with token-exact model servers."""

from __future__ import annotations

from palaestra_chat.store.store_file import StoreFile


class StoredLedgers:
    """One token record for each session of a conversation with the model server. A part is the number of such a
    session."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def save(self, conversation: str, part: int, turns: tuple[int, int], record: bytes) -> None:
        """Store the token record of one session, in place of the session's earlier record. `turns` are the first and
        the last turn that the record covers."""
        with self._file.writing():
            self._file.execute(
                "INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?, ?, ?)", (conversation, part, *turns, record)
            )

    def of(self, conversation: str) -> list[tuple[int, int, int, bytes]]:
        """Return the token records as tuples of the part, the first turn, the last turn, and the record."""
        return self._file.execute(
            "SELECT part, first_turn, last_turn, record FROM ledgers WHERE conversation = ? ORDER BY part",
            (conversation,),
        ).fetchall()
