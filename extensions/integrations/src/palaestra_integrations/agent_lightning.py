"""Plays Agent-Lightning's rollouts in slots, either from its own controller or from the controller in this module.

    async with Controller("my_env.py", "http://localhost:8080", key) as controller:
        await controller.run()                     # until cancelled

`Controller` takes the place of `agentlightning.controller`: one process and one run play all queued rollouts.
Alternatively, Agent-Lightning's local controller can start a process per rollout, with a subclass of `Agent` as the
rollouts' `agent_class`. The input of a rollout is a task's id, or an object with `task_id`. Agent-Lightning's proxy
records the tokens.

A rollout without a reward ends in the state `failed`, with the outcome and the blame, and sends no reward event.

Source: the REST API of Agent-Lightning 1.0.2. This module does not import the package.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

import aiohttp

from palaestra import JSON, ConfigError, RolloutFunction
from palaestra_integrations.blame import Dropped, reward_of

logger = logging.getLogger(__name__)

ATTEMPT = "0"
"""The name of a rollout's only attempt, the same as in Agent-Lightning's own controllers."""


class Agent:
    """The `agent_class` of one rollout. Subclass it and set `env`. The rollout's `env_map` must have
    `{"PALAESTRA_TASK": "input.task_id"}`; the other variables are Agent-Lightning's own."""

    env: ClassVar[object]
    settings: ClassVar[Mapping[str, Any]] = {}

    async def run(self) -> None:
        """Play the rollout and send its reward. Raises `Dropped` if the rollout has no reward; Agent-Lightning then
        counts it as failed."""
        address, key = os.environ["AGL_OPENAI_BASE_URL"], os.environ.get("AGL_KEY", "")
        async with RolloutFunction(self.env, **self.settings) as rollout, _client(key) as client:
            result = await rollout(os.environ["PALAESTRA_TASK"], address, key)
            await _request(client, "POST", os.environ["AGL_EVENT_URL"], _reward_event(reward_of(result)))


class Controller:
    """Plays the queued rollouts of the server at `url`, at most `concurrent` at a time. `settings` are those of
    `palaestra.RolloutFunction`."""

    def __init__(self, env: object, url: str, key: str = "", *, concurrent: int = 50, **settings: Any) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._free = concurrent
        self._rollout = RolloutFunction(env, **settings)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._client = await self._opened.enter_async_context(_client(self._key))
        await self._opened.enter_async_context(self._rollout)
        self._playing = await self._opened.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._opened.__aexit__(*exc)

    async def run(self, poll_s: float = 1.0) -> None:
        """Play rollouts as they are queued, until cancelled."""
        while True:
            try:
                await self.play_queued()
            except aiohttp.ClientError as error:
                logger.warning("%s did not return the queued rollouts; retrying: %s", self._url, error)
            await asyncio.sleep(poll_s)

    async def play_queued(self) -> None:
        """Begin as many queued rollouts as there is room for. Leaving the controller's block waits until they end."""
        if not self._free:
            return
        queued = await _request(self._client, "GET", f"{self._url}/api/rollouts?state_in=queuing&limit={self._free}")
        for each in queued:
            await self._patch(each["rollout_id"], {"state": "running", "last_attempt_id": ATTEMPT})
            self._free -= 1
            self._playing.create_task(self._play_queued(each))

    async def _play_queued(self, queued: Mapping[str, JSON]) -> None:
        name, mode = queued["rollout_id"], "train" if queued["is_train"] else "val"
        given = queued["input"]
        task = str(given.get("task_id") if isinstance(given, Mapping) else given)
        address = f"{self._url}/proxy/rollout/{name}/attempt/{ATTEMPT}/mode/{mode}/openai/v1"
        try:
            async with asyncio.timeout(queued["config"]["timeout_seconds"]):
                result = await self._rollout(task, address, self._key)
            events = f"{self._url}/api/rollouts/{name}/attempt/{ATTEMPT}/events"
            await _request(self._client, "POST", events, _reward_event(reward_of(result)))
        except (ConfigError, Dropped, aiohttp.ClientError) as error:
            await self._patch(name, {"state": "failed", "error_message": str(error)})
        except TimeoutError:
            await self._patch(name, {"state": "failed", "error_message": "the rollout exceeded its timeout_seconds"})
        except asyncio.CancelledError:
            await self._patch(name, {"state": "failed", "error_message": "the controller was stopped"})
            raise
        else:
            await self._patch(name, {"state": "succeeded", "last_attempt_id": ATTEMPT})
        finally:
            self._free += 1

    async def _patch(self, name: str, status: JSON) -> None:
        try:
            await _request(self._client, "PATCH", f"{self._url}/api/rollouts/{name}", {"status": status})
        except aiohttp.ClientError as error:  # other rollouts continue; the server times this rollout out
            logger.warning("rollout %s: its state %s could not be reported: %s", name, status["state"], error)


def _client(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"} if key else {}, raise_for_status=True)


def _reward_event(reward: float) -> JSON:
    return {"event_type": "reward", "data": {"value": reward, "source": "agent"}}


async def _request(client: aiohttp.ClientSession, method: str, url: str, body: JSON = None) -> JSON:
    async with client.request(method, url, json=body) as response:
        return await response.json()
