"""Keeps a conversation within the model's context window: counts its tokens, and compacts the history when it is full.

A conversation that fills the window is compacted before the next model call, and after an overflow. What is shortened
and summarized is decided in `compaction.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from palaestra.agent.loop import AgentLoop
from palaestra.agent.replies import Reply, read_reply
from palaestra.agent.result import AgentResult
from palaestra.agent.seat import Seat
from palaestra_chat.compaction import (
    FULL_SHARE,
    SUMMARIZE,
    TARGET_SHARE,
    Plan,
    TokenCount,
    plan,
    summary_in_pieces,
)
from palaestra_chat.history import ChatHistory
from palaestra_chat.model_session import ModelImages, ModelSession
from palaestra_chat.service import ChatSettings
from palaestra_chat.store import ConversationStore, StoredTurn
from palaestra_chat.turn_events import Notice
from palaestra_slots.core.errors import ConfigError, ContextExceeded, EngineError, EngineReplyError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON, Message, Outcome, Usage
from palaestra_tokens.ledger import SegmentReason

_TRIES = 3
"""The maximum number of compactions in a row that do not lead to a reply."""
_NO_SUMMARY = "(There is no summary."
"""How the summary begins that stands for messages of which the model has written none."""
_WINDOW_END_TOKENS = 16
"""The number of tokens that servers may leave free at the end of the window."""
_SHORT_TOKENS = 1000
"""The size below which a single turn is too short to compact."""

logger = logging.getLogger(__name__)


class ContextWindow:
    """The context window of one conversation. `report` is called when the history was compacted in a turn."""

    def __init__(
        self,
        store: ConversationStore,
        conversation: str,
        history: ChatHistory,
        model: ModelSession,
        seat: Seat,
        settings: ChatSettings,
        report: Callable[[Notice], None],
    ) -> None:
        self._store = store
        self._id = conversation
        self._history = history
        self._model = model
        self._seat = seat
        self._settings = settings
        self._report = report
        self.images = ModelImages(model, history, report)
        """Shows the model the images of the conversation, if its server takes them."""
        self._count = TokenCount()
        self._counted = (0, 0)
        self.tokens = 0
        """The size of the history in tokens: the server's latest count, or an estimate after a compaction."""
        self.restore()

    @property
    def size(self) -> int | None:
        """The size of the window in tokens, or None if it is unknown."""
        return self._model.window_tokens

    def restore(self) -> None:
        """Take the size of the history from its last turn. Call this when the history was read from the store."""
        reports = [each.report["context_tokens"] for each in self._history.turns() if each.report.get("context_tokens")]
        self.tokens, self._counted = int(reports[-1]) if reports else 0, (0, 0)

    def learn(self, messages: Sequence[Message], reply: Reply) -> None:
        """Take the server's count of these messages and the reply to them."""
        if reply.prompt_tokens:
            self.tokens = reply.prompt_tokens + reply.completion_tokens
            self._counted = len(messages) + 1, self.tokens
            self._count.learn([*messages, *self._definitions()], reply.prompt_tokens)

    async def compact(self) -> str:
        """Replace the history with a summary that the model writes, in pieces if the history does not fit the window.
        Returns the summary. Raises `EngineError`, and `ConfigError` if the conversation is too short; then the history
        is as before. No turn may be running."""
        turns = self._history.turns()
        if not turns or (len(turns) < 2 and self.prompt_tokens() < _SHORT_TOKENS):
            raise ConfigError("the conversation is too short to compact")
        if (cut := self._history.open_turn()) is not None:
            self._history.finish(cut, "interrupted", "the program ended during the turn")
        return await self._compacted(Plan([], self._store.turns.entries(self._id)), Usage(), None)

    async def run(self, loop: AgentLoop, turn: StoredTurn) -> AgentResult:
        """Run the loop. Compact the history when the window is nearly full, before the loop and between its turns, and
        after an overflow. Raises `EngineError` if a conversation that overflowed cannot be compacted."""
        asked = sum(message.get("role") == "assistant" for message in self._history.messages)
        result, settings = replace(loop.result, turns_used=asked), loop.settings
        tries = 0
        compacts = True
        limit = self._limit_tokens()
        if limit is not None and self.prompt_tokens() > limit:
            compacts = await self._make_room(turn, result.usage, None)
        while True:
            left = settings.max_turns - (result.turns_used - asked)
            limits = replace(settings, max_turns=left, max_context_tokens=self._limit_tokens() if compacts else None)
            known = result.turns_used
            result = await loop.run(self._history.messages, after=result, settings=limits)
            overflow = loop.failure if isinstance(loop.failure, ContextExceeded) else None
            if overflow is None and not (result.outcome is Outcome.LENGTH and loop.context_full):
                return self._explained(result)
            tries = tries + 1 if result.turns_used == known else 1
            if overflow is not None and tries > _TRIES:
                raise overflow
            compacts = await self._make_room(turn, result.usage, overflow)

    def _explained(self, result: AgentResult) -> AgentResult:
        """Name the window as the cause if it was the reply that filled it. The reply is not asked for again with a
        shorter history: it has been shown, and the next turn continues it, before which the history is compacted."""
        window = self.size
        if result.outcome is Outcome.LENGTH and window is not None and self.tokens >= window - _WINDOW_END_TOKENS:
            reply = result.turns[-1].completion_tokens
            result.error = (
                f"the reply filled the window of model {self._model.name}: {self.tokens - reply} tokens of the "
                f"conversation and {reply} of the reply are all of its {window}. Send a message to continue, with a "
                "summary of this"
            )
        return result

    async def _make_room(self, turn: StoredTurn, usage: Usage, overflow: ContextExceeded | None) -> bool:
        """Compact the history, in a running turn. Return False if it became no smaller although it must not.

        After an `overflow`, raises `ContextExceeded` if nothing can be compacted, and `EngineError` if the model does
        not write a summary. Without one, the next model call may still succeed, so failures are only logged.
        """
        self._history.write(turn)
        if overflow is not None and self._model.engine is not None:
            self._model.engine.learn_window(overflow)
        made = plan(self._store.turns.entries(self._id), turn, self._room(overflow), self._count)
        window = self.size
        fits = window is None or self._count.of(self._fixed()) + made.kept_tokens(self._count) < window
        if made.empty or not fits:  # a summary would lose details and help nobody
            if overflow is not None:
                raise self._hopeless(overflow)
            return False
        before = self.prompt_tokens()
        try:
            summary = await self._compacted(made, usage, turn, must=overflow is not None)
        except EngineError as error:
            if overflow is not None:
                raise
            logger.warning("conversation %s was not compacted: %s", self._id, error)
            return False
        self._report_compaction(made, before, summary)
        return True

    def _limit_tokens(self) -> int | None:
        """Return the number of tokens at which the conversation is compacted, or None if the window is unknown."""
        window = self.size
        if window is None:
            return None
        reply = self._settings.max_tokens or 0
        return min(int(window * FULL_SHARE), window - reply) if reply < window else int(window * FULL_SHARE)

    def _room(self, overflow: ContextExceeded | None) -> int:
        """Return the number of tokens that the messages may have after a compaction, without the system prompt."""
        window, fixed = self.size, self._count.of(self._fixed())
        messages = self.prompt_tokens() - fixed
        if overflow is not None:  # whatever was estimated, it was too much
            if window is not None:
                self._count.enlarge(max(1.0, 1.1 * window / max(1, fixed + messages)))
                fixed = self._count.of(self._fixed())
            messages = self._count.of(self._history.messages) - fixed
        if window is None:
            return messages // 2
        room = max(int(window * TARGET_SHARE) - fixed, (window - fixed) // 4)
        return room if overflow is None else min(room, messages // 2)

    def _hopeless(self, overflow: ContextExceeded) -> ContextExceeded:
        """Return the error for a conversation that cannot be compacted: its system prompt and tools, its last message,
        or the model's latest tool calls with their results, are too long."""
        window, fixed = self.size, self._count.of(self._fixed())
        if window is None:
            return overflow
        if fixed > window // 2:
            names = plural(len(self._definitions()), "tool")
            text = (
                f"The system prompt and the definitions of {names} have about {fixed} tokens, and the window of model "
                f"{self._model.name} has {window}. Use fewer toolsets, a shorter system prompt or AGENTS.md, or "
                "another model"
            )
        else:
            messages = [each for each in self._history.messages if each.get("role") != "system"]
            asked = max((n for n, each in enumerate(messages, 1) if each.get("role") == "user"), default=0)
            message, answer = self._count.of(messages[:asked]), self._count.of(messages[asked:])
            what, then = f"The message has about {message} tokens", "Send the message in parts, or as a file"
            if answer > message:
                what = f"The model's latest tool calls and their results have about {answer} tokens"
                then = "Send a message to continue, with a summary of them"
            text = (
                f"{what}. The window of model {self._model.name} has {window}, of which {fixed} are the system prompt "
                f"and the tools. {then}"
            )
        error = ContextExceeded(text)
        error.window_tokens = window
        return error

    async def _compacted(self, made: Plan, usage: Usage, running: StoredTurn | None, *, must: bool = False) -> str:
        """Carry out a plan: let the model write the summary, then change the history. Returns the summary. Raises
        `EngineError`, also for an empty summary, unless the history `must` become smaller."""
        summary = await self._summary(made, usage) if made.summarized else ""
        if made.summarized and not summary:
            if not must:
                raise EngineReplyError("the model wrote an empty summary; the conversation was not changed")
            summary = f"{_NO_SUMMARY} {plural(len(made.summarized), 'earlier message')} were left out.)"
        messages: list[Message] = [
            {"role": "user", "content": f"Our conversation so far, as you summarized it:\n\n{summary}"},
            {"role": "assistant", "content": "I continue from this summary."},
        ]
        rows = [entry.row for entry in made.kept]
        cut = {row: chars for row, chars in made.cut.items() if row in rows}
        self.tokens = self._count.of([*self._fixed(), *(messages if summary else ()), *made.messages(made.kept)])
        self._store.turns.compact(
            self._id, summary, messages=messages if summary else (), kept=rows, cut=cut, during=running,
            report={"context_tokens": self.tokens, **({} if running else self._model.spent(usage))},
        )  # fmt: skip
        if self._model.session is not None:
            self._model.session.declare(SegmentReason.COMPACTION)
        self._history.reload()
        self._counted = (0, 0)
        return summary

    async def _summary(self, made: Plan, usage: Usage) -> str:
        """Let the model summarize messages: in one request that continues the conversation if it fits, otherwise in
        pieces."""
        session, engine = await self._model.opened(), self._model.engine
        assert engine is not None

        async def ask(messages: Sequence[Message]) -> str:
            branch = session.child(self._seat.next_branch())
            branch.declare(SegmentReason.COMPACTION)
            try:
                completion = await branch.chat_completion(
                    messages=self.images.visible(messages), temperature=self._settings.temperature
                )
            except ContextExceeded as error:
                engine.learn_window(error)
                raise
            reply = read_reply(completion, 1)
            usage.add(reply.prompt_tokens, reply.completion_tokens)
            return reply.content.strip()

        messages = made.messages(made.summarized)
        window = self.size
        whole = [*self._fixed()[:1], *messages, {"role": "user", "content": SUMMARIZE}]
        if made.whole and (window is None or self._count.of(whole) < window * FULL_SHARE):
            with suppress(ContextExceeded):
                if summary := await ask(whole):
                    return summary
                # The model called a tool, or only thought; the pieces are asked without tools and conversation.
        return await summary_in_pieces(messages, ask, lambda: self.size, self._count)

    def _report_compaction(self, made: Plan, before: int, summary: str) -> None:
        """Say what was summarized and shortened."""
        done = []
        if made.summarized:
            lost = summary.startswith(_NO_SUMMARY)
            how = "left out, because the model wrote no summary" if lost else "replaced with a summary"
            done.append(f"{plural(len(made.summarized), 'message')} were {how}")
        if made.newly_cut:
            done.append(f"{plural(made.newly_cut, 'long tool result')} were shortened")
        window = "" if self.size is None else f" of {self.size}"
        text = (
            f"The model's context window was nearly full (about {before}{window} tokens), so {' and '.join(done)}. "
            f"The history now has about {self.tokens} tokens; the store keeps all of it."
        )
        self._report(Notice(text=text, kind="compaction"))

    def _definitions(self) -> list[dict[str, JSON]]:
        """Return the definitions of the tools, which are a part of every request: those of the latest turn."""
        stored = self._store.get(self._id)
        return list(self._seat.kit.definitions or (() if stored is None else stored.settings.get("tools") or ()))

    def _fixed(self) -> list[Message]:
        """Return what every request has apart from the conversation: the system prompt, if any, and the tools."""
        messages = self._history.messages
        system = messages[:1] if messages and messages[0].get("role") == "system" else []
        return [*system, *self._definitions()]

    def prompt_tokens(self) -> int:
        """Return the tokens of the next request: the server's count of the messages that it has seen, and an estimate
        of the others."""
        known, tokens = self._counted
        if known:
            return tokens + self._count.of(self._history.messages[known:])
        return self._count.of([*self._history.messages, *self._definitions()])
