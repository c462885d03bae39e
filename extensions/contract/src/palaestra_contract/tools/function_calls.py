"""Tools as plain function calls: `handle_function_call` and related functions, as the project's interface contract
defines them.

    reply = handle_function_call("terminal", {"command": "ls"}, task_id="t1")   # JSON text
    cleanup_vm("t1")

Each task id has its own slot on this machine, created by the first call that needs it and kept until it is cleaned up.
Rollouts use a slot of their run's pool instead. A `ToolSession` offers the same as an object, with slots of its own.

Invariants: nothing starts before the first call; calls of one task run in order, calls of different tasks concurrently.
No slot outlives the process, however it ends, unless the backend keeps slots (`LocalBackend(service=…)`) for the next
session. The calls are synchronous and use their own loop; on a running loop, use `handle_function_call_async`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self, TypeVar

from palaestra.tools.arguments import InvalidArguments
from palaestra.tools.mcp.mcp_config import servers_of
from palaestra.tools.mcp.run_servers import ServersOnDemand
from palaestra.tools.registry.build import chosen_tools, unrestricted
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRecordings, ToolRuntime, tools_of_task
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import Tool
from palaestra_contract.tools.executor import DelegationSource, ToolExecutorConfig
from palaestra_contract.tools.session_tasks import SessionTasks, ToolSessionConfig
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.sync_bridge import wait_for_sync
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.notifications import Notifications
from palaestra_slots.processes.session import ProcessSession
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend

if TYPE_CHECKING:
    from palaestra.envs.config.fields import HermesAgentEnvConfig

T = TypeVar("T")

DEFAULT_TASK = "default"
_CLOSE_S = 30.0


class _SessionLoop:
    """The event loop of a session, in a thread of its own that starts with the first work. `on_start` then runs on the
    loop."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self.events = asyncio.new_event_loop()
        self._on_start = on_start
        self._thread = threading.Thread(target=self.events.run_forever, name="tool-session", daemon=True)
        self._starting = threading.Lock()
        self._closed = False

    @property
    def runs(self) -> bool:
        """Whether there has been work, and the loop has not ended."""
        return self._thread.is_alive()

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine, and block until it ends. Raises `SandboxError` if the loop is closed."""
        future = self.post(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted caller leaves no command running
            raise

    def post(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine. Raises `SandboxError` if the loop is closed."""
        with self._starting:
            if self._closed:
                work.close()
                raise SandboxError("this tool session is closed")
            if not self._thread.is_alive():
                self._thread.start()
                self.events.call_soon_threadsafe(self._on_start)
        return asyncio.run_coroutine_threadsafe(work, self.events)

    def stop(self, end: Callable[[], Coroutine[object, object, None]]) -> None:
        """Run `end` if there was work, and stop the loop. Idempotent; a stopped loop accepts no work."""
        with self._starting:
            # `post` reads this under the same lock, so no work begins after `end`.
            already, self._closed = self._closed, True
        if not already and self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self.events).result(_CLOSE_S)
            self.events.call_soon_threadsafe(self.events.stop)
            self._thread.join(_CLOSE_S)

    def close(self) -> None:
        """Close the loop unless it still runs."""
        # A loop that did not stop in time still runs in its thread, and asyncio refuses to close it.
        if not self.events.is_running():
            self.events.close()


