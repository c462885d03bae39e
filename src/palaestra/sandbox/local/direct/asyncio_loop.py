"""The slot server's event loop inside asyncio's, for commands that the client starts itself.

asyncio takes longer to add and remove a descriptor or a timer than a shell takes to run a short command. So asyncio
watches only the epoll descriptor of this loop and has one timer for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from palaestra.sandbox.slotd.event_loop import EpollLoop, Timer

_MOMENT_S = 0.01  # most commands have ended by then


class AsyncioLoop(EpollLoop):
    """Runs in asyncio's running loop; one serves all slots of a server."""

    def __init__(self) -> None:
        super().__init__()
        self._asyncio = asyncio.get_running_loop()
        self._asyncio.add_reader(self.fileno(), self.turn)
        self._soon: dict[int, Callable[[], object]] = {}
        self._waiting = False  # whether `_watch_all` is scheduled
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")

    close_in_child = EpollLoop.end  # asyncio's loop is still the parent's

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        self._soon.pop(fd, None)
        super().watch(fd, call)

    def watch_soon(self, fd: int, call: Callable[[], object]) -> None:
        """Like `watch`, but register the descriptor only if it is still open after a moment."""
        if self.watches(fd):
            super().watch(fd, call)
            return
        self._soon[fd] = call
        if not self._waiting:
            self._waiting = True
            self._asyncio.call_later(_MOMENT_S, self._watch_all)

    def unwatch(self, fd: int) -> None:
        self._soon.pop(fd, None)
        super().unwatch(fd)

    def close(self, fd: int) -> None:
        self._soon.pop(fd, None)
        super().close(fd)

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        if not seconds:
            return self._asyncio.call_soon(call)
        if time.monotonic() + seconds < self._alarm_at:
            self._set_alarm(seconds)
        return super().later(seconds, call)

    def end(self) -> None:
        """Call nothing any more; descriptors can still be closed. Idempotent."""
        if self._alarm_at >= 0:
            self._asyncio.remove_reader(self.fileno())
        self._set_alarm(None)
        self._alarm_at = -1.0  # so that no timer sets another one
        self._soon.clear()
        super().end()

    def _watch_all(self) -> None:
        self._waiting = False
        for fd, call in list(self._soon.items()):
            self.watch(fd, call)

    def _set_alarm(self, seconds: float | None) -> None:
        """Have the timers run after so many seconds instead of at the former time; None for never."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if seconds is None else self._asyncio.call_later(seconds, self._ring)
        self._alarm_at = float("inf") if seconds is None else time.monotonic() + seconds

    def _ring(self) -> None:
        try:
            self.run_timers()
        finally:  # an error in one timer must not stop the others
            self._set_alarm(self.patience())
