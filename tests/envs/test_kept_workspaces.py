"""Workspaces that one run has prepared and others find: only where they are declared, once, whole, and never under
somebody's feet. What `setup` makes here differs every time it runs, which shows whether it ran."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.events import GroupStarted, RolloutEnded
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore, StoredSnapshot
from palaestra_suites.swe.swe_row import RowKind, SweRow
from palaestra_suites.swe.swe_smith_oracle import ResolvedRow, SweEnvironment, SweSmithOracleEnvConfig
from palaestra_suites.toolchain.toolchain import Install, Toolchain
from programs import killed_after, until

pytestmark = pytest.mark.slots

ENV = """
from pathlib import Path
from palaestra import Score, Task, environment
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

SETUP = "sleep SLEEP; cat /proc/sys/kernel/random/uuid > made; mkdir deep; seq 1000 > deep/numbers"

@environment(toolsets=["terminal"])
def made(text: str = "a", recipe: str = "1", declared: bool = True, evict: bool = False):
    yield Task(id="one", prompt="Go on.", files={"given.txt": text}, setup=SETUP, solution="echo x > deep/numbers",
               recipe=recipe if declared else None, data=evict)

@made.score
async def seen(task, sandbox):
    store = SnapshotStore(Path("store"), max_bytes=0)
    made, given = await sandbox.read_text("made"), await sandbox.read_text("given.txt")
    return Score(1.0, {}, {"made": made, "given": given, "evicted": store.evict() if task.data else []})
"""

HOOK = """
from palaestra import Score, Task, environment

@environment(toolsets=["terminal"])
def hooked(lines: int = 3):
    yield Task(id="one", prompt="Go on.", solution="true", data=DATA, recipe="1")

@hooked.prepare
async def fill(task, sandbox, rng):
    await sandbox.execute(f"cat /proc/sys/kernel/random/uuid > made; echo {rng.random()} >> made  # first")

@hooked.score
async def seen(sandbox):
    return Score(1.0, {}, {"made": await sandbox.read_text("made")})
"""

CLASS = """
from palaestra import HermesAgentBaseEnv

class Shared(HermesAgentBaseEnv):
    name = "shared"

    async def setup(self):
        self.drawn = 0

    async def get_next_item(self):
        self.drawn += 1
        return {"prompt": "Go on.", "solution": "true"} if self.drawn < 3 else None

    def format_prompt(self, item):
        return item["prompt"]

    def group_recipe(self, item):
        return RECIPE

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool("bash", {"command": "cat /proc/sys/kernel/random/uuid > made"})
        return {}

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        return 1.0, {"made": (await exec_tool("bash", {"command": "cat made"})).output}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError("the verification hook replaces this")

    async def evaluate(self, *args, **kwargs):
        return {}
