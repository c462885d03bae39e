"""`Session`: a run that stays open, whose tasks the caller chooses while it runs; and `SyncSession`, which blocks.

    async with Session(count_lines(n=8), policy="oracle") as session:
        groups = await session.roll_out("lines-3", "lines-5", group_size=4)

Sessions are for trainers, which at each step roll out new tasks with new weights, through the same slots and into one
record. A program with its own agent loop can play rollouts itself (`Play`, `SyncPlay`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from palaestra.envs.config.dotenv import exported, read_keys
from palaestra.envs.run.library import assembled
from palaestra.envs.run.run import Steering
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.runner import Runner, Totals, first_failure
from palaestra_slots.core.config import nearest, python_names
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError, PrepareError
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import JSON, Message, Task
from palaestra_tokens.engine import AssistantMessage, FunctionCall, ToolCallMessage
from palaestra_tokens.engines.caller import PLAYER, CallerEngine, Player
from palaestra_tokens.server_group import Server

_MOST_KNOWN = 10_000
"""How many known tasks in a row mean that an environment has no others."""
CALLER = "caller"
"""The policy of sessions whose agent is the calling program."""


class Session:
    """A run that stays open. Use it in an `async with` block, or in a `with` block, which yields a `SyncSession`.
    Arguments are those of `palaestra.run`, except `evaluate`; `group_size` is the default of `roll_out`. With
    `policy="caller"`, the program plays the rollouts itself (`play`).

    Entering the block raises what `palaestra.run` raises if the run cannot start. Leaving the block waits for the
    groups in flight, cancels rollouts that the program plays, and finishes the record. If the block fails with an error
    that is not a `PalaestraError`, the groups in flight are cancelled too.
    """

    def __init__(
        self,
        env: object,
        *,
        policy: str | None = None,
        server: Server | Sequence[Server] | None = None,
        **arguments: JSON,
    ) -> None:
        self._played = policy == CALLER
        if self._played:
            if any(each is not None for each in (server, arguments.get("model"), arguments.get("base_url"))):
                raise ConfigError(f"policy={CALLER!r} excludes model, base_url and server, as the program is the agent")
            policy, server = None, CallerEngine()
        self._env = env
        self._arguments = arguments | {"policy": policy, "server": server}
        self._entered = ExitStack()
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._drawing = asyncio.Lock()
        self._numbers = itertools.count()
        self._drawn: dict[str, Task] = {}
        self._plays: list[Play] = []

    async def __aenter__(self) -> Self:
        dotenv = read_keys(Path.cwd())
        with python_names(), ExitStack() as entered:
            entered.enter_context(exported(dotenv))
            roll_out = assembled(self._env, "process", dotenv, **self._arguments)
            self._running = asyncio.create_task(roll_out(steering=Steering(drive=self._drive)), name="session")
            opened = asyncio.create_task(self._opened.wait())
            try:
                # The run may fail before it is open, and then `opened` is never set.
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
        for play in self._plays:
            play._group.cancel()  # a rollout that the program does not finish would never end
        with python_names(), self._entered:
            if kind is None:
                await self._running
                return
            if not issubclass(kind, PalaestraError):
                self._running.cancel()
            with suppress(asyncio.CancelledError, PalaestraError):  # the error of the block takes precedence
                await self._running

    def __enter__(self) -> SyncSession:
        self._sync = SyncSession(self)
        return self._sync.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._sync.__exit__(kind, *exc)

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._path

    async def tasks(self, limit: int | None = None) -> list[Task]:
        """Return the first `limit` tasks of the environment, or all tasks if `limit` is None. An environment that
        yields tasks without end needs a limit."""
        async with self._drawing:
            while limit is None or len(self._drawn) < limit:
                if await self._draw() is None:
                    break
        return list(itertools.islice(self._drawn.values(), limit))

    async def roll_out(self, *tasks: str | Task, group_size: int | None = None) -> list[Group]:
        """Roll out the tasks concurrently, and return one finished group per task, in the same order. A task may be
        given by its id.

        The groups include failed rollouts. Raises `ConfigError` for an unknown task or the policy "caller". Raises
        `EngineUnavailable` or `RunStopped` when the run stops; the session can then only be closed.
        """
        if self._played:
            raise ConfigError(f"a session with policy={CALLER!r} has no model; use play")
        chosen = [await self._find(task) if isinstance(task, str) else task for task in tasks]
        with python_names():
            return await asyncio.gather(
                *(self._groups.create_task(self._play_group(task, group_size)) for task in chosen)
            )

    async def tools(self, task: str | Task) -> list[JSON]:
        """Return the definitions of the tools that an agent has for a task."""
        found = await self._find(task) if isinstance(task, str) else task
        return self._runner.env.kit(found, random.Random(0)).definitions

    async def play(self, task: str | Task) -> Play:
        """Begin a rollout whose agent is the caller. The rollout is the only one of its group. Raises `ConfigError` for
        an unknown task, or for a session with a different policy."""
        if not self._played:
            raise ConfigError(f"play needs a session with policy={CALLER!r}")
        found = await self._find(task) if isinstance(task, str) else task
        self._plays = [play for play in self._plays if not play._group.done()]
        play = Play(found)
        # A task copies the context when it is made, so the rollout finds its player, and the caller's context stays as
        # it was.
        token = PLAYER.set(play._player)
        try:
            play._group = self._groups.create_task(self._one_attempt(found))
            self._plays.append(play)
        finally:
            PLAYER.reset(token)
        await play._wait_for_turn()
        return play

    async def _one_attempt(self, task: Task) -> Group:
        """Play a group of one rollout without retries, because the caller's work cannot be repeated."""
        settings = replace(self._runner.run_context.settings, group_size=1, infra_retries=0, whole_groups=False)
        return await self._runner.roll_out(next(self._numbers), task, settings)

    async def _play_group(self, task: Task, group_size: int | None) -> Group:
        async with self._places:
            if self._runner.gate is not None and not await self._runner.gate():
                raise RunStopped(f"the run was stopped: {self._runner.run_context.limits.message}")
            settings = self._runner.run_context.settings
            if group_size is not None:
                settings = replace(settings, group_size=group_size)
            return await self._runner.roll_out(next(self._numbers), task, settings)

    async def _find(self, task_id: str) -> Task:
        async with self._drawing:
            while task_id not in self._drawn:
                if await self._draw() is None:
                    raise ConfigError(
                        f"{self._runner.env.name} has no task {task_id!r}.{nearest(task_id, self._drawn)}"
                    )
        return self._drawn[task_id]

    async def _draw(self) -> Task | None:
        """Return the next task that is not known yet. None after the last one, or after many that are known: an
        environment may give the same tasks again and again."""
        for _ in range(_MOST_KNOWN):
            task = await anext(self._source, None)
            if task is None or task.id not in self._drawn:
                break
        else:
            return None
        if task is not None:
            self._drawn[task.id] = task
        return task

    async def _drive(self, runner: Runner) -> Totals:
        """Roll out the caller's tasks until the session is closed."""
        self._runner = runner
        self._path = runner.run_context.events.journal.path.parent.absolute()
        self._places = asyncio.Semaphore(runner.concurrency)
        self._source: AsyncIterator[Task] = runner.env.chosen_tasks()
        try:
            async with asyncio.TaskGroup() as self._groups:
                # Only now: as soon as the session is open, the caller may add groups to the task group.
                self._opened.set()
                await self._closing.wait()
        except* PalaestraError as failures:
            raise first_failure(failures) from None
        finally:
            if isinstance(self._source, AsyncGenerator):
                await self._source.aclose()
        return runner.totals


