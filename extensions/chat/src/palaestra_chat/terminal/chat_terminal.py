"""`palaestra chat` in a terminal: inline and append-only, in the terminal's own scrollback.

The prompt is shown before anything heavy is imported; settings are read and the service is created while the person
types. While a turn runs the prompt stays: what is typed waits for the turn's next tool call, and Esc or Ctrl-C
interrupts. Invariants: text from models and commands reaches the terminal without control characters; only a key press
by the person, after the question, counts as approval.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.exits import DONE
from palaestra_slots.core.printable import printable

try:
    from palaestra_chat.terminal.prompt import Prompt
except ImportError:
    from palaestra_slots.core.extras import install_command

    raise ConfigError(f"palaestra chat in a terminal needs prompt-toolkit: {install_command('chat')}") from None

from palaestra_chat.folders import settings_file
from palaestra_chat.terminal.desk import Desk, Opened
from palaestra_chat.terminal.live_line import LiveLine, fitted
from palaestra_chat.terminal.message_queue import MessageQueue
from palaestra_chat.terminal.people import TerminalPeople
from palaestra_chat.terminal.screen import Screen
from palaestra_chat.terminal.scrollback import Scrollback
from palaestra_chat.terminal.slash_commands import COMMANDS, described
from palaestra_chat.terminal.styles import DIM, PLAIN, RED, YELLOW

if TYPE_CHECKING:
    from palaestra_chat.config import ChatOptions
    from palaestra_chat.one_shot import Which

_NAMES_A_SERVER = (
    ("--base-url", "--openai.", "--config", "--model", "--help", "-h", "--show-config"),
    ("OPENAI_BASE_URL", "PALAESTRA_OPENAI_", "ATROPOS_SERVER_"),
)
"""How the flags and the variables begin after which a start is not the first one."""

_GONE = (signal.SIGHUP, signal.SIGTERM)
"""What ends the chat without a question."""

_LEAVING_S = 3.0
"""Within how many seconds a second Ctrl-C ends the chat."""

_DRAW_S = 0.12
"""How often the live line is drawn while a turn runs, in seconds."""


def run_terminal(which: Callable[[Mapping[str, str]], Which], own: Mapping[str, str], words: Sequence[str]) -> int:
    """Run the chat until the person ends it, and return the exit code. With `--help-all` or `--show-config`, only print
    the text. Raises `ConfigError` if stdin or stdout is not a terminal."""
    if any(word in ("--help-all", "--show-config") for word in words):
        from palaestra_chat.config import read_options

        sys.stdout.write(read_options(words, "palaestra chat").show)
        return DONE
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("palaestra chat needs a terminal; to send one message without one, use -p TEXT")
    if "--setup" in own or is_first_start(words, os.environ):
        from palaestra_chat.terminal.first_setup import set_up

        set_up()
    return asyncio.run(ChatTerminal(lambda: which(own), own, words).run())


def is_first_start(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether no model server is configured: there is no settings file, and no flag and no variable names
    one."""
    flags, variables = _NAMES_A_SERVER
    named = any(word.startswith(flags) for word in words) or any(name.startswith(variables) for name in environ)
    return not named and not settings_file().is_file()


