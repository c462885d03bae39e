"""`ConversationStore`: the conversations of one user of this machine, in one SQLite file, with full-text search.

It is the authoritative record of a conversation. The user's message and each reply are stored at once, and a reply's
tool results when all its calls have ended. Every tool call of the agent itself is also stored as an `Effect`, before it
begins and after it ends. The process may therefore be killed at any moment: the next process finds the open turn, knows
which calls had begun, and answers no message twice (`message_id`).

The file is in WAL mode with `synchronous=NORMAL`: nothing is lost when the process dies; a power failure may lose the
last writes. Several processes may use it. A method blocks for about ten microseconds. Except for `search`, call methods
only in the thread that created the store.

`undo`, `fork` and compaction delete nothing: turns only change their state, and the history leaves some of them out.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.io.durable_files import private
from palaestra.core.printable import without_middle
from palaestra.core.types import JSON, Message
from palaestra.doors.chat.folders import state_folder
from palaestra.tools.builtin.session_search import EXCERPTS, PastSession, SessionMatch, message_text

SCHEMA_VERSION = 1
BUSY_S = 10.0
"""The maximum time, in seconds, that a write waits for another process's write."""

_TABLES = """
CREATE TABLE conversations (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', key TEXT NOT NULL DEFAULT '', user TEXT NOT NULL DEFAULT '',
  system TEXT, settings TEXT NOT NULL DEFAULT '{}', parent TEXT, parent_turn INTEGER,
  created_at REAL NOT NULL, updated_at REAL NOT NULL);
CREATE INDEX conversations_by_key ON conversations (key, updated_at);
CREATE TABLE turns (
  id INTEGER PRIMARY KEY, conversation TEXT NOT NULL REFERENCES conversations, number INTEGER NOT NULL,
  kind TEXT NOT NULL DEFAULT 'message', message_id TEXT, state TEXT NOT NULL, content TEXT NOT NULL,
  answer TEXT NOT NULL DEFAULT '', outcome TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '',
  report TEXT NOT NULL DEFAULT '{}', started_at REAL NOT NULL, ended_at REAL,
  UNIQUE (conversation, number), UNIQUE (conversation, message_id));
CREATE TABLE messages (
  id INTEGER PRIMARY KEY, turn INTEGER NOT NULL REFERENCES turns, role TEXT NOT NULL, body TEXT NOT NULL,
  text TEXT NOT NULL);
CREATE INDEX messages_by_turn ON messages (turn, id);
CREATE TABLE effects (
  id INTEGER PRIMARY KEY, turn INTEGER NOT NULL REFERENCES turns, message INTEGER, kind TEXT NOT NULL,
  key TEXT NOT NULL, name TEXT NOT NULL, payload TEXT NOT NULL, state TEXT NOT NULL, result TEXT NOT NULL DEFAULT '',
  started_at REAL NOT NULL, ended_at REAL);
CREATE INDEX effects_by_turn ON effects (turn, message, key);
CREATE TABLE ledgers (
  conversation TEXT NOT NULL REFERENCES conversations, part INTEGER NOT NULL, first_turn INTEGER NOT NULL,
  last_turn INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (conversation, part));
CREATE TABLE allowed (user TEXT NOT NULL, danger TEXT NOT NULL, PRIMARY KEY (user, danger));
CREATE TABLE users (name TEXT PRIMARY KEY, consent INTEGER NOT NULL DEFAULT 0);
CREATE VIRTUAL TABLE said USING fts5 (text, content='messages', content_rowid='id');
CREATE TRIGGER messages_said AFTER INSERT ON messages WHEN new.role != 'system'
  BEGIN INSERT INTO said (rowid, text) VALUES (new.id, new.text); END;
"""

