"""Runs stateful shells: each command keeps the directory, variables and functions of the previous one. Serves these
requests:

    op          fields                                                      RESULT
    shell       cwd, env                                                    shell
    run         shell, command, timeout_s, max_output_bytes, stream,        the same as for `exec`
                no_spill, and the input's bytes
    close_shell shell

A shell runs in interactive mode, but without a terminal. Its own input is a pipe from this process, so that the shell
returns to its prompt after SIGINT, an error or a syntax error. For each command the shell gets two lines: the first
sources a memory file with the command; the second reports the exit status and the command's number on a separate
descriptor. The lines are short, since each word costs time for every command; errors between commands go to a
descriptor that is already open.

A command that exceeds its time limit is interrupted, and its processes are killed. If the shell returns to its prompt
in time, it is kept; otherwise it is killed. If a shell has ended (for example by `exit`, `exec` or `set -e`), the next
command starts a new shell. `shell_restarted` is set in the result of the command that ended the shell or, if the shell
died between two commands, in the result of the second.

Commands of a shell never have a verdict channel. A command could not be trusted with one, because earlier commands may
have changed the shell that runs it, and every command can write to the status descriptor.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from .. import files
from ..event_loop import Timer
from ..protocol import frames
from ..protocol.frames import Fields, Frame, FrameKind
from ..protocol.init_messages import EnvBlock, InitReport, ReportKind, Spawn
from . import pipes, process_tree
from .execution import CommandPipes, CommandSpec, Execution, command_spec
from .pipes import Capture
from .supervisor import Supervisor, start_error

MAX_SHELLS = 16
# The seconds that a shell has to return after a SIGINT, and the number of SIGINTs that it gets. bash ignores a SIGINT
# that comes just when a program of the command ends by itself, and continues with the next program.
INTERRUPT_EVERY_S, INTERRUPTS = 0.25, 4
_MAX_PID = 1 << 22
_BETWEEN_BYTES = 64 << 10  # the most bytes of background output between two commands that are kept for the second
LOOK_EVERY_S = 0.005  # the seconds between reads of background output while no command runs


class ShellProcesses:
    """The stateful shells of one slot. `numbers` yields names for the shells and their processes."""

    def __init__(self, supervisor: Supervisor, numbers: Iterator[int]) -> None:
        self._supervisor, self._numbers = supervisor, numbers
        self._shells: dict[int, ShellProcess] = {}

    def open(self, frame: Frame) -> None:
        """Serve a `shell` request. Raises OSError."""
        if len(self._shells) >= MAX_SHELLS:
            raise OSError(errno.EAGAIN, f"{MAX_SHELLS} shells are already open in the slot; close one first")
        try:
            cwd, env = files.absolute(frame.fields["cwd"]), self._supervisor.with_variables(frame.fields["env"])
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        name = next(self._numbers)
        self._shells[name] = ShellProcess(self._supervisor, self._numbers, cwd, env)
        self._supervisor.send(FrameKind.RESULT, frame.request, {"shell": name})

    def run(self, frame: Frame) -> None:
        """Serve a `run` request. Raises OSError."""
        shell = self._shells.get(frame.fields["shell"])
        if shell is None:
            raise OSError(errno.ESRCH, "the shell has been closed")
        try:
            command = frame.fields["command"].encode("utf-8", "surrogateescape")
            if b"\0" in command:
                raise ValueError("a command cannot contain a NUL character")
            shell.run(frame.request, command_spec(frame, [], shell.kind, "", self._supervisor.environment), command)
        except ValueError:  # a NUL or a lone surrogate
            self._supervisor.refuse(frame.request)

    def close(self, frame: Frame) -> None:
        """Serve a `close_shell` request."""
        shell = self._shells.pop(frame.fields["shell"], None)
        if shell is not None:
            shell.close()
        self._supervisor.send(FrameKind.RESULT, frame.request)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Describes how one kind of shell is started and controlled. `places` are the descriptors for input, command,
    status and errors."""

    argv: list[str]
    places: tuple[int, int, int, int]
    greeting: str


# dash reads only one digit in front of a redirection, so its descriptors are below 10. Those of bash are far above the
# numbers that scripts use and that bash takes for itself.
_BASH = _Dialect(
    ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"],
    (96, 97, 98, 99),
    # An interactive bash would replace `!` in commands, write them to a file in the home, and look for mail.
    "set +o history +H; unset HISTFILE MAILCHECK\n",
)
_SH = _Dialect(["/bin/sh", "-i"], (6, 7, 8, 9), "")
# It returns the status again, so that `$?` is still the command's in the next command.
_REPORT = '__slot(){{ printf " $1 $2\\n" >&{status}; return "$2"; }}\n'
_TELL = b'__slot %d "$?"\n'
_RUN = b". /proc/self/fd/%d <%b 2>&%d\n" + _TELL