"""

RUN = ("run", "my_env.py", "--policy", "oracle", "--group", "2", "--env.workspace_store", "store")


@pytest.fixture(scope="module", autouse=True)
def layers_are_to_be_had() -> None:
    async def best() -> Rung:
        async with LocalBackend() as backend:
            return backend.rung

    if asyncio.run(best()) < Rung.USERNS:
        pytest.skip("without layers nothing is kept")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(ENV)


def write(script: str, **values: object) -> None:
    for name, value in {"SLEEP": 0, **values}.items():
        script = script.replace(name, str(value))
    Path("my_env.py").write_text(script)


def palaestra(*argv: str) -> int:
    return main(list(argv))


def journals() -> list[Path]:
    return sorted(Path("runs").glob("*/*/journal.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def groups_of(journal: Path) -> list[Group]:
    return [event.group for event in read_journal(journal) if isinstance(event, GroupStarted)]


def made_in(journal: Path) -> list[dict[str, str]]:
    """What the rollouts of a run saw."""
    return [event.trajectory.detail for event in read_journal(journal) if isinstance(event, RolloutEnded)]


def run(*flags: str) -> tuple[set[str], list[bool]]:
    """One run: the different workspaces its rollouts saw, and which groups found theirs in the store."""
    # Without kept workspaces, a run has no store, and naming one is refused.
    rest = RUN[2:-2] if "--env.keep_workspaces" in flags else RUN[2:]
    assert palaestra(*RUN[:2], *flags, *rest) == 0
    journal = journals()[-1]
    return {detail["made"] for detail in made_in(journal)}, [group.from_store for group in groups_of(journal)]


def entries() -> list[StoredSnapshot]:
    return SnapshotStore(Path("store")).entries()


def test_what_is_declared_is_prepared_once_for_all_runs(capsys: pytest.CaptureFixture[str]) -> None:
    first, found = run()
    assert (len(first), found) == (1, [False])
    capsys.readouterr()
    assert run() == (first, [True])
    folder = str(journals()[-1].parent)
    assert "machine: 1 of 1 workspace" in capsys.readouterr().err
    assert palaestra("status", folder) == 0
    assert "prepared   1 workspace, 1 of" in capsys.readouterr().out
    assert palaestra("slots", "list", "--store", "store") == 0
    assert "made one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [("--env.text", "b"), ("--env.recipe", "2"), ("--env.declared", "false"), ("--env.keep_workspaces", "false"),
     ("--env.allow_network", "true"), ("--env.isolation", "userns")],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_what_differs_or_is_not_declared_is_prepared_anew(flags: tuple[str, ...]) -> None:
    if os.geteuid() != 0 and flags[0] == "--env.isolation":
        pytest.skip("that is the best rung here already")
    first, _ = run()
    other, found = run(*flags)
    assert other.isdisjoint(first)
    assert found == [False]


def test_nobody_is_told_of_a_store_that_nobody_declares_anything_for() -> None:
    run("--env.declared", "false", "--env.workspace_store_bytes", "1000000")
    assert list(Path("store").iterdir()) == []


def test_an_entry_in_use_is_not_evicted() -> None:
    made, _ = run()
    assert run("--env.evict", "true") == (made, [True])
    assert [detail["evicted"] for detail in made_in(journals()[-1])] == [[], []]
    assert run() == (made, [True])
    other, found = run("--env.keep_workspaces", "false", "--env.evict", "true")  # now nobody stands on it
    assert (other.isdisjoint(made), found, entries()) == (True, [False], [])


def damage_file(layers: Path) -> None:
    next(layers.rglob("numbers")).unlink()


def damage_content(layers: Path) -> None:
    path = next(layers.rglob("numbers"))
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def damage_layers(layers: Path) -> None:
    subprocess.run(["rm", "-rf", str(layers)], check=True)


def damage_about(layers: Path) -> None:
    (layers.parent / "about.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_file, damage_content, damage_layers, damage_about])
def test_what_was_damaged_is_made_again(damage: Callable[[Path], None]) -> None:
    first, _ = run()
    (entry,) = entries()
    damage(SnapshotStore(Path("store")).files(entry.key))
    second, found = run()
    assert (second.isdisjoint(first), found) == (True, [False])
    assert run() == (second, [True])


def test_what_is_larger_than_the_store_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run("--env.workspace_store_bytes", "1000")
    assert found == [False]
    assert "not kept" in capsys.readouterr().err
    assert entries() == []


def test_a_folder_that_cannot_be_a_store_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("store").write_text("")
    assert palaestra(*RUN) == 2
    assert "store" in capsys.readouterr().err
    assert journals() == []


def test_a_hook_is_run_anew_when_its_file_its_settings_or_its_task_change() -> None:
    write(HOOK, DATA="{'a': 1}")
    first, found = run()
    assert found == [False]
    assert run() == (first, [True])
    assert run("--env.max_agent_turns", "9") == (first, [True])  # what is not the hook's business
    for script, flags in (
        (HOOK.replace("DATA", "{'a': 2}"), ()),
        (HOOK.replace("DATA", "{'a': 1}").replace("# first", "# second"), ()),
        (HOOK.replace("DATA", "{'a': 1}"), ("--env.lines", "4")),
        (HOOK.replace("DATA", "{'a': 1}"), ("--env.seed", "4")),
    ):
        write(script)
        other, found = run(*flags)
        assert (other.isdisjoint(first), found) == (True, [False])


def test_a_recipe_of_what_cannot_be_named_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(HOOK, DATA="object()")
    assert palaestra(*RUN) == 3
    (group,) = groups_of(journals()[-1])
    assert "sets a recipe" in group.error
    assert "plain data" in group.error


def test_a_class_shares_what_its_group_recipe_declares() -> None:
    """One item drawn twice is two tasks, of one preparation."""
    share = ("process", "--env.share_setup", "true", "--env.allow_network", "false", "--concurrency", "1")
    write(CLASS, RECIPE="None")
    made, found = run(*share)
    assert (len(made), found) == (2, [False, False])
    write(CLASS, RECIPE="'1'")
    made, found = run(*share)
    assert (len(made), found) == (1, [False, True])
    assert run(*share) == (made, [True, True])


def started() -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A run in a process of its own, which ends with the block."""
    return killed_after([sys.executable, "-m", "palaestra", *RUN], stderr=subprocess.DEVNULL)


def at_stage(process: subprocess.Popen[bytes], stage: str) -> bool:
    """Whether the run of a process says that something of it is at a stage."""
    for path in Path("runs").glob("*/*/status.json"):
        seen = json.loads(path.read_text())
        if seen.get("pid") == process.pid and seen["stages"].get(stage):
            return True
    return False


