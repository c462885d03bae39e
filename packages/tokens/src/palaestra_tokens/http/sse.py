"""Assembles a chat completion, streamed as server-sent events, into the body of an unstreamed reply.

An incomplete stream ends in an error, and the transport retries. Sources: the OpenAI reference
(`chat.completion.chunk`, `stream_options`) and the WHATWG's specification of server-sent events. Servers send calls
with or without an index or an id, with the same index for all calls, with the name or even a new id in every chunk,
with `{}` before the arguments, or with the whole call repeated at the end. What completes a JSON object therefore
decides where a call ends, and the assembled reply has each name and argument only once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp
import msgspec

from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import extra_of_call, extra_of_message
from palaestra_tokens.http.chat_completions import content_texts, decode_json, listed_calls, whole_characters
from palaestra_tokens.http.transport import NOT_JSON, error_within, server_says

_DONE = b"[DONE]"
_JOINED = ("reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of one chunk for one choice: text, thinking, or both. If `restarted` is true, the connection broke
    and the request is repeated, so all earlier chunks are void."""

    index: int = 0
    content: str = ""
    reasoning: str = ""
    restarted: bool = False


DeltaHook: TypeAlias = Callable[[Delta], None]
"""Called with each chunk as it arrives, on the event loop, so it must not block."""


class EventStreamReader:
    """Reads the replies to one request and its retries. All replies but the last are failures or incomplete."""

    def __init__(self, source: str, hook: DeltaHook | None = None) -> None:
        self._source = source
        self._hook = hook
        self._tries = 0

    async def read(self, reply: aiohttp.ClientResponse) -> bytes:
        """Return the reply, streamed or not, as one JSON body. Raises `aiohttp.ClientPayloadError` for an incomplete
        stream, `FailedWithin` for an error with a status in the stream, and `EngineReplyError` for an error without a
        status or an invalid event."""
        if reply.content_type != "text/event-stream" or reply.status != 200:
            return await reply.read()
        self._tries += 1
        # Whoever shows the reply as it arrives has shown the pieces of the try that failed.
        if self._tries > 1 and self._hook is not None:
            self._hook(Delta(restarted=True))
        whole = _Completion()
        async for data in events(reply.content.iter_any()):
            if data == _DONE:
                return whole.encoded()
            for delta in whole.take(self._chunk(data)):
                if self._hook is not None:
                    self._hook(delta)
        if not whole.ended:
            raise aiohttp.ClientPayloadError("the stream ended in the middle of the reply")
        return whole.encoded()

    def _chunk(self, data: bytes) -> dict[str, JSON]:
        if (said := error_within(data)) is not None:
            raise EngineReplyError(f"{self._source} failed in the middle of its reply: {said}.")
        try:
            chunk = decode_json(data)
        except NOT_JSON:
            chunk = None
        if not isinstance(chunk, dict):
            raise EngineReplyError(f"{self._source} sent an invalid chunk of a reply: {server_says(data)!r}.")
        return chunk


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, in order. A last event without a blank line after it is dropped."""
    lines: list[bytes] = []
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            # Lines end with \r\n or \n. A chunk may end between the two bytes, so the text is split at \n alone.
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines.clear()


_FRAGMENTS = frozenset({"text", "thinking", "reasoning", "summary", "data", "content"})
"""The fields of a provider's blocks that arrive in pieces; the others arrive whole, such as a signature."""


def _merge(whole: dict[str, JSON], piece: dict[str, JSON], *, block: bool = False) -> None:
    """Add the fields of a chunk to those of the chunks before it: objects by their keys, lists by the `index` of their
    blocks. Texts are joined; in a `block`, only those of `_FRAGMENTS`."""
    for name, value in piece.items():
        before = whole.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            _merge(before, value, block=True)
        elif isinstance(value, list) and isinstance(before or [], list):
            whole[name] = _with_blocks(before or [], value)
        elif isinstance(before, str) and isinstance(value, str) and (name in _FRAGMENTS if block else value != before):
            whole[name] = before + value
        elif value is not None or name not in whole:
            whole[name] = deepcopy(value)


