"""`/v1/chat/completions`: any program that can talk to a chat model can talk to the agent.

A request is one message from a person: the last entry in `messages`. The header `X-Session-Id` names its conversation.
Without this header, the server finds the conversation by the earlier messages, but only among those of the same person,
whom the request's field `user` names. Without both, or if two conversations of a person have the same messages, a new
session begins. It gets the earlier messages, for example a system prompt, as a transcript. The reply has the session's
id in the same header; a request of the same `user` continues that session with it.

A request that repeats the `Idempotency-Key` of an earlier one gets the earlier request's answer, and starts no turn.
While the earlier request is still open, the repeated one gets status 409. Without `X-Session-Id`, the key of a
conversation's first message also names its session, together with the `user` and the messages. A key that stands alone
must have at least 16 characters, such as a UUID, so that no two programs send the same one.

With `stream: true`, the answer is sent as it is generated (server-sent events); other requests get the whole answer at
the end. `usage` has the tokens of all model calls of the turn. The agent uses the gateway's tools; `tools`,
`temperature` and other settings of a request have no effect. If the client disconnects, the turn continues, and its
answer becomes part of the conversation. A turn that failed, for example because of the model server, is an error with
status 502 or, in a stream, an event with `error`.

The token is the platform's `token`. Any program that has it may use the agent, so there is no allow-list. Settings in
`extra`: `host` (127.0.0.1), `port` (8643) and `model`, the name to offer (palaestra).

Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
import uuid
from collections import OrderedDict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from palaestra_chat.turn_events import NATURAL
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Deliver, Incoming, PlatformLimits
from palaestra_gateway.platforms.webhook import listen_address
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.http_server import Handler, guard, listening
from palaestra_slots.core.types import JSON, Outcome

MAX_BODY_BYTES = 64 << 20
SESSION = "X-Session-Id"
_REMEMBERED = 10_000
_MIN_LONE_KEY = 16
_KEEP_ALIVE_S = 15.0
_FAILED: frozenset[str] = frozenset({Outcome.API_ERROR, Outcome.INFRA_ERROR})
_FINISH_REASONS: dict[str, str] = dict.fromkeys((Outcome.LENGTH, Outcome.MAX_TURNS, Outcome.BUDGET), "length")
"""The API's word for a turn that reached a limit; every other answer ends with `stop`."""


@dataclass(slots=True)
class _Request:
    """A request that waits for its answer. `parts` are the pieces as they arrive, then None. Once `answered` is true,
    the request accepts no more pieces."""

    parts: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    texts: list[str] = field(default_factory=list)
    streamed: str = ""
    answered: bool = False
    outcome: str = NATURAL
    usage: dict[str, JSON] = field(default_factory=lambda: _usage(0, 0))


