"""A bash of a slot that has started already and waits for its one command; used once, then there is the next.

It is a real `bash -c`, so that whatever depends on that (how errors and syntax errors are told, `return`, the last
program in place of the shell, `$-`, `$LINENO`) needs no imitation. It waits where bash reads the file that `BASH_ENV`
names: a pipe. When there is a command, the server writes it over the argument of `-c`, in the shell's memory, where
bash looks only after that file; then the file's text, which goes to the command's directory, sets what the call adds to
the environment and takes away what the waiting needed. A bash that has looked before finds the argument it was
started with, which has it begin anew with the command: slower and the same.

Just before the command the text leaves a mark in a pipe. A shell that ended without it (it was killed while it waited,
or the directory is not there) has run nothing, and the command is started the cold way.

Not for verdicts: what ran in the slot before could have got at the waiting process. Not for commands with input, for
those that do not fit, nor for variables that bash itself looks at when it starts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable

from . import killing, orders, pipes
from .executions import Execution, Request
from .orders import Kind as ReportKind
from .orders import Report, Spawn
from .slots import Slot, State
from .spills import Spill

MAX_COMMAND_BYTES = 4095
"""Longer commands start a bash of their own: every waiting one has room for so much in its arguments."""

MAX_TEXT_BYTES = 4096
"""What a pipe takes at once however many there are (pipe(7): users with many pipes get one page for each)."""

_FIRST_NAME = 3 << 30
"""Above the numbers of requests and of other children (`modes.py`)."""

_BASH, _TEXT, _MARK = "/bin/bash", 20, 21
_PLACES: orders.Places = ((0, 0), (1, 1), (1, 2), (2, _TEXT), (3, _MARK))
_ANEW = 'exec "$0" -c "$BASH_EXECUTION_STRING"'
_SPACES = MAX_COMMAND_BYTES - len(_ANEW)
_ARGUMENT = _ANEW + " " * _SPACES
_BEFORE = f"{_BASH}\0-c\0".encode()
_ARGUMENTS = _BEFORE + _ARGUMENT.encode() + b"\0"
_VARIABLE = f"BASH_ENV=/proc/self/fd/{_TEXT}\0".encode()

_BEGIN = b"""builtin cd -P -- %b 2>&0 || exit
echo >&%d
unset BASH_ENV OLDPWD
export OLDPWD%b
SECONDS=0 BASH_EXECUTION_STRING=%b
exec %d<&- %d>&-
: %b
"""
"""The last line is for `$_`. What `cd` says goes to /dev/null, which is open for writing too."""

_LOOK_AFTER_S, _LOOKS = 0.003, 12
"""When to look whether a new shell waits, and how often, each time after twice as long."""

_NOT_AT_START = re.compile(r"BASH.*|SHELLOPTS|POSIX.*|(OLD)?PWD|SECONDS|_", re.DOTALL)
"""Variables that change how bash starts, or that waiting would change: no shell waits where all commands have one."""

_NOT_LATER = re.compile(
    rf"{_NOT_AT_START.pattern}|\d.*|COMP_.*|DIRSTACK|E?UID|ENV|EPOCH.*|FUNC.*|GLIBC_.*|GLOB.*|GROUPS|HIST.*|HOST.*|IFS"
    r"|LANG.*|LC_.*|LD_.*|LINENO|MACHTYPE|MALLOC_.*|OPT.*|OSTYPE|PIPESTATUS|PPID|PS4|S?RANDOM|READLINE.*|REPLY|SHLVL|.*\W.*",
    re.DOTALL | re.ASCII,
)
"""Variables that do not become the same when they are set in a shell that has started."""


_FOR_NOW = (errno.EAGAIN, errno.ENOMEM)
"""Why a shell could not be started but another may be. No exit status of one that does not wait: that is 0 or 127."""


class WaitingShells:
    """Of one slot, one at a time. Implements `Waiting`."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._names = itertools.count(_FIRST_NAME)
        self._shell: _Shell | None = None
        self._possible = not any(_NOT_AT_START.fullmatch(name) for name in slot.environment.variables())

    def run(self, number: int, request: Request, open_spill: Callable[[], Spill] | None) -> bool:
        """Give a command to the shell that waits. False where none does, or the command is not for one."""
        shell = self._shell
        if shell is None or not shell.ready():
            return False
        text = _text(request, self.slot.environment)
        if text is None:
            return False
        self._shell = None
        return shell.give(number, request, text, open_spill)

    def start(self) -> None:
        """Start one, unless one waits. Where none can wait in this slot nothing happens."""
        if self._shell is None and self._possible and self.slot.state is State.LIVE:
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
        self._owner, self._slot, self._name = owner, owner.slot, name
        self._pid = 0
        self._memory = -1
        self._argument = 0
        self._execution: Execution | None = None
        self._text = self._mark = text = mark = -1
        self._output = (-1, -1)
        env = self._slot.environment
        env = orders.Environment(env.size + 1, env.text + _VARIABLE)
        spawn = Spawn(name, [_BASH, "-c", _ARGUMENT], "/", env, _PLACES, announce=True)
        try:
            text, self._text = pipes.input_pipe()
            self._mark, mark = pipes.pipe()
            self._output = pipes.pipe()
            os.fchmod(text, 0o444)  # it is opened anew, by users whom this process may not know
            self._slot.spawn(self, spawn, [pipes.nothing(), self._output[1], text, mark])
        except OSError:
            self._end()
            raise
        finally:
            pipes.close(text, mark)

    def ready(self) -> bool:
        """Whether it waits for a command. Where that is not known yet, it is found out."""
        return self._memory >= 0 or self._look()

    def give(
        self, number: int, request: Request, text: tuple[bytes, bytes], open_spill: Callable[[], Spill] | None
    ) -> bool:
        """Have it run its one command. False when it is gone."""
        command, begin = text
        after = killing.moment()
        try:
            whole = os.pwrite(self._memory, command, self._argument) == len(command) and os.write(
                self._text, begin
            ) == len(begin)
        except OSError:
            whole = False
        if not whole:
            self._slot.kill_child(self._name)  # its pipe is closed afterwards: half a text must not be run
            return False
        pipes.close(self._text, self._memory)
        self._text = self._memory = -1

        def kill() -> None:
            self._slot.kill_child(self._name, killing.inside(self._slot.pid, after))

        output, self._output = self._output, (-1, -1)
        self._execution = Execution(
            number, request, self._slot.loop, self._slot.link, kill, output, open_spill=open_spill
        )
        self._slot.adopt(self._execution)
        return True

    def on_report(self, report: Report) -> None:
        """It has started; it has ended, or what its command started is dead."""
        if report.kind is ReportKind.STARTED:
            self._pid = report.value
            self._slot.loop.later(_LOOK_AFTER_S, self._look_again)
        elif self._execution is None:
            self._end()
            if report.kind is not ReportKind.KILLED:
                self._owner.ended(self, possible=report.value < 0 or report.value in _FOR_NOW)
        elif report.kind is ReportKind.EXIT and not self._execution.killing and not pipes.read(self._mark):
            self._end()
            self._slot.start_again(self._execution)
        else:
            self._slot.on_command(self._execution, report)
            if not self._slot.runs(self._execution.number):
                self._end()
                self._owner.start()

    def on_lost(self) -> None:
        """The slot is dead."""
        self._end()

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
            arguments, variable = int(fields[45]), int(fields[48]) - len(_VARIABLE)
            memory = self._open("mem", os.O_RDWR)
            if (
                os.pread(memory, len(_ARGUMENTS), arguments) == _ARGUMENTS
                and os.pread(memory, len(_VARIABLE), variable) == _VARIABLE
            ):
                os.pwrite(memory, bytes(len(_VARIABLE)), variable)
                os.pwrite(memory, _ARGUMENTS.replace(b" " * _SPACES, bytes(_SPACES)), arguments)
                self._argument = arguments + len(_BEFORE)
                self._memory, memory = memory, -1
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
            others = [fd for fd in os.listdir(folder) if fd != f"{_TEXT}"]
            return any(os.stat(fd, dir_fd=folder).st_ino == pipe for fd in others)
        finally:
            os.close(folder)

    def _open(self, name: str, flags: int) -> int:
        return os.open(f"proc/{self._pid}/{name}", flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._slot.root)

    def _look_again(self, times: int = 1) -> None:
        if self._pid and self._text >= 0 and not self.ready():
            if times == _LOOKS:  # it is none that can be given anything
                self._owner.ended(self, possible=False)
                self._slot.kill_child(self._name)
            else:
                self._slot.loop.later(_LOOK_AFTER_S * 2**times, lambda: self._look_again(times + 1))

    def _end(self) -> None:
        self._slot.drop(self._name)
        pipes.close(self._text, self._memory, self._mark, *self._output)
        self._pid, self._text, self._memory, self._mark, self._output = 0, -1, -1, -1, (-1, -1)


def _text(request: Request, environment: orders.Environment) -> tuple[bytes, bytes] | None:
    """A command as it stands in the arguments, and what is done before it; None for one that is not for a shell."""
    if request.shell != "bash" or request.stdin or request.verdict:
        return None
    variables = {} if request.env is environment else _added(request.env, environment)
    if any(_NOT_LATER.fullmatch(name) for name in variables):
        return None
    try:
        command, cwd = os.fsencode(request.argv[2]), os.fsencode(request.cwd)
    except UnicodeEncodeError:
        return None
    if b"\0" in command + cwd or len(command) > MAX_COMMAND_BYTES:
        return None
    added = b"".join(b" %b=%b" % (os.fsencode(name), _quoted(os.fsencode(value))) for name, value in variables.items())
    begin = _BEGIN % (_quoted(cwd), _MARK, added, _quoted(command), _TEXT, _MARK, _BASH.encode())
    return None if len(begin) > MAX_TEXT_BYTES else (command.ljust(len(_ANEW) + 1, b"\0"), begin)


def _added(env: orders.Environment, environment: orders.Environment) -> dict[str, str]:
    own = environment.variables()
    return {name: value for name, value in env.variables().items() if own.get(name) != value}


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
