"""Encodes orders to the init of a slot, and decodes its reports; each is one datagram. This module performs no I/O.

The messages are plain structs in the machine's byte order, because the native init (`native/init.c`) reads them too.
Descriptors travel with an order; `places` assigns them to descriptor numbers of the command.

    order    u8 kind, u8 flags, u16 places, u32 command, u16 arguments, u16 variables
             then for SPAWN: (u8 index, u8 target) per place, and NUL-terminated: cwd, arguments, NAME=value variables
             then for KILL: i64, i64: clock ticks since boot and a pid; only processes that are younger are killed
    report   u8 kind, u8 flag, u16 0, u32 command, i32 value, u32 0, i64 cpu microseconds, i64 peak resident bytes
             then for FAILED: a message

An order that is too long for a datagram is written to a memory file: the datagram is then LONG, with the file as its
first descriptor. LINE brings the native init a second socket, for a client's own orders. The side that starts a command
gets the reports on it, and each side has its own names for its commands.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

VERSION = 7  # the version of these structs; a native init built for another version is not used
MAX_DATAGRAM = 96 << 10
MAX_REPORT = 1024  # reports are shorter
# Flags of SPAWN: the descriptor at place 0 is the session's controlling terminal; report STARTED with the pid.
TERMINAL, ANNOUNCE = 1, 2
# Flags of KILL: spare the main process (a shell); kill the rest of its tree after its end. The last KILL counts.
SPARE, AT_END = 1, 2

_ORDER, _REPORT = struct.Struct("=BBHIHH"), struct.Struct("=BBHIiIqq")
_MOMENT = struct.Struct("=qq")
_MAX_STRINGS = 0xFFFF


class Order(IntEnum):
    """The orders to the init."""

    SPAWN = 1
    KILL = 2
    SIGNAL = 3
    LONG = 4
    LINE = 5


class ReportKind(IntEnum):
    """The reports of the init."""

    READY = 1
    FAILED = 2
    EXIT = 3
    NOT_STARTED = 4
    KILLED = 5
    STARTED = 6


Places = Sequence[tuple[int, int]]  # the index of a descriptor in an order's message, and its number in the command
_KINDS = {int(kind): kind for kind in ReportKind}
_new = tuple.__new__  # as in `frames.py`, which an init does not need


class EnvBlock(NamedTuple):
    """The variables of a command in the form in which they are sent: their number, and NUL-terminated `NAME=value`
    strings."""

    size: int
    text: bytes

    def variables(self) -> dict[str, str]:
        """Return the variables by name."""
        return dict(os.fsdecode(variable).split("=", 1) for variable in self.text.split(b"\0")[:-1])


class Spawn(NamedTuple):
    """A command to start."""

    command: int
    argv: list[str]
    cwd: str
    env: EnvBlock
    places: Places
    terminal: bool = False
    announce: bool = False


class InitReport(NamedTuple):
    """A report of the init. READY comes with a descriptor of the slot's root. `value` is the exit code for EXIT
    (negative: the signal), the pid for STARTED, and the errno for NOT_STARTED and FAILED. For NOT_STARTED, `flag` means
    that the directory is the reason; for KILLED, that everything in the slot had to be killed.
    """

    kind: ReportKind
    command: int = 0
    value: int = 0
    flag: bool = False
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    text: str = ""


def env_block(variables: Mapping[str, str]) -> EnvBlock:
    """Return variables in the form in which they are sent. Raises ValueError for a NUL, a lone surrogate or an invalid
    name."""
    text = os.fsencode("".join(f"{_variable_name(name)}={value}\0" for name, value in variables.items()))
    if text.count(b"\0") != len(variables):
        raise ValueError("a variable cannot contain a NUL character")
    return EnvBlock(len(variables), text)


def encode_spawn(
    command: int, argv: list[str], cwd: str, env: EnvBlock, places: Places,
    terminal: bool = False, announce: bool = False,
) -> bytes:  # fmt: skip
    """Return a `Spawn` as an order. Raises ValueError for an empty program, a NUL or too many arguments."""
    text = "\0".join((cwd, *argv)).encode("utf-8", "surrogateescape")
    # The init splits the strings at their NULs, so a NUL inside one would shift all that follow, the variables
    # included.
    if not argv[0] or len(argv) + env.size >= _MAX_STRINGS or text.count(b"\0") != len(argv):
        raise ValueError("no program, a NUL, or too many arguments")
    flags = (TERMINAL if terminal else 0) | (ANNOUNCE if announce else 0)
    head = _ORDER.pack(Order.SPAWN, flags, len(places), command, len(argv), env.size)
    return b"".join((head, bytes(chain.from_iterable(places)), text, b"\0", env.text))


def encode(order: Order, command: int = 0, number: int = 0) -> bytes:
    """Return an order without strings. `number` is the signal of a SIGNAL, or the flags of a KILL."""
    return _ORDER.pack(order, number, 0, command, 0, 0)


def encode_kill(command: int, after: tuple[int, int] = (0, 0), spare: bool = False, at_end: bool = False) -> bytes:
    """Return the order to kill a command's tree, or only its processes younger than the moment `after`
    (`process_tree.Moment`). If `spare` is true, the main process is spared. If `at_end` is true, the tree is killed
    only after the main process has ended."""
    return encode(Order.KILL, command, (SPARE if spare else 0) | (AT_END if at_end else 0)) + _MOMENT.pack(*after)


def decode_moment(data: bytes) -> tuple[int, int]:
    """Return the moment of a KILL; zeros if it has none."""
    ticks, pid = _MOMENT.unpack_from(data, _ORDER.size) if len(data) > _ORDER.size else (0, 0)
    return int(ticks), int(pid)


def decode_order(data: bytes) -> tuple[Order, int, int]:
    """Return the kind of an order, its command, and its flags (or number)."""
    kind, flags, _, command, _, _ = _ORDER.unpack_from(data)
    return Order(kind), command, flags


def decode_spawn(data: bytes) -> Spawn:
    """Decode an order that `encode_spawn` made."""
    _, flags, places, command, arguments, variables = _ORDER.unpack_from(data)
    start = _ORDER.size + 2 * places
    pairs = list(zip(data[_ORDER.size : start : 2], data[_ORDER.size + 1 : start : 2], strict=True))
    cwd, *rest = data[start:].split(b"\0", arguments + 1)
    env, argv = EnvBlock(variables, rest.pop()), [os.fsdecode(text) for text in rest]
    return Spawn(command, argv, os.fsdecode(cwd), env, pairs, bool(flags & TERMINAL), bool(flags & ANNOUNCE))


def encode_report(report: InitReport) -> bytes:
    """Return one report as a datagram."""
    cpu_us = round(report.cpu_s * 1e6)
    fields = (report.kind, report.flag, 0, report.command, report.value, 0, cpu_us, report.max_rss_bytes)
    return (_REPORT.pack(*fields) + report.text.encode(errors="replace"))[:MAX_REPORT]


def decode_report(data: bytes) -> InitReport:
    """Decode a datagram that `encode_report` made."""
    kind, flag, _, command, value, _, cpu_us, rss = _REPORT.unpack_from(data)
    text = data[_REPORT.size :].decode(errors="replace") if len(data) > _REPORT.size else ""
    return _new(InitReport, (_KINDS[kind], command, value, bool(flag), cpu_us / 1e6, rss, text))


def _variable_name(name: str) -> str:
    if not name or "=" in name:
        raise ValueError(f"{name!r} cannot be the name of a variable")
    return name
