"""Scores of kept workspaces, without an agent: from Python and on the command line."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import palaestra
from envs.scripts import need_level
from palaestra import ConfigError, Run, Score
from palaestra.cli.main import cli, main
from sandbox.trees import fingerprint

LENIENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def lines(n: int = 2):
    for i in range(n):
        yield Task(id=f"t{i}", prompt="p", files={"a.txt": "1\\n", "gone.txt": ""}, setup="echo 2 > made.txt",
                   solution=f"echo {i} > answer.txt; rm gone.txt; echo 3 >> a.txt")
    yield Task(id="bare", prompt="p", solution="true")

@lines.score
async def right(task, sandbox, rollout):
    assert rollout.final_response
    listed = (await sandbox.execute("ls; cat a.txt made.txt 2>/dev/null")).output.split()
    return WANTED
"""
BEFORE = LENIENT.replace("WANTED", "0.25")
AFTER = LENIENT.replace("WANTED", '0.5, {"files": len(listed)}')


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines_env.py").write_text(BEFORE)


def kept(policy: str = "oracle") -> Run:
    return palaestra.run_sync("lines_env.py", policy=policy, group_size=2, save_workspaces=True)


def grades(run: Run, path: str = "lines_env.py") -> list[Score]:
    async def go() -> list[Score]:
        return [await palaestra.grade(path, each) for each in run.trajectories]

    return asyncio.run(go())


def test_a_changed_score_sees_the_agents_work_over_the_prepared_workspace() -> None:
    run = kept()
    assert {trajectory.reward for trajectory in run.trajectories} == {0.25}
    assert [score.reward for score in grades(run)] == [0.25] * 6
    Path("lines_env.py").write_text(AFTER)
    scores = grades(run)
    assert [score.reward for score in scores] == [0.5] * 6
    assert [score.metrics["files"] for score in scores] == [6, 6, 6, 6, 0, 0]  # a.txt answer.txt made.txt 1 3 2


def test_an_agent_that_never_had_a_sandbox_is_graded_on_the_prepared_workspace() -> None:
    run = kept("noop")
    Path("lines_env.py").write_text(AFTER)
    assert [score.metrics["files"] for score in grades(run)] == [5, 5, 5, 5, 0, 0]  # a.txt gone.txt made.txt 1 2


@pytest.mark.parametrize("changed", ["", 'id="bare", prompt="p"'])
def test_a_prompt_that_has_changed_since_the_work_is_named(changed: str, caplog: pytest.LogCaptureFixture) -> None:
    run = kept()
    Path("lines_env.py").write_text(AFTER.replace(changed, 'id="bare", prompt="another"') if changed else AFTER)
    assert main(["grade", str(run.path)]) == 0
    told = [record.getMessage() for record in caplog.records if "another question" in record.getMessage()]
    assert [("1 task" in text, "bare" in text) for text in told] == ([(True, True)] if changed else [])


def test_a_moved_run_is_graded_where_it_is() -> None:
    shutil.move(kept().path, "elsewhere")
    assert len(grades(palaestra.open_run("elsewhere"))) == 6


def test_a_run_that_kept_nothing_names_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    run = palaestra.run_sync("lines_env.py", policy="oracle")
    with pytest.raises(ConfigError, match=r"run with save_workspaces$"):
        asyncio.run(palaestra.grade("lines_env.py", run.trajectories[0]))
    assert main(["grade", "last"]) == 2
    assert "run with --keep-workspaces\n" in capsys.readouterr().err


def test_an_isolation_level_without_layers_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="isolation none"):
        palaestra.run_sync("lines_env.py", policy="oracle", save_workspaces=True, isolation="none")
    assert not Path("runs").exists()


def test_the_command_lists_what_changed() -> None:
    run = kept()
    same = CliRunner().invoke(cli, ["grade", "last"])
    assert (same.exit_code, same.stdout) == (0, "")
    Path("lines_env.py").write_text(AFTER)
    changed = CliRunner().invoke(cli, ["grade", "last"])
    assert changed.stdout.splitlines()[0] == "000000-t0/0: 0.25 -> 0.5"
    assert "6 of 6 rollouts graded, 6" in changed.stderr
    Path("lines_env.py").write_text(LENIENT.replace("WANTED", "1 / 0"))
    broken = CliRunner().invoke(cli, ["grade", str(run.path), "--json"])
    assert broken.exit_code == 1
    assert "ZeroDivisionError" in json.loads(broken.stdout.splitlines()[0])["error"]


