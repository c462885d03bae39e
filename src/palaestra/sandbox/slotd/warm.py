"""Shells that wait for one command each, so that a command need not wait for its shell to start.

A waiting `bash -c` has its environment, directory and pipes; it reads its command from a memory file when a line comes,
closes what it was spoken to through, runs the command and ends with it. Nothing of one command is there for the next.
What differs from a fresh `bash -c`: a syntax error is told as `eval: line N:`, and limits or a `/bin/bash` that were
changed while it waited are not seen.

Only for what it can do exactly: a command line, no input, no verdict, the directory and environment for which the
shell was started. Everything else takes a fresh shell, and the next one waits for what was asked for last.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from . import killing, pipes
from .executions import Execution, Request
from .frames import Frame, Kind
from .link import Link
from .loop import Loop
from .orders import Kind as ReportKind
from .orders import Report, Spawn
from .slots import Slot
from .spills import Spill
from .transfers import Conversation

MAX_WAITING = 8

_CONTROL, _COMMAND = 97, 98
# The command is in the variable where `bash -c` has its own.
_SCRIPT = (
    f"read -r -u {_CONTROL} BASH_EXECUTION_STRING; "
    f"IFS= read -r -d '' BASH_EXECUTION_STRING </proc/self/fd/{_COMMAND}; "
    f'exec {_CONTROL}<&- {_COMMAND}<&-; eval "$BASH_EXECUTION_STRING"'
)


class WarmShells:
    """The waiting shells of one slot, `wanted` of them."""

    def __init__(
        self, slot: Slot, loop: Loop, link: Link, numbers: Iterator[int], talks: dict[int, Conversation]
    ) -> None:
        self._slot, self._loop, self._link, self._numbers, self._talks = slot, loop, link, numbers, talks
        self._waiting: deque[_WarmShell] = deque()
        self._wanted = 0
        self._ground: tuple[str, dict[str, str]] = ("/", {})

    def keep(self, wanted: int, cwd: str, env: dict[str, str]) -> None:
        """Have so many shells wait from now on, for commands with this directory and environment."""
        self._wanted = min(wanted, MAX_WAITING) if self._slot.shell() == "bash" else 0
        self._become((cwd, env))

    def run(self, request: Request, number: int, command: str, spill: Spill | None) -> bool:
        """Run a command in a waiting shell, if one can do exactly this."""
        if not self._wanted or request.stdin or request.verdict or "BASH_ENV" in request.env or "\0" in command:
            return False
        self._become((request.cwd, request.env))
        if not self._waiting:
            return False
        self._waiting.popleft().run(request, number, command, spill)
        return True

    def refill(self) -> None:
        """Start what is missing."""
        while len(self._waiting) < self._wanted:
            shell = _WarmShell(self, self._slot, self._loop, self._link, self._talks)
            try:
                shell.start(next(self._numbers), *self._ground)
            except ValueError:
                self._wanted = 0  # an environment that no process can have
                return
            self._waiting.append(shell)

    def gone(self, shell: _WarmShell) -> None:
        """A shell has died while it waited; the next command starts another."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(shell)

    def _become(self, ground: tuple[str, dict[str, str]]) -> None:
        if ground != self._ground:
            self._ground = ground
            for shell in list(self._waiting):
                shell.dismiss()
            self._waiting.clear()
        if not self._waiting:
            self._loop.later(0, self.refill)


class _WarmShell:
    """One of them. Implements `Child` for its process and `Conversation` for its one command."""

    def __init__(self, shells: WarmShells, slot: Slot, loop: Loop, link: Link, talks: dict[int, Conversation]) -> None:
        self._shells, self._slot, self._loop, self._link, self._talks = shells, slot, loop, link, talks
        self._command = pipes.Memory()
        self._control = self._output = -1
        self._process, self._after = 0, killing.ALWAYS
        self._execution: Execution | None = None

    def start(self, process: int, cwd: str, env: dict[str, str]) -> None:
        """Start the shell; it waits."""
        self._process = process
        control, self._control = pipes.input_pipe()
        self._output, output = pipes.pipe()
        fds = [pipes.nothing(), output, control, self._command.fd]
        places = [(0, 0), (1, 1), (1, 2), (2, _CONTROL), (3, _COMMAND)]
        try:
            self._slot.spawn(self, Spawn(process, ["/bin/bash", "-c", _SCRIPT], cwd, env, places), fds)
        except ValueError:
            self._close()
            raise
        finally:
            pipes.close(control, output)

    def run(self, request: Request, number: int, command: str, spill: Spill | None) -> None:
        """Give it its command."""
        self._command.put(os.fsencode(command))
        self._after = (killing.now(), 0)  # all that its session has started, and no orphan that is older
        self._execution = Execution(number, request, self._loop, self._link, self._kill, self._output, spill)
        self._output = -1
        self._talks[number] = self
        self._execution.start()
        with contextlib.suppress(BrokenPipeError):  # its end will be reported
            os.write(self._control, b"\n")

    def dismiss(self) -> None:
        """It is not needed any more: at the end of its input it ends."""
        self._slot.drop(self._process)
        self._slot.kill_child(self._process)
        self._close()

    def on_frame(self, frame: Frame) -> None:
        """The client gives credit for more output, or has given the command up."""
        if self._execution is not None:
            if frame.kind is Kind.CANCEL:
                self._execution.cancel()
            elif frame.kind is Kind.CREDIT:
                self._execution.give_credit(frame.fields["bytes"])

    def on_report(self, report: Report) -> None:
        """Its end, or that everything it had started is dead."""
        execution = self._execution
        if execution is None:
            self._slot.drop(self._process)
            self._close()
            self._shells.gone(self)
        elif report.kind is ReportKind.KILLED:
            execution.on_killed(report.flag)
            self._finish(execution)
        elif execution.on_exit(report):
            self._finish(execution)

    def on_lost(self) -> None:
        """The slot is gone."""
        self._close()
        if self._execution is not None:
            self._talks.pop(self._execution.number, None)
            lost = f"{self._slot.lease.name} ended while a command ran in it"
            self._execution.fail({"error": "lost", "message": lost})

    def _kill(self) -> None:
        self._slot.kill_child(self._process, self._after)

    def _finish(self, execution: Execution) -> None:
        self._talks.pop(execution.number, None)
        self._slot.drop(self._process)
        self._slot.conclude(execution, warm=True)
        self._close()
        if execution.leftover is not None:
            self._slot.empty(execution.leftover)
        self._loop.later(0, self._shells.refill)

    def _close(self) -> None:
        pipes.close(self._control, self._output)
        self._control = self._output = -1
        self._command.close()
