"""Token-exact chat: messages in, an OpenAI-shaped completion out, and every token of it in a ledger.

Invariants: the engine receives the ledger's own ids and nothing else (T1); a request continues a conversation only if
every earlier message is unchanged (the last reply may lack its thinking), and any other history opens a segment with
its reason (T2); a turn is in the ledger whole or not at all, so a turn that fails or is cancelled leaves no trace.

    async with server.managed_server(tokenizer=tokenizer, tool_call_parser=parser) as managed:
        result = await HermesAgentLoop(server=managed, …).run(messages)
    nodes = managed.get_state()["nodes"]        # one per segment: tokens, masked_tokens, logprobs, full_text, metadata
    managed.ledger.rows(), managed.ledger.record()
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar

from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    TextCompletion,
    TokenEngine,
    plain_messages,
)
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason
from palaestra_tokens.parsers import ToolCallParser
from palaestra_tokens.templates import ChatFormat, History, TurnRenderer
from palaestra_tokens.templates.jinja import content_of, reasoning_of
from palaestra_tokens.templates.probe import StepKind
from palaestra_tokens.token_exact.replies import ReplyReader, sample

if TYPE_CHECKING:
    from palaestra_tokens.token_exact.managed_text import ManagedText
    from palaestra_tokens.token_exact.streaming import ShownReply

V = TypeVar("V")

HistoryMode: TypeAlias = Literal["template", "append"]
"""What to do if the template rewrites history, for example by stripping thinking. `template` sends the rewritten
history and begins a new segment; `append` keeps appending to the sampled tokens where possible, so that they stay in
one row."""

InThread: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function in a thread and returns its result, for a request that would block the event loop for seconds."""

_NOT_SAMPLING = frozenset({"tool_choice", "parallel_tool_calls", "chat_template_kwargs", "stream", "model"})
"""Settings that have no meaning for an engine that continues token ids."""

_KEPT_THREADS = 64
"""The maximum number of conversations that a request is compared with. No rollout is expected to alternate between more
conversations than this."""