def _with_blocks(blocks: list[JSON], pieces: list[JSON]) -> list[JSON]:
    """Return the blocks after these pieces: each continues a block or begins one."""
    for piece in pieces:
        if (begun := _continued_block(blocks, piece)) is None:
            blocks.append(deepcopy(piece))
        else:
            _merge(begun, piece, block=True)
    return blocks


def _continued_block(blocks: list[JSON], piece: JSON) -> dict[str, JSON] | None:
    """Return the block that a piece continues: the one with its `index` or, without an index, the last block, if it is
    a text of the same type without a signature."""
    if not isinstance(piece, dict):
        return None
    index, kind = piece.get("index"), piece.get("type")
    if index is not None:
        same = (each for each in blocks if isinstance(each, dict) and each.get("index") == index)
        return next((each for each in same if kind in (None, each.get("type"))), None)
    last = blocks[-1] if blocks else None
    if not isinstance(last, dict) or kind is None or last.get("type") != kind or last.get("signature"):
        return None
    same_id = piece.get("id") in (None, last.get("id"))
    return last if same_id and last.keys() & _FRAGMENTS - {"data"} else None


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    extra: dict[str, JSON] = field(default_factory=dict)

    def take(self, call: dict[str, JSON]) -> None:
        name, piece = _call_delta(call)
        self.id = self.id or _text_or_empty(call.get("id"))
        _merge(self.extra, extra_of_call(call))
        self.name = name if name.startswith(self.name) else self.name + name
        if piece.lstrip().startswith("{") and self.whole is not None:
            if self._repeats(piece):
                return
            if not self.whole:  # `{}` stood for arguments to come
                self.arguments.clear()
        self.arguments.append(piece)

    @property
    def whole(self) -> dict[str, JSON] | None:
        """The arguments so far, if they are a JSON object."""
        # Only a piece that ends with a brace can complete an object. Parsing
        # after each piece would take quadratic time.
        last = next((piece for piece in reversed(self.arguments) if piece.strip()), "")
        return _json_object("".join(self.arguments)) if last.rstrip().endswith("}") else None

    def is_another(self, call: dict[str, JSON]) -> bool:
        """Return whether a delta with this call's index, or without an index, begins another call."""
        (name, piece), id_ = _call_delta(call), _text_or_empty(call.get("id"))
        if not name:
            # Nothing of the same call can follow a whole object, except the object again.
            return bool(self.whole) and piece.lstrip().startswith("{") and not self._repeats(piece)
        other_id = bool(id_ and self.id and id_ != self.id)
        if other_id and name != self.name:
            return True
        same_id = bool(id_) and id_ == self.id
        return self.whole is not None and not same_id and (other_id or name != self.name or not self._repeats(piece))

    def _repeats(self, piece: str) -> bool:
        return bool(self.whole) and _json_object(piece) == self.whole

    def as_message(self) -> dict[str, JSON]:
        function = {**self.extra.get("function", {}), "name": self.name, "arguments": "".join(self.arguments)}
        return {**self.extra, "id": self.id, "type": "function", "function": function}


