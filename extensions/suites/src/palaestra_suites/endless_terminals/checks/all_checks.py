"""Defines the union type of all checks, and evaluates lists of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.endless_terminals.checks.base_check import UnreadableFile
from palaestra_suites.endless_terminals.checks.data_checks import Csv, Ini, Json, JsonLines, Toml, Yaml
from palaestra_suites.endless_terminals.checks.file_checks import (
    Absent,
    Digests,
    Exists,
    FileContent,
    Files,
    Lines,
    Modes,
    SymbolicLink,
)
from palaestra_suites.endless_terminals.checks.program_checks import LIVE, Archive, Git, Running, Runs, Serves, SqlQuery

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
    if the slot fails.

    Programs of the agent (`Runs`) run after all other checks, because they could replace the programs of the checks.
    """
    order = sorted(range(len(checks)), key=lambda number: isinstance(checks[number], Runs))
    seen = {number: await _fault(checks[number], slot) for number in order}
    return [seen[number] for number in range(len(checks))]


async def live_faults(checks: Sequence[AnyCheck], slot: Slot, sealed: Callable[[], Awaitable[Slot]]) -> list[str]:
    """Return the fault of each check of a task about running processes, in order. Checks of processes (`LIVE`) run
    first, in the agent's slot. All other checks run in the slot that `sealed` returns; `sealed` may end the agent's
    slot."""
    seen = {number: await _fault(check, slot) for number, check in enumerate(checks) if isinstance(check, LIVE)}
    others = [check for check in checks if not isinstance(check, LIVE)]
    found = iter(await faults(others, await sealed()) if others else ())
    return [seen[number] if number in seen else next(found) for number in range(len(checks))]


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
