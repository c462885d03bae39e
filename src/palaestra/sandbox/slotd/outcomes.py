"""How the end of a command is told: a struct before the bytes of its RESULT. Shared by both sides; does no I/O.

Not as JSON, which costs both sides more than everything else that they do with a result; what few results have (the
file that takes a long output) is in the frame's object. After the struct come the head and the tail of the output, then
the verdict.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_STRUCT = struct.Struct("!iBIIQddQ")

SIZE = _STRUCT.size

TIMEOUT, CANCELLED, SWEPT, OOM = 1, 2, 4, 8
"""Flags: why it was killed, whether everything in the slot was, whether memory had run out."""

BASH, SH = 16, 32
"""Flags: the shell that ran it, if one did."""

STATEFUL, RESTARTED = 64, 128
"""Flags: it ran in a shell that goes on, which is a new one since the command before."""


class Outcome(NamedTuple):
    """What is known of every command. `head` and `tail` are the bytes kept of the output, `total` all there were."""

    exit_code: int
    flags: int = 0
    head: int = 0
    tail: int = 0
    total: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


encode = _STRUCT.pack
"""The fields of an `Outcome` as bytes."""


def decode(data: bytes) -> Outcome:
    """The outcome before the bytes of a result."""
    return Outcome(*_STRUCT.unpack_from(data))
