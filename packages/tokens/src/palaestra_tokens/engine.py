"""Completions and the engines that sample tokens. No I/O.

Completions have OpenAI's shape and allow access by attribute and by key (`call.function.name`,
`call["function"]["name"]`), because environments are written for both kinds of client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from palaestra_slots.core.types import JSON, Message


class Record(msgspec.Struct, kw_only=True):
    """A struct that also supports `[]`, `get` and `in`, like the dict that a server's JSON becomes."""

    def __getitem__(self, key: str) -> JSON:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self.__struct_fields__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__struct_fields__)

    def get(self, key: str, default: JSON = None) -> JSON:
        return getattr(self, key, default)

    def model_dump(self) -> dict[str, JSON]:
        """Return plain dicts and lists; the method has the same name as in vendor clients."""
        return {name: _as_builtins(getattr(self, name)) for name in self.__struct_fields__}


class OpenRecord(Record):
    """A record with the provider's own fields in `extra`, such as a signature that the server needs back. They are part
    of `model_dump`."""

    extra: dict[str, JSON] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="_extra")

    def model_dump(self) -> dict[str, JSON]:
        dumped = super().model_dump()
        return {**(dumped.pop("extra") or {}), **dumped}


def _as_builtins(value: JSON) -> JSON:
    if isinstance(value, Record):
        return value.model_dump()
    if isinstance(value, list):
        return [_as_builtins(each) for each in value]
    return value if value is msgspec.UNSET else msgspec.to_builtins(value)


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as dicts. Environments may append a reply's message or its calls as objects of Palaestra or
    of a vendor's client."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    if type(message) is dict:
        # Nearly every message is a plain dict, also in its calls, and need not be copied.
        calls = message.get("tool_calls", [])
        if type(calls) is list and set(map(type, calls)) <= {dict}:
            return message
    message = _dumped(message)
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if isinstance(calls, Sequence) and not all(isinstance(call, Mapping) for call in calls):
        message = {**message, "tool_calls": [_dumped(call) for call in calls]}
    return message


def _dumped(value: JSON) -> JSON:
    """Return a record as a dict of the fields that are not None, and any other value unchanged. `content` is included
    even if it is None, which servers accept."""
    dump = None if isinstance(value, Mapping) else getattr(value, "model_dump", None)
    return value if dump is None else {k: v for k, v in dump().items() if v is not None or k == "content"}


class FunctionCall(OpenRecord):
    """`arguments` is the JSON text as the model wrote it, possibly malformed."""

    name: str = ""
    arguments: str = ""


class ToolCallMessage(OpenRecord):
    """One requested call in an assistant message."""

    id: str = ""
    type: str = "function"
    function: FunctionCall = msgspec.field(default_factory=FunctionCall)


class AssistantMessage(OpenRecord):
    """The model's message. Servers differ in which of the three reasoning fields they use."""

    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, JSON]] | None = None
    refusal: str | None = None


_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_CALL_FIELDS = frozenset({"id", "type", "function", "index"})
_MESSAGE_FIELDS = frozenset(AssistantMessage.__struct_fields__) | {
    "function_call",  # the older form of `tool_calls`
    "audio",  # a request refers to it only by its id
}


def extra_of_message(message: object) -> dict[str, JSON]:
    """Return the fields of an assistant message that only its provider knows, without empty ones. The message is a
    dict, a record or an object of a vendor's client."""
    return _extra(message, _MESSAGE_FIELDS)


def extra_of_call(call: object) -> dict[str, JSON]:
    """Return the fields of a tool call that only its provider knows; those of its function are in `function`."""
    function = call.get("function") if isinstance(call, Mapping) else getattr(call, "function", None)
    within = _extra(function, _FUNCTION_FIELDS)
    return {**_extra(call, _CALL_FIELDS), **({"function": within} if within else {})}


def _extra(value: object, known: frozenset[str]) -> dict[str, JSON]:
    if isinstance(value, OpenRecord):
        return value.extra or {}
    fields = value if isinstance(value, Mapping) else getattr(value, "model_extra", None) or {}
    return {name: each for name, each in fields.items() if name not in known and each not in (None, "", [], {})}


def assistant_message(fields: Mapping[str, JSON]) -> AssistantMessage:
    """Return the record of an assistant message, with the provider's own fields. Raises `msgspec.ValidationError`."""
    message = msgspec.convert(fields, AssistantMessage)
    keep_extra(message, fields)
    return message


def keep_extra(message: AssistantMessage, fields: Mapping[str, JSON]) -> None:
    """Set the provider's own fields of a message and of its calls, as in `fields`."""
    message.extra = extra_of_message(fields) or msgspec.UNSET
    for call, raw in zip(message.tool_calls or (), fields.get("tool_calls") or (), strict=False):
        extra = extra_of_call(raw)
        call.function.extra = extra.pop("function", msgspec.UNSET)
        call.extra = extra or msgspec.UNSET


class ChatChoice(Record):
    """One reply of a completion, with the `finish_reason` that the engine reported."""

    index: int = 0
    message: AssistantMessage = msgspec.field(default_factory=AssistantMessage)
    finish_reason: str | None = None
    logprobs: JSON = None


class CompletionUsage(Record):
    """Token counts as the engine reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ChatCompletion(Record, kw_only=True):
    """One answer of the OpenAI chat completions API, which vLLM, SGLang and most servers support."""

    id: str = ""
    model: str = ""
    choices: list[ChatChoice]
    usage: CompletionUsage | None = None


class TextChoice(Record):
    """One continuation of a text prompt."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: JSON = None


class TextCompletion(Record, kw_only=True):
    """Continuations of one text prompt, as the OpenAI completions API returns them."""

    id: str = ""
    model: str = ""
    choices: list[TextChoice]
    usage: CompletionUsage | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that an engine sampled after a prompt: `ids[N]` and the engine's own `logprobs[N]` (natural log).

    `finish_reason` is `stop`, `length` or `abort`; after `abort` (usually because of a weight update), the ids are
    those sampled so far. Engines differ in whether the ids include the stop token after a `stop`.

    `policy_version` is that of the weights that sampled the last tokens. If a server took new weights while it sampled
    and went on with the same request, `earlier` has the versions before, each with the number of tokens at which it
    ended, in ascending order.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    policy_version: str = ""
    earlier: Sequence[tuple[str, int]] = ()

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """The version, beginning and end of each part of the ids that one version has sampled."""
        parts = [*self.earlier, (self.policy_version, len(self.ids))]
        starts = [0, *(end for _, end in self.earlier)]
        return [(version, start, end) for start, (version, end) in zip(starts, parts, strict=True)]

    def by_version(self) -> list[Sampled]:
        """Return the parts that one version has sampled each. All but the last count as aborted: so a server ends a
        request that shall not go on with new weights."""
        if not self.earlier:
            return [self]
        parts = [
            Sampled(self.ids[start:end], self.logprobs[start:end], "abort", version)
            for version, start, end in self.spans
        ]
        return [*parts[:-1], replace(parts[-1], finish_reason=self.finish_reason)]


class TokenEngine(Protocol):
    """Samples continuations of token ids. Token-exact chat is built on it."""

    @property
    def name(self) -> str: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`. `sampling` has OpenAI's names (`max_tokens`, `temperature`, `stop_token_ids`, …);
        its key `split` (`train` or `eval`) selects the limit on requests in flight. Raises `EngineError`, after
        retries, or `EngineReplyError` if the reply is not a list of ids with one log-probability each."""
        ...
