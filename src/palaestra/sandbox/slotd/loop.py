"""The server's event loop: descriptors, timers and long jobs, in one thread.

One thread, because the server forks slots and a fork beside other threads is unsafe. What takes long is a *job*, a
generator that yields between pieces of work; each round runs one piece of every job, so that nobody waits for somebody
else's large file.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Callback = Callable[[], object]
Job = Iterator[None]

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


@dataclass(order=True)
class Timer:
    """A call at a later time; `cancel` makes it nothing."""

    when: float
    order: int
    call: Callback | None = field(compare=False)

    def cancel(self) -> None:
        """Never make the call."""
        self.call = None


class Loop:
    """Callbacks run to their end, one at a time. An exception in one ends the loop: it is a bug of the server."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callback] = {}
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._jobs: deque[Job] = deque()
        self.running = True

    def watch(self, fd: int, call: Callback) -> None:
        """Call whenever `fd` is readable (or at its end). Who watched it before does no longer."""
        if fd in self._watched:
            self._epoll.modify(fd, READ)
        else:
            self._epoll.register(fd, READ)
        self._watched[fd] = call

    def watch_for(self, fd: int, events: int, call: Callback) -> None:
        """Change what a watched descriptor is watched for."""
        self._epoll.modify(fd, events)
        self._watched[fd] = call

    def unwatch(self, fd: int) -> None:
        """Stop watching; a descriptor that is not watched is fine."""
        if self._watched.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # it was closed already
                self._epoll.unregister(fd)

    def later(self, seconds: float, call: Callback) -> Timer:
        """Call once after so many seconds."""
        timer = Timer(time.monotonic() + seconds, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer

    def start(self, job: Job) -> None:
        """Run a generator to its end, a piece per round."""
        self._jobs.append(job)

    def run(self) -> None:
        """Until `running` is set to False."""
        while self.running:
            ready = [(fd, self._watched.get(fd)) for fd, _ in self._epoll.poll(self._patience())]
            for fd, call in ready:
                # A callback may have closed what a later descriptor of the same round names.
                if call is not None and self._watched.get(fd) is call:
                    call()
            self._run_timers()
            for _ in range(len(self._jobs)):
                job = self._jobs.popleft()
                if next(job, job) is not job:
                    self._jobs.append(job)

    def _patience(self) -> float | None:
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        if self._jobs:
            return 0
        return max(0.0, self._timers[0].when - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].when <= now:
            call = heapq.heappop(self._timers).call
            if call is not None:
                call()
