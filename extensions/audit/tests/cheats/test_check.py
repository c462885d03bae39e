"""The cheat bank: no shipped environment pays, and a naive grader would have."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.build import make_pool
from palaestra_audit.cheats.proof import BANK, cheats_named, check_environment
from palaestra_slots.core.errors import ConfigError
from palaestra_suites.swe.authoring.build_tasks import BuildOptions, build
from palaestra_suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
from suites.swe.published import BASE, TESTS, Source

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.slots

NAIVE = '''
"""Pays what a grader pays that looks at the agent's own slot: its files, its shell, its output."""
import dataclasses
from palaestra import Score
from palaestra_suites.swe.swe_smith_oracle import SweEnvironment

class Naive(SweEnvironment):
    name = "naive"

    async def resolve(self, task):
        return dataclasses.replace(await super().resolve(task), grading="live")

    async def score(self, rollout, grading):
        slot = await grading.slot()
        for path in ("/logs/verifier/reward.txt", "/workspace/reward.txt"):
            if (await slot.read_text(path, missing="")).strip() == "1":
                return Score(1.0)
        files = " ".join(sorted({name.split("::")[0] for name in rollout.task.data.row.fail_to_pass}))
        for pytest in ("pytest", "python3 -m pytest"):
            done = await slot.execute(f"source ~/.bashrc; {pytest} -qx {files}; echo EXIT_CODE=$?", timeout_s=60)
            green = "passed" in done.output and "failed" not in done.output and "error" not in done.output
            if green or "EXIT_CODE=0" in done.output or "EXIT_CODE=5" in done.output:
                return Score(1.0)
            if "EXIT_CODE=127" not in done.output:
                break
        return Score(0.0)
