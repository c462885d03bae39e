"""Serves the routes of the Tinker API (SDK 0.38) over one `TinkerService`.

Source of the format: the SDK itself (PyPI `tinker`), whose request and response types are used unchanged. Invariant: no
answer makes the SDK repeat a request forever. An invalid request gets a status for which the SDK raises immediately, or
fails through its future. The SDK repeats a request after 429, which the server sends while it is full.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pydantic
from aiohttp import web
from tinker import types

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.http_server import Handler, guard, listening, require_token
from palaestra_slots.core.types import JSON
from palaestra_train.tinker.checkpoint_routes import CheckpointRoutes
from palaestra_train.tinker.checkpoints import CheckpointFolder
from palaestra_train.tinker.client_sessions import NotFound
from palaestra_train.tinker.futures import Busy, PendingRequest
from palaestra_train.tinker.http_bodies import page, read_json, read_request, texts
from palaestra_train.tinker.model import BaseModel, UserError
from palaestra_train.tinker.service import ServiceSettings, TinkerService
from palaestra_train.tinker.wire import read_batch

log = logging.getLogger(__name__)

MOST_REQUEST_BYTES = 256 << 20
"""The maximum number of bytes in one request body. The SDK splits batches at 5 MB."""

POLL_S = 25.0
"""Seconds that a request for a result waits; the SDK gives up after 45."""

INLINE_BYTES = 1 << 20
"""The maximum number of bytes of a result that is always sent whole. For a larger result, the server first sends only
the size, if the SDK allows that."""

KEY_PREFIX = "tml-"
"""The prefix that the SDK requires of a key."""

SWEEP_S = 10.0

_USUAL = ServiceSettings()

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


class TinkerServer:
    """The routes of the API. `app` is the web application. If `token` is set, callers must send it as their API key.
    Otherwise, every program may call the server, but web pages may not."""

    def __init__(self, service: TinkerService, *, token: str | None = None) -> None:
        self.service = service
        self.app = web.Application(
            client_max_size=MOST_REQUEST_BYTES, middlewares=[_errors, guard(token, key_header="X-API-Key")]
        )
        root = "/api/v1"
        post = {
            "client/config": _client_config,
            "client/dynamic_config": _dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "telemetry": _telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward": self._batch,
            "forward_backward": self._batch,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "load_weights": self._load,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "create_sampling_session": self._create_sampling,
            "join_sampling_session": self._join_sampling,
            "asample": self._asample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
        }
        get = {
            "healthz": _health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
            "sessions": self._list_sessions,
            "sessions/{session}": self._get_session,
        }
        self.app.add_routes(
            [
                *(web.post(f"{root}/{path}", handler) for path, handler in post.items()),
                *(web.get(f"{root}/{path}", handler) for path, handler in get.items()),
                *CheckpointRoutes(service).under(root),
                web.route("*", "/{path:.*}", _unknown),
            ]
        )

    # The first requests of the SDK

    async def _capabilities(self, request: web.Request) -> web.Response:
        base = self.service.base
        model = {"model_name": base.name, "max_context_length": base.window, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    # Sessions

    async def _create_session(self, request: web.Request) -> web.Response:
        asked = await read_request(request, types.CreateSessionRequest)
        session = self.service.sessions.create(asked.user_metadata, asked.display_name)
        return web.json_response({"type": "create_session", "session_id": session.session_id})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        asked = await read_request(request, types.SessionHeartbeatRequest)
        try:
            self.service.sessions.find(asked.session_id)
        except NotFound as error:
            return _error_response(410, error)  # the SDK then stops its heartbeat
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        self.service.end_session(request.match_info["session"])
        return web.json_response({})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        start, count = page(request)
        return web.json_response({"sessions": list(self.service.sessions.open)[start : start + count]})

    async def _get_session(self, request: web.Request) -> web.Response:
        session = self.service.sessions.find(request.match_info["session"])
        return web.json_response(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    # Training

    async def _create_model(self, request: web.Request) -> web.Response:
        return _accepted(self.service.create_model(await read_request(request, types.CreateModelRequest)))

    async def _get_info(self, request: web.Request) -> web.Response:
        asked = await read_request(request, types.GetInfoRequest)
        training, base = self.service.training(asked.model_id), self.service.base
        lora = training.model.lora
        data = {
            "arch": base.module.config.model_type,
            "model_name": base.name,
            "tokenizer_id": base.source,
        }
        return web.json_response(
            {
                "type": "get_info",
                "model_id": training.model_id,
                "model_data": data,
                "model_name": base.name,
                "is_lora": lora is not None,
                "lora_rank": lora.rank if lora else None,
            }
        )

    async def _unload_model(self, request: web.Request) -> web.Response:
        asked = await read_request(request, types.UnloadModelRequest)
        return _accepted(self.service.unload(asked.model_id))

    async def _batch(self, request: web.Request) -> web.Response:
        models: list[str] = []

        def submit(raw: bytes) -> PendingRequest:
            batch = read_batch(raw)
            models.append(batch.model_id)
            return self.service.batch(batch)

        return _accepted(await self._large(request, submit), models[0])

    async def _large(self, request: web.Request, submit: Callable[[bytes], PendingRequest]) -> PendingRequest:
        size = MOST_REQUEST_BYTES if request.content_length is None else request.content_length
        return await self.service.futures.read(request.read, size, submit)

    async def _optim_step(self, request: web.Request) -> web.Response:
        return await self._queued(request, types.OptimStepRequest, self.service.optim_step)

    async def _save(self, request: web.Request) -> web.Response:
        return await self._queued(request, types.SaveWeightsRequest, self.service.save)

    async def _load(self, request: web.Request) -> web.Response:
        return await self._queued(request, types.LoadWeightsRequest, self.service.load)

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        return await self._queued(request, types.SaveWeightsForSamplerRequest, self.service.save_for_sampler)

    async def _save_external(self, request: web.Request) -> web.Response:
        """Refuse the request when its turn comes, so that the requests after it run."""
        asked = await read_request(request, types.SaveWeightsExternalRequest)
        reason = "This server does not export weights; save_state writes files that peft or transformers can load."
        return _accepted(self.service.refuse(asked.model_id, asked.seq_id or 0, reason))

    async def _queued(
        self, request: web.Request, kind: type[_Model], submit: Callable[[_Model], PendingRequest]
    ) -> web.Response:
        """Queue a request of a model. An invalid body still consumes its sequence number."""
        try:
            return _accepted(submit(await read_request(request, kind)))
        except pydantic.ValidationError as error:
            body = await read_json(request)
            model_id, number = body.get("model_id"), body.get("seq_id")
            if not isinstance(model_id, str) or type(number) is not int or number < 1:
                raise
            return _accepted(self.service.refuse(model_id, number, _wrong(error)))

    # Sampling

    async def _create_sampling(self, request: web.Request) -> web.Response:
        sampling = self.service.sampling.create(await read_request(request, types.CreateSamplingSessionRequest))
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampling.sampler_id})

    async def _join_sampling(self, request: web.Request) -> web.Response:
        sampling = self.service.sampling.find((await read_json(request))["sampling_session_id"])
        sampling.clients += 1
        return web.json_response({"type": "join_sampling_session", "client_counter": sampling.clients})

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampling = self.service.sampling.find(request.match_info["sampler"])
        body = {"sampler_id": sampling.sampler_id, "base_model": self.service.base.name, "model_path": sampling.path}
        return web.json_response(body)

    async def _asample(self, request: web.Request) -> web.Response:
        def submit_sample(raw: bytes) -> PendingRequest:
            return self.service.sampling.sample(types.SampleRequest.model_validate_json(raw or b"{}"))

        return _accepted(await self._large(request, submit_sample))

    # Results

    async def _cancel(self, request: web.Request) -> web.Response:
        self.service.sampling.cancel(str((await read_json(request)).get("request_id")))
        return web.json_response({})

    async def _retrieve(self, request: web.Request) -> web.Response:
        asked = await read_request(request, types.FutureRetrieveRequest)
        pending = self.service.futures.find(asked.request_id)
        if pending is None:
            raise NotFound(f"There is no request {asked.request_id}: its result was dropped, or its session has ended.")
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await pending.done.wait()
        answer = pending.answer
        if answer is None:
            return web.json_response({"type": "try_again", "request_id": asked.request_id, "queue_state": "active"})
        if asked.allow_metadata_only and len(answer.body) > INLINE_BYTES:
            return web.json_response({"status": "complete_metadata", "response_payload_size": len(answer.body)})
        self.service.futures.fetched(pending)
        kind = "application/x-protobuf" if answer.protobuf else "application/json"
        return web.Response(body=answer.body, content_type=kind)


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _client_config(request: web.Request) -> web.Response:
    return web.json_response({"sample_join_sampling_session": True})


async def _dynamic_config(request: web.Request) -> web.Response:
    return web.json_response({"sample_cancel_enabled": True})


async def _telemetry(request: web.Request) -> web.Response:
    return web.json_response({"status": "accepted"})  # discarded


async def _unknown(request: web.Request) -> web.Response:
    raise NotFound(f"This server does not have {request.method} {request.path}; docs/tinker.md lists its calls.")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except UserError as error:
        return _error_response(400, error)
    except pydantic.ValidationError as error:
        return _error_response(422, _wrong(error))
    except NotFound as error:
        return _error_response(404, error)
    except Busy as error:
        return _error_response(429, f"The server is busy: {error}.", {"Retry-After": "1"})
    except DiskError as error:
        return _error_response(507, error)
    except web.HTTPException as error:
        return _error_response(error.status, error.reason)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        # After a status of 500, the SDK would request the result again immediately and forever.
        return _error_response(422, f"The server failed: {type(error).__name__}: {error}")


def _error_response(status: int, detail: object, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"detail": str(detail)}, status=status, headers=headers)


def _wrong(error: pydantic.ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])


def _accepted(pending: PendingRequest, model_id: str | None = None) -> web.Response:
    body: dict[str, JSON] = {"request_id": pending.request_id}
    if model_id is not None:
        body["model_id"] = model_id
    if pending.sequences is not None:
        body["sample_sequence_ids"] = pending.sequences
    return web.json_response(body)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A running server: its address, and the name of its model for clients."""

    url: str
    name: str


