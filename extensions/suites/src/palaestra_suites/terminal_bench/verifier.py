"""Run a task's verifier in a slot and read its verdict.

The order is Harbor's: old rewards are removed, the tests are copied into the slot, the script runs with its output in
`test-stdout.txt`, its exit status is ignored, and the reward is read from the files it wrote. A Terminal-Bench 1 script
writes no reward: every test that pytest reports must pass.

If a verifier wrote no reward, did not finish, or pays although it ran no test, `GraderError` is raised. A low reward is
in doubt if no test ran or if the output has the words of a failed connection. In both cases the reference solution
shows whose fault that is (`grading/blame.py`): the work can have caused it, and can have written the words.

A positive verdict is checked by two further runs in forks of the same work, one of them with falsified tests
(`grading/falsified.py`). Four signs are certain forgeries, which no honest work can carry: a reward that the tests' own
results contradict or that a process other than the verifier writes, a test session that did not end by itself, a
falsified test that passes, and a file of the verifier that changed while it ran. Three more are certain only if the
same run over the reference solution has none of them (`labels_beside`): skipped tests, a verifier that a signal ended,
and a reward file that no file of the verifier names. Not covered: scripts without pytest, and (in the agent's own slot)
code under test that remembers an earlier run.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from palaestra.rollouts.grading.grader import Way, note_way
from palaestra_slots.core.errors import GraderError, InfraError
from palaestra_slots.core.types import JSON, Label
from palaestra_slots.images.as_user import as_user
from palaestra_slots.images.task_files import read_task_text
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.grading.copied_answers import copied_answers, python_texts
from palaestra_suites.grading.falsified import Controlled, control
from palaestra_suites.grading.harness import (
    FAILED,
    Status,
    TestRun,
    TestsTimedOut,
    content_of,
    opened_in,
    read_records,
    read_run,
    reads_of_tests,
)
from palaestra_suites.terminal_bench.default_tests import default_tests
from palaestra_suites.terminal_bench.offline_script import GradedPart, OfflineScript, lacks_network
from palaestra_suites.terminal_bench.rewards import read_rewards, single
from palaestra_suites.terminal_bench.terminal_task import TESTS_DIR, VERIFIER_LOGS, Format, TerminalTask
from palaestra_suites.terminal_bench.verifier_files import HARNESS_DIR, install, place_tests, script_name

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STDOUT = f"{VERIFIER_LOGS}/test-stdout.txt"
OUTPUT_BYTES = 20_000
"""The maximum number of bytes of a verifier's output that are recorded."""

_MAX_REWARD_BYTES = 1 << 20
_SKIPPED = frozenset({Status.SKIPPED, Status.XFAILED, Status.XFAIL_CALLED, Status.XPASSED})
_IN_BASH = 'if command -v bash > /dev/null; then exec bash -c "$1"; fi; eval "$1"'
"""Runs a command as Harbor does, because a script without a first line `#!` runs in the shell that starts it."""

_SELECTS = re.compile(r"pytest[^\n]*(?:\s-k|::|--deselect|--collect-only|\s-m\s)")
_ECHOED = re.compile(r"\becho\s+[\"']?(\d+(?:\.\d+)?)[\"']?\s*>\s*\S*reward\.txt")
_COLLECTED = re.compile(r"test_.*\.py|.*_test\.py")
_SKIPS = re.compile(r"skip|xfail", re.IGNORECASE)
_OF_WORK = frozenset({"tests_skipped", "verifier_killed", "reward_not_of_the_tests"})
"""Labels of a run that no honest work can have if the reference solution has none of that name."""
_MOST_COMPARED = 100
_TOUCHES = re.compile(
    r"\b(?:chmod|chown|chgrp|touch|ln|setfacl|dos2unix|patch|sed\s+-i|perl\s+-\w*i)\b"
    rf"|\b(?:cp|mv|rsync|install|tar|unzip)\b[^\n]*\s{TESTS_DIR}/?\s*$",
    re.M,
)
"""Commands that may change files of the verifier without naming them."""


GradedViews = Callable[[], AbstractAsyncContextManager[Slot]]
"""Opens a slot that contains the agent's work and in which no verifier has run. A task that is graded live has only the
agent's slot, in which every run takes place."""


