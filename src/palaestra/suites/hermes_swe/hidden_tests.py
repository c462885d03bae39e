"""Runs a task's hidden tests in a slot and says what became of each, and whether they still could fail.

The tests come by standard input and are in no file of the slot, the verdict goes over a descriptor of its own. Until
the harness has said `start` nothing of the workspace has run, so silence before it is the harness's: `GraderError`.
Silence after it is the work's: tests that did not report have not passed.

Not covered: code under test shares its process with the tests, so a passing verdict is held against the copies of
`swe/controls.py`, which says what it cannot find.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from random import SystemRandom

from palaestra.core.errors import GraderError
from palaestra.sandbox.slot import Slot
from palaestra.suites.hermes_swe.program_rows import Suite
from palaestra.suites.swe.controls import TAMPERED, failing_copy, rounds, watching_copy
from palaestra.suites.swe.run_tests import read_records

HARNESS_DIR = "/tmp/.palaestra-tests"  # noqa: S108  in the slot; no layer keeps it


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One run of a suite. `errors` has what is wrong with each test that did not pass, by name."""

    __test__ = False  # not a test class, in spite of the name

    passed: int
    errors: Mapping[str, str]
    output: str

    @property
    def good(self) -> bool:
        """Whether every test passed."""
        return not self.errors


async def run_suite(slot: Slot, python: str, root: str, suite: Suite, *, timeout_s: float) -> TestOutcome:
    """Run the tests over what lies in `root`. Raises `GraderError` where the harness itself did not start."""
    script, nonce = f"{HARNESS_DIR}/harness.py", secrets.token_hex(16)
    await slot.write_bytes(script, resources.files(__package__).joinpath("hidden_test_harness.py").read_bytes())
    plan = {"nonce": nonce, "root": root, "tests": suite.text, "names": suite.names}
    done = await slot.execute(
        [python, "-I", "-S", "-B", script],
        cwd=root,
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
        stdin=json.dumps(plan).encode(),
        timeout_s=timeout_s,
        verdict=True,
    )
    records = read_records(done.verdict, nonce)
    if not any(record["kind"] == "start" for record in records):
        raise GraderError(f"the test harness did not start in {slot.slot_id}: {done.error}\n{done.output[-2000:]}")
    ended = any(record["kind"] == "finish" for record in records)
    said = {str(record["name"]): record for record in records if record["kind"] == "test"}
    silent = "the test run went over its time" if done.metadata.get("timeout") else "the test run ended before it"
    errors = {}
    for name in suite.names:
        record = said.get(name)
        if record is None or not ended:
            errors[name] = silent
        elif not record["passed"]:
            errors[name] = str(record["error"])
    return TestOutcome(len(suite.names) - len(errors), errors, done.output[-4000:])


async def tampering(slot: Slot, python: str, root: str, suite: Suite, *, timeout_s: float) -> str | None:
    """What works against tests that all passed, or None: they pass though they were made false, or what they compare
    equals everything. No test may have run in the slot before."""

    async def run(text: str) -> TestOutcome:
        async with slot.fork() as fork:
            return await run_suite(fork, python, root, Suite(text, suite.names), timeout_s=timeout_s)

    drawn = rounds({"": suite.text}, suite.names, SystemRandom())
    for each in drawn:
        done = await run(each.texts[""])
        if wrong := each.wrong([name for name in suite.names if name not in done.errors]):
            return wrong
    if not drawn and (copy := failing_copy(suite.text)) is not None:
        done = await run(copy.text)
        if done.passed:
            return f"{done.passed} of {len(suite.names)} tests pass whatever they assert"
    if (copy := watching_copy(suite.text)) is not None:
        for name, error in (await run(copy.text)).errors.items():
            if TAMPERED in error:
                return f"{name} compares an object that equals everything"
    return None
