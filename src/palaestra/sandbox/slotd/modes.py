"""Requests beyond one command of one call: shells that go on, shells that wait, background processes, terminals.

    op          fields                                              RESULT
    spawn       argv | command, cwd, env, terminal, stdin           process, pid, … (`Background.fields`)
    output      process, cursor, max_bytes, wait_s                  start, …, and the bytes
    wait        process, wait_s                                     …
    input       process, close, and the bytes                       written
    signal      process, signal
    resize      process, rows, columns
    kill        process, grace_s                                    …, swept: when everything it started is dead
    processes                                                       processes: one object each
    dismiss     process                                             the process is killed and forgotten
    shell       cwd, env                                            shell
    run         shell, command, …: as exec                          as exec, of a shell that goes on
    close_shell shell

All carry the lease. `output`, `wait` and `input` can be cancelled; they are then answered with what there is.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable

from . import files
from .background import Background
from .executions import Request
from .frames import USUAL_OUTPUT_BYTES, USUAL_TIMEOUT_S, Fields, Frame, Kind
from .link import Link
from .loop import Loop
from .orders import Kind as ReportKind
from .orders import Report
from .shells import Shell, ShellBusy
from .slots import Slot, State, start_error
from .spills import Shelf, Spill
from .transfers import Conversation
from .workshop import Place

MAX_PROCESSES = 64
"""Per slot, ended ones included; the oldest ended one gives way."""

MAX_SHELLS = 16

_FIRST_CHILD = 1 << 31
"""Above the numbers of requests, which name the commands of one call."""


class _Modes:
    """What one slot has of all this."""

    def __init__(self, slot: Slot, shelf: Shelf) -> None:
        self.slot, self.shelf = slot, shelf
        self.processes: dict[int, Background] = {}
        self.shells: dict[int, Shell] = {}


class ModeRequests:
    """Serves the requests above. `leased` finds the slot a request names, `locate` a path of a slot for writing."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        talks: dict[int, Conversation],
        leased: Callable[[Frame], Slot],
        locate: Callable[[Slot, str], Place],
    ) -> None:
        self._loop, self._link, self._talks, self._leased, self._locate = loop, link, talks, leased, locate
        self._numbers = itertools.count(_FIRST_CHILD)
        self._modes: dict[str, _Modes] = {}
        operations: dict[str, Callable[[Frame], None]] = {
            "spawn": self._spawn, "output": self._output, "wait": self._wait, "input": self._input,
            "signal": self._signal, "resize": self._resize, "kill": self._kill, "processes": self._list,
            "dismiss": self._dismiss, "shell": self._shell, "run": self._run, "close_shell": self._close_shell,
        }  # fmt: skip
        self.operations = {name: _checked(operation) for name, operation in operations.items()}

    def spill(self, slot: Slot, number: int, request: Request) -> Spill:
        """What takes a command's output beyond its bound."""
        return Spill(self._of(slot).shelf, f"{number}", request.max_output_bytes)

    # Background processes

    def _spawn(self, frame: Frame) -> None:
        modes, fields = self._of(self._leased(frame)), frame.fields
        self._make_room(modes)
        process = Background(next(self._numbers), modes.slot, self._loop, self._link, self._talks, modes.shelf)

        def started(error: Fields | None) -> None:
            if error is None:
                modes.processes[process.name] = process
                self._reply(frame, process.fields())
            else:
                self._link.send(Kind.ERROR, frame.request, error)

        argv = fields.get("argv") or [f"/bin/{modes.slot.shell()}", "-c", fields["command"]]
        size = fields["terminal"] and (fields["terminal"][0], fields["terminal"][1])
        env = modes.slot.with_variables(fields["env"])
        process.start(argv, files.absolute(fields["cwd"]), env, size, fields["stdin"], started)

    def _make_room(self, modes: _Modes) -> None:
        if len(modes.processes) >= MAX_PROCESSES:
            ended = next((process.name for process in modes.processes.values() if process.over), None)
            if ended is None:
                raise OSError(
                    errno.EAGAIN, f"{MAX_PROCESSES} background processes run in the slot already; end one first"
                )
            del modes.processes[ended]

    def _output(self, frame: Frame) -> None:
        fields = frame.fields
        self._process(frame).read(frame.request, fields["cursor"], fields["max_bytes"], fields["wait_s"])

    def _wait(self, frame: Frame) -> None:
        self._process(frame).wait(frame.request, frame.fields["wait_s"])

    def _input(self, frame: Frame) -> None:
        self._process(frame).write(frame.request, frame.data, frame.fields["close"])

    def _signal(self, frame: Frame) -> None:
        self._process(frame).signal(frame.fields["signal"])
        self._reply(frame)

    def _resize(self, frame: Frame) -> None:
        self._process(frame).resize(frame.fields["rows"], frame.fields["columns"])
        self._reply(frame)

    def _kill(self, frame: Frame) -> None:
        self._process(frame).kill(frame.request, frame.fields["grace_s"])

    def _dismiss(self, frame: Frame) -> None:
        process = self._process(frame)
        del self._of(self._leased(frame)).processes[process.name]
        process.kill(frame.request)

    def _list(self, frame: Frame) -> None:
        modes = self._of(self._leased(frame))
        self._reply(frame, {"processes": [process.fields() for process in modes.processes.values()]})

    # Shells

    def _shell(self, frame: Frame) -> None:
        modes, fields = self._of(self._leased(frame)), frame.fields
        if len(modes.shells) >= MAX_SHELLS:
            raise OSError(errno.EAGAIN, f"{MAX_SHELLS} shells are open in the slot already; close one first")
        name = next(self._numbers)
        shell = Shell(
            modes.slot, self._loop, self._link, self._numbers, self._talks,
            files.absolute(fields["cwd"]), modes.slot.with_variables(fields["env"]),
        )  # fmt: skip
        modes.shells[name] = shell
        self._reply(frame, {"shell": name})

    def _run(self, frame: Frame) -> None:
        modes, fields = self._of(self._leased(frame)), frame.fields
        shell = modes.shells.get(fields["shell"])
        if shell is None:
            raise OSError(errno.ESRCH, "the shell has been closed")
        request = Request(
            argv=[], shell=shell.kind, cwd="", env=modes.slot.environment, stdin=frame.data,
            timeout_s=fields.get("timeout_s", USUAL_TIMEOUT_S),
            max_output_bytes=fields.get("max_output_bytes", USUAL_OUTPUT_BYTES),
            stream="stream" in fields, verdict=False, spill=True,
        )  # fmt: skip
        try:
            command = _bytes(fields["command"])
            open_spill = functools.partial(self.spill, modes.slot, frame.request, request)
            shell.run(request, frame.request, command, open_spill)
        except ShellBusy as error:
            raise OSError(errno.EBUSY, str(error)) from None
        except ValueError:  # as when a fresh shell is given the same
            invalid = start_error(Report(ReportKind.NOT_STARTED, value=errno.EINVAL))
            self._link.send(Kind.ERROR, frame.request, invalid)

    def _close_shell(self, frame: Frame) -> None:
        shell = self._of(self._leased(frame)).shells.pop(frame.fields["shell"], None)
        if shell is not None:
            shell.close()
        self._reply(frame)

    # Look-ups

    def _process(self, frame: Frame) -> Background:
        process = self._of(self._leased(frame)).processes.get(frame.fields["process"])
        if process is None:
            raise OSError(errno.ESRCH, "no such process of this slot; it may have been forgotten after its end")
        return process

    def _of(self, slot: Slot) -> _Modes:
        modes = self._modes.get(slot.lease.name)
        if modes is None:
            self._modes = {name: old for name, old in self._modes.items() if old.slot.state is not State.DEAD}
            shelf = Shelf(lambda path: self._locate(slot, path))
            modes = self._modes[slot.lease.name] = _Modes(slot, shelf)
        return modes

    def _reply(self, frame: Frame, fields: Fields | None = None) -> None:
        self._link.send(Kind.RESULT, frame.request, fields)


def _checked(operation: Callable[[Frame], None]) -> Callable[[Frame], None]:
    """What no system call takes is the caller's error, not the server's."""

    def checked(frame: Frame) -> None:
        try:
            operation(frame)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None

    return checked


def _bytes(command: str) -> bytes:
    data = command.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError("a command cannot hold a NUL character")
    return data
