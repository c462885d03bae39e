"""Token-exact chat: messages in, an OpenAI-shaped completion out, and every token of it in a ledger.

Not for sampling (a `TokenEngine` does) and not for HTTP. Invariants: the engine is given the ledger's own ids and
nothing else (T1); a history that the ledger does not hold opens a segment that says why (T2); a turn is in the ledger
whole or not at all, so a request that fails or is cancelled leaves no trace.

    async with server.managed_server(tokenizer=tokenizer, tool_call_parser=parser) as managed:
        result = await HermesAgentLoop(server=managed, …).run(messages)
    nodes = managed.get_state()["nodes"]        # one per segment: tokens, masked_tokens, logprobs, full_text, metadata
    managed.ledger.rows(), managed.ledger.record()
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.engine import (
    AssistantMessage,
    ChatCompletion,
    Choice,
    CompletionUsage,
    TokenEngine,
    plain_messages,
)
from palaestra.inference.ledger import Ledger, Piece, SegmentReason
from palaestra.inference.templates import ChatFormat, TurnRenderer
from palaestra.inference.templates.probe import StepKind
from palaestra.inference.token_exact.conversations import Thread, Threads
from palaestra.inference.token_exact.reply_reader import Parser, Speech
from palaestra.inference.token_exact.sampler import sample

HistoryMode: TypeAlias = Literal["template", "append"]
"""What to do when the template rewrites history (strips thinking, say): follow it and begin a segment, which is what a
server that renders every turn anew would do; or keep appending to what was sampled, which gives one row."""

Recalled: TypeAlias = Callable[[int], Sequence[Piece] | None]
"""Asked before the engine is, with the checksum of a prompt's ids: the answer that is known already, or None."""

_NOT_SAMPLING = frozenset({"tool_choice", "parallel_tool_calls", "chat_template_kwargs", "stream", "model"})
"""Settings that mean nothing to an engine that continues token ids."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the next turn goes, with its new prompt tokens `delta[D]`.

    On with `thread`, or, where `begins`, into a segment of its own. `reason` is why, where that is known already.
    """

    thread: Thread
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


def _nothing_known(sent: int) -> None:
    return None


