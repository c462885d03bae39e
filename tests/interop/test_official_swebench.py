"""Our official verdict on SWE rows, next to the verdict of SWE-bench's own package on the log of the same tests.

Every item is one work on one row. Our side plays a rollout that applies the work as a patch. Their side runs the row's
test command over the same tree in a slot of ours, and gives the log to `swebench.harness.grading`.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import PolicyRuns, policy_runs
from palaestra.rollouts.spec import Phase
from palaestra_slots.core.types import JSON, Task
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.swe.row_tests import run_row
from palaestra_suites.swe.swe_smith_oracle import (
    REPOSITORY,
    ResolvedRow,
    SweEnvironment,
    SweSmithOracleEnvConfig,
)
from palaestra_suites.swe.workspace import unpack
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import PatchPolicy
from suites.conftest import installed_pytest as installed_pytest
from suites.swe.published import BUGGY, RIGHT, Files, Source, git

pytestmark = [pytest.mark.slots, pytest.mark.network, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Style:
    """A repository with a bug, how its tests are run and their log is parsed, and works on it.

    `fix` is the reference solution and `tests` are the files of `test_patch`. `differs` are the works on which the two
    verdicts differ on purpose, with the reason.
    """

    name: str
    parser: str
    command: str
    base: Files
    fix: Files
    tests: Files
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    works: Mapping[str, Files]
    differs: Mapping[str, str] = field(default_factory=dict)


PYTEST = "python -m pytest -rA tests/test_calc.py"
OUTCOMES = """
import pytest
from pkg.calc import add, double

def test_add():
    assert add(1, 2) == 3

def test_add_more():
    assert add(0, -1) == -1

def test_double():
    assert double(2) == 4

@pytest.mark.xfail
def test_expected():
    assert double(2) == 5

@pytest.mark.xfail(reason="not yet - really")
def test_expected_for_a_reason():
    assert double(2) == 5

def test_calls_xfail():
    if double(2) == 4:
        pytest.xfail("a call")

@pytest.fixture
def torn():
    yield 1
    assert double(1) == 2

def test_torn(torn):
    assert torn == 1

@pytest.mark.parametrize("text", ["one", "two words", "two more", "[x]", "a - b", "ü"])
def test_text(text):
    assert double(text) == text + text

class TestThings:
    @pytest.mark.parametrize("a", [1, 2])
    def test_twice(self, a):
        assert double(a) == a + a

def test_skipped():
    pytest.skip("never here")

@pytest.mark.xfail
def test_unexpected():
    assert double(2) == 4
"""
NAMES = "tests/test_calc.py::"
OUTCOME_F2P = [f"{NAMES}test_add", f"{NAMES}test_add_more"]
OUTCOME_P2P = [
    NAMES + name
    for name in (
        "test_double", "test_expected", "test_expected_for_a_reason", "test_calls_xfail", "test_torn", "test_text[one]",
        "test_text[two", "test_text[[x]]", "test_text[a", "TestThings::test_twice[1]",
        "TestThings::test_twice[2]",
    )
]  # fmt: skip
DOUBLE = "    return 2 * a\n"


def calc(text: str = RIGHT, **instead: str) -> Files:
    """The module, with the body of a function replaced."""
    for name, body in instead.items():
        head, _, rest = text.partition(f"def {name}(")
        signature, _, tail = rest.partition("\n")
        _, _, after = tail.partition("\n")
        text = f"{head}def {name}({signature}\n    {body}\n{after}"
    return {"pkg/calc.py": text}


PRINTED = "\n".join(f"\nPASSED {name}" for name in (*OUTCOME_F2P, *OUTCOME_P2P)) + "\n"
WORKS: Mapping[str, Files] = {
    "right": calc(),
    "nothing": {"notes.txt": "x"},
    "half": calc(BUGGY, add="return a - b if a else b"),
    "other-half": calc(BUGGY, add="return a + b if a else 7"),
    "breaks-another": calc(double="return 2 * a if a != 2 else 5"),
    "breaks-one-parameter": calc(double="return a + a if a != 'two more' else 'x'"),
    "breaks-a-tear-down": calc(double="return a + a if a != 1 else 3"),
    "syntax-error": calc("def add(a, b:\n"),
    "missing-name": calc("def add(a, b):\n    return a + b\n"),
    "missing-module": {"pkg/calc.py": None},
    "raises": calc(add="raise RuntimeError('no')"),
    "exits-on-import": calc("import os\nos._exit(0)\n"),
    "exits-in-a-test": calc(double="import os; os._exit(0)"),
    "system-exit": calc(add="raise SystemExit(0)"),
    "crashes": calc(double="import ctypes; ctypes.string_at(0)"),
    "interrupts": calc(double="raise KeyboardInterrupt"),
    "ends-the-session": calc(double="import pytest; pytest.exit('done', returncode=0)"),
    "calls-xfail": calc(add="import pytest; pytest.xfail('hard')"),
    "calls-skip": calc(add="import pytest; pytest.skip('hard')"),
    "skips-another": calc(double="import pytest; pytest.skip('hard')"),
    "skips-one-word": calc(double="import pytest; return a + a if a != 'two more' else pytest.skip('hard')"),
    "prints-passes": calc(
        f"import atexit\nprint({PRINTED!r})\n{BUGGY}",
    ),
    "fails-at-exit": calc(f"import atexit, os\natexit.register(os._exit, 3)\n{RIGHT}"),
    "prints-a-lot": calc(add="print('FAILED tests/test_calc.py::test_add - no'); return a + b"),
    "prints-and-exits": calc(f"import os\nos.write(1, {PRINTED.encode()!r})\nos._exit(0)\n"),
    "forges-the-log": calc(
        f"import os\nfor number in range(3, 20):\n    try:\n        os.write(number, {PRINTED.encode()!r})\n"
        "    except OSError:\n        pass\nos._exit(0)\n"
    ),
}
PATHS = """
import pytest
from pkg.calc import add, double

