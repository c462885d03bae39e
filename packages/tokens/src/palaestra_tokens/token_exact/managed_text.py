"""Token-exact continuations of text: prompts in, texts out, and every token of them in a ledger.

A prompt that begins with the prompt and the text of an earlier call continues that call's tokens; any other prompt
opens a segment. A text that ended with a stop token cannot be continued, because the token is in the ledger but not in
the text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import CompletionUsage, TextChoice, TextCompletion, TokenEngine
from palaestra_tokens.ledger import Ledger, SegmentReason
from palaestra_tokens.token_exact.replies import sample
from palaestra_tokens.tokenizers import Tokenizer

InThread: TypeAlias = Callable[[Callable[[], Sequence[int]]], Awaitable[Sequence[int]]]

_KEPT_TEXTS = 64


@dataclass(slots=True)
class _Text:
    """A segment and its text so far. `open` is true if the text did not end with a stop token."""

    segment: int
    text: str
    open: bool
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _Continuation:
    segment: int
    turn: int
    text: str
    finish_reason: str
    prompt_tokens: int
    sampled: int


class ManagedText:
    """The texts of one rollout. The numbers of new segments are appended to `segments`, the caller's list. `branch` is
    the conversation's number."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        ledger: Ledger,
        segments: list[int],
        branch: int,
        stop_ids: Sequence[int],
        clock: Clock,
    ) -> None:
        self._engine, self._tokenizer, self._ledger, self._clock = engine, tokenizer, ledger, clock
        self._segments, self._branch, self.stop_ids = segments, branch, stop_ids
        self._texts: list[_Text] = []

    async def complete(
        self, prompt: str, n: int, settings: Mapping[str, JSON], opens: SegmentReason, in_thread: InThread
    ) -> TextCompletion:
        """Sample `n` continuations, in the order of their segments. `opens` is the reason to record if a segment
        begins; `in_thread` runs the encoding of the text. Raises `ConfigError` if `n` is less than 1, and
        `EngineError`."""
        if n < 1:
            raise ConfigError(f"n is {n}; a request must ask for at least one continuation.")
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._sample(prompt, settings, opens, in_thread)) for _ in range(n)]
        except BaseExceptionGroup as failures:
            # As for one continuation, whose errors the callers know. The group has cancelled the other requests.
            raise failures.exceptions[0] from None
        done = sorted((task.result() for task in asked), key=lambda each: each.segment)
        sampled, prompt_tokens = sum(each.sampled for each in done), done[0].prompt_tokens
        return TextCompletion(
            id=f"{done[-1].turn}",
            model=self._engine.name,
            choices=[
                TextChoice(index=index, text=each.text, finish_reason=each.finish_reason)
                for index, each in enumerate(done)
            ],
            usage=CompletionUsage(
                prompt_tokens=prompt_tokens, completion_tokens=sampled, total_tokens=prompt_tokens + sampled
            ),
        )

    async def _sample(
        self, prompt: str, settings: Mapping[str, JSON], opens: SegmentReason, in_thread: InThread
    ) -> _Continuation:
        known = self._continued(prompt)
        fresh = prompt if known is None else prompt[len(known.text) :]
        # A continuation is the middle of a text, so only a first prompt gets the token that begins a text.
        encode = partial(self._tokenizer.encode, fresh, add_special_tokens=known is None)
        if known is not None:
            known.busy = True
        try:
            delta = array("i", await in_thread(encode))
            sent = self._ledger.prompt(None if known is None else known.segment, delta)
            prompt_tokens = len(sent)
            vocabulary = len(self._tokenizer) if isinstance(self._tokenizer, Sized) else None
            pieces = await sample(self._engine, sent, settings, vocabulary, self._clock)
            ids = [number for piece in pieces for number in piece.sampled.ids]
            stopped = bool(ids) and ids[-1] in self.stop_ids
            text = self._tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
            if known is None:
                known = _Text(self._ledger.open(opens, self._branch), prompt, True)
                self._segments.append(known.segment)
                self._texts = [*self._texts[-_KEPT_TEXTS + 1 :], known]
            self._ledger.append(known.segment, delta, pieces)
            known.text, known.open = prompt + text, not stopped
        finally:
            if known is not None:
                known.busy = False
        finish_reason = pieces[-1].sampled.finish_reason
        return _Continuation(known.segment, self._ledger.turns[-1].number, text, finish_reason, prompt_tokens, len(ids))

    def _continued(self, prompt: str) -> _Text | None:
        for each in reversed(self._texts):
            if each.open and not each.busy and prompt.startswith(each.text):
                return each
        return None
