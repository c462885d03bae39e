"""What the commands of the chat work with: the screen, the person, and what is open."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.doors.chat.terminal.people import FolderChanges, TerminalPeople
from palaestra.doors.chat.terminal.screen import Screen
from palaestra.doors.chat.terminal.styles import DIM, PLAIN, YELLOW
from palaestra_slots.core.errors import ConfigError, ContextExceeded
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import without_middle

if TYPE_CHECKING:
    from palaestra.doors.chat.config import ChatOptions
    from palaestra.doors.chat.conversation import Conversation
    from palaestra.doors.chat.project import Project
    from palaestra.doors.chat.service import ChatService
    from palaestra.doors.chat.store import ConversationStore
    from palaestra.doors.chat.turn_events import Event

OWN_COMMAND_S = 600.0
"""The time limit of a command of the person, in seconds."""
_MOST_TOLD_CHARS = 8000
"""How much of its output the model reads."""

CONTEXT_ADVICE = (
    "/undo removes the last message, /compact replaces the history with a summary, /new begins a new conversation"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """What there is once the chat is loaded: the settings, the parts that its conversations share, and the project that
    it is about."""

    options: ChatOptions
    store: ConversationStore
    service: ChatService
    project: Project


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
        self._opened: Opened | None = None
        self._talk: Conversation | None = None
        self._own_commands = 0

    def open(self, opened: Opened, talk: Conversation) -> None:
        """Take what was loaded, and show this conversation."""
        self._opened, self._talk = opened, talk

    def use(self, talk: Conversation) -> None:
        """Show this conversation from now on."""
        self._talk = talk

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

    async def show_turn(self, events: AsyncGenerator[Event, None]) -> None:
        """Show a turn as it happens, then offer to write the agent's changes back to the shared folder."""
        from palaestra.doors.chat.turn_events import Notice

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
        await self.changes.offer(self.talk, self.opened.options.config.write)

    async def run_own(self, command: str) -> None:
        """Run a command of the person in the sandbox and show its output. The model reads both with the next
        message."""
        from palaestra.doors.chat.turn_events import ToolBegun, ToolEnded, ToolOutput

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
        await self.changes.offer(self.talk, self.opened.options.config.write)

    async def show_last(self) -> None:
        """Show the end of a resumed conversation, and continue a turn that was cut off."""
        from palaestra.tools.builtin.session_search import message_text

        talk = self.talk
        turns = talk.history.turns()
        self.screen.line(f"{DIM}continues {talk.id}, {plural(len(turns), 'turn')}{PLAIN}")
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
