"""What the commands of the chat work with: the screen, the person, and what is open."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra_chat.terminal.open_ports import OpenPorts
from palaestra_chat.terminal.people import FolderChanges, TerminalPeople
from palaestra_chat.terminal.screen import Screen
from palaestra_chat.terminal.styles import DIM, PLAIN, YELLOW
from palaestra_slots.core.errors import ConfigError, ContextExceeded
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import printable, without_middle

if TYPE_CHECKING:
    from palaestra_chat.config import ChatOptions
    from palaestra_chat.conversation import Conversation
    from palaestra_chat.project import Project
    from palaestra_chat.service import ChatService
    from palaestra_chat.store import ConversationStore
    from palaestra_chat.turn_events import Event

OWN_COMMAND_S = 600.0
"""The time limit of a command of the person, in seconds."""
_MOST_TOLD_CHARS = 8000
"""How much of its output the model reads."""

CONTEXT_ADVICE = (
    "/undo removes the last message, /compact replaces the history with a summary, /new begins a new conversation"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What there is once the chat is loaded: the settings, and the parts that its conversations share."""

    options: ChatOptions
    store: ConversationStore
    service: ChatService


class Desk:
    """The conversation that is shown, and how to show it. `stop` stops what is running, and returns False if nothing
    is; `finish` ends the chat."""

    def __init__(
        self, screen: Screen, people: TerminalPeople, stop: Callable[[], bool], finish: Callable[[], None]
    ) -> None:
        self.screen = screen
        self.people = people
        self.changes = FolderChanges(screen, people)
        self.stop = stop
        self.finish = finish
        self.ports = OpenPorts(lambda: None if self._talk is None else self._talk.seat.slot)
        self._opened: Opened | None = None
        self._talk: Conversation | None = None
        self._own_commands = 0

    def open(self, opened: Opened, talk: Conversation) -> None:
        """Take what was loaded, and show this conversation."""
        self._opened, self._talk = opened, talk

    def use(self, talk: Conversation) -> None:
        """Show this conversation from now on. What was declined in another one may be wanted in this one."""
        self._talk, self.changes = talk, FolderChanges(self.screen, self.people)

    @property
    def ready(self) -> bool:
        """Whether the chat is loaded."""
        return self._opened is not None

    @property
    def opened(self) -> Opened:
        """What was loaded."""
        assert self._opened is not None
        return self._opened

    @property
    def talk(self) -> Conversation:
        """The conversation that is shown."""
        assert self._talk is not None
        return self._talk

    @property
    def project(self) -> Project:
        """What the folder of the conversation, and the person's own, have for the chat."""
        from palaestra_chat.config import conversation_project

        return conversation_project(self.talk.slots.folder)

    @property
    def write_mode(self) -> str:
        """Whether changes are written back to the folder of the conversation."""
        from palaestra_chat.current_folder import write_mode

        return write_mode(self.opened.store, self.talk.history.record, self.opened.options)

    def remember_write_mode(self, mode: str) -> None:
        """Use this write mode for the folder of the conversation from now on."""
        from palaestra_chat.current_folder import remember_write_mode

        remember_write_mode(self.opened.store, self.talk.history.record, mode)

    def folder(self) -> str:
        """Return what the sandbox has of which folder."""
        from palaestra_chat.current_folder import short

        folder = self.talk.slots.folder
        if folder is None:
            return "The sandbox starts empty"
        written = {
            "ask": "you are asked before its changes are written back",
            "yes": "its changes are written back after each turn",
            "no": "its changes are written back only by /sandbox write",
        }
        place = folder.place if self.talk.seat.slot is None else self.talk.seat.slot.workspace_dir
        where = "" if place == str(folder.root) else f" at {place}"
        return printable(f"The sandbox has a copy of {short(folder.root)}{where}; {written[self.write_mode]}")

    async def show_turn(self, events: AsyncGenerator[Event, None]) -> None:
        """Show a turn as it happens, then offer to write the agent's changes back to the shared folder."""
        from palaestra_chat.turn_events import Notice

        self.screen.live.begin()
        try:
            async with aclosing(events):
                async for event in events:
                    if not isinstance(event, Notice):  # `People.notice` already shows them
                        self.screen.show(event)
        finally:
            self.screen.live.end()
            self.screen.settle()
        if isinstance(self.talk.failure, ContextExceeded):
            self.screen.prose(f"{YELLOW}{CONTEXT_ADVICE}{PLAIN}")
        await self.changes.offer(self.talk, self.write_mode, self.remember_write_mode)

    async def run_own(self, command: str) -> None:
        """Run a command of the person in the sandbox and show its output. The model reads both with the next
        message."""
        from palaestra_chat.turn_events import ToolBegun, ToolEnded, ToolOutput

        if not command:
            raise ConfigError("type a command after the !, for example !git status; it runs in the sandbox")
        self._own_commands += 1
        name, decoder = f"own {self._own_commands}", getincrementaldecoder("utf-8")("replace")

        def output(data: bytes) -> None:
            self.screen.show(ToolOutput(call_id=name, text=decoder.decode(data)))

        self.screen.live.begin()
        try:
            self.screen.show(ToolBegun(call_id=name, name="!", arguments="", preview=command))
            slot = await self.talk.seat.sandbox()
            done = await slot.execute(command, timeout_s=OWN_COMMAND_S, on_output=output)
            reply = {"output": "", "exit_code": done.exit_code}  # the output was shown as it came
            error = done.error if done.metadata.get("timeout") else ""
            self.screen.show(ToolEnded(call_id=name, name="!", text=json.dumps(reply), error=error))
        finally:
            self.screen.live.end()
        told = without_middle(done.output, _MOST_TOLD_CHARS, "\n… {} characters left out …\n").rstrip()
        self.talk.history.note(
            f"The user ran a command in the sandbox: {command}\nIt ended with exit code {done.exit_code}"
            f"{' and printed:' if told else ' and printed nothing.'}\n{told}".rstrip()
        )
        await self.changes.offer(self.talk, self.write_mode, self.remember_write_mode)

    async def show_last(self) -> None:
        """Show the end of a resumed conversation, and continue a turn that was cut off."""
        from palaestra_chat.one_shot import day
        from palaestra_toolsets.tools.session_search import message_text

        talk = self.talk
        turns = talk.history.turns()
        about = f"continues {talk.id} of {day(talk.history.record.updated_at)}, {plural(len(turns), 'turn')}"
        self.screen.prose(f"{DIM}{about}\n{self.folder()}{PLAIN}")
        for turn in turns[-2:]:
            self.screen.said(message_text(turn.content))
            if turn.answer:
                self.screen.markdown(turn.answer)
        if talk.unfinished:
            self.screen.prose(f"{YELLOW}note: this turn was cut off and is continued; Ctrl-C stops it{PLAIN}")
        for notice in talk.notices.take():
            self.people.notice(notice)
        if talk.unfinished:
            await self.show_turn(talk.resume())
