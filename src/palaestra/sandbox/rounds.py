"""The event loop as commands need it, on the client's side: pipes to watch, and time limits.

asyncio takes longer over a descriptor or a timer than a command of a shell does to run, and as long again to forget
them, so it hears of them only when they are still there after a moment, and not of who watches a descriptor now.
Moments follow on each other for all commands together: what has seen one begin and end is old enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from palaestra.sandbox.slotd.loop import WRITE

_SOON_S = 0.005
"""Most commands have ended by then."""


class _Timer:
    """A call that is to come, of which the event loop may not know yet."""

    __slots__ = ("call", "handle", "when")

    def __init__(self, call: Callable[[], object], when: float) -> None:
        self.call, self.when = call, when
        self.handle: asyncio.Handle | None = None

    def cancel(self) -> None:
        """Never make the call."""
        self.when = 0.0
        if self.handle is not None:
            self.handle.cancel()


class Rounds:
    """Implements `executions.Rounds` on the running loop; one serves all slots of a server."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Callable[[], object]] = {}
        self._watched: set[int] = set()
        self._soon: dict[int, int] = {}
        """Descriptors that are not watched yet, and the moment in which they came."""
        self._timers: list[_Timer] = []
        self._new_timers: list[_Timer] = []
        """Of the moment before, and of this one."""
        self._moment = 0
        self._waiting = False

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call when there is something to read. Who watched it before does no longer."""
        self._calls[fd] = call
        self._begin_to_watch(fd)

    def watch_soon(self, fd: int, call: Callable[[], object]) -> None:
        """The same from soon on."""
        self._calls[fd] = call
        if fd not in self._watched:
            self._soon[fd] = self._moment
            self._wait()

    def watch_for(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Whether to call a watched descriptor's watcher also when there is room to write."""
        if events & WRITE:
            self._loop.add_writer(fd, call)
        else:
            self._loop.remove_writer(fd)

    def unwatch(self, fd: int) -> None:
        """No more calls; a descriptor that is not watched is fine."""
        self._calls.pop(fd, None)
        self._soon.pop(fd, None)
        if fd in self._watched:
            self._watched.discard(fd)
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it."""
        self.unwatch(fd)
        os.close(fd)

    def later(self, seconds: float, call: Callable[[], object]) -> _Timer:
        """Call once after so many seconds."""
        timer = _Timer(call, self._loop.time() + seconds)
        if seconds > 2 * _SOON_S:
            self._new_timers.append(timer)
            self._wait()
        elif seconds:
            timer.handle = self._loop.call_at(timer.when, call)
        else:
            timer.handle = self._loop.call_soon(call)
        return timer

    @property
    def over(self) -> bool:
        """Whether nothing will be called any more."""
        return self._loop.is_closed()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._loop.call_later(_SOON_S, self._begin)

    def _begin(self) -> None:
        """While there is something to look after each time, the next time is agreed on here, where nobody waits."""
        self._waiting = False
        if self._soon or self._timers or self._new_timers:
            self._wait()
        for fd in [fd for fd, came in self._soon.items() if came < self._moment]:
            self._begin_to_watch(fd)
        for timer in self._timers:
            if timer.when:
                timer.handle = self._loop.call_at(timer.when, timer.call)
        self._timers, self._new_timers = self._new_timers, []
        self._moment += 1

    def _begin_to_watch(self, fd: int) -> None:
        self._soon.pop(fd, None)
        if fd not in self._watched:
            self._watched.add(fd)
            self._loop.add_reader(fd, self._on_ready, fd)

    def _on_ready(self, fd: int) -> None:
        self._calls[fd]()
