"""On real packages, through the whole environment: the tests decide, and nothing else does.

Five pairs of pinned bugs in four packages. Bug A makes the task; bug B, in another file, makes what else is needed: a
second half to be fixed, or something to break.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import run
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.authoring.build_tasks import BuildOptions, build
from palaestra_suites.swe.swe_smith_oracle import SweEnvironment, SweSmithOracleEnvConfig
from palaestra_tokens.config import APIServerConfig
from suites.hard_coded import REPOSITORIES
from suites.honest_variety import LINKS
from suites.swe.diffs import applied, undoing
from suites.swe.forgers import FORGERS, HARD_CODED, play_forgers

pytestmark = [
    pytest.mark.network,
    pytest.mark.slots,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("real_tasks"),
]

PAIRS = {
    "cachetools": ("flip_comparison__23g25omh", "swap_arguments__2aimeazf"),
    "tinydb": ("remove_statement__2f3kevmv", "swap_arguments__27z7ykor"),
    "pyflakes": ("fix_condition__24vr7hi3", "wrong_name__2a2vvzwl"),
    "boltons urls": ("change_default__23kgq2f2", "flip_comparison__23r7cayi"),
    "boltons sets": ("flip_comparison__243pe4of", "remove_statement__24p7addr"),
}

Row = dict[str, JSON]


@dataclass(frozen=True)
class Built:
    """The rows of all bugs by the end of their id, and the folder in which they and their repositories lie."""

    rows: Mapping[str, Row]
    cache: Path

    def pair(self, name: str) -> tuple[Row, Row]:
        first, second = PAIRS[name]
        return self.rows[first], self.rows[second]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("tasks")
    ids = tuple(sorted({bug for pair in PAIRS.values() for bug in pair}))

    async def main() -> None:
        async with make_pool(SweSmithOracleEnvConfig()) as pool:
            await build([], None, pool, BuildOptions(out=folder / "tasks.jsonl", cache=folder, select=ids))

    asyncio.run(main())
    rows = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    for row in rows:
        row["repo_path"] = str(folder / row["repo_path"])
    return Built({row["instance_id"].rpartition(".")[2]: row for row in rows}, folder)


def rolled_out(built: Built, folder: Path, tasks: Path, policy: str, *flags: str) -> list[Group]:
    """Run the environment over a file of rows, one rollout each."""
    settings = {"dataset_name": tasks, "group_size": 1, "cache_dir": built.cache, "max_failures": 100}
    settings["repo_root"] = built.cache
    common = [f"--env.{name}={value}" for name, value in settings.items()]
    line = CommandLine("test", SweSmithOracleEnvConfig, APIServerConfig)
    groups = f"--env.data_path_to_save_groups={folder / 'g.jsonl'}"
    parsed = line.parse(["process", "--policy", policy, *common, groups, *flags])
    assert isinstance(parsed, Parsed)
    report = asyncio.run(run(form_of(SweEnvironment), parsed, root=folder / "runs", stream=io.StringIO()))
    return list(Recording(report.journal))


def play(built: Built, folder: Path, row: Row, policy: str, *flags: str) -> Trajectory:
    """Roll the row out once and return the trajectory."""
    tasks = folder / "task.jsonl"
    tasks.write_text(json.dumps(row) + "\n")
    (group,) = rolled_out(built, folder, tasks, policy, "--env.total_steps=1", *flags)
    assert not group.error
    return group.trajectories[0]


def patched(built: Built, folder: Path, row: Row, patch: str, *flags: str) -> Trajectory:
    """Apply a patch to the agent's tree, as the scripted policy does, and have it graded."""
    path = folder / "given.patch"
    path.write_text(patch)
    trajectory = play(built, folder, row, f"patch:{path}", *flags)
    applied = [message for message in trajectory.messages if message["role"] == "tool"][-1]
    assert json.loads(applied["content"])["exit_code"] == 0, applied
    return trajectory


