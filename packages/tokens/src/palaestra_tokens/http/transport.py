"""The HTTP client: JSON requests to a model server, pooled, limited and retried, with errors that name the fix.

Requests to a model server are retried only here. They are divided into lanes (`train` and `eval`). Each lane limits the
number of its requests in flight, and further requests wait in order. Errors name the address, status and model, but
never a credential.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from palaestra_slots.core.clock import Clock, SystemClock, take_turn
from palaestra_slots.core.config import sent_secret
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineError,
    EngineRefused,
    EngineReplyError,
    EngineUnavailable,
    ReplyWithheld,
)
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.redaction import HIDDEN, redacted
from palaestra_slots.core.retry import AT_START, RETRIED_STATUSES, RetryPolicy, TransientFailure, persist, retry_after_s
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 10.0
RETRY_LINE_EVERY_S = 5.0
KEEP_ALIVE_S = 4.0
"""The time after which an idle connection is closed, in seconds. Most model servers use uvicorn, which closes idle
connections after 5 s; closing them earlier avoids a race with the server."""

_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding bytes that are not JSON, or not of the expected shape."""


def encode_json(payload: JSON) -> bytes:
    """Return JSON as UTF-8. Lone surrogates, which tool output can hold, become question marks. Texts and numbers
    may be of a subclass, as numpy's texts are."""
    try:
        return msgspec.json.encode(payload)
    except (UnicodeEncodeError, TypeError):
        return json.dumps(payload, ensure_ascii=False).encode(errors="replace")


Body: TypeAlias = Callable[[], bytes]
"""Makes the body of a request for each attempt, so that the body is not kept in memory while the model works."""

Reader: TypeAlias = Callable[[aiohttp.ClientResponse], Awaitable[bytes]]
"""Reads the body of one reply. If it raises `aiohttp.ClientError`, the connection broke and the request is retried; if
it raises `FailedWithin`, the reply counts as one with that error's status; if it raises `EngineReplyError`, the reply
is broken and the request is retried."""

Decoder: TypeAlias = Callable[[bytes], T]
"""Decodes the body of a successful reply. If it raises `EngineReplyError`, the request is retried."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer with any status. `value` is the body of a successful answer, decoded."""

    status: int
    body: bytes
    retry_after: str | None = None
    value: Any = None


