"""Requests for processes that outlive a call, with or without a terminal.

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

All carry the lease. `output`, `wait` and `input` can be cancelled; they are then answered with what there is.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from .. import files
from ..exec.background import Background
from ..protocol.connection import Link
from ..protocol.frames import Fields, Frame, Kind
from ..server_slot import Slot
from .command_requests import invalid

MAX_PROCESSES = 64
"""Per slot, ended ones included; the oldest ended one gives way."""


class BackgroundRequests:
    """Serves the requests above. `leased` finds the slot a request names; `numbers` names processes."""

    def __init__(
        self,
        link: Link,
        leased: Callable[[Frame], Slot],
        numbers: Iterator[int],
    ) -> None:
        self._link, self._leased, self._numbers = link, leased, numbers
        operations: dict[str, Callable[[Frame], None]] = {
            "spawn": self._spawn, "output": self._output, "wait": self._wait, "input": self._input,
            "signal": self._signal, "resize": self._resize, "kill": self._kill, "processes": self._list,
            "dismiss": self._dismiss,
        }  # fmt: skip
        self.operations = {name: _checked(operation) for name, operation in operations.items()}

    def _spawn(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        _make_room(slot.processes)
        commands = slot.commands
        process = Background(next(self._numbers), commands, slot.requests.shelf)

        def started(error: Fields | None) -> None:
            if error is None:
                slot.processes[process.name] = process
                self._reply(frame, process.fields())
            else:
                self._link.send(Kind.ERROR, frame.request, error)

        argv = fields.get("argv") or [f"/bin/{commands.shell()}", "-c", fields["command"]]
        size = fields["terminal"] and (fields["terminal"][0], fields["terminal"][1])
        env = commands.with_variables(fields["env"])
        process.start(argv, files.absolute(fields["cwd"]), env, size, fields["stdin"], started)

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
        del self._leased(frame).processes[process.name]
        process.kill(frame.request)

    def _list(self, frame: Frame) -> None:
        processes = self._leased(frame).processes
        self._reply(frame, {"processes": [process.fields() for process in processes.values()]})

    def _process(self, frame: Frame) -> Background:
        process = self._leased(frame).processes.get(frame.fields["process"])
        if process is None:
            raise OSError(errno.ESRCH, "no such process of this slot; it may have been forgotten after its end")
        return process

    def _reply(self, frame: Frame, fields: Fields | None = None) -> None:
        self._link.send(Kind.RESULT, frame.request, fields)


def _make_room(processes: dict[int, Background]) -> None:
    if len(processes) >= MAX_PROCESSES:
        ended = next((process.name for process in processes.values() if process.over), None)
        if ended is None:
            raise OSError(errno.EAGAIN, f"{MAX_PROCESSES} background processes run in the slot already; end one first")
        del processes[ended]


def _checked(operation: Callable[[Frame], None]) -> Callable[[Frame], None]:
    def call(frame: Frame) -> None:
        try:
            operation(frame)
        except ValueError as error:
            raise invalid(error) from None

    return call