REPLACING = r"""
from palaestra import Score, Task, environment

SETUP = "mkdir -p PLACE/bin PLACE/lib/tools old; touch PLACE/lib/tools/a old/a; echo 'cat answer.txt' > PLACE/bin/tool"

@environment(toolsets=["terminal"])
def replacing():
    plant = "rm -r PLACE/lib/tools old; mkdir PLACE/lib/tools old; touch old/b; ln old/b c; "
    plant += "rm PLACE/bin/tool; echo 'echo 1' > PLACE/bin/tool; "
    for name, work in {"cheats": plant, "works": "echo 1 > answer.txt; " + plant, "none": ""}.items():
        yield Task(id=name, prompt="p", setup=SETUP, solution=work + "head -c 9000000 /dev/zero > large; true")

@replacing.score
async def right(task, sandbox):
    look = "ls old PLACE/lib/tools; cat PLACE/bin/tool; test c -ef old/b; echo $?; wc -c < large"
    listed = await sandbox.execute(look)
    answer = await sandbox.execute("sh PLACE/bin/tool")
    official = await sandbox.stat("c") is not None
    return Score(answer.output == "1\n", {"output": sum(listed.output.encode())}, official=official)
"""


@pytest.mark.slots
@pytest.mark.parametrize("isolation", ["full", "userns"])
def test_kept_work_with_replaced_programs_is_graded_as_in_the_run(isolation: str) -> None:
    need_level(isolation)
    place = "/usr/local" if isolation == "full" else "/opt/tools"  # at userns, /usr is read-only without an image
    Path("lines_env.py").write_text(REPLACING.replace("PLACE", place))
    run = palaestra.run_sync("lines_env.py", policy="oracle", save_workspaces=True, isolation=isolation)
    found = {each.task_id: each for each in run.trajectories}
    assert {name: (each.reward, each.official) for name, each in found.items()} == {
        "cheats": (0.0, 1.0), "works": (1.0, 1.0), "none": (0.0, 0.0),
    }  # fmt: skip
    assert {f"{place}/bin/tool", f"{place}/lib/tools/a"} <= set(found["works"].detail["left_out"])
    before = fingerprint(run.path)
    graded = CliRunner().invoke(cli, ["grade", "last", "--json"])
    assert graded.exit_code == 0, graded.output
    lines = [json.loads(line) for line in graded.stdout.splitlines()]
    records = {each["task_id"]: each for each in run.to_records()}
    for line in lines:
        recorded, again = records[line["task_id"]], [label["name"] for label in line.get("labels", [])]
        assert (line["reward"], line["official"], again) == (
            recorded["reward"],
            recorded["official"],
            recorded["labels"],
        )
        assert line["metrics"] == dict(found[line["task_id"]].metrics)
    assert len(lines) == 3
    assert [(each.reward, each.official, [*each.labels]) for each in grades(run)] == [
        (each.reward, each.official, [*each.labels]) for each in run.trajectories
    ]
    after = fingerprint(run.path)
    assert before.keys() <= after.keys()
    assert {name for name, each in after.items() if before.get(name) != each} <= {
        ".",
        "grades.jsonl",
        "metrics.jsonl",
        "report.html",
    }


@pytest.mark.slots
def test_held_out_tasks_are_graded_again_and_forked() -> None:
    text = BEFORE.replace('\n    yield Task(id="bare", prompt="p", solution="true")', "")
    Path("lines_env.py").write_text(text)
    held = ["--env.n", "8", "--env.held_out", "0.4", "--env.seed", "3", "--policy", "oracle"]
    assert main(["eval", "lines_env.py", *held, "--keep-workspaces"]) == 0
    tasks = [each.task_id for each in palaestra.open_run().trajectories]
    assert 0 < len(tasks) < 8
    Path("lines_env.py").write_text(text.replace("0.25", "0.5").replace("WANTED", "0.5"))
    graded = CliRunner().invoke(cli, ["grade", "last"])
    assert (graded.exit_code, graded.stdout.count("0.25 -> 0.5")) == (0, len(tasks)), graded.output
    assert main(["eval", "lines_env.py", *held, "--task", tasks[0]]) == 0
    (rollout,) = palaestra.open_run().trajectories
    assert main(["fork", "last", rollout.rollout_id, "--turn", "0", "--times", "1"]) == 0
    assert [each.task_id for each in palaestra.open_run().trajectories] == tasks[:1]