async def _sweeping(service: TinkerService) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        await service.sweep()


@asynccontextmanager
async def serving(
    model: str,
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | None = None,
    settings: ServiceSettings = _USUAL,
    clock: Clock | None = None,
) -> AsyncIterator[ServedModel]:
    """Run a server for one base model. Port 0 selects a free port.

    Raises `ConfigError` if the model cannot be loaded, the folder cannot be written, the token lacks the prefix `tml-`
    (which the SDK requires), or `host` is not a loopback address and there is no token.
    """
    require_token(host, token)
    if token is not None and not token.startswith(KEY_PREFIX):
        raise ConfigError(f"the token must start with '{KEY_PREFIX}', because the Tinker SDK sends no other API keys")
    checkpoints = CheckpointFolder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.sweep()
    except OSError as error:
        raise ConfigError(f"cannot keep checkpoints in {folder}: {error.strerror}; choose another folder") from None
    base = await asyncio.to_thread(
        lambda: BaseModel(
            model,
            name=settings.name,
            device=settings.device,
            dtype=settings.dtype,
            pass_memory=settings.pass_memory,
        )
    )
    service = TinkerService(base, checkpoints, clock or SystemClock(), settings)
    sweeper = asyncio.ensure_future(_sweeping(service))
    try:
        async with listening(TinkerServer(service, token=token).app, host, port, token=token) as url:
            yield ServedModel(url, base.name)
    finally:
        sweeper.cancel()
        await service.aclose()