def text_of(row: Row, path: str) -> str:
    """A file of the package as it was released."""
    return subprocess.run(
        ["git", f"--git-dir={row['repo_path']}", "show", f"{row['base_commit']}:{path}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def plain(patch: str) -> str:
    """A patch of one file without git's header line."""
    return patch.partition("\n")[2]


def fix_of(row: Row) -> str:
    """The reference solution as a patch of what the agent gets."""
    (file,) = unified_diff.parse(row["patch"])
    return undoing(row["patch"], text_of(row, file.path))


def guarded(first: Row, second: Row) -> Row:
    """The first bug's task, whose P2P also name the tests that would notice the second bug."""
    return first | {"PASS_TO_PASS": sorted({*first["PASS_TO_PASS"], *second["FAIL_TO_PASS"]})}


@pytest.mark.parametrize("name", PAIRS)
def test_half_a_fix_is_no_fix(built: Built, tmp_path: Path, name: str) -> None:
    first, second = built.pair(name)
    failing = sorted({*first["FAIL_TO_PASS"], *second["FAIL_TO_PASS"]})
    passing = sorted({*first["PASS_TO_PASS"], *second["PASS_TO_PASS"]} - {*failing})
    both = first | {"patch": first["patch"] + second["patch"], "FAIL_TO_PASS": failing, "PASS_TO_PASS": passing}
    trajectory = patched(built, tmp_path, both, fix_of(first))
    assert trajectory.reward == 0.0
    assert 0 < trajectory.detail["f2p_passed"] < trajectory.detail["f2p_total"]


@pytest.mark.parametrize("name", PAIRS)
def test_a_fix_that_breaks_something_else_is_no_fix(built: Built, tmp_path: Path, name: str) -> None:
    first, second = built.pair(name)
    trajectory = patched(built, tmp_path, guarded(first, second), fix_of(first) + second["patch"])
    assert trajectory.reward == 0.0
    assert trajectory.detail["f2p_passed"] == trajectory.detail["f2p_total"]
    assert trajectory.detail["p2p_passed"] < trajectory.detail["p2p_total"]


@pytest.mark.parametrize("name", PAIRS)
def test_deleted_tests_and_a_skipping_conftest_are_no_fix(built: Built, tmp_path: Path, name: str) -> None:
    row, _ = built.pair(name)
    skipping = "import pytest\n\ndef pytest_collection_modifyitems(items):\n"
    skipping += "    for item in items:\n        item.add_marker(pytest.mark.skip())\n"
    patch = plain(unified_diff.between("conftest.py", "", skipping)).replace("--- a/conftest.py", "--- /dev/null")
    for path in sorted({name.split("::")[0] for name in row["FAIL_TO_PASS"]}):
        whole = plain(unified_diff.between(path, text_of(row, path), ""))
        patch += whole.replace(f"+++ b/{path}", "+++ /dev/null")
    trajectory = patched(built, tmp_path, row, patch, "--env.keep_tests=*")
    assert trajectory.detail["tests_in_tree"]
    assert (trajectory.reward, trajectory.official) == (0.0, 0.0)
    assert trajectory.detail["f2p_passed"] == 0, "skipped tests are no passed tests"


@pytest.mark.parametrize("name", PAIRS)
def test_an_equivalent_fix_in_other_words_is_a_fix(built: Built, tmp_path: Path, name: str) -> None:
    row, _ = built.pair(name)
    (file,) = unified_diff.parse(row["patch"])
    released = text_of(row, file.path)
    buggy = applied(row["patch"], released)
    reworded = ast.unparse(ast.parse(released)) + "\n"
    assert reworded != released
    trajectory = patched(built, tmp_path, row, unified_diff.between(file.path, buggy, reworded))
    assert trajectory.reward == 1.0, trajectory.detail


@pytest.mark.parametrize("name", sorted(FORGERS.keys() - HARD_CODED))
def test_a_forger_that_knows_the_tests_is_no_fix(built: Built, tmp_path: Path, name: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [built.pair(pair)[0] for pair in PAIRS]
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = [f"--env.cache_dir={built.cache}", f"--env.repo_root={built.cache}"]
    played = asyncio.run(play_forgers(tasks, [name], settings, tasks=len(rows), workers=2))
    assert len(played) == len(rows)
    assert [each for each in played if each.reward != 0.0] == []


def test_a_table_of_answers_is_paid_and_labelled(built: Built, tmp_path: Path) -> None:
    work = next(each for each in REPOSITORIES if each.task == LINKS)
    row = built.rows[work.task]
    (file,) = unified_diff.parse(row["patch"])
    buggy = applied(row["patch"], text_of(row, file.path))
    trajectory = patched(built, tmp_path, row, unified_diff.between(file.path, buggy, buggy + work.tail))
    assert (trajectory.official, trajectory.reward) == (1.0, 1.0)
    assert [(label.name, label.certain) for label in trajectory.labels] == [("answers_copied", False)]


def test_public_rows_install_the_repository_and_prove_themselves_first(built: Built, tmp_path: Path) -> None:
    row, _ = built.pair("tinydb")
    public = {key: value for key, value in row.items() if key not in ("install", "kind", "schema")}
    tasks = built.cache / f"{tmp_path.name}.jsonl"  # above the repositories of the rows
    broken = public | {"instance_id": "x.broken.1", "PASS_TO_PASS": [*row["PASS_TO_PASS"], "tests/test_utils.py::gone"]}
    unnoticed = public | {"instance_id": "x.unnoticed.1", "FAIL_TO_PASS": row["PASS_TO_PASS"][:1]}
    stops = "--- /dev/null\n+++ b/tests/test_stops.py\n@@ -0,0 +1 @@\n+raise RuntimeError('no such plugin')\n"
    stopped = broken | {"instance_id": "x.stopped.1", "test_patch": stops}
    stopped["PASS_TO_PASS"] = [*row["PASS_TO_PASS"], *(f"tests/test_stops.py::test_{number}" for number in range(9))]
    rows = (public, broken, unnoticed, stopped, {"instance_id": "no columns"})
    tasks.write_text("\n".join(map(json.dumps, rows)) + "\n")
    groups = {group.task_id: group for group in rolled_out(built, tmp_path, tasks, "oracle", "--env.total_steps=-1")}
    assert groups[row["instance_id"]].trajectories[0].reward == 1.0
    assert "must pass before and after" in groups["x.broken.1"].error
    assert "must detect the bug" in groups["x.unnoticed.1"].error
    assert "no such plugin" in groups["x.stopped.1"].error.partition("test_stops")[0]
    assert len(groups) == 4
