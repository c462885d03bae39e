"""Remembers which sandboxes there were and how they ended, also across a kill of the server.

The file has one JSON object on a line: `{"began": ID, "key": NAME}` or `{"ended": ID, "why": TEXT}`. Slots end with the
server, whatever ends it. A sandbox that the file knows to have begun and not to have ended has therefore ended with a
server that was killed, and the next server says so to whoever asks for it. Only the newest entries are kept.
"""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from typing import Self

from palaestra_slots.core.io.durable_files import replaced

MOST = 20_000
_KILLED = "the server that ran it was killed or crashed, and it ended with that server"


class Endings:
    """The memory of one server. Without a file, it ends with the server."""

    def __init__(self, file: Path | None = None) -> None:
        self._known: dict[str, tuple[str, str]] = {}  # by sandbox: its key, and how it ended; empty while it lives
        self._path, self._lines = file, 0
        self._file: FileIO | None = None
        self.recovered = 0
        if file is not None:
            self._read_ended(file)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._rewrite(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def began(self, sandbox_id: str, key: str) -> None:
        """Note that a sandbox of a key has begun."""
        self._remember(sandbox_id, key, "")

    def ended(self, sandbox_id: str, key: str, why: str) -> None:
        """Note how a sandbox has ended."""
        self._remember(sandbox_id, key, why)

    def reason(self, sandbox_id: str, key: str | None) -> str:
        """Return why there is no such sandbox, in words. With a key's name, other keys' sandboxes are unknown."""
        of, why = self._known.get(sandbox_id, ("", ""))
        return why if why and key in (None, of) else "no such sandbox"

    def _remember(self, sandbox_id: str, key: str, why: str) -> None:
        self._known.pop(sandbox_id, None)
        self._known[sandbox_id] = key, why
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        if self._file is not None:
            self._file.write(_line(sandbox_id, key, why))
            self._lines += 1
            if self._path is not None and self._lines > 3 * MOST:
                self._file.close()
                self._rewrite(self._path)

    def _rewrite(self, file: Path) -> None:
        with replaced(file) as fresh:
            for sandbox_id, (key, why) in self._known.items():
                fresh.write(_line(sandbox_id, key, why))
        self._file, self._lines = file.open("ab", buffering=0), len(self._known)

    def _read_ended(self, file: Path) -> None:
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                about = json.loads(line)
                sandbox_id = about.get("ended") or about["began"]
                self._known[str(sandbox_id)] = str(about["key"]), str(about.get("why", ""))
            except (ValueError, KeyError, AttributeError):
                continue  # a torn line of a server that was killed
        for sandbox_id, (key, why) in self._known.items():
            if not why:
                self.recovered += 1
                self._known[sandbox_id] = key, _KILLED


def _line(sandbox_id: str, key: str, why: str) -> bytes:
    about = {"ended": sandbox_id, "key": key, "why": why} if why else {"began": sandbox_id, "key": key}
    return json.dumps(about).encode() + b"\n"