class ToolSession:
    """A pool of slots by task id, with its own event loop in a thread. Close it, or use it in a `with` statement.

    `registry` has every tool by default, with keys from `settings`; a tool that cannot be used answers with the reason.
    `shared` are objects that the tools of all tasks share, such as `Approvals`. `delegates` do the work of
    `delegate_task`. `world`, from `open_world`, records or replays the calls of tools with `touches_world`; the session
    closes it. `limits` are those of the pool. `told` has the notifications of background processes. If the backend
    keeps slots, closing the session does not end them: they end by `release`, or after `idle_s`.
    """

    def __init__(
        self,
        registry: ToolRegistry | None = None,
        *,
        config: ToolExecutorConfig | None = None,
        backend: Backend | None = None,
        settings: ToolSettings | None = None,
        shared: Iterable[object] = (),
        delegates: DelegationSource | None = None,
        world: ToolRecordings | None = None,
        limits: SlotPoolConfig | None = None,
    ) -> None:
        own = config if isinstance(config, ToolSessionConfig) else ToolSessionConfig()
        self.settings = settings or ToolSettings()
        self.told = Notifications()
        self._world = world
        replayed = world is not None and world.replayed
        tools = unrestricted(settings=settings, replayed=replayed) if registry is None else registry.with_tools()
        self._tasks = SessionTasks(
            tools,
            config,
            backend or LocalBackend(),
            self.told,
            limits,
            own=own,
            shared=shared,
            delegates=delegates,
            world=world,
        )
        self._registry = self._tasks.registry
        self._servers = ServersOnDemand(servers_of(own.mcp or {}, own.variables), self._registry)
        self._left_out = () if delegates is not None else ("delegate_task",)
        self._loop = _SessionLoop(self._tasks.expire_idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(
        self, name: str, arguments: Mapping[str, JSON] | str, task_id: str | None = None, user_task: str | None = None
    ) -> str:
        """Run one call in its task's slot and return the JSON text that a model would read.

        Mistakes and failures of a tool are replies. Raises `InfraError`, and `TaskError` if the task's image cannot be
        used.
        """
        return self._loop.wait(self._call_tool(name, arguments, task_id or DEFAULT_TASK))

    async def handle_async(
        self, name: str, arguments: Mapping[str, JSON] | str, task_id: str | None = None, user_task: str | None = None
    ) -> str:
        """Do what `handle` does, asynchronously. Cancelling the call kills the command."""
        return await asyncio.wrap_future(self._loop.post(self._call_tool(name, arguments, task_id or DEFAULT_TASK)))

    def definitions(
        self, enabled_toolsets: Iterable[str] | None = None, disabled_toolsets: Iterable[str] | None = None
    ) -> list[dict[str, JSON]]:
        """Return the OpenAI definitions of the tools that work here. Starts all MCP servers; their toolsets are
        `mcp-NAME`.

        Raises `ConfigError` for an unknown toolset, and `ToolServerError` for a required server that does not start.
        """
        return self._loop.wait(self._definitions(enabled_toolsets, disabled_toolsets))

    def spawn(self, task_id: str, command: str, **options: JSON) -> ProcessSession:
        """Start a background process in the task's slot; `options` and errors are those of `ProcessRegistry.spawn`."""
        return self._loop.wait(self._spawn_session(task_id, command, options))

    def recover(self) -> int:
        """Take over the slots of an earlier session. The first call of a tool also does this. Returns the number of
        background processes found.

        Raises `ConfigError` for an unreadable checkpoint, and `SandboxError` if another process uses the slots.
        """
        return self._loop.wait(self._tasks.recover())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop to which the session's slots belong."""
        return self._loop.events

    def post(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine on the session's loop. Raises `SandboxError` if the session is closed."""
        return self._loop.post(work)

    def task_tools(self, task_id: str) -> ToolRuntime:
        """Return the tools of a task, bound to its slot, for coroutines on the session's loop."""
        return self._tasks.tools(task_id).tools

    def override(self, task_id: str, overrides: Mapping[str, JSON]) -> None:
        """Set the image (`IMAGES`) and the directory (`cwd`) of the task's next slot. Raises `ConfigError`."""
        self._tasks.slots.override(task_id, overrides)

    def clear_override(self, task_id: str) -> None:
        """Remove a task's overrides."""
        self._tasks.slots.clear_override(task_id)

    def release(self, task_id: str) -> None:
        """End the task's slot with everything that runs in it. The task's next call gets a new slot."""
        if self._loop.runs or self._tasks.are_kept:
            self._loop.wait(self._tasks.end(task_id))

    def tasks(self) -> list[str]:
        """Return the ids of the tasks that have a slot now."""
        return self._loop.wait(self._tasks.holders()) if self._loop.runs or self._tasks.are_kept else []

    def close(self) -> None:
        """End the loop, and every slot that the backend does not keep. Idempotent; a closed session accepts no
        calls."""
        self._loop.stop(self._end_session)
        if self._world is not None:
            self._world.close()
        self._loop.close()

    async def _definitions(
        self, enabled: Iterable[str] | None, disabled: Iterable[str] | None
    ) -> list[dict[str, JSON]]:
        await self._servers.start_all()
        chosen = chosen_tools(self._registry.tools(), enabled, disabled)
        return [tool.schema.to_dict() for tool in chosen if tool.missing() is None and tool.name not in self._left_out]

    async def _call_tool(self, name: str, arguments: Mapping[str, JSON] | str, task_id: str) -> str:
        name = self._registry.known_as(name)
        cwd = self._tasks.slots.directory(task_id)
        if cwd is not None and name == "terminal" and self._registry.get(name) is not None:
            with contextlib.suppress(InvalidArguments):  # the call will be refused because of its arguments
                arguments = {"workdir": cwd, **self._registry.argument_schema(name).parse(arguments)}
        await self._tasks.recover()
        with self._tasks.in_use(task_id):
            await self._servers.for_call(name)
            return (await self._tasks.tools(task_id).call(name, arguments)).text

    async def _spawn_session(self, task_id: str, command: str, options: Mapping[str, JSON]) -> ProcessSession:
        await self._tasks.recover()
        with self._tasks.in_use(task_id):
            return await self._tasks.tools(task_id).spawn(command, **options)

    async def end_task(self, task_id: str) -> None:
        """Release a task's slot, as `release` does. Await this method on the session's loop."""
        await self._tasks.end(task_id)

    async def _end_session(self) -> None:
        await self._tasks.aclose()
        await self._servers.aclose()
        await self._tasks.slots.aclose()


_own: ToolSession | None = None
_chosen = False  # whether `use_session` set it
_lent: list[Callable[[], ToolSession]] = []
_choosing = threading.Lock()


@contextlib.contextmanager
def lent_session(make: Callable[[], ToolSession]) -> Iterator[None]:
    """Make a session the one that `handle_function_call` and `process_registry` use while the block runs, unless
    `use_session` sets one. `make` is called when the session is first needed, so that a backend which cannot be used
    is an error of the calls that use it. The session is closed at the end of the block."""
    session = functools.cache(make)
    _lent.append(session)
    try:
        yield
    finally:
        _lent.remove(session)
        if session.cache_info().currsize:
            session().close()


def default_session() -> ToolSession:
    """Return the process's session: the one that `use_session` set, the one that the run lends, or else a session with
    the settings of the process's variables. It is closed when the interpreter exits."""
    global _own
    with _choosing:
        if _lent and not _chosen:
            return _lent[-1]()
        if _own is None:
            _own = _session_of_variables()
            atexit.register(_own.close)
        return _own


def _session_of_variables() -> ToolSession:
    """Return a session that nobody configured. Existing programs configure it with the variables of the process, which
    are those of a run. Raises `ConfigError`."""
    if not any(name.startswith(("TERMINAL_", "PALAESTRA_ENV_")) for name in os.environ):
        return ToolSession()
    from palaestra.envs.config.fields import HermesAgentEnvConfig
    from palaestra.envs.config.layers import read_environ
    from palaestra_slots.core.config import merge

    config = merge(HermesAgentEnvConfig, [read_environ(os.environ, "env", HermesAgentEnvConfig)]).value
    config.check_runnable()
    return configured_session(config, (), None)


def configured_session(
    config: HermesAgentEnvConfig, tools: Iterable[Tool], world: ToolRecordings | None
) -> ToolSession:
    """Return a session with the settings of a run. `tools` are the environment's own, in addition to all others."""
    # Imported here, as above, because most programs set no variable and need nothing of runs.
    from palaestra.envs.config.build import pool_limits
    from palaestra_contract.own_tasks import policy
    from palaestra_slots.sandbox.backends.registry import make_backend

    replayed = world is not None and world.replayed
    return ToolSession(
        unrestricted(ToolRegistry(tools, settings=config, replayed=replayed)),
        config=policy(config),
        backend=make_backend(config.slot_backend, config),
        settings=config,
        world=world,
        limits=pool_limits(config, config.slot_backend),
    )


def use_session(session: ToolSession) -> None:
    """Make `session` the one that `handle_function_call` and `process_registry` use, and close the previous session."""
    global _own, _chosen
    with _choosing:
        before, _own, _chosen = _own, session, True
    atexit.register(session.close)
    # After the lock is released: closing waits for calls, which may need the lock for `default_session`.
    if before is not None and before is not session:
        before.close()


def handle_function_call(
    function_name: str,
    function_args: Mapping[str, JSON] | str,
    task_id: str | None = None,
    user_task: str | None = None,
) -> str:
    """Run one tool call in the task's slot and return the JSON text for the model. Code of a rollout that names the
    rollout's task, or no task, uses the rollout's tools if `function_args` is a mapping. `user_task` has no effect."""
    if (found := tools_of_task(task_id)) is not None and isinstance(function_args, Mapping):
        call = found.tools().handle(function_name, function_args)
        return wait_for_sync(call, loop=found.loop, twin="handle_function_call_async")
    return default_session().handle(function_name, function_args, task_id, user_task)


async def handle_function_call_async(
    function_name: str,
    function_args: Mapping[str, JSON] | str,
    task_id: str | None = None,
    user_task: str | None = None,
) -> str:
    """Do what `handle_function_call` does, asynchronously. `HermesAgentLoop` calls this function by default."""
    if (found := tools_of_task(task_id)) is not None and isinstance(function_args, Mapping):
        return await found.tools().handle(function_name, function_args)
    return await default_session().handle_async(function_name, function_args, task_id, user_task)


def register_task_env_overrides(task_id: str, overrides: Mapping[str, JSON]) -> None:
    """Set the image (`IMAGES`, in the form of `SlotSpec.image`) and the directory (`cwd`) of the task's next slot.
    Raises `ConfigError`. If the image cannot be used, the task's calls raise `TaskError`, and a rollout that makes them
    has no score."""
    default_session().override(task_id, overrides)


def clear_task_env_overrides(task_id: str) -> None:
    """Remove a task's overrides."""
    default_session().clear_override(task_id)


def cleanup_vm(task_id: str) -> None:
    """End a task's slot and everything in it."""
    default_session().release(task_id)


def cleanup_all_environments() -> int:
    """End the slots of all tasks. Returns how many there were."""
    tasks = default_session().tasks()
    for task_id in tasks:
        cleanup_vm(task_id)
    return len(tasks)


def get_active_environments_info() -> dict[str, JSON]:
    """Return `{"count", "task_ids"}` of the tasks that have a slot now."""
    tasks = default_session().tasks()
    return {"count": len(tasks), "task_ids": tasks}
