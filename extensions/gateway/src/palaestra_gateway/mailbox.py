"""The mailbox: every incoming and every outgoing message, in one SQLite file in the gateway's folder.

Invariants: a message is on the disk before it is acknowledged to the platform. One transaction stores its answers and
marks it as answered. An outgoing message stays in the file until the platform has accepted or refused it. A gateway
that is killed at any moment therefore loses no message, and starts only one turn for each message.

All calls run in one thread, which commits concurrent calls together.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from palaestra_gateway.platform import Answers, Attachment, ChatAddress, Incoming
from palaestra_slots.core.errors import ConfigError, DiskError
from palaestra_slots.core.io.durable_files import KEPT

T = TypeVar("T")

logger = logging.getLogger(__name__)

VERSION = 5
KEPT_S = 30 * 86_400.0
"""How long the ids of answered messages are kept, in seconds, so that a repeated message is recognised."""
CODE_VALID_S = 3600.0
_CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
CODES_PER_MINUTE = 20
"""The maximum number of pairing codes per minute for strangers on one platform. There is a limit because senders can be
forged and each code is sent to a person. After the last forged message, real people wait at most a minute for a
code."""

_TABLES = """
create table incoming (
  id integer primary key autoincrement, platform text not null, chat_id text not null, message_id text not null,
  session_key text not null, user_id text not null, body blob, received_at real not null, done integer not null,
  conversation text not null default '',
  unique (platform, chat_id, message_id));
create index waiting on incoming (session_key, id) where done = 0;
create index by_user on incoming (platform, user_id, received_at);
create table outgoing (
  id integer primary key autoincrement, key text not null unique, platform text not null, chat text not null, body blob,
  state text not null, note text not null default '', created_at real not null);
create index unsent on outgoing (chat, id) where state in ('waiting', 'sending');
create table costs (platform text not null, user_id text not null, at real not null, cost real not null);
create index costs_by_user on costs (platform, user_id, at);
create table users (platform text not null, user_id text not null, name text not null, since real not null,
  primary key (platform, user_id));
create table codes (code text primary key, platform text not null, user_id text not null, name text not null,
  made_at real not null);
create table sessions (
  key text primary key, conversation text not null, address text not null, last_used real not null);
"""
_JOBS = """
create table jobs (id text primary key, session_key text not null, next_at real, body blob not null);
create index due on jobs (next_at) where next_at is not null;
"""
"""The table that version 2 of the file format added, for `jobs.py`."""
_NOTES = """
create table if not exists notes (platform text not null, name text not null, value text not null,
  primary key (platform, name));
"""
"""The table that version 3 of the file format added, for `MailboxNotes`."""
_NO_TRANSCRIPTS = "drop table if exists transcripts"
"""Version 4 of the file format added transcripts of voice messages, and version 5 removes them."""

Decision: TypeAlias = Literal["taken", "duplicate", "limited", "full"]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send: `text` or a file. `key` identifies it permanently."""

    key: str
    address: ChatAddress
    text: str = ""
    file: Attachment | None = None
    answers: Answers | None = None


@dataclass(frozen=True, slots=True)
class Unsent:
    """An outgoing message in the file. `started` is true if an earlier gateway was killed while it sent the message."""

    id: int
    message: Outgoing
    started: bool


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of `Mailbox.take`. If the decision is `taken`, `row` is the message's row; if it is `limited`,
    `until` is the time from which the sender's messages are accepted again."""

    decision: Decision
    row: int = 0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session: its current conversation, its address, and its last use, in seconds since the epoch."""

    key: str
    conversation: str
    address: ChatAddress
    last_used: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message to answer, its session, the conversation in which a turn began to answer it (or the empty string), and
    the number of messages that wait to be sent to its chat."""

    row: int
    message: Incoming
    session: SessionRow | None
    conversation: str
    unsent: int


@dataclass(slots=True)
class _Work(Generic[T]):
    do: Callable[[sqlite3.Connection], T]
    synced: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[T]


