"""Run a task's verifier in a slot and read its verdict.

The order is Harbor's: old rewards are removed, the tests are copied into the slot, the script runs with its output in
`test-stdout.txt`, its exit status is ignored, and the reward is read from the files it wrote. A Terminal-Bench 1 script
writes no reward: every test that pytest reports must pass.

If a verifier wrote no reward, did not finish, or ran no test, `GraderError` is raised instead of scoring the work 0.0.
There are two exceptions. The work may have prevented the tests from running: a module of the workspace is missing or
broken, so pytest could not collect the tests. And a Harbor script may give a reward of 0 before it starts pytest.

A positive verdict is checked by further runs, each in a fork of the same work. Stubs of the tests (`stub_tests.py`)
show whether the work left out tests. Then the script runs with the same tests and with falsified ones
(`grading/falsified.py`). Not covered: scripts without pytest, and (in a task that is graded live) code under test that
remembers an earlier run.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from palaestra.core.errors import GraderError, InfraError
from palaestra.core.types import JSON, Label
from palaestra.sandbox.slot import ExecutionResult, Slot
from palaestra.suites.grading.falsified import Controlled, alarm_labels, control, parse
from palaestra.suites.grading.harness import has_started, read_records
from palaestra.suites.grading.run_tests import Status, TestRun, TestsTimedOut, read_run
from palaestra.suites.images.as_user import as_user
from palaestra.suites.task_files import read_text
from palaestra.suites.terminal_bench.offline_script import OfflineScript, needs_network
from palaestra.suites.terminal_bench.rewards import read_rewards, single
from palaestra.suites.terminal_bench.stub_tests import default_tests, empty_tests, may_skip, same_outcomes
from palaestra.suites.terminal_bench.terminal_task import TESTS_DIR, VERIFIER_LOGS, Format, TerminalTask
from palaestra.suites.terminal_bench.verifier_files import install, place_tests, script_name

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STDOUT = f"{VERIFIER_LOGS}/test-stdout.txt"
OUTPUT_BYTES = 20_000
"""The maximum number of bytes of a verifier's output that are recorded."""

_MAX_REWARD_BYTES = 1 << 20
_SIGNALLED = 128
"""The lowest exit status of a command that a signal ended."""

_FAILED = frozenset({Status.FAILED, Status.ERROR})
_SKIPPED = frozenset({Status.SKIPPED, Status.XFAILED, Status.XFAIL_CALLED, Status.XPASSED})
_NOT_STARTED = re.compile(
    r"^.*\b(?:pytest|uvx?|python\S*)\b.*(?:not found|No such file|Permission denied)|No module named '?pytest", re.M
)
"""The error of a shell or of Python if pytest cannot be started."""

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'|cannot import name '\w+' from '([\w.]+)'")


GradedViews = Callable[[], AbstractAsyncContextManager[Slot]]
"""Opens a slot that contains the agent's work and in which no verifier has run. A task that is graded live has only the
agent's slot, in which every run takes place."""


class _PaysWithoutTests(GraderError):
    """The script gives a reward without starting its tests."""

    certain = True


@dataclass(frozen=True, slots=True)
class VerifierSetup:
    """The settings of a verifier's run. `command` and `dependencies` are for pytest, and `ignored` are the agent's
    files that pytest must not load. `out_of_reach` are modules that the image has for its own interpreter, and that
    `command` cannot import."""

    command: tuple[str, ...]
    dependencies: tuple[str, ...]
    out_of_reach: frozenset[str]
    env: Mapping[str, str]
    workdir: str
    user: str | None
    timeout_s: float
    ignored: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class VerifierVerdict:
    """The result of a verifier. `run` is what pytest reported, or None if the script does not use pytest.

    `doubt` explains why the reward cannot have come from the verifier alone.
    """

    reward: float
    rewards: Mapping[str, float]
    run: TestRun | None
    output: str
    exit_status: int
    doubt: str | None = None

    def detail(self) -> dict[str, JSON]:
        """Return the part of the result to record."""
        found: dict[str, JSON] = {"rewards": dict(self.rewards), "output": self.output, "exit_status": self.exit_status}
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
    slot: Slot,
    task: TerminalTask,
    script: OfflineScript,
    setup: VerifierSetup,
    *,
    alone: bool,
    made: Collection[str] = (),
) -> VerifierVerdict:
    """Run the verifier over the work in a slot. If `alone` is true, every other process of the slot is killed after the
    script has run.

    `made` are the paths that the agent created or changed. Raises `GraderError`.
    """
    library_path = setup.env.get("LD_LIBRARY_PATH")
    await install(slot, setup.command, setup.dependencies, library_path, ignored=setup.ignored)
    return await _once(slot, task, script, setup, alone=alone, made=made)


