"""Runs a task's verifier in a slot and reads its verdict.

The order is Harbor's: old rewards are removed, the tests are put into the slot and made executable, the script runs
with its output in `test-stdout.txt`, its exit status counts for nothing, and the reward is read from what it wrote. A
Terminal-Bench 1 script writes none: there every test that pytest reports must have passed.

Whose fault is silence? A verifier that wrote no reward, did not end, or ran none of its tests has said nothing about
the work: `GraderError`, never 0.0. Unless the work itself kept the tests from running: pytest could not collect them
because a module of the workspace is missing or broken.

A passing verdict is then held against the same tests, made false (`swe/falsify.py`). A script that still pays was not
speaking of its tests. Not covered: scripts without pytest, and code under test that gambles, or (in a task graded live)
remembers that its tests ran before, and fails on purpose.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from palaestra.core.errors import GraderError, InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import ExecutionResult, Slot
from palaestra.suites.images.as_user import as_user
from palaestra.suites.swe.controls import false_copy
from palaestra.suites.swe.run_tests import Status, TestRun, read_records, read_run
from palaestra.suites.terminal_bench.rewards import read_rewards, single
from palaestra.suites.terminal_bench.scripts import Script, offline_at
from palaestra.suites.terminal_bench.terminal_task import TESTS_DIR, VERIFIER_LOGS, Format, TerminalTask
from palaestra.suites.terminal_bench.verifier_files import install, place_tests, script_name

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STDOUT = f"{VERIFIER_LOGS}/test-stdout.txt"
OUTPUT_BYTES = 20_000
"""How much of a verifier's output is kept in the record."""

_MAX_REWARD_BYTES = 1 << 20
_FAILED = frozenset({Status.FAILED, Status.ERROR})
_NOT_STARTED = re.compile(
    r"^.*\b(?:pytest|uvx?|python\S*)\b.*(?:not found|No such file|Permission denied)|No module named '?pytest", re.M
)
"""What a shell or Python says when a script wanted to start pytest and could not."""

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'|cannot import name '\w+' from '([\w.]+)'")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a verifier starts: the command for pytest, its packages, the variables, directory and user."""

    command: tuple[str, ...]
    dependencies: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said. `run` is what pytest reported, None where the script starts none.

    `doubt` says why the reward cannot have come from the verifier alone.
    """

    reward: float
    rewards: Mapping[str, float]
    run: TestRun | None
    output: str
    doubt: str | None = None

    def detail(self) -> dict[str, JSON]:
        """For the record."""
        found: dict[str, JSON] = {"rewards": dict(self.rewards), "output": self.output}
        if self.run is not None:
            statuses = self.run.statuses
            found |= {
                "tests_passed": self.run.passed(statuses),
                "tests_total": len(statuses),
                "not_passed": {name: status.value for name, status in list(statuses.items())[:50]
                               if status is not Status.PASSED},
            }  # fmt: skip
        return found


async def verify(
    slot: Slot, task: TerminalTask, script: Script, setting: Setting, *, alone: bool, made: Collection[str] = ()
) -> Verdict:
    """Check the work in a slot. `alone` means that no process of the slot but the verifier's is to live on; `made` are
    paths that the agent made or changed. Raises `GraderError`."""
    await install(slot, setting.command, setting.dependencies, setting.env.get("LD_LIBRARY_PATH"))
    return await _once(slot, task, script, setting, {}, alone=alone, made=made)


async def tampering(slot: Slot, task: TerminalTask, script: Script, setting: Setting, verdict: Verdict) -> str | None:
    """Why a verdict that pays is not believed, or None: the verifier still pays when its tests must fail.

    Runs it in a slot where it has not run, or once more, with its tests made false by changes as small as one expected
    value.
    """
    if verdict.doubt is not None or verdict.run is None or not verdict.run.statuses:
        return verdict.doubt
    copies = _failing(task)
    judged = {name.partition("::")[0].rpartition("/")[2] for name in verdict.run.statuses}
    if not judged or not judged <= {Path(path).name for path in copies}:
        return None
    await install(slot, setting.command, setting.dependencies, setting.env.get("LD_LIBRARY_PATH"))
    try:
        again = await _once(slot, task, script, setting, copies, alone=False, made=())
    except GraderError:
        return None  # it pays nothing for tests that fail, which is what was asked
    if again.reward >= verdict.reward:
        return f"the verifier pays {again.reward:g} for tests that must fail"
    return None


def _failing(task: TerminalTask) -> dict[str, str]:
    """The test files, made false, by their path below the folder."""
    found, drawn = {}, SystemRandom()
    for name, path in task.verifier.files().items():
        copy = false_copy(path.read_text(encoding="utf-8", errors="replace"), drawn) if name.endswith(".py") else None
        if copy is not None and copy.tests:
            found[name] = copy.text
    return found


async def _once(
    slot: Slot,
    task: TerminalTask,
    script: Script,
    setting: Setting,
    instead: Mapping[str, str],
    *,
    alone: bool,
    made: Collection[str],
) -> Verdict:
    await place_tests(slot, task, script, instead)
    nonce = secrets.token_hex(16)
    result = await slot.execute(
        as_user(["/bin/sh", "-c", f"{TESTS_DIR}/{script_name(task)} > {STDOUT} 2>&1"], setting.user),
        cwd=setting.workdir,
        env={**setting.env, "PALAESTRA_NONCE": nonce},
        timeout_s=setting.timeout_s,
        verdict=True,
    )
    if alone:
        await slot.execute(["/bin/sh", "-c", "kill -KILL -1"], cwd="/", timeout_s=30)
    records = read_records(result.verdict, nonce)
    output = await _output(slot)
    run = read_run(records, result) if script.pytest else None
    _check_ran(task, records, result, run, output, made)
    if task.format is Format.TERMINAL_BENCH_1:
        assert run is not None
        passed = bool(run.statuses) and run.complete and run.passed(run.statuses) == len(run.statuses)
        rewards: Mapping[str, float] = {"reward": float(passed)}
    else:
        rewards = read_rewards(await _read(slot, "reward.json"), await _read(slot, "reward.txt"))
    reward = single(rewards)
    if reward > 0 and run is not None and not _started(records):
        raise GraderError(
            f"the verifier of {task.name} gives {reward:g} without having started its tests:\n{output[-1500:]}"
        )
    if reward < 1 and offline_at(script.text, output):
        raise GraderError(
            f"the verifier of {task.name} reached for the network, which it does not have:\n{output[-1500:]}"
        )
    return Verdict(reward, rewards, run, output, await _doubt(slot, reward, run, alone=alone))


async def _doubt(slot: Slot, reward: float, run: TestRun | None, *, alone: bool) -> str | None:
    """Why the reward is not the verifier's: it pays in full for tests that failed, or somebody else writes it, too."""
    failed = [] if run is None else [name for name, status in run.statuses.items() if status in _FAILED]
    if reward >= 1 and failed:
        return f"the reward is {reward:g} though {len(failed)} tests failed, {failed[0]} first"
    if alone or reward <= 0:
        return None
    again = f"cd {VERIFIER_LOGS} && rm -f reward.txt reward.json && sleep 0.3 && ls reward.txt reward.json"
    await slot.execute(["/bin/sh", "-c", again], cwd="/", timeout_s=30)
    if await _read(slot, "reward.txt") is not None or await _read(slot, "reward.json") is not None:
        return "a process that is not the verifier's writes rewards"
    return None


