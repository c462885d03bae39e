"""Giving a bash that waits its one command: what goes into its memory and what into its pipe.

It waits where bash reads the file that `BASH_ENV` names, a pipe. The command is written over the argument of `-c`, in
the shell's memory, where bash looks only after that file; then the file's text, which sets what the call adds to the
environment and takes away what the waiting needed. A bash that has looked before finds the argument it was started
with, which has it begin anew with the command: slower and the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..files import WORKSPACE
from . import pipes

MAX_COMMAND_BYTES = 4095
"""Longer commands start a bash of their own: every waiting one has room for so much in its arguments."""

MAX_TEXT_BYTES = 4096
"""What a pipe takes at once however many there are (pipe(7): users with many pipes get one page for each)."""

BASH, TEXT = "/bin/bash", 20
"""The program, and its descriptor of the pipe."""

VARIABLE = f"BASH_ENV=/proc/self/fd/{TEXT}\0".encode()

_WORKSPACE = WORKSPACE[1:]
"""From a slot's root."""

_ANEW = 'exec "$0" -c "$BASH_EXECUTION_STRING"'
_SPACES = MAX_COMMAND_BYTES - len(_ANEW)
ARGUMENT = _ANEW + " " * _SPACES
BEFORE = f"{BASH}\0-c\0".encode()
ARGUMENTS = BEFORE + ARGUMENT.encode() + b"\0"
"""As they stand in the memory of a shell that has just started."""

IN_WAIT = ARGUMENTS.replace(b" " * _SPACES, bytes(_SPACES))
"""The same without the room, by which a shell that waits would be known in every list of processes."""

_BEGIN = b"""printf '\\0'
unset BASH_ENV
%bSECONDS=0 BASH_EXECUTION_STRING=%b
exec >&2 %d<&-
: %b
"""
"""The first line leaves a mark: that it has begun. Until then its output goes where nobody looks before the shell has
ended, so that nothing has to be opened or put back for that. The last line is for `$_`."""

NOT_AT_START = re.compile(r"BASH.*|SHELLOPTS|POSIX.*|(OLD)?PWD|SECONDS|_", re.DOTALL)
"""Variables that change how bash starts, or that waiting would change: no shell waits where all commands have one."""

_NOT_LATER = re.compile(
    rf"{NOT_AT_START.pattern}|\d.*|COMP_.*|DIRSTACK|E?UID|ENV|EPOCH.*|FUNC.*|GLIBC_.*|GLOB.*|GROUPS|HIST.*|HOST.*|IFS"
    r"|IGNOREEOF|ignoreeof|LANG.*|LC_.*|LD_.*|LINENO|MACHTYPE|MALLOC_.*|OPT.*|OSTYPE|PIPESTATUS|PPID|PS[124]|S?RANDOM"
    r"|READLINE.*|REPLY|SHLVL|.*\W.*",
    re.DOTALL | re.ASCII,
)
"""Variables that do not become the same when they are set in a shell that has started."""


class Ready:
    """One shell that waits: its process as the slot numbers it, descriptors of its memory and its pipe, and where in
    the memory the argument is. `root` is its slot's. Raises OSError where it has just died."""

    def __init__(self, root: int, pid: int, memory: int, text: int, argument: int) -> None:
        place = os.stat(f"proc/{pid}/cwd", dir_fd=root)
        self._root, self._place = root, (place.st_dev, place.st_ino)
        self._memory, self._text, self._argument = memory, text, argument

    def is_in_workspace(self) -> bool:
        """Whether the directory in which it waits is still the workspace, and no link leads there."""
        try:
            now = os.stat(_WORKSPACE, dir_fd=self._root, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._place

    def give(self, command: bytes, begin: bytes) -> bool:
        """Have it run what `words` has made of a command. False when it is gone; it can be used no more then either."""
        try:
            return os.pwrite(self._memory, command, self._argument) == len(command) and os.write(
                self._text, begin
            ) == len(begin)
        except OSError:
            return False

    def descriptors(self) -> tuple[int, int]:
        """What is open here."""
        return self._text, self._memory

    def close(self) -> None:
        """Let go of it, once it has been given its command (it reads that now), or is dead. Idempotent."""
        pipes.close(self._text, self._memory)
        self._text = self._memory = -1


def words(command: str, variables: Mapping[str, str]) -> tuple[bytes, bytes] | None:
    """What a shell is given for a command line and the variables that the call adds or changes; None for one that is
    not for a shell that has started."""
    try:
        line, export = os.fsencode(command), _export(variables) if variables else b""
    except UnicodeEncodeError:
        return None
    if export is None or b"\0" in line or b"\0" in export or len(line) > MAX_COMMAND_BYTES:
        return None
    begin = _BEGIN % (export, _quoted(line), TEXT, BASH.encode())
    return None if len(begin) > MAX_TEXT_BYTES else (line.ljust(len(_ANEW) + 1, b"\0"), begin)


def _export(variables: Mapping[str, str]) -> bytes | None:
    """A line that sets variables; None where some would not become the same."""
    if any(not name or _NOT_LATER.fullmatch(name) for name in variables):
        return None
    pairs = (b" %b=%b" % (os.fsencode(name), _quoted(os.fsencode(value))) for name, value in variables.items())
    return b"export" + b"".join(pairs) + b"\n"


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"