class Mailbox:
    """The file at `path`, which is created if it is missing. Raises `ConfigError` for a file that is not a mailbox."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: queue.SimpleQueue[_Work[object] | None] = queue.SimpleQueue()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
        try:
            _prepare(self._connection, path)
        except BaseException:
            self._connection.close()
            raise
        self._thread = threading.Thread(target=self._work, name="mailbox", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """Finish the calls that have begun, and close the file. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)
            self._connection.close()

    async def do(self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False) -> T:
        """Run `work` in a transaction. Returns once the result survives the death of this process or, if `synced`, a
        power failure. Raises `DiskError`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Work(work, synced, loop, future))  # type: ignore[arg-type]
        return await asyncio.shield(future)

    # Incoming messages

    async def take(
        self, message: Incoming, session_key: str, now: float, *, done: bool = False, most_per_hour: int = 0,
        most_waiting: int = 0,
    ) -> Receipt:  # fmt: skip
        """Add a message, unless it is already stored, its sender has exceeded the limit, or too many messages wait in
        the session. With `done`, the message counts as answered and its content is not kept. A limit of 0 means no
        limit."""
        address = message.address

        def work(connection: sqlite3.Connection) -> Receipt:
            identity = (address.platform, _place(address), message.message_id)
            known = connection.execute(
                "select 1 from incoming where platform = ? and chat_id = ? and message_id = ?", identity
            )
            if known.fetchone():
                return Receipt("duplicate")
            if most_per_hour:
                recent = connection.execute(
                    "select received_at from incoming where platform = ? and user_id = ? and received_at > ?"
                    " order by received_at desc limit 1 offset ?",
                    (address.platform, message.user_id, now - 3600, most_per_hour - 1),
                ).fetchone()
                if recent:
                    return Receipt("limited", until=recent[0] + 3600)
            if most_waiting:
                count = connection.execute(
                    "select count(*) from incoming where session_key = ? and done = 0", (session_key,)
                ).fetchone()[0]
                if count >= most_waiting:
                    return Receipt("full")
            return Receipt("taken", add_incoming(connection, message, session_key, now, done=done))

        return await self.do(work, synced=True)

    async def answered(self, message: Incoming) -> tuple[bool, str] | None:
        """Return whether a known message is answered, and the conversation of its turn, which is empty if it had no
        turn. Return None for a new message."""
        address = message.address
        query = "select done, conversation from incoming where platform = ? and chat_id = ? and message_id = ?"
        identity = (address.platform, _place(address), message.message_id)
        row = await self.do(lambda connection: connection.execute(query, identity).fetchone())
        return None if row is None else (bool(row[0]), str(row[1]))

    async def waiting(self) -> list[tuple[int, str]]:
        """Return the row and the session key of every unanswered message, oldest first."""
        return await self.do(
            lambda connection: connection.execute(
                "select id, session_key from incoming where done = 0 order by id"
            ).fetchall()
        )

    async def read(self, row: int) -> Waiting | None:
        """Return an unanswered message with its session. Return None for a message that is answered, and for one whose
        content is damaged; the latter is then left unanswered."""

        def work(connection: sqlite3.Connection) -> Waiting | None:
            found = connection.execute(
                "select body, session_key, conversation from incoming where id = ? and done = 0", (row,)
            ).fetchone()
            if found is None:
                return None
            body, key, conversation = found
            try:
                message = msgspec.msgpack.decode(body, type=Incoming)
            except (msgspec.MsgspecError, TypeError) as error:
                logger.error("%s: message %d cannot be read, so it is not answered: %s", self.path, row, error)
                connection.execute("update incoming set done = 1 where id = ?", (row,))
                return None
            (unsent,) = connection.execute(
                "select count(*) from outgoing where chat = ? and state in ('waiting', 'sending')",
                (_encoded_address(message.address),),
            ).fetchone()
            return Waiting(row, message, _find_session(connection, key), conversation, unsent)

        return await self.do(work)

    async def finish(
        self, row: int, message: Incoming, answers: Sequence[Outgoing], now: float, cost: float = 0.0
    ) -> None:
        """Record, in one transaction, that a message is answered, the answers, and the cost of the turn."""

        def work(connection: sqlite3.Connection) -> None:
            if connection.execute(
                "update incoming set done = 1, body = null where id = ? and done = 0", (row,)
            ).rowcount:
                add_outgoing(connection, answers, now)
                if cost:
                    user = (message.address.platform, message.user_id)
                    connection.execute("insert into costs values (?, ?, ?, ?)", (*user, now, cost))

        await self.do(work)

    async def cost_since(self, platform: str, user_id: str, since: float) -> float:
        query = "select coalesce(sum(cost), 0) from costs where platform = ? and user_id = ? and at > ?"
        values = (platform, user_id, since)
        return float(await self.do(lambda connection: connection.execute(query, values).fetchone()[0]))

    # Outgoing messages

    async def post(self, messages: Sequence[Outgoing], now: float) -> None:
        """Add messages to send. A message whose key is already stored is not added again."""
        await self.do(lambda connection: add_outgoing(connection, messages, now))

    async def chats_to_send_to(self) -> list[ChatAddress]:
        rows = await self.do(
            lambda connection: connection.execute(
                "select distinct chat from outgoing where state in ('waiting', 'sending')"
            ).fetchall()
        )
        return [_decoded_address(chat) for (chat,) in rows]

    async def next_unsent(self, address: ChatAddress) -> Unsent | None:
        """Return the oldest unsent message for a chat."""
        return await self.do(lambda connection: _next_unsent(connection, _encoded_address(address)))

    async def begin_send(self, number: int) -> None:
        await self.do(
            lambda connection: connection.execute("update outgoing set state = 'sending' where id = ?", (number,))
        )

    async def undo_begin_send(self, number: int) -> None:
        """Record that the platform did not accept the message."""
        await self.do(
            lambda connection: connection.execute("update outgoing set state = 'waiting' where id = ?", (number,))
        )

    async def end_send(self, unsent: Unsent, state: Literal["sent", "refused"], note: str = "") -> Unsent | None:
        """Record that a message was sent, or that the platform refused it for the reason `note`. The text of a refused
        message is kept. Returns the next unsent message for the same chat."""
        query = (
            "update outgoing set state = ?, note = ?, body = case when ? = 'sent' then null else body end where id = ?"
        )

        def work(connection: sqlite3.Connection) -> Unsent | None:
            connection.execute(query, (state, note, state, unsent.id))
            return _next_unsent(connection, _encoded_address(unsent.message.address))

        return await self.do(work)

    async def refused_messages(self) -> list[tuple[Outgoing, str]]:
        """Return the messages that a platform refused, with the reason."""
        rows = await self.do(
            lambda connection: connection.execute("select body, note from outgoing where state = 'refused'").fetchall()
        )
        return [(msgspec.msgpack.decode(body, type=Outgoing), note) for body, note in rows]

    @property
    def pairings(self) -> Pairings:
        """The people whom the owner allowed by a code."""
        return Pairings(self)

    def notes(self, platform: str) -> MailboxNotes:
        """Return the notes that a platform keeps from one start to the next."""
        return MailboxNotes(self, platform)

    # Sessions

    async def session(self, key: str) -> SessionRow | None:
        return await self.do(lambda connection: _find_session(connection, key))

    async def sessions(self) -> list[SessionRow]:
        query = "select key, conversation, address, last_used from sessions"
        return [_session_row(row) for row in await self.do(lambda connection: connection.execute(query).fetchall())]

    async def use_session(self, session: SessionRow) -> None:
        """Store the current conversation and the last use of a session."""
        await self.do(lambda connection: _use_session(connection, session))

    async def begin(self, row: int, session: SessionRow) -> None:
        """Record in one transaction that a session is used, and in which conversation a message is answered."""

        def work(connection: sqlite3.Connection) -> None:
            _use_session(connection, session)
            connection.execute("update incoming set conversation = ? where id = ?", (session.conversation, row))

        await self.do(work)

    async def prune(self, now: float) -> None:
        """Delete finished messages and costs that are older than `KEPT_S`."""

        def work(connection: sqlite3.Connection) -> None:
            old = (now - KEPT_S,)
            connection.execute("delete from incoming where done = 1 and received_at < ?", old)
            connection.execute("delete from outgoing where state in ('sent', 'refused') and created_at < ?", old)
            connection.execute("delete from costs where at < ?", old)

        await self.do(work)

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, ended = [first], False
            while not self._queue.empty() and len(batch) < 256:
                more = self._queue.get()
                if more is None:
                    ended = True
                    break
                batch.append(more)
            self._commit(batch)
            if ended:
                return

    def _commit(self, batch: Sequence[_Work[object]]) -> None:
        results: list[tuple[_Work[object], object, BaseException | None]] = []
        try:
            level = "full" if any(work.synced for work in batch) else "normal"
            self._connection.execute(f"pragma synchronous = {level}")
            self._connection.execute("begin immediate")
            for work in batch:
                self._connection.execute("savepoint one")
                try:
                    results.append((work, work.do(self._connection), None))
                    self._connection.execute("release one")
                except Exception as error:
                    self._connection.execute("rollback to one")
                    results.append((work, None, error))
            self._connection.execute("commit")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("rollback")
            failure = DiskError(f"cannot write {self.path}: {error}{KEPT}")
            results = [(work, None, failure) for work in batch]
        for work, result, problem in results:
            work.loop.call_soon_threadsafe(_resolve, work.future, result, problem)


@dataclass(frozen=True, slots=True)
class MailboxNotes:
    """The `Notes` of one platform."""

    mailbox: Mailbox
    platform: str

    async def read(self) -> dict[str, str]:
        query = "select name, value from notes where platform = ?"
        return dict(await self.mailbox.do(lambda db: db.execute(query, (self.platform,)).fetchall()))

    async def write(self, name: str, value: str) -> None:
        values = (self.platform, name, value)
        await self.mailbox.do(lambda db: db.execute("insert or replace into notes values (?, ?, ?)", values))


@dataclass(frozen=True, slots=True)
class Pairings:
    """The people whom the owner allowed by a code, and the codes of those who wait for that."""

    mailbox: Mailbox

    async def has(self, platform: str, user_id: str) -> bool:
        """Return whether a person is paired."""
        query = "select 1 from users where platform = ? and user_id = ?"
        return bool(await self.mailbox.do(lambda connection: connection.execute(query, (platform, user_id)).fetchone()))

    async def code(self, platform: str, user_id: str, name: str, now: float) -> str | None:
        """Return a new code for a person. Returns None if the person has a valid code, or if `CODES_PER_MINUTE` codes
        were made in this minute."""

        def work(connection: sqlite3.Connection) -> str | None:
            connection.execute("delete from codes where made_at < ? or made_at > ?", (now - CODE_VALID_S, now))
            recent, own = connection.execute(
                "select coalesce(sum(made_at > ?), 0), coalesce(sum(user_id = ?), 0) from codes where platform = ?",
                (now - 60, user_id, platform),
            ).fetchone()
            if own or recent >= CODES_PER_MINUTE:
                return None
            code = "".join(secrets.choice(_CODE_LETTERS) for _ in range(8))
            connection.execute("insert into codes values (?, ?, ?, ?, ?)", (code, platform, user_id, name, now))
            return code

        return await self.mailbox.do(work)

    async def add(self, code: str, now: float) -> tuple[str, str, str]:
        """Allow the person who got `code`. Returns the person's platform, user id and name. Raises `ConfigError` if the
        code is unknown or too old."""

        def work(connection: sqlite3.Connection) -> tuple[str, str, str] | None:
            found = connection.execute(
                "select platform, user_id, name from codes where code = ? and made_at >= ?",
                (code.strip().upper(), now - CODE_VALID_S),
            ).fetchone()
            if found is None:
                return None
            connection.execute("insert or replace into users values (?, ?, ?, ?)", (*found, now))
            connection.execute("delete from codes where code = ?", (code.strip().upper(),))
            return found[0], found[1], found[2]

        paired = await self.mailbox.do(work)
        if paired is None:
            raise ConfigError(f"the code {code!r} is unknown or older than an hour; ask the person for a new one")
        return paired

    async def paired_people(self) -> list[tuple[str, str, str]]:
        """Return the platform, user id and name of every paired person."""
        return await self.mailbox.do(
            lambda connection: connection.execute("select platform, user_id, name from users order by since").fetchall()
        )

    async def remove(self, platform: str, user_id: str) -> bool:
        """Revoke the pairing of a person. Returns whether the person was paired."""
        query = "delete from users where platform = ? and user_id = ?"
        return bool(await self.mailbox.do(lambda connection: connection.execute(query, (platform, user_id)).rowcount))


def _resolve(future: asyncio.Future[object], result: object, problem: BaseException | None) -> None:
    if not future.done():
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("begin immediate")
        version = connection.execute("pragma user_version").fetchone()[0]
        tables = connection.execute("select count(*) from sqlite_master").fetchone()[0]
        if 0 < version < VERSION or (version == 0 and tables == 0):
            for statement in ";".join((_TABLES, _JOBS, _NOTES, "", _NO_TRANSCRIPTS)[version:]).split(";"):
                connection.execute(statement)
            connection.execute(f"pragma user_version = {VERSION}")
            version = VERSION
        connection.execute("commit")
    except sqlite3.Error as error:
        raise ConfigError(f"{path} is not a gateway's mailbox ({error}); set a different folder with --home") from None
    if version != VERSION:
        raise ConfigError(
            f"{path} has version {version}; this version reads {VERSION}. Set a different folder with --home"
        )


def add_incoming(
    connection: sqlite3.Connection, message: Incoming, session_key: str, now: float, *, done: bool = False
) -> int:
    """Add an incoming message, inside the transaction of `Mailbox.do`; returns its row. Raises `sqlite3.IntegrityError`
    for a message that is already stored."""
    address = message.address
    row = connection.execute(
        "insert into incoming (platform, chat_id, message_id, session_key, user_id, body, received_at, done)"
        " values (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            address.platform, _place(address), message.message_id, session_key, message.user_id,
            None if done else _encode(message), now, int(done),
        ),
    ).lastrowid  # fmt: skip
    return row or 0


def add_outgoing(connection: sqlite3.Connection, messages: Sequence[Outgoing], now: float) -> None:
    """Add messages to send, inside the transaction of `Mailbox.do`. A message whose key is already stored is not added
    again."""
    for message in messages:
        connection.execute(
            "insert or ignore into outgoing (key, platform, chat, body, state, created_at)"
            " values (?, ?, ?, ?, 'waiting', ?)",
            (message.key, message.address.platform, _encoded_address(message.address), _encode(message), now),
        )


def _use_session(connection: sqlite3.Connection, session: SessionRow) -> None:
    values = (session.key, session.conversation, _encoded_address(session.address), session.last_used)
    connection.execute("insert or replace into sessions values (?, ?, ?, ?)", values)


def _encode(message: Incoming | Outgoing) -> bytes:
    return msgspec.msgpack.encode(message)


def _place(address: ChatAddress) -> str:
    return f"{address.chat_id}\0{address.thread_id}" if address.thread_id else address.chat_id


def _encoded_address(address: ChatAddress) -> str:
    return msgspec.json.encode(address).decode()


def _decoded_address(chat: str) -> ChatAddress:
    return msgspec.json.decode(chat, type=ChatAddress)


def _find_session(connection: sqlite3.Connection, key: str) -> SessionRow | None:
    query = "select key, conversation, address, last_used from sessions where key = ?"
    row = connection.execute(query, (key,)).fetchone()
    return None if row is None else _session_row(row)


def _next_unsent(connection: sqlite3.Connection, chat: str) -> Unsent | None:
    row = connection.execute(
        "select id, body, state from outgoing where chat = ? and state in ('waiting', 'sending') order by id limit 1",
        (chat,),
    ).fetchone()
    return None if row is None else Unsent(row[0], msgspec.msgpack.decode(row[1], type=Outgoing), row[2] != "waiting")


def _session_row(row: Sequence[str | float]) -> SessionRow:
    return SessionRow(str(row[0]), str(row[1]), _decoded_address(str(row[2])), float(row[3]))