class OpenAIServer:
    """One server. `url` is its address while it runs, with `/v1`."""

    extra_settings = ("host", "port", "model")
    limits = PlatformLimits(max_text=16 << 20, max_file_bytes=16 << 20, streams=True, requests=True)

    def __init__(self, name: str, config: PlatformConfig) -> None:
        self.name = name
        self.url = ""
        self._token = config.secret(name)
        self._host, self._port = listen_address(name, config, 8643)
        self._model = str(config.extra.get("model", "palaestra"))
        self._deliver: Deliver | None = None
        self._waiting: dict[tuple[str, str], _Request] = {}
        self._known: OrderedDict[str, str] = OrderedDict()
        self._open = AsyncExitStack()

    async def start(self, deliver: Deliver) -> None:
        """Start the server. Raises `ConfigError` if the port is in use, or if `host` is not a loopback address and
        there is no token."""
        self._deliver = deliver
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[_as_errors, guard(self._token, error=_access_error)]
        )
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        url = await self._open.enter_async_context(listening(app, self._host, self._port, token=self._token))
        self.url = f"{url}/v1"

    async def stop(self) -> None:
        self._deliver = None
        for request in self._waiting.values():
            request.parts.put_nowait(None)
        await self._open.aclose()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "palaestra"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read())
            earlier, text, files = _read_messages(body)
            session, given_key = _header(request, SESSION), _header(request, "Idempotency-Key")
            user = _user(body)
            if given_key and not session and not user and len(given_key) < _MIN_LONE_KEY:
                raise ConfigError(
                    f"an Idempotency-Key without the header {SESSION} and the field user must have at least "
                    f"{_MIN_LONE_KEY} characters, such as a UUID"
                )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            return _error_response(400, str(error), "invalid_request_error")
        said = text
        if not session and user and earlier:
            session = self._known.get(_conversation_digest(user, earlier), "")
        if not session:
            first = _conversation_digest(user, [*earlier, ("user", said)], given_key)
            session = first[:32] if given_key else uuid.uuid4().hex
            if earlier:
                before = "\n\n".join(f"{role}: {content}" for role, content in earlier)
                text = f"[The conversation before this session:]\n{before}\n\n[The message to answer:]\n{said}"
        if self._deliver is None:
            return _error_response(503, "the gateway is stopping", "server_error")
        address = ChatAddress(self.name, _chat_id(user, session))
        message_id = given_key or uuid.uuid4().hex
        key = (address.chat_id, message_id)
        if key in self._waiting:
            return _error_response(409, f"the request {message_id} is already being answered", "conflict")
        waiting = self._waiting[key] = _Request()
        try:
            await self._deliver(Incoming(address, message_id, user or "api", text, tuple(files), trusted=True))
            if body.get("stream"):
                options = body.get("stream_options")
                usage = isinstance(options, dict) and options.get("include_usage") is True
                answer, reply = await self._stream_answer(request, waiting, session, usage=usage)
            else:
                while await waiting.parts.get() is not None:
                    pass
                answer = "\n\n".join(waiting.texts)
                reply = self._whole(answer, session, waiting)
        finally:
            del self._waiting[key]
        if user and waiting.outcome not in _FAILED:
            self._remember(_conversation_digest(user, [*earlier, ("user", said), ("assistant", answer)]), session)
        return reply

    def _whole(self, answer: str, session: str, waiting: _Request) -> web.Response:
        if not answer:
            return _error_response(503, "the gateway stopped; send the message again", "server_error")
        if waiting.outcome in _FAILED:
            failed = _error_response(502, answer, "server_error", waiting.outcome)
            failed.headers[SESSION] = session
            return failed
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "message": message, "finish_reason": _FINISH_REASONS.get(waiting.outcome, "stop")}
        body = {**self._head("chat.completion"), "choices": [choice], "usage": waiting.usage}
        return web.json_response(body, headers={SESSION: session})

    async def _stream_answer(
        self, request: web.Request, waiting: _Request, session: str, *, usage: bool
    ) -> tuple[str, web.StreamResponse]:
        """Send the answer as it arrives. Returns the whole text that was sent, and the response."""
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", SESSION: session})
        await reply.prepare(request)
        head = self._head("chat.completion.chunk")

        async def send(delta: dict[str, JSON], finish: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            await reply.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")

        await send({"role": "assistant", "content": ""})
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    part = await waiting.parts.get()
            except TimeoutError:
                await reply.write(b": waiting\n\n")  # so that no proxy closes the connection
                continue
            if part is None:
                break
            part = part if waiting.streamed else part.lstrip()
            if part:
                await send({"content": part})
            waiting.streamed += part
        answer = "\n\n".join(waiting.texts)
        if waiting.outcome in _FAILED:
            failed = {"error": _error_object(answer, "server_error", waiting.outcome)}
            await reply.write(b"data: " + json.dumps(failed).encode() + b"\n\ndata: [DONE]\n\n")
            return answer, reply
        streamed = waiting.streamed.rstrip()
        if streamed.endswith(answer):
            more = ""
        elif answer.startswith(streamed):
            more = answer.removeprefix(streamed)
        else:  # the reply was restarted, or notes come before it
            more = f"\n\n{answer}"
        if more.strip():
            await send({"content": more})
        await send({}, _FINISH_REASONS.get(waiting.outcome, "stop") if answer else "error")
        if usage:
            last = {**head, "choices": [], "usage": waiting.usage}
            await reply.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return f"{waiting.streamed}{more}" if more.strip() else waiting.streamed, reply

    def _head(self, kind: str) -> dict[str, JSON]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self._model}

    async def send_text(self, address: ChatAddress, text: str, *, key: str, answers: Answers | None = None) -> str:
        """Add a text to the reply of the request that it answers. If the request is gone, the answer stays in the
        conversation and is not sent. A notice, or a question of the agent, becomes part of the replies to all open
        requests of the session."""
        if answers is not None:
            waiting = self._waiting.get((address.chat_id, answers.message_id))
            if waiting is not None and not waiting.answered:
                waiting.texts.append(text)
                waiting.answered = answers.last
                if answers.last:
                    waiting.usage = _usage(answers.prompt_tokens, answers.completion_tokens)
                    waiting.outcome = answers.outcome
                    waiting.parts.put_nowait(None)
            return key
        for (chat_id, _), waiting in self._waiting.items():
            if chat_id == address.chat_id:
                waiting.texts.append(text)
                waiting.parts.put_nowait(f"{text}\n\n")
        return key

    async def send_file(
        self, address: ChatAddress, file: Attachment, *, key: str, answers: Answers | None = None
    ) -> str:
        """Add a file to the reply, as a data URL."""
        url = f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}"
        sign = "!" if file.is_image else ""
        return await self.send_text(address, f"{sign}[{file.name}]({url})", key=key, answers=answers)

    async def edit_text(self, address: ChatAddress, message_id: str, text: str) -> None:
        raise NotImplementedError("this platform cannot edit messages")

    async def stream_text(self, message: Incoming, text: str) -> None:
        waiting = self._waiting.get((message.address.chat_id, message.message_id))
        if waiting is not None:
            waiting.parts.put_nowait(text)

    async def set_typing(self, address: ChatAddress, typing: bool) -> None:
        raise NotImplementedError("this platform has no typing notices")

    def _remember(self, digest: str, session: str) -> None:
        """Record which session has this history. A history that two sessions have belongs to neither."""
        self._known[digest] = session if self._known.get(digest, session) == session else ""
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _header(request: web.Request, name: str) -> str:
    """Return the header's value, or an empty string if it is missing. Raises `ConfigError` for bytes that are not
    text."""
    value = request.headers.get(name, "").strip()
    if not value.isprintable():
        raise ConfigError(f"the header {name} must be text in UTF-8 without control characters")
    return value


