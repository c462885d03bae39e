"""`ProcessRegistry` starts, finds, lists, kills and recovers the background processes of tasks as sessions.

Processes end with their slot. Killing a process kills its whole process tree.

Invariant: a caller that names a task reaches only that task's sessions. A signal never reaches a process other than the
session's, because a slot numbers its processes itself and holds on to each process until that process has ended.

With a checkpoint file, a new registry can find the processes that an earlier registry left running in slots that still
exist. The file is one JSON object, `{"schema": "palaestra.processes", "version": 1, "sessions": [...]}`. It is replaced
as a whole but not synced to disk, because processes do not survive a crash of the machine either. A process belongs to
a session only if its slot, number, pid and start time match the session's record, because a restarted slot server
repeats numbers and pids.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, SlotLost, StaleLease
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.notifications import Follower, Notifications
from palaestra_slots.processes.session import (
    FINISHED_TTL_SECONDS,
    FORGOTTEN,
    MAX_PROCESSES,
    ProcessSession,
    Reply,
    SessionLost,
    Watch,
)
from palaestra_slots.sandbox.slot import WORKSPACE, Process, ProcessStatus, Slot, TerminalSize

logger = logging.getLogger(__name__)

TERMINAL_SIZE = TerminalSize(rows=30, columns=120)
SCHEMA, VERSION = "palaestra.processes", 1

_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
"""Without this variable, a Python program that writes to a pipe would buffer its output."""

_KEPT = ("id", "command", "task_id", "session_key", "cwd", "slot_id", "started_at", "lost", "followed")
_IDENTITY = ("process_id", "pid", "started_s")

_Started: TypeAlias = tuple[Process, ProcessStatus]

_known: WeakSet[ProcessRegistry] = WeakSet()
_known_lock = threading.Lock()
"""Guards `_known`, the registries that synchronous code searches for a session by id."""


class SessionTable:
    """The sessions of a registry by id, oldest first, and the checkpoint file `path`, which `save` writes; if it is
    None, nothing is saved. Sessions that ended long ago are forgotten."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._all: dict[str, ProcessSession] = {}
        self._numbers: Counter[str] = Counter()

    def get(self, session_id: str) -> ProcessSession | None:
        """Return the session with this id, or None."""
        return self._all.get(session_id)

    def add(self, session: ProcessSession) -> None:
        """Add a session under its id."""
        self._all[session.id] = session

    def drop(self, task_id: str) -> None:
        """Drop all sessions of a task."""
        for session in list(self.of(task_id)):
            del self._all[session.id]
        self.save()

    async def recovered(self, slots: Iterable[Slot]) -> list[ProcessSession]:
        """Return the sessions of the checkpoint whose ids are not in use. Raises `ConfigError`."""
        if self._path is None:
            return []
        running = {slot.slot_id: {each.process_id: each for each in await slot.processes()} for slot in slots}
        found = [await _recovered(record, running) for record in _read_records(self._path)]
        return [session for session in found if session.id not in self._all]

    def of(self, task_id: str | None) -> Iterator[ProcessSession]:
        """Yield the sessions of a task, or of all tasks if `task_id` is None, oldest first."""
        return (session for session in list(self._all.values()) if task_id in (None, session.task_id))

    def new_id(self, task_id: str) -> str:
        """Return an id that is derived from the task and its earlier sessions, so that identical runs have identical
        ids."""
        while True:
            self._numbers[task_id] += 1
            text = f"{task_id}\0{self._numbers[task_id]}"
            name = f"proc_{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"
            if name not in self._all:  # a recovered session may have this id
                return name

    async def refresh(self, task_id: str | None, session_key: str | None = None) -> list[ProcessSession]:
        """Update the status of the matching sessions and return these sessions. If a slot has ended, raise the slot's
        error if `task_id` is given; otherwise mark the slot's sessions as lost."""
        sessions = [session for session in self.of(task_id) if session_key in (None, session.session_key)]

        async def refresh_session(session: ProcessSession) -> None:
            try:
                await session.refresh()
            except SessionLost:
                pass
            except (SlotLost, StaleLease) as error:
                if task_id is not None:
                    raise
                session.lose(f"its slot is gone ({error})")

        await asyncio.gather(*(refresh_session(session) for session in sessions))
        return sessions

    async def make_room(self, task_id: str) -> None:
        """Forget ended sessions of a task until it may have another. Raises `BlockingIOError` if too many are
        running."""
        if sum(1 for _ in self.of(task_id)) < MAX_PROCESSES:
            return
        await self.prune(task_id)
        ended = [session for session in self.of(task_id) if not session.running]
        running = sum(1 for _ in self.of(task_id)) - len(ended)
        if running >= MAX_PROCESSES:
            raise BlockingIOError(errno.EAGAIN, f"{MAX_PROCESSES} background processes are running; kill one first")
        if running + len(ended) >= MAX_PROCESSES:
            await self._forget_session(min(ended, key=lambda session: session.ended_at or session.started_at))

    async def prune(self, task_id: str | None) -> None:
        """Forget the sessions that ended more than `FINISHED_TTL_SECONDS` ago."""
        await self.refresh(task_id)
        expired = self._clock.wall() - FINISHED_TTL_SECONDS
        for session in self.of(task_id):
            if session.ended_at is not None and session.ended_at < expired:
                await self._forget_session(session)

    async def _forget_session(self, session: ProcessSession) -> None:
        self._all.pop(session.id, None)
        if session.process is not None:
            with contextlib.suppress(ProcessLookupError):
                await session.process.forget()
        self.save()

    def save(self) -> None:
        """Write the checkpoint, if there is a file for it. Raises `OSError`."""
        if self._path is not None:
            sessions = [_session_record(session) for session in self._all.values()]
            unfinished = self._path.with_name(self._path.name + ".part")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)  # an existing file may be another user's link or readable by others
            with open(unfinished, "x", opener=private) as file:
                json.dump({"schema": SCHEMA, "version": VERSION, "sessions": sessions}, file)
            unfinished.replace(self._path)


