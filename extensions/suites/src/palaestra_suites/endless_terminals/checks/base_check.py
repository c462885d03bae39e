"""The base class of checks. A check is one claim about a workspace, and is stored in a task's row.

A check reads from the slot and compares on the host, so the expected value never enters a slot. `fault` returns an
empty string if the claim holds, or else one line that explains why it does not hold.

Invariant: a missing, huge, binary or malformed file of the agent is a fault. Only a slot that fails, or that cannot run
the check's programs, raises an error.
"""

from __future__ import annotations

import json
import reprlib

import msgspec

from palaestra_slots.core.errors import GraderError, InfraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import FileInfo, Slot

MOST_BYTES = 1 << 20
"""The maximum size, in bytes, of a file that a check reads."""

TIMEOUT_S = 30.0
"""The time limit, in seconds, for each program that a check runs."""


class BaseCheck(msgspec.Struct, frozen=True, tag_field="check", tag=str.lower, forbid_unknown_fields=True):
    """One claim. `path` is relative to the workspace."""

    path: str

    async def fault(self, slot: Slot) -> str:
        """Return the reason why the claim does not hold, or an empty string if it holds."""
        raise NotImplementedError

    def made(self) -> tuple[str, ...]:
        """Return the files that must be created or changed for the claim to hold."""
        return (self.path,)


class UnreadableFile(ValueError):
    """A file that a check needs cannot be read."""


async def stat_or_none(slot: Slot, path: str) -> FileInfo | None:
    """Return the file information of a path, or None if nothing is there."""
    try:
        return await slot.stat(path)
    except OSError as error:
        if isinstance(error, InfraError):
            raise
        return None  # for example, a part of the path is a file and not a directory


async def read_slot_bytes(slot: Slot, path: str, max_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file. Raises `UnreadableFile`."""
    try:
        return await slot.read_bytes(path, max_bytes=max_bytes)
    except OSError as error:
        if isinstance(error, InfraError):  # a slot that died is not a missing file
            raise
        raise UnreadableFile(f"{path} cannot be read: {error.strerror or error}") from None


async def read_slot_text(slot: Slot, path: str, max_bytes: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file. Raises `UnreadableFile`."""
    try:
        return (await read_slot_bytes(slot, path, max_bytes)).decode()
    except UnicodeDecodeError:
        raise UnreadableFile(f"{path} is not UTF-8 text") from None


def plain(text: str) -> list[str]:
    """Return the lines of a text without line ends, trailing blanks, and empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()


def different(path: str, got: JSON, wanted: JSON) -> str:
    """Return a fault if the values differ, otherwise an empty string. The fault shows the value found, never the
    expected one."""
    return "" if got == wanted else something_else(path, got)


def something_else(path: str, got: JSON) -> str:
    """Return the fault for an unexpected value."""
    try:
        shown = reprlib.repr(got)
    except ValueError:  # TOML and YAML may contain integers in base 16 with more digits than Python prints
        shown = "a number that is too long to show"
    return f"{path} has other content: {shown}"


_PROBE_START = """
import json, os, sys
def answer(value):
    os.write(3, json.dumps(value).encode())
asked = json.load(sys.stdin)
"""


async def run_probe(slot: Slot, code: str, asked: JSON, shape: JSON) -> JSON:
    """Run Python code in the slot, and return the value of type `shape` that the code passes to `answer`.

    The value arrives over a separate descriptor, not over standard output. Raises `UnreadableFile` if the code fails or
    its answer has the wrong type, and `GraderError` if not even an empty program answers in this slot.
    """
    value = await _probe(slot, code, asked)
    if value is None:
        if await _probe(slot, "answer(True)", None) is not True:
            raise GraderError(f"python3 does not run in {slot.slot_id}, so nothing there can be checked")
        raise UnreadableFile(f"{asked!r:.200} cannot be inspected")
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError:  # in the agent's own slot, the agent may have replaced python3
        raise UnreadableFile(f"the answer about {asked!r:.200} has the wrong form") from None


async def _probe(slot: Slot, code: str, asked: JSON) -> JSON:
    done = await slot.execute(
        ["python3", "-I", "-S", "-c", _PROBE_START + code],
        stdin=json.dumps(asked).encode(),
        timeout_s=TIMEOUT_S,
        verdict=True,
        spill=False,
    )
    try:
        return json.loads(done.verdict)
    except (ValueError, RecursionError):
        return None
