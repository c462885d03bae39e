"""The turns of the conversations in a store, with their messages.

The user's message and each reply are stored at once, and a reply's tool results when all its calls have ended. Nothing
is deleted: undoing a turn and compaction only change which turns and messages the history has.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from palaestra_chat.store.store_file import StoreFile, encoded
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Message
from palaestra_toolsets.tools.session_search import message_text

_TURN = "id, conversation, number, kind, message_id, state, content, answer, outcome, error, report"


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn: a user's message and everything up to its answer. `number` counts from 1.

    `kind` is message or compaction; `state` is open, done or undone. `content` is the message as it was sent, and
    `report` holds the turn's final figures.
    """

    row: int
    conversation: str
    number: int
    kind: str
    message_id: str | None
    state: str
    content: JSON
    answer: str
    outcome: str
    error: str
    report: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One message of the history, and its turn and row. `cut` is the number of characters to which it was shortened, or
    None."""

    turn: StoredTurn
    row: int
    message: Message
    cut: int | None = None


class StoredTurns:
    """The turns in a store. A method takes the id of the conversation, or one of its turns."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    # Turns and messages

    def begin(
        self,
        conversation: str,
        content: JSON,
        *,
        message_id: str | None = None,
        kind: str = "message",
        messages: Sequence[Message] = (),
    ) -> StoredTurn:
        """Open the next turn, with its first messages. Raises `ConfigError` if `message_id` already has a turn."""
        now = time.time()
        with self._file.writing():
            (last,) = self._file.execute(
                "SELECT coalesce(max(number), 0) FROM turns WHERE conversation = ?", (conversation,)
            ).fetchone()
            try:
                row = self._file.insert(
                    "INSERT INTO turns (conversation, number, kind, message_id, state, content, started_at)"
                    " VALUES (?, ?, ?, ?, 'open', ?, ?)",
                    (conversation, last + 1, kind, message_id, encoded(content), now),
                )
            except sqlite3.IntegrityError:
                raise ConfigError(f"message {message_id!r} of {conversation} already has a turn") from None
            turn = StoredTurn(row, conversation, last + 1, kind, message_id, "open", content, "", "", "")
            for message in messages:
                self.add_message(turn, message)
            self._touch(conversation, now)
        return turn

    def end(
        self, turn: StoredTurn, *, answer: str, outcome: str, error: str = "", report: Mapping[str, JSON] | None = None
    ) -> None:
        """Close a turn with its answer."""
        now = time.time()
        with self._file.writing():
            self._file.execute(
                "UPDATE turns SET state = 'done', answer = ?, outcome = ?, error = ?, report = ?, ended_at = ?"
                " WHERE id = ?",
                (answer, outcome, error, encoded(report or {}), now, turn.row),
            )
            self._touch(turn.conversation, now)

    def compact(
        self,
        conversation: str,
        summary: str,
        *,
        messages: Sequence[Message] = (),
        kept: Sequence[int] = (),
        cut: Mapping[int, int] | None = None,
        during: StoredTurn | None = None,
        report: Mapping[str, JSON] | None = None,
    ) -> StoredTurn:
        """Let the history begin with `messages`, followed by the messages in the rows `kept` and by later messages.
        `cut` maps rows of kept messages to the number of characters that the history has of them. `during` is the open
        turn in which this happens. Nothing is deleted."""
        with self._file.writing():
            (covers,) = self._file.execute(
                "SELECT coalesce(max(m.id), 0) FROM messages m JOIN turns t ON t.id = m.turn WHERE t.conversation = ?",
                (conversation,),
            ).fetchone()
            turn = self.begin(conversation, summary, kind="compaction", messages=messages)
            layout: dict[str, JSON] = {
                "covers": covers,
                "kept": list(kept),
                "cut": {str(row): chars for row, chars in (cut or {}).items()},
                "during": turn.number if during is None else during.number,
            }
            self.end(turn, answer=summary, outcome="natural", report={**(report or {}), **layout})
        return turn

    def undo(self, conversation: str, *, since: int) -> list[StoredTurn]:
        """Remove the messages' turns from number `since` on from the history, together with the compactions that
        summarized a part of them, so that the history before them is as it was. Their messages may be sent again.
        Returns the turns of these messages, in order."""
        found = self.of(conversation, every=True)
        undone = [turn for turn in found if turn.kind == "message" and turn.number >= since]
        rows = {turn.number: {row for row, _ in self.messages_of(turn)} for turn in undone}
        summaries = [
            turn
            for turn in found
            if turn.kind == "compaction"
            and any(number < turn.number and _covers(turn, covered) for number, covered in rows.items())
        ]
        with self._file.writing():
            for turn in (*undone, *summaries):
                self._file.execute("UPDATE turns SET state = 'undone', message_id = NULL WHERE id = ?", (turn.row,))
        return undone

    def of_message(self, conversation: str, message_id: str) -> StoredTurn | None:
        """Return the turn of a message, or None if there is none."""
        return next(self._select("WHERE conversation = ? AND message_id = ?", conversation, message_id), None)

    def of(self, conversation: str, *, every: bool = False) -> list[StoredTurn]:
        """Return the turns of the history. The latest compaction comes first, and turns that it summarized are left
        out. With `every`, return all turns that are not undone, in order."""
        found = list(self._select("WHERE conversation = ? AND state != 'undone' ORDER BY number", conversation))
        first = None if every else _latest_compaction(found)
        if first is None:
            return found
        shown = {entry.turn.row for entry in self.entries(conversation)}
        return [first] + [
            turn for turn in found if turn is not first and (turn.number > first.number or turn.row in shown)
        ]

    def reports(self, conversation: str) -> list[Mapping[str, JSON]]:
        """Return the final figures of all turns, also of those that are undone: what they cost is spent."""
        return [turn.report for turn in self._select("WHERE conversation = ? ORDER BY number", conversation)]

    def first_words(self, conversation: str) -> str:
        """Return the beginning of the conversation's first message, also after a compaction."""
        turn = next(
            self._select(
                "WHERE conversation = ? AND kind = 'message' AND state != 'undone' ORDER BY number", conversation
            ),
            None,
        )
        return "" if turn is None else " ".join(message_text(turn.content).split())[:60]

    def add_message(self, turn: StoredTurn, message: Message) -> int:
        """Append a message to a turn; returns its row."""
        text = message_text(message.get("content"))
        with self._file.writing():
            return self._file.insert(
                "INSERT INTO messages (turn, role, body, text) VALUES (?, ?, ?, ?)",
                (turn.row, str(message.get("role") or ""), encoded(message), text),
            )

    def change_message(self, row: int, message: Message) -> None:
        """Replace the message in a row. A search finds it by its text from before."""
        with self._file.writing():
            self._file.execute("UPDATE messages SET body = ? WHERE id = ?", (encoded(message), row))

    def messages_of(self, turn: StoredTurn) -> list[tuple[int, Message]]:
        """Return the messages of a turn with their rows, in order."""
        rows = self._file.execute("SELECT id, body FROM messages WHERE turn = ? ORDER BY id", (turn.row,))
        return [(row, msgspec.json.decode(body)) for row, body in rows]

    def entries(self, conversation: str, *, until: int | None = None) -> list[HistoryEntry]:
        """Return the messages as the model sees them, without the system prompt, up to and including the turn `until`,
        and where each of them is stored."""
        found = {
            turn.row: turn
            for turn in self.of(conversation, every=True)
            if until is None or turn.report.get("during", turn.number) <= until
        }
        first = _latest_compaction(found.values())
        stored = [(turn, row, body) for turn, row, body in self._bodies(conversation) if turn in found]
        if first is None:
            return [HistoryEntry(found[turn], row, msgspec.json.decode(body)) for turn, row, body in stored]
        own = [each for each in stored if each[0] == first.row]
        covers = first.report.get("covers") or max((row for _, row, _ in own), default=0)
        kept = set(first.report.get("kept") or ())
        cut = {int(row): chars for row, chars in (first.report.get("cut") or {}).items()}
        others = [each for each in stored if each[0] != first.row and (each[1] > covers or each[1] in kept)]
        return [
            HistoryEntry(found[turn], row, shortened(msgspec.json.decode(body), cut.get(row)), cut.get(row))
            for turn, row, body in own + others
        ]

    def _bodies(self, conversation: str) -> list[tuple[int, int, str]]:
        """Return the turn, row and content of each message that is not undone, in order."""
        return self._file.execute(
            "SELECT m.turn, m.id, m.body FROM messages m JOIN turns t ON t.id = m.turn"
            " WHERE t.conversation = ? AND t.state != 'undone' ORDER BY m.id",
            (conversation,),
        ).fetchall()

    def said(self, conversation: str) -> list[Message]:
        """Return all stored messages, including those that `entries` leaves out: messages of undone turns and messages
        before a compaction."""
        rows = self._file.execute(
            "SELECT m.body FROM messages m JOIN turns t ON t.id = m.turn WHERE t.conversation = ? ORDER BY m.id",
            (conversation,),
        )
        return [msgspec.json.decode(body) for (body,) in rows]

    def _touch(self, conversation: str, now: float) -> None:
        self._file.execute("UPDATE conversations SET updated_at = ? WHERE id = ?", (now, conversation))

    def _select(self, where: str, *values: JSON) -> Iterator[StoredTurn]:
        for row in self._file.execute(f"SELECT {_TURN} FROM turns {where}", values).fetchall():  # noqa: S608
            named = dict(zip(_TURN.split(", "), row, strict=True))
            decoded = {name: msgspec.json.decode(named[name]) for name in ("content", "report")}
            yield StoredTurn(named.pop("id"), **{**named, **decoded})


LAYOUT = ("covers", "kept", "cut", "during")
"""The fields of a compaction's report that describe the history after it (see `StoredTurns.compact`)."""


def _latest_compaction(turns: Iterable[StoredTurn]) -> StoredTurn | None:
    done = [turn for turn in turns if turn.kind == "compaction" and turn.state == "done"]
    return max(done, key=lambda turn: turn.number, default=None)


def _covers(compaction: StoredTurn, rows: Collection[int]) -> bool:
    """Return whether a compaction left one of these rows out of the history."""
    covers = compaction.report.get("covers")
    return covers is None or any(row <= covers and row not in compaction.report["kept"] for row in rows)


def shortened(message: Message, chars: int | None) -> Message:
    """Return the message with at most about `chars` characters of text: the beginning and the end, with a note between
    them."""
    content = message.get("content")
    if chars is None:
        return message
    if isinstance(content, str):
        return {**message, "content": _without_middle(content, chars)}
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "text": _without_middle(part["text"], chars)}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _without_middle(text: str, chars: int) -> str:
    return without_middle(text, chars, "\n[… {} characters left out to fit the context window …]\n")
