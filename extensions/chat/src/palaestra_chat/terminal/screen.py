"""Shows the events of turns in the scrollback and in the live line."""

from __future__ import annotations

import textwrap
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from palaestra_chat.terminal.live_line import LiveLine
from palaestra_chat.terminal.scrollback import Scrollback
from palaestra_chat.terminal.styles import BOLD, CYAN, DIM, PLAIN, PROMPT, RED, YELLOW
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import escaped, one_line, printable

if TYPE_CHECKING:
    from palaestra_chat.terminal.markdown import MarkdownStream
    from palaestra_chat.turn_events import Event, ToolBegun, ToolEnded, TurnEnded

FOLDED_LINES, _SAID_LINES = 10, 3
"""The number of lines from which on a message is long, and the number of its lines that are shown."""

KEPT_CALLS, KEPT_CHARS = 200, 1 << 20
"""The number of calls that `/show` knows, and the maximum number of characters of the output of each."""


@dataclass(slots=True)
class _Call:
    number: int
    name: str
    arguments: str
    preview: str
    output: list[str] = field(default_factory=list)
    chars: int = 0
    result: str = ""

    def add(self, text: str) -> None:
        """Keep the latest output."""
        self.output.append(text)
        self.chars += len(text)
        if self.chars > 2 * KEPT_CHARS:
            kept = "".join(self.output)[-KEPT_CHARS:]
            self.output, self.chars = [kept], len(kept)


