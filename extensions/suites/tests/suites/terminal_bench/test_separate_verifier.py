"""Verifiers with a root file system of their own: which environment a task asks for, and what reaches it."""

from __future__ import annotations

import errno
import textwrap
from pathlib import Path
from typing import cast

import pytest

from palaestra.rollouts.records import Trajectory
from palaestra_slots.sandbox.slot import FileInfo, Slot
from palaestra_suites.terminal_bench import harbor_task, separate_verifier
from palaestra_suites.terminal_bench.import_tasks import Finding
from palaestra_suites.terminal_bench.terminal_task import Artifact, TerminalTask
from palaestra_suites.toolchain.toolchain import DependencyCache
from suites.terminal_bench.conftest import Try, played_all
from suites.terminal_bench.mini import HARBOR, copied, written

SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
TEST_SH = """\
#!/bin/bash
uvx -p 3.13 -w pytest==8.4.1 pytest /tests/test_words.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TEST_PY = """\
from pathlib import Path

def test_the_words_are_sorted():
    assert Path("/app/words.txt").read_text().split() == ["apple", "fig", "pear"]

def test_the_state_of_the_program_was_collected():
    assert Path("/logs/artifacts/state.txt").read_text().strip() == "3 words"

def test_nothing_else_of_the_agent_is_here():
    assert not Path("/app/notes.txt").exists()
    assert not Path("/app/out/secret.log").exists()
    assert Path("/app/out/kept.txt").read_text() == "kept"
    assert Path("/only-in-the-verifier").exists()
