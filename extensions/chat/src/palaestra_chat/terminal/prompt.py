"""The prompt: it stays while a turn runs, so that what is typed is visible. A question takes its place for a moment."""

from __future__ import annotations

import asyncio
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.application.current import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, has_completions
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth, Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from palaestra_chat.folders import state_folder
from palaestra_chat.terminal.screen import FOLDED_LINES
from palaestra_chat.terminal.styles import PROMPT
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON

_ESCAPE_S = 0.15
"""How long the prompt waits for the rest of a key after Esc, in seconds."""

_SETTLED_S = 1.0
"""A single key answers a question only after this many seconds, since the person may just have been typing."""

_ALONE_S = 0.4
"""And only if no other key follows for this many seconds, since it may be the first letter of a message."""


_BLIND_S = 1.2
"""For how many seconds after a question that interrupts a sentence even y, or another answer, is a part of it."""
_SENTENCE_S = 30.0
"""For how many seconds after a question a person may finish a sentence without having seen it."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.|.)?")
"""The bytes of keys that are no text."""

LEADER = {"n": "/new", "u": "/undo", "c": "/compact", "x": "/export", "d": "/diff", "s": "/cost"}
"""The commands that Ctrl-X and a letter stand for."""
_LISTS = {"g": "/rewind", "l": "/resume", "m": "/model"}
"""The same for commands that list what to choose from; then the choice can be typed."""


class _Paused(Exception):
    """A question takes the place of the prompt."""


class Prompt:
    """The prompt of the chat. `head` returns the lines above it, `commands` the names and descriptions for completion.
    `stop` is called for Ctrl-C and Esc, and returns whether there was something to stop; `switch_mode` for Shift-Tab;
    `enter` for keys that stand for a command; `leave` for Ctrl-C if there is nothing to stop and nothing typed. The
    editor is not opened unless `idle` returns True, because a running turn writes to the terminal."""

    def __init__(
        self,
        raw: TextIO,
        head: Callable[[], str],
        commands: Callable[[], Mapping[str, str]],
        stop: Callable[[], bool],
        switch_mode: Callable[[], None],
        enter: Callable[[str], None],
        leave: Callable[[], None],
        idle: Callable[[], bool],
    ) -> None:
        self._raw = raw
        self._head = head
        self._stop = stop
        self._switch_mode = switch_mode
        self._enter = enter
        self._leave = leave
        self._idle = idle
        self._asking = asyncio.Lock()
        self._questions = 0
        self._kept = ""
        self.entered: list[str] = []
        """What was entered while a question took the place of the prompt."""
        self._asked_s = 0.0
        self._pastes: dict[str, str] = {}
        self._session: PromptSession[str] = self._new_session(commands)

    @property
    def shown(self) -> bool:
        """Whether the prompt is on the screen."""
        return self._session.app.is_running

    def redraw(self, *, whole: bool = False) -> None:
        """Draw the prompt and the lines above it again: what has changed, or the `whole`."""
        if self.shown:
            if whole:
                self._session.app.renderer.erase()
            self._session.app.invalidate()

    def put(self, text: str) -> None:
        """Put a text in front of what is typed."""
        if self.shown:
            self._session.default_buffer.text = "\n".join(
                part for part in (text, self._session.default_buffer.text) if part
            )
        else:
            self._kept = text

    def _folded(self, text: str) -> str:
        """Return what stands for a long text in the prompt: its number of lines, in brackets."""
        lines = text.count("\n") + 1
        if lines < FOLDED_LINES:
            return text
        known = sum(f"[pasted {lines} lines" in each for each in self._pastes)
        name = f"[pasted {lines} lines{f', {known + 1}' if known else ''}]"
        self._pastes[name] = text
        return name

    def _unfolded(self, typed: str) -> str:
        """Return what was typed with the long texts that it stands for."""
        for name, text in self._pastes.items():
            typed = typed.replace(name, text)
        return typed

    def end(self) -> None:
        """End the prompt as if the person had pressed Ctrl-D."""
        if self.shown:
            self._session.app.exit(exception=EOFError())

    async def read(self) -> str | None:
        """Return the next message or command; None at the end of input."""
        while True:
            try:
                async with self._asking:
                    if self._questions:  # another one, directly after the last
                        continue
                    kept, self._kept = self._kept, ""
                    typed = await self._session.prompt_async(self._prompt_text, handle_sigint=False, default=kept)
                    return self._unfolded(typed)
            except (_Paused, KeyboardInterrupt):
                continue
            except EOFError:
                return None

    async def ask(self, question: str, keys: str = "") -> str | None:
        """Read one line as the answer to a question; None at Ctrl-C, and an empty line at Ctrl-D. Each of `keys` alone
        is an answer, too, without Enter, once the question was there for a moment. What was typed before the question
        does not count: whole lines are in `entered`, and the rest is in the prompt again after the answer."""
        if self.shown:
            self._kept = self._session.default_buffer.text
            self._session.app.exit(exception=_Paused())
        self._questions += 1
        try:
            async with self._asking:
                session: PromptSession[str] = PromptSession(output=self._output(), key_bindings=_answer_keys(keys))
                self._keep(_typed_ahead(session.app.input))
                self._asked_s = time.monotonic()
                return (await session.prompt_async(printable(question), handle_sigint=False)).strip()
        except KeyboardInterrupt:
            return None
        except EOFError:
            return ""
        finally:
            self._questions -= 1

    def _keep(self, typed: str) -> None:
        """Keep what was typed while no prompt was there: the lines as `entered`, and the rest for the prompt."""
        first, *others = typed.split("\n")
        *lines, self._kept = self._kept + first, *others
        self.entered += [self._unfolded(line) for line in lines if line.strip()]

    @property
    def interrupted_a_sentence(self) -> bool:
        """Whether the line that was just entered came so soon after the question that it is the end of a sentence which
        the question interrupted, and no answer."""
        return bool(self._kept) and time.monotonic() - self._asked_s < _BLIND_S

    def whole(self, line: str) -> str:
        """Return a line that is no answer with the words that the question interrupted, if it came soon enough to be
        the rest of their sentence."""
        if time.monotonic() - self._asked_s < _SENTENCE_S:
            line, self._kept = self._unfolded(self._kept + line), ""
        return line

    def take_entered(self) -> list[str]:
        """Remove and return the messages that were entered just before a question."""
        entered, self.entered = self.entered, []
        return entered

    def _output(self) -> Output:
        """Return the terminal. It is not asked where its cursor is: the answer could come among the keys."""
        found = create_output(self._raw)
        if not isinstance(found, Vt100_Output):
            return found
        return Vt100_Output(
            self._raw, found.get_size, term=os.environ.get("TERM"), default_color_depth=ColorDepth.from_env(),
            enable_cpr=False,
        )  # fmt: skip

    def _prompt_text(self) -> ANSI:
        head = self._head()
        return ANSI(f"{head}\n{PROMPT}" if head else PROMPT)

    def _new_session(self, commands: Callable[[], Mapping[str, str]]) -> PromptSession[str]:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        history = folder / "history"
        os.close(os.open(history, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        session: PromptSession[str] = PromptSession(
            history=_History(history, self._unfolded),
            multiline=True,
            key_bindings=self._keys(),
            completer=_Words(commands),
            complete_while_typing=Condition(_completes),
            output=self._output(),
            prompt_continuation="  ",
            erase_when_done=True,
            reserve_space_for_menu=6,
        )
        session.app.ttimeoutlen = session.app.timeoutlen = _ESCAPE_S
        return session

    def _keys(self) -> KeyBindings:
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

        @keys.add("escape", filter=~has_completions)
        def _(event: KeyPressEvent) -> None:
            self._stop()

        @keys.add("escape", "escape", filter=~has_completions)
        def _(event: KeyPressEvent) -> None:
            if not self._stop() and not event.current_buffer.text:
                enter_command(event, "/rewind")

        def enter_command(event: KeyPressEvent, command: str) -> None:
            self._enter(command)
            event.current_buffer.text = f"{command} "
            event.current_buffer.cursor_position = len(command) + 1

        @keys.add("escape", "p")
        def _(event: KeyPressEvent) -> None:
            enter_command(event, "/model")

        for letter, name in (LEADER | _LISTS).items():

            @keys.add("c-x", letter)
            def _(event: KeyPressEvent, letter: str = letter, name: str = name) -> None:
                if letter in _LISTS:
                    enter_command(event, name)
                else:
                    self._enter(name)

        @keys.add("c-o")
        def _(event: KeyPressEvent) -> None:
            self._enter("/show")

        @keys.add("c-g", filter=Condition(self._idle))
        @keys.add("c-x", "e", filter=Condition(self._idle))
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.tempfile_suffix = ".md"
            event.current_buffer.open_in_editor()

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if not self._stop():
                if event.current_buffer.text:
                    event.current_buffer.reset()
                else:
                    self._leave()

        @keys.add("s-tab", filter=~has_completions)
        def _(event: KeyPressEvent) -> None:
            self._switch_mode()

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._folded(pasted(event.data)))

        return keys


class _History(FileHistory):
    """The messages that were typed, in a file: there, with what `whole` makes of them."""

    def __init__(self, path: Path, whole: Callable[[str], str]) -> None:
        super().__init__(path)
        self._whole = whole

    def store_string(self, string: str) -> None:
        super().store_string(self._whole(string))


def _typed_ahead(source: Input) -> str:
    """Return what was typed and not read yet: the keys that a prompt has left, and those that wait in the terminal."""
    keys = get_typeahead(source)
    typed = "".join(key.data for key in keys if key.key == Keys.BracketedPaste or len(key.data) == 1)
    waiting = b""
    with source.raw_mode():  # otherwise an unfinished line cannot be read
        while select.select([source.fileno()], [], [], 0)[0] and (data := os.read(source.fileno(), 1 << 16)):
            waiting += data
    typed += _ESCAPES.sub("", waiting.decode(errors="replace"))
    return "".join(each for each in typed.replace("\r", "\n") if each.isprintable() or each in "\n\t")


def _answer_keys(keys: str) -> KeyBindings:
    """Return bindings by which each of `keys` answers a question, if nothing was typed yet."""
    bindings, asked_s = KeyBindings(), time.monotonic()

    @Condition
    def settled() -> bool:
        return time.monotonic() - asked_s >= _SETTLED_S and not get_app().current_buffer.text

    def answer(app: Application[JSON], key: str) -> None:
        if app.is_running and not app.is_done and app.current_buffer.text == key:
            app.current_buffer.validate_and_handle()

    for key in keys:

        @bindings.add(key, filter=settled)
        def _(event: KeyPressEvent, key: str = key) -> None:
            event.current_buffer.insert_text(key)
            asyncio.get_running_loop().call_later(_ALONE_S, answer, event.app, key)

    return bindings


def _completes() -> bool:
    """Whether what is typed may be completed. Otherwise no lines are reserved for a menu."""
    text = get_app().current_buffer.document.text_before_cursor
    if text.startswith("/"):
        return " " not in text and "\n" not in text
    words = text.split()
    return bool(words) and words[-1].startswith("@") and not text[-1].isspace()


class _Words(Completer):
    """Completes commands at the start of the input, and paths after @."""

    def __init__(self, commands: Callable[[], Mapping[str, str]]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and " " not in text and "\n" not in text:
            for name, about in self._commands().items():
                if name.startswith(text):
                    yield Completion(name, start_position=-len(text), display_meta=printable(about))
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
