"""The server's event loop. It handles descriptors, timers and long jobs in one thread, because forking next to other
threads is unsafe.

A *job* is a generator that yields between pieces of work. Each round runs one piece of every job, so that no request
waits for another request's large file.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

Callback = Callable[[], object]
Job = Iterator[None]

_MANY = 64  # fewer cancelled timers are not cleaned up; a round handles at most this number of descriptors
_LONGEST_S = 3600.0  # the longest wait: epoll counts milliseconds in 31 bits, and a command's time limit may be a year
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Timer(Protocol):
    """A call at a later time."""

    def cancel(self) -> None: ...


class Watcher(Protocol):
    """Calls back when a descriptor is ready."""

    def watch(self, fd: int, call: Callback) -> None: ...

    def watch_for(self, fd: int, events: int, call: Callback) -> None: ...

    def unwatch(self, fd: int) -> None: ...


class _Timer:
    __slots__ = ("call", "loop")

    def __init__(self, call: Callback, loop: EpollLoop) -> None:
        self.call: Callback | None = call
        self.loop = loop

    def cancel(self) -> None:
        if self.call is not None:
            self.call = None
            self.loop.forget_timer()


class EpollLoop:
    """Runs callbacks to their end, one at a time. An exception in a callback is a bug of the server and ends the
    loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callback] = {}
        self._special: set[int] = set()  # descriptors that are watched for more than reading
        self._timers: list[tuple[float, int, _Timer]] = []
        self._forgotten = 0
        self._order = itertools.count()
        self._jobs: deque[Job] = deque()
        self.running = True

    def watch(self, fd: int, call: Callback) -> None:
        """Call `call` whenever `fd` is readable or at its end. Replaces the former callback of `fd`."""
        if fd not in self._watched:
            self._epoll.register(fd, READ)
        elif fd in self._special:
            self._special.discard(fd)
            self._epoll.modify(fd, READ)
        self._watched[fd] = call

    def watch_soon(self, fd: int, call: Callback) -> None:
        """Do what `watch` does. A subclass may start watching a little later, because the output of a command is read
        at the end of the command anyway."""
        self.watch(fd, call)

    def watches(self, fd: int) -> bool:
        """Return whether a descriptor is watched."""
        return fd in self._watched

    def watch_for(self, fd: int, events: int, call: Callback) -> None:
        """Change the events for which a descriptor is watched."""
        self._epoll.modify(fd, events)
        self._watched[fd] = call
        (self._special.discard if events == READ else self._special.add)(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching. Does nothing for a descriptor that is not watched."""
        self._special.discard(fd)
        if self._watched.pop(fd, None) is not None:
            try:  # noqa: SIM105 - runs for every command, and the shorter form costs three calls
                self._epoll.unregister(fd)
            except OSError:  # the descriptor was already closed
                pass

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it. The kernel then drops it from the epoll set, unless a fork has a
        copy."""
        self._watched.pop(fd, None)
        self._special.discard(fd)
        os.close(fd)

    def later(self, seconds: float, call: Callback) -> Timer:
        """Call `call` once, after `seconds` seconds."""
        timer = _Timer(call, self)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def forget_timer(self) -> None:
        """Count a cancelled timer. Cancelled timers are removed once there are more than `_MANY` and they make up more
        than half of all timers, since a time limit may be hours away."""
        self._forgotten += 1
        if self._forgotten > _MANY and 2 * self._forgotten > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._forgotten = 0

    def start(self, job: Job) -> None:
        """Run a generator to its end, one piece per round."""
        self._jobs.append(job)

    def run(self) -> None:
        """Run until `running` is set to False."""
        while self.running:
            self.turn(self.patience())

    def turn(self, patience: float | None = 0) -> None:
        """Run one round: handle the descriptors that become ready within `patience` seconds, run the timers that are
        due, and run one piece of every job."""
        watched = self._watched
        ready = self._epoll.poll(patience, _MANY)
        if len(ready) == 1:
            call = watched.get(ready[0][0])
            if call is not None:
                call()
        else:
            for fd, call in [(fd, watched.get(fd)) for fd, _ in ready]:
                # A callback may have closed a descriptor that comes later in the same round.
                if call is not None and watched.get(fd) is call:
                    call()
        if self._timers:
            self.run_timers()
        if self._jobs:
            self._run_jobs()

    def end(self) -> None:
        """Stop watching everything and close the epoll descriptor. Idempotent."""
        self._watched.clear()
        self._epoll.close()

    def fileno(self) -> int:
        """Return the epoll descriptor, which is readable while a watched descriptor is ready."""
        return self._epoll.fileno()

    def patience(self) -> float | None:
        """Return the number of seconds for which a round may wait: 0 if there are jobs, otherwise the time until the
        next timer; None if there is no timer either."""
        if self._jobs:
            return 0
        timers = self._timers
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
            self._forgotten -= 1
        return min(max(0.0, timers[0][0] - time.monotonic()), _LONGEST_S) if timers else None

    def run_timers(self) -> None:
        """Run the timers that are due."""
        # Read once, so that a timer which sets itself again does not keep the loop here.
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
            # Jobs yield None, so the job itself can stand for its end.
            if next(job, job) is not job:
                self._jobs.append(job)