@dataclass(slots=True)
class _Thread:
    """One conversation. `seen` are the messages as the caller sent them, `shown` are the same messages with the replies
    as this server returned them. `kinds` are the kinds of steps in the conversation's segment. `busy` is true while a
    reply is being sampled."""

    renderer: TurnRenderer
    segment: int = -1
    seen: list[Message] = field(default_factory=list)
    shown: list[Message] = field(default_factory=list)
    reply: Message = field(default_factory=dict)
    kinds: tuple[StepKind, ...] = ()
    busy: bool = False

    def extend(self, messages: Sequence[Message], reply: AssistantMessage) -> None:
        known = len(self.seen)
        if known:  # the caller's version of the last reply, which is nearly always the same
            theirs = messages[known]
            self.seen.append(self.reply if theirs == self.reply else _copied(theirs))
            self.shown.append(self.reply)
        fresh = [_copied(message) for message in messages[len(self.seen) :]]
        self.seen += fresh
        self.shown += fresh
        self.reply = {"role": "assistant", "content": reply.content or ""}
        if reply.reasoning_content:
            self.reply["reasoning_content"] = reply.reasoning_content
        if reply.tool_calls:
            self.reply["tool_calls"] = [call.model_dump() for call in reply.tool_calls]

    def continued_by(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begin with this conversation and its reply."""
        known = len(self.seen)
        return len(messages) > known and self.begins_with(messages[:known]) and _same_reply(self.reply, messages[known])

    def begins_with(self, messages: Sequence[Message]) -> bool:
        """Return whether this conversation begins with `messages`."""
        return len(messages) <= len(self.seen) and self.seen[: len(messages)] == list(messages)


async def _directly(function: Callable[[], Any]) -> Any:
    return function()


def _stops(settings: Mapping[str, JSON], own: Iterable[int]) -> list[int]:
    """Return the ids at which a reply ends. The engine gets bare token ids and does not know the template, so without
    the template's `own` it would sample beyond the end of the turn, which `ignore_eos` asks for."""
    return list(dict.fromkeys([*(settings.get("stop_token_ids") or ()), *(() if settings.get("ignore_eos") else own)]))


def _copied(value: V) -> V:
    """Return a deep copy, so that the caller's later changes do not affect the copy."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list):
        return [_copied(item) for item in value]  # type: ignore[return-value]
    return value


def _same_reply(ours: Message, theirs: Message) -> bool:
    """Return whether a client sent this server's reply back. Clients reformat replies in their own way, and some omit
    the thinking."""
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the next turn is added, and its new prompt tokens `delta[D]`. If `begins` is true, the turn opens a
    segment, and `reason` is set if the reason is already known. Otherwise, the turn continues `thread`."""

    thread: _Thread
    delta: array[int]
    kinds: tuple[StepKind, ...]
    begins: bool = False
    reason: SegmentReason | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    message: AssistantMessage
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    segment: int


class ManagedChat(ChatServer):
    """A chat server for one rollout. It is also an async context manager, as existing environments expect, but leaving
    the block closes nothing.

    `history` selects how to treat a template that rewrites history. Requests may run concurrently; each continues the
    conversation that its messages extend, or opens a new segment, which is added to `segments`. Replies that `recorded`
    returns are not sampled again. Raises `ConfigError` for an unusable parser or an unknown `history`.
    """

    features = frozenset({"on_delta"})

    def __init__(
        self,
        engine: TokenEngine,
        chat_format: ChatFormat,
        parser: ToolCallParser | str | None = None,
        *,
        history: HistoryMode = "template",
        name: str = "",
        clock: Clock | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if history not in ("template", "append"):
            raise ConfigError(f"history '{history}' is neither 'template' nor 'append'.")
        self._ledger = ledger if ledger is not None else Ledger()
        self._segments: list[int] = []
        self._engine = engine
        self._format = chat_format
        self._reader = ReplyReader(parser)
        self._history = history
        self._name = name
        self._clock = clock or SystemClock()
        self._threads: list[_Thread] = []
        self._turns = 0
        self._branch = 0
        self._declared: SegmentReason | None = None
        self._text: ManagedText | None = None

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def segments(self) -> list[int]:
        return self._segments

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def declare(self, reason: SegmentReason | str) -> None:
        """Record why the next request does not continue a known history (`compaction`, for example)."""
        self._declared = SegmentReason(reason)

    async def completion(
        self,
        *,
        prompt: str,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        opens: SegmentReason | None = None,
        in_thread: InThread | None = None,
        **sampling: JSON,
    ) -> TextCompletion:
        """Sample `n` continuations of a text, which are also recorded in the ledger, each after the first as a separate
        segment. `in_thread` runs the encoding of the text. Raises `EngineError`."""
        if self._text is None:
            from palaestra_tokens.token_exact.managed_text import ManagedText  # imported here: few rollouts need it

            tokenizer, stops = self._format.tokenizer, self._format.renderer((), None).stop_ids
            self._text = ManagedText(
                self._engine, tokenizer, self.ledger, self._segments, self._branch, stops, self._clock
            )
        reason = self._declared or opens or SegmentReason.HISTORY_EDIT
        self._declared = None
        settings = {**sampling, **(extra_body or {})}
        settings["stop_token_ids"] = _stops(settings, self._text.stop_ids)
        return await self._text.complete(prompt, n, settings, reason, in_thread or _directly)

    def child(self, number: int = 0, *, reason: SegmentReason | str = SegmentReason.SUBAGENT) -> ManagedChat:
        """Return a server for a further conversation of the rollout, with the same ledger. The record has these
        conversations in the order of `number`."""
        child = ManagedChat(
            self._engine, self._format, history=self._history, name=self._name, clock=self._clock, ledger=self.ledger
        )
        child._reader, child.recorded, child._branch = self._reader, self.recorded, number
        child.declare(reason)
        return child

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        opens: SegmentReason | None = None,
        in_thread: InThread | None = None,
        **sampling: JSON,
    ) -> ChatCompletion:
        """Sample `n` replies to a conversation; each reply after the first is a separate segment.
        `chat_template_kwargs` go to the template. Settings without a meaning for token ids, such as `tool_choice`, are
        dropped; all others go to the engine. `opens` is the reason to record if the messages neither continue nor
        repeat a known conversation. `on_delta` gets each reply in pieces as it arrives, or in one piece if the engine
        does not stream. `in_thread` runs the rendering and encoding. Raises `EngineError`, and `ConfigError` if the
        template refuses the conversation."""
        if n < 1:
            raise ConfigError(f"n is {n}; a request must ask for at least one reply.")
        settings = {**sampling, **(extra_body or {})}
        variables = settings.get("chat_template_kwargs")
        if in_thread is None:
            renderer = self._format.renderer(tools or (), variables)
        else:
            renderer = await in_thread(partial(self._format.renderer, tools or (), variables))
        settings = {key: value for key, value in settings.items() if key not in _NOT_SAMPLING}
        limit = settings.pop("max_completion_tokens", None)  # OpenAI's newer name; engines know only `max_tokens`
        for key, value in (("temperature", temperature), ("max_tokens", max_tokens), ("max_tokens", limit)):
            if value is not None:
                settings.setdefault(key, value)
        settings["stop_token_ids"] = _stops(settings, renderer.stop_ids)
        if n == 1:
            replies = [await self._sample_reply(renderer, messages, settings, opens, in_thread)]
        else:
            replies = await self._replies(renderer, messages, settings, n, opens, in_thread)
        sampled = sum(reply.sampled_tokens for reply in replies)
        return ChatCompletion(
            id=f"{self._name}/{len(self.ledger.turns)}",
            model=self._engine.name,
            choices=[
                ChatChoice(index=index, message=reply.message, finish_reason=reply.finish_reason)
                for index, reply in enumerate(replies)
            ],
            usage=CompletionUsage(
                prompt_tokens=replies[0].prompt_tokens,
                completion_tokens=sampled,
                total_tokens=replies[0].prompt_tokens + sampled,
            ),
        )

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]] = ()) -> int:
        """Return how many tokens a conversation has as the prompt of a new segment. Raises `ConfigError`."""
        return len(self._format.renderer(tools, None).opening(plain_messages(messages)).ids)

    def get_state(self) -> dict[str, JSON]:
        """Return the token record: the `ledger` and its `nodes`, one per segment in order, with the segments of other
        conversations first. No node is part of another, so a trainer uses all of them."""
        return {"nodes": self.ledger.nodes(self._format.tokenizer), "ledger": self.ledger}

    async def _replies(
        self,
        renderer: TurnRenderer,
        messages: Sequence[Message],
        settings: Mapping[str, JSON],
        n: int,
        opens: SegmentReason | None,
        in_thread: InThread | None,
    ) -> list[_Reply]:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._sample_reply(renderer, messages, settings, opens, in_thread))
                    for _ in range(n)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        # In the order of the nodes, which callers read in step with the choices; replies may arrive in another order.
        return sorted((task.result() for task in asked), key=lambda reply: reply.segment)

    async def _sample_reply(
        self,
        renderer: TurnRenderer,
        messages: Sequence[Message],
        settings: Mapping[str, JSON],
        opens: SegmentReason | None,
        in_thread: InThread | None,
    ) -> _Reply:
        """Plan, sample, and only then record the reply, so that a failed request leaves no trace."""
        messages = plain_messages(messages)  # copied, because the caller's list may grow while the engine samples
        thread = None if self._declared is not None else self._continued(renderer, messages)
        thread = thread or _Thread(renderer)
        # Before the first await: a concurrent request with the same messages then opens a segment of its own.
        thread.busy = True
        try:
            if in_thread is None:
                plan = self._plan(renderer, messages, thread, self._declared)
            else:
                plan = await in_thread(partial(self._plan, renderer, messages, thread, self._declared))
            thinking = renderer.thinks_at_once(plan.delta)
            settings, shown = self._with_delta_hook(thinking, renderer, settings)
            prompt = self.ledger.prompt(None if plan.begins else plan.thread.segment, plan.delta)
            prompt_tokens = len(prompt)
            pieces = self.recorded(prompt.checksum) if self.recorded is not None else None
            if pieces is None:
                tokenizer = self._format.tokenizer
                vocabulary = len(tokenizer) if isinstance(tokenizer, Sized) else None
                pieces = await sample(self._engine, prompt, settings, vocabulary, self._clock)
            reply = self._record(plan, renderer, messages, pieces, prompt_tokens, opens, thinking)
        finally:
            thread.busy = False
        if shown is not None:
            shown.finish(reply.message)
        return reply

    def _with_delta_hook(
        self, thinking: bool, renderer: TurnRenderer, settings: Mapping[str, JSON]
    ) -> tuple[Mapping[str, JSON], ShownReply | None]:
        """Return the settings for the engine, and the object that shows the reply as it arrives, if `on_delta` is
        set."""
        if "on_delta" not in settings:
            return settings, None
        from palaestra_tokens.token_exact.streaming import ShownReply  # imported here, because few requests need it

        rest = {name: value for name, value in settings.items() if name != "on_delta"}
        options: dict[str, JSON] = {"thinking": thinking, "cut": True}
        read = partial(self._reader.read, **options, tools=renderer.tools, turn=self._turns + 1)
        shown = ShownReply(settings["on_delta"], self._format.tokenizer, read, renderer.stop_ids)
        if "on_ids" in getattr(self._engine, "features", ()):
            rest["on_ids"] = shown.add
        return rest, shown

    def _plan(
        self, renderer: TurnRenderer, messages: Sequence[Message], thread: _Thread, declared: SegmentReason | None
    ) -> _Plan:
        """Plan the next turn of the conversation `thread`, which no other request uses in the meantime. The method
        changes nothing in this object, so it may run outside the event loop's thread."""
        if thread.segment < 0:
            opening = renderer.opening(messages)
            return _Plan(thread, opening.ids, opening.kinds, True, declared)
        history, new = History(thread.shown, thread.reply, thread.kinds), messages[len(thread.seen) + 1 :]
        step = renderer.step(history, new, self.ledger.last_token(thread.segment))
        if not step.rewrites or (self._history == "append" and step.ids):
            return _Plan(thread, step.ids, step.kinds)
        opening = renderer.opening(messages)
        return _Plan(thread, opening.ids, opening.kinds, True, SegmentReason.TEMPLATE_REWRITE)

    def _continued(self, renderer: TurnRenderer, messages: Sequence[Message]) -> _Thread | None:
        """Return the latest idle conversation that `messages` continue, with the same tools."""
        for thread in reversed(self._threads):
            if not thread.busy and thread.renderer.renders_like(renderer) and thread.continued_by(messages):
                return thread
        return None

    def _undeclared_reason(self, messages: Sequence[Message], opens: SegmentReason | None) -> SegmentReason:
        if not len(self.ledger):
            return SegmentReason.START
        repeated = any(thread.begins_with(messages) for thread in self._threads)
        return SegmentReason.BRANCH if repeated else opens or SegmentReason.HISTORY_EDIT

    def _record(
        self,
        plan: _Plan,
        renderer: TurnRenderer,
        messages: Sequence[Message],
        pieces: Sequence[Piece],
        prompt_tokens: int,
        opens: SegmentReason | None,
        thinking: bool,
    ) -> _Reply:
        ids = [number for piece in pieces for number in piece.sampled.ids]
        finish_reason = pieces[-1].sampled.finish_reason
        # Engines differ in whether they return the stop token. It belongs to the ledger, but never to the text.
        spoken = ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids
        message = self._reader.read(  # before anything is recorded, because a parser may raise
            self._format.tokenizer.decode(spoken, skip_special_tokens=False),
            thinking=thinking,
            cut=finish_reason == "length",
            tools=renderer.tools,
            turn=self._turns + 1,  # not the ledger's number, which depends on concurrent conversations
        )
        thread = plan.thread
        if plan.begins:
            reason = plan.reason or self._undeclared_reason(messages, opens)
            thread.segment = self.ledger.open(reason, self._branch)
            self._segments.append(thread.segment)
            # Another request may have declared a reason of its own while this one was sampled.
            self._declared = None if plan.reason is self._declared else self._declared
            # A conversation that goes on in a new segment, after a rewrite, is in the list already.
            if not thread.seen:
                self._threads = [*self._threads[-_KEPT_THREADS + 1 :], thread]
        thread.kinds = plan.kinds
        self.ledger.append(thread.segment, plan.delta, pieces)
        self._turns += 1
        thread.extend(messages, message)
        if message.tool_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        return _Reply(message, finish_reason, prompt_tokens, len(ids), thread.segment)
