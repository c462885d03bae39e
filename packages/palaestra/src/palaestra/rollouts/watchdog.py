"""Times the stages of a rollout, and ends a rollout that shows no sign of life within its stage's limit.

Tools and clients have their own time limits for commands and requests. The limits of this module catch the hangs that
those miss. Every change of stage and every turn is a sign of life. If a rollout shows none for longer than its stage
allows, it ends with an error that names the stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

from palaestra.rollouts.events import Alive
from palaestra_slots.core.errors import (
    EngineUnavailable,
    GraderError,
    InfraError,
    PrepareError,
    SandboxError,
    ToolStuck,
)

WAITING_FOR: Mapping[str, type[InfraError]] = {
    "acquire": SandboxError,
    "prepare": PrepareError,
    "setup": PrepareError,
    "model": EngineUnavailable,
    "tool": ToolStuck,
    "user": ToolStuck,
    "seal": SandboxError,
    "grade": GraderError,
}
"""The stages that may have a limit, and the class of error that is raised at the limit. `admit`, the wait for a free
slot, has no limit, because a queue may be long."""


class Stages:
    """The stages of one rollout, or of one group's preparation. `seconds` has each stage's total; stages may nest."""

    def __init__(self, name: str, emit: Callable[[Alive], None], limits: Mapping[str, float]) -> None:
        self.name = name
        self.seconds: dict[str, float] = {}
        self.started_at = time.time()
        """Seconds since 1970."""
        self.duration_s = 0.0
        """The whole time, once `end` was called."""
        self._began_s = time.perf_counter()
        self._emit = emit
        self._limits = limits
        self._at: list[str] = []
        self._alive_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = ""

    def end(self) -> None:
        """Note how long everything took."""
        self.duration_s = time.perf_counter() - self._began_s

    def stage(self, name: str, shown: str = "") -> Stage:
        """Return a context manager for this stage. `shown` is the name by which the display and the limits know the
        stage, if it differs from `name`."""
        return Stage(self, name, shown or name)

    def sign_of_life(self) -> None:
        """Restart the limit of the current stage."""
        self._sign(Alive(self.name, self._at[-1] if self._at else ""))

    def _sign(self, alive: Alive) -> None:
        self._emit(alive)
        loop = self._loop
        if loop is not None:
            self._alive_at = loop.time()
            limit = self._limits.get(alive.stage, 0.0)
            # A shorter limit needs an earlier timer. A longer one is noticed when the timer fires.
            if limit > 0 and (self._timer is None or self._alive_at + limit < self._timer.when()):
                self._set_timer(loop, self._alive_at + limit)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(at, self._look)

    def _look(self) -> None:
        """End the block if its stage is over its limit. Signs of life are frequent, so most of them only store the time
        and leave the timer as it is."""
        loop, deadline, self._timer = self._loop, self._deadline, None
        limit = self._limits.get(self._at[-1], 0.0) if self._at else 0.0
        if loop is None or deadline is None or limit <= 0:
            return
        if loop.time() < self._alive_at + limit:
            self._set_timer(loop, self._alive_at + limit)
        else:
            self._waiting = self._at[-1]
            self._loop = None  # code that the deadline ends still exits its stages
            deadline.reschedule(loop.time())

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """End the block when a stage reaches its limit, and raise the error that `WAITING_FOR` has for the stage."""
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadline, self._loop = deadline, asyncio.get_running_loop()
                yield
            if deadline.expired():  # the block swallowed its cancellation
                raise self._too_long()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise self._too_long() from error
        finally:
            self._deadline = self._loop = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    @property
    def in_own_loop(self) -> bool:
        """Whether the caller runs in the event loop of the watched block, or there is no such block now."""
        return self._loop is None or self._loop is asyncio.get_running_loop()

    def _too_long(self) -> InfraError:
        stage = self._waiting
        return WAITING_FOR[stage](
            f"{self.name} showed no sign of life for {self._limits[stage]:g} s at stage {stage}. If the stage needs "
            f"more time, raise idle_limits.{stage}"
        )


class Stage:
    """A context manager for one pass through a stage."""

    __slots__ = ("_name", "_shown", "_stages", "_started")

    def __init__(self, stages: Stages, name: str, shown: str) -> None:
        self._stages = stages
        self._name = name
        self._shown = shown
        self._started = 0.0

    def __enter__(self) -> Stage:
        stages = self._stages
        stages._at.append(self._shown)
        stages._sign(Alive(stages.name, self._shown, entered=self._name))
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stages, name = self._stages, self._name
        stages.seconds[name] = stages.seconds.get(name, 0.0) + time.perf_counter() - self._started
        stages._at.remove(self._shown)  # concurrent calls end in any order
        at = stages._at[-1] if stages._at else ""
        stages._sign(Alive(stages.name, at, left=name, error=kind.__name__ if kind is not None else ""))

    def become(self, name: str) -> None:
        """Leave this stage and enter another one."""
        self.__exit__(None, None, None)
        self._name = self._shown = name
        self.__enter__()
