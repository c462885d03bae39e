"""Plays rollouts of an instance that a program made and calls itself, for example in a unit test.

    env = MyEnv(config, servers, testing=True)
    await env.setup()
    row, _ = await env.collect_trajectory(await env.get_next_item())

Each call connects the model servers, opens the slots, and closes both at its end; concurrent calls share them. Nothing
is written, except by `process_manager` and `env_manager`, which run the environment as `palaestra.run` does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from palaestra.envs.config.build import make_pool, make_recorded_tools, server_settings
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.command import command_line, take_variables
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation
from palaestra.envs.run.run import opened, run_settings
from palaestra.envs.run.run import run as run_line
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.journal.reader import RUNS
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.spec import RunContext
from palaestra.rollouts.workspaces import Workspaces
from palaestra_contract.base_env import BaseEnv, Item
from palaestra_contract.class_environment import ClassEnvironment
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.server_group import ServerGroup


def servers_of(env: BaseEnv) -> ServerGroup:
    """Return the model servers of an instance, not connected yet."""
    return ServerGroup(server_settings(env.config, env.server_configs or [APIServerConfig()]))


class ByHand:
    """What the calls of an instance share while at least one of them runs."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._users = 0
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._play: Evaluation | None = None
        self._environment: ClassEnvironment | None = None
        self._played = 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Connect the model servers during the block."""
        async with self._opening:
            if self._users == 0:
                await self._stack.enter_async_context(_server(self._env))
            self._users += 1
        try:
            yield
        finally:
            async with self._opening:
                self._users -= 1
                if self._users == 0:
                    self._play = self._environment = None
                    await self._stack.aclose()

    async def roll_out(self, items: Sequence[Item], samples: int, *, plain: bool = False) -> list[Trajectory]:
        """Play every item `samples` times. Returns the trajectories in item order. The class's own collect_ methods are
        never called, because a program calls them itself."""
        async with self.connected():
            async with self._opening:
                if self._play is None:
                    self._environment, self._play = await self._open()
            assert self._environment is not None
            first = self._played
            self._played += len(items)
            done = await self._play.roll_out(self._environment.over(items, first, plain=True), samples, first)
        return [trajectory for group in done for trajectory in group.trajectories]

    async def _open(self) -> tuple[ClassEnvironment, Evaluation]:
        config, enter = self._env.config, self._stack.enter_async_context
        config.check_runnable()
        if config.on_cluster:
            raise ConfigError("env.on: an instance that a program made plays its rollouts in this process only")
        environment = self._env.as_environment()
        assert isinstance(environment, ClassEnvironment)
        environment.is_set_up = True
        folder = self._stack.enter_context(TemporaryDirectory(prefix="palaestra-by-hand-"))
        journal = Journal(Path(folder) / "journal.jsonl")
        self._stack.callback(journal.close)
        world = make_recorded_tools(config)
        self._stack.callback(world.close)
        workspaces = Workspaces(await enter(make_pool(config)))
        self._stack.push_async_callback(workspaces.aclose)
        environment.use_recordings(world)
        await enter(opened(environment, config.only_tasks))
        engine = self._env._server
        assert isinstance(engine, ServerGroup)
        context = RunContext(
            engine=engine,
            workspaces=workspaces,
            events=EventStream(journal),
            settings=run_settings(config),
            recorded_tools=world,
        )
        return environment, Evaluation(environment, context, config.group_size, lambda group: None)


@asynccontextmanager
async def _server(env: BaseEnv) -> AsyncIterator[None]:
    before, engine = env._server, servers_of(env)
    async with engine:
        env._server = engine
        try:
            yield
        finally:
            env._server = before


async def run_command(env: BaseEnv, command: str) -> None:
    """Run an instance as `palaestra.run` runs its class. Raises `ConfigError`, and errors of the start."""
    form = _InstanceForm(env)
    parsed = command_line(form, "palaestra.run", command).take(command, {}, {}, {})
    take_variables(parsed, {})
    before = env._server
    try:
        await run_line(form, parsed, root=Path(RUNS), stream=sys.stderr)
    finally:
        env._server = before


class _InstanceForm:
    """The form of an instance that exists already."""

    bound: BaseEnvConfig | None = None
    command: str | None = None
    reference = ""
    about = ""

    def __init__(self, env: BaseEnv) -> None:
        self.env = env
        self.kind = type(env).__name__
        self.name = env.name or self.kind

    def config_type(self) -> type[BaseEnvConfig]:
        return type(self.env.config)

    def defaults(self) -> tuple[BaseEnvConfig | None, Sequence[ServerBaseline]]:
        return self.env.config, self.env.server_configs or [APIServerConfig()]

    def check_values(self) -> Mapping[str, JSON]:
        return {}

    def build(
        self, config: BaseEnvConfig, servers: Sequence[APIServerConfig], server: ChatServer
    ) -> EvaluatedEnvironment:
        self.env.config, self.env._server = config, server
        environment = self.env.as_environment()
        assert isinstance(environment, ClassEnvironment)
        environment.is_managed = True
        return environment
