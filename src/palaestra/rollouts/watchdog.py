"""Where one rollout is, how long it was there, and how long it may stay: `Stages`.

Not for judging a command's or a request's own time limit: those belong to the tool and to the client, and a limit here
is for what they do not notice. Invariant: every change of stage and every turn counts as a sign of life, and a rollout
without one for longer than its stage allows ends with an error of whoever it was waiting for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from palaestra.core.errors import (
    EngineUnavailable,
    GraderError,
    InfraError,
    PrepareError,
    SandboxError,
    ToolStuck,
)
from palaestra.rollouts.observe.tracing.spans import NO_TRACING, Tracing

WAITING_FOR: Mapping[str, type[InfraError]] = {
    "acquire": SandboxError,
    "prepare": PrepareError,
    "setup": PrepareError,
    "model": EngineUnavailable,
    "tool": ToolStuck,
    "seal": SandboxError,
    "grade": GraderError,
}
"""The stages that may have a limit, and whose failure it is when it is reached. `admit`, which waits for a place among
the slots, has none: a queue may be long."""

IDLE_LIMITS: Mapping[str, float] = {
    "acquire": 600.0,
    "prepare": 7200.0,
    "setup": 3600.0,
    "model": 3600.0,
    "tool": 7200.0,
    "seal": 600.0,
    "grade": 7200.0,
}
"""Seconds without a sign of life. Far above what each stage's own limits allow: reached only by what hangs."""

Tell = Callable[[str, str], None]
"""Gets a rollout's or group's id and the stage that it is at now; the empty string when it is at none."""


class Stages:
    """The stages of one rollout, or of one group's preparation. `seconds` adds up by name; stages may lie in others."""

    def __init__(
        self,
        name: str,
        tell: Tell | None = None,
        limits: Mapping[str, float] | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.name = name
        self.seconds: dict[str, float] = {}
        self._tell = tell
        self._tracing = tracing
        self._limits = limits or {}
        self._at: list[str] = []
        self._waiting = ""
        self._deadline: asyncio.Timeout | None = None

    @contextmanager
    def stage(self, name: str, shown: str = "") -> Iterator[None]:
        """Be at a stage. It is told under the name `shown`, where that differs from the one its time is kept under."""
        shown = shown or name
        self._at.append(shown)
        self.moved()
        started = time.perf_counter()
        try:
            with self._tracing.stage(self.name, name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self._at.remove(shown)  # calls that run together end in any order
            self.moved()

    def moved(self) -> None:
        """A sign of life: tell the stage, and begin to wait anew."""
        stage = self._at[-1] if self._at else ""
        if self._tell is not None:
            self._tell(self.name, stage)
        deadline = self._deadline
        if deadline is not None and not deadline.expired():  # what it ends is left stage by stage, too
            self._waiting = stage
            limit = self._limits.get(stage, 0.0)
            deadline.reschedule(asyncio.get_running_loop().time() + limit if limit > 0 else None)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """End the block when there was no sign of life for too long: raises the error that `WAITING_FOR` names."""
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadline = deadline
                yield
            if deadline.expired():  # it was told to end, and went on all the same
                raise self._too_long()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise self._too_long() from error
        finally:
            self._deadline = None

    def _too_long(self) -> InfraError:
        stage = self._waiting
        return WAITING_FOR[stage](
            f"{self.name} gave no sign of life for {self._limits[stage]:g} s at stage {stage}, which is its limit "
            f"(idle_limits.{stage})"
        )
