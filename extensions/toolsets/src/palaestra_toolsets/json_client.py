"""JSON over HTTP, with retries and typed errors, to a server that the user configured for a tool.

Addresses that a model names go through `web/fetch.py`, which refuses private addresses. Requests to the agent's model
server go through `palaestra_tokens/http/transport.py`. Invariant: every failure is a mistake that the model reads
(`ToolMistake`), or an infrastructure failure (`ToolUnavailable`). Messages quote the reply, without the values of the
request's headers that it repeats, so they reveal no key.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.clock import Clock, SystemClock, take_turn
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.retry import RETRIED_STATUSES, RetryPolicy, TransientFailure, persist, retry_after_s
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

TRY_TIMEOUT_S = 30.0
TIMEOUT_S = 120.0
"""The time limits, in seconds, of one attempt, and of one request with all its attempts."""
MAX_REPLY_BYTES = 16 << 20
RETRY = RetryPolicy(attempts=5, first_s=0.5, longest_s=30.0)
_SHOWN_CHARS = 300
_JSON = "application/json"
_HEADERS = {"Accept": _JSON}


@dataclass(slots=True)
class JsonServer:
    """A provider's server. `key` names the setting to check if the server refuses access; `headers` carry the key
    itself.

    `lane` bounds concurrent requests.
    """

    name: str
    base_url: str
    key: str
    headers: Mapping[str, str]
    lane: asyncio.Semaphore
    retry: RetryPolicy = RETRY
    try_timeout_s: float = TRY_TIMEOUT_S
    clock: Clock | None = None
    rng: random.Random | None = None

    async def get(self, path: str, query: Mapping[str, str]) -> JSON:
        """Send a GET request and return the JSON reply. Raises as `post` does."""
        return await self._request_json("GET", (URL(self.base_url) / path.lstrip("/")).with_query(query), None)

    async def post(self, path: str, payload: JSON) -> JSON:
        """Send a POST request and return the JSON reply. Raises `ToolMistake` if the server refuses the request, and
        `ToolUnavailable` for any other failure."""
        return await self._request_json("POST", URL(self.base_url) / path.lstrip("/"), msgspec.json.encode(payload))

    async def post_for_bytes(self, path: str, payload: JSON) -> bytes:
        """Send a POST request and return the unparsed reply. Raises as `post` does."""
        return await self._ask_for_bytes("POST", URL(self.base_url) / path.lstrip("/"), msgspec.json.encode(payload))

    async def _request_json(self, method: str, url: URL, body: bytes | None) -> JSON:
        told = await self._ask_for_bytes(method, url, body)
        try:
            return msgspec.json.decode(told)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._down(f"did not answer with JSON: {self._quoted_reply(told)}") from None

    async def _ask_for_bytes(self, method: str, url: URL, body: bytes | None) -> bytes:
        clock = self.clock or SystemClock()

        async def send(tries: int, left_s: float) -> bytes:
            try:
                timeout_s = min(left_s, self.try_timeout_s)
                status, told, retry_after = await self._send_request(method, url, body, timeout_s)
            except ToolUnavailable:  # an OSError, but an answer that was too long will be too long again
                raise
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError too
                why = str(error) or type(error).__name__
                raise TransientFailure(self._down(f"cannot be reached ({why}), tried {_times(tries)}")) from error
            if status in RETRIED_STATUSES:
                problem = self._down(f"answered with HTTP {status}, tried {_times(tries)}: {self._quoted_reply(told)}")
                raise TransientFailure(problem, retry_after_s(retry_after, clock.wall()))
            return self._accepted(status, told)

        def again(wait_s: float, problem: Exception) -> None:
            logger.info("Trying again in %.1f s: %s", wait_s, problem)

        return await persist(
            send, retry=self.retry, timeout_s=TIMEOUT_S, clock=clock, rng=self.rng or random.Random(), again=again
        )

    async def _send_request(
        self, method: str, url: URL, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes, str | None]:
        headers = {**_HEADERS, **self.headers, **({"Content-Type": _JSON} if body is not None else {})}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0))
        await take_turn(self.lane)
        try:
            async with (
                aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout) as session,
                session.request(method, url, data=body, headers=headers, allow_redirects=False) as reply,
            ):
                content = bytearray()
                # Counted while it arrives, because the length in the headers may be missing or wrong.
                async for chunk in reply.content.iter_any():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise self._down(f"sent more than {MAX_REPLY_BYTES >> 20} MB")
                return reply.status, bytes(content), reply.headers.get("Retry-After")
        finally:
            self.lane.release()

    def _accepted(self, status: int, told: bytes) -> bytes:
        if status in (401, 402, 403):
            raise self._down(f"denied access (HTTP {status}); check {self.key}: {self._quoted_reply(told)}")
        # Such a request contains what the model wrote, so the model can correct it.
        if status in (400, 413, 414, 422):
            raise ToolMistake(f"{self.name} rejected this request (HTTP {status}): {self._quoted_reply(told)}")
        if not 200 <= status < 300:
            raise self._down(f"answered with HTTP {status}; check its address: {self._quoted_reply(told)}")
        return told

    def _down(self, what: str) -> ToolUnavailable:
        return ToolUnavailable(f"{self.name} at {URL(self.base_url).origin()} {what}")

    def malformed(self, told: JSON) -> ToolUnavailable:
        """Return the error for a reply in an unexpected format."""
        return self._down(f"answered in an unexpected format: {self._quoted_reply(msgspec.json.encode(told))}")

    def _quoted_reply(self, told: bytes) -> str:
        """Return the reply as part of a message."""
        shown = redacted(
            told.decode(errors="replace"), *(each.removeprefix("Bearer ") for each in self.headers.values())
        )
        return without_middle(" ".join(shown.split()), _SHOWN_CHARS)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The text of a chat completion, its finish reason, and the whole reply."""

    text: str
    finish_reason: JSON
    reply: dict[str, JSON]