def test_two_runs_at_once_prepare_once() -> None:
    write(ENV, SLEEP=2)
    with started() as one, started() as other:
        assert [each.wait(timeout=120) for each in (one, other)] == [0, 0]
    seen = [detail["made"] for journal in journals() for detail in made_in(journal)]
    assert (len(seen), len(set(seen))) == (4, 1)
    assert sorted(group.from_store for journal in journals() for group in groups_of(journal)) == [False, True]


def test_where_the_builder_is_killed_who_waits_builds() -> None:
    write(ENV, SLEEP=3)
    with started() as builder, started() as waiting:
        until(lambda: at_stage(builder, "prepare") or at_stage(waiting, "prepare"), "one of the runs prepares")
        builder, waiting = (builder, waiting) if at_stage(builder, "prepare") else (waiting, builder)
        os.kill(builder.pid, signal.SIGSTOP)  # so that it cannot come to an end before the other one waits
        until(lambda: at_stage(waiting, "store"), "the other one waits")
        builder.kill()
        assert waiting.wait(timeout=120) == 0
    made = {detail["made"] for detail in made_in(journals()[-1])}
    assert len(entries()) == 1
    assert run() == (made, [True])


def test_a_builder_that_is_killed_while_it_keeps_leaves_nothing_that_is_taken_for_whole() -> None:
    write(ENV.replace("seq 1000", "head -c 300000000 /dev/urandom"))  # large enough to be caught at it
    store = SnapshotStore(Path("store"))
    with started() as builder:
        until(lambda: store.folder.is_dir() and bool(store.halves()), "the run keeps its workspace")
        builder.kill()
        builder.wait()
    assert (len(store.halves()), store.entries()) == (1, [])
    made, found = run()
    assert (found, store.halves(), len(store.entries())) == ([False], [], 1)
    assert run() == (made, [True])


def test_a_run_that_goes_on_finds_its_workspace() -> None:
    first, _ = run()
    journal = journals()[-1]
    events = list(read_journal(journal))
    place = next(n for n, event in enumerate(events, 1) if isinstance(event, RolloutEnded))
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:place]))
    assert palaestra(*RUN, "--resume", str(journal.parent)) == 0
    assert {detail["made"] for detail in made_in(journal)} == first
    assert [group.from_store for group in groups_of(journal)] == [False, True]


def test_a_shipped_environment_proves_its_tasks_once_per_machine() -> None:
    script = Path(__file__).parents[2] / "environments/hermes_swe_env.py"
    flags = ["--policy", "oracle", "--env.group_size", "1", "--env.total_steps", "1", "--env.workspace_store", "store"]
    found = []
    for _ in range(2):
        assert palaestra("run", str(script), *flags) == 0
        ended = [event.trajectory for event in read_journal(journals()[-1]) if isinstance(event, RolloutEnded)]
        assert [each.reward for each in ended] == [1.0]
        found += [group.from_store for group in groups_of(journals()[-1])]
    assert found == [False, True]


def test_a_repository_is_kept_where_its_row_says_all_of_it() -> None:
    row = SweRow(RowKind.ORACLE, "one", "o/r", "a" * 40, "?", ("t.py::t",), (), install=Install())
    env = SweEnvironment(SweSmithOracleEnvConfig(cache_dir="cache"))

    def recipe(row: SweRow) -> object:
        return env.recipe(Task(id="one", prompt="?", data=ResolvedRow(row, Toolchain(("python3",)))))

    assert recipe(row) is not None
    kept = recipe(row)
    assert recipe(row) == recipe(replace(row, problem_statement="!"))
    for change in ({"pass_to_pass": ("t.py::u",)}, {"test_patch": "--- a\n+++ b\n"}, {"patch": "--- a\n+++ b\n"}):
        assert recipe(row) != recipe(replace(row, **change)), "the prepared row was checked with its tests and its fix"
    assert recipe(replace(row, patch="--- a\udce9\n")) is not None, "patches may not be UTF-8"
    env.config = env.config.model_copy(update={"narrow": True})
    assert recipe(row) != kept
    assert recipe(row) != recipe(replace(row, base_commit="b" * 40))
    assert recipe(row) != recipe(replace(row, kind=RowKind.SMITH, patch="--- a\n+++ b\n"))
    assert recipe(replace(row, base_commit="main")) is None
    assert recipe(replace(row, repo_path="elsewhere")) == recipe(row)
    installed = replace(row, install=Install(editable=True))
    assert recipe(installed) not in (None, recipe(row))
    assert recipe(replace(installed, install=Install(editable=True, requirements=("x",)))) != recipe(installed)
    kept = recipe(installed)
    env.config = env.config.model_copy(update={"install_env": {"PIP_INDEX_URL": "https://index.example"}})
    assert recipe(installed) != kept, "another index may have other packages"
