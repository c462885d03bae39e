"""A model server that serves any token engine, for development and tests: OpenAI chat, and the token APIs of vLLM and
SGLang.

Use it to try any engine client with real sampling by a small model, on one machine. The server is not made for heavy
load: one process samples, and nothing is cached between requests. Chat is rendered and parsed as in token-exact chat,
so chat clients and token clients see the same model.

The server speaks plain HTTP. If it does not listen on a loopback address, a token is required, which callers send as
their API key. Sources: the OpenAI API reference, vLLM's OpenAI-compatible server, and SGLang's native API.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from aiohttp import web

from palaestra_slots.core.errors import ConfigError, EngineError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import ChatCompletion, TokenEngine
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.token_exact.managed_chat import ManagedChat
from palaestra_tokens.tokenizers import Tokenizer

_REQUEST_ONLY = frozenset({"model", "stream", "stream_options", "user", "store", "metadata", "max_completion_tokens"})
"""Fields of a chat request that are not sampling settings."""


Load: TypeAlias = Callable[[str, str], Awaitable[None]]
"""Loads the weights of a folder as a policy version. Raises `ConfigError` and `EngineError`."""


class ChattingEngine(TokenEngine, Protocol):
    """A token engine with a tokenizer and token-exact chat, as in `engines/token_engine.py`."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def managed_server(self) -> ManagedChat: ...


class ModelServer(TokenLoopback):
    """Serves one started engine. An async context manager; `url` is its address. `kind` is the owner of its models.

    Routes: `/v1/chat/completions` (with tools; a streamed reply has one chunk per choice), `/v1/completions` and
    `/tokenize` as in stock vLLM, `/generate` as in SGLang or Atropos' vLLM, `/v1/models`, and `/health`.
    With `load`, such as the engine's `load_weights`, `/update_weights_from_disk` loads the weights of a folder, as
    SGLang does, for trainers that save weights after each step.
    """

    def __init__(
        self,
        engine: ChattingEngine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        kind: str = "palaestra",
        token: str | None = None,
        load: Load | None = None,
    ) -> None:
        super().__init__(engine, engine.tokenizer, kind=kind, token=token)
        self._load = load
        self.host, self.port, self.keeps_requests = host, port, False
        self._chat_engine = engine
        self._loads = itertools.count(1)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self._load is not None:
            app.router.add_post("/update_weights_from_disk", partial(self._load_weights, self._load))
            for path in ("/pause_generation", "/continue_generation"):
                app.router.add_post(path, self._paused)
        app.router.add_get("/health", self._health)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _paused(self, request: web.Request) -> web.Response:
        """Answer as SGLang. Nothing needs a pause, because loading weights itself ends the requests in progress."""
        return web.json_response({"message": "Generation paused or continued.", "status": "ok"})

    async def _load_weights(self, load: Load, request: web.Request) -> web.Response:
        """Load weights. Request and reply are SGLang's: `model_path` names the folder, and `weight_version` is recorded
        with the tokens that follow (default: the number of the update). Only a folder on this machine is loaded;
        nothing is downloaded."""
        body = await request.json()
        folder = Path(body["model_path"])
        version = str(body.get("weight_version") or next(self._loads))
        try:
            # `from_pretrained` takes other text as the name of a model on the hub, and downloads it.
            if not folder.is_dir():
                raise ConfigError(f"{folder} is not a folder on the server's machine")
            await load(str(folder), version)
        except (ConfigError, EngineError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        reply = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return web.json_response({**reply, "weight_version": version})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        messages = body.pop("messages")
        limit = body.get("max_completion_tokens")
        settings = {name: value for name, value in body.items() if name not in _REQUEST_ONLY and value is not None}
        if limit is not None:
            settings.setdefault("max_tokens", limit)
        completion = await self._chat_engine.managed_server().chat_completion(messages=messages, **settings)
        reply = _as_openai(completion, next(self._counter))
        return await _stream_completion(request, reply) if body.get("stream") else web.json_response(reply)


def _as_openai(completion: ChatCompletion, number: int) -> dict[str, JSON]:
    reply = completion.model_dump()
    reply.update(id=f"chatcmpl-{number}", object="chat.completion", created=int(time.time()))
    for choice in reply["choices"]:
        choice["message"] = {name: value for name, value in choice["message"].items() if value is not None}
        choice["message"].setdefault("content", None)
    return reply


async def _stream_completion(request: web.Request, reply: Mapping[str, JSON]) -> web.StreamResponse:
    """Return the reply as server-sent events: each choice in one chunk, then its end, then the usage."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    shared = {
        "id": reply["id"],
        "object": "chat.completion.chunk",
        "created": reply["created"],
        "model": reply["model"],
    }
    events: list[Mapping[str, JSON]] = []
    for choice in reply["choices"]:
        delta = dict(choice["message"])
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        piece = {"index": choice["index"], "delta": delta, "finish_reason": None}
        events.append({**shared, "choices": [piece]})
        events.append({**shared, "choices": [{**piece, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    events.append({**shared, "choices": [], "usage": reply["usage"]})
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response
