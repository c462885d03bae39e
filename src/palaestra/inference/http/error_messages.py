"""From what went wrong at a model server to one typed error that names the address, the status, the model and the way
out. Text only: when to try again is decided elsewhere.

Invariant: no credential is ever in a message. Addresses are shown without user, password and query.
"""

from __future__ import annotations

import re

import aiohttp
import msgspec
from yarl import URL

from palaestra.core.errors import ContextExceeded, EngineRefused, EngineUnavailable
from palaestra.core.types import JSON
from palaestra.inference.http.chat_completions import NOT_JSON

_SHOWN_CHARS = 500

_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|max|model'?s) context (length|window|size)"
    r"|context (length|window|size)[^.]{0,40}(exceed|limit)|exceeds?[^.]{0,60}(context|max_model_len)"
    r"|(prompt|input|request)( is|'s| has)? too (long|many tokens)|longer than the (maximum )?model"
    r"|exceeds? the maximum allowed (input )?length|(input|prompt) token count[^.]{0,40}exceeds"
    r"|`?inputs`?( tokens \+ `?max_new_tokens`?)? must (be <=|have less than)|maximum prompt length"
    r"|exceeded model token limit|(greater than the|loaded with) context length|reduce the length of the messages"
    r"|prompt exceeds max length|range of input length",
    re.IGNORECASE,
)
"""How OpenAI, vLLM, SGLang, llama.cpp, TGI, LM Studio and the providers behind OpenRouter (Gemini, Grok, Groq, Kimi,
GLM, Qwen) say that a conversation does not fit."""

_WAYS_OUT = {
    401: "Set the key with --openai.api_key.",
    402: "The account is out of credit.",
    403: "The key has no right to this model; check --openai.api_key and --openai.model_name.",
    404: "Check --openai.model_name, and that --openai.base_url is the address before /chat/completions.",
    405: "Check --openai.base_url: this address does not take chat completions.",
    413: "The request is too large for the server.",
}


class FailedWithin(Exception):
    """Raised by who reads a reply: its status was 200, and it says itself that the request failed, with `status`.

    Sources: OpenRouter's errors, which come so once a provider has begun; vLLM's and SGLang's in the midst of a stream.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status} within a reply")
        self.status = status
        self.body = body


def raise_failed_within(body: bytes) -> None:
    """Look whether a JSON body is an error with a status of its own. Raises `FailedWithin`."""
    if b'"error"' not in body:
        return
    try:
        error = msgspec.json.decode(body, type=_WithError).error
    except NOT_JSON:
        return
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 600:
        raise FailedWithin(code, body)


class _WithError(msgspec.Struct):
    error: JSON = None


def shown(url: URL) -> str:
    """The address as messages show it."""
    return str(url.with_user(None).with_query(None).with_fragment(None))


def server_says(body: bytes) -> str:
    """The server's own words from an error body: OpenAI's, FastAPI's and plain-text shapes; one line, bounded."""
    try:
        found = _message(msgspec.json.decode(body))
    except NOT_JSON:
        found = None
    text = found if found is not None else body.decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _message(value: JSON) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            if value.get(key):
                inner = _message(value[key])
                code = value[key].get("code") if isinstance(value[key], dict) else None
                return f"{inner} ({code})" if inner and isinstance(code, str) else inner
        return msgspec.json.encode(value).decode()
    return None if value is None else msgspec.json.encode(value).decode()


def refused(url: URL, status: int, body: bytes, model: str) -> EngineRefused:
    """The error for a status that trying again cannot change."""
    said = server_says(body)
    if status in (400, 413, 422) and _TOO_LONG.search(said):
        return ContextExceeded(f"The conversation does not fit model '{model}' at {shown(url)} (HTTP {status}): {said}")
    way_out = _WAYS_OUT.get(status, "")
    if 300 <= status < 400:
        way_out = "The address redirects; set --openai.base_url to where it leads (https instead of http?)."
    words = said.rstrip(".") or "no text"
    text = f"The model server at {shown(url)} refused the request (HTTP {status}, model '{model}'): {words}."
    return EngineRefused(f"{text} {way_out}".rstrip())


def overloaded(url: URL, status: int, body: bytes, model: str, tries: int) -> EngineUnavailable:
    """The error for a status that could have passed by itself, but did not within the tries allowed."""
    said = server_says(body)
    return EngineUnavailable(
        f"The model server at {shown(url)} answered HTTP {status} (model '{model}', {_times(tries)}): "
        f"{said or 'no text'}. {'Lower the concurrency.' if status == 429 else 'Look at the log of the server.'}"
    )


def unreachable(url: URL, error: Exception, model: str, tries: int, timeout_s: float) -> EngineUnavailable:
    """The error for a connection that failed, broke or stayed silent."""
    where = f"the model server at {shown(url)}"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        why = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else "no connection in time"
        text = f"Cannot reach {where}: {why or error}. Is it running there? Check --openai.base_url."
    elif isinstance(error, TimeoutError):
        text = f"No answer from {where} within {timeout_s:g} s. Raise --openai.timeout or lower the concurrency."
    else:
        text = f"The connection to {where} broke: {error or type(error).__name__}. Look at the log of the server."
    return EngineUnavailable(f"{text} (model '{model}', {_times(tries)})")


def _times(tries: int) -> str:
    return "tried once" if tries == 1 else f"tried {tries} times"
