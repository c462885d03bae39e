"""Write the records of a test run to the verdict descriptor, which is separate from standard output."""

from __future__ import annotations

import json
import os
import random

DESCRIPTOR = 3
"""The descriptor from which `Slot.execute(verdict=True)` reads the verdict."""


class VerdictChannel:
    """Sends JSON lines. A crash can tear only the last line.

    The descriptor moves to a high number; otherwise code that writes to every low descriptor would add records. The
    functions that `send` needs are stored at the start, before workspace code can replace them.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._write, self._encode, self._getpid = os.write, json.JSONEncoder().encode, os.getpid
        self._descriptor = random.randrange(300, 900)
        os.dup2(DESCRIPTOR, self._descriptor, inheritable=False)
        os.close(DESCRIPTOR)

    def send(self, kind: str, **fields: object) -> None:
        if self._getpid() != self._pid:  # a test has forked: the outcome of the child is not the outcome of the test
            return
        line = self._encode({"kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[self._write(self._descriptor, line) :]
