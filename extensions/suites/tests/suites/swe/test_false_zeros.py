"""Right work that could be scored 0: each way that is known is a case here, as each cheat is one in the bank.

`RIGHT_WORK` are rows whose reference solution must earn 1.0 although something is unusual; `BROKEN_TESTS` are rows
whose tests cannot run here, so that nobody is scored; `WRONG_WORK` must stay 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.types import JSON, Blame
from palaestra_suites.swe.swe_smith_oracle import Shown, SweEnvironment
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import BUGGY, F2P, P2P, RIGHT, TESTS, Files, Source, WithoutBaseline, roll_out

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(900)]

Row = dict[str, JSON]

MARKED = TESTS + "\n\nimport pytest\n\n\n@pytest.mark.xfail\ndef test_known():\n    assert double(1) == 3\n"
CALLED = TESTS + "\n\nimport pytest\n\n\ndef test_known():\n    pytest.xfail('known')\n"
KNOWN = [*P2P, "tests/test_calc.py::test_known"]


def marked_xfail(source: Source) -> Row:
    return source.row(test_patch=source.diff({"tests/test_calc.py": MARKED}), PASS_TO_PASS=KNOWN)


def called_xfail(source: Source) -> Row:
    return source.row(test_patch=source.diff({"tests/test_calc.py": CALLED}), PASS_TO_PASS=KNOWN)


MADE = """

def for_each(test):
    for value in (1, 2):
        globals()[f"test_each_{value}"] = lambda value=value: test(value)


@for_each
def test_each(value):
    assert double(value) == 2 * value
"""


def made_by_a_decorator(source: Source) -> Row:
    """No function has the name of the test."""
    patch = source.diff({"tests/test_calc.py": TESTS + MADE})
    return source.row(test_patch=patch, PASS_TO_PASS=[*P2P, "tests/test_calc.py::test_each_2"])


def imports_what_the_fix_adds(source: Source) -> Row:
    """Without the fix the tests cannot be imported, which is no fault of the grader."""
    tests = TESTS.replace("import add, double", "import add, double, triple")
    fix = source.diff(
        {"pkg/calc.py": (source.path / "pkg/calc.py").read_text().replace("a - b", "a + b") + "\n\ntriple = 3\n"}
    )
    patch = source.diff({"tests/test_calc.py": tests})
    return source.row(patch=fix, test_patch=patch, FAIL_TO_PASS=[*F2P, *P2P], PASS_TO_PASS=[])


def imports_a_module_that_the_fix_adds(source: Source) -> Row:
    fix = source.diff(
        {"pkg/calc.py": (source.path / "pkg/calc.py").read_text().replace("a - b", "a + b"), "extra.py": "one = 1\n"}
    )
    patch = source.diff({"tests/test_calc.py": f"import extra\n{TESTS}"})
    return source.row(patch=fix, test_patch=patch, FAIL_TO_PASS=[*F2P, *P2P], PASS_TO_PASS=[])


def changes_binary_files(source: Source) -> Row:
    """The fix changes one binary file by a delta and adds another; the patch of the tests brings a third."""
    old = bytes(range(256)) * 40
    base = source.commit({"pkg/table.bin": old})
    new = old[:5000] + b"\0fixed\0" + old[5000:]
    fix = {"pkg/table.bin": new, "pkg/made.bin": b"\0\1\2" * 50_000, "pkg/calc.py": BINARY}
    tests = {"tests/data.bin": b"\0\xff" + b"expected", "tests/test_calc.py": TESTS + READS_BINARY}
    f2p = [*F2P, "tests/test_calc.py::test_table"]
    return source.row(base_commit=base, patch=source.diff(fix), test_patch=source.diff(tests), FAIL_TO_PASS=f2p)


BINARY = (
    RIGHT
    + """

def table():
    from pathlib import Path
    here = Path(__file__).parent
    return here.joinpath("table.bin").read_bytes()[5000:5007] + here.joinpath("made.bin").read_bytes()[-3:]
"""
)

READS_BINARY = """

def test_table():
    from pathlib import Path
    from pkg import calc
    assert Path(__file__).with_name("data.bin").read_bytes()[:2] == b"\\0\\xff"
    assert calc.table() == b"\\0fixed\\0\\0\\1\\2"
