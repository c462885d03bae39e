"""A shell that goes on: directory, variables and functions of one command are there for the next.

It is an interactive shell without a terminal. Its own input is a pipe from the server, so that it comes back to the
top after SIGINT, an error or a syntax error, whatever the command was in the middle of. For each command it gets two
lines: the first runs a memory file that holds the command, as if its text stood there; the second reports the exit
status with the command's number on a descriptor of its own. Nothing is looked for in the output. Every word of these
lines costs each command: what can be found out from outside is not asked of the shell, and a descriptor that is there
(its errors between commands go to /dev/null) is not opened anew.

A command that runs out of time is interrupted; what it has started is killed; the shell lives on if it came back in
time, and is killed otherwise. A shell that is gone (also by `exit`, `exec`, `set -e`) is started anew for the next
command, and the result says `shell_restarted`: of the command that ended it, or of the next one when it died between.

Not for verdicts: a command shares the shell with all before it, and can write to the status descriptor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..protocol import command_result
from ..protocol.frames import Fields, Frame, Kind
from ..protocol.init_messages import Environment, Report, Spawn
from ..protocol.init_messages import Kind as ReportKind
from . import pipes, process_tree
from .command import Execution, Request, Timer
from .output import Capture, Spill
from .supervisor import Commands, start_error

INTERRUPT_EVERY_S, INTERRUPTS = 0.25, 4
"""How long a shell has to come back after a SIGINT, and how many it gets. bash passes over one that comes just when a
program of the command ends by itself, and goes on with the next."""

_MAX_PID = 1 << 22
_BETWEEN_BYTES = 64 << 10
"""How much of what background jobs write between two commands is kept for the second."""

LOOK_EVERY_S = 0.005
"""How long what background jobs write next waits to be read, while no command runs."""


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How one shell is started and spoken to. The numbers are descriptors: input, command, status, errors."""

    argv: list[str]
    places: tuple[int, int, int, int]
    greeting: str


_BASH = _Dialect(
    ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"],
    (96, 97, 98, 99),
    "set +o history +H; unset HISTFILE MAILCHECK\n",
)
_SH = _Dialect(["/bin/sh", "-i"], (6, 7, 8, 9), "")
_REPORT = '__slot(){{ printf " $1 $2\\n" >&{status}; return "$2"; }}\n'
_TELL = b'__slot %d "$?"\n'
_RUN = b". /proc/self/fd/%d <%b 2>&%d\n" + _TELL


class ShellBusy(Exception):
    """A shell runs one command at a time."""


