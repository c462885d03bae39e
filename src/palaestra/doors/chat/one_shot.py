"""`palaestra chat -p`: one message and its answer, without a terminal.

The answer goes to stdout, and tool calls and notices go to stderr. With `--json`, every event is a line of JSON on
stdout, and the first line names the conversation.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from palaestra.doors.chat.attachments import missing_files, with_files, with_pages
from palaestra.doors.chat.config import ChatOptions, chat_service, open_store
from palaestra.doors.chat.conversation import Conversation, People
from palaestra.doors.chat.service import ChatService
from palaestra.doors.chat.store import ConversationStore
from palaestra.doors.chat.turn_events import (
    INTERRUPTED,
    NATURAL,
    Event,
    Notice,
    TextDelta,
    ToolBegun,
    TurnEnded,
    encode_event,
)
from palaestra.doors.chat.workdir import FolderChange, WorkFolder
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import DONE, FAILED
from palaestra_slots.core.exits import INTERRUPTED as EXIT_INTERRUPTED


@dataclass(frozen=True, slots=True)
class Which:
    """The conversation to use: a stored one (`resume`), a fork of a stored one (`fork`, with the turns up to
    `fork_turn`), or a new one. `title`, if given, becomes the conversation's title. A message with a known `message_id`
    is not answered twice."""

    resume: str | None = None
    fork: str | None = None
    fork_turn: int | None = None
    title: str = ""
    message_id: str | None = None

    def opened(self, service: ChatService, people: People) -> Conversation:
        """Open the conversation. Raises `ConfigError`."""
        if self.fork is not None:
            record = service.store.fork(service.store.find(self.fork).id, self.fork_turn)
            conversation = Conversation.open(service, record.id, people)
        elif self.resume is not None:
            conversation = Conversation.open(service, self.resume, people)
        else:
            return Conversation.begin(service, people, title=self.title)
        if self.title:
            conversation.history.rename(self.title)
        return conversation


async def answer_once(
    options: ChatOptions, which: Which, text: str, *, piped: str = "", as_json: bool, allow: bool
) -> int:
    """Send `text`, followed by `piped`, print the events, and return the exit code. With `allow`, dangerous commands
    and calls that act outside the sandbox run; otherwise they are refused."""
    write = _json_line if as_json else _Plain().show

    async def approve(request: ApprovalRequest) -> ApprovalAnswer:
        if not allow:
            what = f"{request.tool} with {request.command}" if request.tool else request.command
            write(Notice(text=f"Not allowed without --yes: {what}", kind="approval"))
        return ApprovalAnswer.ONCE if allow else ApprovalAnswer.DENY

    with open_store(options.config) as store:
        content = await with_pages(with_files(text, piped=piped), text, options.config.web_allow)
        for path in missing_files(text):
            click.echo(f"note: there is no file {path}; its name is sent as text", err=True)
        async with chat_service(options, store) as service:
            conversation = which.opened(service, People(approve=approve, notice=write))
            if as_json:
                click.echo(
                    json.dumps({"type": "conversation", "id": conversation.id, "model": conversation.model.name})
                )
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, conversation.interrupt)
            try:
                ended = await _turn(conversation, content, which.message_id, write)
            finally:
                loop.remove_signal_handler(signal.SIGINT)
            if (folder := conversation.slots.folder) is not None and conversation.seat.slot is not None:
                await _write_back(folder, conversation, options.config.write, write)
            return _exit_code(conversation, ended)


async def _turn(
    conversation: Conversation, content: object, message_id: str | None, write: Callable[[Event], None]
) -> TurnEnded:
    ended = None
    if conversation.unfinished and message_id is None:
        async for event in conversation.resume():
            write(event)
    async for event in conversation.send(content, message_id=message_id):
        if not isinstance(event, Notice):  # `People.notice` already prints notices
            write(event)
        if isinstance(event, TurnEnded):
            ended = event
    assert ended is not None
    return ended


async def _write_back(
    folder: WorkFolder, conversation: Conversation, mode: str, write: Callable[[Event], None]
) -> None:
    slot = conversation.seat.slot
    changes = [] if slot is None else await folder.changes(slot)
    if not changes:
        return
    if mode != "yes":
        write(Notice(text=f"Not written back ({_names(changes)}); allow it with --write yes", kind="workdir"))
        return
    left = folder.apply(changes)
    paths = {change.path for change in left}
    if written := [change for change in changes if change.path not in paths]:
        write(Notice(text=f"Written to {folder.root}: {_names(written)}", kind="workdir"))
    for change in left:
        write(Notice(text=f"Left out {change.path}: {change.problem}", kind="workdir"))


def _names(changes: Sequence[FolderChange]) -> str:
    more = f" and {len(changes) - 20} more" if len(changes) > 20 else ""
    return ", ".join(f"{change.kind} {change.path}" for change in changes[:20]) + more


def _exit_code(conversation: Conversation, ended: TurnEnded) -> int:
    if ended.outcome == NATURAL:
        return DONE
    if ended.outcome == INTERRUPTED:
        return EXIT_INTERRUPTED
    if ended.error:
        click.echo(f"error: {conversation.failure or ended.error}", err=True)
    return FAILED if conversation.failure is None else conversation.failure.exit_code


def _json_line(event: Event) -> None:
    click.echo(encode_event(event))
    sys.stdout.flush()


class _Plain:
    """Prints the answer to stdout as it arrives, and everything else to stderr."""

    def __init__(self) -> None:
        self._open_line = False

    def show(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            sys.stdout.write(event.text)
            sys.stdout.flush()
            self._open_line = not event.text.endswith("\n")
            return
        if self._open_line and isinstance(event, ToolBegun | Notice | TurnEnded):
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open_line = False
        if isinstance(event, ToolBegun):
            click.echo(f"[{event.name}] {event.preview}", err=True)
        elif isinstance(event, Notice):
            click.echo(f"note: {event.text}", err=True)


def read_stdin(text: str) -> str:
    """Return the text from a pipe, which is added to the message `text`. Raises `ConfigError` if both are empty."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip("\n")
    if not text.strip() and not piped.strip():
        raise ConfigError("there is no message: add -p TEXT, or pipe it in")
    return piped


def list_conversations(store: ConversationStore, *, as_json: bool, query: str = "") -> str:
    """Return a list of the stored conversations, or of those that contain words of `query`. The list has one line per
    conversation, or is JSON if `as_json` is true."""
    if query:
        found = [(match.session.session_id, match.excerpts) for match in store.search(query, limit=20)]
        if as_json:
            return json.dumps([{"id": each, "excerpts": excerpts} for each, excerpts in found])
        lines = [f"{each}  {_line(excerpts[0]['text']) if excerpts else ''}" for each, excerpts in found]
        return "\n".join(lines) or "nothing found"
    rows = []
    for record in store.conversations():
        turns = sum(turn.kind == "message" for turn in store.turns.of(record.id, every=True))
        title = record.title or store.turns.first_words(record.id)
        rows.append({"id": record.id, "title": title, "turns": turns, "updated_at": record.updated_at})
    if as_json:
        return json.dumps(rows)
    lines = [
        f"{row['id']}  {row['turns']:>3} turn{' ' if row['turns'] == 1 else 's'}  {_line(row['title'])}" for row in rows
    ]
    return "\n".join(lines) or "no conversations yet"


def _line(text: object) -> str:
    return " ".join(str(text).split())
