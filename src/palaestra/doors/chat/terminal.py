"""`palaestra chat` in a terminal: inline and append-only, in the terminal's own scrollback.

The prompt is shown before anything heavy is imported; settings are read and the service is created while the person
types. While a turn runs there is no prompt: the answer is written as it arrives, and Ctrl-C interrupts it. Invariants:
text from models and commands reaches the terminal without control characters; only a key press by the person counts as
approval.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from palaestra.core.errors import ConfigError, ContextExceeded, PalaestraError
from palaestra.core.exits import DONE, plural
from palaestra.core.printable import escaped, one_line, printable, quoted
from palaestra.doors.chat.folders import state_folder

try:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys
    from prompt_toolkit.output import create_output
except ImportError:
    raise ConfigError("palaestra chat in a terminal needs prompt-toolkit: pip install 'palaestra[chat]'") from None

if TYPE_CHECKING:
    from palaestra.doors.chat.config import ChatOptions
    from palaestra.doors.chat.conversation import Conversation, People
    from palaestra.doors.chat.one_shot import Which
    from palaestra.doors.chat.service import ChatService
    from palaestra.doors.chat.store import ConversationStore
    from palaestra.doors.chat.turn_events import Event, Notice, TurnEnded
    from palaestra.doors.chat.workdir import FolderChange
    from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest

T = TypeVar("T")

COMMANDS = {
    "/help": "list the commands",
    "/new": "[TITLE]  begin a new conversation",
    "/resume": "[NAME]  list the conversations, or continue one",
    "/fork": "[TURN]  continue in a copy of this conversation, up to the turn",
    "/undo": "undo the last message and its answer",
    "/retry": "send the last message again",
    "/stop": "[processes]  stop the running turn (also Ctrl-C), or end all background processes",
    "/model": "[NAME]  show or change the model",
    "/tools": "list the tools",
    "/toolset": "[NAME …]  show or change the toolsets",
    "/sandbox": "[diff|write|new]  show the sandbox or its changes, write the changes back, or get a new sandbox",
    "/background": "[ID | write ID TEXT | kill ID]  list, read, write to or end background processes",
    "/cost": "tokens and cost of this conversation",
    "/compact": "replace the history with a summary (also automatic, before the context window is full)",
    "/save": "TITLE  name the conversation",
    "/export": "[FILE]  write the conversation as JSON",
    "/search": "WORDS  find earlier conversations",
    "/exit": "end the chat (also Ctrl-D)",
}
SHOWN_LINES, MOST_DIFF_LINES = 8, 200
"""The maximum numbers of lines shown for a command's output and for a change of the shared folder."""

CONTEXT_ADVICE = (
    "/undo removes the last message, /compact replaces the history with a summary, /new begins a new conversation"
)

BOLD, DIM, RED, GREEN, YELLOW, CYAN, PLAIN = (f"\x1b[{code}m" for code in ("1", "2", "31", "32", "33", "36", "0"))
_PROMPT = "› "


def run_terminal(which: Callable[[Mapping[str, str]], Which], own: Mapping[str, str], words: Sequence[str]) -> int:
    """Run the chat until the person ends it, and return the exit code. With `--help-all` or `--show-config`, only print
    the text. Raises `ConfigError` if stdin or stdout is not a terminal."""
    if any(word in ("--help-all", "--show-config") for word in words):
        from palaestra.doors.chat.config import read_options

        sys.stdout.write(read_options(words, "palaestra chat").show)
        return DONE
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("palaestra chat needs a terminal; to send one message without one, use -p TEXT")
    return asyncio.run(ChatTerminal(which, own, words).run())