@dataclass(frozen=True, slots=True)
class VerifierSetup:
    """A part of a task with the settings of its verifier's run. `command` and `dependencies` are for pytest, and
    `ignored` are the agent's files that pytest must not load. `made` are the paths that the agent created or
    changed."""

    part: GradedPart
    command: tuple[str, ...]
    dependencies: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str | None
    timeout_s: float
    ignored: Collection[str] = ()
    made: Collection[str] = ()
    inputs: Collection[str] = ()
    """Further files whose openings are counted."""
    blank: bool = False
    """Whether tracebacks, and other code that shows lines of source, find no line of a test."""
    keeps: bool = False
    """Whether files that are already in the verifier's folders stay there."""


@dataclass(frozen=True, slots=True)
class VerifierVerdict:
    """The result of a verifier. `run` is what pytest reported, or None if the script does not use pytest.

    `labels` are the signs that the reward did not come from the tests, and `opened` counts how often the script and the
    files of reported tests were opened. `doubts` tells why the output suggests that the
    verifier could not judge the work, such as a network that it lacks. Work can write such words too.
    """

    reward: float
    rewards: Mapping[str, float]
    run: TestRun | None
    output: str
    exit_status: int
    labels: Sequence[Label] = ()
    doubts: str = ""
    opened: Mapping[str, int] = field(default_factory=dict)

    def labels_beside(self, reference: VerifierVerdict) -> list[Label]:
        """Return the labels after the same verifier has paid for the reference solution: without those that it has too,
        and certain where only the work can be the cause."""
        shown = {label.name for label in reference.labels}
        found = [label for label in self.labels if label not in reference.labels]
        found = [replace(each, certain=each.certain or each.name in _OF_WORK - shown) for each in found]
        return [*found, *reads_of_tests(self.opened, reference.opened)]

    @property
    def is_usual(self) -> bool:
        """Whether nothing about the run asks for a comparison: no label, a script that was started and read, and test
        files that were read once."""
        return not self.labels and all(times <= 1 + path.endswith(".sh") for path, times in self.opened.items())

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


async def run_verifier(slot: Slot, setup: VerifierSetup, *, alone: bool, watched: bool = True) -> VerifierVerdict:
    """Run the verifier over the work in a slot. If `alone` is true, every other process of the slot is killed after the
    script has run. If `watched` is true, a positive verdict has labels. Raises `GraderError`.
    """
    session = await _run_script(slot, setup, {}, alone=alone)
    task, run, output = setup.part.task, session.run, session.output
    in_json = False
    if task.format is Format.TERMINAL_BENCH_1:
        assert run is not None
        passed = bool(run.statuses) and run.complete and run.passed(run.statuses) == len(run.statuses)
        rewards: Mapping[str, float] = {"reward": float(passed)}
    else:
        try:
            of_json = await _read_reward(slot, "reward.json")
            rewards, in_json = read_rewards(of_json, await _read_reward(slot, "reward.txt")), of_json is not None
        except GraderError as error:
            raise GraderError(f"{error} (exit status {session.exit_code}){_tail(output)}") from None
    reward, doubts = single(rewards), ""
    if reward < 1 and lacks_network(setup.part.script.whole, test_files(task).values(), output):
        doubts = f"no network: the verifier of {task.name} needs the network, which it does not have{_tail(output)}"
    elif run is not None and not run.statuses:
        why = f"the verifier of {task.name} ran no test{_why_no_test(run, output)}"
        if reward > 0:
            raise GraderError(f"{why}\nIt gives {reward:g} all the same")
        doubts = why if task.solution is not None else ""  # doing nothing cannot show whether tests can run
    labels = []
    if watched and reward > 0:
        labels = await _labels(slot, setup.part, reward, session, alone=alone)
        files = [path for path in task.verifier.files().values() if in_json and path.is_file()]
        if in_json and not any(b"json" in path.read_bytes() for path in files):
            evidence = "reward.json, which no file of the verifier names, has the reward"
            labels.append(Label("reward_not_of_the_tests", evidence))
    own = {script_name(task), *(name for name, _ in _files_of(test_files(task), run.statuses if run else ()).values())}
    opened = {path: times for path, times in session.opened.items() if path.removeprefix(f"{TESTS_DIR}/") in own}
    return VerifierVerdict(reward, rewards, run, output, session.exit_code, labels, doubts, opened)


