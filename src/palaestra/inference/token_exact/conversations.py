"""Which conversation a request goes on with: threads of messages, matched by what they say.

Not for tokens. Invariant: a request goes on with a thread only when every earlier message is the same as it was, so
that no edit of history can pass for its continuation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from palaestra.core.types import JSON, Message
from palaestra.inference.engine import AssistantMessage
from palaestra.inference.templates import History, TurnRenderer
from palaestra.inference.templates.messages import content_of, reasoning_of
from palaestra.inference.templates.probe import StepKind

V = TypeVar("V")

_LATEST = 64
"""How many threads are looked at; more conversations than that do not take turns in one rollout."""


@dataclass(slots=True)
class Thread:
    """One conversation. `seen` are the messages as the caller sent them, `shown` the same with replies as we gave them.

    `kinds` are the kinds of steps in its segment; `busy` while a reply is being sampled.
    """

    renderer: TurnRenderer
    segment: int = -1
    seen: list[Message] = field(default_factory=list)
    shown: list[Message] = field(default_factory=list)
    reply: Message = field(default_factory=dict)
    kinds: tuple[StepKind, ...] = ()
    busy: bool = False

    @property
    def history(self) -> History:
        """The conversation as the renderer wants it."""
        return History(prompt=self.shown, reply=self.reply, kinds=self.kinds)

    def went_on(self, messages: Sequence[Message], reply: AssistantMessage) -> None:
        """A reply came to `messages`, which go on with this thread."""
        known = len(self.seen)
        if known:  # what the caller wrote of the last reply; nearly always it is the same
            theirs = messages[known]
            self.seen.append(self.reply if theirs == self.reply else copied(theirs))
            self.shown.append(self.reply)
        fresh = [copied(message) for message in messages[len(self.seen) :]]
        self.seen += fresh
        self.shown += fresh
        self.reply = _sent(reply)

    def continued_by(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are this conversation, the reply, and perhaps more."""
        known = len(self.seen)
        return len(messages) > known and self._same(messages, known) and _same_reply(self.reply, messages[known])

    def begins_with(self, messages: Sequence[Message]) -> bool:
        """Whether this conversation was once at `messages`: the same asked again."""
        return len(messages) <= len(self.seen) and self._same(messages, len(messages))

    def _same(self, messages: Sequence[Message], count: int) -> bool:
        return self.seen[:count] == list(messages[:count])


class Threads:
    """The conversations of one rollout."""

    def __init__(self) -> None:
        self._threads: list[Thread] = []

    def add(self, thread: Thread) -> None:
        """A new conversation."""
        self._threads = [*self._threads[-_LATEST + 1 :], thread]

    def continued_by(self, messages: Sequence[Message], renderer: TurnRenderer) -> Thread | None:
        """The latest idle thread that `messages` go on with, with the same tools."""
        for thread in reversed(self._threads):
            if not thread.busy and thread.renderer.renders_like(renderer) and thread.continued_by(messages):
                return thread
        return None

    def were_at(self, messages: Sequence[Message]) -> bool:
        """Whether the same was asked before."""
        return any(thread.begins_with(messages) for thread in self._threads)


def copied(value: V) -> V:
    """A copy down to the texts: what the caller changes later does not change it."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [copied(item) for item in value]  # type: ignore[return-value]
    return value


def _sent(reply: AssistantMessage) -> Message:
    message: Message = {"role": "assistant", "content": reply.content or ""}
    if reply.reasoning_content:
        message["reasoning_content"] = reply.reasoning_content
    if reply.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in reply.tool_calls]
    return message


def _same_reply(ours: Message, theirs: Message) -> bool:
    """Clients write a reply back in their own way, some without its thinking; what it says must be the same."""
    if theirs.get("role") != "assistant" or content_of(theirs) != ours["content"]:
        return False
    if (thought := reasoning_of(theirs)) and thought != ours.get("reasoning_content"):
        return False
    return _calls(theirs) == _calls(ours)


def _calls(message: Message) -> list[tuple[JSON, JSON]]:
    functions = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return [
        (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
        for function in functions
    ]
