"""Run hidden tests over Python code of the agent: test functions without arguments and `unittest` classes.

The tests are text that no file of the slot contains, and every result comes back on the verdict channel. `run_tests` is
the whole of it for authors of environments: the tests, the falsified tests (`falsified.py`), and the labels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from palaestra_slots.core.types import Label, Score
from palaestra_slots.sandbox.python_call import PACKAGES_DIR
from palaestra_slots.sandbox.slot import WORKSPACE, Rung, Slot
from palaestra_suites.grading.copied_answers import copied_answers, python_files, python_texts
from palaestra_suites.grading.falsified import control, tests_in
from palaestra_suites.grading.harness import Status, TestRun, read_run, run_harness

# With -I, neither the workspace nor a variable such as PYTHONPATH decides what the harness imports.
_PYTHON = ("python3", "-I", "-B")
_LINE = re.compile(r'^ *File "<tests>", line (\d+), in .*$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TestVerdicts:
    """The verdict on each hidden test. `failed` maps the names of tests that did not pass to the reason; `labels` are
    signs that the work changed its verdict."""

    __test__ = False  # pytest: not a test class

    passed: tuple[str, ...]
    failed: Mapping[str, str]
    labels: tuple[Label, ...] = ()

    @property
    def share(self) -> float:
        """The share of the tests that passed, between 0 and 1."""
        return len(self.passed) / (len(self.passed) + len(self.failed))

    def score(self, *, partial: bool = False) -> Score:
        """Return a score with the labels: 1 if every test passed, else 0 or, if `partial`, the share that passed."""
        reward = self.share if partial else float(not self.failed)
        metrics = {"tests_passed": float(len(self.passed)), "tests_total": float(len(self.passed) + len(self.failed))}
        return Score(reward, metrics, {"not_passed": dict(list(self.failed.items())[:20])}, labels=self.labels)


async def run_tests(
    sandbox: Slot,
    tests: str | Mapping[str, str],
    *,
    cwd: str = WORKSPACE,
    reference: Mapping[str, str] | None = None,
    python_path: Sequence[str] = (".",),
    timeout_s: float = 60.0,
) -> TestVerdicts:
    """Run hidden tests over the work in `cwd` and return the verdict on each.

    `tests` is Python text, or maps names to Python texts that run in separate processes. Its tests are functions
    without arguments whose names begin with `test`, and `unittest` classes; they may import the work, whose files must
    not be called like a standard module. `reference` maps the paths of a correct solution to their texts. With it, a
    finding of the falsified tests, or a constant that the work shares with the tests, counts only if the solution does
    not have it. Give it if right results are meant to equal many values, as wildcards do; without it, the label of such
    a result is certain. `python_path` lists directories to import from, relative to `cwd`.

    The tests that pass run once more, falsified, in a fork of the sandbox. At isolation levels without forks
    this second run is left out. A test that timed out, or that the work prevented from running, did not pass. Raises
    ValueError if a text has no tests or is not Python, and `GraderError` if the sandbox has no working `python3`.
    """
    texts = {"": tests} if isinstance(tests, str) else dict(tests)
    passed: list[str] = []
    failed: dict[str, str] = {}
    labels: list[Label] = []

    async def run(slot: Slot, text: str) -> TestRun:
        return await run_suite(slot, _PYTHON, cwd, text, timeout_s=timeout_s, python_path=python_path)

    for place, text in texts.items():
        found = await _verdicts(sandbox, text, _test_names(place, text), run, cwd, reference)
        prefix = f"{place}::" if place else ""
        passed += [prefix + name for name in found.passed]
        failed |= {prefix + name: reason for name, reason in found.failed.items()}
        labels += found.labels
    return TestVerdicts(tuple(passed), failed, tuple(dict.fromkeys(labels)))


async def _verdicts(
    sandbox: Slot,
    text: str,
    names: Sequence[str],
    run_text: Callable[[Slot, str], Awaitable[TestRun]],
    cwd: str,
    reference: Mapping[str, str] | None,
) -> TestVerdicts:
    async def run_in_fork(files: Mapping[str, str], texts: Mapping[str, str]) -> TestRun:
        async with sandbox.fork() as fork:
            for path, content in files.items():
                await fork.write_text(path if path.startswith("/") else f"{cwd}/{path}", content)
            return await run_text(fork, texts[""])

    forks = sandbox.rung in (Rung.FULL, Rung.USERNS)
    run = await (run_in_fork({}, {"": text}) if forks else run_text(sandbox, text))
    names = list(dict.fromkeys([*names, *run.statuses]))  # a class may inherit tests that its text does not define
    failed = errors_of(run, names)
    passed = tuple(name for name in names if name not in failed)
    labels = [*run.labels]
    if passed:
        work = await python_texts(sandbox, await python_files(sandbox, cwd))
        labels += await copied_answers({"": text}, passed, work, (reference or {}).values())
    if forks and passed:
        solved = None if reference is None else partial(run_in_fork, reference)
        labels += (await control({"": text}, passed, partial(run_in_fork, {}), solved, wildcards=False)).labels
    return TestVerdicts(passed, failed, tuple(labels))


def _test_names(place: str, text: str) -> list[str]:
    """Return the names of the tests in a text. Raises ValueError."""
    what = f"the tests {place}" if place else "the tests"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{what} are not Python: {error}") from None
    names = []
    for owner, test in tests_in(tree.body, ""):
        wanted = [each.arg for each in (*test.args.posonlyargs, *test.args.args) if each.arg != "self"]
        if len(wanted) > len(test.args.defaults) and not test.decorator_list:  # such as mock.patch, which gives one
            raise ValueError(f"the test {test.name} needs an argument ({wanted[0]}); run_tests has no fixtures")
        names.append(f"{owner}{test.name}")
    if not names:
        raise ValueError(f"{what} have no function or method whose name begins with test")
    return names


async def run_suite(
    slot: Slot,
    python: Sequence[str],
    root: str,
    text: str,
    *,
    timeout_s: float,
    watching: bool = True,
    python_path: Sequence[str] = (".",),
) -> TestRun:
    """Run the tests in `text` over the files in `root` with the command `python`. Raises `GraderError` if the harness
    did not start."""
    records, done = await run_harness(
        slot,
        python,
        "python_test_runner.py",
        {"root": root, "tests": text, "watching": watching, "python_path": [*python_path, PACKAGES_DIR]},
        env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
        timeout_s=timeout_s,
    )
    run, lines = read_run(records, done), text.splitlines()

    def with_test_lines(message: str) -> str:  # the slot does not have the tests' lines
        return _LINE.sub(lambda each: f"{each[0]}\n    {lines[int(each[1]) - 1].strip()}", message)

    failures = {name: replace(each, message=with_test_lines(each.message)) for name, each in run.failures.items()}
    errors = {name: with_test_lines(each) for name, each in run.collect_errors.items()}
    return replace(run, failures=failures, collect_errors=errors, output=done.output[-4000:])


def errors_of(run: TestRun, names: Sequence[str]) -> dict[str, str]:
    """Return the traceback of each named test that did not pass, or the reason why there is none."""
    missing = "the test run timed out" if run.timed_out else "the test run ended before this test"
    return {
        name: run.failures[name].message if name in run.failures else run.collect_errors.get("", missing)
        for name in names
        if not run.complete or run.statuses.get(name) is not Status.PASSED
    }
