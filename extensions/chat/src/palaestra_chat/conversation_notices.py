"""The notices of one conversation: what a person learns besides the answers, such as the loss of a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palaestra_chat.turn_events import Event, Notice


class ConversationNotices:
    """Passes notices to the person, and keeps those from the time before the conversation was opened until a front end
    takes them. `notify` is `People.notice`; `emit` adds an event to the running turn, if there is one."""

    def __init__(self, notify: Callable[[Notice], None] | None, emit: Callable[[Event], None]) -> None:
        self._notify, self._emit = notify, emit
        self._kept: list[Notice] = []

    def keep(self, notices: Sequence[Notice], *, alone: bool = False) -> None:
        """Keep these notices until `take` is called, in place of earlier ones if `alone`."""
        self._kept = [*(() if alone else self._kept), *notices]

    def take(self) -> list[Notice]:
        """Remove and return the kept notices. If nobody takes them, the next turn reports them."""
        taken, self._kept = self._kept, []
        return taken

    def report(self, notice: Notice) -> None:
        """Report this to the person."""
        if self._notify is not None:
            self._notify(notice)

    def report_in_turn(self, notice: Notice) -> None:
        """Report this to the person, and among the events of the running turn."""
        self.report(notice)
        self._emit(notice)
