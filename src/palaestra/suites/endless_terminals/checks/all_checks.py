"""All checks, how they are read from a row, and how a list of them is looked at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from palaestra.sandbox.slot import Slot
from palaestra.suites.endless_terminals.checks.check import Unreadable
from palaestra.suites.endless_terminals.checks.data_checks import Csv, Ini, Json, JsonLines, Toml, Yaml
from palaestra.suites.endless_terminals.checks.file_checks import (
    Absent,
    Digests,
    Exists,
    Files,
    Lines,
    Link,
    Modes,
    Text,
)
from palaestra.suites.endless_terminals.checks.program_checks import LIVE, Archive, Git, Query, Running, Runs, Serves

Check: TypeAlias = (
    Absent
    | Archive
    | Csv
    | Digests
    | Exists
    | Files
    | Git
    | Ini
    | Json
    | JsonLines
    | Lines
    | Link
    | Modes
    | Query
    | Running
    | Runs
    | Serves
    | Text
    | Toml
    | Yaml
)


async def faults(checks: Sequence[Check], slot: Slot) -> list[str]:
    """What each check finds wrong, in order; an empty string where it holds. Raises `InfraError` for a failing slot."""
    return [await _fault(check, slot) for check in checks]


async def live_faults(checks: Sequence[Check], slot: Slot, sealed: Callable[[], Awaitable[Slot]]) -> list[str]:
    """The same of a task about running processes: these are looked at in the agent's slot, and then all else in the one
    that `sealed` gives, which may end the first."""
    seen = {number: await _fault(check, slot) for number, check in enumerate(checks) if isinstance(check, LIVE)}
    rest = await sealed() if len(seen) < len(checks) else slot
    return [seen[number] if number in seen else await _fault(check, rest) for number, check in enumerate(checks)]


async def first_fault(checks: Sequence[Check], slot: Slot) -> str:
    """The first thing that is wrong, looking no further; empty where every check holds."""
    for check in checks:
        if fault := await _fault(check, slot):
            return fault
    return ""


async def _fault(check: Check, slot: Slot) -> str:
    try:
        return await check.fault(slot)
    except Unreadable as error:
        return str(error)