@pytest.mark.parametrize("path", ["/", "/etc/some/where", "//x/y", "plain", "/a b"])
def test_path(path):
    assert add(path, "") == path

def test_double():
    assert double(2) == 4
"""
BUTTONS = """
import enum
import pytest
from pkg.calc import add

class MouseButton(enum.Enum):
    LEFT, RIGHT = 1, 3

@pytest.mark.parametrize("button", list(MouseButton))
def test_button(button):
    assert add(button.value, 1) == button.value + 1

@pytest.mark.parametrize("text", ["MouseButton.LEFT-on", "off"])
def test_text(text):
    assert text
"""
PARTS = """
import unittest
from pkg.calc import add, double

class Old(unittest.TestCase):
    def test_parts(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(double(number), number + number)

    def test_skipped_part(self):
        for number in (1, 2):
            with self.subTest(number=number):
                if number == 2:
                    self.skipTest("no")
                self.assertEqual(double(number), number + number)

def test_add():
    assert add(1, 2) == 3

def test_other():
    assert double(5) == 10
"""
SPACES = """
import pytest
from pkg.calc import add, double

@pytest.mark.parametrize("a", ["one way", "one more", "x - y"])
def test_words(a):
    assert double(a) == a + a

def test_add():
    assert add(1, 2) == 3

@pytest.mark.xfail
def test_expected():
    assert add(1, 2) == 4

def test_skipped():
    pytest.skip("no")
"""
MINI = {"pkg/__init__.py": "", "pkg/calc.py": BUGGY}
SIMPLE: Mapping[str, Files] = {name: WORKS[name] for name in ("right", "nothing", "raises", "syntax-error", "crashes")}
FORGED = "SWE-bench believes lines in the log that the work wrote itself"
SUBTESTS = "SWE-bench does not read the lines of failed subtests, and pytest lists their test as passed"
REASONS = "with pytest 8 and newer, this parser takes the reason of an expected failure for a part of the test's name"

STYLES = [
    Style(
        "outcomes", "parse_log_pytest", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": OUTCOMES},
        OUTCOME_F2P, OUTCOME_P2P, WORKS, {"forges-the-log": FORGED},
    ),
    Style(
        "subtests", "parse_log_pytest", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": PARTS},
        [f"{NAMES}test_add"], [f"{NAMES}Old::test_parts", f"{NAMES}Old::test_skipped_part"],
        {
            **SIMPLE,
            "one-part": calc(double="return a + a if a != 2 else 4.5"),
            "one-part-and-another": calc(double="return a + a if a not in (2, 5) else 4.5"),
        },
        {"one-part-and-another": SUBTESTS},
    ),
    Style(
        "reasons", "parse_log_pytest_v2", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": OUTCOMES},
        [f"{NAMES}test_add"], [f"{NAMES}test_double", f"{NAMES}test_expected_for_a_reason"], {"right": calc()},
        {"right": REASONS},
    ),
    Style(
        "words", "parse_log_pytest_v2", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": SPACES},
        [f"{NAMES}test_add"],
        [f"{NAMES}test_words[one way]", f"{NAMES}test_words[one", f"{NAMES}test_words[x - y]", f"{NAMES}test_expected"],
        {
            **SIMPLE,
            "breaks-one": calc(double="return a + a if a != 'one more' else 'x'"),
            "breaks-dash": calc(double="return a + a if a != 'x - y' else 'x'"),
        },
    ),
    Style(
        "paths", "parse_log_requests", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": PATHS},
        [f"{NAMES}test_path[{text}]" for text in ("/", "/where", "//x/y", "plain")], [f"{NAMES}test_double"],
        {**SIMPLE, "one-path": calc(add="return a + b if a != '/etc/some/where' else 1")},
    ),
    Style(
        "buttons", "parse_log_matplotlib", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": BUTTONS},
        [f"{NAMES}test_button[1]", f"{NAMES}test_button[3]"], [f"{NAMES}test_text[1-on]", f"{NAMES}test_text[off]"],
        {**SIMPLE, "one-button": calc(add="return a + b if a == 3 else 0")},
    ),
    Style(
        "seaborn", "parse_log_seaborn", PYTEST, MINI, {"pkg/calc.py": RIGHT}, {"tests/test_calc.py": PATHS},
        [f"{NAMES}test_path[plain]"], [f"{NAMES}test_double"], SIMPLE,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Verdicts:
    """Of one item: whether it is resolved, and the named tests that count as passed, for them and for us."""

    theirs: bool
    ours: bool
    their_tests: frozenset[str]
    our_tests: frozenset[str]
    log: str
    labels: tuple[str, ...]
    error: str


class OneBaseline(SweEnvironment):
    """Tries the tests of the first row before its rollout; the other rows differ only in the work."""

    async def _baseline(self, work: ResolvedRow, sandbox: Slot) -> None:
        if work.row.instance_id.endswith("-right"):
            await super()._baseline(work, sandbox)


def row_of(style: Style, source: Source, work: str) -> dict[str, JSON]:
    marks = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"
    lines = "#!/bin/bash", "set -uxo pipefail", f"cd {REPOSITORY}", marks[0], style.command, marks[1]
    return source.row(
        instance_id=f"{style.name}-{work}",
        patch=source.diff(style.fix),
        test_patch=source.diff(style.tests),
        FAIL_TO_PASS=style.fail_to_pass,
        PASS_TO_PASS=style.pass_to_pass,
        log_parser=style.parser,
        image="none",
        version="1",
        eval_type="pass_and_fail",
        eval_script="\n".join(lines),
        install={"python_path": ["."]},
    )


def tree(source: Source, row: Mapping[str, JSON], patch: str) -> bytes:
    """The row's tree with a work and the tests, as a tar archive."""
    for each in (patch, row["test_patch"]):
        subprocess.run(["git", "apply", "--binary", "-"], cwd=source.path, input=each.encode(), check=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(source.path, ".", filter=lambda info: None if "/.git" in info.name else info)
    git(source.path, "reset", "-q", "--hard")
    git(source.path, "clean", "-qfdx")
    return packed.getvalue()


def report_of(row: Mapping[str, JSON], log: Path) -> tuple[bool, frozenset[str]]:
    """The verdict of SWE-bench's package on a log."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(dict(row))
    told = get_eval_report(spec, {"instance_id": spec.instance_id, "model_patch": "x"}, str(log), True)
    report = told[spec.instance_id]
    status = report.get("tests_status", {})
    passed = [name for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in status.get(kind, {}).get("success", ())]
    return bool(report["resolved"]), frozenset(passed)


async def both(
    environment: SweEnvironment, pool: SlotPool, task: Task, row: Mapping[str, JSON], packed: bytes, folder: Path
) -> tuple[Path, frozenset[str]]:
    """Run the row's own command and our harness over the same tree: the log, and our passed tests."""
    from swebench.harness.utils import make_test_spec

    resolved = await environment.resolve(task)
    work: ResolvedRow = resolved.data
    spec = environment.slot_spec(resolved, Phase.GRADE)
    slots = [await pool.acquire(f"{task.id}:{side}", spec=spec) for side in ("theirs", "ours")]
    try:
        for slot in slots:
            await unpack(slot, packed, REPOSITORY)
        python = work.toolchain.command[0]
        script = make_test_spec(dict(row)).eval_script.replace("python ", f"{python} ")
        await slots[0].write_text("/eval.sh", script)
        path = ":".join([REPOSITORY, *work.toolchain.dependencies])
        env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
        command = ["/bin/bash", "-c", "bash /eval.sh > /log.txt 2>&1"]
        await slots[0].execute(command, cwd=REPOSITORY, env=env, timeout_s=300)
        log = folder / f"{task.id}.log"
        log.write_bytes(await slots[0].read_bytes("/log.txt", max_bytes=1 << 24))
        run = await run_row(slots[1], work.toolchain, work.row, REPOSITORY, work.row.node_ids, timeout_s=300)
        wrong = work.row.official(run).not_passed
        return log, frozenset(work.row.node_ids) - set(wrong)
    finally:
        for slot in slots:
            await pool.release(slot)


def play(style: Style, packages: DependencyCache, folder: Path) -> dict[str, Verdicts]:
    """All works of a style, judged by both."""
    source = Source.make(folder / "source", style.base)
    rows = {work: row_of(style, source, work) for work in style.works}
    tasks = folder / "rows.jsonl"
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    config = SweSmithOracleEnvConfig(
        dataset_name=str(tasks), cache_dir=str(folder / "cache"), controls=False, shuffle=False, group_size=1
    )
    found: dict[str, Verdicts] = {}

    async def judge(
        environment: SweEnvironment, pool: SlotPool, runs: PolicyRuns, task: Task, turn: asyncio.Semaphore
    ) -> None:
        work = task.id.removeprefix(f"{style.name}-")
        patch, row = source.diff(style.works[work]), rows[work]
        packed, file = tree(source, row, patch), folder / f"{work}.patch"
        file.write_text(patch)
        policy = PatchPolicy(file)
        await policy.start()
        async with turn:
            log, ours = await both(environment, pool, task, row, packed, folder)
            group = await runs.play(policy, task)
        each = group.trajectories[0] if group.trajectories else None
        theirs, tests = report_of(row, log)
        found[work] = Verdicts(
            theirs,
            bool(each and each.official_reward),
            tests,
            ours,
            log.read_text(errors="replace")[-3000:],
            tuple(label.name for label in each.labels) if each else (),
            f"{group.error} {each and each.error}",
        )

    async def main() -> None:
        async with make_pool(config) as pool:
            environment = OneBaseline(config)
            environment.dependencies = packages  # this test session's pytest
            await environment.open()
            async with policy_runs(environment, pool) as runs, asyncio.TaskGroup() as group:
                turn = asyncio.Semaphore(3)
                async for task in environment.tasks():
                    group.create_task(judge(environment, pool, runs, task, turn))

    asyncio.run(main())
    return found


DJANGO = "python tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 utils_tests.test_more"
MORE = '''
import unittest
from django.test import SimpleTestCase
from django.utils import text

class MoreTests(SimpleTestCase):
    def test_numeric(self):
        self.assertEqual(text.phone2numeric("0800 flowers"), "0800 3569377")

    def test_words(self):
        """Words end at the limit."""
        self.assertEqual(text.Truncator("one two").words(1), "one…")

    @unittest.skip("not here")
    def test_skipped(self):
        self.fail()

    def test_parts(self):
        for word in ("a", "b"):
            with self.subTest(word=word):
                self.assertEqual(text.phone2numeric(word), "2")

    def test_newlines(self):
        self.assertEqual(text.normalize_newlines("a\\r\\nb"), "a\\nb")
'''
SYMPY = "python bin/test -C --verbose sympy/core/tests/test_more.py"
RUNNER = """
import sys
sys.path.insert(0, ".")
from sympy.testing.runtests import test
sys.exit(not test(*[word for word in sys.argv[1:] if not word.startswith("-")], verbose=True, subprocess=False))
"""
FUNCTIONS = """
from sympy.testing.pytest import SKIP, XFAIL
from sympy.core.more import double, half

def test_half():
    assert half(4) == 2

def test_double():
    assert double(2) == 4

def test_zero():
    assert double(0) == 0

@XFAIL
def test_expected():
    assert double(2) == 5

@SKIP("no")
def test_skipped():
    assert False
"""
NUMBERS = "def half(a):\n    return a / 3\n\n\ndef double(a):\n    return 2 * a\n"


KEPT = ("test_skipped", "test_parts", "test_newlines")


def django(files: Files) -> Style:
    """A row of Django, over its sources, with the names that its runner prints."""
    path, case = "django/utils/text.py", "(utils_tests.test_more.MoreTests.{})"
    text = str(files[path])
    wrong = text.replace('"f": "3"', '"f": "4"')
    assert wrong != text

    def work(old: str, new: str) -> Files:
        assert old in text
        return {path: text.replace(old, new)}

    numeric, newlines = "def phone2numeric(phone):", "def normalize_newlines(text):"
    skip = "\n    import unittest\n    raise unittest.SkipTest('hard')"
    return Style(
        "django", "parse_log_django", DJANGO, {**files, path: wrong}, {path: text},
        {"tests/utils_tests/test_more.py": MORE},
        [f"test_numeric {case.format('test_numeric')}"],
        ["Words end at the limit.", *(f"{name} {case.format(name)}" for name in KEPT)],
        {
            "right": {path: text},
            "nothing": {"notes.txt": "x"},
            "one-part": work('"b": "2"', '"b": "3"'),
            "breaks-another": work(newlines, f"{newlines}\n    return 'x'"),
            "raises": work(numeric, f"{numeric}\n    raise ValueError"),
            "skips": work(numeric, numeric + skip),
            "skips-another": work(newlines, newlines + skip),
            "syntax-error": work(numeric, "def phone2numeric(phone:"),
            "exits-in-a-test": work(newlines, f"{newlines}\n    import os; os._exit(0)"),
        },
    )  # fmt: skip


def sympy(files: Files) -> Style:
    """A row over sympy's sources, with sympy's own runner."""
    path = "sympy/core/more.py"
    right = NUMBERS.replace("/ 3", "// 2")
    return Style(
        "sympy", "parse_log_sympy", SYMPY, {**files, "bin/test": RUNNER, path: NUMBERS}, {path: right},
        {"sympy/core/tests/test_more.py": FUNCTIONS}, ["test_half"], ["test_double", "test_zero"],
        {
            "right": {path: right},
            "nothing": {"notes.txt": "x"},
            "breaks-another": {path: right.replace("2 * a", "2 * a or 1")},
            "raises": {path: right.replace("2 * a", "1 / a")},
        },
    )  # fmt: skip


def sources(folder: Path, release: str, keep: Sequence[str], *wheels: str) -> Files:
    """The files of a source release and of wheels, downloaded with pip."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--no-binary", ":all:", release], check=True)
    subprocess.run([*pip, *wheels], check=True)
    found: dict[str, str | bytes | None] = {}
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        for info in packed:
            name = info.name.partition("/")[2]
            data = packed.extractfile(info) if info.isfile() and name.startswith(tuple(keep)) else None
            if data is not None and ("/locale/" not in name) and name.endswith((".py", ".html", ".txt")):
                found[name] = data.read().decode()
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed_wheel:
            names = [name for name in packed_wheel.namelist() if name.endswith(".py") and "/tests/" not in name]
            found |= {name: packed_wheel.read(name).decode() for name in names}
    return found


REAL = {
    "django": ("right", "nothing", "one-part", "breaks-another", "raises", "skips", "skips-another", "syntax-error",
               "exits-in-a-test"),
    "sympy": ("right", "nothing", "breaks-another", "raises"),
}  # fmt: skip
ITEMS = [
    pytest.param(name, work, id=f"{name}-{work}", marks=pytest.mark.xdist_group(name))
    for name, works in {**{style.name: style.works for style in STYLES}, **REAL}.items()
    for work in works
]


def style_of(name: str, folder: Path) -> Style:
    """The style of this name; for those of real packages, their sources are downloaded into `folder`."""
    if name == "django":
        keep = ("django/", "tests/utils_tests/__init__", "tests/utils_tests/models", "tests/urls", "tests/runtests",
                "tests/test_sqlite", "tests/templates/")  # fmt: skip
        return django(sources(folder, "Django==5.2.8", keep, "asgiref==3.11.0", "sqlparse==0.5.3"))
    if name == "sympy":
        found = sources(folder, "sympy==1.14.0", ("sympy/",), "mpmath==1.3.0")
        # Its conftest.py is for pytest only, and imports hypothesis.
        return sympy(
            {path: text for path, text in found.items() if "/tests/test_" not in path and "conftest" not in path}
        )
    return next(style for style in STYLES if style.name == name)


Judge = Callable[[str], tuple[Style, dict[str, Verdicts]]]


@pytest.fixture(scope="session")
def judge(installed_pytest: DependencyCache, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Judges all works of a style, once."""
    pytest.importorskip("swebench", reason="needs .venv-graders: run `make official`")

    @functools.cache
    def run(name: str) -> tuple[Style, dict[str, Verdicts]]:
        folder = tmp_path_factory.mktemp(name)
        style = style_of(name, folder)
        return style, play(style, installed_pytest, folder)

    return run


@pytest.mark.parametrize(("name", "work"), ITEMS)
def test_the_official_verdict_is_that_of_swebench(name: str, work: str, judge: Judge) -> None:
    style, found = judge(name)
    assert set(found) == set(REAL.get(name, style.works))
    verdicts = found[work]
    print(verdicts)
    assert (verdicts.theirs == verdicts.ours) is (work not in style.differs), style.differs.get(work)
    if work not in style.differs and work != "one-part":  # the exit status shows that a part failed, but no line does
        assert verdicts.their_tests == verdicts.our_tests