class Transport:
    """A pool of connections to one model server. The pool opens on first use; `aclose` is idempotent. `lanes` maps a
    lane's name to its limit of requests in flight. `timeout_s` covers one request with its retries, but not the time
    for which the request waits in its lane. `query` is added to every address. `model` is used only in messages."""

    def __init__(
        self,
        *,
        model: str = "",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        lanes: Mapping[str, int] | None = None,
        timeout_s: float = 1200.0,
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.model = model
        self.timeout_s = timeout_s
        self.retry = retry or RetryPolicy()
        self.requests = self.retries = self.failures = self.in_flight = 0
        self._headers = {**_HEADERS, **(headers or {})}
        self._query = query
        self._lanes = {name: asyncio.Semaphore(limit) for name, limit in (lanes or {"train": 512}).items()}
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._reported_at, self._unreported = float("-inf"), 0

    @classmethod
    def to(
        cls,
        config: APIServerConfig,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
    ) -> Transport:
        """Return the pool for a configured server, with the lanes `train` and `eval`. Raises `ConfigError`."""
        return cls(
            model=config.model_name,
            headers=_authorization(config),
            query=URL(config.base_url or "").query,
            lanes={"train": config.num_max_requests_at_once, "eval": config.num_requests_for_eval},
            timeout_s=config.timeout,
            retry=retry,
            clock=clock,
        )

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post_json(self, url: URL, payload: JSON, *, lane: str = "train", read: Reader | None = None) -> bytes:
        """Send `payload` in a POST and return the body of the successful reply, as `read` returns it. Raises
        `EngineUnavailable` after the last retry, and `EngineRefused` or `ContextExceeded` without a retry."""
        body = encode_json(payload)
        response = await self.request("POST", url, lambda: body, lane=lane, read=read)
        if not 200 <= response.status < 300:
            raise self.refusal(url, response.status, response.body)
        return response.body

    async def ask(
        self, url: URL, payload: JSON, decode: Decoder[T], *, lane: str = "train", read: Reader | None = None
    ) -> T:
        """Send `payload` as `post_json` does, and return the reply as `decode` returns it. Raises the same errors, and
        `EngineReplyError` if every reply is broken."""
        body = encode_json(payload)
        response = await self.request("POST", url, lambda: body, lane=lane, read=read, decode=decode)
        if not 200 <= response.status < 300:
            raise self.refusal(url, response.status, response.body)
        value: T = response.value
        return value

    def refusal(self, url: URL, status: int, body: bytes) -> EngineRefused:
        """Return the error for a status that a retry cannot change, and count it as a failure."""
        self.failures += 1
        return engine_refusal(url, status, body, self.model)

    async def look(self, method: str, url: URL, body: Body | None = None, *, retry: RetryPolicy = AT_START) -> Response:
        """Send a request that fails within seconds if no server answers, for checks at startup. Raises
        `EngineUnavailable`."""
        return await self.request(method, url, body, retry=retry, timeout_s=LOOK_TIMEOUT_S)

    async def list_models(self, url: URL, *, retry: RetryPolicy = AT_START) -> Response:
        """Request the server's list of models. Raises `EngineUnavailable`, and `EngineRefused` if the key is
        refused."""
        response = await self.look("GET", url, retry=retry)
        if response.status in (401, 403):
            raise engine_refusal(url, response.status, response.body, self.model)
        return response

    async def request(
        self,
        method: str,
        url: URL,
        body: Body | None = None,
        *,
        lane: str = "train",
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        read: Reader | None = None,
        decode: Decoder[T] | None = None,
        retried: Set[int] = RETRIED_STATUSES,
    ) -> Response:
        """Send the request until there is a reply that a retry would not change; `retried` are the statuses of others.
        After the last attempt, or if the time runs out, raises `EngineUnavailable`, or `EngineReplyError` if the last
        reply was broken."""
        whole_s, policy, tried = timeout_s or self.timeout_s, retry or self.retry, 0

        async def send(tries: int, left_s: float) -> Response:
            nonlocal tried
            tried = tries
            waited_s = await self._take_turn(lane)
            try:
                response = await self._send_request(method, url, body, left_s, read, decode)
            except EngineReplyError as error:
                # A broken reply may be an accident of this one request, so it is retried like a lost connection.
                raise TransientFailure(error, waited_s=waited_s) from error
            except EngineError:  # also an OSError, but the server's last word
                raise
            except (aiohttp.ClientError, OSError) as error:
                raise TransientFailure(
                    unreachable(url, error, self.model, tries, whole_s), waited_s=waited_s
                ) from error
            finally:
                # Before the wait for the next try, so that failing requests do not hold back the others of their lane.
                self._lanes[lane].release()
            # llama.cpp and Ollama report a conversation that is too long, or a malformed call in it, with
            # status 500, which a retry would not change.
            if response.status in retried and not is_refusal(response.status, server_says(response.body)):
                asked_s = retry_after_s(response.retry_after, self._clock.wall())
                if asked_s is None and (delay := _RETRY_DELAY.search(response.body)):
                    asked_s = float(delay[1])
                raise TransientFailure(
                    overloaded(url, response.status, response.body, self.model, tries), asked_s, waited_s
                )
            return response

        def again(wait_s: float, problem: Exception) -> None:
            self.retries += 1
            self._report_retry(f"retry {tried} of {policy.attempts - 1} in {wait_s:.1f} s: {problem}")

        try:
            return await persist(send, retry=policy, timeout_s=whole_s, clock=self._clock, rng=self._rng, again=again)
        except EngineError:
            self.failures += 1
            raise

    def _report_retry(self, line: str) -> None:
        """Log the reason for a retry, at most one line every `RETRY_LINE_EVERY_S` seconds."""
        now = self._clock.monotonic()
        if now - self._reported_at < RETRY_LINE_EVERY_S:
            self._unreported += 1
            return
        more = f" (and {self._unreported} more retries since the last line)" if self._unreported else ""
        logger.warning("%s%s", line, more)
        self._reported_at, self._unreported = now, 0

    async def _take_turn(self, lane: str) -> float:
        """Wait until the lane has room for a request, and return the seconds waited. The caller must release the lane
        afterwards. Raises `ConfigError` for an unknown lane."""
        if lane not in self._lanes:
            raise ConfigError(f"Unknown split '{lane}'; available: {', '.join(self._lanes)}.")
        asked_s = self._clock.monotonic()
        await take_turn(self._lanes[lane])
        return self._clock.monotonic() - asked_s

    async def _send_request(
        self,
        method: str,
        url: URL,
        body: Body | None,
        timeout_s: float,
        read: Reader | None,
        decode: Decoder[Any] | None,
    ) -> Response:
        self.requests += 1
        self.in_flight += 1
        try:
            session = self._session or self._open_session()
            data = None if body is None else _SentOnce(body())
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            # After a 301 or 302, aiohttp sends a GET without the body. The refusal names the new address instead.
            async with session.request(
                method, url, params=self._query, data=data, timeout=timeout, allow_redirects=False
            ) as reply:
                value: object = None
                try:
                    status, content = reply.status, await (read(reply) if read else reply.read())
                    if decode is not None and 200 <= status < 300:
                        if (said := error_within(content)) is not None:
                            raise EngineReplyError(
                                f"The model server at {public_url(url)} failed in its reply: {said}."
                            )
                        value = decode(content)
                except FailedWithin as failed:
                    status, content = failed.status, failed.body
                if status >= 300 and isinstance(content, bytes):
                    content = self._without_key(content)
                return Response(status, content, reply.headers.get("Retry-After"), value)
        finally:
            self.in_flight -= 1

    def _without_key(self, body: bytes) -> bytes:
        """Return an error body without the key, which some servers repeat."""
        secrets = [self._headers.get("Authorization", "").partition(" ")[2], *(self._query or {}).values()]
        # Shorter values are placeholders (EMPTY, none), which would also be cut out of ordinary words.
        for secret in (each.encode() for each in secrets if len(each) > 7):
            body = body.replace(secret, HIDDEN.encode())
        return body

    def _open_session(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            # The lanes limit requests; aiohttp's own limit of 100 connections would hold back the rest of a lane.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=300),
            # A load balancer's cookie would send every later request to the same server.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        return self._session


def _authorization(config: APIServerConfig) -> dict[str, str]:
    key = sent_secret(config.api_key, "The key of the model server (PALAESTRA_OPENAI_API_KEY, --openai.api_key)")
    if key is None:
        return {}
    if config.base_url and URL(config.base_url).user is not None:
        raise ConfigError("--openai.base_url contains a user, but --openai.api_key is also set; remove one of them.")
    return {"Authorization": f"Bearer {key}"}


class _SentOnce(aiohttp.Payload):
    """Bytes that are released once they have been written."""

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        body, self._value = self._value, b""
        self._consumed = True
        await writer.write(body)


_SHOWN_CHARS = 500

_RETRY_DELAY = re.compile(rb'"retryDelay": *"([0-9]{1,6}(?:\.[0-9]{1,9})?)s"')
"""The wait that Gemini requests in the body. Source: `google.rpc.RetryInfo`."""

_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|max|model'?s) context (length|window|size)"
    r"|context (length|window|size)[^.]{0,40}(exceed|limit)|exceeds?[^.]{0,60}(context|max_model_len)"
    r"|(prompt|input|request)( is|'s| has)? too (long|many tokens)|longer than the (maximum )?model"
    r"|exceeds? the maximum allowed (input )?length|(input|prompt) token count[^.]{0,40}exceeds"
    r"|`?inputs`?( tokens \+ `?max_new_tokens`?)? must (be <=|have less than)|maximum prompt length"
    r"|exceeded model token limit|(greater than the|loaded with) context length|reduce the length of the messages"
    r"|prompt exceeds max length|range of input length|(input|prompt) length (is )?too long"
    r"|prompt_?(len|tokens)[^.]{0,30}(exceeds?|must be less than)|exceeds n_ctx|too large for model with"
    r"|input length[^.]{0,20}context",
    re.IGNORECASE,
)
"""The words with which OpenAI, Mistral, MiniMax, vLLM, SGLang, llama.cpp, Ollama, TGI, LM Studio and the providers
behind OpenRouter (Gemini, Grok, Groq, Kimi, GLM, Qwen) report that a conversation does not fit the context window."""

_WITHHELD = re.compile(
    r"content_filter|content management policy|content_policy_violation|data_inspection_failed|new_sensitive"
    r"|input was flagged|(unsafe|敏感)[^.]{0,20}(content|内容)",
    re.IGNORECASE,
)
"""The words with which Azure, OpenAI, Qwen, MiniMax, OpenRouter and GLM report that a filter refused the prompt."""

_WINDOW = re.compile(
    r"n_ctx: *(?P<ctx>\d+)"
    r"|(?:(?:context|model)[ _]?(?:length|window|size|len)\b|maximum number of tokens|maximum prompt length|token limit"
    r"|maximum allowed (?:input )?length|max_seq_len)(?:(?!n_keep|exceeds limit|by )[^0-9.]){0,40}?(?P<after>\d[\d,]*)"
    r"|> *(?P<above>\d[\d,]*) maximum|input length should be \[\d+, *(?P<upto>\d[\d,]*)"
    r"|(?:<=|less than) *(?P<below>\d[\d,]*)",
    re.IGNORECASE,
)
"""The window in the messages of `_TOO_LONG`."""
_WINDOW_FIELD = re.compile(rb'"n_ctx": *([0-9]{1,9})')
"""The window in an error of llama.cpp, beside the message."""
_SMALLEST_WINDOW = 256


_MALFORMED_CALL = re.compile(r"parse[^.]{0,30}(tool.?call|function)[^.]{0,20}arguments", re.IGNORECASE)


def is_refusal(status: int, said: str) -> bool:
    """Return whether an error of a server is about the request, although its status says that the server failed."""
    return is_too_long(status, said) or (status == 500 and bool(_MALFORMED_CALL.search(said)))


def is_too_long(status: int, said: str) -> bool:
    """Return whether an error means that the conversation does not fit. llama.cpp and Ollama report that with status
    500. A rate limit may name a number of tokens too."""
    return status >= 400 and status not in (401, 402, 403, 404, 429) and bool(_TOO_LONG.search(said))


def window_tokens(said: str) -> int | None:
    """Return the size of the context window in a server's message, or None if the message does not contain it."""
    for match in _WINDOW.finditer(said):
        found = int(next(each for each in match.groups() if each).replace(",", ""))
        if found >= _SMALLEST_WINDOW:
            return found
    return None


_WAYS_OUT = {
    401: "Set the variable OPENAI_API_KEY (or PALAESTRA_OPENAI_API_KEY, or the one that --openai.api_key_variable "
    "names) or --openai.api_key to the key.",
    402: "The account is out of credit.",
    403: "The key may not use this model; check OPENAI_API_KEY (or --openai.api_key) and the model name.",
    404: "Check --openai.model_name, and that --openai.base_url is the address before /chat/completions.",
    405: "Check --openai.base_url: this address does not accept chat completions.",
    413: "The request is too large for the server.",
}


class FailedWithin(Exception):
    """Raised by a reader or decoder if a reply has status 200 but its body is an error with its own `status`, which
    OpenRouter, llama.cpp, MiniMax, vLLM and SGLang may send."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status} within a reply")
        self.status = status
        self.body = body


def error_within(body: bytes) -> str | None:
    """Return what the error in a reply or in one of its choices says, or None if there is none. Raises `FailedWithin`
    for an error with a status, and for a prompt that does not fit or that a filter refused."""
    # Nearly every reply ends here, because decoding a long one a second time costs too much.
    if b'"error"' not in body:
        return None
    try:
        value = msgspec.json.decode(body)
    except NOT_JSON:
        return None
    wholes = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
    choices = [choice for whole in wholes for choice in whole.get("choices") or () if isinstance(choice, dict)]
    error = next((each["error"] for each in (*wholes, *choices) if each.get("error")), None)
    if error is None:
        return None
    code = str((error.get("code") or error.get("http_code")) if isinstance(error, dict) else "")
    failure = msgspec.json.encode({"error": error})
    if code.isdecimal() and 400 <= int(code) < 600:
        raise FailedWithin(int(code), failure)
    raise_refused_within(failure)
    return server_says(failure)


def raise_refused_within(body: bytes) -> None:
    """Raise `FailedWithin` if a body without a reply says that the prompt does not fit or that a filter refused it."""
    said = server_says(body)
    if is_too_long(400, said) or _is_withheld(body):
        raise FailedWithin(400, body)


def _is_withheld(body: bytes) -> bool:
    # Kimi has the word only as the error's type, which is not shown.
    return b'"content_filter"' in body or bool(_WITHHELD.search(server_says(body)))


def public_url(url: URL) -> str:
    return str(url.with_user(None).with_query(None).with_fragment(None))


def server_says(body: bytes) -> str:
    """Return the server's own message from an error body (OpenAI's, FastAPI's and plain-text shapes), as one short
    line."""
    try:
        found = _error_message(msgspec.json.decode(body))
    except NOT_JSON:
        found = None
    text = found if found is not None else body.decode(errors="replace")
    text = redacted(" ".join(text.split()))
    return without_middle(text, _SHOWN_CHARS)


def _error_message(value: JSON) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            if value.get(key):
                inner = _error_message(value[key])
                code = value[key].get("code") if isinstance(value[key], dict) else None
                return f"{inner} ({code})" if inner and isinstance(code, str) else inner
        return msgspec.json.encode(value).decode()
    return None if value is None else msgspec.json.encode(value).decode()


def engine_refusal(url: URL, status: int, body: bytes, model: str) -> EngineRefused:
    said = server_says(body)
    if is_too_long(status, said):
        error = ContextExceeded(
            f"The conversation does not fit model '{model}' at {public_url(url)} (HTTP {status}): {said}"
        )
        field = _WINDOW_FIELD.search(body)
        error.window_tokens = window_tokens(said) or (int(field[1]) if field else None)
        return error
    # With a status of 500 or above, the filter itself failed, and another attempt may succeed.
    if status < 500 and _is_withheld(body):
        return ReplyWithheld(
            f"A content filter refused the prompt. Source: {public_url(url)} (HTTP {status}, model '{model}'): {said}"
        )
    way_out = _WAYS_OUT.get(status, "")
    if 300 <= status < 400:
        way_out = "The address redirects; set --openai.base_url to the target (https instead of http?)."
    if "--enable-auto-tool-choice" in said:
        way_out = "Start vLLM with these two options, or use its exact tokens: --openai.server_type vllm."
    words = said.rstrip(".") or "no text"
    text = f"The model server at {public_url(url)} refused the request (HTTP {status}, model '{model}'): {words}."
    return EngineRefused(f"{text} {way_out}".rstrip())


def overloaded(url: URL, status: int, body: bytes, model: str, tries: int) -> EngineUnavailable:
    said = server_says(body)
    error = EngineUnavailable(
        f"The model server at {public_url(url)} answered HTTP {status} (model '{model}', {_times(tries)}): "
        f"{said or 'no text'}. {'Lower the concurrency.' if status == 429 else 'Check the server log.'}"
    )
    error.by_request = status in (408, 500, 504, 520, 524)  # failures and timeouts; the other statuses come from load
    return error


def unreachable(url: URL, error: Exception, model: str, tries: int, timeout_s: float) -> EngineUnavailable:
    where = f"the model server at {public_url(url)}"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        why = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else "no connection in time"
        text = f"Cannot reach {where}: {why or error}. Is it running there? Check --openai.base_url."
    elif isinstance(error, TimeoutError):
        text = f"No answer from {where} within {timeout_s:g} s. Raise --openai.timeout or lower the concurrency."
    else:
        text = f"The connection to {where} broke: {error or type(error).__name__}. Check the server's log."
    failure = EngineUnavailable(f"{text} (model '{model}', {_times(tries)})")
    # A server that took the request may have been busy with it; one that accepted no connection was not.
    failure.by_request = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
    return failure


def _times(tries: int) -> str:
    return "tried once" if tries == 1 else f"tried {tries} times"
