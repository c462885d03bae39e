"""Requests for commands that end, alone or in a shell that goes on.

    op          fields                                                     RESULT
    exec        command | argv, cwd, env, timeout_s, max_output_bytes,     an outcome, with its output and verdict
                stream, verdict, no_spill, and the input's bytes
    shell       cwd, env                                                   shell
    run         shell, command, …: as exec                                 as exec
    close_shell shell

Whoever gives orders to a slot's init serves them: the server, and on the rung `full` the client itself.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator

from .. import files
from ..exec.command import Request
from ..exec.output import Shelf, Spill
from ..exec.stateful_shell import Shell, ShellBusy
from ..exec.supervisor import Commands, start_error
from ..protocol.frames import USUAL_OUTPUT_BYTES, USUAL_TIMEOUT_S, Fields, Frame, Kind
from ..protocol.init_messages import Kind as ReportKind
from ..protocol.init_messages import Report

FIRST_CHILD = 1 << 31
"""Above the numbers of requests, which name the commands of one call."""

MAX_SHELLS = 16


class CommandRequests:
    """Serves those of one slot. `numbers` names shells."""

    def __init__(self, commands: Commands, shelf: Shelf, numbers: Iterator[int]) -> None:
        self.commands, self.shelf, self._numbers = commands, shelf, numbers
        self._shells: dict[int, Shell] = {}

    def serve(self, frame: Frame) -> None:
        """One request; its RESULT or ERROR is sent. Raises OSError for what cannot be begun."""
        try:
            OPERATIONS[frame.fields["op"]](self, frame)
        except ValueError as error:
            raise invalid(error) from None

    def _exec(self, frame: Frame) -> None:
        fields, commands = frame.fields, self.commands
        argv, shell, env = fields.get("argv"), None, commands.environment
        if argv is None:
            shell = "bash" if commands.has_bash else commands.shell()
            argv = [f"/bin/{shell}", "-c", fields["command"]]
        if "env" in fields:
            try:
                env = commands.with_variables(fields["env"])
            except ValueError:  # a NUL, a lone surrogate, a variable without a name
                self._refuse(frame)
                return
        request = Request(
            argv=argv, shell=shell, cwd=files.absolute(fields["cwd"]) if "cwd" in fields else files.WORKSPACE,
            env=env, stdin=frame.data, timeout_s=fields.get("timeout_s", USUAL_TIMEOUT_S),
            max_output_bytes=fields.get("max_output_bytes", USUAL_OUTPUT_BYTES),
            stream="stream" in fields, verdict="verdict" in fields, spill="no_spill" not in fields,
        )  # fmt: skip
        open_spill = functools.partial(self._spill, frame.request, request.max_output_bytes)
        commands.execute(frame.request, request, open_spill)

    def _shell(self, frame: Frame) -> None:
        if len(self._shells) >= MAX_SHELLS:
            raise OSError(errno.EAGAIN, f"{MAX_SHELLS} shells are open in the slot already; close one first")
        cwd, env = files.absolute(frame.fields["cwd"]), self.commands.with_variables(frame.fields["env"])
        name = next(self._numbers)
        self._shells[name] = Shell(self.commands, self._numbers, cwd, env)
        self._reply(frame, {"shell": name})

    def _run(self, frame: Frame) -> None:
        fields = frame.fields
        shell = self._shells.get(fields["shell"])
        if shell is None:
            raise OSError(errno.ESRCH, "the shell has been closed")
        request = Request(
            argv=[], shell=shell.kind, cwd="", env=self.commands.environment, stdin=frame.data,
            timeout_s=fields.get("timeout_s", USUAL_TIMEOUT_S),
            max_output_bytes=fields.get("max_output_bytes", USUAL_OUTPUT_BYTES),
            stream="stream" in fields, verdict=False, spill=True,
        )  # fmt: skip
        open_spill = functools.partial(self._spill, frame.request, request.max_output_bytes)
        try:
            shell.run(request, frame.request, _bytes(fields["command"]), open_spill)
        except ShellBusy as error:
            raise OSError(errno.EBUSY, str(error)) from None
        except ValueError:  # as when a fresh shell is given the same
            self._refuse(frame)

    def _close_shell(self, frame: Frame) -> None:
        shell = self._shells.pop(frame.fields["shell"], None)
        if shell is not None:
            shell.close()
        self._reply(frame)

    def _spill(self, number: int, limit: int) -> Spill:
        """What takes a command's output beyond its bound."""
        return Spill(self.shelf, f"{number}", limit)

    def _refuse(self, frame: Frame) -> None:
        refusal = start_error(Report(ReportKind.NOT_STARTED, frame.request, errno.EINVAL))
        self.commands.link.send(Kind.ERROR, frame.request, refusal)

    def _reply(self, frame: Frame, fields: Fields | None = None) -> None:
        self.commands.link.send(Kind.RESULT, frame.request, fields)


def invalid(error: ValueError) -> OSError:
    """What no system call takes is the caller's error."""
    return OSError(errno.EINVAL, str(error))


OPERATIONS: dict[str, Callable[[CommandRequests, Frame], None]] = {
    "exec": CommandRequests._exec,
    "shell": CommandRequests._shell,
    "run": CommandRequests._run,
    "close_shell": CommandRequests._close_shell,
}
"""By the name that a request has for it."""


def _bytes(command: str) -> bytes:
    data = command.encode("utf-8", "surrogateescape")
    if b"\0" in data:
        raise ValueError("a command cannot hold a NUL character")
    return data