"""


def changes_modes_and_links(source: Source) -> Row:
    """The fix makes a script executable and adds a link; the patch of the tests brings a program and a link to it."""
    base = source.commit({"run.sh": "#!/bin/sh\necho run\n"})

    def changed(files: Files, programs: Sequence[str], links: Mapping[str, str]) -> str:
        for path, text in files.items():
            (source.path / path).write_text(str(text))
        for path in programs:
            (source.path / path).chmod(0o755)
        for path, target in links.items():
            (source.path / path).symlink_to(target)
        return source.diff({})

    fix = changed({"pkg/calc.py": RIGHT}, ["run.sh"], {"pkg/start": "../run.sh"})
    files = {"tests/tool.sh": "#!/bin/sh\necho tool\n", "tests/test_calc.py": TESTS + RUNS_PROGRAMS}
    tests = changed(files, ["tests/tool.sh"], {"tests/tool": "tool.sh"})
    assert all("mode 100755" in patch and "mode 120000" in patch for patch in (fix, tests))
    f2p = [*F2P, "tests/test_calc.py::test_programs"]
    return source.row(base_commit=base, patch=fix, test_patch=tests, FAIL_TO_PASS=f2p)


RUNS_PROGRAMS = """

def test_programs():
    import subprocess
    from pathlib import Path
    here = Path(__file__).parent
    for path in (here.parent / "pkg/start", here / "tool"):
        assert subprocess.check_output([str(path)], text=True).strip() == path.resolve().stem
