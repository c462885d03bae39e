"""What the person typed while a turn runs: messages are delivered to the turn at its next tool call, or sent after it.
Commands wait for the end of the turn, and keep their place in the order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON


class MessageQueue:
    """The texts that wait, in the order in which they were typed."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()

    @property
    def waiting(self) -> Sequence[str]:
        """The texts that wait."""
        return tuple(self._waiting)

    def add(self, text: str) -> None:
        """Let a text wait."""
        self._waiting.append(text)

    def next(self) -> str | None:
        """Remove and return the first text; None if none waits."""
        return self._waiting.popleft() if self._waiting else None

    def take_all(self) -> str:
        """Remove all texts; returns them as lines, to be edited again."""
        texts, self._waiting = "\n".join(self._waiting), deque()
        return texts

    def take_messages(self) -> list[tuple[str, JSON]]:
        """Remove and return the messages before the first command, which begins with / or !: the text of each, and its
        content. A message whose files cannot be attached waits, so that its error is shown after the turn, and so does
        one whose pages must be fetched."""
        from palaestra_chat.attachments import named_pages, with_files

        taken: list[tuple[str, JSON]] = []
        while self._waiting and not self._waiting[0].startswith(("/", "!")) and not named_pages(self._waiting[0]):
            try:
                taken.append((self._waiting[0], with_files(self._waiting[0])))
            except ConfigError:
                break
            self._waiting.popleft()
        return taken