class Shell:
    """One shell of a slot; started with the first command. Implements `Child` for the process and `Conversation`."""

    def __init__(self, commands: Commands, numbers: Iterator[int], cwd: str, env: Environment) -> None:
        self._commands, self._loop, self._numbers = commands, commands.loop, numbers
        self._cwd, self._env = cwd, env
        self.kind = commands.shell()
        self._dialect = _BASH if self.kind == "bash" else _SH
        self._process: int | None = None
        self._input, self._command = pipes.Memory(), pipes.Memory()
        self._control = self._status = self._output = -1
        self._between = Capture(_BETWEEN_BYTES)
        self._pausing = False
        """Whether what comes between commands is not looked at just now."""
        self._execution: Execution | None = None
        self._lost = False
        self._sequence = 0
        self._after: process_tree.Noted
        self._patience: Timer | None = None

    def run(self, request: Request, number: int, command: bytes, open_spill: Callable[[], Spill]) -> None:
        """Run a command; its RESULT follows. Raises `ShellBusy`."""
        if self._execution is not None:
            raise ShellBusy("the shell is busy with another command")
        if self._process is None:
            self._start()
        self._command.put(command)
        source = b"&2"
        stdin, file, _, errors = self._dialect.places
        if request.stdin:
            self._input.put(request.stdin)
            source = b"/proc/self/fd/%d" % stdin
        self._after = process_tree.note()
        self._sequence += 1
        self._say(_RUN % (file, source, errors, self._sequence))
        pipe = (self._output, -1)
        execution = Execution(
            number, request, self._loop, self._commands.link, self._interrupt, self._hear, pipe, open_spill=open_spill
        )
        self._execution, self._output = execution, -1
        self._commands.talks[number] = self
        if self._between.total:
            before, self._between = self._between, Capture(_BETWEEN_BYTES)
            for part in before.parts():
                execution.take(part)
        execution.start()

    def on_frame(self, frame: Frame) -> None:
        """The client gives credit for more output, or has given the command up."""
        if self._execution is not None and frame.request == self._execution.number:
            if frame.kind is Kind.CANCEL:
                self._execution.cancel()
            elif frame.kind is Kind.CREDIT:
                self._execution.give_credit(frame.fields["bytes"])

    def close(self) -> None:
        """End the shell; what it runs in the background stays."""
        if self._process is not None:
            self._commands.kill_child(self._process, (process_tree.moment(process_tree.note())[0], _MAX_PID))

    def on_report(self, report: Report) -> None:
        """The shell's process has ended, or what was to be killed is dead."""
        if report.kind is ReportKind.KILLED:
            if self._execution is not None and self._execution.ended:
                self._execution.on_killed(report.flag)
                self._finish()
            if report.command != self._process:
                self._commands.drop(report.command)
            return
        if report.kind is ReportKind.EXIT:
            self._read_status()  # it may have ended the command before it ended itself
        self._discard()
        if report.kind is ReportKind.NOT_STARTED:
            self._commands.drop(report.command)
            self._fail(start_error(report, self._cwd))
            return
        self._lost = True
        execution = self._execution
        if execution is None or execution.in_question or execution.on_exit(report):
            self._commands.drop(report.command)
            self._finish()

    def on_lost(self) -> None:
        """The slot is gone."""
        self._discard()
        self._fail({"error": "lost", "message": f"{self._commands.name} ended while a command ran in its shell"})

    def descriptors(self) -> tuple[int, ...]:
        """What is open here while it lives."""
        if self._process is None:
            return ()
        running = () if self._execution is None else self._execution.descriptors()
        return self._control, self._status, self._output, self._input.fd, self._command.fd, *running

    def _start(self) -> None:
        """Raises OSError and ValueError, and has started nothing then."""
        self._process = next(self._numbers)
        stdin, command, report, errors = self._dialect.places
        places = [(0, 0), (1, 1), (2, 2), (3, stdin), (4, command), (5, report), (1, errors)]
        control = status = output = -1
        try:
            self._input.open()
            self._command.open()
            control, self._control = pipes.input_pipe()
            self._status, status = pipes.pipe()
            self._output, output = pipes.pipe()
            fds = [control, output, pipes.nothing(), self._input.fd, self._command.fd, status]
            spawn = Spawn(self._process, self._dialect.argv, self._cwd, self._env, places)
            self._commands.spawn(self, spawn, fds)
        except (OSError, ValueError):
            self._discard()
            raise
        finally:
            pipes.close(control, status, output)
        self._loop.watch(self._status, self._read_status)
        self._listen_between()
        self._say((self._dialect.greeting + _REPORT.format(status=report)).encode())

    def _say(self, lines: bytes) -> None:
        """A shell that does not read its lines is dying, and its end will be reported."""
        try:  # noqa: SIM105 - once per command, and the shorter form costs three calls
            os.write(self._control, lines)
        except (BrokenPipeError, BlockingIOError):
            pass

    def _read_status(self) -> None:
        """Lines of `number status`; what a command of the slot may have written there by mistake is passed over."""
        data = pipes.read(self._status) if self._status >= 0 else None
        if data == b"":
            self._loop.unwatch(self._status)
        for line in (data or b"").splitlines():
            words = line.split()[-2:]
            if len(words) == 2 and words[0] == b"%d" % self._sequence and words[1].isdigit():
                self._on_status(int(words[1]))

    def _on_status(self, code: int) -> None:
        execution = self._execution
        if execution is None or execution.ended:
            return
        if execution.on_exit(Report(ReportKind.EXIT, value=code)):
            self._finish()
        elif self._stop_waiting() and self._process is not None:
            self._commands.kill_child(self._process, process_tree.inside(self._commands.pid, self._after), spare=True)

    def _interrupt(self, times: int = INTERRUPTS) -> None:
        """The command's time is over, or its caller has gone: interrupt it so often, then kill it with its shell."""
        self._patience = None
        if self._process is None:
            return
        if times == INTERRUPTS:  # many a shell ends by it: one that is just starting, or has become the command itself
            self._commands.kill_at_end(self._process, process_tree.inside(self._commands.pid, self._after))
        if not times:
            self._commands.kill_child(self._process, process_tree.inside(self._commands.pid, self._after))
            return
        self._commands.signal(self._process, signal.SIGINT)
        self._say(_TELL % self._sequence)  # some shells forget the lines they have read ahead
        self._patience = self._loop.later(INTERRUPT_EVERY_S, lambda: self._interrupt_again(times - 1))

    def _interrupt_again(self, times: int) -> None:
        self._hear()
        if self._patience is not None:  # it has not come back
            self._interrupt(times)

    def _hear(self) -> None:
        """Take what the shell and the init have said already."""
        self._read_status()
        self._commands.hear()

    def _finish(self) -> None:
        if self._execution is not None and not self._execution.in_question:
            restarted, self._lost = self._lost, False
            flags = command_result.STATEFUL | (command_result.RESTARTED if restarted else 0)
            self._commands.conclude(self._execution, flags, self._put_away)

    def _put_away(self, execution: Execution) -> None:
        """It is over."""
        self._execution = None
        self._stop_waiting()
        self._commands.talks.pop(execution.number, None)
        if execution.leftover is not None:
            if self._process is None:
                self._commands.empty(execution.leftover)
            else:
                self._output = execution.leftover
                self._listen_between()

    def _fail(self, fields: Fields) -> None:
        if self._execution is not None:
            execution, self._execution = self._execution, None
            self._stop_waiting()
            self._commands.talks.pop(execution.number, None)
            execution.fail(fields)

    def _read_between(self) -> None:
        """What background jobs write while no command runs belongs to the next command's output, as on a terminal.

        Nobody waits for it, so a flood is not worth the loop's time.
        """
        data = pipes.read(self._output)
        if data is None:
            return
        self._loop.unwatch(self._output)
        if data:
            self._between.add(data)
            self._pausing = True
            self._loop.later(LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._pausing = False
        self._listen_between()

    def _listen_between(self) -> None:
        if self._output >= 0 and not self._pausing:
            self._loop.watch_soon(self._output, self._read_between)

    def _stop_waiting(self) -> bool:
        """Whether the shell still had time to come back."""
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.cancel()
        return patience is not None

    def _discard(self) -> None:
        """Forget the process; the next command gets a new one."""
        self._input.close()
        self._command.close()
        for fd in (self._status, self._output):
            if fd >= 0:
                self._loop.unwatch(fd)
        pipes.close(self._control, self._status, self._output)
        self._process, self._control, self._status, self._output = None, -1, -1, -1
