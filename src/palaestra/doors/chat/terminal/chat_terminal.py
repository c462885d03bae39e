"""`palaestra chat` in a terminal: inline and append-only, in the terminal's own scrollback.

The prompt is shown before anything heavy is imported; settings are read and the service is created while the person
types. While a turn runs the prompt stays: what is typed waits for the turn's next tool call, and Esc or Ctrl-C
interrupts. Invariants: text from models and commands reaches the terminal without control characters; only a key press
by the person, after the question, counts as approval.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.core.errors import ConfigError, ContextExceeded, PalaestraError
from palaestra.core.exits import DONE, plural
from palaestra.core.printable import printable

try:
    from palaestra.doors.chat.terminal.prompt import Prompt
except ImportError:
    raise ConfigError("palaestra chat in a terminal needs prompt-toolkit: pip install 'palaestra[chat]'") from None

from palaestra.doors.chat.terminal.live_line import LiveLine, fitted
from palaestra.doors.chat.terminal.message_queue import MessageQueue
from palaestra.doors.chat.terminal.people import FolderChanges, TerminalPeople
from palaestra.doors.chat.terminal.screen import Screen
from palaestra.doors.chat.terminal.scrollback import Scrollback
from palaestra.doors.chat.terminal.slash_commands import COMMANDS
from palaestra.doors.chat.terminal.styles import DIM, PLAIN, RED, YELLOW

if TYPE_CHECKING:
    from palaestra.doors.chat.config import ChatOptions
    from palaestra.doors.chat.conversation import Conversation
    from palaestra.doors.chat.one_shot import Which
    from palaestra.doors.chat.project import Project
    from palaestra.doors.chat.service import ChatService
    from palaestra.doors.chat.store import ConversationStore
    from palaestra.doors.chat.turn_events import Event

CONTEXT_ADVICE = (
    "/undo removes the last message, /compact replaces the history with a summary, /new begins a new conversation"
)
_DRAW_S = 0.12
"""How often the live line is drawn while a turn runs, in seconds."""


def run_terminal(which: Callable[[Mapping[str, str]], Which], own: Mapping[str, str], words: Sequence[str]) -> int:
    """Run the chat until the person ends it, and return the exit code. With `--help-all` or `--show-config`, only print
    the text. Raises `ConfigError` if stdin or stdout is not a terminal."""
    if any(word in ("--help-all", "--show-config") for word in words):
        from palaestra.doors.chat.config import read_options

        sys.stdout.write(read_options(words, "palaestra chat").show)
        return DONE
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("palaestra chat needs a terminal; to send one message without one, use -p TEXT")
    return asyncio.run(ChatTerminal(lambda: which(own), own, words).run())


@dataclass(slots=True)
class _Opened:
    """What there is once the chat is loaded."""

    options: ChatOptions
    store: ConversationStore
    service: ChatService
    project: Project
    talk: Conversation


class ChatTerminal:
    """One run of the interactive chat."""

    def __init__(self, which: Callable[[], Which], own: Mapping[str, str], words: Sequence[str]) -> None:
        self._which, self._words = which, words
        self._shows_last = any(name in own for name in ("-c", "--resume", "--fork"))
        raw = getattr(sys.stdout, "raw", sys.stdout)
        self.screen = Screen(Scrollback(raw), LiveLine())
        self.prompt = Prompt(raw, self._head, self.described, self.stop, self._next_mode)
        self._queue = MessageQueue()
        self.people = TerminalPeople(self.screen, self.prompt, self._queue, self.stop)
        self.changes = FolderChanges(self.screen, self.people)
        self._stack = AsyncExitStack()
        self._ready: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._ended = False
        self._fault: BaseException | None = None
        self._opened: _Opened | None = None

    async def run(self) -> int:
        """Read and handle messages and commands until the chat ends; returns the exit code."""
        loop = asyncio.get_running_loop()
        async with self._stack:
            # Between two prompts the terminal sends a signal for Ctrl-C, which must not end the chat.
            loop.add_signal_handler(signal.SIGINT, self.stop)
            try:
                await self._read_and_handle()
            finally:
                loop.remove_signal_handler(signal.SIGINT)  # so that Ctrl-C ends a chat that is slow to close
        return DONE

    async def _read_and_handle(self) -> None:
        self._ready = asyncio.create_task(self._load())
        self._ready.add_done_callback(self._loaded)
        self.screen.line(f"{DIM}palaestra chat · /help · Ctrl-D ends{PLAIN}")
        if self._shows_last:
            self._start(self._resumed())
        drawing = asyncio.create_task(self._draw())
        try:
            while not self._ended:
                text = await self.prompt.read()
                if text is None:
                    await self._end_of_input()
                elif text.strip():
                    self._entered(text)
        finally:
            drawing.cancel()
            if self._work is not None:
                self._work.cancel()
                await asyncio.wait([self._work])
        if self._fault is not None:
            raise self._fault
        self.screen.line(f"{DIM}{self._farewell()}{PLAIN}")

    async def _end_of_input(self) -> None:
        """End the chat, after the running turn and what was typed before. A second Ctrl-D does not wait."""
        if self._work is None or "/exit" in self._queue.waiting:
            self._ended = True
        else:
            self._queue.add("/exit")

    def finish(self) -> None:
        """End the chat."""
        self._ended = True
        self.prompt.end()

    def stop(self) -> bool:
        """Stop the running turn, or the command or message that is handled. What was typed meanwhile is put back into
        the prompt. Return False if nothing is running."""
        if self._work is None or self._work.done():
            return False
        if waiting := self._queue.take_all():
            self.prompt.put(waiting)
        if not (self.screen.live.running and self.talk.interrupt()):
            self._work.cancel()
        return True

    def _farewell(self) -> str:
        if self._opened is None or not self.talk.history.turns():
            return ""
        return f"continue with: palaestra chat --resume {self.talk.id}"

    # Start

    async def _load(self) -> None:
        """Import the chat's modules, read the settings, and open the store and the service."""
        loop = asyncio.get_running_loop()
        options = await loop.run_in_executor(None, _read_options, self._words)
        if options.show:
            raise ConfigError("--help-all and --show-config must be used alone")
        from palaestra.doors.chat.config import chat_service, open_store, project

        store = self._stack.enter_context(open_store(options.config))
        service = await self._stack.enter_async_context(chat_service(options, store))
        talk = self._which().opened(service, self.people.people())
        self._opened = _Opened(options, store, service, project(talk.slots.folder), talk)
        for notice in options.notices:
            self.screen.line(f"{YELLOW}note: {printable(notice)}{PLAIN}")
        self.prompt.redraw()

    def _loaded(self, task: asyncio.Task[None]) -> None:
        """End the prompt if loading failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._fault, self._ended = error, True
        self.prompt.end()

    async def _resumed(self) -> None:
        assert self._ready is not None
        await asyncio.shield(self._ready)
        await self.show_last()

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
            self.screen.line(f"{YELLOW}note: this turn was cut off and is continued; Ctrl-C stops it{PLAIN}")
        for notice in talk.take_notices():
            self.people.notice(notice)
        if talk.unfinished:
            await self.show_turn(talk.resume())

    # What is open

    @property
    def _loaded_parts(self) -> _Opened:
        assert self._opened is not None
        return self._opened

    @property
    def talk(self) -> Conversation:
        """The conversation that is shown."""
        return self._loaded_parts.talk

    @property
    def service(self) -> ChatService:
        """The service of the conversations."""
        return self._loaded_parts.service

    @property
    def store(self) -> ConversationStore:
        """The store of the conversations."""
        return self._loaded_parts.store

    @property
    def project(self) -> Project:
        """The project that the chat is about."""
        return self._loaded_parts.project

    def use(self, talk: Conversation) -> None:
        """Show this conversation from now on."""
        self._loaded_parts.talk = talk

    # Messages and commands

    def described(self) -> dict[str, str]:
        """Return the descriptions of the commands, also of those of the person and the project."""
        found = {name: command.description for name, command in COMMANDS.items()}
        if self._opened is not None:
            from palaestra.doors.chat.project import command_description

            for name, path in self.project.commands().items():
                found.setdefault(name, command_description(path))
        return found

    def _entered(self, text: str) -> None:
        """Handle what was typed, or let it wait until the running turn has ended."""
        command = COMMANDS.get(text.split()[0])
        if self._work is None:
            self._start(self._handle(text))
        elif command is not None and command.at_once and self._opened is not None:
            self._at_once(text)
        else:
            self._queue.add(text)
            self.prompt.redraw()

    def _start(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(self._handled)

    def _at_once(self, text: str) -> None:
        task = asyncio.create_task(self._handle(text))
        task.add_done_callback(self._report)
        self._stack.callback(task.cancel)

    def _handled(self, task: asyncio.Task[None]) -> None:
        """Report how it ended, and go on with what waits."""
        self._work = None
        self._report(task)
        if not self._ended and (text := self._queue.next()) is not None:
            self._start(self._handle(text))
        self.prompt.redraw()

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.screen.line(f"{YELLOW}interrupted{PLAIN}")
        elif (error := task.exception()) is not None:
            if isinstance(error, PalaestraError) and self._opened is not None:
                self.screen.line(f"{RED}{printable(str(error))}{PLAIN}")
            else:  # a fault, or loading failed
                self._fail(error)

    async def _handle(self, text: str) -> None:
        self.screen.said(text)
        assert self._ready is not None
        await asyncio.shield(self._ready)
        sent = text
        if text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            own = self.project.commands()
            names = [*COMMANDS, *own]
            near = [word] if word in names else [name for name in names if name.startswith(word)]
            if len(near) == 1 and near[0] in COMMANDS:
                await self._do(near[0], rest.strip())
                return
            if len(near) == 1:
                from palaestra.doors.chat.project import command_message

                # Only the person names files to attach: the text of a command may come from the project.
                await self._send(rest, command_message(own[near[0]], rest.strip()))
                return
            if "/" not in word[1:]:
                raise ConfigError(f"unknown command {word}; /help lists the commands")
        await self._send(sent, sent)

    async def _send(self, named: str, text: str) -> None:
        """Send a message with the files that `named` names."""
        from palaestra.doors.chat.attachments import missing_files, with_files

        for path in missing_files(named):
            self.screen.line(f"{YELLOW}note: there is no file {printable(str(path))}; its name is sent as text{PLAIN}")
        content = with_files(named)
        if named is not text:
            parts = [] if isinstance(content, str) else [part for part in content if part.get("type") != "text"]
            added = (content if isinstance(content, str) else content[0]["text"])[len(named) :]
            content = [{"type": "text", "text": text + added}, *parts] if parts else text + added
        await self.show_turn(self.talk.send(content))

    async def _do(self, name: str, rest: str) -> None:
        command = COMMANDS[name]
        if rest and not command.arguments:
            raise ConfigError(f"{name} takes no argument, but got {rest!r}; nothing was done")
        await command.run(self, rest)

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
            self.screen.line(f"{YELLOW}{CONTEXT_ADVICE}{PLAIN}")
        await self.changes.offer(self.talk, self._loaded_parts.options.config.write)

    # Above the prompt

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(_DRAW_S)
            if self.screen.live.running:
                self.prompt.redraw()

    def _head(self) -> str:
        """Return the lines above the prompt: the running turn, or where the conversation stands."""
        columns = self.screen.scrollback.columns
        if self._opened is None:
            return f"{DIM}starting …{PLAIN}"
        context = self.talk.context
        live = self.screen.live.lines(columns, self.screen.pending, context.tokens, context.size, self._queue.waiting)
        return "\n".join(live) or f"{DIM}{fitted(printable(self._status()), columns)}{PLAIN}"

    def _status(self) -> str:
        talk = self.talk
        running = sum(session.running for session in self.service.processes.sessions(talk.id))
        window = "" if talk.context.size is None else f" of {talk.context.size}"
        parts = [talk.permissions.mode.value, talk.model.name, f"{talk.context.tokens}{window} tokens"]
        if running:
            parts.append(f"{running} background process{'es' if running > 1 else ''} (/background)")
        if talk.history.title:
            parts.append(talk.history.title)
        return " · ".join(parts)

    def _next_mode(self) -> None:
        if self._opened is None:
            return
        from palaestra.doors.chat.permissions import Mode

        modes = list(Mode)
        mode = modes[(modes.index(self.talk.permissions.mode) + 1) % len(modes)]
        self.talk.use_mode(mode)
        self.prompt.redraw()


def _read_options(words: Sequence[str]) -> ChatOptions:
    import palaestra.doors.chat.conversation  # the slow part, while the person types
    from palaestra.doors.chat.config import read_options

    with contextlib.suppress(ImportError):
        import palaestra.doors.chat.terminal.markdown  # noqa: F401
    return read_options(words, "palaestra chat")