"""


def renames_files(source: Source) -> Row:
    """The fix renames the module and changes it, and the patch of the tests renames and changes their file."""
    base = source.commit({"pkg/old.py": "x = 1\n" * 40})
    fix = {"pkg/calc.py": None, "pkg/sums.py": RIGHT, "pkg/old.py": None, "sub/new name.py": "x = 1\n" * 40}
    tests = {"tests/test_calc.py": None, "tests/test_sums.py": TESTS.replace("pkg.calc", "pkg.sums")}
    patch, test_patch = source.diff(fix), source.diff(tests)
    assert "rename from" in patch
    assert "rename from" in test_patch
    names = [f"tests/test_sums.py::test_{name}" for name in ("add", "double")]
    return source.row(base_commit=base, patch=patch, test_patch=test_patch, FAIL_TO_PASS=names, PASS_TO_PASS=[])


def has_windows_line_ends(source: Source) -> Row:
    """The module and the tests are CRLF files, and so are their patches."""
    crlf = {"pkg/calc.py": BUGGY.replace("\n", "\r\n"), "tests/test_calc.py": TESTS.replace("\n", "\r\n")}
    base = source.commit(crlf)
    fix = source.diff({"pkg/calc.py": RIGHT.replace("\n", "\r\n")})
    more = (TESTS + "\n\ndef test_more():\n    assert add(2, 2) == 4\n").replace("\n", "\r\n")
    assert "\r\n" in fix
    return source.row(
        base_commit=base,
        patch=fix,
        test_patch=source.diff({"tests/test_calc.py": more}),
        FAIL_TO_PASS=[*F2P, "tests/test_calc.py::test_more"],
    )


def lacks_a_last_line_end(source: Source) -> Row:
    base = source.commit({"pkg/calc.py": BUGGY.rstrip("\n")})
    return source.row(base_commit=base, patch=source.diff({"pkg/calc.py": RIGHT.rstrip("\n")}))


def has_other_bytes_than_utf_8(source: Source) -> Row:
    head = b"# -*- coding: latin-1 -*-\n# \xe9\n"
    base = source.commit({"pkg/calc.py": head + BUGGY.encode()})
    return source.row(base_commit=base, patch=source.diff({"pkg/calc.py": head + RIGHT.encode()}))


def needs_a_package(source: Source) -> Row:
    """Both lists are in a module that imports what is not installed."""
    patch = source.diff({"tests/test_calc.py": f"import not_installed_here\n{TESTS}"})
    return source.row(test_patch=patch)


def only_failing_tests_need_a_package(source: Source) -> Row:
    patch = source.diff({"tests/test_calc.py": f"import not_installed_here\n{TESTS}"})
    return source.row(test_patch=patch, PASS_TO_PASS=[])


def conftest_needs_a_package(source: Source) -> Row:
    """The session cannot begin."""
    return source.row(test_patch=source.diff({"tests/conftest.py": "import not_installed_here\n"}))


def option_of_a_missing_plugin(source: Source) -> Row:
    """`addopts` of a plugin that is not installed: pytest ends with a usage error."""
    return source.row(base_commit=source.commit({"pytest.ini": "[pytest]\naddopts = --no-such-option\n"}))


def named_test_is_missing(source: Source) -> Row:
    return source.row(PASS_TO_PASS=[*P2P, "tests/test_calc.py::test_gone"])


RIGHT_WORK = (
    marked_xfail,
    called_xfail,
    made_by_a_decorator,
    imports_what_the_fix_adds,
    imports_a_module_that_the_fix_adds,
    changes_binary_files,
    changes_modes_and_links,
    renames_files,
    has_windows_line_ends,
    lacks_a_last_line_end,
    has_other_bytes_than_utf_8,
)
BROKEN_TESTS = (
    needs_a_package,
    only_failing_tests_need_a_package,
    conftest_needs_a_package,
    option_of_a_missing_plugin,
    named_test_is_missing,
)


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, installed_pytest: DependencyCache
) -> Mapping[str, Mapping[str, Trajectory]]:
    """Every row under both policies, in one run each, without a baseline: trajectories by policy and row."""
    folder = tmp_path_factory.mktemp("rows")
    makes = (*RIGHT_WORK, *BROKEN_TESTS)
    rows = [make(Source.make(folder / make.__name__)) for make in makes]
    found: dict[str, Mapping[str, Trajectory]] = {}
    for policy in ("oracle", "noop"):
        groups = roll_out(rows, policy, folder / policy, installed_pytest, kind=WithoutBaseline)
        names = {row["instance_id"]: make.__name__ for row, make in zip(rows, makes, strict=True)}
        found[policy] = {names[group.task_id]: group.trajectories[0] for group in groups}
    return found


@pytest.mark.parametrize("make", RIGHT_WORK, ids=lambda make: make.__name__)
def test_right_work_is_paid(played: Mapping[str, Mapping[str, Trajectory]], make: Callable[[Source], Row]) -> None:
    right, nothing = (played[policy][make.__name__] for policy in ("oracle", "noop"))
    assert right.reward == 1.0, (right.detail, right.error)
    assert nothing.reward == 0.0, (nothing.detail, nothing.error)


@pytest.mark.parametrize("make", BROKEN_TESTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("policy", ["oracle", "noop"])
def test_nobody_is_scored_by_tests_that_cannot_run(
    played: Mapping[str, Mapping[str, Trajectory]], make: Callable[[Source], Row], policy: str
) -> None:
    trajectory = played[policy][make.__name__]
    assert (trajectory.reward, trajectory.blame) == (None, Blame.GRADER), (trajectory.detail, trajectory.error)


BREAKS = {
    "a module that cannot be imported": {"pkg/calc.py": "import not_installed_here\n"},
    "a syntax error": {"pkg/calc.py": "def add(:\n"},
    "an exit": {"pkg/calc.py": "import os\nos._exit(0)\n"},
    "calls xfail": {"pkg/calc.py": "import pytest\ndef add(a, b):\n    pytest.xfail('no')\ndouble = add\n"},
}


@pytest.mark.parametrize("name", BREAKS)
def test_work_that_breaks_its_tests_is_scored_zero(
    name: str, tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    source = Source.make(tmp_path / "source")
    patch = tmp_path / "broken.patch"
    patch.write_text(source.diff(BREAKS[name]))
    flags = "--env.controls=false"
    (group,) = roll_out(
        [source.row()], f"patch:{patch}", tmp_path / "run", installed_pytest, flags, kind=WithoutBaseline
    )
    (trajectory,) = group.trajectories
    assert trajectory.reward == 0.0, (trajectory.detail, trajectory.error)


class SlowOnce(SweEnvironment):
    """The first session of tests is cut off, as on a machine that is busy for a while."""

    cut_off = False

    async def _run_named(self, view, work, row, shown=Shown.WORK, timeout_s=None):  # type: ignore[no-untyped-def]
        run = await super()._run_named(view, work, row, shown, timeout_s)
        cut_off, self.cut_off = self.cut_off, True
        return run if cut_off else replace(run, statuses={}, complete=False, timed_out=True)


def test_a_busy_machine_does_not_score_right_work_zero(tmp_path: Path, installed_pytest: DependencyCache) -> None:
    row = Source.make(tmp_path / "source").row()
    (group,) = roll_out([row], "oracle", tmp_path / "run", installed_pytest, kind=SlowOnce)
    (trajectory,) = group.trajectories
    assert (trajectory.official, trajectory.reward) == (1.0, 1.0), trajectory.detail  # the repetition decides


def test_work_that_hangs_its_tests_is_scored_zero_after_one_repetition(
    tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    source = Source.make(tmp_path / "source")
    patch = tmp_path / "hanging.patch"
    patch.write_text(source.diff({"pkg/calc.py": "import time\ntime.sleep(600)\n"}))
    sessions: list[tuple[Shown, bool]] = []
    limits_s: list[float | None] = []

    class Watched(WithoutBaseline):
        async def _run_named(self, view, work, row, shown=Shown.WORK, timeout_s=None):  # type: ignore[no-untyped-def]
            run = await super()._run_named(view, work, row, shown, timeout_s)
            sessions.append((shown, run.cut_off))
            limits_s.append(timeout_s)
            return run

    flags = ("--env.controls=false", "--env.test_timeout_s=30")
    (group,) = roll_out([source.row()], f"patch:{patch}", tmp_path / "run", installed_pytest, *flags, kind=Watched)
    (trajectory,) = group.trajectories
    assert (trajectory.official, trajectory.reward) == (0.0, 0.0), (trajectory.detail, trajectory.error)
    assert sessions == [(Shown.WORK, True), (Shown.WORK, False), (Shown.WORK, True)], "the second is the reference's"
    assert limits_s[:2] == [30.0, 100.0], "a busy machine may need more than the limit for the reference solution"
    assert 10 < (limits_s[2] or 0) <= 100


PATCHED = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    result = yield
    result.get_result().outcome = "passed"
"""