def _read_messages(body: JSON) -> tuple[list[tuple[str, str]], str, list[Attachment]]:
    """Return the role and text of each message before the last, then the text and the images of the last message.
    Raises `ConfigError`."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError("messages must be a list of messages, which ends with a message of the user")
    if messages[-1].get("role") != "user":
        raise ConfigError("the last message must have the role user")
    files: list[Attachment] = []
    earlier = [(str(each.get("role")), _content_text(each.get("content"), [])) for each in messages[:-1]]
    return earlier, _content_text(messages[-1].get("content"), files), files


def _content_text(content: JSON, files: list[Attachment]) -> str:
    """Return the text of a message's content; its images are added to `files`."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ConfigError("the content of a message must be a string or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise ConfigError("a part of a message must be an object")
        if part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part.get("type") == "image_url" and isinstance(part.get("image_url"), dict):
            files.append(_image_attachment(str(part["image_url"].get("url", "")), len(files) + 1))
        else:
            raise ConfigError(f"parts of type {part.get('type')!r} are not supported; use text and image_url")
    return "\n".join(texts)


def _image_attachment(url: str, number: int) -> Attachment:
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ConfigError("image_url must be a data URL of an image; addresses are not fetched")
    media_type = head.removeprefix("data:").removesuffix(";base64")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        raise ConfigError("image_url does not contain valid base64") from None
    return Attachment(f"image-{number}.{media_type.partition('/')[2]}", media_type, content)


def _user(body: JSON) -> str:
    """Return the person whom a request names, or an empty string. Raises `ConfigError`."""
    user = body.get("user") if isinstance(body, dict) else None
    if user is not None and not (isinstance(user, str) and user.isprintable()):
        raise ConfigError("user must be text without control characters")
    return user or ""


def _chat_id(user: str, session: str) -> str:
    """Return the id of a session, which no `X-Session-Id` of another person, or of nobody, can have."""
    return f"{_conversation_digest(user, [])[:16]}-{session}"


def _conversation_digest(user: str, history: list[tuple[str, str]], key: str = "") -> str:
    said = [(role, content.strip()) for role, content in history]
    return hashlib.sha256(msgspec.json.encode([user, said, key])).hexdigest()


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, JSON]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@web.middleware
async def _as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors of the HTTP server, such as an unknown path or a body that is too large, to the API's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error_response(error.status, error.text or error.reason, "invalid_request_error")


def _access_error(status: int, reason: str) -> web.Response:
    if status == 401:
        return _error_response(status, reason, "authentication_error", "invalid_api_key")
    return _error_response(status, reason, "permission_error")


def _error_response(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    return web.json_response({"error": _error_object(message, kind, code)}, status=status)


def _error_object(message: str, kind: str, code: str | None) -> dict[str, JSON]:
    return {"message": message, "type": kind, "param": None, "code": code}
