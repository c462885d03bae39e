"""Runs environments from Python: `run`, `run_sync` and `stream` take as arguments what `palaestra run` takes as flags.
All three call `envs.run.run.run`, as the command line does. Arguments are named like the settings, and errors name
arguments, not flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, cast

from palaestra.envs.config.dotenv import exported, read_keys, shell_variables
from palaestra.envs.discovery import form_of, load_environment
from palaestra.envs.form import Form
from palaestra.envs.run.command import command_line, take_variables
from palaestra.envs.run.run import RunReport, Steering
from palaestra.envs.run.run import run as run_line
from palaestra.rollouts.events import GroupFinished, Handlers
from palaestra.rollouts.finished_run import Run
from palaestra.rollouts.journal.reader import RUNS
from palaestra.rollouts.records import Group
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.io.threads import run_blocking
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import is_loaded
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import ServerBaseline
from palaestra_tokens.server_group import Server

logger = logging.getLogger("palaestra")

_WAITING_GROUPS = 64
"""The maximum number of finished groups that `stream` holds for a slow consumer before it pauses the run."""


async def run(
    env: object,
    *,
    policy: str | None = None,
    model: str | None = None,
    base_url: str | None = None,
    server: Server | Sequence[Server] | None = None,
    tasks: int | None = None,
    group_size: int | None = None,
    evaluate: bool = False,
    resume: str | Path | None = None,
    folder: str | Path = RUNS,
    progress: bool = False,
    **settings: JSON,
) -> Run:
    """Run an environment to the end and return the run.

    `env` is a function environment (also one called with arguments), a class environment, or text that `palaestra run`
    accepts: a name, a file, `file.py:name`. The agent is a scripted `policy` ("oracle", "noop", "patch:FILE",
    "replay:RUN"), the `model` at `base_url`, or a `server`: an `APIServerConfig`, an engine that the run starts and
    closes (`TransformersEngine`), or a list of several configurations or engines. At most `tasks` groups of
    `group_size` rollouts are run. With `evaluate`, the environment's evaluation is run instead, by default on the
    held-out tasks (on all tasks, if none are held out). `settings` are further settings of the environment or the
    server, and the environment's own parameters (`concurrency`, `max_agent_turns`, `api_key`, …).

    The run is stored in a new folder below `folder`; `resume` names the folder of a run to continue. `progress` prints
    to stderr what the command prints. Raises `ConfigError` for an unusable argument, and `EngineError` or
    `SandboxError` if the run cannot start. The result includes failed rollouts.
    """
    dotenv = read_keys(Path.cwd())
    with python_names(), exported(dotenv):
        roll_out = assembled(
            env,
            "evaluate" if evaluate else "process",
            dotenv,
            server=server,
            folder=folder,
            progress=progress,
            policy=policy,
            model=model,
            base_url=base_url,
            tasks=tasks,
            group_size=group_size,
            resume=resume,
            **settings,
        )
        report = await roll_out()
    return Run(report.folder)


def run_sync(env: object, **arguments: JSON) -> Run:
    """Call `run` from code that is not async, or from a notebook, where an event loop is already running. Raises
    `ConfigError` if it is called at the top level of a file that another run is loading."""
    # The caller's frame: a file that another run loads must not start a run of its own while it is loaded.
    frame = sys._getframe(1)
    if is_loaded(frame.f_globals.get("__name__", "")) and frame.f_code.co_name == "<module>":
        raise ConfigError(
            f"{frame.f_code.co_filename} starts a run while another run loads it; put the call under "
            'if __name__ == "__main__"'
        )
    return run_blocking(run(env, **arguments))


async def stream(env: object, **arguments: JSON) -> AsyncIterator[Group]:
    """Roll out an environment, and yield each group when it has finished and is on disk. Arguments and errors are those
    of `run`, without `evaluate`. Closing the iterator stops the run; finished groups are kept.

    No further group starts while 64 finished groups wait for the caller.
    """
    dotenv = read_keys(Path.cwd())
    with exported(dotenv):
        with python_names():
            roll_out = assembled(env, "process", dotenv, **arguments)
        finished = _FinishedGroups()
        running = asyncio.create_task(roll_out(steering=Steering([finished], finished.has_room)), name="run")
        # Also if the run fails or never starts: otherwise the loop below would wait for a group without end.
        running.add_done_callback(lambda _: finished.close())
        try:
            async for group in finished:
                yield group
            with python_names():
                await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, PalaestraError):
                await running


class _FinishedGroups:
    """A subscriber that holds finished groups until the caller takes them."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False

    def handlers(self) -> Handlers:
        return {GroupFinished: self._on_group_finished}

    def _on_group_finished(self, event: GroupFinished) -> None:
        self._groups.append(event.group)
        self._changed.set()

    def close(self) -> None:
        """Declare that no more groups follow."""
        self._closed = True
        self._changed.set()

    async def has_room(self) -> bool:
        """Wait until another group may start. Always returns True."""
        while len(self._groups) >= _WAITING_GROUPS:
            self._taken.clear()
            await self._taken.wait()
        return True

    async def __aiter__(self) -> AsyncIterator[Group]:
        while True:
            while self._groups:
                group = self._groups.pop(0)
                self._taken.set()
                yield group
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


def environment_form(env: object) -> Form:
    """Return the form of an environment that a Python caller names. Raises `ConfigError`."""
    if isinstance(env, str | Path):
        return load_environment(str(env), Path.cwd())
    form = form_of(env)
    form.reference = form.reference or _reference(env)
    return form


def _reference(env: object) -> str:
    """Return the reference by which a replay or a resumed run finds an environment that a Python program passed; empty
    if the environment has no file or is not at the top level of its file."""
    source = getattr(env, "source", env)
    name, path = getattr(source, "__name__", ""), None
    with contextlib.suppress(OSError, TypeError):  # a class may be defined in a notebook
        path = inspect.getsourcefile(cast("type", source))
    at_top = getattr(source, "__qualname__", "") == name
    return f"{Path(path).resolve()}:{name}" if at_top and path and Path(path).is_file() else ""


def assembled(
    env: object,
    command: str,
    dotenv: Mapping[str, str],
    /,
    *,
    server: Server | Sequence[Server] | None = None,
    folder: str | Path = RUNS,
    progress: bool = False,
    **arguments: JSON,
) -> partial[Coroutine[Any, Any, RunReport]]:
    """Return a function that runs the environment with these settings and takes further arguments of
    `envs.run.run.run`. The variables of `.env` must be exported already. Raises `ConfigError`."""
    form = environment_form(env)
    servers = [server] if isinstance(server, ServerBaseline | ServerEngine) else list(server or ())
    engines = [each for each in servers if isinstance(each, ServerEngine)]
    if engines and len(engines) < len(servers):
        raise ConfigError("server mixes settings and engines: pass one kind, or make an engine for each")
    configs = [each.config if isinstance(each, ServerEngine) else each for each in servers]
    line = command_line(form, "palaestra.run", command, configs)
    parsed = line.take(command, arguments, shell_variables(dotenv), dotenv)
    take_variables(parsed, dotenv)
    for notice in parsed.notices:
        logger.warning("%s", notice)
    # A library prints nothing unless its caller asks for it.
    shown = sys.stderr if progress else StringIO()
    return partial(run_line, form, parsed, root=Path(folder), stream=shown, engines=engines)
