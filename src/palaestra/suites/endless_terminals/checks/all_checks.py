"""Defines the union type of all checks, and evaluates lists of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from palaestra.sandbox.slot import Slot
from palaestra.suites.endless_terminals.checks.base_check import UnreadableFile
from palaestra.suites.endless_terminals.checks.data_checks import Csv, Ini, Json, JsonLines, Toml, Yaml
from palaestra.suites.endless_terminals.checks.file_checks import (
    Absent,
    Digests,
    Exists,
    FileContent,
    Files,
    Lines,
    Modes,
    SymbolicLink,
)
from palaestra.suites.endless_terminals.checks.program_checks import LIVE, Archive, Git, Running, Runs, Serves, SqlQuery

AnyCheck: TypeAlias = (
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
    | SymbolicLink
    | Modes
    | SqlQuery
    | Running
    | Runs
    | Serves
    | FileContent
    | Toml
    | Yaml
)


async def faults(checks: Sequence[AnyCheck], slot: Slot) -> list[str]:
    """Return the fault of each check, in order. The fault of a check that holds is an empty string. Raises `InfraError`
    if the slot fails."""
    return [await _fault(check, slot) for check in checks]


async def live_faults(checks: Sequence[AnyCheck], slot: Slot, sealed: Callable[[], Awaitable[Slot]]) -> list[str]:
    """Return the fault of each check of a task about running processes, in order. Checks of processes (`LIVE`) run
    first, in the agent's slot. All other checks run in the slot that `sealed` returns; `sealed` may end the agent's
    slot."""
    seen = {number: await _fault(check, slot) for number, check in enumerate(checks) if isinstance(check, LIVE)}
    rest = await sealed() if len(seen) < len(checks) else slot
    return [seen[number] if number in seen else await _fault(check, rest) for number, check in enumerate(checks)]


async def first_fault(checks: Sequence[AnyCheck], slot: Slot) -> str:
    """Return the first fault, or an empty string if every check holds."""
    for check in checks:
        if fault := await _fault(check, slot):
            return fault
    return ""


async def _fault(check: AnyCheck, slot: Slot) -> str:
    try:
        return await check.fault(slot)
    except UnreadableFile as error:
        return str(error)
