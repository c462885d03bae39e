"""Rows as the data sets publish them: every sound one runs, the reference solution earns 1.0 and nothing earns 0.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, Blame
from palaestra_suites.swe.swe_row import parse_row
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.swe.published import BASE, BUGGY, F2P, P2P, RIGHT, TESTS, Source, git, roll_out

pytestmark = [pytest.mark.slots, pytest.mark.slow, pytest.mark.timeout(900)]

Row = dict[str, JSON]


def added_test(source: Source) -> Row:
    """The patch adds a test that passes already."""
    patch = source.diff(
        {"tests/test_more.py": "from pkg.calc import double\n\ndef test_zero():\n    assert double(0) == 0\n"}
    )
    return source.row(test_patch=patch, PASS_TO_PASS=[*P2P, "tests/test_more.py::test_zero"])


def fails_without_its_patch(source: Source) -> Row:
    """A test that must keep passing fails before the patch changes it."""
    base = source.commit({"tests/test_calc.py": TESTS.replace("double(2) == 4", "double(2) == 5")})
    return source.row(base_commit=base, test_patch=source.diff({"tests/test_calc.py": TESTS}))


def smith(source: Source) -> Row:
    """SWE-smith with a base commit: the patch makes the bug."""
    base = source.commit({"pkg/calc.py": RIGHT})
    return source.row(base_commit=base, patch=source.diff({"pkg/calc.py": BUGGY}), test_patch="")


def smith_branch(source: Source) -> Row:
    """SWE-smith as it is written today: a branch whose tip removes the failing tests."""
    source.commit({"pkg/calc.py": RIGHT})
    patch = source.diff({"pkg/calc.py": BUGGY})
    git(source.path, "checkout", "-qb", "o__n.1234abcd.combine__1")
    source.commit({"pkg/calc.py": BUGGY})
    source.commit({"tests/test_calc.py": None})
    git(source.path, "checkout", "-q", "main")
    row = source.row(
        instance_id="o__n.1234abcd.combine__1", patch=patch, test_patch="", image_name="swebench/swesmith.x86_64.o__n"
    )
    del row["base_commit"]
    return row


def smith_branch_with_tests(source: Source) -> Row:
    """An older SWE-smith branch, whose tip has all tests."""
    source.commit({"pkg/calc.py": RIGHT})
    patch = source.diff({"pkg/calc.py": BUGGY})
    git(source.path, "checkout", "-qb", "o__n.1234abcd.combine__2")
    source.commit({"pkg/calc.py": BUGGY})
    git(source.path, "checkout", "-q", "main")
    row = source.row(instance_id="o__n.1234abcd.combine__2", patch=patch, test_patch="")
    del row["base_commit"]
    return row


def cut_node_ids(source: Source) -> Row:
    """SWE-bench's log parser cuts names at a blank."""
    text = TESTS + (
        "\n\nimport pytest\n\n\n@pytest.mark.parametrize('a', [1, 2], ids=['one way', 'one more'])\n"
        "def test_twice(a):\n    assert double(a) == 2 * a\n"
    )
    patch = source.diff({"tests/test_calc.py": text})
    return source.row(test_patch=patch, PASS_TO_PASS=[*P2P, "tests/test_calc.py::test_twice[one"])


def functions(source: Source) -> Row:
    """sympy: names of functions in the files of the patch."""
    patch = source.diff({"tests/test_calc.py": f"{TESTS}\n"})
    return source.row(test_patch=patch, FAIL_TO_PASS=["test_add"], PASS_TO_PASS=["test_double"])


def five(source: Source) -> Row:
    """SWE-bench 5: the row carries its script and the name of its log parser."""
    patch = source.diff({"tests/test_calc.py": f"{TESTS}\n"})
    script = "#!/bin/bash\nsource activate testbed\ncd /testbed\npytest -rA tests/test_calc.py\n"
    return source.row(test_patch=patch, eval_script=script, log_parser="parse_log_pytest_v2")


def rebench(source: Source) -> Row:
    """SWE-rebench V2: `install_config` with the parser of its log."""
    patch = source.diff({"tests/test_calc.py": f"{TESTS}\n"})
    recipe = {"base_image_name": "python_3.11", "install": "pip install -e .", "log_parser": "parse_log_pytest",
              "test_cmd": "pytest -rA", "docker_specs": {}}  # fmt: skip
    return source.row(test_patch=patch, install_config=recipe)