class ChatTerminal:
    """One run of the interactive chat."""

    def __init__(self, which: Callable[[], Which], own: Mapping[str, str], words: Sequence[str]) -> None:
        self._which, self._words = which, words
        self._shows_last = any(name in own for name in ("-c", "--resume", "--fork"))
        raw = getattr(sys.stdout, "raw", sys.stdout)
        self._screen = Screen(Scrollback(raw), LiveLine())
        self._prompt = Prompt(
            raw, self._lines_above_prompt, lambda: described(self._desk), self._stop_running, self._next_mode,
            self._entered, self._leave, self._idle,
        )  # fmt: skip
        self._leaving_s = float("-inf")
        self._queue = MessageQueue()
        people = TerminalPeople(self._screen, self._prompt, self._queue, self._stop_running)
        self._desk = Desk(self._screen, people, self._stop_running, self._finish)
        self._stack = AsyncExitStack()
        self._ready: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._ended = self._stop_soon = False
        self._signal: int | None = None
        self._fault: BaseException | None = None

    async def run(self) -> int:
        """Read and handle messages and commands until the chat ends; returns the exit code."""
        loop = asyncio.get_running_loop()
        async with self._stack:
            self._stack.enter_context(self._logs_above_the_prompt())
            self._stack.push_async_callback(self._desk.ports.aclose)
            # Between two prompts the terminal sends a signal for Ctrl-C, which must not end the chat.
            loop.add_signal_handler(signal.SIGINT, self._stop_running)
            main = asyncio.current_task()
            assert main is not None
            for number in _GONE:
                loop.add_signal_handler(number, self._gone, number, main)
            try:
                await self._read_and_handle()
            except asyncio.CancelledError:
                if self._signal is None:
                    raise
                main.uncancel()  # the conversations are still closed, which keeps what is not written
            finally:
                loop.remove_signal_handler(signal.SIGINT)  # so that Ctrl-C ends a chat that is slow to close
        return DONE if self._signal is None else 128 + self._signal

    def _gone(self, number: int, main: asyncio.Task[object]) -> None:
        """End the chat without a question, because its terminal was closed or its process is told to end."""
        if self._signal is None:
            self._signal = number
            if number == signal.SIGHUP:  # writing to a terminal that is gone fails
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(nowhere, stream.fileno())
            main.cancel()

    @contextlib.contextmanager
    def _logs_above_the_prompt(self) -> Iterator[None]:
        """Show warnings of the libraries as notes. Written to stderr, they would be drawn over."""
        loop, root = asyncio.get_running_loop(), logging.getLogger()

        class Notes(logging.Handler):
            def emit(handler, record: logging.LogRecord) -> None:  # noqa: N805
                text = printable(record.getMessage())
                loop.call_soon_threadsafe(self._screen.prose, f"{YELLOW}note: {text}{PLAIN}")

        loggers = [root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
        before = [(each, each.handlers[:]) for each in loggers if each is root or each.handlers]
        verbose = len(before) > 1  # then our packages log more than warnings
        try:
            for each, _ in before:
                each.handlers[:] = [] if each is not root else [Notes(logging.DEBUG if verbose else logging.WARNING)]
            yield
        finally:
            for each, handlers in before:
                each.handlers[:] = handlers

    async def _read_and_handle(self) -> None:
        self._ready = asyncio.create_task(self._load())
        self._ready.add_done_callback(self._on_loaded)
        self._screen.line(f"{DIM}palaestra chat · /help · Ctrl-D ends{PLAIN}")
        if self._shows_last:
            self._start_work(self._resumed())
        drawing = asyncio.create_task(self._draw())
        try:
            while not self._ended:
                self._stop_soon = False
                text = await self._prompt.read()
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
        self._screen.line(f"{DIM}{self._farewell()}{PLAIN}")

    async def _end_of_input(self) -> None:
        """End the chat, after the running turn and what was typed before. A second Ctrl-D does not wait."""
        if self._work is None or "/exit" in self._queue.waiting:
            self._finish()
        else:
            self._queue.add("/exit")

    def _finish(self) -> None:
        """End the chat. If changes would be lost with the sandbox, say so once instead."""
        if self._desk.changes.would_be_lost():
            return
        self._ended = True
        self._prompt.end()

    def _stop_running(self) -> bool:
        """Stop the running turn, or the command or message that is handled. What was typed meanwhile is put back into
        the prompt. Return False if nothing is running."""
        if self._work is None or self._work.done():
            self._stop_soon = not self._prompt.shown  # then the entered message is not handled yet
            return False
        if waiting := self._queue.take_all():
            self._prompt.put(waiting)
        if not (self._screen.live.running and self._desk.talk.interrupt()):
            self._work.cancel()
        return True

    def _leave(self) -> None:
        """End the chat at the second Ctrl-C within a few seconds."""
        now = time.monotonic()
        if now - self._leaving_s < _LEAVING_S:
            self._finish()
        else:
            self._leaving_s = now
            self._desk.changes.would_be_lost()  # said now, so that the second one ends the chat
            self._screen.line(f"{DIM}Ctrl-C again ends the chat{PLAIN}")

    def _idle(self) -> bool:
        return self._work is None

    def _farewell(self) -> str:
        if not self._desk.ready or not self._desk.talk.history.turns():
            return ""
        return f"continue with: palaestra chat --resume {self._desk.talk.id}"

    # Start

    async def _load(self) -> None:
        """Import the chat's modules, read the settings, and open the store and the service."""
        loop = asyncio.get_running_loop()
        options = await loop.run_in_executor(None, _read_options, self._words)
        if options.show:
            raise ConfigError("--help-all and --show-config must be used alone")
        from palaestra_chat.config import chat_service, open_store
        from palaestra_chat.current_folder import current_place, remember_write_mode

        store = self._stack.enter_context(open_store(options.config))
        here = await loop.run_in_executor(None, current_place, options.config.workdir, Path.cwd())
        which, options = self._which().placed(options, store, here)
        service = await self._stack.enter_async_context(chat_service(options, store))
        talk = which.opened(service, self._desk.people.people())
        if "write" in options.flags:
            remember_write_mode(store, talk.history.record, options.config.write)
        self._desk.open(Opened(options, store, service), talk)
        for notice in (*options.notices, *((which.place.notice,) if which.place and which.place.notice else ())):
            self._screen.prose(f"{YELLOW}note: {printable(notice)}{PLAIN}")
        if not self._shows_last:
            self._screen.prose(f"{DIM}{self._desk.folder()}{PLAIN}")
        self._prompt.redraw(whole=True)

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        """End the prompt if loading failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._fault, self._ended = error, True
        self._prompt.end()

    async def _resumed(self) -> None:
        assert self._ready is not None
        await asyncio.shield(self._ready)
        await self._desk.show_last()

    # Messages and commands

    def _entered(self, text: str) -> None:
        """Handle what was typed, or let it wait until the running turn has ended."""
        command = COMMANDS.get(text.split()[0])
        if self._work is None:
            self._start_work(self._handle(text))
        elif command is not None and command.at_once and self._desk.ready:
            self._at_once(text)
        else:
            self._queue.add(text)
            self._prompt.redraw()

    def _start_work(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        self._work = asyncio.create_task(work)
        self._work.add_done_callback(self._handled)
        if self._stop_soon:
            self._work.cancel()

    def _at_once(self, text: str) -> None:
        task = asyncio.create_task(self._handle(text))
        task.add_done_callback(self._on_work_done)
        self._stack.callback(task.cancel)

    def _handled(self, task: asyncio.Task[None]) -> None:
        """Report how it ended, and go on with what waits."""
        self._work = None
        self._on_work_done(task)
        if not self._ended and (text := self._queue.next()) is not None:
            self._start_work(self._handle(text))
        self._prompt.redraw(whole=True)

    def _on_work_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._screen.line(f"{YELLOW}interrupted{PLAIN}")
        elif (error := task.exception()) is not None:
            if isinstance(error, PalaestraError) and self._desk.ready:
                self._screen.prose(f"{RED}{printable(str(error))}{PLAIN}")
            else:  # a fault, or loading failed
                self._fail(error)

    async def _handle(self, text: str) -> None:
        self._screen.said(text)
        assert self._ready is not None
        await asyncio.shield(self._ready)
        if text.startswith("!"):
            await self._desk.run_own(text[1:].strip())
            return
        if text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            own = self._desk.project.commands()
            names = [*COMMANDS, *own]
            near = [word] if word in names else [name for name in names if name.startswith(word)]
            if len(near) == 1 and near[0] in COMMANDS:
                await self._run_command(near[0], rest.strip())
                return
            if len(near) == 1:
                from palaestra_chat.project import command_message

                # Only the person names files to attach: the text of a command may come from the project.
                await self._send_text(rest, command_message(own[near[0]], rest.strip()))
                return
            if "/" not in word[1:]:
                raise ConfigError(f"unknown command {word}; /help lists the commands")
        await self._send_text(text, text)

    async def _send_text(self, named: str, text: str) -> None:
        """Send a message with the files that `named` names."""
        from palaestra_chat.attachments import added, missing_files, with_files, with_pages

        for path in missing_files(named):
            self._screen.prose(
                f"{YELLOW}note: there is no file {printable(str(path))}; its name is sent as text{PLAIN}"
            )
        content = with_files(named)
        if named is not text:
            parts = [] if isinstance(content, str) else content[1:]
            files = (content if isinstance(content, str) else content[0]["text"])[len(named) :]
            content = added(text + files, (), parts)
        content = await with_pages(content, named, self._desk.opened.options.config.hosts_of_pages)
        await self._desk.show_turn(self._desk.talk.send(content))

    async def _run_command(self, name: str, rest: str) -> None:
        command = COMMANDS[name]
        if rest and not command.arguments:
            raise ConfigError(f"{name} takes no argument, but got {rest!r}; nothing was done")
        await command.run(self._desk, rest)

    # Above the prompt

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(_DRAW_S)
            if self._screen.live.running:
                self._prompt.redraw()

    def _lines_above_prompt(self) -> str:
        """Return the lines above the prompt: the running turn, or where the conversation stands."""
        columns = self._screen.scrollback.columns
        if not self._desk.ready:
            return f"{DIM}starting …{PLAIN}"
        context = self._desk.talk.context
        live = self._screen.live.lines(columns, self._screen.pending, context.tokens, context.size, self._queue.waiting)
        return "\n".join(live) or f"{DIM}{fitted(printable(self._status_line()), columns)}{PLAIN}"

    def _status_line(self) -> str:
        talk = self._desk.talk
        running = self._desk.opened.service.running(talk.id)
        window = "" if talk.context.size is None else f" of {talk.context.size}"
        parts = [talk.permissions.mode.value, talk.model.name, f"{talk.context.tokens}{window} tokens"]
        parts += [] if talk.slots.folder is None else [talk.slots.folder.root.name]
        if running:
            parts.append(f"{running} background process{'es' if running > 1 else ''} (/background)")
        if talk.history.title:
            parts.append(talk.history.title)
        return " · ".join(parts)

    def _next_mode(self) -> None:
        if not self._desk.ready:
            return
        from palaestra_chat.permissions import Mode

        modes = list(Mode)
        mode = modes[(modes.index(self._desk.talk.permissions.mode) + 1) % len(modes)]
        self._desk.talk.permissions.switch(mode)
        self._prompt.redraw(whole=True)


def _read_options(words: Sequence[str]) -> ChatOptions:
    import palaestra_chat.conversation  # the slow part, while the person types
    from palaestra_chat.config import read_options

    with contextlib.suppress(ImportError):
        import palaestra_chat.terminal.markdown  # noqa: F401
    return read_options(words, "palaestra chat")