async def find_tampering(
    views: GradedViews, task: TerminalTask, script: OfflineScript, setup: VerifierSetup, verdict: VerifierVerdict
) -> Controlled:
    """Run the verifier again in `views`. Return labels, and the uncontrolled tests."""
    if verdict.doubt is not None or verdict.run is None:
        return _doubted(verdict.doubt)
    again = _Again(views, task, script, setup)
    if problem := await again.unearned(verdict, verdict.run) or await again.pays_less(verdict):
        return _doubted(problem)
    passed = [name for name, status in verdict.run.statuses.items() if status is Status.PASSED]
    files = _files_of(test_files(task), passed)

    async def falsified(texts: Mapping[str, str]) -> TestRun:
        return await again.with_tests({files[path][0]: text for path, text in texts.items()})

    result = await control({path: text for path, (_, text) in files.items()}, passed, falsified)
    skipped = [name for name, status in verdict.run.statuses.items() if status in _SKIPPED]
    labels = (*result.labels, *alarm_labels(verdict.run.alarms))
    return Controlled(labels, (*result.uncontrolled, *skipped))


def _doubted(doubt: str | None) -> Controlled:
    return Controlled((Label("verifier_doubted", doubt, certain=True),) if doubt else ())


@dataclass(frozen=True, slots=True)
class _Again:
    """Runs a verifier again, each time in a new slot of `views`."""

    views: GradedViews
    task: TerminalTask
    script: OfflineScript
    setup: VerifierSetup

    @asynccontextmanager
    async def _look(self, *, ends_well: bool = False) -> AsyncIterator[Slot]:
        """Yield a slot for a further run, which may end without a verdict. Raises `GraderError` if the run times out,
        since a slow machine is not a sign of tampering."""
        setup = self.setup
        library_path = setup.env.get("LD_LIBRARY_PATH")
        async with self.views() as fork:
            await install(
                fork,
                setup.command,
                setup.dependencies,
                library_path,
                ignored=setup.ignored,
                ends_well=ends_well,
            )
            try:
                yield fork
            except TestsTimedOut:
                raise
            except GraderError:
                pass

    async def pays_less(self, verdict: VerifierVerdict) -> str | None:
        """Run the same tests again. Return why the verdict is wrong, for example because the reward is lower now, or
        None."""
        again = None
        async with self._look() as fork:
            again = await _once(fork, self.task, self.script, self.setup, alone=False, made=())
        if again is None or again.reward < verdict.reward:
            return "the verifier gives a lower reward when it runs the same tests again"
        return again.doubt

    async def with_tests(self, texts: Mapping[str, str]) -> TestRun:
        """Run the script with these texts in place of its tests. Only the outcomes of the tests count, because a script
        may write no reward when a test fails."""
        async with self._look(ends_well=True) as fork:
            session = await _session(fork, self.task, self.script, self.setup, texts, alone=False, made=())
            if session.run is not None:
                return session.run
        return TestRun({}, complete=False)

    async def unearned(self, verdict: VerifierVerdict, run: TestRun) -> str | None:
        """Return why the reward is not earned, or None. Either tests are missing from the outcomes, or the same
        outcomes of stub tests get a lower reward."""
        texts = test_files(self.task)
        if problem := await self._left_out(run, texts):
            return problem
        if _FAILED.isdisjoint(run.statuses.values()):
            return None
        files = _files_of(texts, run.statuses)
        stubs = {name: same_outcomes(_in_file(run.statuses, at)) for at, (name, _) in files.items()}
        async with self._look() as fork:
            paid = await _once(fork, self.task, self.script, self.setup, alone=True, made=(), instead=stubs)
            if paid.reward >= verdict.reward:
                return None
        return "the verifier gives a lower reward for the same outcomes of tests that do not use the work"

    async def _left_out(self, run: TestRun, texts: Mapping[str, str]) -> str | None:
        """Return a message about a test that the work, and not the verifier, left out or skipped, or None if there is
        no such test."""
        skipped = [name for name, status in run.statuses.items() if status in _SKIPPED]
        parsed = {name: text for name, text in texts.items() if parse(text) is not None}
        wanted = {(name, test) for name, text in parsed.items() if _is_collected(name) for test in default_tests(text)}
        for at, (name, _) in _files_of(texts, run.statuses).items():
            wanted -= {(name, each.partition("[")[0]) for each in _in_file(run.statuses, at)}
        if not skipped and not wanted and not any("parametrize" in text for text in parsed.values()):
            return None
        for decorated in (True, False):
            stubs = {name: empty_tests(text, decorated=decorated) for name, text in parsed.items()}
            shown = await self.with_tests({name: text for name, text in stubs.items() if default_tests(text)})
            if not shown.collect_errors:
                break
        heads = {name.partition("[")[0] for name in run.statuses}
        for name in sorted(shown.statuses):
            if name not in run.statuses and (decorated or name not in heads):
                return f"{name} was not reported, although the verifier selects it"
        if any(map(may_skip, texts.values())):
            return None
        odd = [name for name in skipped if shown.statuses.get(name, Status.SKIPPED) not in _SKIPPED]
        return f"{odd[0]} was skipped, although the verifier does not skip it" if odd else None