class Play:
    """One rollout whose agent is the caller: `call` its tools, `say` something to the environment's user, then `finish`
    it for its score. The end of the session cancels a rollout that is not finished."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.messages: list[Message] = []
        """The conversation so far, which begins with the task's messages."""
        self._player = Player()
        self._group: asyncio.Task[Group]
        self._calls = 0

    async def call(self, name: str, arguments: Mapping[str, JSON] | str) -> str:
        """Call a tool and return the text that a model would read, including errors. `arguments` may be JSON text.
        Raises `InfraError` if the rollout has ended."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self._calls += 1
        call = ToolCallMessage(id=f"call_{self._calls}", function=FunctionCall(name=name, arguments=text))
        await self._send_reply(AssistantMessage(tool_calls=[call]))
        return str(self.messages[-1]["content"]) if self.messages[-1]["role"] == "tool" else ""

    async def say(self, text: str) -> str | None:
        """Say something to the environment's user and return the answer, or None if the conversation is over. Without a
        user, this ends the rollout. Raises `InfraError` if the rollout has ended."""
        await self._send_reply(AssistantMessage(content=text))
        return None if self._group.done() else str(self.messages[-1]["content"])

    async def finish(self, text: str = "") -> Trajectory:
        """End the rollout with the agent's last message, which no user answers, and return its record, with the reward.
        In the steps of the task that follow, the agent only gives the same message. Idempotent. Raises `PrepareError`
        if the task's workspace could not be prepared."""
        self._player.over = True
        while not self._group.done():
            await self._send_reply(AssistantMessage(content=text))
        group = self._group.result()
        if not group.trajectories:
            raise PrepareError(group.error)
        return group.trajectories[0]

    async def _send_reply(self, message: AssistantMessage) -> None:
        if self._group.done():
            raise InfraError(f"the rollout of {self.task.id} has ended")
        self._player.replies.put_nowait(message)
        await self._wait_for_turn()

    async def _wait_for_turn(self) -> None:
        """Wait until it is the agent's turn, or the rollout has ended."""
        asked = asyncio.ensure_future(self._player.asked.get())
        try:
            await asyncio.wait([asked, self._group], return_when=asyncio.FIRST_COMPLETED)
            self.messages = asked.result() if asked.done() else (await self.finish()).messages
        finally:
            asked.cancel()


class SyncSession:
    """A session whose methods block, even if another event loop is running: `with Session(…) as session:`."""

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
        """Block on `Session.tasks`."""
        return self._loop.wait(self._session.tasks(limit))

    def roll_out(self, *tasks: str | Task, group_size: int | None = None) -> list[Group]:
        """Block on `Session.roll_out`."""
        return self._loop.wait(self._session.roll_out(*tasks, group_size=group_size))

    def tools(self, task: str | Task) -> list[JSON]:
        """Block on `Session.tools`."""
        return self._loop.wait(self._session.tools(task))

    def play(self, task: str | Task) -> SyncPlay:
        """Block on `Session.play`."""
        return SyncPlay(self._loop.wait(self._session.play(task)), self._loop)


class SyncPlay:
    """A `Play` whose methods block."""

    def __init__(self, play: Play, loop: LoopThread) -> None:
        self._play = play
        self._loop = loop

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._play.messages

    def call(self, name: str, arguments: Mapping[str, JSON] | str) -> str:
        """Block on `Play.call`."""
        return self._loop.wait(self._play.call(name, arguments))

    def say(self, text: str) -> str | None:
        """Block on `Play.say`."""
        return self._loop.wait(self._play.say(text))

    def finish(self, text: str = "") -> Trajectory:
        """Block on `Play.finish`."""
        return self._loop.wait(self._play.finish(text))