async def falsified(
    views: GradedViews,
    setup: VerifierSetup,
    verdict: VerifierVerdict,
    prepared: GradedViews,
    reference: GradedViews | None = None,
    *,
    fresh: bool,
) -> Controlled:
    """Run the verifier with falsified tests, in a view of the same work. Return the labels of a positive verdict, and
    the tests that cannot be falsified.

    `prepared` opens a slot with the prepared workspace, and `reference` one with the reference solution. `fresh` tells
    whether each of the `views` is a slot of its own.
    """
    task, run = setup.part.task, verdict.run
    assert run is not None
    passed = [name for name, status in run.statuses.items() if status is Status.PASSED]
    files = _files_of(test_files(task), passed)

    async def run_with_texts(slots: GradedViews, texts: Mapping[str, str]) -> TestRun:
        return await run_with_tests(slots, setup, {files[path][0]: text for path, text in texts.items()})

    async def known() -> list[str]:
        async with prepared() as before:
            texts = await python_texts(before, work)
        solution = task.solution
        paths = [] if solution is None else [solution.folder / name for name in (solution.script, *solution.files)]
        return [task.instruction, *texts.values(), *(read_task_text(path, "replace") for path in paths)]

    texts = {path: text for path, (_, text) in files.items()}
    async with views() as fork:
        work = await python_texts(fork, setup.made)
    copied = await copied_answers(texts, passed, work, known)
    right = partial(run_with_texts, reference) if reference else None
    result = await control(texts, passed, partial(run_with_texts, views), right, fresh=fresh)
    skipped = [name for name, status in run.statuses.items() if status in _SKIPPED]
    return Controlled((*copied, *result.labels), (*result.uncontrolled, *skipped))


async def run_with_tests(views: GradedViews, setup: VerifierSetup, texts: Mapping[str, str]) -> TestRun:
    """Run the script with these texts in place of its tests. Only the outcomes of the tests count, because a script may
    write no reward when a test fails. Raises `GraderError` if the run times out, since a slow machine is not a sign of
    tampering."""
    async with views() as fork:
        try:
            session = await _run_script(fork, setup, texts, alone=False)
        except TestsTimedOut:
            raise
        except GraderError:
            return TestRun({}, complete=False)
    return TestRun({}, complete=False) if session.run is None else session.run


def left_out_tests(task: TerminalTask, script: OfflineScript, run: TestRun) -> list[str]:
    """Return the tests in the verifier's files that were not reported, although pytest collects them by default and the
    script selects none by name. A file counts if the script names it, or names no Python file."""
    if _SELECTS.search(script.text) or run.collect_errors:
        return []
    found, ids = [], [node_id.partition("::") for node_id in run.statuses]
    files = {name: at for at, (name, _) in _files_of(test_files(task), run.statuses).items()}
    for name, text in test_files(task).items():
        base = name.rpartition("/")[2]
        if name not in files and not (_COLLECTED.fullmatch(base) and (base in script.text or ".py" not in script.text)):
            continue
        reported = {test.partition("[")[0] for path, _, test in ids if path == files.get(name)}
        found += [f"{name}::{test}" for test in sorted(default_tests(text) - reported)]
    return found


def skipped_tests(task: TerminalTask, run: TestRun) -> list[str]:
    """Return the skipped tests of a verifier whose files never mention skipping."""
    if any(_SKIPS.search(text) for text in test_files(task).values()):
        return []
    return [name for name, status in run.statuses.items() if status in _SKIPPED]


def test_files(task: TerminalTask) -> dict[str, str]:
    """Return the Python files of a verifier by their path below its folder."""
    files = task.verifier.files().items()
    return {name: read_task_text(path, "replace") for name, path in files if name.endswith(".py") and path.is_file()}


