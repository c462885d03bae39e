"""A bash of a slot that has started already and waits for its one command; used once, then there is the next.

It is a real `bash -c`, so that whatever depends on that (how errors and syntax errors are told, `return`, the last
program in place of the shell, `$-`, `$LINENO`) needs no imitation; `giving.py` has how it gets the command. It waits in
the workspace. A shell that ended without having left a mark (it was killed while it waited) has run nothing, and its
command is started the cold way.

Not for verdicts: what ran in the slot before could have got at the waiting process. Not for commands with input, for
those that go to another directory (which costs a shell a fifth of the whole) or do not fit, nor for variables that bash
itself looks at when it starts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable

from ..files import WORKSPACE
from ..protocol import init_messages
from ..protocol.frames import Fields
from ..protocol.init_messages import Kind as ReportKind
from ..protocol.init_messages import Report, Spawn
from . import giving, kill, pipes
from .command import Execution, Request
from .giving import Ready
from .output import Spill
from .supervisor import Commands

_FIRST_NAME = 3 << 30
"""Above the numbers of requests and of other children (`command_requests.py`)."""

_PLACES: init_messages.Places = ((0, 0), (1, 1), (2, 2), (3, giving.TEXT))

_LOOK_AFTER_S, _LOOKS = 0.003, 12
"""When to look whether a new shell waits, and how often, each time after twice as long."""

_FOR_NOW = (errno.EAGAIN, errno.ENOMEM)
"""Why a shell could not be started but another may be. No exit status of one that does not wait: that is 0 or 127."""


class WaitingShells:
    """Of one slot, one at a time."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self._names = itertools.count(_FIRST_NAME)
        self._shell: _Shell | None = None
        self._possible = not any(giving.NOT_AT_START.fullmatch(name) for name in commands.environment.variables())

    def give(self, fields: Fields, data: bytes) -> _Shell | None:
        """Have the shell that waits run the command of a request, which is then to be told to it (`go_on`).

        None where none waits, or the command is not for one.
        """
        shell = self._shell
        if shell is None or "command" not in fields or "cwd" in fields or "verdict" in fields or data:
            return None
        env = fields.get("env")
        words = giving.words(fields["command"], _added(env, self.commands.environment) if env else {})
        if words is None or not shell.is_ready():
            return None
        self._shell = None
        return shell if shell.give(words) else None

    def start(self) -> None:
        """Start one, unless one waits. Where none can wait in this slot nothing happens."""
        if self._shell is None and self._possible and self.commands.live:
            with contextlib.suppress(OSError):  # no descriptor is left
                self._shell = _Shell(self, next(self._names))

    def ended(self, shell: _Shell, possible: bool) -> None:
        """One ended unused. The next command starts another, unless it ended because it cannot wait here."""
        self._possible = self._possible and possible
        if self._shell is shell:
            self._shell = None


