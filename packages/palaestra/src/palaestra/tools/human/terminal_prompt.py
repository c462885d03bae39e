"""Asks a person at a terminal: before dangerous commands and calls (`Approvals`), and for `clarify`.

    person = TerminalPerson()
    ToolSession(shared=[Approvals(person.approve), User(person.answer)])

It uses the terminal for one question at a time and restores it. Invariants: silence, an interrupt (Ctrl-C), the end of
input (Ctrl-D) and anything typed before the question never count as a yes. A model's text is shown in full, with
control characters escaped, so it cannot imitate the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import escaped, quoted

T = TypeVar("T")

_ANSWERS = {
    **dict.fromkeys(("y", "yes", "once"), ApprovalAnswer.ONCE),
    **dict.fromkeys(("s", "session"), ApprovalAnswer.SESSION),
    **dict.fromkeys(("", "n", "no", "deny"), ApprovalAnswer.DENY),
}
_INTERRUPT = b"\x03"


class TerminalPerson:
    """The person at `terminal`, by default the terminal that started the process.

    A question without an answer after `timeout_s` seconds counts as refused. Raises `ConfigError` if there is no
    terminal.
    """

    def __init__(self, terminal: str | Path = "/dev/tty", *, timeout_s: float = 300.0) -> None:
        self._path = str(terminal)
        self._timeout_s = timeout_s
        self._asking = asyncio.Lock()
        try:
            with self._open_terminal() as opened:
                termios.tcgetattr(opened)
        except (OSError, termios.error) as error:
            raise ConfigError(
                f"there is nobody to ask: {self._path} is not a terminal ({error.args[-1]}). "
                "Start the program in a terminal, or answer from code: Approvals(ask), User(ask)"
            ) from None

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        """Ask whether a command or call may run, and return the answer. This method is the `ask` of `Approvals`."""
        about = escaped(
            request.question if request.tool else f"A command of task {request.task_id} {', '.join(request.dangers)}"
        )
        what = request.asked(about, quoted(request.command))
        scope = "this tool" if request.tool else "this kind"
        prompt = f"Run it? y: once, s: {scope} for the whole session, n: no [n] "
        return await self._ask_until_understood(
            what, prompt, lambda line: _ANSWERS.get(line.lower()), ApprovalAnswer.DENY
        )

    async def answer(self, question: str, choices: Sequence[str]) -> str | None:
        """Ask a question and return the answer, or None if there is none. The answer need not be one of the choices.
        This method is the `ask` of a `User`."""
        offered = "".join(f"\n  {number}: {escaped(choice)}" for number, choice in enumerate(choices, 1))

        def understood(line: str) -> str | None:
            number = int(line) if line.isascii() and line.isdigit() else 0
            return choices[number - 1] if 1 <= number <= len(choices) else line or None

        prompt = "A number, or your answer (Ctrl-C: none): " if choices else "Your answer (Ctrl-C: none): "
        return await self._ask_until_understood(f"A question:\n{quoted(question)}{offered}", prompt, understood, None)

    async def _ask_until_understood(
        self, what: str, prompt: str, understood: Callable[[str], T | None], refused: T
    ) -> T:
        """Return the value of the first line that `understood` accepts; `refused` if there is none."""
        async with self._asking:
            with (
                contextlib.suppress(OSError, termios.error),
                self._open_terminal() as terminal,
                _line_by_line(terminal),
            ):
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await _write_all(terminal, f"\n{what}\n")
                        while True:
                            await _write_all(terminal, prompt)
                            line = await _read_line(terminal)
                            if line is None:
                                await _write_all(terminal, "\n")
                                return refused
                            if (answer := understood(line.strip())) is not None:
                                return answer
                except TimeoutError:
                    termios.tcflush(terminal, termios.TCIFLUSH)  # so that no later reader gets half an answer
                    os.write(terminal, f"\nNo answer in {self._timeout_s:g} s.\n".encode())
            return refused  # also after a hang-up

    @contextlib.contextmanager
    def _open_terminal(self) -> Iterator[int]:
        # The terminal is opened anew, because O_NONBLOCK belongs to the open file description: set on an inherited one,
        # it would also apply to the shell and to all its programs.
        terminal = os.open(self._path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield terminal
        finally:
            os.close(terminal)


@contextlib.contextmanager
def _line_by_line(terminal: int) -> Iterator[None]:
    """Set the terminal, for the duration of the block, to deliver each line when it is complete, and Ctrl-C as input.
    Drop what was typed before."""
    before = termios.tcgetattr(terminal)
    termios.tcsetattr(terminal, termios.TCSANOW, _asking_mode(before))
    try:
        termios.tcflush(terminal, termios.TCIFLUSH)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _asking_mode(mode: list[int | list[bytes | int]]) -> list[int | list[bytes | int]]:
    """Return the terminal mode, changed so that the end of a line or Ctrl-C delivers the input, and Ctrl-C sends no
    signal."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, characters = mode
    assert isinstance(iflag, int)
    assert isinstance(lflag, int)
    assert isinstance(characters, list)
    ends = [*characters]
    # In canonical mode, a read returns at the end of a line. Without ISIG, Ctrl-C is an ordinary character,
    # so it must end the line to arrive before Enter.
    ends[termios.VEOL] = _INTERRUPT
    lflag = (lflag | termios.ICANON | termios.ECHO) & ~termios.ISIG
    return [iflag | termios.ICRNL, oflag, cflag, lflag, ispeed, ospeed, ends]


async def _write_all(terminal: int, text: str) -> None:
    data = text.encode(errors="replace")
    while data:
        try:
            data = data[os.write(terminal, data) :]
        except BlockingIOError:
            await _ready(terminal, writing=True)


async def _read_line(terminal: int) -> str | None:
    """Return the next line; None at an interrupt or the end of input."""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except BlockingIOError:
            await _ready(terminal)
            continue
        # In canonical mode, Ctrl-D at the beginning of a line reads as no data.
        return None if not data or _INTERRUPT in data else data.decode(errors="replace")


async def _ready(terminal: int, *, writing: bool = False) -> None:
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    ready = asyncio.Event()
    add(terminal, ready.set)
    try:
        await ready.wait()
    finally:
        remove(terminal)
