"""A token server on 127.0.0.1 that serves any token engine over the APIs of SGLang, vLLM and Atropos' vLLM.

The engine samples the replies. `spoil` may change a reply before it is sent, to test how clients handle invalid
replies. `model_server.py` adds chat completions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

from aiohttp import web

from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineError, EngineUnavailable
from palaestra_slots.core.io.http_server import guard, listening
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import Sampled, TokenEngine
from palaestra_tokens.tokenizers import Tokenizer

Reply = dict[str, JSON]

_WIRE_ONLY = frozenset(
    [
        "model",
        "prompt",
        "logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_weight_versions",
        "skip_special_tokens",
        "add_special_tokens",
        "stream",
        "stream_options",
    ]
)
"""Fields of a request that are not sampling settings."""
_UNLIMITED = 1 << 20
"""The window that is reported for an engine without one."""


class TokenLoopback:
    """Serves `engine`. An async context manager; `url` is its address.

    If `stock` is false, there is no `/v1/completions`, as in Atropos' server. If `token_ids` is false, replies look
    like those of vLLM before 0.10.2. `seen` lists the bodies of requests. `kind` is the owner in the list of models, as
    in vLLM and SGLang. A client that disconnects cancels its request.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        *,
        stock: bool = True,
        token_ids: bool = True,
        kind: str = "",
        token: str | None = None,
        spoil: Callable[[Reply], Reply] = lambda reply: reply,
    ) -> None:
        self.host, self.port, self.keeps_requests = "127.0.0.1", 0, True
        self.seen: list[JSON] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._stock = stock
        self._token_ids = token_ids
        self._kind = kind
        self._token = token
        self._spoil = spoil
        self._counter = itertools.count(1)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 28, middlewares=[_errors_as_json, guard(self._token)])
        self.routes(app)
        self._listening = listening(
            app, self.host, self.port, token=self._token, shutdown_s=0.01, handler_cancellation=True
        )
        self.url = await self._listening.__aenter__()
        return self

    def routes(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/generate", self._generate)
        if self._stock:
            app.router.add_post("/v1/completions", self._completions)

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    async def _body(self, request: web.Request) -> JSON:
        body = await request.json()
        if self.keeps_requests:
            self.seen.append(body)
        return body

    async def _models(self, request: web.Request) -> web.Response:
        window = getattr(self._engine, "window_tokens", None) or _UNLIMITED
        model = {"id": self._engine.name, "object": "model", "owned_by": self._kind, "max_model_len": window}
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = list(self._tokenizer.encode(body["prompt"], add_special_tokens=False))
        return web.json_response({"count": len(ids), "max_model_len": _UNLIMITED, "tokens": ids})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        # SGLang and Atropos' vLLM share this path; their requests differ in the name of the ids.
        if "prompt" in body:
            sampled = await self._sampled(body["prompt"]["prompt_token_ids"], body)
            positions = [[{str(number): logprob}] for number, logprob in _ids_with_logprobs(sampled)]
            reply: Reply = {"prompt": "", "logprobs": [positions], "finish_reasons": [sampled.finish_reason]}
            return web.json_response(self._spoil(reply))
        settings = body["sampling_params"]
        names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
        asked = {names.get(name, name): value for name, value in settings.items()}
        sampled = await self._sampled(body["input_ids"], asked)
        info = {
            "id": str(next(self._counter)),
            "finish_reason": {"type": sampled.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(sampled.ids),
            "weight_version": sampled.policy_version,
            **({"weight_versions": _weight_versions(sampled)} if sampled.earlier else {}),
            "output_token_logprobs": [[logprob, number, None] for number, logprob in _ids_with_logprobs(sampled)],
        }
        text = self._tokenizer.decode(list(sampled.ids), skip_special_tokens=True)
        if body.get("stream"):
            entries: list[JSON] = [[logprob, number, None] for number, logprob in _ids_with_logprobs(sampled)]
            so_far = (entries[:n] for n in range(1, len(entries)))
            # like SGLang, an event counts the tokens so far
            parts = [
                {**info, "finish_reason": None, "completion_tokens": len(each), "output_token_logprobs": each}
                for each in so_far
            ]
            return await _send_events(request, [{"meta_info": each} for each in (*parts, info)])
        return web.json_response(self._spoil({"text": text, "meta_info": info}))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        prompt = body["prompt"]
        if isinstance(prompt, str):
            # vLLM adds special tokens to a text unless the request says otherwise.
            special = body.get("add_special_tokens", True)
            prompt = list(self._tokenizer.encode(prompt, add_special_tokens=special))
        sampled = await self._sampled(prompt, body)
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(list(sampled.ids), skip_special_tokens=True),
            "finish_reason": sampled.finish_reason,
            "logprobs": {
                "tokens": [f"token_id:{number}" for number in sampled.ids],
                "token_logprobs": list(sampled.logprobs),
            },
        }
        if body.get("return_weight_versions"):
            choice["weight_versions"] = _weight_versions(sampled)
        if self._token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": list(sampled.ids), "prompt_token_ids": prompt}
        used = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled.ids)}
        if body.get("stream"):
            return await _send_events(request, [*_pieces_of(choice), {"choices": [], "usage": used}])
        reply: Reply = {
            "id": f"cmpl-{next(self._counter)}",
            "model": self._engine.name,
            "choices": [choice],
            "usage": used,
        }
        return web.json_response(self._spoil(reply))

    async def _sampled(self, input_ids: Sequence[int], asked: Mapping[str, JSON]) -> Sampled:
        """Sample from the engine."""
        return await self._engine.generate(
            input_ids, {name: value for name, value in asked.items() if name not in _WIRE_ONLY}
        )


def _weight_versions(sampled: Sampled) -> list[JSON]:
    return [{"version": version, "start": start, "end": end} for version, start, end in sampled.spans]


def _pieces_of(choice: Reply) -> Iterator[Reply]:
    """Yield a choice token by token, as vLLM streams it."""
    logprobs, last = choice["logprobs"], len(choice["logprobs"]["tokens"]) - 1
    for place in range(last + 1):
        one = {name: values[place : place + 1] for name, values in logprobs.items()}
        piece = {**choice, "logprobs": one, "finish_reason": choice["finish_reason"] if place == last else None}
        if "token_ids" in choice:
            piece["token_ids"] = choice["token_ids"][place : place + 1]
        yield {"choices": [piece]}


async def _send_events(request: web.Request, events: Iterable[Reply]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Return errors in the shape of the OpenAI API: 503 if a retry may help, else 400."""
    try:
        return await handler(request)
    except (EngineError, ConfigError) as error:
        reply = {"message": str(error), "type": type(error).__name__}
        if isinstance(error, ContextExceeded):
            reply["code"] = "context_length_exceeded"
        return web.json_response({"error": reply}, status=503 if isinstance(error, EngineUnavailable) else 400)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, LookupError, TypeError) as error:
        message = f"the request cannot be read: {type(error).__name__}: {error}"
        return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)


def _ids_with_logprobs(sampled: Sampled) -> list[tuple[int, float]]:
    return list(zip(sampled.ids, sampled.logprobs, strict=True))
