"""The trajectory server: the routes of the Atropos API over one `Exchange` and one `Store`.

Not for deciding anything: `exchange` does. Invariant: what is answered as received is recorded first, and no answer
tells of something that a restart would forget. It speaks plain HTTP and knows no users: bind it to the loopback or to a
network of your own.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import ConfigError
from palaestra.core.io.http_server import listening
from palaestra.core.types import JSON
from palaestra.trainers.atropos.event_store import FileStore, NoStore, Store
from palaestra.trainers.atropos.exchange import Exchange
from palaestra.trainers.atropos.queue_status import env_status
from palaestra.trainers.atropos.server_events import AnyEvent, BatchTaken, DataReset, TrainerStarted
from palaestra.trainers.atropos.wire import (
    EnvIdentifier,
    EnvRegistration,
    Refusal,
    Registration,
    ScoredData,
    read,
    read_scored,
    read_scored_list,
)

MOST_REQUEST_BYTES = 512 << 20
"""Of one request's body, unpacked: sixteen rollouts of a hundred thousand tokens are a tenth of it."""

NO_EXAMPLE: dict[str, JSON] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}
"""What `/latest_example` answers before there is one."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TrajectoryServer:
    """The routes. `app` is the web application; with a store, what was recorded in it is taken up again."""

    def __init__(self, exchange: Exchange, store: Store | None = None, *, clock: Clock | None = None) -> None:
        self.exchange = exchange
        self.store = store or NoStore()
        self._clock = clock or SystemClock()
        self._taking = asyncio.Lock()
        self.app = web.Application(client_max_size=MOST_REQUEST_BYTES, middlewares=[_refusing])
        self.app.add_routes(
            [
                web.get("/", self._root),
                web.post("/register", self._register),
                web.post("/register-env", self._register_env),
                web.post("/disconnect-env", self._disconnect_env),
                web.get("/info", self._info),
                web.get("/wandb_info", self._wandb_info),
                web.get("/status", self._status),
                web.get("/status-env", self._status_env),
                web.get("/batch", self._batch),
                web.get("/latest_example", self._latest_example),
                web.get("/reset_data", self._reset_data),
                web.post("/scored_data", self._scored_data),
                web.post("/scored_data_list", self._scored_data_list),
            ]
        )

    def _record(self, event: AnyEvent) -> None:
        """Keep and apply in one step, so that the record has the order in which things happened."""
        self.store.append(event)
        self.exchange.apply(event, self._clock.monotonic())

    async def _root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API", "server": "palaestra"})

    async def _register(self, request: web.Request) -> web.Response:
        self._record(self.exchange.register(read(await request.read(), Registration)))
        await self.store.commit()
        return web.json_response({"uuid": uuid.uuid4().int})

    async def _register_env(self, request: web.Request) -> web.Response:
        event = self.exchange.register_env(read(await request.read(), EnvRegistration), self._clock.monotonic())
        trainer = self.exchange.trainer
        if event is None or trainer is None:
            return web.json_response({"status": "wait for trainer to start"})
        self._record(event)
        answer = {
            "status": "success",
            "env_id": len(self.exchange.envs) - 1,
            "wandb_name": self.exchange.envs[-1].name,
            "checkpoint_dir": trainer.checkpoint_dir,
            "starting_step": self.exchange.step,
            "checkpoint_interval": trainer.save_checkpoint_interval,
            "num_steps": trainer.num_steps,
        }
        await self.store.commit()
        return web.json_response(answer)

    async def _disconnect_env(self, request: web.Request) -> web.Response:
        try:
            self._record(self.exchange.disconnect(read(await request.read(), EnvIdentifier).env_id))
        except Refusal as refusal:
            return web.json_response({"status": "failure", "error": refusal.detail})
        await self.store.commit()
        return web.json_response({"status": "success"})

    async def _info(self, request: web.Request) -> web.Response:
        trainer = self.exchange.trainer
        known = (trainer.batch_size, trainer.max_token_len) if trainer else (-1, -1)
        return web.json_response({"batch_size": known[0], "max_token_len": known[1]})

    async def _wandb_info(self, request: web.Request) -> web.Response:
        trainer = self.exchange.trainer
        group, project = (trainer.wandb_group, trainer.wandb_project) if trainer else (None, None)
        return web.json_response({"group": group, "project": project})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"current_step": self.exchange.step, "queue_size": len(self.exchange.queue)})

    async def _status_env(self, request: web.Request) -> web.Response:
        env_id = read(await request.read(), EnvIdentifier).env_id
        self._hear(env_id)
        return web.json_response(env_status(self.exchange, env_id, self._clock.monotonic()))

    def _hear(self, env_id: int | None) -> None:
        if env_id is not None:
            self.exchange.env(env_id).heard_s = self._clock.monotonic()

    async def _batch(self, request: web.Request) -> web.Response:
        async with self._taking:
            batch = self.exchange.batch(self._clock.monotonic())
            if not self.exchange.started:
                self._record(TrainerStarted())
            if batch is not None:
                self._record(BatchTaken(serials=[each.serial for each in batch]))
            await self.store.commit()
        groups = b"null" if batch is None else b"[" + b",".join(each.body for each in batch) + b"]"
        return web.Response(body=b'{"batch":' + groups + b"}", content_type="application/json")

    async def _latest_example(self, request: web.Request) -> web.Response:
        body = self.exchange.latest or json.dumps(NO_EXAMPLE).encode()
        return web.Response(body=body, content_type="application/json")

    async def _reset_data(self, request: web.Request) -> web.Response:
        self._record(DataReset())
        await self.store.commit()
        return web.Response(text="Reset successful")

    async def _scored_data(self, request: web.Request) -> web.Response:
        (answer,) = self._receive([read_scored(await request.read())])
        await self.store.commit()
        return web.json_response(answer)

    async def _scored_data_list(self, request: web.Request) -> web.Response:
        groups = read_scored_list(await request.read())
        self._receive(groups)
        await self.store.commit()
        return web.json_response({"status": "received", "groups_processed": len(groups)})

    def _receive(self, groups: Sequence[ScoredData]) -> list[dict[str, JSON]]:
        """Take all groups, or none: the first that is refused comes before any is recorded."""
        events = [self.exchange.receive(group) for group in groups]
        answers: list[dict[str, JSON]] = []
        for event in events:
            if event is None:
                answers.append({"status": "received", "duplicate": True})
                continue
            self._hear(event.env_id)
            self._record(event)
            left = self.exchange.buffered(event)
            answers.append({"status": "received"} if left is None else {"status": "buffered", "buffer_size": left})
        return answers


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals as answers that say why, and what field is to blame."""
    try:
        return await handler(request)
    except Refusal as refusal:
        headers = {"Retry-After": f"{refusal.retry_s:g}"} if refusal.retry_s is not None else {}
        answer = {"detail": refusal.detail, "field": refusal.field}
        return web.json_response(answer, status=refusal.status, headers=headers)
    except web.RequestPayloadError as error:
        return web.json_response({"detail": f"the body cannot be read: {error}", "field": None}, status=400)
    except OSError as error:
        if request.transport is None:
            raise
        answer = {"detail": f"cannot be recorded: {error.strerror or error}", "field": None}
        return web.json_response(answer, status=503, headers={"Retry-After": "5"})


def restored(exchange: Exchange, store: FileStore, now_s: float) -> Exchange:
    """The exchange as the store remembers it. Raises `ConfigError` for a store that is damaged."""
    for number, event in enumerate(store.events(), 2):
        try:
            exchange.apply(event, now_s)
        except (IndexError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{store.path}: line {number} does not follow from those before: {error}") from None
    return exchange


@asynccontextmanager
async def serving(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    store: Path | None = None,
    most_groups: int = 10_000,
    most_bytes: int = 2 << 30,
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """A running server; the value is its address. Port 0 takes a free one. Raises `ConfigError`."""
    clock = clock or SystemClock()
    exchange = Exchange(most_groups=most_groups, most_bytes=most_bytes)
    kept: Store = NoStore()
    if store is not None:
        kept = FileStore(store)
        restored(exchange, kept, clock.monotonic())
    try:
        async with listening(TrajectoryServer(exchange, kept, clock=clock).app, host, port) as url:
            yield url
    finally:
        kept.close()
