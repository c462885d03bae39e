"""`ConversationStore`: the conversations of one user of this machine, in one SQLite file, with full-text search.

It is the authoritative record of a conversation. Each message is stored as soon as it exists (`stored_turns.py`), and
each tool call before it begins and after it ends (`effects.py`). The process may therefore be killed at any moment: the
next process finds the open turn, knows which calls had begun, and answers no message twice (`message_id`).

A method blocks for about ten microseconds. Except for `search`, call methods only in the thread that created the store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from palaestra_chat.folders import state_folder
from palaestra_chat.store.effects import EffectJournal
from palaestra_chat.store.store_file import StoreFile, connection, encoded, placeholders
from palaestra_chat.store.stored_ledgers import StoredLedgers
from palaestra_chat.store.stored_turns import LAYOUT, StoredTurns
from palaestra_chat.store.stored_users import StoredUsers
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_toolsets.tools.session_search import EXCERPTS, PastSession, SessionMatch

_CONVERSATION = "id, title, key, user, system, settings, parent, parent_turn, created_at, updated_at"


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


class ConversationStore:
    """The store in the file `path`, by default `conversations.sqlite` in `state_folder()`. A missing file is created. A
    store is a context manager.

    The store itself has the conversations; `turns` has their turns and messages, `effects` the side effects of the
    turns, `ledgers` the token records, and `users` what users have allowed.

    Raises `ConfigError` for a file that is not a store or that a newer version wrote.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder() / "conversations.sqlite"
        self._file = StoreFile(self.path)
        self.turns = StoredTurns(self._file)
        self.effects = EffectJournal(self._file)
        self.ledgers = StoredLedgers(self._file)
        self.users = StoredUsers(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

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
        values[5] = encoded(record.settings)
        with self._file.writing():
            self._file.execute(f"INSERT INTO conversations ({_CONVERSATION}) VALUES ({placeholders(values)})", values)  # noqa: S608
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

    def latest(self, folder: Path) -> ConversationRecord:
        """Return the latest conversation about this folder that has a turn. Raises `ConfigError` if there is none."""
        where = "WHERE json_extract(settings, '$.cwd') = ? AND id IN (SELECT conversation FROM turns)"
        found = next(self._conversations(f"{where} ORDER BY updated_at DESC, rowid DESC LIMIT 1", str(folder)), None)
        if found is None:
            raise ConfigError(
                f"there is no conversation about {folder} yet; palaestra chat --list lists those about other folders, "
                "and --resume NAME continues one of them"
            )
        return found

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
        with self._file.writing():
            self._file.execute("UPDATE conversations SET title = ? WHERE id = ?", (title, conversation))

    def change_settings(self, conversation: str, settings: Mapping[str, JSON]) -> None:
        """Replace the settings of a conversation."""
        with self._file.writing():
            self._file.execute("UPDATE conversations SET settings = ? WHERE id = ?", (encoded(settings), conversation))

    def history(self, conversation: str, *, until: int | None = None) -> list[Message]:
        """Return the messages as the model sees them, the system prompt first, up to and including the turn `until`."""
        record = self.get(conversation)
        messages: list[Message] = []
        if record is not None and record.system is not None:
            messages.append({"role": "system", "content": record.system})
        return messages + [entry.message for entry in self.turns.entries(conversation, until=until)]

    def fork(self, conversation: str, turn: int | None = None, *, title: str = "") -> ConversationRecord:
        """Return a new conversation with the finished turns of the history up to `turn`. If `turn` is None, it has all
        of them; if it is 0, none. Raises `ConfigError` for an unknown conversation or turn."""
        record = self.get(conversation)
        if record is None:
            raise ConfigError(f"there is no conversation {conversation!r}")
        kept = [each for each in self.turns.of(conversation) if each.state == "done"]
        summarized = any(each.kind == "compaction" for each in kept)
        if turn is not None:
            if turn and turn not in [each.number for each in kept]:
                raise ConfigError(f"{conversation} has no turn {turn}; its turns are {[each.number for each in kept]}")
            kept = [each for each in kept if turn and (each.number <= turn or each.kind == "compaction")]
        last = kept[-1].number if kept else 0
        entries = self.turns.entries(conversation)
        if summarized and not title:
            title = record.title or self.turns.first_words(conversation)
        with self._file.writing():
            new = self.create(
                system=record.system, title=title, key=record.key, user=record.user, settings=record.settings,
                parent=(conversation, last),
            )  # fmt: skip
            for each in kept:
                copy = self.turns.begin(new.id, each.content, kind=each.kind)
                for entry in entries:
                    if entry.turn.row == each.row:
                        self.turns.add_message(copy, entry.message)
                report = {name: value for name, value in each.report.items() if name not in LAYOUT}
                self.turns.end(copy, answer=each.answer, outcome=each.outcome, error=each.error, report=report)
        return new

    def search(
        self, query: str, roles: Collection[str] = (), limit: int = 3, *, current: str = ""
    ) -> list[SessionMatch]:
        """Return the conversations whose messages contain words of `query`, best first (BM25), with excerpts.

        Implements `SessionSource`; may be called in any thread.
        """
        words = " OR ".join(f'"{word}"' for word in query.replace('"', " ").split())
        if not words:
            return []
        only = f" AND m.role IN ({placeholders(list(roles))})" if roles else ""
        sql = (
            "SELECT c.id, c.title, c.created_at, m.role, snippet(said, 0, '', '', '…', 40), -bm25(said) FROM said"  # noqa: S608
            " JOIN messages m ON m.id = said.rowid JOIN turns t ON t.id = m.turn"
            " JOIN conversations c ON c.id = t.conversation"
            f" WHERE said MATCH ? AND c.id != ? AND t.state != 'undone'{only} ORDER BY bm25(said), m.id LIMIT 500"
        )
        with closing(connection(self.path)) as db:
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

    def _conversations(self, where: str, *values: JSON) -> Iterator[ConversationRecord]:
        for row in self._file.execute(f"SELECT {_CONVERSATION} FROM conversations {where}", values).fetchall():  # noqa: S608
            named = dict(zip(_CONVERSATION.split(", "), row, strict=True))
            yield ConversationRecord(**{**named, "settings": msgspec.json.decode(row[5])})
