"""What is stored about users: which dangers they always allow, and whether their conversations may be exported."""

from __future__ import annotations

from collections.abc import Collection

from palaestra_chat.store.store_file import StoreFile


class StoredUsers:
    """The permissions that users have given, by the name of the user."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def allow(self, user: str, dangers: Collection[str]) -> None:
        """From now on, allow a user's commands that have only these kinds of danger. The key of a tool
        (`Permit.key`) allows that tool."""
        with self._file.writing():
            for danger in dangers:
                self._file.execute("INSERT OR IGNORE INTO allowed VALUES (?, ?)", (user, danger))

    def allowed(self, user: str) -> set[str]:
        """Return the kinds of danger, and the keys of tools, that a user always allows."""
        return {danger for (danger,) in self._file.execute("SELECT danger FROM allowed WHERE user = ?", (user,))}

    def disallow(self, user: str, dangers: Collection[str]) -> None:
        """Ask this user again about these kinds of danger and tools."""
        with self._file.writing():
            for danger in dangers:
                self._file.execute("DELETE FROM allowed WHERE user = ? AND danger = ?", (user, danger))

    def set_consent(self, user: str, consent: bool) -> None:
        """Record whether a user's conversations may be exported for training."""
        with self._file.writing():
            self._file.execute("INSERT OR REPLACE INTO users VALUES (?, ?)", (user, int(consent)))

    def consent(self, user: str) -> bool:
        """Return whether a user's conversations may be exported for training; False unless recorded."""
        found = self._file.execute("SELECT consent FROM users WHERE name = ?", (user,)).fetchone()
        return bool(found and found[0])
