"""Evaluations on held-out items while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.scripts import groups_file
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.config.fields import HeldOutConfig
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.types import JSON

pytestmark = pytest.mark.slots

FUNCTION = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 12):
    for i in range(n):
        yield Task(id=f"word-{i}", prompt="Write a word.", solution="echo word > word.txt")

@words.score
async def right(sandbox):
    return await sandbox.stat("word.txt") is not None
"""

CLASS = """
import asyncio
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class WordsEnv(HermesAgentBaseEnv):
    name = "words"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(
            enabled_toolsets=["terminal"], group_size=1, total_steps=6, max_num_workers=WORKERS, steps_per_eval=3
        )
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.iter = 0

    async def get_next_item(self):
        self.iter += 1
        return {"id": f"train-{self.iter}", "solution": "sleep 0.1; echo word > word.txt"}

    def format_prompt(self, item):
        return "Write a word."

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat word.txt")["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs):
        steps = self.curr_step
        done = await self.evaluate_items([{"id": "held", "solution": "sleep 1; echo word > word.txt"}])
        await self.evaluate_log({"eval/percent_correct": sum(each.reward for each in done), "eval/at": steps})
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder() -> Path:
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    return journal.parent


def events(path: Path) -> list[dict[str, JSON]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("here")
def test_held_out_tasks_are_evaluated_and_not_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("words_env.py").write_text(FUNCTION)
    line = ["run", "words_env.py", "--policy", "oracle", "--group", "1", "--concurrency", "2"]
    assert main([*line, "--env.held_out", "0.4", "--env.steps_per_eval", "3"]) == 0
    trained = {group.task_id for group in Recording(folder() / "journal.jsonl")}
    evaluations = sorted((folder() / "evaluations").iterdir())
    assert [each.name for each in evaluations] == ["step-000003", "step-000006", "step-000009"]
    for each in evaluations:
        held = {group.task_id for group in Recording(each / "journal.jsonl")}
        assert held
        assert not held & trained
        assert "pass@1" in (each / "metrics.json").read_text()
    assert "eval/pass@1" in (folder() / "metrics.jsonl").read_text()
    assert "evaluation at step 3" in capsys.readouterr().err
    assert {line["rollouts"][0]["outcome"] for line in events(groups_file())} == {"natural"}
    assert len(events(groups_file())) == len(trained)


def listed(folder: Path) -> list[str]:
    """Settings of four tasks in a folder; two of them, `b` and `d`, are held out, and `c` and `d` cannot be used."""
    config = HeldOutConfig(held_out=0.5)
    names = [f"task-{number}" for number in range(40)]
    trained, held = ([each for each in names if config.is_held_out(each) is kind] for kind in (False, True))
    for name in (*trained[:2], *held[:2]):
        (folder / name / "environment").mkdir(parents=True)
        (folder / name / "environment/Dockerfile").write_text("FROM ubuntu:24.04\n")
        (folder / name / "instruction.md").write_text("Write a word.")
        (folder / name / "tests").mkdir()
        (folder / name / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
        (folder / name / "task.toml").write_text('version = "1.0"\n')
    for name in (trained[1], held[1]):
        (folder / name / "task.toml").write_text("this is not TOML")
    return [trained[0], held[0]]


@pytest.mark.usefixtures("here")
def test_an_evaluation_counts_the_refused_tasks_of_its_own_split() -> None:
    listed(Path("tasks"))
    line = ["terminalbench_2", "--env.dataset_name", "tasks", "--env.base_image", "host", "--policy", "noop"]
    main(["eval", *line, "--env.held_out", "0.5", "--env.data_dir_to_save_evals", "evals"])
    assert json.loads(Path("evals/metrics.json").read_text())["results"]["all"]["tasks_left_out"] == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", ["function", "listed"])
def test_a_choice_without_held_out_tasks_is_reported_once(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("words_env.py").write_text(FUNCTION)
    if form == "function":
        config = HeldOutConfig(held_out=0.5)
        chosen = [name for name in (f"word-{number}" for number in range(12)) if not config.is_held_out(name)]
        line = ["words_env.py", "--policy", "oracle", "--task", ",".join(chosen)]
    else:
        trained, _ = listed(Path("tasks"))
        line = ["terminalbench_2", "--env.dataset_name", "tasks", "--env.base_image", "host", "--policy", "noop"]
        line += ["--task", trained, "--tasks", "3"]
    main(["run", *line, "--group", "1", "--concurrency", "1", "--env.held_out", "0.5", "--env.steps_per_eval", "1"])
    assert capsys.readouterr().err.count("the evaluation at step") == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["run", "eval"])
@pytest.mark.parametrize("form", ["function", "listed"])
def test_a_choice_of_tasks_of_both_kinds_names_the_one_of_the_other_command(
    form: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if form == "function":
        Path("words_env.py").write_text(FUNCTION)
        config = HeldOutConfig(held_out=0.5)
        names = [f"word-{number}" for number in range(12)]
        trained, evaluated = sorted(names, key=config.is_held_out)[0], sorted(names, key=config.is_held_out)[-1]
        line = ["words_env.py"]
    else:
        trained, evaluated = listed(Path("tasks"))
        line = ["terminalbench_2", "--env.dataset_name", "tasks", "--env.base_image", "host"]
    line += ["--policy", "noop", "--env.held_out", "0.5", "--task", f"{trained},{evaluated}"]
    assert main([command, *line]) == 2
    *_, refusal = capsys.readouterr().err.splitlines()
    other, why = (evaluated, "is held out") if command == "run" else (trained, "is not held out")
    assert refusal.startswith("error: ")
    assert f"{other!r}" in refusal
    assert why in refusal


@pytest.mark.usefixtures("here")
def test_without_held_out_tasks_nothing_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    Path("words_env.py").write_text(FUNCTION)
    assert main(["run", "words_env.py", "--policy", "oracle", "--tasks", "2", "--env.steps_per_eval", "1"]) == 0
    check_message(capsys.readouterr().err, "task")
    assert not (folder() / "evaluations").exists()


@pytest.mark.usefixtures("here")
def test_process_does_not_evaluate_for_a_setting_of_the_script_alone() -> None:
    Path("words_env.py").write_text(CLASS.replace("WORKERS", "2"))
    assert main(["run", "words_env.py", "--policy", "oracle", "--tasks", "3"]) == 0
    assert not (folder() / "evaluations").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("handling", "most"), [("STOP_TRAIN", 0), ("LIMIT_TRAIN", 1), ("NONE", 3)])
def test_how_much_goes_on_during_an_evaluation(handling: str, most: int) -> None:
    """Two groups roll out at a time, and one more has begun that waits for a place."""
    Path("words_env.py").write_text(CLASS.replace("WORKERS", "2"))
    flags = ["--env.steps_per_eval", "3", "--env.eval_handling", handling, "--env.total_steps", "9"]
    assert main(["run", "words_env.py", "--policy", "oracle", *flags]) == 0
    evaluated = events(folder() / "evaluations/step-000003/journal.jsonl")
    began, ended = evaluated[0]["at"], evaluated[-1]["at"]
    marks = [
        (event["at"], 1 if event["event"] == "group" else -1)
        for event in events(folder() / "journal.jsonl")
        if event["event"] in ("group", "group_end")
    ]
    started = [at for at, change in marks if change == 1 and began < at < ended]
    assert bool(started) == bool(most)
    assert max(sum(change for at, change in marks if at <= moment) for moment in started or [0]) <= most
    assert "eval/percent_correct" in (folder() / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("here")
def test_a_failed_evaluation_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    broken = CLASS.replace("WORKERS", "2").replace("steps = self.curr_step", "raise RuntimeError('no data')")
    Path("words_env.py").write_text(broken)
    assert main(["run", "words_env.py", "--policy", "oracle", "--env.steps_per_eval", "3"]) == 0
    said = capsys.readouterr().err
    check_message(said, "step 3", "no data")
    assert "Traceback" not in said
