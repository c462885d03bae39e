"""What a check is: one claim about a workspace, as data, and how it is looked at in a slot.

A check is a record that travels in a task's row. It reads from the slot, and compares here: what it expects never
enters a slot. `fault` is the empty string when the claim holds, else one line for a person.

Invariant: whatever an agent can have written (missing, huge, binary, malformed) makes a fault; only a slot that fails
raises.
"""

from __future__ import annotations

import json
import reprlib

import msgspec

from palaestra.core.errors import GraderError, InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import FileInfo, Slot

MOST_BYTES = 1 << 20
"""How large a file may be that a check reads."""

TIMEOUT_S = 30.0
"""How long one program of a check may run."""


class BaseCheck(msgspec.Struct, frozen=True, tag_field="check", tag=str.lower, forbid_unknown_fields=True):
    """One claim. `path` is relative to the workspace."""

    path: str

    async def fault(self, slot: Slot) -> str:
        """Why the claim does not hold; empty when it does."""
        raise NotImplementedError

    def made(self) -> tuple[str, ...]:
        """Files that have to be made, or changed, for the claim to hold."""
        return (self.path,)


class Unreadable(ValueError):
    """A file that a check needs cannot be read as what it should be."""


async def look(slot: Slot, path: str) -> FileInfo | None:
    """What is at a path, or None."""
    try:
        return await slot.stat(path)
    except OSError as error:
        if isinstance(error, InfraError):
            raise
        return None  # a file where a directory should be


async def read_bytes(slot: Slot, path: str) -> bytes:
    """The bytes of a regular file. Raises `Unreadable`."""
    try:
        return await slot.read_bytes(path, max_bytes=MOST_BYTES)
    except OSError as error:
        if isinstance(error, InfraError):  # a slot that died is no missing file
            raise
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None


async def read_text(slot: Slot, path: str) -> str:
    """A file as UTF-8. Raises `Unreadable`."""
    try:
        return (await read_bytes(slot, path)).decode()
    except UnicodeDecodeError:
        raise Unreadable(f"{path} is not UTF-8 text") from None


def plain(text: str) -> list[str]:
    """The lines of a text, without what ends them, trailing blanks, or empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()


def different(path: str, got: JSON, wanted: JSON) -> str:
    """The fault of a value that is not the expected one; short, and it shows what was there, not what should be."""
    return "" if got == wanted else something_else(path, got)


def something_else(path: str, got: JSON) -> str:
    """The fault of a value that is not the expected one."""
    try:
        shown = reprlib.repr(got)
    except ValueError:  # Python writes no number of more than 4300 digits, which TOML and YAML read in base 16
        shown = "a number that is too long to show"
    return f"{path} holds something else: {shown}"


_PROBE_START = """
import json, os, sys
def answer(value):
    os.write(3, json.dumps(value).encode())
asked = json.load(sys.stdin)
"""


async def probe(slot: Slot, code: str, asked: JSON, shape: JSON) -> JSON:
    """Run Python in the slot that gives one value of the type `shape` to `answer`, over a descriptor of its own.

    Raises `Unreadable` when what it looked at broke it, `GraderError` when not even an empty program answers here.
    """
    value = await _probe(slot, code, asked)
    if value is None:
        if await _probe(slot, "answer(True)", None) is not True:
            raise GraderError(f"python3 does not run in {slot.slot_id}, so nothing there can be checked")
        raise Unreadable(f"what is at {asked!r:.200} cannot be looked at")
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError:  # in an agent's own slot, python3 may be the agent's
        raise Unreadable(f"what is at {asked!r:.200} is answered for by something else") from None


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