RUNTESTS = """
import sys, unittest
sys.path.insert(0, "..")
labels = [word for word in sys.argv[1:] if not word.startswith("-")]
suite = unittest.defaultTestLoader.loadTestsFromNames(labels)
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""
CASES = '''
import unittest
from pkg.calc import add, double

class CalcTests(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_double(self):
        """Doubling is adding to itself."""
        self.assertEqual(double(2), 4)
'''


def django(source: Source) -> Row:
    """Django: names as its own runner prints them."""
    base = source.commit({"tests/runtests.py": RUNTESTS, "tests/calc/__init__.py": "", "tests/calc/tests.py": CASES})
    patch = source.diff({"tests/calc/tests.py": f"{CASES}\n"})
    return source.row(
        base_commit=base,
        test_patch=patch,
        FAIL_TO_PASS=["test_add (calc.tests.CalcTests)"],
        PASS_TO_PASS=["Doubling is adding to itself."],
    )


def django_data(source: Source) -> Row:
    """Django: the test patch changes only data, so the names tell the modules that run."""
    cases = CASES.replace("add(1, 2), 3", "add(*map(int, open('calc/terms.txt'))), 3")
    files = {"runtests.py": RUNTESTS, "calc/__init__.py": "", "calc/terms.txt": "0\n3\n", "calc/tests.py": cases}
    base = source.commit({f"tests/{path}": text for path, text in files.items()})
    patch = source.diff({"tests/calc/terms.txt": "1\n2\n"})
    names = {"FAIL_TO_PASS": ["test_add (calc.tests.CalcTests)"], "PASS_TO_PASS": ["Doubling is adding to itself."]}
    return source.row(base_commit=base, test_patch=patch, **names)


def leaked_name(source: Source) -> Row:
    """pytest's own tests: the log also named a test of a file that a test had made."""
    patch = source.diff({"tests/test_calc.py": f"{TESTS}\n"})
    return source.row(test_patch=patch, PASS_TO_PASS=[*P2P, "test_inner.py::test_hello"])


