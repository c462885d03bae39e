"""`ProcessRegistry`: the background processes of tasks, as sessions.

For: starting them, finding them by id within their task, ending them all, and getting them back after a restart. What
can be done with one session is in `actions.py`. Not a place for processes themselves: those are the slot's, end with it
at the latest, and are ended with their whole tree.

Invariant: whoever names a task reaches that task's sessions and no others. A signal goes to the process that the
session was started for, or to nobody: slots know their processes by numbers of their own and hold each until its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import SlotLost, StaleLease
from palaestra.processes import actions, checkpoint
from palaestra.processes.actions import Reply
from palaestra.processes.notifications import Told
from palaestra.processes.session import (
    FINISHED_TTL_SECONDS,
    MAX_PROCESSES,
    ProcessEvent,
    ProcessSession,
    SessionLost,
    Watch,
)
from palaestra.processes.watcher import Follower
from palaestra.sandbox.slot import WORKSPACE, Process, ProcessStatus, Slot, TerminalSize

logger = logging.getLogger(__name__)

TERMINAL_SIZE = TerminalSize(rows=30, columns=120)
MAX_EVENTS = 256
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
"""A program that writes to a pipe holds its output back; whoever looks at a process wants it now."""


_Started: TypeAlias = tuple[Process, ProcessStatus]

_known: WeakSet[ProcessRegistry] = WeakSet()
_knowing = threading.Lock()
"""For synchronous code, which names a session and not the registry that has it. Nothing here keeps one alive."""


class ProcessRegistry:
    """Sessions by id. Methods that take `task_id` see that task's sessions alone; None, for their owner, sees all.

    `checkpoint_path` is a file that lets the next registry find the processes of slots that stay. `completion_queue`
    has what watched sessions tell; where nobody takes it, the oldest gives way. `told`, where it is given, gets the
    same for code without `await`. `loop` is that of its sessions, None before the first.
    """

    def __init__(
        self,
        *,
        checkpoint_path: Path | None = None,
        max_processes: int = MAX_PROCESSES,
        finished_ttl_s: float = FINISHED_TTL_SECONDS,
        clock: Clock | None = None,
        told: Told | None = None,
    ) -> None:
        self.told = told
        self.completion_queue: asyncio.Queue[ProcessEvent] = asyncio.Queue(MAX_EVENTS)
        self._path, self._most, self._ttl_s = checkpoint_path, max_processes, finished_ttl_s
        self._clock = clock or SystemClock()
        self._sessions: dict[str, ProcessSession] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._numbers: Counter[str] = Counter()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> ProcessRegistry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following; the processes go on and the checkpoint stays. Idempotent."""
        followers = list(self._followers)
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

    async def spawn(
        self,
        slot: Slot,
        command: str,
        *,
        task_id: str,
        cwd: str = WORKSPACE,
        session_key: str = "",
        env: Mapping[str, str] | None = None,
        use_pty: bool = False,
        watch: Watch | None = None,
    ) -> ProcessSession:
        """Start a command line in a slot as a session of `task_id`.

        `session_key` names the conversation, which is the task itself where nothing else is said. Cancelling it leaves
        no process behind. Raises BlockingIOError when too many of the task run, and what `Slot.spawn` raises.
        """
        await self._make_room(task_id)
        environment = {**_ENVIRONMENT, **(env or {})}
        started_at = self._clock.wall()
        size = TERMINAL_SIZE if use_pty else None
        process, status = await self._started(_start(slot.spawn(command, cwd=cwd, env=environment, terminal=size)))
        session = ProcessSession(
            self._new_id(task_id), command, task_id, session_key or task_id, cwd, slot.slot_id, started_at, process,
            status, watch or Watch(),
        )  # fmt: skip
        self._take(session)
        self._save()
        return session

    def get(self, session_id: str, task_id: str | None = None) -> ProcessSession | None:
        """The session of that id; None where there is none, or it is another task's."""
        session = self._sessions.get(session_id)
        return session if session is not None and task_id in (None, session.task_id) else None

    # The contract's actions: each answers with an object, `not_found` where the task has no such session.

    async def poll(self, session_id: str, since: int | None = None, *, task_id: str | None = None) -> Reply:
        """How it is; see `actions.poll`."""
        return await self._do(session_id, task_id, lambda session: actions.poll(session, since))

    async def read_log(
        self, session_id: str, offset: int = 0, limit: int = 200, *, task_id: str | None = None
    ) -> Reply:
        """Lines of its output; see `actions.log`."""
        return await self._do(session_id, task_id, lambda session: actions.log(session, offset, limit))

    async def wait(
        self, session_id: str, timeout_s: float | None = None, *, limit_s: float = 180.0, task_id: str | None = None
    ) -> Reply:
        """Until it has ended; see `actions.wait`."""
        return await self._do(session_id, task_id, lambda session: actions.wait(session, timeout_s, limit_s))

    async def kill_process(self, session_id: str, *, task_id: str | None = None) -> Reply:
        """End it and all that it has started; see `actions.kill`."""
        return await self._do(session_id, task_id, actions.kill)

    async def write_stdin(self, session_id: str, data: str, *, end: bool = False, task_id: str | None = None) -> Reply:
        """Write to its input as it is; see `actions.write`."""
        return await self._do(session_id, task_id, lambda session: actions.write(session, _bytes(data), end=end))

    async def submit_stdin(self, session_id: str, data: str, *, end: bool = False, task_id: str | None = None) -> Reply:
        """Write a line to its input; see `actions.submit`."""
        return await self._do(session_id, task_id, lambda session: actions.submit(session, _bytes(data), end=end))

    async def list_sessions(self, task_id: str | None = None) -> list[Reply]:
        """All sessions, oldest first; those that ended too long ago are forgotten."""
        await self._prune(task_id)
        found = (actions.reaching(session, actions.summary) for session in self._of(task_id))
        return list(await asyncio.gather(*found))

    async def has_active_processes(self, task_id: str | None = None) -> bool:
        """Whether any process of the task runs."""
        sessions = await self._refresh(task_id)
        return any(session.running for session in sessions)

    async def has_active_for_session(self, session_key: str, max_age_s: float | None = None) -> bool:
        """Whether any process of that conversation runs, so that it must not be reset; older ones do not count."""
        running = [session for session in await self._refresh(None, session_key) if session.running]
        return any(max_age_s is None or session.status.duration_s <= max_age_s for session in running)

    def interrupt(self, *, task_id: str | None = None, session_key: str | None = None) -> int:
        """End the waits for sessions of that task and that conversation, and nobody else's; how many there were."""
        count = 0
        for session in self._of(task_id):
            if session_key in (None, session.session_key):
                waiting = [interrupt for interrupt in session.waiting if not interrupt.done()]
                for interrupt in waiting:
                    interrupt.set_result(None)
                count += len(waiting)
        return count

    async def kill_all(self, task_id: str | None = None) -> int:
        """End every process of the task that runs; how many those were. A slot that is gone has none."""

        async def kill(session: ProcessSession) -> bool:
            try:
                return bool((await actions.reaching(session, actions.kill))["status"] == "killed")
            except (SlotLost, StaleLease) as error:
                session.lose(f"its slot is gone ({error})")
                return False

        return sum(await asyncio.gather(*(kill(session) for session in self._of(task_id))))

    async def recover_from_checkpoint(self, slots: Iterable[Slot]) -> int:
        """Take up the sessions that a former registry left, as far as `slots` have their processes; how many that are.

        The others are known too, as lost, with the reason. Raises `ConfigError` for a file that cannot be read.
        """
        if self._path is None:
            return 0
        found = [session for session in await checkpoint.load(self._path, slots) if session.id not in self._sessions]
        for session in found:
            self._take(session)
        self._save()
        return sum(not session.lost for session in found)

    def forget(self, task_id: str) -> None:
        """Drop the sessions of a task whose slot has ended."""
        for session in list(self._of(task_id)):
            del self._sessions[session.id]
        self._save()

    # Book-keeping

    async def _started(self, start: Coroutine[object, object, _Started]) -> _Started:
        """The process, which ends again where nobody waits for it any more: it would run without a name."""
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._aside(_end(starting)))
            raise

    def _aside(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)
        return task

    def _take(self, session: ProcessSession) -> None:
        """One session more."""
        self._sessions[session.id] = session
        self._follow(session)
        if self.told is not None and session.running:
            self.told.watched(session)
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            with _knowing:
                _known.add(self)

    def _of(self, task_id: str | None) -> Iterator[ProcessSession]:
        return (session for session in list(self._sessions.values()) if task_id in (None, session.task_id))

    def _new_id(self, task_id: str) -> str:
        """Ids derive from the task and how many of it came before, so that equal runs have equal ids."""
        while True:
            self._numbers[task_id] += 1
            text = f"{task_id}\0{self._numbers[task_id]}"
            name = f"proc_{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"
            if name not in self._sessions:  # as one that was found again
                return name

    async def _do(
        self, session_id: str, task_id: str | None, action: Callable[[ProcessSession], Awaitable[Reply]]
    ) -> Reply:
        session = self.get(session_id, task_id)
        if session is None:
            return not_found(session_id)
        return await actions.reaching(session, action)

    async def _refresh(self, task_id: str | None, session_key: str | None = None) -> list[ProcessSession]:
        """The sessions, as they are now. What has gone with its slot is lost to the owner of many, an error to one."""
        sessions = [session for session in self._of(task_id) if session_key in (None, session.session_key)]

        async def refresh(session: ProcessSession) -> None:
            try:
                await session.refresh()
            except SessionLost:
                pass
            except (SlotLost, StaleLease) as error:
                if task_id is not None:
                    raise
                session.lose(f"its slot is gone ({error})")

        await asyncio.gather(*(refresh(session) for session in sessions))
        return sessions

    async def _make_room(self, task_id: str) -> None:
        if sum(1 for _ in self._of(task_id)) < self._most:
            return
        await self._prune(task_id)
        ended = [session for session in self._of(task_id) if not session.running]
        running = sum(1 for _ in self._of(task_id)) - len(ended)
        if running >= self._most:
            raise BlockingIOError(errno.EAGAIN, f"{self._most} background processes run already; kill one first")
        if running + len(ended) >= self._most:
            await self._forget(min(ended, key=lambda session: session.ended_at or session.started_at))

    async def _prune(self, task_id: str | None) -> None:
        """Forget what ended too long ago, counted from its end."""
        await self._refresh(task_id)
        expired = self._clock.wall() - self._ttl_s
        for session in self._of(task_id):
            if session.ended_at is not None and session.ended_at < expired:
                await self._forget(session)

    async def _forget(self, session: ProcessSession) -> None:
        self._sessions.pop(session.id, None)
        if session.process is not None:
            with contextlib.suppress(ProcessLookupError):
                await session.process.forget()
        self._save()

    def _follow(self, session: ProcessSession) -> None:
        if session.watch and not session.lost:
            self._aside(Follower(session, self._tell, self._clock).run())

    def _tell(self, event: ProcessEvent) -> None:
        if self.completion_queue.full():
            self.completion_queue.get_nowait()
        self.completion_queue.put_nowait(event)
        if self.told is not None and (session := self._sessions.get(event.session_id)) is not None:
            self.told.event(session, event)
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            checkpoint.save(self._path, self._sessions.values())


async def _start(spawning: Awaitable[Process]) -> _Started:
    process = await spawning
    return process, await process.status()


async def _end(starting: asyncio.Future[_Started]) -> None:
    try:
        process, _ = await starting
        await process.kill(0.0)
    except Exception as error:
        logger.debug("what was not waited for did not start, or has ended: %s", error)


def not_found(session_id: str) -> Reply:
    """The reply to an action on a session that is not there."""
    return {"session_id": session_id, "status": "not_found", "error": f"No process with ID {session_id}"}


def living() -> list[ProcessRegistry]:
    """The registries of this process that have had a session and whose loop can still be asked, from any thread."""
    with _knowing:
        return [each for each in _known if each.loop is not None and each.loop.is_running()]


def _bytes(data: str) -> bytes:
    """Lone surrogates, as models write them in JSON, become question marks."""
    return data.encode(errors="replace")
