"""Run a test harness in a slot and read its records from the verdict channel.

No workspace code runs before the harness sends the record `start`. If the record is missing, the grader has failed and
not the agent.

Invariant: the harness holds no secret. The harness gets the files to run, but neither test names nor a key; this module
interprets the records.

Not covered: code under test shares the process of the harness and can write records (see `falsified.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from palaestra.core.errors import GraderError
from palaestra.core.types import JSON
from palaestra.rollouts.grading.grader import Way, note_way
from palaestra.sandbox.slot import ExecutionResult, Slot


@dataclass(frozen=True, slots=True, order=True)
class Alarm:
    """A report of the harness: the event, the file below the root that caused it, and the label that it becomes.
    `path` is empty if the file is unknown."""

    event: str
    path: str = ""
    label: str = "audited_call"
    certain: bool = False


async def run_harness(
    slot: Slot,
    command: Sequence[str],
    script: str,
    plan: Mapping[str, JSON],
    *,
    folder: str,
    env: Mapping[str, str],
    timeout_s: float,
) -> tuple[list[Mapping[str, JSON]], ExecutionResult]:
    """Copy `script` of `in_slot` into `folder`, start it with `command` in `plan["root"]`, and return its records.

    Raises `GraderError` if the script does not send `start`.
    """
    note_way(Way.RUN_TESTS)
    await send_scripts(slot, folder, "verdict_channel.py", "audit_hook.py", script)
    result = await slot.execute(
        [*command, f"{folder}/{script}"],
        cwd=plan["root"],
        env=env,
        stdin=json.dumps(plan).encode(),
        timeout_s=timeout_s,
        verdict=True,
    )
    records = read_records(result.verdict)
    if not has_started(records):
        raise GraderError(f"the test harness did not start in {slot.slot_id}: {result.error}\n{result.output[-2000:]}")
    return records, result


async def send_scripts(slot: Slot, folder: str, *names: str) -> None:
    """Copy files of `in_slot` into a folder of the slot."""
    for name in names:
        await slot.write_bytes(f"{folder}/{name}", _script(name))


@functools.cache
def _script(name: str) -> bytes:
    return resources.files(f"{__package__}.in_slot").joinpath(name).read_bytes()


def read_records(data: bytes) -> list[Mapping[str, JSON]]:
    """Return the records of one run. Lines that are torn or malformed are dropped."""
    records: list[Mapping[str, JSON]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            records.append(record)
    return records


def alarms_in(records: Sequence[Mapping[str, JSON]]) -> frozenset[Alarm]:
    """Return the alarms in the records. A session that ends twice, although the harness was started once, is certain: a
    harness reports the end once, and no honest work writes to the verdict channel."""
    found = set()
    for record in records:
        if record["kind"] == "alarm":
            event, path = str(record.get("event")), str(record.get("path", ""))
            found.add(Alarm(event, path, "framework_changed" if event.startswith("changed ") else "audited_call"))
    kinds = [record["kind"] for record in records]
    if kinds.count("finish") > 1 and kinds.count("start") == 1:
        found.add(Alarm("a session that ends twice", "", "forged_records", certain=True))
    return frozenset(found)


def has_started(records: Sequence[Mapping[str, JSON]]) -> bool:
    """Return whether the harness sent `start`."""
    return any(record["kind"] == "start" for record in records)
