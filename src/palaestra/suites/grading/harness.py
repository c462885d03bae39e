"""Run a test harness in a slot and read its records from the verdict channel.

Until the `start` record no code of the workspace has run, so a missing `start` is the grader's fault, not the agent's.
The nonce reaches the harness on standard input and is in no file, argument or variable. Not covered: code under test
shares the process of the harness and can search its memory for the nonce; see `controls.py`.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from importlib import resources

from palaestra.core.errors import GraderError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import ExecutionResult, Slot


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
    await send_scripts(slot, folder, "verdict_channel.py", script)
    nonce = secrets.token_hex(16)
    result = await slot.execute(
        [*command, f"{folder}/{script}"],
        cwd=plan["root"],
        env=env,
        stdin=json.dumps({"nonce": nonce, **plan}).encode(),
        timeout_s=timeout_s,
        verdict=True,
    )
    records = read_records(result.verdict, nonce)
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


def read_records(data: bytes, nonce: str) -> list[Mapping[str, JSON]]:
    """The records of one run. Lines that are torn, malformed or not signed with its nonce are dropped."""
    records: list[Mapping[str, JSON]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("nonce") == nonce:
            records.append(record)
    return records


def has_started(records: Sequence[Mapping[str, JSON]]) -> bool:
    """Whether the harness sent `start`."""
    return any(record["kind"] == "start" for record in records)