class ProcessRegistry:
    """Keeps sessions by id. A method with a `task_id` sees only the sessions of that task. If `task_id` is None, it
    sees the sessions of all tasks.

    `checkpoint_path` is the file from which the next registry recovers sessions; if it is None, nothing is saved. If
    `report_ends` is true, the end of every session is reported. `loop` is the event loop of the sessions, or None
    before the first session.
    """

    def __init__(
        self,
        *,
        checkpoint_path: Path | None = None,
        clock: Clock | None = None,
        notifications: Notifications | None = None,
        report_ends: bool = False,
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.notifications = notifications or Notifications()
        self._clock = clock or SystemClock()
        self._table = SessionTable(checkpoint_path, self._clock)
        self._report_ends = report_ends
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ProcessRegistry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following the sessions. Their processes continue, and the checkpoint is kept. Idempotent."""
        tasks = list(self._tasks)
        await end_tasks(*tasks)

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
        """Run a command line in a slot as a new session of the task `task_id` and the conversation `session_key`. If
        `session_key` is empty, the task's id is used instead.

        Raises `BlockingIOError` if too many of the task's processes are running, and the errors of `Slot.spawn`.
        """
        await self._table.make_room(task_id)
        environment = {**_ENVIRONMENT, **(env or {})}
        started_at = self._clock.wall()
        size = TERMINAL_SIZE if use_pty else None
        chosen = replace(watch or Watch(), on_exit=True) if self._report_ends else watch or Watch()
        process, status = await self._start_process(slot.spawn(command, cwd=cwd, env=environment, terminal=size))
        session = ProcessSession(
            self._table.new_id(task_id), command, task_id, session_key or task_id, cwd, slot.slot_id, started_at,
            process, status, chosen,
        )  # fmt: skip
        self._add(session)
        self._table.save()
        return session

    def get(self, session_id: str, task_id: str | None = None) -> ProcessSession | None:
        """Return the session with the id `session_id`; None if there is none or it belongs to another task."""
        session = self._table.get(session_id)
        return session if session is not None and task_id in (None, session.task_id) else None

    def sessions(self, task_id: str | None = None) -> list[ProcessSession]:
        """Return the sessions with their last known status, oldest first."""
        return list(self._table.of(task_id))

    # Actions with the names that Atropos and Hermes use. `ProcessSession` describes them. For an unknown session, the
    # reply's status is `not_found`.

    async def poll(self, session_id: str, since: int | None = None, *, task_id: str | None = None) -> Reply:
        return await self._with_session(session_id, task_id, lambda session: session.poll(since))

    async def read_log(
        self, session_id: str, offset: int = 0, limit: int = 200, *, task_id: str | None = None
    ) -> Reply:
        return await self._with_session(session_id, task_id, lambda session: session.log(offset, limit))

    async def wait(
        self, session_id: str, timeout_s: float | None = None, *, limit_s: float = 180.0, task_id: str | None = None
    ) -> Reply:
        return await self._with_session(session_id, task_id, lambda session: session.wait(timeout_s, limit_s))

    async def kill_process(self, session_id: str, *, task_id: str | None = None) -> Reply:
        return await self._with_session(session_id, task_id, ProcessSession.kill)

    async def write_stdin(self, session_id: str, data: str, *, end: bool = False, task_id: str | None = None) -> Reply:
        text = data.encode(errors="replace")
        return await self._with_session(session_id, task_id, lambda session: session.write(text, end=end))

    async def submit_stdin(self, session_id: str, data: str, *, end: bool = False, task_id: str | None = None) -> Reply:
        text = data.encode(errors="replace")
        return await self._with_session(session_id, task_id, lambda session: session.submit(text, end=end))

    async def list_sessions(self, task_id: str | None = None) -> list[Reply]:
        """Forget the sessions that ended more than `FINISHED_TTL_SECONDS` ago. Returns a summary of each remaining
        session, oldest first."""
        await self._table.prune(task_id)
        found = (_run_action(session, ProcessSession.summary) for session in self._table.of(task_id))
        return list(await asyncio.gather(*found))

    async def has_active_processes(self, task_id: str | None = None) -> bool:
        """Return whether any process of the task, or of any task if `task_id` is None, is running."""
        sessions = await self._table.refresh(task_id)
        return any(session.running for session in sessions)

    async def has_active_for_session(self, session_key: str, max_age_s: float | None = None) -> bool:
        """Return whether any process of the conversation `session_key` is running and has run for at most `max_age_s`
        seconds. If `max_age_s` is None, any running process counts."""
        running = [session for session in await self._table.refresh(None, session_key) if session.running]
        return any(max_age_s is None or session.status.duration_s <= max_age_s for session in running)

    def interrupt(self, *, task_id: str | None = None, session_key: str | None = None) -> int:
        """Interrupt all waits for sessions of the task `task_id` and the conversation `session_key`; None matches every
        task or conversation. Returns the number of interrupted waits."""
        count = 0
        for session in self._table.of(task_id):
            if session_key in (None, session.session_key):
                waiting = [interrupt for interrupt in session.waiting if not interrupt.done()]
                for interrupt in waiting:
                    interrupt.set_result(None)
                count += len(waiting)
        return count

    async def kill_all(self, task_id: str | None = None) -> int:
        """Kill every running process of the task. Returns the number of killed processes. A session whose slot is gone
        is marked as lost."""

        async def kill(session: ProcessSession) -> bool:
            try:
                return bool((await _run_action(session, ProcessSession.kill))["status"] == "killed")
            except (SlotLost, StaleLease) as error:
                session.lose(f"its slot is gone ({error})")
                return False

        return sum(await asyncio.gather(*(kill(session) for session in self._table.of(task_id))))

    async def recover_from_checkpoint(self, slots: Iterable[Slot]) -> int:
        """Add the checkpoint's sessions, except those whose ids are already in use. A session is marked as lost if its
        process is not in `slots`. Returns the number of added sessions that are not lost.

        Raises `ConfigError` if the file is not a valid checkpoint.
        """
        new = await self._table.recovered(slots)
        for session in new:
            self._add(session)
        self._table.save()
        return sum(not session.lost for session in new)

    def forget(self, task_id: str) -> None:
        """Drop all sessions of a task, because the task's slot has ended."""
        self._table.drop(task_id)

    async def _start_process(self, spawning: Awaitable[Process]) -> _Started:
        """Start a process and get its status. If the caller is cancelled, the process is killed."""

        async def start() -> _Started:
            process = await spawning
            return process, await process.status()

        async def end() -> None:
            try:
                await (await starting)[0].kill(0.0)
            except Exception as error:
                logger.debug("a process whose start was cancelled did not start, or has ended: %s", error)

        starting = asyncio.ensure_future(start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._in_background(end()))
            raise

    def _in_background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _add(self, session: ProcessSession) -> None:
        self._table.add(session)
        if session.watch and not session.lost:
            self._in_background(Follower(session, self._on_event, self._clock).run())
        if session.running:
            self.notifications.add_watcher(session)
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            with _known_lock:
                _known.add(self)

    async def _with_session(
        self, session_id: str, task_id: str | None, action: Callable[[ProcessSession], Awaitable[Reply]]
    ) -> Reply:
        session = self.get(session_id, task_id)
        return not_found(session_id) if session is None else await _run_action(session, action)

    def _on_event(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        self.notifications.add_event(session, kind, text, exit_code)
        # The follower's cursor is a part of the record, so that a new registry does not report the same event again.
        self._table.save()


async def _run_action(session: ProcessSession, action: Callable[[ProcessSession], Awaitable[Reply]]) -> Reply:
    """Run an action and return its reply, which has the status `lost` if the process cannot be reached any more."""
    try:
        return await action(session)
    except ProcessLookupError:
        session.lose(FORGOTTEN)
    except SessionLost:
        pass
    error = f"The process of {session.id} cannot be reached any more: {session.lost}."
    return {"session_id": session.id, "command": session.command, "status": "lost", "error": error}


def not_found(session_id: str) -> Reply:
    """Return the reply to an action on an unknown session."""
    return {"session_id": session_id, "status": "not_found", "error": f"No process with ID {session_id}"}


def living() -> list[ProcessRegistry]:
    """Return the registries of this Python process that have had a session and whose event loop is running. May be
    called from any thread."""
    with _known_lock:
        return [each for each in _known if each.loop is not None and each.loop.is_running()]


def _session_record(session: ProcessSession) -> dict[str, JSON]:
    record: dict[str, JSON] = {name: getattr(session, name) for name in _KEPT}
    watch = {item.name: getattr(session.watch, item.name) for item in fields(Watch)}
    watch["address"] = dict(session.watch.address)
    return {**record, "status": asdict(session.status), "watch": watch}


def _read_records(path: Path) -> list[dict[str, JSON]]:
    """Return the session records of a checkpoint, or [] if there is no file. Raises `ConfigError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema, version = content["schema"], content["version"]
        records: list[dict[str, JSON]] = content["sessions"]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a checkpoint of processes ({error}); move it away to continue") from None
    if schema != SCHEMA or version > VERSION:
        raise ConfigError(
            f"{path} has the format {schema} {version}, but this program reads {SCHEMA} up to version {VERSION}; move "
            "it away to continue"
        )
    return records


async def _recovered(record: dict[str, JSON], running: dict[str, dict[int, Process]]) -> ProcessSession:
    """Return the session of a record, with its process if the slot still has it; otherwise `lost` has the reason."""
    known, status = {name: record[name] for name in _KEPT}, ProcessStatus(**record["status"])
    watch = Watch(**{**record["watch"], "patterns": tuple(record["watch"]["patterns"])})
    session = ProcessSession(**known, process=None, status=status, watch=watch, detached=True)
    if session.lost:
        return session
    process = running.get(session.slot_id, {}).get(status.process_id)
    if session.slot_id not in running:
        session.lost = f"its slot {session.slot_id} was gone after a restart"
    elif process is None:
        session.lost = f"its slot {session.slot_id} had no record of it after a restart"
    else:
        found = await process.status()
        if any(getattr(found, name) != getattr(status, name) for name in _IDENTITY):
            session.lost = f"process {found.pid} of {session.slot_id} is a different process after a restart"
        else:
            session.process, session.status = process, found
    return session