class ChatTerminal:
    """One run of the interactive chat."""

    def __init__(
        self, which: Callable[[Mapping[str, str]], Which], own: Mapping[str, str], words: Sequence[str]
    ) -> None:
        self._which, self._own, self._words = which, own, words
        self._raw: TextIO = getattr(sys.stdout, "raw", sys.stdout)
        self._screen = Screen(self._raw)
        self._stack = AsyncExitStack()
        self._ready: asyncio.Task[None] | None = None
        self._session: PromptSession[str] | None = None
        self._asking = asyncio.Lock()
        self._turn_runs = self._stop_soon = False
        self._handling: asyncio.Task[None] | None = None
        self._ended = False
        self._options: ChatOptions
        self._store: ConversationStore
        self._service: ChatService
        self._left_out: set[tuple[str, str]] = set()
        self._talk: Conversation | None = None

    async def run(self) -> int:
        """Read and handle messages and commands until the chat ends; returns the exit code."""
        self._session = self._prompt_session()
        loop = asyncio.get_running_loop()
        async with self._stack:
            # There is one handler for the whole chat. If each prompt and asyncio set their own, there would be moments
            # between them in which Ctrl-C ends the chat.
            loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
            try:
                await self._read_and_handle()
            finally:
                loop.remove_signal_handler(signal.SIGINT)  # so that Ctrl-C ends a chat that is slow to close
        return DONE

    async def _read_and_handle(self) -> None:
        self._ready = asyncio.create_task(self._load())
        self._ready.add_done_callback(self._loaded)
        if any(name in self._own for name in ("-c", "--resume", "--fork")):
            await self._ready
            await self._show_last()
        self._screen.line(f"{DIM}palaestra chat · /help · Ctrl-D ends{PLAIN}")
        while not self._ended:
            text = await self._read()
            if text is None:
                break
            if not text.strip():
                continue
            self._handling = asyncio.create_task(self._handle(text))
            if self._stop_soon:
                self._handling.cancel()
            try:
                await asyncio.wait([self._handling])
            finally:
                self._handling.cancel()
            if self._handling.cancelled():
                self._screen.line(f"{YELLOW}interrupted{PLAIN}")
            elif (error := self._handling.exception()) is not None:
                if not isinstance(error, PalaestraError) or self._talk is None:  # a fault, or loading failed
                    raise error
                self._screen.line(f"{RED}{printable(str(error))}{PLAIN}")
        self._screen.line(f"{DIM}{self._farewell()}{PLAIN}")

    def _on_interrupt(self) -> None:
        """Stop the running turn. If none runs, stop the handling of the command or message that was entered."""
        if self._turn_runs:
            self._stop_soon = not self._conversation.interrupt()
        elif self._handling is not None and not self._handling.done():
            self._handling.cancel()
        else:  # either the entered message is not handled yet, or a prompt is shown, which reads Ctrl-C itself
            self._stop_soon = self._session is not None and not self._session.app.is_running

    def _farewell(self) -> str:
        talk = self._talk
        return "" if talk is None or not talk.history.turns() else f"continue with: palaestra chat --resume {talk.id}"

    # Start

    async def _load(self) -> None:
        """Import the chat's modules, read the settings, and open the store and the service."""
        loop = asyncio.get_running_loop()
        self._options = await loop.run_in_executor(None, _read_options, self._words)
        if self._options.show:
            raise ConfigError("--help-all and --show-config must be used alone")
        from palaestra.doors.chat.config import chat_service, open_store

        self._store = self._stack.enter_context(open_store(self._options.config))
        self._service = await self._stack.enter_async_context(chat_service(self._options, self._store))
        self._talk = self._which(self._own).opened(self._service, self._people())
        for notice in self._options.notices:
            self._above(f"{YELLOW}note: {printable(notice)}{PLAIN}")

    def _loaded(self, task: asyncio.Task[None]) -> None:
        """End the prompt if loading failed."""
        if task.cancelled() or task.exception() is None or self._session is None:
            return
        if self._session.app.is_running:
            error = task.exception()
            assert error is not None
            self._session.app.exit(exception=error)

    def _people(self) -> People:
        from palaestra.doors.chat.conversation import People

        return People(approve=self._approve, answer=self._answer, notice=self._notice)

    async def _show_last(self) -> None:
        """Show the end of a resumed conversation, and continue a turn that was cut off."""
        talk = self._conversation
        turns = talk.history.turns()
        self._screen.line(f"{DIM}continues {talk.id}, {len(turns)} turn{'' if len(turns) == 1 else 's'}{PLAIN}")
        for turn in turns[-2:]:
            from palaestra.tools.builtin.session_search import message_text

            self._screen.line(f"{BOLD}{_PROMPT}{printable(message_text(turn.content))}{PLAIN}")
            if turn.answer:
                self._screen.line(printable(turn.answer))
        if talk.unfinished:
            self._screen.line(f"{YELLOW}note: this turn was cut off and is continued; Ctrl-C stops it{PLAIN}")
        self._show_notices(talk)
        if talk.unfinished:
            await self._show_turn(talk.resume())

    @property
    def _conversation(self) -> Conversation:
        assert self._talk is not None
        return self._talk

    # The prompt

    def _prompt_session(self) -> PromptSession[str]:
        keys = KeyBindings()

        @keys.add("enter")
        @keys.add("c-j")  # an Enter that was typed before the prompt appeared
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
                buffer.complete_state = None
            elif buffer.document.text_before_cursor.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(pasted(event.data))

        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        history = folder / "history"
        os.close(os.open(history, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return PromptSession(
            history=FileHistory(history),
            multiline=True,
            key_bindings=keys,
            completer=_Words(lambda: self._talk),
            complete_while_typing=True,
            bottom_toolbar=self._status,
            output=create_output(self._raw),
            prompt_continuation="  ",
        )

    async def _read(self) -> str | None:
        """Return the next message or command; None at the end of input."""
        assert self._session is not None
        self._stop_soon = False
        while True:
            try:
                async with self._asking:
                    return await self._session.prompt_async(_PROMPT, handle_sigint=False)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def _status(self) -> ANSI:
        """Return the line below the prompt."""
        if self._talk is None:
            return ANSI("starting …")
        talk = self._talk
        running = sum(session.running for session in self._service.processes.sessions(talk.id))
        window = "" if talk.context.size is None else f" of {talk.context.size}"
        parts = [talk.model.name, f"{talk.context.tokens}{window} tokens"]
        if running:
            parts.append(f"{running} background process{'es' if running > 1 else ''} (/background)")
        if talk.history.title:
            parts.append(talk.history.title)
        return ANSI(printable(" · ".join(parts)))

    # Messages

    async def _handle(self, text: str) -> None:
        assert self._ready is not None
        await asyncio.shield(self._ready)
        if text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            near = [word] if word in COMMANDS else [name for name in COMMANDS if name.startswith(word)]
            if len(near) == 1:
                await self._do(near[0], rest.strip())
                return
            if "/" not in word[1:]:
                raise ConfigError(f"unknown command {word}; /help lists the commands")
        from palaestra.doors.chat.attachments import missing_files, with_files

        for path in missing_files(text):
            self._screen.line(f"{YELLOW}note: there is no file {printable(str(path))}; its name is sent as text{PLAIN}")
        await self._show_turn(self._conversation.send(with_files(text)))

    async def _do(self, name: str, rest: str) -> None:
        if rest and COMMANDS[name][0] not in "[T" and not COMMANDS[name].startswith("WORDS"):
            raise ConfigError(f"{name} takes no argument, but got {rest!r}; nothing was done")
        await getattr(self, f"_do_{name[1:]}")(rest)

    async def _show_turn(self, events: AsyncGenerator[Event, None]) -> None:
        """Show a turn as it happens, then offer to write the agent's changes back to the shared folder."""
        from palaestra.doors.chat.turn_events import Notice

        self._turn_runs = True
        try:
            with _no_echo():
                async for event in events:
                    if not isinstance(event, Notice):  # `People.notice` already shows them
                        self._screen.show(event)
                    if self._stop_soon:
                        self._stop_soon = not self._conversation.interrupt()
        finally:
            self._turn_runs = self._stop_soon = False
        if isinstance(self._conversation.failure, ContextExceeded):
            self._screen.line(f"{YELLOW}{CONTEXT_ADVICE}{PLAIN}")
        await self._offer_changes()

    async def _offer_changes(self) -> None:
        changes = await self._changes()
        mode = self._options.config.write
        if mode != "no":
            self._report_left([change for change in changes if change.problem])
        changes = [change for change in changes if not change.problem]
        if not changes or self._conversation.slots.folder is None:
            return
        names = ", ".join(f"{change.kind} {change.path}" for change in changes[:10])
        more = f" and {len(changes) - 10} more" if len(changes) > 10 else ""
        if mode == "no":
            return
        if mode == "ask":
            for change in changes[:10]:
                self._screen.diff(change.diff())
            answer = await self._line(
                f"Write to {self._conversation.slots.folder.root}: {names}{more}? y: yes, n: not now [n] "
            )
            if answer.lower() not in ("y", "yes"):
                self._screen.line(f"{DIM}not written; /sandbox write does it later{PLAIN}")
                return
        self._write_back(changes)

    async def _changes(self) -> list[FolderChange]:
        slot = self._conversation.seat.slot
        return (
            []
            if slot is None or self._conversation.slots.folder is None
            else await self._conversation.slots.folder.changes(slot)
        )

    def _write_back(self, changes: Sequence[FolderChange]) -> None:
        assert self._conversation.slots.folder is not None
        left = self._conversation.slots.folder.apply(changes)
        self._screen.line(
            f"{GREEN}wrote {plural(len(changes) - len(left), 'file')} to {self._conversation.slots.folder.root}{PLAIN}"
        )
        self._left_out.clear()
        self._report_left(left)

    def _report_left(self, changes: Sequence[FolderChange]) -> None:
        """Report each file that is not written back, but only once for each reason."""
        for change in changes:
            if (change.path, change.problem) not in self._left_out:
                self._left_out.add((change.path, change.problem))
                self._screen.line(f"{YELLOW}left out {printable(change.path)}: {printable(change.problem)}{PLAIN}")

    # People

    def _notice(self, notice: Notice) -> None:
        self._above(f"{YELLOW}note: {printable(notice.text)}{PLAIN}")

    def _show_notices(self, talk: Conversation) -> None:
        for notice in talk.take_notices():
            self._notice(notice)

    def _above(self, text: str) -> None:
        """Print above the prompt, or into the output of the running turn."""
        session = self._session
        if session is not None and session.app.is_running:
            _background(run_in_terminal(lambda: self._screen.line(text)))
        else:
            self._screen.line(text)

    async def _approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        from palaestra.tools.human.approval import ApprovalAnswer

        question = f"{YELLOW}{escaped(request.question)}{PLAIN}"
        self._screen.line(request.asked(question, quoted(request.command)))
        answers = {
            "y": ApprovalAnswer.ONCE, "yes": ApprovalAnswer.ONCE, "s": ApprovalAnswer.SESSION,
            "a": ApprovalAnswer.ALWAYS, "n": ApprovalAnswer.DENY, "no": ApprovalAnswer.DENY, "": ApprovalAnswer.DENY,
        }  # fmt: skip
        while True:
            line = await self._line("Run it? y: once, s: this session, a: always, n: no [n] ")
            if line.lower() in answers:
                return answers[line.lower()]

    async def _answer(self, question: str, choices: Sequence[str]) -> str | None:
        self._screen.line(f"{YELLOW}{printable(question)}{PLAIN}")
        for number, choice in enumerate(choices, 1):
            self._screen.line(f"  {number}: {printable(choice)}")
        line = await self._line("Your answer: ")
        if line.isascii() and line.isdigit() and 1 <= int(line) <= len(choices):
            return choices[int(line) - 1]
        return line or None

    async def _line(self, prompt: str) -> str:
        """Read one line from the person. Input typed before the question is discarded. Ctrl-C and Ctrl-D give an empty
        line; Ctrl-C also stops a running turn."""
        async with self._asking:
            self._screen.end_line()
            termios.tcflush(sys.stdin, termios.TCIFLUSH)
            session: PromptSession[str] = PromptSession(output=create_output(self._raw))
            try:
                return (await session.prompt_async(printable(prompt), handle_sigint=False)).strip()
            except KeyboardInterrupt:
                if self._turn_runs:
                    self._conversation.interrupt()
                return ""
            except EOFError:
                return ""

    # Commands

    async def _do_help(self, rest: str) -> None:
        for name, about in COMMANDS.items():
            self._screen.line(f"{CYAN}{name:<12}{PLAIN} {about}")
        self._screen.line("@FILE adds a text file or an image. Alt-Enter, or \\ at the end, begins a new line.")

    async def _do_exit(self, rest: str) -> None:
        self._ended = True

    async def _do_new(self, rest: str) -> None:
        from palaestra.doors.chat.conversation import Conversation

        await self._conversation.close()
        self._talk = Conversation.begin(self._service, self._people(), title=rest)
        self._screen.line(f"{DIM}a new conversation: {self._talk.id}{PLAIN}")

    async def _do_resume(self, rest: str) -> None:
        from palaestra.doors.chat.conversation import Conversation
        from palaestra.doors.chat.one_shot import list_conversations

        if not rest:
            self._screen.line(printable(list_conversations(self._store, as_json=False)))
            return
        record = self._store.find(rest)
        if record.id == self._conversation.id:
            self._screen.line(f"{DIM}{record.id} is this conversation{PLAIN}")
            return
        other = Conversation.open(self._service, record.id, self._people())
        await self._conversation.close()
        self._talk = other
        await self._show_last()

    async def _do_fork(self, rest: str) -> None:
        other = await self._conversation.fork(_number(rest) if rest else None)
        await self._conversation.close()
        self._talk = other
        turns = len(other.history.turns())
        self._screen.line(f"{DIM}forked as {other.id}, with {turns} turn{'' if turns == 1 else 's'}{PLAIN}")
        self._show_notices(other)

    async def _do_undo(self, rest: str) -> None:
        talk = self._conversation
        turns = [turn for turn in talk.history.turns(every=True) if turn.kind == "message"]
        if not turns:
            self._screen.line("there is nothing to undo")
            return
        undone = await talk.rewind(before=turns[-1].number)
        self._screen.line(f"{DIM}undone; {printable(undone.files)}{PLAIN}")
        self._report_left(undone.left)

    async def _do_retry(self, rest: str) -> None:
        await self._show_turn(self._conversation.retry())

    async def _do_stop(self, rest: str) -> None:
        talk = self._conversation
        if rest != "processes":
            running = sum(session.running for session in self._service.processes.sessions(talk.id))
            more = f"; background processes running: {running}; /stop processes ends them" if running else ""
            raise ConfigError(
                f"unknown command /stop {rest}; use /stop or /stop processes" if rest else f"no turn is running{more}"
            )
        ended = await self._service.processes.kill_all(talk.id)
        self._screen.line(f"ended {ended} background process{'' if ended == 1 else 'es'}")

    async def _do_model(self, rest: str) -> None:
        if rest and not await self._conversation.use_model(rest):
            self._screen.line(f"{YELLOW}note: the server lists no models, so this name is not checked{PLAIN}")
        self._screen.line(printable(self._conversation.model.name))

    async def _do_tools(self, rest: str) -> None:
        registry = self._service.registry(self._conversation.toolsets)
        for name in registry.list_tools():
            tool = registry.get(name)
            about = "" if tool is None else tool.schema.description.partition(". ")[0]
            self._screen.line(f"{CYAN}{name:<18}{PLAIN} {printable(about)}")
        for name, reason in registry.missing.items():
            self._screen.line(f"{DIM}{name:<18} left out: {printable(reason)}{PLAIN}")

    async def _do_toolset(self, rest: str) -> None:
        if rest:
            await self._conversation.use_toolsets(rest.replace(",", " ").split())
        self._screen.line(" ".join(self._conversation.toolsets))

    async def _do_sandbox(self, rest: str) -> None:
        talk = self._conversation
        if rest == "new":
            await talk.drop_slot()
            self._screen.line("the next command gets a new sandbox")
        elif rest in ("diff", "write"):
            if self._conversation.slots.folder is None:
                raise ConfigError(
                    f"/sandbox {rest} compares with the folder that the sandbox has a copy of, and there is none; "
                    "start the chat with --workdir DIR"
                )
            changes = await self._changes()
            if rest == "write":
                self._write_back(changes)
                return
            for change in changes:
                self._screen.diff(change.diff())
            verb = "differs" if len(changes) == 1 else "differ"
            self._screen.line(f"{plural(len(changes), 'file')} {verb} from {self._conversation.slots.folder.root}")
        elif rest:
            raise ConfigError(
                f"unknown command /sandbox {rest}; use /sandbox, /sandbox diff, /sandbox write or /sandbox new"
            )
        elif talk.seat.slot is None:
            self._screen.line("no sandbox yet: the first command creates one")
        else:
            slot = talk.seat.slot
            self._screen.line(f"{slot.slot_id}: backend {self._service.pool.backend.name}, isolation {slot.rung.label}")

    async def _do_background(self, rest: str) -> None:
        processes, task = self._service.processes, self._conversation.id
        action, _, more = rest.partition(" ")
        if not rest:
            sessions = await processes.list_sessions(task)
            if not sessions:
                self._screen.line("no background processes")
            for each in sessions:
                self._screen.line(printable(f"{each['session_id']}  {each['status']}  {each['command']}"))
            return
        if action == "kill":
            reply = await processes.kill_process(more.strip(), task_id=task)
        elif action == "write":
            name, _, text = more.partition(" ")
            reply = await processes.submit_stdin(name, text, task_id=task)
        elif more:
            raise ConfigError(f"unknown command /background {rest}; use /background ID, write ID TEXT or kill ID")
        else:
            reply = await processes.read_log(action, task_id=task)
        self._screen.line(printable(str(reply.get("output") or reply.get("error") or reply.get("status"))))

    async def _do_cost(self, rest: str) -> None:
        turns = self._conversation.history.turns(every=True)
        totals = {
            name: sum(int(turn.report.get(name) or 0) for turn in turns)
            for name in ("model_calls", "prompt_tokens", "completion_tokens")
        }
        cost = sum(float(turn.report.get("cost") or 0.0) for turn in turns)
        priced = f", cost {cost:.4f}" if self._service.settings.prices is not None else " (set prices to see a cost)"
        self._screen.line(
            f"{plural(totals['model_calls'], 'model call')}, {totals['prompt_tokens']} tokens read, "
            f"{totals['completion_tokens']} written{priced}"
        )

    async def _do_compact(self, rest: str) -> None:
        self._screen.line(printable(await self._conversation.compact()))

    async def _do_save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save needs a title")
        self._conversation.history.rename(rest)
        self._screen.line(f"{DIM}named; continue with: palaestra chat --resume {printable(rest)!r}{PLAIN}")

    async def _do_export(self, rest: str) -> None:
        from palaestra.core.io.durable_files import private

        path = Path(rest or f"{self._conversation.id}.json").expanduser()
        talk = self._conversation
        content = {
            "id": talk.id,
            "title": talk.history.title,
            "model": talk.model.name,
            "messages": talk.history.messages,
        }
        try:
            with open(path, "w", opener=private) as file:  # noqa: ASYNC230 - a small file
                file.write(json.dumps(content, indent=1, ensure_ascii=False))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        self._screen.line(f"wrote {path}")

    async def _do_search(self, rest: str) -> None:
        from palaestra.doors.chat.one_shot import list_conversations

        self._screen.line(printable(list_conversations(self._store, as_json=False, query=rest)))


class Screen:
    """Writes events to the terminal, only by appending. Streamed text is styled as it arrives."""

    def __init__(self, raw: TextIO) -> None:
        self._raw = raw
        self._at_start = True
        self._markdown = MarkdownStream()
        self._in = ""
        self._lines = 0
        self._half = ""
        self._shown: set[str] = set()

    def write(self, text: str) -> None:
        if text:
            self._raw.write(text)
            self._raw.flush()
            self._at_start = text.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line unless the cursor is at the start of one."""
        if not self._at_start:
            self.write(f"{PLAIN}\n")

    def line(self, text: str) -> None:
        """Write a whole line."""
        self._leave()
        if text:
            self.write(f"{text}\n")

    def diff(self, text: str) -> None:
        """Show a unified diff in colour."""
        self._leave()
        lines = text.splitlines()
        for line in lines[:MOST_DIFF_LINES]:
            colour = BOLD if line.startswith(("+++", "---")) else {"+": GREEN, "-": RED, "@": CYAN}.get(line[:1], "")
            self.write(f"{colour}{escaped(line)}{PLAIN}\n")
        if (hidden := len(lines) - MOST_DIFF_LINES) > 0:
            self.write(f"{YELLOW}{hidden} more lines of this change are not shown{PLAIN}\n")

    def show(self, event: Event) -> None:
        """Show one event of a turn."""
        from palaestra.doors.chat import turn_events

        if isinstance(event, turn_events.TextDelta):
            self._enter("text")
            self.write(self._markdown.feed(printable(event.text)))
        elif isinstance(event, turn_events.ReasoningDelta):
            self._enter("reasoning")
            self.write(f"{DIM}{printable(event.text)}{PLAIN}")
        elif isinstance(event, turn_events.ReplyRestarted):
            self.line(f"{DIM}(the connection broke; the answer begins again){PLAIN}")
        elif isinstance(event, turn_events.ToolBegun):
            self.line(f"{CYAN}● {escaped(event.name)}{PLAIN} {escaped(event.preview)}")
        elif isinstance(event, turn_events.ToolOutput):
            self._enter("output")
            self._shown.add(event.call_id)
            self._output(event.text)
        elif isinstance(event, turn_events.ToolEnded):
            self._result(event)
        elif isinstance(event, turn_events.TurnEnded):
            self._leave()
            self._end(event)

    def _enter(self, what: str) -> None:
        if self._in != what:
            self._leave()
            self._in = what

    def _leave(self) -> None:
        if self._in == "text":
            self.write(self._markdown.end())
        if self._in == "output":
            self._output("", last=True)
        self.end_line()
        self._in = ""

    def _output(self, text: str, *, last: bool = False) -> None:
        """Show up to `SHOWN_LINES` lines of a command's output and, at its end (`last`), how many lines are hidden."""
        *lines, self._half = (self._half + text).split("\n")
        if last and self._half:
            lines, self._half = [*lines, self._half], ""
        for line in lines:
            self._lines += 1
            if self._lines <= SHOWN_LINES:
                self.write(f"{DIM}  │ {printable(line)[:300]}{PLAIN}\n")
        if last:
            if self._lines > SHOWN_LINES:
                self.write(f"{DIM}  │ … {self._lines - SHOWN_LINES} more lines{PLAIN}\n")
            self._lines = 0

    def _result(self, event: Event) -> None:
        from palaestra.doors.chat.turn_events import ToolEnded

        assert isinstance(event, ToolEnded)
        self._leave()
        reply = _object(event.text)
        if event.error:
            self.write(f"{RED}  ✗ {one_line(event.error, 300)}{PLAIN}\n")
        elif isinstance(reply.get("diff"), str):
            self.diff(str(reply["diff"]))
        elif event.call_id not in self._shown:
            shown = str(reply.get("output") or reply.get("content") or event.text)
            if reply.get("output") == "":
                shown = "(no output)"
            for line in shown.splitlines()[:3]:
                self.write(f"{DIM}  │ {printable(line)[:300]}{PLAIN}\n")
        code = reply.get("exit_code")
        if isinstance(code, int) and code and not event.error:
            self.write(f"{YELLOW}  exit code {code}{PLAIN}\n")
        self._shown.discard(event.call_id)

    def _end(self, event: TurnEnded) -> None:
        from palaestra.doors.chat.turn_events import INTERRUPTED, NATURAL

        if event.outcome == INTERRUPTED:
            self.write(f"{YELLOW}interrupted{PLAIN}\n")
        elif event.outcome != NATURAL:
            self.write(f"{RED}{printable(event.outcome)}: {printable(event.error)}{PLAIN}\n")


class MarkdownStream:
    """Styles Markdown as it arrives, character by character: headings, bold, code, fences, and diffs in fences. Text
    that is already on the screen is never changed."""

    def __init__(self) -> None:
        self._line = ""
        self._fence = ""
        self._bold = self._code = False
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text with styles. A marker that may be incomplete is held back until more text arrives."""
        return "".join(map(self._letter, text))

    def end(self) -> str:
        """Return the text that was held back, followed by the escape sequence that ends all styles."""
        held, self._held = self._held, ""
        self._line, self._fence, self._bold, self._code = "", "", False, False
        return f"{held}{PLAIN}"

    def _letter(self, letter: str) -> str:
        if letter == "\n":
            return self._newline()
        self._line += letter
        if self._fence:
            return self._in_fence(letter)
        if len(self._line) <= 3 and set(self._line) == {"`"}:
            self._held += letter
            return ""
        if self._line[:3] == "```":
            held, self._held = self._held, ""
            return f"{DIM}{held}{letter}" if held else letter
        held, self._held = self._held, ""
        if letter == "`":
            return f"{held}{self._toggled('_code')}"
        if letter == "*" and not self._code:
            if held.endswith("*"):
                return f"{held[:-1]}{self._toggled('_bold')}"
            self._held = letter
            return held
        if held == "`" * len(held) and held:  # one or two backquotes at the start of a line are code, not a fence
            held = self._toggled("_code") if len(held) == 1 else held
        heading = BOLD if letter == "#" and not self._line.strip("#") else ""
        return f"{held}{heading}{letter}"

    def _in_fence(self, letter: str) -> str:
        if len(self._line) <= 3 and set(self._line) == {"`"}:
            self._held += letter
            return ""
        held, self._held = self._held, ""
        colour = {"+": GREEN, "-": RED, "@": CYAN}.get(self._line[0]) if self._fence == "diff" else None
        return f"{colour or CYAN if len(self._line) == 1 + len(held) else ''}{held}{letter}"

    def _newline(self) -> str:
        held, self._held = self._held, ""
        if self._line.startswith("```"):
            self._fence = "" if self._fence else (self._line[3:].strip() or "text")
            held = f"{DIM}{held}" if held else ""
        self._line = ""
        self._bold = self._code = False
        return f"{held}{PLAIN}\n"

    def _toggled(self, name: str) -> str:
        setattr(self, name, not getattr(self, name))
        return PLAIN + (BOLD if self._bold else "") + (CYAN if self._code else "")


class _Words(Completer):
    """Completes commands at the start of the input, and paths after @."""

    def __init__(self, talk: Callable[[], Conversation | None]) -> None:
        self._talk = talk
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and " " not in text and "\n" not in text:
            for name, about in COMMANDS.items():
                if name.startswith(text):
                    yield Completion(name, start_position=-len(text), display_meta=about)
            return
        word = document.get_word_before_cursor(WORD=True)
        if word.startswith("@"):
            path = Document(word[1:], len(word) - 1)
            yield from self._paths.get_completions(path, complete_event)


def pasted(text: str) -> str:
    """Return pasted text. If the text is only the path of an image, return it as `@"path"`, so that the image becomes
    an attachment."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    path = text.strip().strip("'\"").removeprefix("file://")
    if path.lower().endswith((".png", ".jpg", ".jpeg", ".gif", ".webp")) and Path(path).expanduser().is_file():
        return f'@"{path}" '
    return text


@contextmanager
def _no_echo() -> Iterator[None]:
    """Do not echo what is typed during the block, so that it does not appear in the answer. The next prompt receives
    the input."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[0] &= ~termios.ICRNL  # otherwise Enter would be read as Ctrl-J later
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


_tasks: set[asyncio.Future[None]] = set()


def _background(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _read_options(words: Sequence[str]) -> ChatOptions:
    import palaestra.doors.chat.conversation  # noqa: F401 - the slow part, while the person types
    from palaestra.doors.chat.config import read_options

    return read_options(words, "palaestra chat")


def _object(text: str) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _number(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{text!r} is not the number of a turn")
    return int(text)