class ShellProcess:
    """One shell, which is started for its first command. Implements `Child` for its process and `OpenRequest` for
    commands."""

    def __init__(self, supervisor: Supervisor, numbers: Iterator[int], cwd: str, env: EnvBlock) -> None:
        self._supervisor, self._loop, self._numbers = supervisor, supervisor.loop, numbers
        self._cwd, self._env = cwd, env
        self.kind = supervisor.shell_name()
        self._dialect = _BASH if self.kind == "bash" else _SH
        self._process: int | None = None
        self._input, self._command = pipes.MemoryFile(), pipes.MemoryFile()
        self._control = self._status = self._output = -1
        self._between = Capture(_BETWEEN_BYTES)
        self._pausing = False  # whether watching the output between commands is paused
        self._execution: Execution | None = None
        self._restarted = False
        self._sequence = 0
        self._after: process_tree.Noted
        self._patience: Timer | None = None

    def run(self, number: int, spec: CommandSpec, command: bytes) -> None:
        """Run a command; its RESULT follows. Raises OSError, and ValueError for invalid words."""
        if self._execution is not None:
            raise OSError(errno.EBUSY, "the shell is busy with another command")
        if self._process is None:
            self._start_shell()
        self._command.put(command)
        # Descriptor 2 of the shell itself is /dev/null: prompts and notices about jobs go there, and commands without
        # input read from it.
        source = b"&2"
        stdin, file, _, errors = self._dialect.places
        if spec.stdin:
            self._input.put(spec.stdin)
            source = b"/proc/self/fd/%d" % stdin
        # Noted before the shell gets the command; otherwise a kill would spare the first processes of the command as
        # older.
        self._after = process_tree.note()
        self._sequence += 1
        self._say(_RUN % (file, source, errors, self._sequence))
        supervisor, ends = self._supervisor, CommandPipes(self._output, -1)
        execution = Execution(
            number, spec, self._loop, supervisor.send, self._interrupt, self._receive_all, ends, supervisor.shelf
        )
        self._execution, self._output = execution, -1
        supervisor.open_requests[number] = self
        if self._between.total:
            before, self._between = self._between, Capture(_BETWEEN_BYTES)
            for part in before.parts():
                execution.take(part)
        execution.start()

    def on_frame(self, frame: Frame) -> None:
        """Handle the client's request to send more output or to cancel the command."""
        if self._execution is not None and frame.request == self._execution.number:
            if frame.kind is FrameKind.CANCEL:
                self._execution.cancel()
            elif frame.kind is FrameKind.CREDIT:
                self._execution.give_credit(frame.fields["bytes"])

    def close(self) -> None:
        """End the shell; its background jobs keep running."""
        if self._process is not None:
            # Every other living process is older than this moment, so only the shell is killed.
            now = process_tree.moment(process_tree.note())[0], _MAX_PID
            self._supervisor.kill_child(self._process, now)

    def on_report(self, report: InitReport) -> None:
        """Handle a report: the shell's process has ended, or the killed processes are dead."""
        if report.kind is ReportKind.KILLED:
            if self._execution is not None and self._execution.ended:
                self._execution.on_killed(report.flag)
                self._finish_execution()
            if report.command != self._process:
                self._supervisor.drop(report.command)
            return
        if report.kind is ReportKind.EXIT:
            self._read_status()  # the command may have ended before the shell did
        self._discard()
        if report.kind is ReportKind.NOT_STARTED:
            self._supervisor.drop(report.command)
            self._fail(start_error(report, self._cwd))
            return
        self._restarted = True
        # While the command is being killed, KILLED is still to come, and the result is sent then.
        execution = self._execution
        if execution is None or execution.awaiting_oom or execution.on_exit(report):
            self._supervisor.drop(report.command)
            self._finish_execution()

    def on_lost(self) -> None:
        self._discard()
        owner = self._supervisor.owner
        self._fail({"error": owner.loss, "message": f"{owner.name} ended while a command ran in its shell"})

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the shell has open in this process while it lives."""
        if self._process is None:
            return ()
        running = () if self._execution is None else self._execution.descriptors()
        return self._control, self._status, self._output, self._input.fd, self._command.fd, *running

    def _start_shell(self) -> None:
        """Start the shell. If this raises OSError or ValueError, nothing was started."""
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
            self._supervisor.spawn(self, spawn, fds)
        except (OSError, ValueError):
            self._discard()
            raise
        finally:
            pipes.close(control, status, output)
        self._loop.watch(self._status, self._read_status)
        self._listen_between()
        self._say((self._dialect.greeting + _REPORT.format(status=report)).encode())

    def _say(self, lines: bytes) -> None:
        """Write lines to the shell. A shell that does not read them is dying, and its end will be reported."""
        try:  # noqa: SIM105 - runs for every command, and the shorter form costs three calls
            os.write(self._control, lines)
        except (BrokenPipeError, BlockingIOError):
            pass

    def _read_status(self) -> None:
        """Read lines with a command's number and exit status. Ignore anything else that a command may have written to
        the status descriptor."""
        data = pipes.read(self._status) if self._status >= 0 else None
        if data == b"":
            self._loop.unwatch(self._status)
        for line in (data or b"").splitlines():
            # What a command has written there without a line end is at the start of the same line.
            words = line.split()[-2:]
            if len(words) == 2 and words[0] == b"%d" % self._sequence and words[1].isdigit():
                self._on_status(int(words[1]))

    def _on_status(self, code: int) -> None:
        execution = self._execution
        if execution is None or execution.ended:
            return
        if execution.on_exit(InitReport(ReportKind.EXIT, value=code)):
            self._finish_execution()
        # The shell is back at its prompt after the interrupt, so it stays, and only what its command has left is
        # killed.
        elif self._stop_waiting() and self._process is not None:
            self._supervisor.kill_child(self._process, self._since(), spare=True)

    def _since(self) -> process_tree.Moment:
        """Return the start of the current command, as the slot's init sees it."""
        return process_tree.inside(self._supervisor.owner.pid, self._after)

    def _interrupt(self, times: int = INTERRUPTS) -> None:
        """End the command: interrupt it a few times, then kill it with its shell."""
        self._patience = None
        if self._process is None:
            return
        # the signal ends some shells: those that are just starting, or that the command has replaced (`exec`)
        if times == INTERRUPTS:
            self._supervisor.kill_at_end(self._process, self._since())
        if not times:
            self._supervisor.kill_child(self._process, self._since())
            return
        self._supervisor.signal(self._process, signal.SIGINT)
        self._say(_TELL % self._sequence)  # sent again, because some shells forget the lines that they have read ahead
        self._patience = self._loop.later(INTERRUPT_EVERY_S, lambda: self._interrupt_again(times - 1))

    def _interrupt_again(self, times: int) -> None:
        # If the loop was blocked, the shell may have returned without being noticed.
        self._receive_all()
        if self._patience is not None:  # the shell has not returned
            self._interrupt(times)

    def _receive_all(self) -> None:
        """Handle all reports of the shell and the init."""
        self._read_status()
        self._supervisor.receive_all()

    def _finish_execution(self) -> None:
        if self._execution is not None and not self._execution.awaiting_oom:
            restarted, self._restarted = self._restarted, False
            flags = frames.STATEFUL | (frames.RESTARTED if restarted else 0)
            self._supervisor.finish(self._execution, flags, self._put_away)

    def _put_away(self, execution: Execution) -> None:
        self._execution = None
        self._stop_waiting()
        self._supervisor.open_requests.pop(execution.number, None)
        if execution.leftover is not None:
            if self._process is None:
                self._supervisor.drain_later(execution.leftover)
            else:
                self._output = execution.leftover
                self._listen_between()

    def _fail(self, fields: Fields) -> None:
        if self._execution is not None:
            execution, self._execution = self._execution, None
            self._stop_waiting()
            self._supervisor.open_requests.pop(execution.number, None)
            execution.fail(fields)

    def _read_between(self) -> None:
        """Keep output of background jobs between commands for the next command, as a terminal would. The output is read
        at intervals, so that a flood does not keep the loop busy."""
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
        """Stop the timer of an interrupt. Returns True if the timer was running, so that the shell has returned in
        time."""
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.cancel()
        return patience is not None

    def _discard(self) -> None:
        """Forget the process; the next command starts a new one."""
        self._input.close()
        self._command.close()
        for fd in (self._status, self._output):
            if fd >= 0:
                self._loop.unwatch(fd)
        pipes.close(self._control, self._status, self._output)
        self._process, self._control, self._status, self._output = None, -1, -1, -1
