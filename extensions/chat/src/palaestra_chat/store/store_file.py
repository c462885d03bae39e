"""`StoreFile`: the SQLite file of a conversation store, with its tables and transactions.

The file is in WAL mode with `synchronous=NORMAL`: nothing is lost when the process dies; a power failure may lose the
last writes. Several processes may use it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.types import JSON

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


class StoreFile:
    """The open file `path`. A missing file is created, with its folder. Call methods only in the thread that created
    the object.

    Raises `ConfigError` for a file that is not a store or that a newer version wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(private(str(path), os.O_RDWR | os.O_CREAT))
        self._db = connection(path)
        try:
            self._prepare()
        except (sqlite3.DatabaseError, ConfigError) as error:
            self._db.close()
            raise ConfigError(f"{path} cannot be used as a conversation store: {error}") from None

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self.writing():
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

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def execute(self, statement: str, values: Sequence[JSON] = ()) -> sqlite3.Cursor:
        """Execute one SQL statement, and return its cursor."""
        return self._db.execute(statement, values)

    def insert(self, statement: str, values: Sequence[JSON]) -> int:
        """Execute an INSERT, and return the number of the new row."""
        row = self._db.execute(statement, values).lastrowid
        assert row is not None
        return row

    @contextmanager
    def writing(self) -> Iterator[None]:
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


def connection(path: Path) -> sqlite3.Connection:
    """Return a new connection to a store's file, without implicit transactions."""
    return sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)


def encoded(value: JSON) -> str:
    """Return the JSON text of a value."""
    return msgspec.json.encode(value).decode()


def placeholders(values: Sequence[JSON]) -> str:
    """Return the SQL placeholders of these values."""
    return ", ".join("?" * len(values))
