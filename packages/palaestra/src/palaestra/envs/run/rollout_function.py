"""A rollout as a function that takes a task and a model's address, and returns a reward or the reason for its absence.

    async with RolloutFunction(env, agent="codex") as rollout:
        result = await rollout(task_id, base_url, api_key)
        match result:
            case Scored(reward=reward): …
            case Unscored(blame=blame): …          # not the policy's fault: drop the sample

Adapters for trainers use this function (`integrations/`); `integrations/blame.py` lists how to make each trainer drop a
sample.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from palaestra.envs.run.session import Session
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Blame, Outcome, Task
from palaestra_tokens.engines.addressed import AddressedEngine
from palaestra_tokens.server_group import create_engine


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with a reward."""

    reward: float
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class Unscored:
    """A rollout without a reward, for which the policy is not to blame: an infrastructure failure, an unusable task, or
    the run's end. `trajectory` is None if the rollout did not start, for example because its workspace could not be
    prepared."""

    blame: Blame
    error: str
    trajectory: Trajectory | None = None

    @property
    def kind(self) -> str:
        """A short name for metrics: the outcome and the blame, such as `api_error/engine`."""
        outcome = Outcome.INFRA_ERROR if self.trajectory is None else self.trajectory.outcome
        return f"{outcome}/{self.blame}"


class RolloutFunction:
    """Plays rollouts of `env`, each with the model at an address of its own. All rollouts belong to one run. The run
    starts with `async with` or with the first rollout, and ends with the block or `aclose`.

    `agent` is a program in the slot (`--agent`), or None for the agent loop. `server_type` is the protocol of the
    addresses: `openai` for any chat server, `vllm` or `sglang` for exact tokens. `settings` are further arguments of
    `palaestra.Session`, except `server` and `group_size`. Five of them apply to the server at every address:
    `tokenizer_name`, `tool_parser`, `chat_template`, `timeout` and `history`.
    """

    def __init__(self, env: object, *, agent: str | None = None, server_type: str = "openai", **settings: Any) -> None:
        exact = server_type in ("vllm", "sglang")
        if not exact and server_type != "openai":
            raise ConfigError(f"server_type {server_type!r} is not one of openai, vllm, sglang")
        server = {name: settings.pop(name) for name in _SERVER_SETTINGS if name in settings}
        self._engine = AddressedEngine(create_engine, {**server, "server_type": server_type}, token_exact=exact)
        self._session = Session(
            env, server=self._engine, agent=agent, group_size=1, **{"max_infra_rate": 1.0, **settings}
        )
        self._opened: AsyncExitStack | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.__aexit__(*exc)

    async def aclose(self) -> None:
        """End the run, if it has started. Idempotent."""
        await self.__aexit__(None, None, None)

    async def _open(self) -> None:
        # Several rollouts may be the first.
        async with self._opening:
            if self._opened is None:
                opened = AsyncExitStack()
                await opened.enter_async_context(self._session)
                self._opened = opened

    @property
    def session(self) -> Session:
        """The run, whose `path` has the record and whose `tasks` lists the tasks."""
        return self._session

    async def __call__(
        self, task: str | Task, base_url: str, api_key: str = "", *, model: str = "policy"
    ) -> Scored | Unscored:
        """Play one rollout with the model at `base_url`. Raises `ConfigError` for an unknown task, and any error that
        starting a run can raise."""
        await self._open()
        async with self._engine.at(base_url, api_key, model):
            (group,) = await self._session.roll_out(task, group_size=1)
        if not group.trajectories:
            return Unscored(group.blame or Blame.TASK, group.error)
        (trajectory,) = group.trajectories
        if trajectory.reward is None:
            return Unscored(trajectory.blame or Blame.RUN, trajectory.error, trajectory)
        return Scored(trajectory.reward, trajectory)


_SERVER_SETTINGS = ("tokenizer_name", "tool_parser", "chat_template", "timeout", "history")
