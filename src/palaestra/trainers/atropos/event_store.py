"""What a trajectory server has on disk: every event in one append-only file, read again at the next start.

One JSON object per line, the first with the schema. Invariants: an event whose `commit` returned survives a power cut;
a line that could not be written whole is taken back; one server at a time has the file. A torn last line, which a kill
leaves, is cut off.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.io.append_file import AppendedFile
from palaestra.trainers.atropos.server_events import AnyEvent

STORE_SCHEMA = "palaestra.trajectories/1"

_encoder = msgspec.json.Encoder()
_HEAD = _encoder.encode({"schema": STORE_SCHEMA}) + b"\n"
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class Store(Protocol):
    """Where events are kept."""

    def append(self, event: AnyEvent) -> None:
        """Keep one event. Raises `OSError` when it cannot be kept; then nothing of it is."""
        ...

    async def commit(self) -> None:
        """Return once everything appended so far is safe."""
        ...

    def close(self) -> None: ...


class NoStore:
    """Keeps nothing: a server that forgets."""

    def append(self, event: AnyEvent) -> None: ...

    async def commit(self) -> None: ...

    def close(self) -> None: ...


class FileStore:
    """The file at `path`, made where there is none. Read `events` before the first `append`.

    Raises `ConfigError` for a file that cannot be written, is another server's, or is none of this program's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(fd)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{path} belongs to a server that is running: stop it, or name another file") from None
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
        except BaseException:
            os.close(fd)
            raise
        self._file = AppendedFile(fd, path)

    def _begin(self, fd: int) -> None:
        """Write the first line, or look whether it is ours; cut off a torn last one."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{self.path} is no ordinary file, and keeps nothing; name another one")
        with self.path.open("rb") as file:
            first, whole = file.readline(), 0
            if first.endswith(b"\n"):
                file.seek(0)
                for line in file:
                    whole += len(line) if line.endswith(b"\n") else 0
        if not whole and _HEAD.startswith(first):
            os.ftruncate(fd, 0)
            os.write(fd, _HEAD)
            return
        try:
            schema = msgspec.json.decode(first)["schema"]
        except (msgspec.DecodeError, KeyError, TypeError):
            schema = None
        if schema != STORE_SCHEMA or not whole:
            raise ConfigError(f"{self.path} is no store of trajectories that this version reads: {schema!r}")
        os.ftruncate(fd, whole)

    def events(self) -> Iterator[AnyEvent]:
        """What was recorded, in order. Raises `ConfigError` for a damaged line."""
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, 2):
                try:
                    yield _decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{self.path}: line {number} is damaged: {error}") from None

    def append(self, event: AnyEvent) -> None:
        """Hand one event to the kernel. Raises `DiskError`, and then nothing of it stays."""
        self._file.append(_encoder.encode(event) + b"\n")

    async def commit(self) -> None:
        """Return once what was appended is on the disk."""
        await self._file.commit()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._file.close()