"""
SOLVE = """\
#!/bin/bash
printf 'apple\\nfig\\npear\\n' > /app/words.txt
echo notes > /app/notes.txt
mkdir -p /app/out
printf kept > /app/out/kept.txt
echo secret > /app/out/secret.log
"""
TOML = """\
schema_version = "1.4"
artifacts = ["/app/words.txt", { source = "/app/out", exclude = ["*.log"] }, "/app/missing"]
[agent]
timeout_sec = 60
[verifier]
environment_mode = "separate"
timeout_sec = 60
[[verifier.collect]]
command = "mkdir -p /logs/artifacts && [[ -s words.txt ]] && echo $(wc -l <words.txt) words >/logs/artifacts/state.txt"
[environment]
workdir = "/app"
"""


def make_task(folder: Path, name: str = "words", **changed: str) -> Path:
    """Write a task with a verifier of its own; `changed` replaces texts of its files."""
    files = {
        "task.toml": TOML,
        "instruction.md": "Sort the words fig, apple and pear into /app/words.txt, one per line.\n",
        "environment/Dockerfile": "FROM debian\nRUN mkdir -p /app\nWORKDIR /app\n",
        "solution/solve.sh": SOLVE,
        "tests/test.sh": TEST_SH,
        "tests/test_words.py": TEST_PY,
        "tests/Dockerfile": "FROM debian\nRUN touch /only-in-the-verifier\nCOPY . /tests\n",
    }
    return written(folder / name, files | changed)


def read(tmp_path: Path, text: str, files: dict[str, str] | None = None) -> TerminalTask:
    return harbor_task.read_task(copied(HARBOR / "greeting", tmp_path, {"task.toml": text, **(files or {})}))


def test_which_environment_a_task_asks_for(tmp_path: Path) -> None:
    assert read(tmp_path / "a", '[verifier]\nenvironment_mode = "shared"\n').verifier.environment is None
    own = read(tmp_path / "b", SEPARATE).verifier.environment
    assert own is not None
    assert (own.has_tests, own.recipe.folder.name) == (False, "environment")
    assert own.artifacts == (Artifact("/logs/artifacts"),)
    built = read(tmp_path / "c", "[verifier.environment]\nmemory_mb = 512\n", {"tests/Dockerfile": "FROM x\n"})
    assert built.verifier.environment is not None, "the table alone means a separate environment"
    assert (built.verifier.environment.has_tests, built.verifier.environment.recipe.folder.name) == (True, "tests")
    assert built.verifier.environment.limits.memory_bytes == 512 << 20
    named = read(tmp_path / "d", '[verifier.environment]\ndocker_image = "python:3.13"\n').verifier.environment
    assert named is not None
    assert (named.recipe.docker_image, named.has_tests) == ("python:3.13", True)


def test_a_step_chooses_before_its_task(tmp_path: Path) -> None:
    text = f"""
        artifacts = ["/app/a", {{ source = "/logs/artifacts", exclude = ["*.tmp"] }}]
        {SEPARATE}
        [[verifier.collect]]
        command = "first"
        [[steps]]
        name = "count"
        artifacts = ["/app/b"]
        [[steps.verifier.collect]]
        command = "second"
        user = "app"
        timeout_sec = 5
        [[steps]]
        name = "sort"
        [steps.verifier]
        environment_mode = "shared"
    """
    count, sort = harbor_task.read_task(
        copied(HARBOR / "several-steps", tmp_path, {"task.toml": textwrap.dedent(text)})
    ).steps
    assert count.verifier.environment is not None
    assert [each.source for each in count.verifier.environment.artifacts] == ["/app/a", "/logs/artifacts", "/app/b"]
    assert [(hook.command, hook.user, hook.timeout_s) for hook in count.verifier.collect] == [
        ("first", None, 60.0), ("second", "app", 5.0),
    ]  # fmt: skip
    assert sort.verifier.environment is None
    assert [hook.command for hook in sort.verifier.collect] == ["first"]


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_the_solution_passes_and_doing_nothing_fails(try_tasks: Try, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks")
    plain = TEST_PY[: TEST_PY.index("def test_nothing_else")]
    make_task(tmp_path / "tasks", "own-root", **{"tests/test_words.py": plain})
    (tmp_path / "tasks/own-root/tests/Dockerfile").unlink()  # a fresh copy of the task's root
    lines = try_tasks(tmp_path / "tasks")
    assert {name: (line.finding, line.noop) for name, line in lines.items()} == {
        "words": (Finding.GOOD, 0.0), "own-root": (Finding.GOOD, 0.0),
    }, lines  # fmt: skip


def test_what_a_copy_loses(tmp_path: Path) -> None:
    for name in ("kept", "debug.log", "deep/run.log", "deep/tool"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "deep/tool").chmod(0o4755)
    links = {"in": "kept", "deep/up": "../kept", "out": "../x", "deep/out": "../../x", "abs": "/etc"}
    links |= {"deep/top": "..", "through": "deep/top/../tests", "past": "deep/../kept"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(target)
    lost = separate_verifier._cleaned(tmp_path, "/app", ["*.log"])
    assert sorted(lost) == [f"/app/{name}: a link that leaves /app" for name in ("abs", "deep/out", "out", "through")]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"kept", "in", "deep", "deep/up", "deep/tool", "deep/top", "past"}
    assert (tmp_path / "deep/tool").stat().st_mode & 0o7777 == 0o755


class Growing:
    """A slot in which a program lets a file grow after its size was asked for."""

    async def stat(self, path: str) -> FileInfo:
        if path == "/loop/x":
            raise OSError(errno.ELOOP, "Too many levels of symbolic links", path)
        return FileInfo(path, "file", 1, 0o644, 0.0)

    async def download(self, path: str, local: Path) -> int:
        with local.open("wb") as file:
            return file.truncate(separate_verifier.MOST_BYTES + 1)


async def test_a_file_that_grows_meanwhile_is_left_out(tmp_path: Path) -> None:
    slot = cast("Slot", Growing())
    found = await separate_verifier.copy_artifacts(slot, [Artifact("/loop/x"), Artifact("/a")], tmp_path)
    loop = f"/loop/x: [Errno {errno.ELOOP}] Too many levels of symbolic links: '/loop/x'"
    assert (found.copies, found.left_out) == ([], [loop, "/a: more than 2048 MB"])
    assert not list(tmp_path.iterdir())


CHEATS = {
    "a-link": "mkdir -p /app/out; ln -s /tests/test_words.py /app/out/kept.txt; ln -s /tests /app/words.txt",
    "planted-tests": "mkdir -p /tests /app/out; echo 'def test_a(): pass' > /tests/test_words.py; touch /app/words.txt",
    "planted-reward": "mkdir -p /logs/verifier /logs/artifacts; echo 1 > /logs/verifier/reward.txt; "
    "echo 1 > /logs/artifacts/reward.txt",
    "a-tool": "for each in bash uvx pytest; do printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/$each; done",
    "a-conftest": "echo 'collect_ignore = [\"test_words.py\"]' > /app/conftest.py; mkdir /app/out; "
    "cp /app/conftest.py /app/out/",
}


@pytest.mark.slots
@pytest.mark.timeout(600)
def test_work_that_attacks_the_verifier_is_not_paid(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    for name in CHEATS:
        make_task(tmp_path / "tasks", name)
    scored = played_all(tmp_path / "tasks", installed_pytest, tmp_path, CHEATS)
    assert {name: each.reward for name, each in scored.items()} == dict.fromkeys(CHEATS, 0.0)
    left = scored["a-link"].detail["artifacts_left_out"]
    assert left == [
        "/app/words.txt: it is neither a file nor a directory",
        "/app/out/kept.txt: a link that leaves /app/out",
    ]


@pytest.mark.slots
@pytest.mark.timeout(300)
def test_what_is_recorded(installed_pytest: DependencyCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = '[[verifier.collect]]\ncommand = "echo the database is gone >&2; exit 3"\n'
    make_task(tmp_path / "tasks", **{"task.toml": TOML.replace("[environment]", f"{hook}[environment]")})
    monkeypatch.setattr(separate_verifier, "MOST_BYTES", 8)

    def of(trajectories: dict[str, Trajectory]) -> Trajectory:
        return trajectories["words"]

    rollout = of(played_all(tmp_path / "tasks", installed_pytest, tmp_path))
    assert (rollout.reward, rollout.official) == (0.0, 0.0)
    assert "/app/words.txt: more than" in rollout.detail["artifacts_left_out"][0]
    (failed,) = rollout.detail["collect_failed"]
    assert "the database is gone" in failed
    assert "exit 3" in failed
