"""What pages do by themselves and a model should hear of: consoles, script errors, dialogs, downloads, new tabs.

Invariant: memory is bounded whatever a page writes; what was dropped is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from palaestra.core.types import JSON

MOST_ENTRIES, MOST_NOTES = 200, 20
LONGEST_ENTRY = 2000


class Happenings:
    """Of one rollout. `note` is for the next reply, `console` and `script_error` for who asks for them."""

    def __init__(self) -> None:
        self._console: deque[dict[str, JSON]] = deque(maxlen=MOST_ENTRIES)
        self._errors: deque[dict[str, JSON]] = deque(maxlen=MOST_ENTRIES)
        self._notes: list[str] = []
        self._unsaid = self._new_errors = 0
        self.total_messages = self.total_errors = 0

    def console(self, kind: str, text: str) -> None:
        """A line that a page wrote to its console."""
        self.total_messages += 1
        self._console.append({"type": kind, "text": text[:LONGEST_ENTRY], "source": "console"})

    def script_error(self, text: str) -> None:
        """An exception that no script of the page caught."""
        self.total_errors += 1
        self._new_errors += 1
        self._errors.append({"message": text[:LONGEST_ENTRY], "source": "exception"})

    def note(self, text: str) -> None:
        """Something to say with the next reply."""
        if len(self._notes) < MOST_NOTES:
            self._notes.append(text[:LONGEST_ENTRY])
        else:
            self._unsaid += 1

    def take_notes(self) -> Sequence[str]:
        """What is to be said, once."""
        notes, self._notes = self._notes, []
        if self._unsaid:
            notes.append(f"{self._unsaid} more things happened")
        if self._new_errors:
            many = "a script of the page failed" if self._new_errors == 1 else f"{self._new_errors} script errors"
            notes.append(f"{many}: browser_console tells how")
        self._unsaid = self._new_errors = 0
        return notes

    def read(self, *, clear: bool) -> dict[str, JSON]:
        """All that is kept, in the contract's shape."""
        reply: dict[str, JSON] = {
            "console_messages": list(self._console),
            "js_errors": list(self._errors),
            "total_messages": self.total_messages,
            "total_errors": self.total_errors,
        }
        if clear:
            self._console.clear()
            self._errors.clear()
            self.total_messages = self.total_errors = 0
        return reply
