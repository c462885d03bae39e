"""The event loop as commands need it, on the client's side: pipes to watch, and time limits.

asyncio takes longer over a descriptor or a timer than a command of a shell does to run, and as long again to forget
them. So it watches itself only what is waited for, the words of inits and shells. The rest, which can wait a moment, is
with a loop like the server's, whose descriptor asyncio watches; and even that hears of a descriptor only when it is
still there after a moment. Moments follow on each other for all commands together: what has seen one begin and end is
old enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from palaestra.sandbox.slotd.event_loop import WRITE, Loop
from palaestra.sandbox.slotd.exec.command import Timer

_SOON_S = 0.005
"""A moment. Most commands have ended by then."""


class Rounds:
    """Implements `executions.Rounds` on the running loop; one serves all slots of a server."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Callable[[], object]] = {}
        self._soon: dict[int, tuple[int, Callable[[], object]]] = {}
        """Descriptors that are not watched yet, with the moment in which they came."""
        self._slow = Loop()
        self._slowly = 0
        """How many descriptors it watches."""
        self._moment = 0
        self._goes_on = self._came = False
        """Whether another moment follows; whether something has come in this one."""
        self._alarm: asyncio.TimerHandle | None = None
        self._ended = False

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call when there is something to read. Who watched it before does no longer."""
        if fd not in self._calls:
            self.unwatch(fd)
            self._loop.add_reader(fd, self._on_ready, fd)
        self._calls[fd] = call

    def watch_soon(self, fd: int, call: Callable[[], object]) -> None:
        """The same from soon on."""
        if fd in self._calls:
            self._calls[fd] = call
        elif self._slowly and self._slow.watches(fd):
            self._slow.watch(fd, call)
        else:
            self._soon[fd] = self._moment, call
            self._go_on()

    def watch_for(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Whether to call a watched descriptor's watcher also when there is room to write."""
        if events & WRITE:
            self._loop.add_writer(fd, call)
        else:
            self._loop.remove_writer(fd)

    def unwatch(self, fd: int) -> None:
        """No more calls; a descriptor that is not watched is fine."""
        self._soon.pop(fd, None)
        if self._calls.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
        elif self._slowly and self._slow.watches(fd):
            self._slow.unwatch(fd)
            self._slowly -= 1
            if not self._slowly:
                self._loop.remove_reader(self._slow.fileno())

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it."""
        self.unwatch(fd)
        os.close(fd)

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once after so many seconds, or a moment later."""
        if not seconds:
            return self._loop.call_soon(call)
        timer = self._slow.later(seconds, call)
        self._go_on()
        return timer

    def end(self) -> None:
        """Nobody waits for anything any more, and closing descriptors is all that can still be asked. Idempotent."""
        self._ended = True
        self._put_off()
        if self._slowly:
            self._slowly = 0
            self._loop.remove_reader(self._slow.fileno())
        self.let_go()

    def let_go(self) -> None:
        """Close its descriptor, in a forked child: what watches that is its parent's too."""
        self._slow.end()

    @property
    def over(self) -> bool:
        """Whether nothing will be called any more."""
        return self._loop.is_closed()

    def _go_on(self) -> None:
        self._came = True
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_later(_SOON_S, self._next)

    def _next(self) -> None:
        """A moment ends. While something comes in each, the next is agreed on here, where nobody waits."""
        if self._ended:
            return
        self._goes_on, self._came = self._came, False
        if self._goes_on:
            self._loop.call_later(_SOON_S, self._next)
        else:
            self._set_alarm()
        old = [fd for fd, (came, _) in self._soon.items() if came < self._moment]
        self._moment += 1
        for fd in old:
            self._watch_slowly(fd, self._soon.pop(fd)[1])
        self._slow.run_timers()

    def _set_alarm(self) -> None:
        """No more moments for now: what is left are timers."""
        self._put_off()
        patience = self._slow.patience()
        if patience is not None and not self._ended:
            self._alarm = self._loop.call_later(patience, self._ring)

    def _ring(self) -> None:
        try:
            self._slow.run_timers()
        finally:  # an error in one is not the others' end
            self._set_alarm()

    def _put_off(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _watch_slowly(self, fd: int, call: Callable[[], object]) -> None:
        self._slow.watch(fd, call)
        if not self._slowly:
            self._loop.add_reader(self._slow.fileno(), self._slow.turn)
        self._slowly += 1

    def _on_ready(self, fd: int) -> None:
        self._calls[fd]()