class _Shell:
    """One process, from its start to the end of its command. Implements `Child`."""

    def __init__(self, owner: WaitingShells, name: int) -> None:
        self._owner, self._commands, self._name = owner, owner.commands, name
        self._pid = 0
        self._ready: Ready | None = None
        self._after: kill.Noted
        """What the slot had started by then is not its command's."""
        self._execution: Execution | None = None
        self._text = self._mark = text = mark = -1
        self._output = (-1, -1)
        env = self._commands.environment
        env = init_messages.Environment(env.size + 1, env.text + giving.VARIABLE)
        spawn = Spawn(name, [giving.BASH, "-c", giving.ARGUMENT], WORKSPACE, env, _PLACES, announce=True)
        try:
            text, self._text = pipes.input_pipe()
            self._mark, mark = pipes.pipe()
            self._output = pipes.pipe()
            os.fchmod(text, 0o444)  # it is opened anew, by users whom this process may not know
            self._commands.spawn(self, spawn, [pipes.nothing(), mark, self._output[1], text])
        except OSError:
            self._end()
            raise
        finally:
            pipes.close(text, mark)

    def is_ready(self) -> bool:
        """Whether it waits for a command. Where that is not known yet, it is found out."""
        return self._ready is not None or self._look()

    def give(self, words: tuple[bytes, bytes]) -> bool:
        """Have it run its one command. False when it is gone, or its directory has got another name."""
        assert self._ready is not None
        self._after = kill.note()
        if not self._ready.is_in_workspace() or not self._ready.give(*words):
            self._commands.kill_child(self._name)  # its pipe is closed afterwards: half a text must not be run
            return False
        self._let_go()
        return True

    def go_on(self, number: int, request: Request, open_spill: Callable[[], Spill]) -> None:
        """This is the request of the command that it has been given just now."""
        output, self._output = self._output, (-1, -1)
        loop, link, hear = self._commands.loop, self._commands.link, self._commands.hear
        execution = Execution(number, request, loop, link, self._kill, hear, output, open_spill=open_spill)
        execution.on_over = self._on_over
        self._execution = execution
        self._commands.adopt(execution)

    def on_report(self, report: Report) -> None:
        """It has started; it has ended, or what its command started is dead."""
        if report.kind is ReportKind.STARTED:
            self._pid = report.value
            self._commands.loop.later(_LOOK_AFTER_S, self._look_again)
        elif self._execution is None:
            self._end()
            if report.kind is not ReportKind.KILLED:
                for_now = report.value < 0 or report.value in _FOR_NOW or bool(report.flag)
                self._owner.ended(self, possible=for_now)
        elif report.kind is ReportKind.EXIT and not self._execution.killing and not pipes.read(self._mark):
            self._end()
            self._commands.start_again(self._execution)
            self._owner.start()
        else:
            self._commands.on_command(self._execution, report)

    def _on_over(self) -> None:
        """Whoever waits for the answer comes first: to start another takes as long as a short command."""
        self._commands.loop.later(0, self._give_way)

    def _give_way(self) -> None:
        self._end()
        self._owner.start()

    def on_lost(self) -> None:
        """The slot is dead."""
        self._end()

    def descriptors(self) -> tuple[int, ...]:
        """What is open here. Of the pipe for its text every copy counts: a shell reads it to its end."""
        return self._text, self._mark, *self._output, *(self._ready.descriptors() if self._ready is not None else ())

    def _kill(self) -> None:
        self._commands.kill_child(self._name, kill.inside(self._commands.pid, self._after))

    def _look(self) -> bool:
        """Whether it waits already. Then find the argument in its memory, and take away what shows that it waits.

        It has read its environment when it has opened the pipe. Before that nothing may be changed, and the memory seen
        under its number may still be that of its parent.
        """
        memory = -1
        try:
            if not self._waits():
                return False
            with open(self._open("stat", os.O_RDONLY), "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            arguments, variable = int(fields[45]), int(fields[48]) - len(giving.VARIABLE)
            memory = self._open("mem", os.O_RDWR)
            if (
                os.pread(memory, len(giving.ARGUMENTS), arguments) == giving.ARGUMENTS
                and os.pread(memory, len(giving.VARIABLE), variable) == giving.VARIABLE
            ):
                os.pwrite(memory, bytes(len(giving.VARIABLE)), variable)
                os.pwrite(memory, giving.IN_WAIT, arguments)
                argument = arguments + len(giving.BEFORE)
                self._ready = Ready(self._commands.root, self._pid, memory, self._text, argument)
                memory = self._text = -1
                return True
        except (OSError, IndexError, OverflowError):
            pass
        finally:
            pipes.close(memory)
        return False

    def _waits(self) -> bool:
        """Whether it has opened what it is to read."""
        if not self._pid:
            return False
        pipe, folder = os.fstat(self._text).st_ino, self._open("fd", os.O_RDONLY | os.O_DIRECTORY)
        try:
            others = [fd for fd in os.listdir(folder) if fd != f"{giving.TEXT}"]
            return any(os.stat(fd, dir_fd=folder).st_ino == pipe for fd in others)
        finally:
            os.close(folder)

    def _open(self, name: str, flags: int) -> int:
        return os.open(f"proc/{self._pid}/{name}", flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._commands.root)

    def _look_again(self, times: int = 1) -> None:
        if not self._pid or self._execution is not None:
            return
        ready = self.is_ready()
        if not ready and times < _LOOKS:
            self._commands.loop.later(_LOOK_AFTER_S * 2**times, lambda: self._look_again(times + 1))
        elif self._ready is None or not self._ready.is_in_workspace():  # can be given nothing, or the place is a link
            self._owner.ended(self, possible=False)
            self._commands.kill_child(self._name)

    def _let_go(self) -> None:
        """Its text is complete when its pipe is closed."""
        if self._ready is not None:
            self._ready.close()
            self._ready = None
        pipes.close(self._text)
        self._text = -1

    def _end(self) -> None:
        self._commands.drop(self._name)
        self._let_go()
        pipes.close(self._mark, *self._output)
        self._pid, self._mark, self._output = 0, -1, (-1, -1)


def _added(env: Fields, environment: init_messages.Environment) -> dict[str, str]:
    """What a call adds to the variables of a slot, or changes."""
    own = environment.variables()
    return {name: f"{value}" for name, value in env.items() if own.get(name) != f"{value}"}
