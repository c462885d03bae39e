"""Write the records of a test run to the verdict descriptor, which is separate from standard output."""

from __future__ import annotations

import json
import os

DESCRIPTOR = 3
"""Where `Slot.execute(verdict=True)` reads the verdict."""


class VerdictChannel:
    """Sends JSON lines, each signed with the nonce of the run. A crash can tear only the last line."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._pid = os.getpid()
        os.set_inheritable(DESCRIPTOR, False)

    def send(self, kind: str, **fields: object) -> None:
        if os.getpid() != self._pid:  # a test forked: the outcome of the child is not the outcome of the test
            return
        line = json.dumps({"nonce": self._nonce, "kind": kind, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(DESCRIPTOR, line) :]
