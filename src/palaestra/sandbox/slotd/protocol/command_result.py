"""How the end of a command is told: a struct before the bytes of its RESULT. Shared by both sides; does no I/O.

Not as JSON, which costs both sides more than everything else that they do with a result; what few results have (the
file that takes a long output) is in the frame's object. After the struct come the head and the tail of the output, then
the verdict.
"""

from __future__ import annotations

import struct

_STRUCT = struct.Struct("!iBIIQddQ")

SIZE = _STRUCT.size

TIMEOUT, CANCELLED, SWEPT, OOM = 1, 2, 4, 8
"""Flags: why it was killed, whether everything in the slot was, whether memory had run out."""

BASH, SH = 16, 32
"""Flags: the shell that ran it, if one did."""

STATEFUL, RESTARTED = 64, 128
"""Flags: it ran in a shell that goes on, which is a new one since the command before."""

encode, decode = _STRUCT.pack, _STRUCT.unpack_from
"""Exit code, flags, bytes kept of the output's head and of its tail, bytes of all the output, seconds that it took,
seconds of processor time, and the most memory that one of its processes had, in bytes. `decode` takes them from the
start of a RESULT's bytes.
"""