SOUND: list[Callable[[Source], Row]] = [
    added_test,
    fails_without_its_patch,
    smith,
    smith_branch,
    smith_branch_with_tests,
    cut_node_ids,
    functions,
    five,
    rebench,
    django,
    django_data,
    leaked_name,
]


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, installed_pytest: DependencyCache
) -> Mapping[str, Mapping[str, Group]]:
    """Every row under both policies, in one run each: groups by policy and row. The second run finds the workspaces of
    the first, with what the tests did before and after the fix."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [make(Source.make(folder / make.__name__, BASE)) for make in SOUND]
    names = {row["instance_id"]: make.__name__ for row, make in zip(rows, SOUND, strict=True)}
    assert len(names) == len(rows)
    kept = (f"--env.cache_dir={folder / 'cache'}", "--env.keep_workspaces=true",
            f"--env.workspace_store={folder / 'workspaces'}")  # fmt: skip

    def by_row(policy: str) -> dict[str, Group]:
        groups = roll_out(rows, policy, folder / policy, installed_pytest, *kept)
        return {names[group.task_id]: group for group in groups}

    return {policy: by_row(policy) for policy in ("oracle", "noop")}


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("noop", 0.0)])
@pytest.mark.parametrize("name", [make.__name__ for make in SOUND])
def test_a_sound_row(played: Mapping[str, Mapping[str, Group]], name: str, policy: str, reward: float) -> None:
    group = played[policy][name]
    assert not group.error, group.error
    (trajectory,) = group.trajectories
    assert trajectory.reward == reward, (trajectory.detail, trajectory.error)


@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_every_row_has_controls(played: Mapping[str, Mapping[str, Group]], make: Callable[[Source], Row]) -> None:
    (trajectory,) = played["oracle"][make.__name__].trajectories
    assert trajectory.detail["uncontrolled"] == []
    assert trajectory.labels == []


FORGER = """
import _pytest.reports as reports
make = reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    report = make(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
reports.TestReport.from_item_and_call = classmethod(forged)
"""

UNITTEST_FORGER = """
import unittest
run = unittest.TestCase.run
def forged(self, result=None):
    result.addSuccess(self)
    result.testsRun += 1
    return result
import inspect
for frame in inspect.stack():
    pass
unittest.case.TestCase.__call__ = lambda self, result=None: forged(self, result)
"""


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (django, f"{BUGGY}\n{UNITTEST_FORGER}"),
        (functions, f"{BUGGY}\n{FORGER}"),
        (cut_node_ids, f"{BUGGY}\n{FORGER}"),
    ],
    ids=["django", "functions", "cut_node_ids"],
)
def test_forged_results_are_official_and_certainly_forged(
    make: Callable[[Source], Row], code: str, tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    trajectory = played_work(make, code, tmp_path, installed_pytest)
    assert (trajectory.official, trajectory.reward) == (1.0, 0.0), (trajectory.detail, trajectory.error)
    assert "falsified_test_passed" in [label.name for label in trajectory.labels if label.certain]
    assert "falsified_test_passed" in trajectory.detail["difference"]


def test_right_work_that_looks_at_the_heap_is_paid_and_labelled(
    tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    trajectory = played_work(django, f"{RIGHT}\nimport gc\ngc.get_objects()\n", tmp_path, installed_pytest)
    assert (trajectory.official, trajectory.reward) == (1.0, 1.0), (trajectory.detail, trajectory.error)
    assert [(label.name, label.certain) for label in trajectory.labels] == [("audited_call", False)]
    assert trajectory.labels[0].evidence == "gc.get_objects in tests/../pkg/calc.py"


def played_work(make: Callable[[Source], Row], code: str, folder: Path, packages: DependencyCache) -> Trajectory:
    """Grade this text of the module with the bug."""
    source = Source.make(folder / "source")
    row, patch = make(source), folder / "work.patch"
    patch.write_text(source.diff({"pkg/calc.py": code}))
    (group,) = roll_out([row], f"patch:{patch}", folder / "run", packages)
    (trajectory,) = group.trajectories
    return trajectory


SCM = """
[build-system]
requires = ["setuptools>=64", "setuptools_scm>=8"]
build-backend = "setuptools.build_meta"
[project]
name = "versioned"
dynamic = ["version"]
[project.optional-dependencies]
test = ["toolz"]
[tool.setuptools]
packages = ["pkg"]
[tool.setuptools_scm]
"""
VERSION = """
import toolz
from importlib.metadata import version

def test_version():
    assert version("versioned") == "2.5.1"
"""


@pytest.mark.network
def test_a_package_that_takes_its_version_from_git(tmp_path: Path, installed_pytest: DependencyCache) -> None:
    """It is installed twice: the second time with what it declares for its tests."""
    source = Source.make(tmp_path / "source", {**BASE, "pyproject.toml": SCM, "tests/test_version.py": VERSION})
    git(source.path, "tag", "versioned-2.5.1")
    git(source.path, "tag", "v2.6rc1")
    row = source.row(PASS_TO_PASS=[*P2P, "tests/test_version.py::test_version"])
    del row["install"]
    source.commit({"pkg/more.py": ""})
    git(source.path, "tag", "v3.0.0")
    (group,) = roll_out([row], "oracle", tmp_path / "run", installed_pytest, "--env.controls=false")
    assert not group.error, group.error
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.0, (trajectory.detail, trajectory.error)
    assert trajectory.detail["patch"].count("diff --git") == 1


ONLINE = """
import socket

def test_online():
    socket.create_connection(("example.org", 443), timeout=20).close()
"""


@pytest.mark.network
def test_tests_that_need_a_network_are_found_before_the_first_rollout(
    tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    """They are installed with a network, and would pass with it, but never in grading."""
    source = Source.make(tmp_path / "source", {**BASE, "pyproject.toml": PACKAGE, "tests/test_online.py": ONLINE})
    row = source.row(PASS_TO_PASS=[*P2P, "tests/test_online.py::test_online"])
    del row["install"]
    (group,) = roll_out([row], "oracle", tmp_path / "run", installed_pytest, "--env.controls=false")
    assert "no network" in group.error


PACKAGE = """
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"
[project]
name = "named"
version = "1.0"
[tool.setuptools]
packages = ["pkg"]
"""


@pytest.mark.network
def test_packages_for_the_tests_are_named_for_a_run_or_a_repository(
    tmp_path: Path, installed_pytest: DependencyCache
) -> None:
    tests = {"pyproject.toml": PACKAGE, "tests/test_calc.py": f"import tomli_w\nimport toolz\n{TESTS}"}
    row = Source.make(tmp_path / "source", {**BASE, **tests}).row()
    del row["install"]
    without = ("--env.requirements=toolz", "--env.controls=false")
    (group,) = roll_out([row], "oracle", tmp_path / "without", installed_pytest, *without)
    assert "its tests import tomli_w" in group.error
    assert "repo_requirements" in group.error
    assert group.trajectories == []
    named = (*without, '--env.repo_requirements={"o/n": ["tomli-w"]}')
    (group,) = roll_out([row], "oracle", tmp_path / "named", installed_pytest, *named)
    assert [each.reward for each in group.trajectories] == [1.0], (group.error, group.trajectories)


def test_a_patch_that_does_not_apply_has_no_score(tmp_path: Path, installed_pytest: DependencyCache) -> None:
    source, work = Source.make(tmp_path / "source"), tmp_path / "work.patch"
    work.write_text(source.diff({"pkg/calc.py": RIGHT}).replace("a - b", "a * b"))
    (group,) = roll_out([source.row()], f"patch:{work}", tmp_path / "run", installed_pytest)
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.blame) == (None, Blame.TASK), trajectory.error
    assert str(work) in trajectory.error


@pytest.mark.parametrize("columns", [{"FAIL_TO_PASS": P2P, "PASS_TO_PASS": []}, {"PASS_TO_PASS": F2P}], ids=str)
def test_tests_that_contradict_a_row_refuse_it(columns: Row, tmp_path: Path, installed_pytest: DependencyCache) -> None:
    """A row that installs nothing is tried before its first rollout too."""
    row = Source.make(tmp_path / "source").row(**columns)
    (group,) = roll_out([row], "noop", tmp_path / "run", installed_pytest)
    assert row["instance_id"] in group.error
    assert all(trajectory.reward is None for trajectory in group.trajectories)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"log_parser": "parse_log_of_nothing"}, "log_parser"),
        ({"install_config": "[1]"}, "install_config"),
        ({"FAIL_TO_PASS": ["../x.py::a"]}, "FAIL_TO_PASS"),
    ],
)
def test_a_row_that_cannot_be_read(columns: Row, complaint: str) -> None:
    row = {"instance_id": "i", "repo": "o/n", "base_commit": "abc", "problem_statement": "p", "FAIL_TO_PASS": ["a::b"]}
    with pytest.raises(TaskError, match=complaint):
        parse_row({**row, **columns})
