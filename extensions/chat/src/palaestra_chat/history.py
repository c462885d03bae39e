"""The history of a conversation: its messages as the model sees them, and their way into the store.

Every message is stored once, as soon as it exists. A history whose process was killed is repaired when it is opened
again: each tool call that has no result gets one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from palaestra_chat.store import ConversationRecord, ConversationStore, StoredTurn
from palaestra_chat.turn_events import INTERRUPTED, NATURAL, Notice, TurnEnded
from palaestra_slots.core.types import JSON, Message

UNKNOWN = (
    "Outcome unknown: the program that ran this call ended before the call returned. It may have run in whole or in "
    "part, and it was not repeated. Find out what it has done before you repeat it."
)
NOT_BEGUN = "Not run: the program ended before this call began."

_PREVIEW_CHARS = 120


class ChatHistory:
    """The stored side of one conversation: its record, its turns, and its messages, the system prompt first."""

    def __init__(self, store: ConversationStore, record: ConversationRecord) -> None:
        self.record = record
        self.messages: list[Message] = store.history(record.id)
        """The messages as the model sees them. The agent loop appends to this list."""
        self._store = store
        self._id = record.id
        self._written = len(self.messages)
        self._early = 0
        self._notes: list[str] = []

    @property
    def title(self) -> str:
        """The title of the conversation, or the beginning of its first message."""
        return self.record.title or self._store.turns.first_words(self._id)

    def rename(self, title: str) -> None:
        """Give the conversation a title."""
        self._store.rename(self._id, title)
        self.record = replace(self.record, title=title)

    def change_settings(self, **changes: JSON) -> None:
        """Store these settings with the conversation, unless they are the same."""
        settings = {**self.record.settings, **changes}
        if settings != self.record.settings:
            self._store.change_settings(self._id, settings)
            self.record = replace(self.record, settings=settings)

    def turns(self, *, every: bool = False) -> list[StoredTurn]:
        """Return the turns of the history: the latest compaction, if there is one, and the turns that it did not
        summarize. With `every`, return all turns that are not undone."""
        return self._store.turns.of(self._id, every=every)

    def messages_sent(self) -> list[StoredTurn]:
        """Return the turns that are not undone and not compactions: one for each message of the user."""
        return [turn for turn in self.turns(every=True) if turn.kind == "message"]

    def open_turn(self) -> StoredTurn | None:
        """Return the last turn, if it has not ended."""
        turns = [turn for turn in self.turns() if turn.kind == "message"]
        return turns[-1] if turns and turns[-1].state == "open" else None

    def note(self, text: str, *, alone: bool = False) -> None:
        """Put this note in front of the user's next message, in place of earlier notes if `alone`. An empty note only
        replaces them."""
        self._notes = [*(() if alone else self._notes), *([text] if text else ())]

    def begin(self, content: JSON, message_id: str | None) -> StoredTurn:
        """Store the user's message, with the notes since the previous one, as the begin of a turn."""
        noted, self._notes = self._notes, []
        message: Message = {"role": "user", "content": _with_notes(content, noted)}
        turn = self._store.turns.begin(self._id, content, message_id=message_id, messages=[message])
        self.messages.append(message)
        self._written = len(self.messages)
        return turn

    def deliver_notes(self) -> None:
        """Put the notes in front of the last message, a user's or a tool result, for a turn that is continued: no
        message of the user follows, and a further one in the turn would read as a new task."""
        if self._notes and (entries := self._store.turns.entries(self._id)):
            noted, self._notes = self._notes, []
            last = entries[-1]
            whole = dict(self._store.turns.messages_of(last.turn))[last.row]  # it may be cut in the history
            told = {**whole, "content": _with_notes(whole["content"], noted)}
            self._store.turns.change_message(last.row, told)
            self.reload()

    def store_reply(self, turn: StoredTurn, message: Message) -> int:
        """Store a reply before the agent loop appends it, and return its row."""
        self._early = 1
        return self._store.turns.add_message(turn, message)

    @property
    def unwritten(self) -> Sequence[Message]:
        """The messages of the turn that came after the last `write`."""
        return self.messages[self._written :]

    def write(self, turn: StoredTurn) -> None:
        """Store the messages that are not stored yet."""
        for message in self.messages[self._written + self._early :]:
            self._store.turns.add_message(turn, message)
        self._written, self._early = len(self.messages), 0

    def finish(
        self,
        turn: StoredTurn,
        outcome: str,
        problem: str,
        report: Mapping[str, JSON] | None = None,
        *,
        said: str = "",
    ) -> TurnEnded:
        """End a turn in the store, and return its last event. If the turn's last message is not an answer, add a
        closing assistant message first; `said` is the beginning of the reply that was cut off."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            note = "[interrupted by the user]" if outcome == INTERRUPTED else f"[the turn ended early: {problem}]"
            closing: Message = {"role": "assistant", "content": f"{said}\n\n{note}" if said else note}
            self._store.turns.add_message(turn, closing)
            self.messages.append(closing)
            answer = said
        else:
            answer = str(last.get("content") or "")
        self._written, self._early = len(self.messages), 0
        self._store.turns.end(turn, answer=answer, outcome=outcome, error=problem, report=report)
        ended = replace(turn, answer=answer, outcome=outcome, error=problem, report=report or {})
        return turn_ended(ended, replayed=False)

    def reload(self) -> None:
        """Read the messages again, after the store has changed them."""
        self.messages = self._store.history(self._id)
        self._written, self._early = len(self.messages), 0

    def recover(self) -> list[Notice]:
        """Give a result to each tool call that a killed process left open, and end the turn if its answer was complete.
        Returns notices for the person."""
        turn = self.open_turn()
        if turn is None:
            return []
        notices = self._answer_calls(turn, self.messages)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not last.get("tool_calls"):  # the answer was complete
            self._store.turns.end(turn, answer=str(last.get("content") or ""), outcome=NATURAL)
        self.reload()
        return notices

    def _answer_calls(self, turn: StoredTurn, messages: list[Message]) -> list[Notice]:
        """Store and append a result for each tool call of the last reply that has none. Returns notices about the calls
        whose outcome is unknown."""
        stored = self._store.turns.messages_of(turn)
        asking = next((n for n in range(len(stored) - 1, -1, -1) if stored[n][1].get("role") == "assistant"), None)
        if asking is None:
            return []
        row, reply = stored[asking]
        answered = {message.get("tool_call_id") for _, message in stored[asking + 1 :]}
        effects = {effect.key: effect for effect in self._store.effects.of(turn, kind="tool", message=row)}
        notices = []
        for call in reply.get("tool_calls") or ():
            if call["id"] in answered:
                continue
            effect = effects.get(call["id"])
            if effect is None:
                text = json.dumps({"error": NOT_BEGUN})
            elif effect.state == "ended":
                text = effect.result
            elif effect.state == "begun":
                self._store.effects.end(effect, UNKNOWN, "unknown")
                text = json.dumps({"error": UNKNOWN})
                shown = preview(effect.name, effect.payload)
                notices.append(
                    Notice(
                        text=f"Outcome unknown: {effect.name} {shown} did not finish. It is not repeated.",
                        kind="recovery",
                    )
                )
            else:
                text = json.dumps({"error": effect.result})
            message: Message = {"role": "tool", "tool_call_id": call["id"], "content": text}
            self._store.turns.add_message(turn, message)
            messages.append(message)
        return notices


def preview(name: str, arguments: Mapping[str, JSON]) -> str:
    """Describe a tool call in one short line: its command, its path, or its arguments."""
    for key in ("command", "path", "query", "url", "goal", "question", "session_id"):
        if isinstance(arguments.get(key), str):
            text = str(arguments[key])
            break
    else:
        text = json.dumps(dict(arguments), ensure_ascii=False)
    line = " ".join(text.split())
    return line if len(line) <= _PREVIEW_CHARS else f"{line[:_PREVIEW_CHARS]}…"


def _with_notes(content: JSON, notes: Sequence[str]) -> JSON:
    """Return a user's message, preceded by notes on what happened since the user's previous message, if there are
    any."""
    if not notes:
        return content
    text = "\n".join(f"[{note}]" for note in notes)
    if isinstance(content, str):
        return f"{text}\n\n{content}"
    return [{"type": "text", "text": text}, *content]


def turn_ended(turn: StoredTurn, *, replayed: bool = True) -> TurnEnded:
    """Return the last event of a turn that has ended."""
    report = turn.report
    return TurnEnded(
        turn=turn.number,
        text=turn.answer,
        outcome=turn.outcome,
        error=turn.error,
        replayed=replayed,
        model_calls=int(report.get("model_calls", 0)),
        prompt_tokens=int(report.get("prompt_tokens", 0)),
        completion_tokens=int(report.get("completion_tokens", 0)),
        context_tokens=int(report.get("context_tokens", 0)),
        cost=report.get("cost"),
    )