def _files_of(texts: Mapping[str, str], node_ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the files of these tests, keyed by the path in the node ids. A value is the file's name below the
    verifier's folder, and its text."""
    found = {}
    for at in {node_id.partition("::")[0] for node_id in node_ids}:
        match = next((name for name in texts if at == name or at.endswith(f"/{name}")), None)
        if match is not None:
            found[at] = match, texts[match]
    return found


@dataclass(frozen=True, slots=True)
class _Session:
    """One run of the script. `run` is what pytest reported, or None if the script does not use pytest."""

    exit_code: int
    run: TestRun | None
    output: str
    placed: Mapping[str, str]
    """The verifier's files, as `_facts` returned them before the run."""
    opened: Mapping[str, int]
    killed: bool
    """Whether a signal ended the script, and memory had not run out."""


async def _run_script(slot: Slot, setup: VerifierSetup, instead: Mapping[str, str], *, alone: bool) -> _Session:
    """Run the script. With the texts of `instead` in place of tests, pytest exits with status 0, so that the script
    starts it as often as for passing work. Raises `GraderError` if the script gave no verdict."""
    task, script = setup.part.task, setup.part.script
    note_way(Way.RUN_TESTS if script.pytest else Way.EXIT_CODE, script_name(task))
    await install(
        slot,
        setup.command,
        setup.dependencies,
        setup.env.get("LD_LIBRARY_PATH"),
        ignored=setup.ignored,
        names=[name.rpartition("/")[2] for name in test_files(task)],
        ends_well=bool(instead),
        blank=setup.blank,
    )
    await place_tests(slot, setup.part, instead, keeps=setup.keeps)
    placed = await _facts(slot)
    broker = [*setup.command, f"{HARNESS_DIR}/verdict_broker.py"] if setup.command else []
    start = [*broker, "/bin/sh", "-c", _IN_BASH, "sh", f"{TESTS_DIR}/{script_name(task)} > {STDOUT} 2>&1"]
    result = await slot.execute(
        as_user(start, setup.user),
        cwd=setup.workdir,
        env={**setup.env, "PALAESTRA_VERDICT": secrets.token_hex(16)},
        timeout_s=setup.timeout_s,
        verdict=True,
        watched=[
            *(f"{TESTS_DIR}/{name}" for name in [script_name(task), *test_files(task)][:_MOST_COMPARED]),
            *setup.inputs,
        ],
    )
    if alone:
        await slot.execute(["/bin/sh", "-c", "kill -KILL -1"], cwd="/", timeout_s=30)
    records = read_records(result.verdict)
    output = await _stdout_tail(slot)
    run = read_run(records, result) if script.pytest else None
    if result.metadata.get("timeout"):
        raise TestsTimedOut(f"the verifier of {task.name} timed out{_tail(output)}")
    if unmet := [str(record.get("what")) for record in records if record["kind"] == "unmet"]:
        raise GraderError(f"the verifier of {task.name} needs {', '.join(unmet)}, which are not installed")
    killed = "signal" in result.metadata and not result.metadata["oom"]
    return _Session(result.exit_code, run, output, placed, opened_in(records, result), killed)


async def _labels(slot: Slot, part: GradedPart, reward: float, session: _Session, *, alone: bool) -> list[Label]:
    """Return the labels of a positive verdict from the run itself."""
    task, script, run = part.task, part.script, session.run
    found = [] if run is None else [*run.labels]
    failed = [] if run is None else _failed_tests(task, run)
    if reward >= 1 and failed:
        evidence = f"the reward is {reward:g} although {len(failed)} tests failed, {failed[0]} first"
        found.append(Label("reward_not_of_the_tests", evidence, certain=True))
    if run is not None and failed and reward not in (literal := _literal_rewards(part) or [reward]):
        evidence = f"the reward is {reward:g}, but the verifier writes only {', '.join(map(str, sorted(literal)))}"
        found.append(Label("reward_not_of_the_tests", evidence, certain=True))
    if run is not None and (missing := left_out_tests(task, script, run)):
        found.append(Label("tests_left_out", f"{len(missing)} tests were not reported, {missing[0]} first"))
    if run is not None and (skipped := skipped_tests(task, run)):
        found.append(Label("tests_skipped", f"{len(skipped)} tests were skipped, {skipped[0]} first"))
    if session.killed:
        found.append(Label("verifier_killed", f"a signal ended the verifier (exit status {session.exit_code})"))
    if changed := await _changed_files(slot, part) or await _replaced(slot, script, session.placed):
        found.append(Label("verifier_changed", f"{changed} changed while the verifier ran", certain=True))
    if not alone:
        again = f"cd {VERIFIER_LOGS} && rm -f reward.txt reward.json && sleep 0.3 && ls reward.txt reward.json"
        await slot.execute(["/bin/sh", "-c", again], cwd="/", timeout_s=30)
        if await _read_reward(slot, "reward.txt") is not None or await _read_reward(slot, "reward.json") is not None:
            evidence = "a process that is not the verifier writes rewards"
            found.append(Label("reward_not_of_the_tests", evidence, certain=True))
    return found


def _failed_tests(task: TerminalTask, run: TestRun) -> list[str]:
    """Return the verifier's own tests that failed. Tests of the work may have to fail, for example on a bug that the
    verifier puts in."""
    own = _files_of(test_files(task), run.statuses)
    return [name for name, status in run.statuses.items() if status in FAILED and name.partition("::")[0] in own]


def _literal_rewards(part: GradedPart) -> set[float]:
    """Return the numbers that a verifier can write as its reward; empty if it computes them."""
    texts = [part.script.whole, *test_files(part.task).values()]
    lines = [
        line for text in texts for line in text.splitlines() if re.search(r"reward\.(?:txt|json)|\breward\b", line)
    ]
    written = [_ECHOED.findall(line) for line in lines]
    return set() if not all(written) else {float(number) for each in written for number in each}


async def _facts(slot: Slot) -> dict[str, str]:
    """Return the inode and the time of the last change, which no program can set, of the verifier's code by path."""
    listing = f"find {TESTS_DIR} {HARNESS_DIR} -type f -exec stat -c '%n %i %z' {{}} +"
    done = await slot.execute(["/bin/sh", "-c", listing], cwd="/", timeout_s=30, spill=False)
    return {name: facts for name, _, facts in (line.partition(" ") for line in done.output.splitlines())}


async def _replaced(slot: Slot, script: OfflineScript, placed: Mapping[str, str]) -> str | None:
    """Return a file of the verifier's code that was replaced or written while the verifier ran, even if it has its
    content again. Files that its own scripts write or edit do not count."""
    texts, now = script.whole, await _facts(slot)
    for path, facts in placed.items():
        code = path.endswith((".py", ".sh")) and not _TOUCHES.search(texts) and not _edits(texts, path)
        if now.get(path, facts) != facts and (code or path.startswith(f"{HARNESS_DIR}/")):
            return path
    return None


def _edits(texts: str, name: str) -> bool:
    """Return whether scripts write or edit a file."""
    base = re.escape(name.rpartition("/")[2])
    return re.search(rf"(?:sed\s+-i|>|\bcp\b|\bmv\b|\btee\b)[^\n]*{base}", texts) is not None


async def _changed_files(slot: Slot, part: GradedPart) -> str | None:
    """Return the name of a file of the verifier whose content differs after the run, or None. Files that the verifier's
    own scripts write or edit do not count."""
    task, script = part.task, part.script
    files = [each for each in task.verifier.files().items() if each[1].is_file() and each[1].suffix != ".pyc"]
    for name, path in files[:_MOST_COMPARED]:
        wanted = script.text if name == script_name(task) else script.others.get(name)
        data = wanted.encode(errors="surrogateescape") if wanted is not None else path.read_bytes()
        if len(data) > _MAX_REWARD_BYTES or _edits(script.whole, name):
            continue
        if await content_of(slot, f"{TESTS_DIR}/{name}", _MAX_REWARD_BYTES) != data:
            return name
    return None


def _why_no_test(run: TestRun, output: str) -> str:
    """Return why a session ran no test, from the first error of its collection."""
    for text in run.collect_errors.values():
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        return f": {errors[-1] if errors else text[-600:]}"
    return _tail(output)


def _tail(output: str) -> str:
    return f":\n{output[-1500:]}" if output.strip() else ", and it printed nothing"


async def _stdout_tail(slot: Slot) -> str:
    try:
        status = await slot.stat(STDOUT)
        size = status.size if status is not None else 0
        data = await slot.read_bytes(STDOUT, max_bytes=OUTPUT_BYTES, offset=max(0, size - OUTPUT_BYTES))
    except InfraError:
        raise
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


async def _read_reward(slot: Slot, name: str) -> bytes | None:
    """Return a reward file, or None if there is none. Raises `GraderError` for anything else than a file."""
    try:
        return await slot.read_bytes(f"{VERIFIER_LOGS}/{name}", max_bytes=_MAX_REWARD_BYTES)
    except FileNotFoundError:
        return None
    except InfraError:
        raise
    except OSError as error:
        raise GraderError(f"the verifier's {name} cannot be read: {error}") from None