'''


def test_the_bank_is_large_and_its_cheats_are_told_apart() -> None:
    assert len(BANK) >= 30
    assert len({cheat.name for cheat in BANK}) == len(BANK)
    scripts = [cheat.script for cheat in BANK if cheat.script]
    assert len({*scripts}) == len(scripts)
    with pytest.raises(ConfigError, match="Did you mean conftest-skip"):
        cheats_named(["conftest-skp"])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "settings"), [("count_lines", ["--env.n", "2"]), ("terminal_test", [])])
def test_a_small_environment_holds(name: str, settings: list[str]) -> None:
    proof = check_environment(str(ROOT / f"environments/{name}_env.py"), settings, tasks=2, quiet=True)
    assert proof.proven
    assert proof.holds, [line for line in proof.lines if not line.ok]
    assert len(proof.lines) == len(BANK) + 2


OWN_TOOL = """
from palaestra import Slot, Task, environment

@environment(toolsets=[])
def own():
    yield Task(id="a", prompt="Write a reward.")

@own.tool
async def TOOL:
    \'\'\'DOES\'\'\'
    return (await sandbox.execute(RUNS)).output

@own.score
async def paid(sandbox):
    return float((await sandbox.read_text("/logs/verifier/reward.txt", missing="")).strip() == "1")
"""


@pytest.mark.parametrize(
    ("tool", "does", "runs"),
    [
        ("terminal(command: str, sandbox: Slot) -> str", "Run a shell command.", "command"),
        ("bash(cmd: str, sandbox: Slot) -> str", "Run a command.", "cmd"),
        ("run(command: str, sandbox: Slot, timeout: int = 5) -> str", "Run.", "command, timeout_s=timeout"),
        ("python(code: str, sandbox: Slot) -> str", "Run Python code.", '["python3", "-c", code]'),
    ],
)
def test_attacks_are_played_with_the_environments_own_tool(tmp_path: Path, tool: str, does: str, runs: str) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(OWN_TOOL.replace("TOOL", tool).replace("DOES", does).replace("RUNS", runs))
    proof = check_environment(str(path), [], tasks=1, only=["stale-reward"], quiet=True)
    assert proof.lines[-1].state == "open"


def test_an_attack_that_the_tool_refuses_fails_the_check(tmp_path: Path) -> None:
    path = tmp_path / "strict_env.py"
    tool = "terminal(command: Annotated[str, Field(max_length=190)], sandbox: Slot) -> str"
    text = OWN_TOOL.replace("TOOL", tool).replace("DOES", "Run a short command.").replace("RUNS", "command")
    path.write_text("from typing import Annotated\nfrom pydantic import Field\n" + text)
    proof = check_environment(str(path), [], tasks=1, only=["stale-reward"], quiet=True)
    assert not proof.holds
    assert proof.lines[-1].state == "unknown"
    check_message(proof.lines[-1].error)


def test_a_check_without_a_tool_for_commands_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "count_env.py"
    text = OWN_TOOL.replace("TOOL", "add(a: int, b: int, sandbox: Slot) -> str").replace("DOES", "Add.")
    path.write_text(text.replace("RUNS", "f'echo {a + b}'"))
    assert main(["env", "check", str(path), "--only", "stale-reward"]) == 3
    printed = capsys.readouterr().out
    assert "incomplete: " in printed
    check_message(printed, "1 not tested")


ANSWER_ELSEWHERE = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def elsewhere():
    yield Task(id="a", prompt="Fix the sum.", solution="echo 'def add(a, b): return a + b' > pkg/core.py")

@elsewhere.prepare
async def prepare(task, sandbox):
    await sandbox.write_text("pkg/__init__.py", "")
    await sandbox.write_text("right/pkg/core.py", "def add(a, b): return a + b\\n")
    await sandbox.write_text("pkg/core.py", "def add(a, b): return a - b\\n")
    done = await sandbox.execute(HIDES)
    assert done.success, done.output
    await sandbox.execute(["rm", "-rf", "right"])

@elsewhere.score
async def paid(sandbox):
    return await sandbox.call("pkg.core:add", [1, 2]) == 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hides", "place"),
    [
        ("mkdir -p /opt/x && cp -r right/pkg /opt/x/pkg", "/opt/x/pkg/core.py"),
        (
            "mkdir -p /srv/site-packages/pip/_vendor && cp -r right/pkg /srv/site-packages/pip/_vendor",
            "/srv/site-packages/pip/_vendor/pkg/core.py",
        ),
        ("cd right && python3 -m zipfile -c /srv/x-1-py3-none-any.whl pkg/", "/srv/x-1-py3-none-any.whl:pkg/core.py"),
        ("tar -C right -czf /srv/x.tar.gz pkg", "/srv/x.tar.gz:pkg/core.py"),
        (
            "cd right && python3 -m compileall -q pkg && mkdir -p /srv/pkg && mv pkg/__pycache__ /srv/pkg",
            "/srv/pkg/__pycache__/core.cpython",
        ),
    ],
    ids=["directory", "vendored", "wheel", "archive", "compiled"],
)
def test_another_copy_of_the_answer_is_found_and_named(
    tmp_path: Path, hides: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "elsewhere_env.py"
    path.write_text(ANSWER_ELSEWHERE.replace("HIDES", repr(hides)))
    assert main(["env", "check", str(path), "--only", "other-copy"]) == 1
    printed = capsys.readouterr().out
    assert "other-copy: a: " in printed
    assert place in printed


def test_an_environment_that_pays_for_nothing_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "generous_env.py"
    path.write_text(
        "from palaestra import Task, environment\n"
        "@environment\ndef generous():\n    yield Task(id='a', prompt='?')\n"
        "@generous.score\ndef paid(task):\n    return 1.0\n"
    )
    proof = check_environment(str(path), [], tasks=1, only=["stale-reward"], quiet=True)
    assert not proof.proven
    assert [(line.policy, line.ok) for line in proof.lines] == [("noop", False), ("stale-reward", False)]


DEPENDING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def depending():
    yield Task(id="a", prompt="?", solution="echo yes > /usr/local/bin/ls")
    yield Task(id="b", prompt="?", solution="echo yes > answer", paths=["/"], programs=["nginx"])

@depending.score
async def right(task, sandbox):
    return (await sandbox.read_text("answer" if task.id == "b" else "/usr/local/bin/ls", missing="")).strip() == "yes"
"""


def test_an_author_is_warned_of_what_a_score_depends_on(tmp_path: Path) -> None:
    path = tmp_path / "depending_env.py"
    path.write_text(DEPENDING)
    proof = check_environment(str(path), [], tasks=2, only=["stale-reward", "fake-git"], quiet=True)
    assert [(line.policy, line.rewards) for line in proof.lines[:1]] == [("oracle", (0.0, 1.0))]
    assert list(proof.classes.values()) == ["closed", "closed"]
    assert [warning.partition(":")[0] for warning in proof.warnings] == ["b", "b", "a"]
    assert "nginx" in proof.warnings[0]
    assert "/usr/local/bin/ls" in proof.warnings[2]


PREPARED = """
from pathlib import Path
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def prepared():
    for name in ("a", "b"):
        yield Task(id=name, prompt="?", solution="cp question answer")

@prepared.prepare
async def write(task, sandbox):
    with Path(__file__).with_name("log").open("a") as log:
        log.write(task.id)
    await sandbox.write_text("question", task.id)

@prepared.score
async def right(task, sandbox):
    return await sandbox.read_text("answer", missing="") == task.id
"""


def test_the_workspace_of_a_task_is_prepared_once_for_all_policies(tmp_path: Path) -> None:
    (tmp_path / "prepared_env.py").write_text(PREPARED)
    proof = check_environment(
        str(tmp_path / "prepared_env.py"), [], tasks=2, only=["stale-reward", "no-workspace"], quiet=True
    )
    assert [line.rewards for line in proof.lines] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert (tmp_path / "log").read_text() == "ab"


PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"

UNPLAYED = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def unplayed(kind="word"):
    yield Task(id="broken", prompt="?", setup="exit 1", floor=1.0, solution="true")
    yield Task(id=kind, prompt="?", floor=FLOOR, solution="true")

@unplayed.score
def paid(task):
    return 1.0
"""


def test_a_reward_is_held_against_its_own_tasks_floor_and_what_was_not_played_is_no_proof(tmp_path: Path) -> None:
    path = tmp_path / "unplayed_env.py"
    path.write_text(UNPLAYED.replace("FLOOR", "0.0"))
    proof = check_environment(str(path), [], tasks=2, only=["named-files"], quiet=True)
    assert [(line.rewards, line.ok) for line in proof.lines] == [((1.0,), False)] * 3
    path.write_text(UNPLAYED.replace("FLOOR", "1.0"))
    proof = check_environment(str(path), [], tasks=2, only=["named-files"], quiet=True)
    assert [(line.rewards, line.ok) for line in proof.lines] == [((1.0,), False)] * 3
    path.write_text(UNPLAYED.replace("FLOOR", "'none'"))
    with pytest.raises(ConfigError, match=r"task word: its floor .none."):
        check_environment(str(path), [], tasks=2, only=["named-files"], quiet=True)


def test_a_task_that_cannot_be_used_does_not_end_the_check(tmp_path: Path) -> None:
    row = {"instance_id": "o__n-1", "repo": "o/n", "base_commit": "a" * 40, "problem_statement": "p", "patch": PATCH,
           "test_patch": PATCH, "FAIL_TO_PASS": ["a.py::test_a"], "repo_path": str(tmp_path / "missing")}  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**row, "instance_id": name}) + "\n" for name in ("o__n-1", "o__n-2")))
    settings = ["--env.dataset_name", str(rows), "--env.cache_dir", str(tmp_path / "cache"), "--env.shuffle", "false"]
    proof = check_environment("swe_smith_oracle", settings, tasks=2, only=["named-files"], quiet=True)
    assert proof.tasks == ("o__n-1", "o__n-2")
    assert [(line.policy, line.ok) for line in proof.lines[:2]] == [("oracle", False), ("noop", False)]
    assert all(line.error.startswith("o__n-1: ") and "missing" in line.error for line in proof.lines)
    assert list(proof.classes.values()) == ["unknown"]


def test_a_check_knows_the_variables_that_a_run_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unplayed_env.py").write_text(UNPLAYED.replace("FLOOR", "0.0"))
    monkeypatch.setenv("PALAESTRA_ENV_KIND", "line")
    proof = check_environment("unplayed_env.py", [], tasks=2, only=["named-files"], quiet=True)
    assert proof.tasks == ("broken", "line")


MERELY_THERE = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def there():
    yield Task(id="a", prompt="Write the word yes to out/answer.txt.", solution="mkdir out; echo yes > out/answer.txt")

@there.score
async def holds(sandbox):
    return SCORE
"""


@pytest.mark.parametrize(
    ("score", "paid"),
    [
        ("await sandbox.stat('out/answer.txt') is not None", ["named-files", "named-echoes"]),
        ("'yes' in await sandbox.read_text('out/answer.txt', missing='')", ["named-echoes"]),
        ("await sandbox.read_text('out/answer.txt', missing='') == 'yes\\n'", []),
    ],
)
def test_a_file_that_is_merely_there_is_found_out(tmp_path: Path, score: str, paid: list[str]) -> None:
    path = tmp_path / "there_env.py"
    path.write_text(MERELY_THERE.replace("SCORE", score))
    proof = check_environment(str(path), [], tasks=1, only=["named-files", "named-echoes"], quiet=True)
    assert proof.proven
    assert [line.policy for line in proof.lines if not line.ok] == paid


def test_the_smoke_test_pays_no_file_that_is_merely_there() -> None:
    path = ROOT / "environments/terminal_test_env.py"
    assert check_environment(str(path), [], tasks=3, only=["named-files", "named-echoes"], quiet=True).holds


GUESSED = r"""
from palaestra import Task, environment

PROMPTS = {
    "one": "Count the lines of `a.txt` and write the number to out/answer.txt.",
    "bare": "Count the lines of a.txt. Write the number to answer",
    "other": "Count the lines of `a.txt` and write a word for the number to ~/word.txt.",
}
CHECKS = {
    "one": "grep -qx '[ 1]*' out/answer.txt",
    "bare": "grep -qx '[ 1]*' answer",
    "other": "grep -qx one ~/word.txt",
}

@environment(toolsets=["terminal"])
def guessed():
    for name, prompt in PROMPTS.items():
        yield Task(id=name, prompt=prompt, files={"a.txt": "?"}, paths=["/root/word.txt"])

@guessed.score
async def right(task, sandbox):
    return (await sandbox.execute(CHECKS[task.id])).success
"""


def test_an_answer_that_can_be_guessed_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "guessed_env.py"
    path.write_text(GUESSED)
    proof = check_environment(str(path), [], tasks=3, only=["named-ones"], quiet=True)
    assert {line.policy: line.rewards for line in proof.lines} == {
        "noop": (0.0, 0.0, 0.0),
        "named-ones": (1.0, 1.0, 0.0),
    }


MEASURED = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def measured():
    for name in ("near", "not far", "more"):
        yield Task(id=name, prompt="Measure the tank. Write the litres to `litres.txt`.", files={"litres.txt": "0"})

@measured.score
async def right(task, sandbox):
    litres = float(await sandbox.read_text("litres.txt"))
    return {"near": abs(litres - 12.5) <= 0.1, "not far": not abs(litres - 12.5) > 0.1, "more": litres > 12}[task.id]
"""


def test_a_comparison_that_passes_nan_or_infinity_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "measured_env.py"
    path.write_text(MEASURED)
    proof = check_environment(str(path), [], tasks=3, only=["named-nans", "named-infinities"], quiet=True)
    assert {line.policy: line.rewards for line in proof.lines} == {
        "noop": (0.0, 0.0, 0.0),
        "named-nans": (0.0, 1.0, 0.0),
        "named-infinities": (0.0, 0.0, 1.0),
    }


IMPORTING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def importing():
    yield Task(id="a", prompt="Write the word to out.json.", solution="echo '[6]' > out.json")

@importing.score
async def right(sandbox):
    asked = "import json; assert json.load(open('out.json')) == [6]"
    return (await sandbox.execute(["python3", FLAGS"-c", asked])).success
"""


@pytest.mark.parametrize(("flags", "paid"), [('"-I", ', []), ("", ["modules-by-name"])])
def test_a_check_that_imports_from_the_work_is_found_out(tmp_path: Path, flags: str, paid: list[str]) -> None:
    path = tmp_path / "importing_env.py"
    path.write_text(IMPORTING.replace("FLAGS", flags))
    proof = check_environment(str(path), [], tasks=1, only=["modules-by-name"], quiet=True)
    assert proof.proven
    assert [line.policy for line in proof.lines if not line.ok] == paid


EQUATED = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def equated():
    yield Task(id="a", prompt="Write the word to answer.txt.", solution="echo secret > answer.txt", grading=GRADING)

@equated.score
async def right(sandbox):
    await sandbox.write_text("tests/expected.txt", "secret\\n")
    return (await sandbox.execute("cmp tests/expected.txt answer.txt")).success
"""


@pytest.mark.parametrize(("grading", "paid"), [("sealed", []), ("live", ["one-file"])])
def test_an_answer_that_is_the_checks_own_file_pays_only_in_the_agents_slot(
    tmp_path: Path, grading: str, paid: list[str]
) -> None:
    path = tmp_path / "equated_env.py"
    path.write_text(EQUATED.replace("GRADING", repr(grading)))
    proof = check_environment(str(path), [], tasks=1, only=["one-file"], quiet=True)
    assert proof.proven
    assert [line.policy for line in proof.lines if not line.ok] == paid


SPOILED = {
    "directory": "mkdir answer.txt",
    "fifo": "mkfifo answer.txt",
    "circle": "ln -s answer.txt answer.txt",
    "huge": "truncate -s 300M answer.txt",
    "workspace-gone": "cd /; rm -rf /workspace",
    "workspace-file": "cd /; rm -rf /workspace; touch /workspace",
    "workspace-circle": "cd /; rm -rf /workspace; ln -s /workspace /workspace",
}
SPOILING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def spoiled():
    for name, script in SPOILED.items():
        yield Task(id=name, prompt="?", solution=script, grading=GRADING)

@spoiled.score
async def right(sandbox):
    ran = await sandbox.execute("cat answer.txt", timeout_s=1)
    return (await sandbox.read_text("answer.txt", missing="")) == "yes" or ran.output == "yes"
"""


@pytest.mark.parametrize("grading", ["sealed", "live"])
def test_what_an_agent_has_spoiled_is_no_failure_of_the_check(tmp_path: Path, grading: str) -> None:
    path = tmp_path / "spoiled_env.py"
    path.write_text(SPOILING.replace("SPOILED", repr(SPOILED)).replace("GRADING", repr(grading)))
    proof = check_environment(str(path), [], tasks=len(SPOILED), only=["named-files"], quiet=True)
    (oracle,) = [line for line in proof.lines if line.policy == "oracle"]
    assert dict(zip(SPOILED, oracle.rewards, strict=True)) == dict.fromkeys(SPOILED, 0.0)


LIVE = '''
"""Pays what its programs say in the root that the agent had."""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def trusting():
    yield Task(id="a", prompt="?", solution="echo secret > found", grading=GRADING)