class ManagedChat:
    """A chat server for one rollout. An async context manager, for the contract's sake: there is nothing to close.

    `history` says what a template that rewrites it means. Requests may run at the same time; each goes on with the
    conversation that its messages continue, or begins a segment; `segments` are those that it began. What `recalled`
    knows is not sampled again: that is how a rollout that was cut off gets its ledger back. Raises `ConfigError` for a
    template or a parser that cannot work.
    """

    def __init__(
        self,
        engine: TokenEngine,
        chat_format: ChatFormat,
        parser: Parser | str | None = None,
        *,
        history: HistoryMode = "template",
        name: str = "",
        clock: Clock | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if history not in ("template", "append"):
            raise ConfigError(f"history '{history}' is neither 'template' nor 'append'.")
        self.ledger = ledger if ledger is not None else Ledger()
        self.recalled: Recalled = _nothing_known
        self._engine = engine
        self._format = chat_format
        self._speech = Speech(parser)
        self._history = history
        self._name = name
        self._clock = clock or SystemClock()
        self._threads = Threads()
        self.segments: list[int] = []
        self._turns = 0
        self._branch = 0
        self._declared: SegmentReason | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def declare(self, reason: SegmentReason | str) -> None:
        """Why the next request will not go on with a known history (`compaction`, say). Counts for one segment."""
        self._declared = SegmentReason(reason)

    def child(self, reason: SegmentReason | str = SegmentReason.SUBAGENT, *, number: int = 0) -> ManagedChat:
        """A server for a conversation beside this one, whose tokens go into the same ledger.

        `number` tells it from others of the rollout: the ledger is stored in the order of these.
        """
        child = ManagedChat(
            self._engine, self._format, history=self._history, name=self._name, clock=self._clock, ledger=self.ledger
        )
        child._speech, child.recalled, child._branch = self._speech, self.recalled, number
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
        **sampling: JSON,
    ) -> ChatCompletion:
        """`n` replies to a conversation; those after the first are segments of their own.

        `chat_template_kwargs` among the settings go to the template, all others to the engine. Raises `EngineError`
        when there is no reply and `ConfigError` when the template refuses.
        """
        if n < 1:
            raise ConfigError(f"n is {n}; a request asks for at least one reply.")
        settings = {**sampling, **(extra_body or {})}
        renderer = self._format.renderer(tools or (), settings.get("chat_template_kwargs"))
        settings = {key: value for key, value in settings.items() if key not in _NOT_SAMPLING}
        limit = settings.pop("max_completion_tokens", None)  # OpenAI's newer name; engines know one
        for key, value in (("temperature", temperature), ("max_tokens", max_tokens), ("max_tokens", limit)):
            if value is not None:
                settings.setdefault(key, value)
        stops = settings.get("stop_token_ids") or ()
        settings["stop_token_ids"] = list(dict.fromkeys([*stops, *renderer.stop_ids]))
        replies = await self._replies(renderer, messages, settings, n)
        sampled = sum(reply.sampled_tokens for reply in replies)
        return ChatCompletion(
            id=f"{self._name}/{len(self.ledger.turns)}",
            model=self._engine.name,
            choices=[
                Choice(index=index, message=reply.message, finish_reason=reply.finish_reason)
                for index, reply in enumerate(replies)
            ],
            usage=CompletionUsage(
                prompt_tokens=replies[0].prompt_tokens,
                completion_tokens=sampled,
                total_tokens=replies[0].prompt_tokens + sampled,
            ),
        )

    def get_state(self) -> dict[str, JSON]:
        """The contract's record: `nodes`, one per segment in the order they began, those of conversations beside the
        rollout's own first; an earlier node is never a part of a later one, so a trainer takes them all. `ledger` is
        the `Ledger` they come from.
        """
        return {"nodes": self.ledger.nodes(self._format.tokenizer), "ledger": self.ledger}

    async def _replies(
        self, renderer: TurnRenderer, messages: Sequence[Message], settings: Mapping[str, JSON], n: int
    ) -> list[_Reply]:
        if n == 1:
            return [await self._reply(renderer, messages, settings)]
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._reply(renderer, messages, settings)) for _ in range(n)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in asked]

    async def _reply(self, renderer: TurnRenderer, messages: Sequence[Message], settings: Mapping[str, JSON]) -> _Reply:
        """Plan, sample, and only then write down: nothing is kept of a request that failed."""
        messages = plain_messages(messages)  # a list of its own: the caller's may grow while the engine samples
        plan = self._plan(renderer, messages)
        plan.thread.busy = True
        try:
            prompt = self.ledger.prompt(None if plan.begins else plan.thread.segment, plan.delta)
            prompt_tokens = len(prompt)
            pieces = self.recalled(prompt.checksum)
            if pieces is None:
                pieces = await sample(self._engine, prompt, settings, self._vocabulary, self._clock)
            return self._write(plan, renderer, messages, pieces, prompt_tokens)
        finally:
            plan.thread.busy = False

    def _plan(self, renderer: TurnRenderer, messages: Sequence[Message]) -> _Plan:
        thread = self._threads.continued_by(messages, renderer)
        if thread is None or self._declared is not None:
            opening = renderer.opening(messages)
            return _Plan(Thread(renderer), opening.ids, opening.kinds, True, self._declared)
        new = messages[len(thread.seen) + 1 :]
        step = renderer.step(thread.history, new, self.ledger.last_token(thread.segment))
        if not step.rewrites or (self._history == "append" and step.ids):
            return _Plan(thread, step.ids, step.kinds)
        opening = renderer.opening(messages)
        return _Plan(thread, opening.ids, opening.kinds, True, SegmentReason.TEMPLATE_REWRITE)

    def _why(self, messages: Sequence[Message]) -> SegmentReason:
        """The reason for a segment that the caller did not declare."""
        if not len(self.ledger):
            return SegmentReason.START
        return SegmentReason.BRANCH if self._threads.were_at(messages) else SegmentReason.HISTORY_EDIT

    def _write(
        self,
        plan: _Plan,
        renderer: TurnRenderer,
        messages: Sequence[Message],
        pieces: Sequence[Piece],
        prompt_tokens: int,
    ) -> _Reply:
        ids = [number for piece in pieces for number in piece.sampled.ids]
        finish_reason = pieces[-1].sampled.finish_reason
        message = self._speech.read(  # before anything is written down: a parser may raise
            self._text(ids, renderer),
            thinking=renderer.thinks_at_once(plan.delta),
            cut=finish_reason == "length",
            tools=renderer.tools,
            turn=self._turns + 1,  # not the ledger's: that depends on what conversations beside this one do meanwhile
        )
        thread = plan.thread
        if plan.begins:
            thread.segment = self.ledger.open(plan.reason or self._why(messages), self._branch)
            self.segments.append(thread.segment)
            self._declared = None if plan.reason is self._declared else self._declared
            if not thread.seen:
                self._threads.add(thread)
        thread.kinds = plan.kinds
        self.ledger.append(thread.segment, plan.delta, pieces)
        self._turns += 1
        thread.went_on(messages, message)
        if message.tool_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        return _Reply(message, finish_reason, prompt_tokens, len(ids))

    def _text(self, ids: list[int], renderer: TurnRenderer) -> str:
        """What was said, without the token that ended the turn."""
        said = ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids
        return self._format.tokenizer.decode(said, skip_special_tokens=False)

    @property
    def _vocabulary(self) -> int | None:
        """How many ids the tokenizer knows, where it says so."""
        tokenizer = self._format.tokenizer
        return len(tokenizer) if isinstance(tokenizer, Sized) else None
