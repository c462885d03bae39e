"""Assembles token-exact replies, streamed as server-sent events, into the body of an unstreamed reply.

Sources: SGLang 0.5 (`/generate` with `stream`), whose events have all tokens so far or only the new ones; vLLM 0.10.2
(`/v1/completions` with `stream` and `return_token_ids`), whose events have only the new tokens. An incomplete stream
ends in an error, and the transport retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import aiohttp
import msgspec

from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON
from palaestra_tokens.http.sse import events
from palaestra_tokens.http.transport import NOT_JSON, encode_json, error_within, server_says

OnIds: TypeAlias = Callable[[Sequence[int] | None], None]
"""Called with new token ids as they arrive, on the event loop. None means that the request is repeated and earlier ids
are void."""


class TokenEvents(Protocol):
    """The events of one reply. `ended` is true once the last event has arrived."""

    ended: bool

    def take(self, event: dict[str, JSON]) -> list[int]:
        """Add an event and return its new ids."""
        ...

    def whole(self) -> JSON:
        """Return the unstreamed reply."""
        ...


class SGLangEvents:
    """The events of SGLang's `/generate`."""

    def __init__(self) -> None:
        self.ended = False
        self._entries: list[JSON] = []
        self._info: dict[str, JSON] = {}

    def take(self, event: dict[str, JSON]) -> list[int]:
        self._info = event["meta_info"]
        entries = self._info.get("output_token_logprobs") or []
        known = len(self._entries)
        # New tokens may equal all tokens so far, as in a repetition. The number of all tokens shows that they are new.
        is_new = self._info.get("completion_tokens") == known + len(entries) or entries[:known] != self._entries
        fresh = entries if is_new else entries[known:]
        self._entries += fresh
        self.ended = bool(self._info.get("finish_reason"))
        return [entry[1] for entry in fresh]

    def whole(self) -> JSON:
        return {"meta_info": {**self._info, "output_token_logprobs": self._entries}}


class VLLMEvents:
    """The events of vLLM's `/v1/completions`."""

    def __init__(self) -> None:
        self.ended = False
        self._choice: dict[str, JSON] = {}
        self._ids: list[int] = []
        self._tokens: list[str] = []
        self._logprobs: list[JSON] = []
        self._usage: JSON = None

    def take(self, event: dict[str, JSON]) -> list[int]:
        self._usage = event.get("usage") or self._usage
        if not event.get("choices"):
            return []
        choice = event["choices"][0]
        logprobs = choice.get("logprobs") or {}
        tokens = logprobs.get("tokens") or []
        self._tokens += tokens
        self._logprobs += logprobs.get("token_logprobs") or []
        fresh = choice.get("token_ids")
        if fresh is None:
            fresh = [int(token.rpartition(":")[2]) for token in tokens]
        self._ids += fresh
        # A null in a later event must not erase what an earlier one said, such as the prompt's ids.
        self._choice |= {key: value for key, value in choice.items() if value is not None}
        self.ended = self.ended or choice.get("finish_reason") is not None
        return list(fresh)

    def whole(self) -> JSON:
        logprobs = {"tokens": self._tokens, "token_logprobs": self._logprobs}
        return {"choices": [{**self._choice, "token_ids": self._ids, "logprobs": logprobs}], "usage": self._usage}


class TokenStreamReader:
    """Reads the replies to one request and its retries. All replies but the last are failures or incomplete."""

    def __init__(self, source: str, kind: Callable[[], TokenEvents], on_ids: OnIds) -> None:
        self._source, self._kind, self._on_ids = source, kind, on_ids
        self._tries = 0

    async def read(self, reply: aiohttp.ClientResponse) -> bytes:
        """Return the reply, streamed or not, as one JSON body. Raises the same errors as `EventStreamReader.read`."""
        if reply.content_type != "text/event-stream" or reply.status != 200:
            return await reply.read()
        self._tries += 1
        if self._tries > 1:
            # The ids of the try that failed are void.
            self._on_ids(None)
        found = self._kind()
        async for data in events(reply.content.iter_any()):
            if data == b"[DONE]":
                break
            if fresh := self._fresh(found, data):
                self._on_ids(fresh)
        if not found.ended:
            raise aiohttp.ClientPayloadError("the stream ended in the middle of the reply")
        return encode_json(found.whole())

    def _fresh(self, found: TokenEvents, data: bytes) -> list[int]:
        try:
            event = msgspec.json.decode(data)
            if not (isinstance(event, dict) and event.get("error")):
                return found.take(event)
        except (*NOT_JSON, KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EngineReplyError(f"{self._source} sent an invalid event: {server_says(data)!r}.") from None
        raise EngineReplyError(f"{self._source} failed in the middle of its reply: {error_within(data)}.")