MOVED: Files = {"pkg/__init__.py": None, "pkg/calc.py": None, "src/pkg/__init__.py": ""}
EXTENDS = "import pathlib, sys\n\nsys.path.insert(0, str(pathlib.Path(__file__).parent / 'src'))\n"
FORGED_SETTINGS: Mapping[str, Files] = {
    "new": {"conftest.py": PATCHED},
    "with a moved module": {**MOVED, "src/pkg/calc.py": BUGGY, "conftest.py": EXTENDS + PATCHED},
}


@pytest.mark.parametrize("name", FORGED_SETTINGS)
def test_settings_that_forge_the_result_differ_between_the_views(
    name: str, tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    """Nothing is fixed, and a new conftest.py reports every test as passed."""
    source = Source.make(tmp_path / "source")
    patch = tmp_path / "forged.patch"
    patch.write_text(source.diff(FORGED_SETTINGS[name]))
    (group,) = roll_out([source.row()], f"patch:{patch}", tmp_path / "run", installed_pytest, kind=WithoutBaseline)
    (trajectory,) = group.trajectories
    assert (trajectory.official, trajectory.reward) == (1.0, 0.0), (trajectory.detail, trajectory.error)
    assert [(label.name, label.evidence) for label in trajectory.labels] == [("settings_changed", "conftest.py")]
    assert "settings_changed: conftest.py" in trajectory.detail["difference"]


HONEST = {
    "own tests": ({"tests/test_mine.py": "def test_mine(): pass\n"}, []),
    "settings": ({"pytest.ini": "[pytest]\naddopts = -ra\n"}, ["settings_changed"]),
    "an edited test": ({"tests/test_calc.py": TESTS + "\n\ndef test_more():\n    assert 1\n"}, ["tests_edited"]),
    "ctypes, frames, tracing": (
        {"pkg/calc.py": "import ctypes, gc, sys\ngc.get_objects()\nsys.settrace(sys.gettrace())\n" + RIGHT},
        ["audited_call"],
    ),
}


TO_SRC = "[tool:pytest]\npythonpath = src\n[options]\npackage_dir =\n    = src\n"
HONEST |= {
    f"moved, {name}": ({**MOVED, "src/pkg/calc.py": RIGHT, **files}, ["settings_changed"])
    for name, files in {
        "pytest.ini": {"pytest.ini": "[pytest]\npythonpath = src\n"},
        "pyproject.toml": {"pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n'},
        "setup.cfg": {"setup.cfg": TO_SRC},
        "conftest.py": {"conftest.py": EXTENDS},
        "a new module": {"conftest.py": EXTENDS, "src/pkg/sums.py": RIGHT, "src/pkg/calc.py": "from .sums import *\n"},
        "a new module at the top": {
            "conftest.py": EXTENDS,
            "src/sums.py": RIGHT,
            "src/pkg/calc.py": "from sums import *\n",
        },
    }.items()
}


@pytest.mark.parametrize("name", HONEST)
def test_unusual_right_work_is_paid_by_both_verdicts(
    name: str, tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    files, labels = HONEST[name]
    source = Source.make(tmp_path / "source")
    patch = tmp_path / "right.patch"
    patch.write_text(source.diff({"pkg/calc.py": RIGHT, **files}))
    (group,) = roll_out([source.row()], f"patch:{patch}", tmp_path / "run", installed_pytest, kind=WithoutBaseline)
    (trajectory,) = group.trajectories
    assert (trajectory.official, trajectory.reward) == (1.0, 1.0), (trajectory.detail, trajectory.error)
    assert [label.name for label in trajectory.labels] == labels
    assert not any(label.certain for label in trajectory.labels)