def model_server(
    name: str, prefix: str, base_url: str, key: str | None, lane: asyncio.Semaphore, timeout_s: float
) -> JsonServer:
    """Return a model server with OpenAI's API. `/v1` is added to the address if it is missing. The names of the
    server's settings begin with `prefix`."""
    base_url = base_url.rstrip("/")
    return JsonServer(
        name,
        base_url if base_url.endswith("/v1") else f"{base_url}/v1",
        f"{prefix}_api_key",
        {"Authorization": f"Bearer {key}"} if key else {},
        lane,
        try_timeout_s=timeout_s,
    )


def missing_model(what: str, prefix: str, models: str = "") -> str:
    """Return the message that `what` is not configured, with the settings to set. `models` names the setting for the
    models; if it is empty, the message names `prefix`_model."""
    return (
        f"{what} configured: set {prefix}_base_url (--env.{prefix}_base_url http://HOST/v1), "
        f"{models or f'{prefix}_model'} and, if the server needs a key, {prefix}_api_key"
    )


async def chat_answer(server: JsonServer, model: str | None, messages: JSON, max_tokens: int) -> ChatAnswer:
    """Return the model's answer to these messages. Raises `ToolMistake` if the server refuses the request, and
    `ToolUnavailable` for any other failure or an empty answer."""
    request = {"model": model, "messages": messages, "max_tokens": max_tokens}
    reply = await server.post("chat/completions", request)
    try:
        choice = reply["choices"][0]
        answer, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise server.malformed(reply) from None
    if not isinstance(answer, str) or not answer.strip():
        raise ToolUnavailable(f"{server.name} gave no answer (finish_reason {reason!r})")
    return ChatAnswer(answer, reason, reply)


def objects_at(server: JsonServer, told: JSON, *path: str) -> list[dict[str, JSON]]:
    """Return the list of objects at `path` of a reply, or an empty list if the reply has none there. Raises
    `ToolUnavailable` for a reply in another format."""
    value = told
    for name in path:
        if not isinstance(value, dict):
            raise server.malformed(told)
        value = value.get(name)
        if value is None:
            return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise server.malformed(told)
    return value


def text(row: Mapping[str, JSON], *names: str) -> str:
    """Return the first of these fields that contains text, or the empty string."""
    return next((str(row[name]) for name in names if isinstance(row.get(name), str) and row[name]), "")


def _times(tries: int) -> str:
    return "once" if tries == 1 else f"{tries} times"