@dataclass
class _ChoiceParts:
    texts: dict[str, list[str]] = field(default_factory=dict)
    extra: dict[str, JSON] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    latest: dict[JSON, _Call] = field(default_factory=dict)
    halves: dict[str, str] = field(default_factory=dict)
    logprobs: list[JSON] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, piece: dict[str, JSON], index: int) -> Delta | None:
        delta = piece.get("delta")
        if not isinstance(delta, dict) and not self.texts and not self.calls:
            delta = piece.get("message")  # from a server that sends the whole reply as one event
        delta = _as_object(delta)
        content, thinking = content_texts(delta.get("content"))
        reasoning = _text_or_empty(delta.get("reasoning_content")) or thinking
        texts = {name: _text_or_empty(delta.get(name)) for name in _JOINED}
        texts.update(content=content or "", reasoning_content=reasoning)
        for name, text in texts.items():
            if text:
                self.texts.setdefault(name, []).append(text)
        _merge(self.extra, extra_of_message(delta))
        if details := _as_list(delta.get("reasoning_details")):
            _merge(self.extra, {"reasoning_details": details})
        for call in _as_list(listed_calls(delta.get("tool_calls"))):
            if isinstance(call, dict):
                self._call_of(call).take(call)
        self.logprobs += _as_list(_as_object(piece.get("logprobs")).get("content"))
        self.finish_reason = _text_or_empty(piece.get("finish_reason")) or self.finish_reason
        reasoning = reasoning or texts["reasoning"]
        shown = self._whole_text("content", texts["content"]), self._whole_text("reasoning", reasoning)
        return Delta(index, *shown) if any(shown) else None

    def _whole_text(self, name: str, text: str) -> str:
        """Return the text with whole characters. The first half of a surrogate pair waits for the next chunk."""
        text = self.halves.pop(name, "") + text
        if "\ud800" <= text[-1:] <= "\udbff":
            self.halves[name], text = text[-1], text[:-1]
        return str(whole_characters(text))

    def _call_of(self, call: dict[str, JSON]) -> _Call:
        """Return the call that a delta belongs to: the call with its index or, without an index, with its id, or else
        the last call. A delta that follows a whole call and has a name begins another call."""
        key, id_ = call.get("index"), _text_or_empty(call.get("id"))
        if not isinstance(key, int):
            key = id_ if id_ in self.latest or not self.latest else list(self.latest)[-1]
        latest = self.latest.get(key)
        if latest is None or latest.is_another(call):
            key = key if isinstance(call.get("index"), int) else id_ or f"call {len(self.calls)}"
            # Some servers send the name of parallel calls only once.
            latest = _Call(name="" if latest is None or _call_delta(call)[0] else latest.name)
            # A dict keeps the place of a key whose value is replaced, but the last key must be that of the last call.
            self.latest.pop(key, None)
            self.latest[key] = latest
            self.calls.append(latest)
        return latest

    def as_reply(self, index: int) -> dict[str, JSON]:
        message: dict[str, JSON] = {**self.extra, "role": "assistant", "content": None}
        message.update({name: "".join(texts) for name, texts in self.texts.items()})
        if self.calls:
            message["tool_calls"] = [call.as_message() for call in self.calls]
        logprobs = {"content": self.logprobs} if self.logprobs else None
        return {"index": index, "message": message, "finish_reason": self.finish_reason, "logprobs": logprobs}


class _Completion:
    def __init__(self) -> None:
        self._named: dict[str, JSON] = {}
        self._usage: JSON = None
        self._choices: dict[int, _ChoiceParts] = {}
        self._latest: dict[str, JSON] = {}

    @property
    def ended(self) -> bool:
        """Whether every choice has a finish reason. Some servers send nothing after the last finish reason, or only an
        event without choices that reports a failure."""
        return bool(self._latest) and all(choice.finish_reason for choice in self._choices.values())

    def take(self, chunk: dict[str, JSON]) -> list[Delta]:
        self._latest = chunk
        for name in ("id", "model"):
            if chunk.get(name):
                self._named.setdefault(name, chunk[name])
        # Servers send null in every chunk but the last one.
        self._usage = chunk.get("usage") or self._usage
        deltas = []
        for piece in _as_list(chunk.get("choices")):
            if isinstance(piece, dict):
                number = piece.get("index")
                index = number if isinstance(number, int) else 0
                deltas.append(self._choices.setdefault(index, _ChoiceParts()).take(piece, index))
        return [delta for delta in deltas if delta is not None]

    def as_reply(self) -> dict[str, JSON]:
        if not self._choices:
            return self._latest
        choices = [choice.as_reply(index) for index, choice in sorted(self._choices.items())]
        return {**self._named, "object": "chat.completion", "choices": choices, "usage": self._usage}

    def encoded(self) -> bytes:
        """Return the reply as JSON with whole characters."""
        try:
            return msgspec.json.encode(self.as_reply())
        except UnicodeEncodeError:
            return msgspec.json.encode(whole_characters(self.as_reply()))


# Servers send null, or nothing, for parts that they do not have.
def _text_or_empty(value: JSON) -> str:
    return value if isinstance(value, str) else ""


def _as_object(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _as_list(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _call_delta(call: dict[str, JSON]) -> tuple[str, str]:
    """Return the name and the piece of the arguments in a delta of a call."""
    function = _as_object(call.get("function"))
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
    return _text_or_empty(function.get("name")), text


def _json_object(arguments: str) -> dict[str, JSON] | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
