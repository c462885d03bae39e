"""The server's event loop: descriptors, timers and long jobs, in one thread. A client has one inside its own.

One thread, because the server forks slots and a fork beside other threads is unsafe. What takes long is a *job*, a
generator that yields between pieces of work; each round runs one piece of every job, so that nobody waits for somebody
else's large file.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator

Callback = Callable[[], object]
Job = Iterator[None]

_MANY = 64
"""Cancelled timers that are not worth a look; descriptors of one round."""

_LONGEST_S = 3600.0
"""The longest wait: epoll counts milliseconds in 31 bits, and a command may be given a year."""

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Timer:
    """A call at a later time; `cancel` makes it nothing."""

    __slots__ = ("call", "loop")

    def __init__(self, call: Callback, loop: Loop) -> None:
        self.call: Callback | None = call
        self.loop = loop

    def cancel(self) -> None:
        """Never make the call."""
        if self.call is not None:
            self.call = None
            self.loop.forget_timer()


class Loop:
    """Callbacks run to their end, one at a time. An exception in one ends the loop: it is a bug of the server."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callback] = {}
        self._special: set[int] = set()
        """Those that are not watched for reading alone."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._forgotten = 0
        self._order = itertools.count()
        self._jobs: deque[Job] = deque()
        self.running = True

    def watch(self, fd: int, call: Callback) -> None:
        """Call whenever `fd` is readable (or at its end). Who watched it before does no longer."""
        if fd not in self._watched:
            self._epoll.register(fd, READ)
        elif fd in self._special:
            self._special.discard(fd)
            self._epoll.modify(fd, READ)
        self._watched[fd] = call

    watch_soon = watch
    """For what need not be watched from this moment on; here it is."""

    def watches(self, fd: int) -> bool:
        """Whether a descriptor is watched."""
        return fd in self._watched

    def watch_for(self, fd: int, events: int, call: Callback) -> None:
        """Change what a watched descriptor is watched for."""
        self._epoll.modify(fd, events)
        self._watched[fd] = call
        (self._special.discard if events == READ else self._special.add)(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is fine."""
        self._special.discard(fd)
        if self._watched.pop(fd, None) is not None:
            try:  # noqa: SIM105 - once or more per command, and the shorter form costs three calls
                self._epoll.unregister(fd)
            except OSError:  # it was closed already
                pass

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it: the kernel forgets it then, but for copies that a fork still has."""
        self._watched.pop(fd, None)
        self._special.discard(fd)
        os.close(fd)

    def later(self, seconds: float, call: Callback) -> Timer:
        """Call once after so many seconds."""
        timer = Timer(call, self)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def forget_timer(self) -> None:
        """One more timer that is cancelled. They leave when they are half: a command's limit may be hours away."""
        self._forgotten += 1
        if self._forgotten > _MANY and 2 * self._forgotten > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._forgotten = 0

    def start(self, job: Job) -> None:
        """Run a generator to its end, a piece per round."""
        self._jobs.append(job)

    def run(self) -> None:
        """Until `running` is set to False."""
        while self.running:
            self.turn(self.patience())

    def turn(self, patience: float | None = 0) -> None:
        """One round: what is ready within so many seconds, and what is due."""
        watched = self._watched
        ready = self._epoll.poll(patience, _MANY)
        if len(ready) == 1:
            call = watched.get(ready[0][0])
            if call is not None:
                call()
        else:
            for fd, call in [(fd, watched.get(fd)) for fd, _ in ready]:
                # A callback may have closed what a later descriptor of the same round names.
                if call is not None and watched.get(fd) is call:
                    call()
        if self._timers:
            self.run_timers()
        if self._jobs:
            self._run_jobs()

    def end(self) -> None:
        """Watch nothing any more, and let go of the descriptor. Idempotent."""
        self._watched.clear()
        self._epoll.close()

    def fileno(self) -> int:
        """The descriptor that is readable while something watched is."""
        return self._epoll.fileno()

    def patience(self) -> float | None:
        """How long a round may wait: until the next timer, or for ever."""
        if self._jobs:
            return 0
        timers = self._timers
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
            self._forgotten -= 1
        return min(max(0.0, timers[0][0] - time.monotonic()), _LONGEST_S) if timers else None

    def run_timers(self) -> None:
        """Make the calls that are due."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                call()
            else:
                self._forgotten -= 1

    def _run_jobs(self) -> None:
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if next(job, job) is not job:
                self._jobs.append(job)