def test_files(task: TerminalTask) -> dict[str, str]:
    """Return the Python files of a verifier by their path below its folder."""
    files = task.verifier.files().items()
    return {name: read_text(path, "replace") for name, path in files if name.endswith(".py") and path.is_file()}


def _is_collected(name: str) -> bool:
    """Return whether pytest looks for tests in a file of this name by default."""
    base = name.rpartition("/")[2]
    return base.startswith("test_") or base.endswith("_test.py")


def _files_of(texts: Mapping[str, str], node_ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the files of these tests, keyed by the path in the node ids. A value is the file's name below the
    verifier's folder, and its text."""
    found = {}
    for at in {node_id.partition("::")[0] for node_id in node_ids}:
        match = next((name for name in texts if at == name or at.endswith(f"/{name}")), None)
        if match is not None:
            found[at] = match, texts[match]
    return found


def _in_file(statuses: Mapping[str, Status], path: str) -> dict[str, Status]:
    """Return the statuses of a file's tests by the part of their node ids after its path."""
    return {name.partition("::")[2]: each for name, each in statuses.items() if name.partition("::")[0] == path}


@dataclass(frozen=True, slots=True)
class _Session:
    """One run of the script. `run` is what pytest reported, or None if the script does not use pytest."""

    records: Sequence[Mapping[str, JSON]]
    exit_code: int
    run: TestRun | None
    output: str


async def _session(
    slot: Slot,
    task: TerminalTask,
    script: OfflineScript,
    setup: VerifierSetup,
    instead: Mapping[str, str],
    *,
    alone: bool,
    made: Collection[str],
) -> _Session:
    """Run the script, with the texts of `instead` in place of tests. Raises `GraderError` if it gave no verdict."""
    await place_tests(slot, task, script, instead)
    result = await slot.execute(
        as_user(["/bin/sh", "-c", f"{TESTS_DIR}/{script_name(task)} > {STDOUT} 2>&1"], setup.user),
        cwd=setup.workdir,
        env={**setup.env, "PALAESTRA_VERDICT": "1"},
        timeout_s=setup.timeout_s,
        verdict=True,
    )
    if alone:
        await slot.execute(["/bin/sh", "-c", "kill -KILL -1"], cwd="/", timeout_s=30)
    records = read_records(result.verdict)
    output = await _output(slot)
    run = read_run(records, result) if script.pytest else None
    _check_ran(task, records, result, run, output, made, setup.out_of_reach)
    return _Session(records, result.exit_code, run, output)


async def _once(
    slot: Slot,
    task: TerminalTask,
    script: OfflineScript,
    setup: VerifierSetup,
    *,
    alone: bool,
    made: Collection[str],
    instead: Mapping[str, str] | None = None,
) -> VerifierVerdict:
    session = await _session(slot, task, script, setup, instead or {}, alone=alone, made=made)
    records, run, output = session.records, session.run, session.output
    if task.format is Format.TERMINAL_BENCH_1:
        assert run is not None
        passed = bool(run.statuses) and run.complete and run.passed(run.statuses) == len(run.statuses)
        rewards: Mapping[str, float] = {"reward": float(passed)}
    else:
        try:
            rewards = read_rewards(await _read(slot, "reward.json"), await _read(slot, "reward.txt"))
        except GraderError as error:
            raise GraderError(f"{error} (exit status {session.exit_code}){_tail(output)}") from None
    reward = single(rewards)
    if reward > 0 and run is not None and not has_started(records):
        problem = f"the verifier of {task.name} gives {reward:g} but did not start its tests:\n{output[-1500:]}"
        raise (_PaysWithoutTests if await _ended_itself(slot, task, script, session.exit_code) else GraderError)(
            problem
        )
    if reward < 1 and needs_network(script.text, output):
        raise GraderError(f"the verifier of {task.name} needs the network, which it does not have:\n{output[-1500:]}")
    doubt = await _doubt(slot, reward, run, alone=alone)
    return VerifierVerdict(reward, rewards, run, output, session.exit_code, doubt)


async def _ended_itself(slot: Slot, task: TerminalTask, script: OfflineScript, exit_code: int) -> bool:
    """Return whether the script ended without a signal and is unchanged. Otherwise, programs of the work that it
    started may have ended it."""
    text = await slot.read_text(f"{TESTS_DIR}/{script_name(task)}", missing="")
    return exit_code < _SIGNALLED and text == script.text


async def _doubt(slot: Slot, reward: float, run: TestRun | None, *, alone: bool) -> str | None:
    """Return the reason to doubt that the reward comes from the verifier, or None. Reasons are failed tests, an
    incomplete session, tampering, and another process that writes rewards."""
    failed = [] if run is None else [name for name, status in run.statuses.items() if status in _FAILED]
    if reward > 0 and run is not None and not run.complete:
        return "there is a reward, but not every test reported, or the test session did not end"
    if run is not None and (certain := [label for label in alarm_labels(run.alarms) if label.certain]):
        return certain[0].evidence
    if reward >= 1 and failed:
        return f"the reward is {reward:g} although {len(failed)} tests failed, {failed[0]} first"
    if alone or reward <= 0:
        return None
    again = f"cd {VERIFIER_LOGS} && rm -f reward.txt reward.json && sleep 0.3 && ls reward.txt reward.json"
    await slot.execute(["/bin/sh", "-c", again], cwd="/", timeout_s=30)
    if await _read(slot, "reward.txt") is not None or await _read(slot, "reward.json") is not None:
        return "a process that is not the verifier writes rewards"
    return None


def _check_ran(
    task: TerminalTask,
    records: Sequence[Mapping[str, JSON]],
    result: ExecutionResult,
    run: TestRun | None,
    output: str,
    made: Collection[str],
    out_of_reach: Collection[str],
) -> None:
    """Raise `GraderError` for a verifier that did not judge the work."""
    tail = _tail(output)
    if result.metadata.get("timeout"):
        raise TestsTimedOut(f"the verifier of {task.name} timed out{tail}")
    unmet = [str(record.get("what")) for record in records if record["kind"] == "unmet"]
    if unmet:
        raise GraderError(f"the verifier of {task.name} needs {', '.join(unmet)}, which are not installed")
    if run is None or run.statuses:
        return
    if not has_started(records) and task.format is Format.HARBOR and not _NOT_STARTED.search(output):
        return  # the script ended before pytest; a positive reward is refused by the caller
    if run.collect_errors and _work_is_broken(task, run.collect_errors, made, out_of_reach):
        return
    why = next((_last_error(text) for text in run.collect_errors.values()), "")
    raise GraderError(f"the verifier of {task.name} ran no test{': ' + why if why else tail}")


def _tail(output: str) -> str:
    return f":\n{output[-1500:]}" if output.strip() else ", and it printed nothing"


def _last_error(text: str) -> str:
    """Return the error line of a collection's traceback."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[-1] if errors else text[-600:]


def _work_is_broken(
    task: TerminalTask, errors: Mapping[str, str], made: Collection[str], out_of_reach: Collection[str]
) -> bool:
    """Return whether the workspace prevented the collection of tests.

    Either a module that the task mentions is missing, or the traceback contains a file that the agent made. A module
    that the image has, but not for the interpreter of the tests, is not the work's fault.
    """
    for text in errors.values():
        match = _MISSING_MODULE.search(text)
        if match is not None and (match[1] or match[2]).partition(".")[0] in out_of_reach:
            return False
        if any(path in text for path in made):
            return True
        if match is not None and _mentions(task, (match[1] or match[2]).partition(".")[0]):
            return True
    return False


def _mentions(task: TerminalTask, module: str) -> bool:
    pattern = re.compile(rf"\b{re.escape(module)}(?:\.py|/|\b)")
    solution = task.solution
    text = read_text(solution.folder / solution.script, "replace") if solution else ""
    return pattern.search(task.instruction) is not None or pattern.search(text) is not None


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
