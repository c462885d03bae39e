"""What the tests of the trajectory API say to a server."""

from __future__ import annotations

import json
from typing import Self

import aiohttp

from palaestra_slots.core.types import JSON


def trainer(**changed: JSON) -> dict[str, JSON]:
    """A trainer's registration, as the contract's trainers send it."""
    return {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 4,
        "max_token_len": 64,
        "checkpoint_dir": "/checkpoints",
        "save_checkpoint_interval": 10,
        "starting_step": 3,
        "num_steps": 100,
    } | changed


def environment(**changed: JSON) -> dict[str, JSON]:
    """An environment's registration."""
    return {"max_token_length": 32, "desired_name": "words", "weight": 1.0, "group_size": 2} | changed


def group(rows: int = 2, *, first: int = 1, **changed: JSON) -> dict[str, JSON]:
    """A group of so many sequences of three tokens; `first` tells groups apart."""
    tokens = [[first, 2, number] for number in range(rows)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(number) for number in range(rows)],
        "inference_logprobs": [[1.0, -0.5, -0.25] for _ in tokens],
    } | changed


class Talk:
    """Requests to one server. `say` gives status and body."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def say(self, method: str, path: str, body: JSON = None, **more: JSON) -> tuple[int, JSON]:
        async with self._session.request(method, self.url + path, json=body, **more) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == "application/json" else text

    async def get(self, path: str, body: JSON = None) -> JSON:
        status, answer = await self.say("GET", path, body)
        assert status == 200, answer
        return answer

    async def post(self, path: str, body: JSON) -> JSON:
        status, answer = await self.say("POST", path, body)
        assert status == 200, answer
        return answer

    async def both(self, **changed: JSON) -> int:
        """Register a trainer that starts, and an environment; the environment's id."""
        await self.post("/register", trainer(**changed))
        await self.get("/batch")
        env_id = (await self.post("/register-env", environment()))["env_id"]
        assert isinstance(env_id, int)
        return env_id