class Screen:
    """What the person sees of the conversation."""

    def __init__(self, scrollback: Scrollback, live: LiveLine) -> None:
        self.scrollback = scrollback
        self.live = live
        self._stream: MarkdownStream | None = None
        self._thought = ""
        self._calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._numbers = 0

    @property
    def pending(self) -> str:
        """The text of the model that is not in the scrollback yet."""
        return self._thought or ("" if self._stream is None else self._stream.pending)

    def line(self, text: str) -> None:
        """Write a whole line, or several."""
        self.settle()
        if text:
            self.scrollback.write(f"{text}\n")

    def prose(self, text: str) -> None:
        """Write a text of the chat itself, wrapped between words. Not for what a person must see as it is."""
        if max(map(len, text.split("\n"))) >= self.scrollback.columns:
            from palaestra_chat.terminal.markdown import wrapped

            text = wrapped(text, self.scrollback.columns)
        self.line(text)

    def said(self, text: str) -> None:
        """Show a message of the person; of a long one, the beginning."""
        lines = text.split("\n")
        if len(lines) >= FOLDED_LINES:
            text = "\n".join([*lines[:_SAID_LINES], f"[… {len(lines) - _SAID_LINES} more lines]"])
        room = max(20, self.scrollback.columns - len(PROMPT))
        wrapped = (textwrap.wrap(line, room, drop_whitespace=False) or [""] for line in printable(text).split("\n"))
        first, *rest = chain.from_iterable(wrapped)
        self.line("\n".join([f"{BOLD}{PROMPT}{first}{PLAIN}", *(f"{BOLD}  {line}{PLAIN}" for line in rest)]))

    def diff(self, text: str) -> None:
        """Show a unified diff in colour."""
        from palaestra_chat.terminal.renderers import diff_lines

        self.line("\n".join(diff_lines(text)))

    def markdown(self, text: str) -> None:
        """Show a whole text of the model."""
        from palaestra_chat.terminal.markdown import rendered

        self.settle()
        self.scrollback.write(rendered(printable(text), self.scrollback.columns))

    def whole(self, number: int | None) -> str:
        """Return the whole output of a call, by default of the last one. Raises `ConfigError` if there is none with
        this number."""
        from palaestra_chat.terminal.renderers import parsed, whole

        wanted = self._numbers if number is None else number
        for call in self._calls:
            if call.number == wanted:
                given = parsed(call.arguments)
                if call.name == "write_file" and isinstance(given, dict):
                    return str(given.get("content") or "")
                return "".join(call.output) or whole(call.result)
        numbers = f"1 to {self._numbers}" if self._numbers else "none yet"
        raise ConfigError(f"there is no output {wanted}; the numbers of this chat's tool calls are {numbers}")

    def show(self, event: Event) -> None:
        """Show one event of a turn."""
        from palaestra_chat import turn_events

        if isinstance(event, turn_events.TextDelta):
            self._answer(printable(event.text))
        elif isinstance(event, turn_events.ReasoningDelta):
            self.live.do("thinking")
            self.live.count(event.text)
            self._thought += printable(event.text)
        elif isinstance(event, turn_events.ReplyRestarted):
            self.line(f"{DIM}{event.text}{PLAIN}")
        elif isinstance(event, turn_events.UserMessage):
            self.said(event.text)
        elif isinstance(event, turn_events.ToolBegun):
            self._begun(event)
        elif isinstance(event, turn_events.ToolOutput):
            call = self._find_call(event.call_id)
            if call is not None:
                call.add(event.text)
            self.live.output(event.text)
        elif isinstance(event, turn_events.ToolEnded):
            self._result(event)
        elif isinstance(event, turn_events.TurnEnded):
            self._end_turn(event)

    def settle(self) -> None:
        """Write what is pending, because something else follows."""
        if self._thought:
            thought, self._thought = self._thought, ""
            self.scrollback.write("".join(f"{DIM}{line}{PLAIN}\n" for line in thought.strip("\n").split("\n")))
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self.scrollback.write(stream.end(self.scrollback.columns))

    def _answer(self, text: str) -> None:
        from palaestra_chat.terminal.markdown import MarkdownStream

        if self._stream is None:
            self.settle()
            self._stream = MarkdownStream()
        self.live.do("writing")
        self.live.count(text)
        self.scrollback.write(self._stream.feed(text, self.scrollback.columns))

    def _begun(self, event: ToolBegun) -> None:
        self._numbers += 1
        call = _Call(self._numbers, event.name, event.arguments, event.preview)
        call.result = event.call_id  # until the result replaces it
        self._calls.append(call)
        self.live.counted()
        self.live.do(f"{event.name} {one_line(event.preview, 40)}")
        preview = "" if event.name == "todo" else f" {escaped(event.preview)}"
        self.line(f"{CYAN}● {escaped(event.name)}{PLAIN}{preview}")

    def _find_call(self, call_id: str) -> _Call | None:
        return next((call for call in reversed(self._calls) if call.result == call_id), None)

    def _result(self, event: ToolEnded) -> None:
        from palaestra_chat.terminal import renderers

        call = self._find_call(event.call_id)
        self.live.clear_tail()
        self.live.do("waiting for the model")
        if call is None:
            return
        call.result = event.text
        lines = []
        if call.output:
            lines = renderers.last_lines("".join(call.output).rstrip("\n").split("\n"), call.number)
            reply = renderers.parsed(event.text)
            code = reply.get("exit_code") if isinstance(reply, dict) else None
            if isinstance(code, int) and code and not event.error:
                lines.append(f"{YELLOW}  exit code {code}{PLAIN}")
        elif not event.error:
            lines = renderers.result_lines(call.name, call.arguments, event.text, call.number)
        if event.error:
            self.line("\n".join(lines))
            self.prose(f"{RED}  ✗ {one_line(event.error, 300)}{PLAIN}")
        else:
            self.line("\n".join(lines))

    def _end_turn(self, event: TurnEnded) -> None:
        from palaestra_chat.turn_events import INTERRUPTED, NATURAL

        self.settle()
        if event.outcome == INTERRUPTED:
            self.line(f"{YELLOW}interrupted{PLAIN}")
        elif event.outcome != NATURAL:
            self.line(f"{RED}{printable(event.outcome)}: {printable(event.error)}{PLAIN}")