def _check_ran(
    task: TerminalTask,
    records: Sequence[Mapping[str, JSON]],
    result: ExecutionResult,
    run: TestRun | None,
    output: str,
    made: Collection[str],
) -> None:
    """Raises `GraderError` for a verifier that said nothing about the work."""
    tail = f":\n{output[-1500:]}" if output.strip() else ", and it printed nothing"
    if result.metadata.get("timeout"):
        raise GraderError(f"the verifier of {task.name} did not end in its time{tail}")
    unmet = [str(record.get("what")) for record in records if record["kind"] == "unmet"]
    if unmet:
        raise GraderError(f"the verifier of {task.name} needs {', '.join(unmet)}, which only the network has")
    if run is None or run.statuses:
        return
    if not _started(records) and task.format is Format.HARBOR and not _NOT_STARTED.search(output):
        return  # the script gave its reward before it came to pytest: none, or it is not believed
    if run.collect_errors and _is_the_works_fault(task, run.collect_errors, made):
        return
    why = next((_last_error(text) for text in run.collect_errors.values()), "")
    raise GraderError(f"the verifier of {task.name} ran no test{': ' + why if why else tail}")


def _started(records: Sequence[Mapping[str, JSON]]) -> bool:
    return any(record["kind"] == "start" for record in records)


def _last_error(text: str) -> str:
    """The line of a collection's traceback that says what was wrong."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[-1] if errors else text[-600:]


def _is_the_works_fault(task: TerminalTask, errors: Mapping[str, str], made: Collection[str]) -> bool:
    """Whether tests could not be collected because of the workspace: a module that the task speaks of is missing, or
    the error passed through a file that the agent made."""
    for text in errors.values():
        if any(path in text for path in made):
            return True
        match = _MISSING_MODULE.search(text)
        if match is not None and _speaks_of(task, (match[1] or match[2]).partition(".")[0]):
            return True
    return False


def _speaks_of(task: TerminalTask, module: str) -> bool:
    pattern = re.compile(rf"\b{re.escape(module)}(?:\.py|/|\b)")
    solution = task.solution
    text = (solution.folder / solution.script).read_text(errors="replace") if solution else ""
    return pattern.search(task.instruction) is not None or pattern.search(text) is not None


def _script_name(task: TerminalTask) -> str:
    return task.verifier.script.rpartition("/")[2]


async def _output(slot: Slot) -> str:
    try:
        status = await slot.stat(STDOUT)
        size = status.size if status is not None else 0
        data = await slot.read_bytes(STDOUT, max_bytes=OUTPUT_BYTES, offset=max(0, size - OUTPUT_BYTES))
    except InfraError:
        raise
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


async def _read(slot: Slot, name: str) -> bytes | None:
    try:
        return await slot.read_bytes(f"{VERIFIER_LOGS}/{name}", max_bytes=_MAX_REWARD_BYTES)
    except InfraError:
        raise
    except OSError:
        return None
