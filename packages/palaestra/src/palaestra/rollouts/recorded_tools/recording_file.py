"""A recording on disk: one JSON line for each call of a tool that reaches outside this machine.

    {"schema": "palaestra.world/1", "tool": "web_search", "arguments": {…}, "key": …, "rollout": …, "n": 0, "reply": …}

Lines are independent, so recordings can be joined with `cat`. `key` identifies the call (`recorded_session.py`); `n`
counts the calls of one key in one rollout, from 0, and those of the rollout's user from 100,000 times the turn.
`recording_policy.py` decides when a recording is read.

Invariant: the order of lines does not change the replies, so concurrent rollouts may be recorded in any order. The
one exception: if a rollout has two replies to the same call, because it was retried, the later line counts.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import msgspec

from palaestra.rollouts.journal.reader import WORLD_NAME
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, AppendedFile, lines_of
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

WORLD_SCHEMA = "palaestra.world/1"


class RecordedCall(msgspec.Struct, kw_only=True):
    """One call and its reply. `failed` is true if the call failed; `session` is the tool's `world_session`."""

    schema: str = WORLD_SCHEMA
    rollout: str
    tool: str
    arguments: dict[str, JSON]
    key: str
    n: int
    session: str = ""
    failed: bool = False
    reply: JSON


class _Head(msgspec.Struct):
    """The fields of a line that the index needs."""

    schema: str
    rollout: str
    key: str
    n: int
    failed: bool = False


class _Place(msgspec.Struct):
    offset: int
    size: int
    failed: bool


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.json.Decoder(RecordedCall)


class Writer:
    """Appends to a recording. Several runs may append to the same file: every line is one write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: AppendedFile | None = None

    def append(self, heard: RecordedCall) -> None:
        """Write one line; the first line creates the file. Raises `ConfigError` if the file cannot be opened, and
        `DiskError` if the line cannot be written."""
        self.open().append(_encoded_call(heard) + b"\n")

    def open(self) -> AppendedFile:
        """Return the file, created if it does not exist. Raises `ConfigError`."""
        if self._file is None:
            self._file = _open_for_append(self.path)
        return self._file

    async def commit(self) -> None:
        """Return once all appended lines are on the disk."""
        if self._file is not None:
            await self._file.commit()

    def close(self) -> None:
        """Flush and close. Idempotent."""
        if self._file is not None:
            self._file.close()


class Reader:
    """An index of a recording. Replies stay on the disk until `find` reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, dict[tuple[str, int], _Place]] = {}
        self._end = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from None
        try:
            self.catch_up()
        except BaseException:
            self.close()
            raise

    def catch_up(self) -> None:
        """Index the lines that were added since the last call. Raises `ConfigError` if the file is not a recording."""
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in lines_of(file):
                if not line.endswith(b"\n"):
                    break  # still being written, or torn by a kill
                if line.strip():
                    self._index_line(self._end, line)
                self._end += len(line)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def find(self, key: str, rollout: str, n: int, *, failures: bool = True) -> RecordedCall | None:
        """Return the reply to the `n`th call of this key in this rollout, or None.

        The rollout's own reply comes first. Otherwise the choice among the other replies is deterministic: a success
        rather than a failure, then the reply to the `n`th call, or to the nearest earlier call. Once a call has been
        made as often as it was recorded, it gets the last reply each further time. Without `failures`, only successful
        replies are used.
        """
        heard = {each: place for each, place in self._places.get(key, {}).items() if failures or not place.failed}
        if not heard:
            return None
        own = heard.get((rollout, n))
        if own is None:
            best = min(heard, key=lambda each: (heard[each].failed, *_distance(each[1], n), each[0] != rollout, each))
            own = heard[best]
        return _lines.decode(os.pread(self._fd, own.size, own.offset))

    def _index_line(self, offset: int, line: bytes) -> None:
        try:
            head = _heads.decode(line)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.path}: the line at byte {offset} is not a recorded call: {error}") from None
        except UNREADABLE:
            if not offset:
                raise ConfigError(f"{self.path} is not a recording: its first line is not JSON") from None
            logger.warning("%s: the line at byte %d was torn by a kill and is left out", self.path, offset)
            return
        if head.schema != WORLD_SCHEMA:
            raise ConfigError(f"{self.path} has the format {head.schema}, but this version reads {WORLD_SCHEMA}")
        place = _Place(offset, len(line), head.failed)
        self._places.setdefault(head.key, {})[head.rollout, head.n] = place


def _encoded_call(heard: RecordedCall) -> bytes:
    """Return the call as JSON. Characters that UTF-8 cannot encode are replaced, as in replies to the model."""
    try:
        return _encoder.encode(heard)
    except UnicodeEncodeError:
        return json.dumps(msgspec.structs.asdict(heard), ensure_ascii=False).encode("utf-8", "replace")


def recording_at(path: Path) -> Path:
    """Return the path of the recording: `path` itself, or the recording in the run folder `path`. Raises `ConfigError`
    if there is none."""
    found = path / WORLD_NAME if path.is_dir() else path
    if not found.is_file():
        raise ConfigError(
            f"{found} does not exist; specify a recording or the folder of a run with recorded tool calls"
        )
    return found


def recording_in(path: Path) -> Path:
    """Return the path for a new recording: `path` if it is a file or has a suffix, otherwise a file in the folder
    `path`."""
    return path if path.is_file() or (path.suffix and not path.is_dir()) else path / WORLD_NAME


def _distance(recorded: int, wanted: int) -> tuple[bool, int]:
    """Return a sort key: the distance of a recorded call from the wanted call, with later calls after all earlier
    ones."""
    return recorded > wanted, abs(recorded - wanted)


def _open_for_append(path: Path) -> AppendedFile:
    """Open the file for appending. A line torn by a kill is terminated, so that the next line is separate."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from None
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")
    return AppendedFile(fd, path)
