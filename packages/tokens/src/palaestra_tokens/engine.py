"""Completions and the engines that sample tokens. No I/O.

Completions have OpenAI's shape and allow access by attribute and by key (`call.function.name`,
`call["function"]["name"]`), because environments are written for both kinds of client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        dumped: dict[str, JSON] = msgspec.to_builtins(self)
        return dumped


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


class FunctionCall(Record):
    """`arguments` is the JSON text as the model wrote it, possibly malformed."""

    name: str = ""
    arguments: str = ""


class ToolCallMessage(Record):
    """One requested call in an assistant message."""

    id: str = ""
    type: str = "function"
    function: FunctionCall = msgspec.field(default_factory=FunctionCall)


class AssistantMessage(Record):
    """The model's message. Servers differ in which of the three reasoning fields they use."""

    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, JSON]] | None = None
    refusal: str | None = None


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
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    policy_version: str = ""


class TokenEngine(Protocol):
    """Samples continuations of token ids. Token-exact chat is built on it."""

    @property
    def name(self) -> str: ...

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        """Continue `input_ids[T]`. `sampling` has OpenAI's names (`max_tokens`, `temperature`, `stop_token_ids`, …);
        its key `split` (`train` or `eval`) selects the limit on requests in flight. Raises `EngineError`, after
        retries, or `EngineReplyError` if the reply is not a list of ids with one log-probability each."""
        ...
