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
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

import click

from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra_chat.attachments import missing_files, with_files, with_pages
from palaestra_chat.config import ChatOptions, chat_service, open_store
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.current_folder import Place, current_place, place_of, short, write_mode
from palaestra_chat.folder_changes import FolderChange, edits
from palaestra_chat.model_servers import some
from palaestra_chat.service import ChatService
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import (
    INTERRUPTED,
    NATURAL,
    Event,
    Notice,
    ReplyRestarted,
    TextDelta,
    ToolBegun,
    TurnEnded,
    encode_event,
)
from palaestra_chat.workdir import WorkFolder
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import DONE, FAILED, plural
from palaestra_slots.core.exits import INTERRUPTED as EXIT_INTERRUPTED
from palaestra_slots.core.types import JSON


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
    place: Place | None = None
    """The folder that the conversation is about; set by `placed`."""

    def placed(self, options: ChatOptions, store: ConversationStore, here: Place) -> tuple[Self, ChatOptions]:
        """Return which conversation it is, with its folder, and the settings for that folder. `here` is the place of a
        new conversation; `last` is the latest one about that folder, and a stored conversation keeps its own folder
        unless a flag names another. Raises `ConfigError`."""
        place, found = here, self
        if (name := self.resume or self.fork) is not None:
            record = store.latest(here.folder) if name == "last" else store.find(name)
            place = here if "workdir" in options.flags else place_of(record, Path.cwd())
            found = replace(self, fork=record.id) if self.resume is None else replace(self, resume=record.id)
        config = options.config.model_copy(update={"workdir": str(place.folder) if place.shared else None})
        return replace(found, place=place), replace(options, config=config)

    def opened(self, service: ChatService, people: People) -> Conversation:
        """Open the conversation. Raises `ConfigError`."""
        if self.fork is not None:
            record = service.store.fork(service.store.find(self.fork).id, self.fork_turn)
            conversation = Conversation.open(service, record.id, people)
        elif self.resume is not None:
            conversation = Conversation.open(service, self.resume, people)
        else:
            settings = None if self.place is None else self.place.settings
            return Conversation.begin(service, people, title=self.title, settings=settings)
        if self.title:
            conversation.history.rename(self.title)
        if self.place is not None and not self.place.why:
            conversation.history.change_settings(**self.place.settings)
            conversation.slots.share_folder(WorkFolder(self.place.folder) if self.place.shared else None)
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
        content = await with_pages(with_files(text, piped=piped), text, options.config.hosts_of_pages)
        for path in missing_files(text):
            click.echo(f"note: there is no file {path}; its name is sent as text", err=True)
        which, options = which.placed(options, store, current_place(options.config.workdir, Path.cwd()))
        if which.place is not None and which.place.notice:
            click.echo(f"note: {which.place.notice}", err=True)
        async with chat_service(options, store) as service:
            conversation = which.opened(service, People(approve=approve, notice=write))
            if as_json:
                click.echo(
                    json.dumps({"type": "conversation", "id": conversation.id, "model": conversation.model.name})
                )
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, conversation.interrupt)
            try:
                ended = await _play_turn(conversation, content, which.message_id, write, as_json=as_json)
            finally:
                loop.remove_signal_handler(signal.SIGINT)
            if not as_json:
                write(ended)
            if (folder := conversation.slots.folder) is not None and conversation.seat.slot is not None:
                mode: str = options.config.write
                if "write" not in options.flags:
                    mode = write_mode(store, conversation.history.record, options)
                await _write_back(folder, conversation, mode, write)
        if as_json:  # nothing follows it, so that a program may stop reading there
            write(ended)
        return _exit_code(conversation, ended)


async def _play_turn(
    conversation: Conversation,
    content: object,
    message_id: str | None,
    write: Callable[[Event], None],
    *,
    as_json: bool,
) -> TurnEnded:
    """Play the turn, after one that a killed process left open, and return its end, which is not written."""
    ended = None
    if conversation.unfinished and message_id is None:
        async for event in conversation.resume():
            if not (as_json and isinstance(event, TurnEnded)):
                write(event)
    async for event in conversation.send(content, message_id=message_id):
        if isinstance(event, TurnEnded):
            ended = event
        elif not isinstance(event, Notice):  # `People.notice` already prints notices
            write(event)
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
        write(Notice(text=f"Not written back ({change_names(changes)}); allow it with --write yes", kind="workdir"))
        return
    left = folder.apply(changes)
    paths = {change.path for change in left}
    if written := [change for change in changes if change.path not in paths]:
        write(Notice(text=f"Written to {folder.root}: {change_names(written)}", kind="workdir"))
    for edit in edits(left):
        write(Notice(text=f"Left out: {edit.name}: {edit.changes[0].problem}", kind="workdir"))


def change_names(changes: Sequence[FolderChange], most: int = 20) -> str:
    """Return what the changes are, in one line."""
    return some([edit.name for edit in edits(changes)], most)


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
    """Prints the answer to stdout, and everything else to stderr. A terminal shows the text as it arrives. A pipe gets
    each reply when it is complete, because the text of a connection that broke cannot be taken back."""

    def __init__(self) -> None:
        self._open_line = False
        self._held: list[str] | None = None if sys.stdout.isatty() else []

    def show(self, event: Event) -> None:
        if isinstance(event, ReplyRestarted):
            if self._held is None:
                click.echo(f"\n{event.text}", err=True)
            else:
                self._held.clear()
            return
        if isinstance(event, TextDelta):
            if self._held is None:
                self._print(event.text)
            else:
                self._held.append(event.text)
            return
        if self._held and isinstance(event, ToolBegun | TurnEnded):
            self._print("".join(self._held))
            self._held.clear()
        if self._open_line and isinstance(event, ToolBegun | Notice | TurnEnded):
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open_line = False
        if isinstance(event, ToolBegun):
            click.echo(f"[{event.name}] {event.preview}", err=True)
        elif isinstance(event, Notice):
            click.echo(f"note: {event.text}", err=True)

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._open_line = not text.endswith("\n")


def read_stdin(text: str) -> str:
    """Return the text from a pipe, which is added to the message `text`; bytes that are not UTF-8 become U+FFFD. Raises
    `ConfigError` if both are empty."""
    # Decoded here, because the locale decides how `sys.stdin` decodes.
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    piped = data.decode(errors="replace").replace("\r\n", "\n").strip("\n")
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
        lines = [f"{each}  {_single_line(excerpts[0]['text']) if excerpts else ''}" for each, excerpts in found]
        return "\n".join(lines) or "nothing found"
    rows: list[dict[str, JSON]] = []
    for record in store.conversations():
        turns = sum(turn.kind == "message" for turn in store.turns.of(record.id, every=True))
        title = record.title or store.turns.first_words(record.id)
        folder = str(record.settings.get("cwd") or "")
        rows.append({
            "id": record.id, "title": title, "turns": turns, "updated_at": record.updated_at, "folder": folder,
        })  # fmt: skip
    if as_json:
        return json.dumps(rows)
    lines = [
        f"{row['id']}  {day(row['updated_at'])}  {short(row['folder']) if row['folder'] else '-'}  "
        f"{plural(row['turns'], 'turn'):<7}  {_single_line(row['title'])}"
        for row in rows
    ]
    return "\n".join(lines) or "no conversations yet"


def day(time_s: float) -> str:
    """Return a time as a person reads it: the day and the minute."""
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M}"


def _single_line(text: object) -> str:
    return " ".join(str(text).split())
