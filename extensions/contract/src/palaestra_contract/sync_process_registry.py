"""`process_registry`: access to background processes by session id, for synchronous code. The project's interface
contract defines it.

    session = process_registry.spawn_local("python -m http.server", task_id="t1")
    process_registry.poll(session.id)

It is for reward functions and scripts. Each rollout, and the session of `handle_function_call`, has its own registry in
this process; a call goes to the registry that has the session.

Invariant: a call runs on the loop of its registry. A call works in threads, in code without a loop, and in synchronous
reward functions and hooks. In any other task of a running loop, it raises `RuntimeError`, which names the method to
await instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from collections.abc import Callable, Coroutine, Mapping
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from palaestra_contract.tools.function_calls import DEFAULT_TASK, default_session
from palaestra_slots.core.errors import SlotLost, StaleLease
from palaestra_slots.core.io.threads import running_loop
from palaestra_slots.core.sync_bridge import wait_on
from palaestra_slots.processes.registry import ProcessRegistry, living, not_found
from palaestra_slots.processes.session import ProcessSession, Reply, Watch
from palaestra_slots.sandbox.slot import WORKSPACE, Slot

P = ParamSpec("P")
T = TypeVar("T")


def _of_session(
    method: Callable[Concatenate[ProcessRegistry, str, P], Coroutine[object, object, Reply]],
) -> Callable[Concatenate[SharedProcesses, str, P], Reply]:
    """Return a method that calls the same method of the registry that has the session."""

    @functools.wraps(method)
    def call(self: SharedProcesses, session_id: str, /, *args: P.args, **options: P.kwargs) -> Reply:
        having = [(session.started_at, each) for each in living() if (session := each.get(session_id)) is not None]
        if not having:
            return not_found(session_id)
        registry = max(having, key=lambda pair: pair[0])[1]  # the latest, if several runs have this session
        try:
            return _run_on_loop(
                registry, functools.partial(method, registry, session_id, *args, **options), method.__name__
            )
        except (SlotLost, StaleLease) as error:
            return {"session_id": session_id, "status": "lost", "error": f"The process ended with its slot: {error}."}

    return call


class SharedProcesses:
    """All sessions of this process. Methods and replies are those of `ProcessRegistry`, without `await`."""

    def __init__(self) -> None:
        self._of_slots: WeakKeyDictionary[Slot, ProcessRegistry] = WeakKeyDictionary()

    def spawn_local(
        self,
        command: str,
        cwd: str | None = None,
        task_id: str = "",
        session_key: str = "",
        env_vars: Mapping[str, str] | None = None,
        use_pty: bool = False,
        *,
        watch: Watch | None = None,
    ) -> ProcessSession:
        """Start a command line in the slot that `handle_function_call` uses for the task.

        Raises BlockingIOError if too many processes of the task run, and the errors of `Slot.spawn` and of leasing.
        """
        options = {"session_key": session_key, "env": env_vars, "use_pty": use_pty, "watch": watch}
        return default_session().spawn(task_id or DEFAULT_TASK, command, cwd=cwd or WORKSPACE, **options)

    def spawn_via_env(
        self,
        env: Slot,
        command: str,
        cwd: str | None = None,
        task_id: str = "",
        session_key: str = "",
        timeout: float = 10,
        *,
        watch: Watch | None = None,
    ) -> ProcessSession:
        """Start a command line in a slot of any backend. The session belongs to `task_id`, or to the slot's trajectory
        if `task_id` is empty.

        If the slot has no `loop`, it must belong to the loop on which the calling reward function or hook runs. Raises
        TimeoutError after `timeout` seconds, and the errors of `ProcessRegistry.spawn`.
        """
        registry = self._of_slots.get(env)
        if registry is None:
            registry = self._of_slots[env] = ProcessRegistry(notifications=default_session().told)

        async def spawn() -> ProcessSession:
            task, where = task_id or env.trajectory_id, cwd or WORKSPACE
            async with asyncio.timeout(timeout):
                return await registry.spawn(env, command, task_id=task, cwd=where, session_key=session_key, watch=watch)

        loop = getattr(env, "loop", None) or running_loop()
        if loop is None:
            raise RuntimeError(f"{env!r} does not name its loop: await ProcessRegistry.spawn on that loop instead")
        return wait_on(loop, spawn, "ProcessRegistry.spawn")

    def recover_from_checkpoint(self) -> int:
        """Take over the processes of an earlier session, if this one keeps slots (`use_session`). Returns their number.

        Raises `ConfigError` for a checkpoint that cannot be read.
        """
        return default_session().recover()

    @property
    def completion_queue(self) -> queue.Queue[Reply]:
        """The reports on watched processes; see `Notifications`."""
        return default_session().told.completion_queue

    @property
    def pending_watchers(self) -> list[Reply]:
        """The watched sessions that report their output at intervals, until the caller removes them."""
        return default_session().told.pending_watchers

    def get(self, session_id: str) -> ProcessSession | None:
        """Return the session with this id, or None. If several runs have such a session, return the latest."""
        found = [session for each in living() if (session := each.get(session_id)) is not None]
        return max(found, key=lambda session: session.started_at, default=None)

    poll = _of_session(ProcessRegistry.poll)
    read_log = _of_session(ProcessRegistry.read_log)
    kill_process = _of_session(ProcessRegistry.kill_process)
    write_stdin = _of_session(ProcessRegistry.write_stdin)
    submit_stdin = _of_session(ProcessRegistry.submit_stdin)
    _wait_for = _of_session(ProcessRegistry.wait)

    def wait(self, session_id: str, timeout: float | None = None) -> Reply:
        """Wait until the process has ended or the wait is interrupted, for at most `timeout` seconds and never more
        than 180."""
        return self._wait_for(session_id, timeout)

    def list_sessions(self, task_id: str | None = None) -> list[Reply]:
        """Return all sessions of the task, or of all tasks."""
        return [each for listed in self._each(ProcessRegistry.list_sessions, task_id) for each in listed]

    def has_active_processes(self, task_id: str | None = None) -> bool:
        """Return whether any process of the task runs."""
        return any(self._each(ProcessRegistry.has_active_processes, task_id))

    def has_active_for_session(self, session_key: str, max_age_s: float | None = None) -> bool:
        """Return whether the conversation has a running process, at most `max_age_s` seconds old if that is given."""
        return any(self._each(ProcessRegistry.has_active_for_session, session_key, max_age_s))

    def interrupt(self, task_id: str | None = None, session_key: str | None = None) -> int:
        """End the waits for processes, but not the processes themselves. `task_id` and `session_key`, if given, limit
        this to the processes of that task and that conversation. Returns the number of waits."""

        async def interrupt_waits(registry: ProcessRegistry) -> int:
            return registry.interrupt(task_id=task_id, session_key=session_key)

        return sum(self._each(interrupt_waits))

    def kill_all(self, task_id: str | None = None) -> int:
        """End every process of the task, or of all tasks. Returns how many were running."""
        return sum(self._each(ProcessRegistry.kill_all, task_id))

    def _each(
        self,
        method: Callable[Concatenate[ProcessRegistry, P], Coroutine[object, object, T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Return the answers of all registries, except those whose slot has ended."""
        answers = []
        for registry in living():
            with contextlib.suppress(SlotLost, StaleLease):
                answers.append(
                    _run_on_loop(registry, functools.partial(method, registry, *args, **options), method.__name__)
                )
        return answers


process_registry = SharedProcesses()
"""The global object that the project's interface contract defines."""


def _run_on_loop(registry: ProcessRegistry, work: Callable[[], Coroutine[object, object, T]], method: str) -> T:
    """Run the work on the registry's own loop."""
    assert registry.loop is not None  # `living` only lists registries that have had a session
    return wait_on(registry.loop, work, f"ProcessRegistry.{method}")
