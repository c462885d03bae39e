"""Runs a trajectory server: serves the routes of the Atropos API over one `Exchange`, and stores its events if it has a
store.

Invariant of a server with a store: a group is on the disk before it is acknowledged. The server speaks plain HTTP.
Callers are checked before their bodies are read. A token, which callers must send, is required unless the server
listens on a loopback address. A request body must be JSON, so that a form on a web page cannot send one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.durable_files import open_lines, writing
from palaestra_slots.core.io.http_server import Handler, guard, listening, require_token
from palaestra_slots.core.types import JSON
from palaestra_train.atropos.exchange import AnyEvent, BatchTaken, DataReset, Exchange, TrainerStarted
from palaestra_train.atropos.wire import (
    EnvIdentifier,
    EnvRegistration,
    Registration,
    RequestRefusal,
    ScoredData,
    read,
    read_scored,
    read_scored_list,
)

STORE_SCHEMA = "palaestra.trajectories/1"

MOST_REQUEST_BYTES = 512 << 20
"""The maximum number of bytes of one unpacked request body: sixteen rollouts of a hundred thousand tokens take a tenth
of this."""

NO_EXAMPLE: dict[str, JSON] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}
"""The answer of `/latest_example` while there is no example yet."""


class EventStore:
    """A server's events on disk, one JSON object per line, read again at the next start.

    Invariants: once `commit` has returned, the events before it survive a power cut. Only one server at a time has the
    file open. Raises `ConfigError` for a file that cannot be written, is open in another server or has a different
    schema.
    """

    _events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(path, STORE_SCHEMA, mode=0o600, exclusive=True)
        except DiskError as error:
            raise ConfigError(f"{error}; use a different file") from error

    def restore(self, exchange: Exchange, now_s: float) -> None:
        """Apply the events to a new exchange, before the first `append`. Raises `ConfigError` for a damaged line."""
        for number, line in self._file.lines():
            try:
                exchange.apply(self._events.decode(line), now_s)
            except (IndexError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.path}: line {number} is damaged: {error}") from None

    def append(self, event: AnyEvent) -> None:
        """Write one event, without waiting for the disk. Raises `DiskError`, and then leaves no part of the event in
        the file."""
        self._file.append(msgspec.json.encode(event) + b"\n")

    async def commit(self) -> None:
        """Return once everything appended is on the disk."""
        await self._file.commit()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._file.close()


class TrajectoryServer:
    """The routes of the API. `app` is the web application. If there is no store, everything is lost when the server
    restarts.

    If `token` is set, callers must send it. Otherwise, every program may call the server, but web pages may not.
    """

    def __init__(
        self,
        exchange: Exchange,
        store: EventStore | None = None,
        *,
        token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.exchange = exchange
        self.store = store
        self._clock = clock or SystemClock()
        self._taking = asyncio.Lock()
        self.app = web.Application(
            client_max_size=MOST_REQUEST_BYTES, middlewares=[_refusing, guard(token), _only_json]
        )
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
        """Store and apply an event in one step, so that the store has the events in the order in which they were
        applied."""
        if self.store is not None:
            self.store.append(event)
        self.exchange.apply(event, self._clock.monotonic())

    async def _commit(self) -> None:
        if self.store is not None:
            await self.store.commit()

    async def _root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API", "server": "palaestra"})

    async def _register(self, request: web.Request) -> web.Response:
        self._record(self.exchange.register(read(await request.read(), Registration)))
        await self._commit()
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
        await self._commit()
        return web.json_response(answer)

    async def _disconnect_env(self, request: web.Request) -> web.Response:
        try:
            self._record(self.exchange.disconnect(read(await request.read(), EnvIdentifier).env_id))
        except RequestRefusal as refusal:
            return web.json_response({"status": "failure", "error": refusal.detail})
        await self._commit()
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
        env_id, now_s = read(await request.read(), EnvIdentifier).env_id, self._clock.monotonic()
        self.exchange.env(env_id).heard_s = now_s
        return _json(msgspec.json.encode(self.exchange.status(env_id, now_s)))

    async def _batch(self, request: web.Request) -> web.Response:
        async with self._taking:
            batch = self.exchange.batch(self._clock.monotonic())
            if not self.exchange.started:
                self._record(TrainerStarted())
            if batch is not None:
                self._record(BatchTaken(serials=[each.serial for each in batch]))
            await self._commit()
        groups = b"null" if batch is None else b"[" + b",".join(each.body for each in batch) + b"]"
        return _json(b'{"batch":' + groups + b"}")

    async def _latest_example(self, request: web.Request) -> web.Response:
        return _json(self.exchange.latest or msgspec.json.encode(NO_EXAMPLE))

    async def _reset_data(self, request: web.Request) -> web.Response:
        self._record(DataReset())
        await self._commit()
        return web.Response(text="Reset successful")

    async def _scored_data(self, request: web.Request) -> web.Response:
        (answer,) = self._accept_groups([read_scored(await request.read())])
        await self._commit()
        return web.json_response(answer)

    async def _scored_data_list(self, request: web.Request) -> web.Response:
        groups = read_scored_list(await request.read())
        self._accept_groups(groups)
        await self._commit()
        return web.json_response({"status": "received", "groups_processed": len(groups)})

    def _accept_groups(self, groups: Sequence[ScoredData]) -> list[dict[str, JSON]]:
        """Accept all groups or none: a refusal is raised before any is recorded."""
        events = [self.exchange.receive(group) for group in groups]
        answers: list[dict[str, JSON]] = []
        for event in events:
            if event is None:
                answers.append({"status": "received", "duplicate": True})
                continue
            if event.env_id is not None:
                self.exchange.env(event.env_id).heard_s = self._clock.monotonic()
            self._record(event)
            left = self.exchange.buffered(event)
            answers.append({"status": "received"} if left is None else {"status": "buffered", "buffer_size": left})
        return answers


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _only_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.body_exists and request.content_type != "application/json":
        detail = f"a body of type {request.content_type} is not accepted: send application/json"
        return web.json_response({"detail": detail, "field": None}, status=415)
    return await handler(request)


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn refusals into answers with the reason and the invalid field."""
    try:
        return await handler(request)
    except RequestRefusal as refusal:
        headers = {"Retry-After": f"{refusal.retry_s:g}"} if refusal.retry_s is not None else {}
        answer = {"detail": refusal.detail, "field": refusal.field}
        return web.json_response(answer, status=refusal.status, headers=headers)
    except web.RequestPayloadError as error:
        return web.json_response({"detail": f"the body cannot be read: {error}", "field": None}, status=400)
    except OSError as error:
        if request.transport is None:
            raise
        answer = {"detail": f"the request cannot be recorded: {error.strerror or error}", "field": None}
        return web.json_response(answer, status=503, headers={"Retry-After": "5"})


@asynccontextmanager
async def serving(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    store: Path | None = None,
    most_groups: int = 10_000,
    most_bytes: int = 2 << 30,
    token: str | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """Run a server; the context's value is its address. Port 0 selects a free port.

    Raises `ConfigError`, for example if `host` is not a loopback address and there is no token.
    """
    require_token(host, token)
    clock = clock or SystemClock()
    exchange = Exchange(most_groups=most_groups, most_bytes=most_bytes)
    kept = None if store is None else EventStore(store)
    try:
        if kept is not None:
            kept.restore(exchange, clock.monotonic())
        app = TrajectoryServer(exchange, kept, token=token, clock=clock).app
        async with listening(app, host, port, token=token) as url:
            yield url
    finally:
        if kept is not None:
            kept.close()
