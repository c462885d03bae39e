"""`Session`: a run that stays open, whose tasks the caller chooses while it runs; and `SyncSession`, which blocks.

    async with Session(count_lines(n=8), policy="oracle") as session:
        groups = await session.roll_out("lines-3", "lines-5", group_size=4)

A trainer needs it: each of its steps rolls out other tasks, with other weights, through the same slots and into one
record.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from palaestra.core.config import nearest, python_names
from palaestra.core.errors import ConfigError, PalaestraError
from palaestra.core.io.threads import LoopThread
from palaestra.core.types import JSON, Task
from palaestra.envs.config.layers import exported, read_dotenv
from palaestra.envs.run.library import assembled
from palaestra.inference.server_group import Server
from palaestra.rollouts.journal.reader import RUNS
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Runner, Totals, first_failure


class Session:
    """A run that stays open. Use it in an `async with` block, or in `with` for `SyncSession`. Arguments are those of
    `palaestra.run`; `group_size` is the default of `roll_out`.

    Entering the block raises what `palaestra.run` raises if the run cannot start. Leaving it waits for the groups in
    flight and finishes the record.
    """

    def __init__(
        self,
        env: object,
        *,
        policy: str | None = None,
        model: str | None = None,
        base_url: str | None = None,
        server: Server | Sequence[Server] | None = None,
        group_size: int | None = None,
        folder: str | Path = RUNS,
        progress: bool = False,
        **settings: JSON,
    ) -> None:
        self._arguments = (env, "process", server, folder)
        self._progress = progress
        self._settings = settings | {"policy": policy, "model": model, "base_url": base_url, "group_size": group_size}
        self._entered = ExitStack()
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._numbers = itertools.count()
        self._drawn: dict[str, Task] = {}

    async def __aenter__(self) -> Self:
        dotenv = read_dotenv(Path.cwd())
        with python_names(), ExitStack() as entered:
            entered.enter_context(exported(dotenv))
            roll_out = assembled(*self._arguments, dotenv, self._progress, **self._settings)
            self._running = asyncio.create_task(roll_out(drive=self._drive), name="session")
            opened = asyncio.create_task(self._opened.wait())
            try:
                await asyncio.wait([self._running, opened], return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                self._running.cancel()
                raise
            finally:
                opened.cancel()
            if self._running.done():
                await self._running
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing.set()
        with python_names(), self._entered:
            if kind is None:
                await self._running
                return
            if not issubclass(kind, PalaestraError):
                self._running.cancel()
            with suppress(asyncio.CancelledError, PalaestraError):  # what happened first counts
                await self._running

    def __enter__(self) -> SyncSession:
        self._sync = SyncSession(self)
        return self._sync.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._sync.__exit__(kind, *exc)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._runner.run_context.events.journal.path.parent

    async def tasks(self, limit: int | None = None) -> list[Task]:
        """The first `limit` tasks of the environment, or all. Not all environments end."""
        async with self._drawing:
            while limit is None or len(self._drawn) < limit:
                if await self._draw() is None:
                    break
        return list(itertools.islice(self._drawn.values(), limit))

    async def roll_out(self, *tasks: str | Task, group_size: int | None = None) -> list[Group]:
        """Roll out tasks, by their ids, concurrently; return one finished group per task, in their order.

        Failed rollouts are in the groups. Raises `ConfigError` for an unknown task, and `EngineUnavailable` or
        `RunStopped` when the run stops, after which the session can only be closed.
        """
        chosen = [await self._find(task) if isinstance(task, str) else task for task in tasks]
        with python_names():
            return await asyncio.gather(
                *(self._groups.create_task(self._roll_out(task, group_size)) for task in chosen)
            )

    async def _roll_out(self, task: Task, group_size: int | None) -> Group:
        async with self._places:
            if self._runner.gate is not None and not await self._runner.gate():
                raise RunStopped(f"the run was stopped: {self._runner.run_context.limits.message}")
            return await self._runner.roll_out(next(self._numbers), task, group_size)

    async def _find(self, task_id: str) -> Task:
        async with self._drawing:
            while task_id not in self._drawn:
                if await self._draw() is None:
                    raise ConfigError(
                        f"{self._runner.env.name} has no task {task_id!r}.{nearest(task_id, self._drawn)}"
                    )
        return self._drawn[task_id]

    async def _draw(self) -> Task | None:
        task = await anext(self._source, None)
        if task is not None:
            self._drawn[task.id] = task
        return task

    async def _drive(self, runner: Runner) -> Totals:
        """Let the caller's tasks be rolled out until the session is closed."""
        self._runner = runner
        self._places = asyncio.Semaphore(runner.concurrency)
        self._source: AsyncIterator[Task] = runner.env.tasks()
        try:
            async with asyncio.TaskGroup() as self._groups:
                self._opened.set()
                await self._closing.wait()
        except* PalaestraError as failures:
            raise first_failure(failures) from None
        finally:
            if isinstance(self._source, AsyncGenerator):
                await self._source.aclose()
        return runner.totals


class SyncSession:
    """A session whose methods block, also where another event loop runs: `with Session(…) as session:`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = LoopThread("palaestra-session")

    def __enter__(self) -> Self:
        try:
            self._loop.wait(self._session.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        try:
            self._loop.wait(self._session.__aexit__(kind, *exc))
        finally:
            self._loop.close()

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._session.path

    def tasks(self, limit: int | None = None) -> list[Task]:
        """`Session.tasks`."""
        return self._loop.wait(self._session.tasks(limit))

    def roll_out(self, *tasks: str | Task, group_size: int | None = None) -> list[Group]:
        """`Session.roll_out`."""
        return self._loop.wait(self._session.roll_out(*tasks, group_size=group_size))