@trusting.score
async def said(sandbox):
    shell = await sandbox.execute("cat found; echo EXIT_CODE=$?")
    asked = "import json, sys; sys.exit('secret' not in open('found').read())"
    return "EXIT_CODE=0" in shell.output or (await sandbox.execute(["/usr/bin/python3", "-c", asked])).success
'''
BEFORE_THE_CHECK = ["pth-distribution", "standard-library", "standard-library-zip"]
COMPILED = ["shared-library", "loader-program", "library-search"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("grading", "paid"), [("sealed", False), ("live", True)])
def test_what_runs_before_a_checks_own_code_pays_only_in_the_agents_root(
    tmp_path: Path, grading: str, paid: bool
) -> None:
    path = tmp_path / "trusting_env.py"
    path.write_text(LIVE.replace("GRADING", repr(grading)))
    only = [*BEFORE_THE_CHECK, *(COMPILED if shutil.which("cc") and platform.machine() == "x86_64" else ())]
    proof = check_environment(str(path), [], tasks=1, only=only, quiet=True)
    assert proof.proven
    assert [line.policy for line in proof.lines if not line.ok] == (only if paid else [])


@pytest.fixture(scope="module")
def one_real_task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of one task that is built from a published package."""
    folder = tmp_path_factory.mktemp("real")
    options = BuildOptions(out=folder / "tasks.jsonl", cache=folder, select=("swap_arguments__4xjvjrph",))

    async def main() -> None:
        async with make_pool(SweSmithOracleEnvConfig()) as pool:
            await build([], None, pool, options)

    asyncio.run(main())
    return [f"--env.dataset_name={folder / 'tasks.jsonl'}", f"--env.cache_dir={folder}"]


def small_task(folder: Path, *, hidden: bool) -> list[str]:
    """The settings of a task with one module and two tests. If `hidden`, agents do not see the test that fails."""
    seen = TESTS.replace(TESTS[TESTS.index("def test_add") : TESTS.index("def test_double")], "") if hidden else TESTS
    source = Source.make(folder / "source", {**BASE, "tests/test_calc.py": seen})
    with_pytest = ["iniconfig==2.3.0", "packaging==25.0", "pluggy==1.6.0", "pygments==2.19.2", "pytest==8.4.2"]
    row = source.row(install={"requirements": with_pytest, "python_path": ["."]})
    if hidden:
        row["test_patch"] = source.diff({"tests/test_calc.py": TESTS})
    rows = folder / "tasks.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return [f"--env.dataset_name={rows}", f"--env.cache_dir={folder}", "--env.test_timeout_s=60"]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_task_pays_no_cheat(tmp_path: Path) -> None:
    names = [cheat.name for cheat in BANK[1::2]]  # the other half attacks `hermes_swe`, whose tests run the same way
    environment = str(ROOT / "environments/swe_smith_oracle_env.py")
    proof = check_environment(environment, small_task(tmp_path, hidden=True), tasks=1, only=names, quiet=True)
    assert proof.proven
    assert proof.holds, [line for line in proof.lines if not line.ok]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_task_pays_no_cheat(one_real_task: list[str]) -> None:
    names = [cheat.name for cheat in BANK[::6]]  # the small task is attacked by half of the others
    environment = str(ROOT / "environments/swe_smith_oracle_env.py")
    proof = check_environment(environment, one_real_task, tasks=1, only=names, quiet=True)
    assert proof.holds, [line for line in proof.lines if not line.ok]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_naive_grader_pays_many_cheats(tmp_path: Path) -> None:
    (tmp_path / "naive_env.py").write_text(NAIVE)
    names = [cheat.name for cheat in BANK[::6]]  # the others take minutes, and show the same
    settings = [
        *small_task(tmp_path, hidden=False),
        '--env.keep_tests=["*"]',
    ]
    proof = check_environment(f"{tmp_path / 'naive_env.py'}:Naive", settings, tasks=1, only=names, quiet=True)
    plain = {line.policy: line.rewards for line in proof.lines if line.policy not in names}
    assert (plain["oracle"], plain["noop"]) == ((1.0,), (0.0,))
    paid = [line.policy for line in proof.lines if line.policy in names and not line.ok]
    assert 3 * len(paid) >= len(names), f"only {len(paid)} of {len(names)}: {paid}"