_CONVERSATION = "id, title, key, user, system, settings, parent, parent_turn, created_at, updated_at"
_TURN = "id, conversation, number, kind, message_id, state, content, answer, outcome, error, report"


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """One conversation. `key` identifies the front end or chat that it belongs to (a gateway's session key), and `user`
    is its owner. If it is a fork, `parent` and `parent_turn` identify the turn after which it was forked. Times are in
    seconds since the epoch."""

    id: str
    title: str
    key: str
    user: str
    system: str | None
    settings: Mapping[str, JSON]
    parent: str | None
    parent_turn: int | None
    created_at: float
    updated_at: float


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
class Effect:
    """One side effect. For a tool call, `kind` is tool and `key` is the id of the call; no other kind is written.

    `state` is begun, ended, interrupted, failed or unknown.
    """

    row: int
    kind: str
    key: str
    name: str
    payload: JSON
    state: str
    result: str


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One message of the history, and its turn and row. `cut` is the number of characters to which it was shortened, or
    None."""

    turn: StoredTurn
    row: int
    message: Message
    cut: int | None = None


class ConversationStore:
    """The store in the file `path`, by default `conversations.sqlite` in `state_folder()`. A missing file is created. A
    store is a context manager.

    Raises `ConfigError` for a file that is not a store or that a newer version wrote.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder() / "conversations.sqlite"
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(private(str(self.path), os.O_RDWR | os.O_CREAT))
        self._db = _opened(self.path)
        try:
            self._prepare()
        except (sqlite3.DatabaseError, ConfigError) as error:
            self._db.close()
            raise ConfigError(f"{self.path} cannot be used as a conversation store: {error}") from None

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._writing():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise ConfigError(
                    f"its format version is {version}, but this program reads only versions up to {SCHEMA_VERSION}; "
                    "upgrade Palaestra"
                )
            if not version:
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    # Conversations

    def create(
        self,
        *,
        system: str | None = None,
        title: str = "",
        key: str = "",
        user: str = "",
        settings: Mapping[str, JSON] | None = None,
        parent: tuple[str, int] | None = None,
    ) -> ConversationRecord:
        """Store a new conversation and return its record."""
        now = time.time()
        conversation, turn = parent or (None, None)
        record = ConversationRecord(
            id=time.strftime("%Y%m%d-", time.gmtime(now)) + uuid.uuid4().hex[:8],
            title=title,
            key=key,
            user=user,
            system=system,
            settings=dict(settings or {}),
            parent=conversation,
            parent_turn=turn,
            created_at=now,
            updated_at=now,
        )
        values = [getattr(record, name) for name in _CONVERSATION.split(", ")]
        values[5] = _json(record.settings)
        with self._writing():
            self._db.execute(f"INSERT INTO conversations ({_CONVERSATION}) VALUES ({_places(values)})", values)  # noqa: S608
        return record

    def get(self, conversation: str) -> ConversationRecord | None:
        """Return the conversation with this id, or None."""
        return next(self._conversations("WHERE id = ?", conversation), None)

    def find(self, name: str) -> ConversationRecord:
        """Return the conversation with the id or title `name`; of several with this title, the latest. If there is
        none, return the only conversation whose id begins with `name`. `last` names the latest of all.

        Raises `ConfigError` if no conversation matches, or if several ids begin with `name`.
        """
        if name == "last":
            found = self.conversations(limit=1)
        else:
            found = list(self._conversations("WHERE id = ? OR title = ? ORDER BY updated_at DESC", name, name))[:1]
        found = found or list(self._conversations("WHERE substr(id, 1, length(?1)) = ?1", name))
        if len(found) != 1:
            problem = (
                f"{len(found)} conversations begin with {name!r}" if found else f"no conversation matches {name!r}"
            )
            raise ConfigError(f"{problem}; name one by its id, the beginning of its id, or its title")
        return found[0]

    def conversations(
        self, *, limit: int = 50, key: str | None = None, user: str | None = None
    ) -> list[ConversationRecord]:
        """Return up to `limit` conversations, latest first. If `key` or `user` is given, return only conversations of
        this key or user."""
        wanted = [(name, value) for name, value in (("key", key), ("user", user)) if value is not None]
        where = "WHERE " + " AND ".join(f"{name} = ?" for name, _ in wanted) if wanted else ""
        values = [value for _, value in wanted]
        return list(self._conversations(f"{where} ORDER BY updated_at DESC, rowid DESC LIMIT ?", *values, limit))

    def rename(self, conversation: str, title: str) -> None:
        """Give a conversation a title."""
        with self._writing():
            self._db.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, conversation))

    def change_settings(self, conversation: str, settings: Mapping[str, JSON]) -> None:
        """Replace the settings of a conversation."""
        with self._writing():
            self._db.execute("UPDATE conversations SET settings = ? WHERE id = ?", (_json(settings), conversation))

    # Turns and messages

    def begin_turn(
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
        with self._writing():
            (last,) = self._db.execute(
                "SELECT coalesce(max(number), 0) FROM turns WHERE conversation = ?", (conversation,)
            ).fetchone()
            try:
                row = self._db.execute(
                    "INSERT INTO turns (conversation, number, kind, message_id, state, content, started_at)"
                    " VALUES (?, ?, ?, ?, 'open', ?, ?)",
                    (conversation, last + 1, kind, message_id, _json(content), now),
                ).lastrowid
            except sqlite3.IntegrityError:
                raise ConfigError(f"message {message_id!r} of {conversation} already has a turn") from None
            assert row is not None
            turn = StoredTurn(row, conversation, last + 1, kind, message_id, "open", content, "", "", "")
            for message in messages:
                self.add_message(turn, message)
            self._touch(conversation, now)
        return turn

    def end_turn(
        self, turn: StoredTurn, *, answer: str, outcome: str, error: str = "", report: Mapping[str, JSON] | None = None
    ) -> None:
        """Close a turn with its answer."""
        now = time.time()
        with self._writing():
            self._db.execute(
                "UPDATE turns SET state = 'done', answer = ?, outcome = ?, error = ?, report = ?, ended_at = ?"
                " WHERE id = ?",
                (answer, outcome, error, _json(report or {}), now, turn.row),
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
        with self._writing():
            (covers,) = self._db.execute(
                "SELECT coalesce(max(m.id), 0) FROM messages m JOIN turns t ON t.id = m.turn WHERE t.conversation = ?",
                (conversation,),
            ).fetchone()
            turn = self.begin_turn(conversation, summary, kind="compaction", messages=messages)
            layout: dict[str, JSON] = {
                "covers": covers,
                "kept": list(kept),
                "cut": {str(row): chars for row, chars in (cut or {}).items()},
                "during": turn.number if during is None else during.number,
            }
            self.end_turn(turn, answer=summary, outcome="natural", report={**(report or {}), **layout})
        return turn

    def undo_last(self, conversation: str) -> StoredTurn | None:
        """Remove the last message's turn from the history, together with the compactions that summarized a part of it,
        so that the history before the message is as it was. Its message may be sent again. Returns the turn, or None if
        there is none."""
        found = self.turns(conversation, every=True)
        last = next((turn for turn in reversed(found) if turn.kind == "message"), None)
        if last is None:
            return None
        rows = {row for row, _ in self.messages_of(last)}
        with self._writing():
            for turn in found:
                if turn is last or (turn.kind == "compaction" and turn.number > last.number and _covers(turn, rows)):
                    self._db.execute("UPDATE turns SET state = 'undone', message_id = NULL WHERE id = ?", (turn.row,))
        return last

    def turn_of(self, conversation: str, message_id: str) -> StoredTurn | None:
        """Return the turn of a message, or None if there is none."""
        return next(self._turns("WHERE conversation = ? AND message_id = ?", conversation, message_id), None)

    def turns(self, conversation: str, *, every: bool = False) -> list[StoredTurn]:
        """Return the turns of the history. The latest compaction comes first, and turns that it summarized are left
        out. With `every`, return all turns that are not undone, in order."""
        found = list(self._turns("WHERE conversation = ? AND state != 'undone' ORDER BY number", conversation))
        first = None if every else _latest_compaction(found)
        if first is None:
            return found
        shown = {entry.turn.row for entry in self.entries(conversation)}
        return [first] + [
            turn for turn in found if turn is not first and (turn.number > first.number or turn.row in shown)
        ]

    def first_words(self, conversation: str) -> str:
        """Return the beginning of the conversation's first message, also after a compaction."""
        turn = next(
            self._turns(
                "WHERE conversation = ? AND kind = 'message' AND state != 'undone' ORDER BY number", conversation
            ),
            None,
        )
        return "" if turn is None else " ".join(message_text(turn.content).split())[:60]

    def add_message(self, turn: StoredTurn, message: Message) -> int:
        """Append a message to a turn; returns its row."""
        text = message_text(message.get("content"))
        with self._writing():
            row = self._db.execute(
                "INSERT INTO messages (turn, role, body, text) VALUES (?, ?, ?, ?)",
                (turn.row, str(message.get("role") or ""), _json(message), text),
            ).lastrowid
        assert row is not None
        return row

    def messages_of(self, turn: StoredTurn) -> list[tuple[int, Message]]:
        """Return the messages of a turn with their rows, in order."""
        rows = self._db.execute("SELECT id, body FROM messages WHERE turn = ? ORDER BY id", (turn.row,))
        return [(row, msgspec.json.decode(body)) for row, body in rows]

    def history(self, conversation: str, *, until: int | None = None) -> list[Message]:
        """Return the messages as the model sees them, the system prompt first, up to and including the turn `until`."""
        record = self.get(conversation)
        messages: list[Message] = []
        if record is not None and record.system is not None:
            messages.append({"role": "system", "content": record.system})
        return messages + [entry.message for entry in self.entries(conversation, until=until)]

    def entries(self, conversation: str, *, until: int | None = None) -> list[HistoryEntry]:
        """Return the messages of `history`, without the system prompt, and where each of them is stored."""
        found = {
            turn.row: turn
            for turn in self.turns(conversation, every=True)
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
        return self._db.execute(
            "SELECT m.turn, m.id, m.body FROM messages m JOIN turns t ON t.id = m.turn"
            " WHERE t.conversation = ? AND t.state != 'undone' ORDER BY m.id",
            (conversation,),
        ).fetchall()

    def said(self, conversation: str) -> list[Message]:
        """Return all stored messages, including those that `history` leaves out: messages of undone turns and messages
        before a compaction."""
        rows = self._db.execute(
            "SELECT m.body FROM messages m JOIN turns t ON t.id = m.turn WHERE t.conversation = ? ORDER BY m.id",
            (conversation,),
        )
        return [msgspec.json.decode(body) for (body,) in rows]

    def fork(self, conversation: str, turn: int | None = None, *, title: str = "") -> ConversationRecord:
        """Return a new conversation with the finished turns of the history up to `turn`. If `turn` is None, it has all
        of them; if it is 0, none. Raises `ConfigError` for an unknown conversation or turn."""
        record = self.get(conversation)
        if record is None:
            raise ConfigError(f"there is no conversation {conversation!r}")
        kept = [each for each in self.turns(conversation) if each.state == "done"]
        summarized = any(each.kind == "compaction" for each in kept)
        if turn is not None:
            if turn and turn not in [each.number for each in kept]:
                raise ConfigError(f"{conversation} has no turn {turn}; its turns are {[each.number for each in kept]}")
            kept = [each for each in kept if turn and (each.number <= turn or each.kind == "compaction")]
        last = kept[-1].number if kept else 0
        entries = self.entries(conversation)
        if summarized and not title:
            title = record.title or self.first_words(conversation)
        with self._writing():
            new = self.create(
                system=record.system, title=title, key=record.key, user=record.user, settings=record.settings,
                parent=(conversation, last),
            )  # fmt: skip
            for each in kept:
                copy = self.begin_turn(new.id, each.content, kind=each.kind)
                for entry in entries:
                    if entry.turn.row == each.row:
                        self.add_message(copy, entry.message)
                report = {name: value for name, value in each.report.items() if name not in _LAYOUT}
                self.end_turn(copy, answer=each.answer, outcome=each.outcome, error=each.error, report=report)
        return new

    # The journal of side effects

    def begin_effect(
        self, turn: StoredTurn, kind: str, key: str, name: str, payload: JSON, *, message: int | None = None
    ) -> Effect:
        """Record that a side effect begins. `message` is the row of the assistant message that requests it."""
        with self._writing():
            row = self._db.execute(
                "INSERT INTO effects (turn, message, kind, key, name, payload, state, started_at)"
                " VALUES (?, ?, ?, ?, ?, ?, 'begun', ?)",
                (turn.row, message, kind, key, name, _json(payload), time.time()),
            ).lastrowid
        assert row is not None
        return Effect(row, kind, key, name, payload, "begun", "")

    def end_effect(self, effect: Effect, result: str, state: str = "ended") -> None:
        """Record the end of a side effect."""
        with self._writing():
            self._db.execute(
                "UPDATE effects SET state = ?, result = ?, ended_at = ? WHERE id = ?",
                (state, result, time.time(), effect.row),
            )

    def effects(self, turn: StoredTurn, *, kind: str | None = None, message: int | None = None) -> list[Effect]:
        """Return the side effects of a turn, in the order in which they began. If `kind` or `message` is given, return
        only side effects of this kind or message."""
        rows = self._db.execute(
            "SELECT id, kind, key, name, payload, state, result FROM effects"
            " WHERE turn = ?1 AND (?2 IS NULL OR kind = ?2) AND (?3 IS NULL OR message = ?3) ORDER BY id",
            (turn.row, kind, message),
        )
        return [
            Effect(row, kind, key, name, msgspec.json.decode(payload), state, result)
            for row, kind, key, name, payload, state, result in rows
        ]

    # Tokens, approvals, consent

    def save_ledger(self, conversation: str, part: int, turns: tuple[int, int], record: bytes) -> None:
        """Store the token record of one session with the model server; `part` is the session's number. `turns` are the
        first and the last turn that the record covers. It replaces the session's earlier record."""
        with self._writing():
            self._db.execute(
                "INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?, ?, ?)", (conversation, part, *turns, record)
            )

    def ledgers(self, conversation: str) -> list[tuple[int, int, int, bytes]]:
        """Return the token records as tuples of the part (see `save_ledger`), the first turn, the last turn, and the
        record."""
        return self._db.execute(
            "SELECT part, first_turn, last_turn, record FROM ledgers WHERE conversation = ? ORDER BY part",
            (conversation,),
        ).fetchall()

    def allow(self, user: str, dangers: Collection[str]) -> None:
        """From now on, allow a user's commands that have only these kinds of danger. The key of a tool
        (`Permit.key`) allows that tool."""
        with self._writing():
            self._db.executemany("INSERT OR IGNORE INTO allowed VALUES (?, ?)", [(user, each) for each in dangers])

    def allowed(self, user: str) -> set[str]:
        """Return the kinds of danger, and the keys of tools, that a user always allows."""
        return {danger for (danger,) in self._db.execute("SELECT danger FROM allowed WHERE user = ?", (user,))}

    def disallow(self, user: str, dangers: Collection[str]) -> None:
        """Ask this user again about these kinds of danger and tools."""
        with self._writing():
            self._db.executemany(
                "DELETE FROM allowed WHERE user = ? AND danger = ?", [(user, each) for each in dangers]
            )

    def set_consent(self, user: str, consent: bool) -> None:
        """Record whether a user's conversations may be exported for training."""
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO users VALUES (?, ?)", (user, int(consent)))

    def consent(self, user: str) -> bool:
        """Return whether a user's conversations may be exported for training; False unless recorded."""
        found = self._db.execute("SELECT consent FROM users WHERE name = ?", (user,)).fetchone()
        return bool(found and found[0])

    # Search

    def search(
        self, query: str, roles: Collection[str] = (), limit: int = 3, *, current: str = ""
    ) -> list[SessionMatch]:
        """Return the conversations whose messages contain words of `query`, best first (BM25), with excerpts.

        Implements `SessionSource`; may be called in any thread.
        """
        words = " OR ".join(f'"{word}"' for word in query.replace('"', " ").split())
        if not words:
            return []
        only = f" AND m.role IN ({_places(list(roles))})" if roles else ""
        sql = (
            "SELECT c.id, c.title, c.created_at, m.role, snippet(said, 0, '', '', '…', 40), -bm25(said) FROM said"  # noqa: S608
            " JOIN messages m ON m.id = said.rowid JOIN turns t ON t.id = m.turn"
            " JOIN conversations c ON c.id = t.conversation"
            f" WHERE said MATCH ? AND c.id != ? AND t.state != 'undone'{only} ORDER BY bm25(said), m.id LIMIT 500"
        )
        with closing(_opened(self.path)) as db:
            rows = db.execute(sql, (words, current, *roles)).fetchall()
        found: dict[str, tuple[PastSession, list[dict[str, str]], float]] = {}
        for id_, title, created_at, role, text, score in rows:
            session, excerpts, total = found.get(id_) or (
                PastSession(session_id=id_, started_at=created_at, messages=[], title=title), [], 0.0,
            )  # fmt: skip
            if len(excerpts) < EXCERPTS:
                excerpts.append({"role": role, "text": text})
            found[id_] = session, excerpts, max(total, score)
        best = sorted(found.values(), key=lambda each: (-each[2], -each[0].started_at, each[0].session_id))
        return [SessionMatch(session, excerpts, round(score, 6)) for session, excerpts, score in best[:limit]]

    # Internal

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the block in a transaction. Inside another transaction, the block is part of the outer transaction."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _touch(self, conversation: str, now: float) -> None:
        self._db.execute("UPDATE conversations SET updated_at = ? WHERE id = ?", (now, conversation))

    def _conversations(self, where: str, *values: JSON) -> Iterator[ConversationRecord]:
        for row in self._db.execute(f"SELECT {_CONVERSATION} FROM conversations {where}", values).fetchall():  # noqa: S608
            named = dict(zip(_CONVERSATION.split(", "), row, strict=True))
            yield ConversationRecord(**{**named, "settings": msgspec.json.decode(row[5])})

    def _turns(self, where: str, *values: JSON) -> Iterator[StoredTurn]:
        for row in self._db.execute(f"SELECT {_TURN} FROM turns {where}", values).fetchall():  # noqa: S608
            named = dict(zip(_TURN.split(", "), row, strict=True))
            decoded = {name: msgspec.json.decode(named[name]) for name in ("content", "report")}
            yield StoredTurn(named.pop("id"), **{**named, **decoded})


_LAYOUT = ("covers", "kept", "cut", "during")
"""The fields of a compaction's report that describe the history after it (see `compact`)."""


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


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)


def _json(value: JSON) -> str:
    return msgspec.json.encode(value).decode()


def _places(values: Sequence[JSON]) -> str:
    return ", ".join("?" * len(values))
