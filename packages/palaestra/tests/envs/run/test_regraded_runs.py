"""After `palaestra grade`, every reader of a run uses the new scores, and a regrade is whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import palaestra
from golden_messages import check_message
from palaestra.cli.main import cli, main
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.regraded import GRADE_SCHEMA, GRADES_NAME, Grade, read_grades, write_grades
from palaestra.rollouts.resume.state import read_finished

REPLIES = """
from pathlib import Path
from palaestra import Say, Score, Task, environment

@environment(toolsets=[])
def replies(n: int = 4, answers: str = ""):
    found = Path(answers).read_text().split() if answers else ["yes"] * n
    for number, answer in enumerate(found[:n]):
        yield Task(f"t{number}", "q", solution=[Say(answer)])

@replies.score
def right(task, rollout):
    return SCORE
"""
FIRST = 'rollout.final_response == "yes" and task.id < "t1"'  # 1 of 4
SECOND = 'Score(rollout.final_response == "yes" and task.id < "t3", {"again": 1.0})'  # 3 of 4
BROKEN = 'float("right" + task.id)'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score_with(score: str) -> None:
    Path("replies_env.py").write_text(REPLIES.replace("SCORE", score))


def evaluated(score: str = FIRST, *flags: str) -> Path:
    score_with(score)
    assert main(["eval", "replies_env.py", "--policy", "oracle", "-q", *flags]) == 0
    return palaestra.open_run().path


def printed(*words: str) -> Any:
    done = CliRunner().invoke(cli, [*words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exported(run: Path, form: str, tmp_path: Path) -> Path:
    out = tmp_path / f"out.{form}"
    assert main(["export", str(run), "--to", form, "--all", "--out", str(out)]) == 0
    return out


def mean(rewards: list[float]) -> float:
    return sum(rewards) / len(rewards)


def comparison(run: Path, _: Path) -> float:
    return float(printed("compare", str(run), str(run), "--json")["runs"][0]["mean"])


def table(run: Path, _: Path) -> float:
    return float(printed("runs", str(run), "--table", "--json")[0]["mean_reward"])


def listed(run: Path, _: Path) -> float:
    return float(printed("runs", "--root", str(run.parents[1]), "--json")[0]["mean_reward"])


def status(run: Path, _: Path) -> float:
    found = printed("status", str(run), "--json")
    assert (found["graded"], found["recorded_mean"], found["metrics"]) == (4, 0.25, {"again": 1.0})
    return float(found["mean_reward"])


def full_share(run: Path, _: Path) -> float:
    return float(printed("status", str(run), "--json")["full"]["share"])


def results(run: Path, _: Path) -> float:
    return float(json.loads((run / "evaluation" / "metrics.json").read_text())["results"]["all"]["mean_reward"])


def samples(run: Path, _: Path) -> float:
    return mean([each["reward"] for each in lines(run / "evaluation" / "samples.jsonl")])


def metrics_file(run: Path, _: Path) -> float:
    last = lines(run / "metrics.jsonl")[-1]
    assert last["eval/pass@1"] == last["percent_correct"]
    return float(last["reward/mean"])


def conversations(run: Path, tmp_path: Path) -> float:
    return mean([each["reward"] for each in lines(exported(run, "openai", tmp_path))])


def groups_for_trainers(run: Path, tmp_path: Path) -> float:
    return mean([each["reward"] for line in lines(exported(run, "atropos", tmp_path)) for each in line["rollouts"]])


def earlier_work(run: Path, _: Path) -> float:
    earlier = read_finished(run / "journal.jsonl")
    return mean([each.reward or 0.0 for number in range(4) for each in earlier.whole(number).trajectories])


def one_group(run: Path, _: Path) -> float:
    recording = Recording(run / "journal.jsonl")
    return mean([each.reward or 0.0 for n in range(4) for each in recording.numbered(n).trajectories])  # type: ignore[union-attr]


def failed_tasks(run: Path, _: Path) -> float:
    return 1 - len(palaestra.open_run(run).failed_tasks()) / 4


READERS: dict[str, Callable[[Path, Path], float]] = {
    "compare": comparison,
    "runs --table": table,
    "runs": listed,
    "status": status,
    "share of full rewards": full_share,
    "evaluation/metrics.json": results,
    "evaluation/samples.jsonl": samples,
    "metrics.jsonl": metrics_file,
    "export --to openai": conversations,
    "export --to atropos": groups_for_trainers,
    "resume": earlier_work,
    "one group": one_group,
    "--failed-of": failed_tasks,
    "mean_reward": lambda run, _: palaestra.open_run(run).mean_reward or 0.0,
    "metrics": lambda run, _: palaestra.open_run(run).metrics["eval/mean_reward"],
    "records": lambda run, _: mean([each["reward"] for each in palaestra.open_run(run).to_records()]),
    "run.status": lambda run, _: palaestra.open_run(run).status.mean_reward or 0.0,
}


@pytest.fixture(scope="module")
def regraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("regraded"))
        run = evaluated()
        score_with(SECOND)
        assert main(["grade", "last"]) == 0
        return run


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_uses_the_new_scores(regraded: Path, reader: str, tmp_path: Path) -> None:
    assert READERS[reader](regraded, tmp_path) == pytest.approx(0.75)


def test_the_journal_keeps_the_recorded_scores(regraded: Path) -> None:
    recording = Recording(regraded / "journal.jsonl", as_recorded=True)
    assert [each.reward for group in recording for each in group.trajectories] == [1.0, 0.0, 0.0, 0.0]


def test_a_replay_compares_with_the_new_scores(regraded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(regraded.parents[2])
    assert main(["replay", str(regraded)]) == 0


def test_a_resumed_evaluation_includes_the_new_scores(here: Path) -> None:
    run = evaluated(FIRST, "--env.total_steps", "3")
    score_with(SECOND)
    assert main(["grade", "last"]) == 0
    assert main(["resume", str(run), "--tasks", "4"]) == 0
    assert results(run, here) == comparison(run, here) == table(run, here) == 0.75


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGINT"])
def test_a_regrade_that_is_killed_half_way_changes_nothing(here: Path, signal: str) -> None:
    run = evaluated()
    kill = f'__import__("os").kill(__import__("os").getpid(), __import__("signal").{signal})'
    score_with(f'{SECOND} if task.id < "t2" else {kill} or __import__("time").sleep(60)')
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    killed = subprocess.run([sys.executable, "-m", "palaestra", "grade", "last"], capture_output=True, text=True)
    assert "t1/0: 0 -> 1" in killed.stdout
    assert killed.returncode != 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    score_with(SECOND)
    assert main(["grade", "last"]) == 0
    assert table(run, here) == 0.75


def test_rollouts_of_tasks_that_are_gone_keep_their_score(here: Path) -> None:
    run = evaluated()
    score_with(SECOND)
    done = CliRunner().invoke(cli, ["grade", "last", "--env.n", "2"])
    assert done.exit_code == 1
    assert "2 of 4 rollouts graded, 1" in done.stderr
    check_message(done.stderr, "'t2'")
    assert [each.reward for each in palaestra.open_run(run).trajectories] == [1.0, 1.0, 0.0, 0.0]
    assert main(["grade", "last", "--env.n", "0"]) == 2
    assert table(run, here) == results(run, here) == 0.5


@pytest.mark.parametrize("earlier", [True, False])
def test_a_score_that_raises_leaves_the_earlier_scores(here: Path, earlier: bool) -> None:
    run = evaluated()
    if earlier:
        score_with(SECOND)
        assert main(["grade", "last"]) == 0
    score_with(BROKEN)
    done = CliRunner().invoke(cli, ["grade", "last"])
    assert done.exit_code == 1
    assert "0 of 4 rollouts graded" in done.stderr
    expected = 0.75 if earlier else 0.25
    assert table(run, here) == comparison(run, here) == results(run, here) == expected
    assert all("ValueError" in each.error for each in read_grades(run).values())
    score_with(FIRST)
    assert main(["grade", "last"]) == 0
    assert table(run, here) == 0.25
    assert not any(each.error for each in read_grades(run).values())


def test_a_file_of_an_earlier_version_keeps_a_score_before_a_failure(tmp_path: Path) -> None:
    lines = [{"schema": GRADE_SCHEMA, "at": 1.0, "rollout_id": "a/0", "reward": reward} for reward in (0.5, None)]
    (tmp_path / GRADES_NAME).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_grades(tmp_path)["a/0"].reward == 0.5
    write_grades(tmp_path, [Grade(schema=GRADE_SCHEMA, at=2.0, rollout_id="b/0", reward=1.0)])
    assert [each.reward for each in read_grades(tmp_path).values()] == [0.5, 1.0]


def test_the_summary_counts_the_tasks_with_a_score(here: Path) -> None:
    score_with('1 / 0 if task.id > "t1" else 0')
    assert main(["eval", "replies_env.py", "--policy", "oracle", "-q"]) == 3
    done = CliRunner().invoke(cli, ["grade", "last"])
    assert "over 2 of 4 tasks" in done.stderr
    score_with('1 / 0 if task.id > "t2" else 1')
    done = CliRunner().invoke(cli, ["grade", "last"])
    assert "over 2 -> 3 of 4 tasks" in done.stderr


def test_a_resumed_run_notes_a_changed_environment(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluated(FIRST, "--env.total_steps", "2")
    assert main(["resume", "last", "--tasks", "3"]) == 0
    assert "palaestra grade" not in caplog.text
    score_with(SECOND)
    assert main(["resume", "last", "--tasks", "4"]) == 0
    assert "palaestra grade" in caplog.text


def test_a_moved_run_takes_settings_of_its_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("answers.txt").write_text("yes yes yes yes")
    run = evaluated(FIRST, "--env.answers", "answers.txt")
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    moved = Path(shutil.move(run, elsewhere / "run"))
    score_with(SECOND)
    for name in ("answers.txt", "replies_env.py"):
        shutil.move(name, elsewhere)
    monkeypatch.chdir(elsewhere)
    named = ["--environment", str(elsewhere / "replies_env.py")]
    assert main(["grade", str(moved), *named, "--env.answers", str(elsewhere / "answers.txt")]) == 0
    assert table(moved, here) == 0.75


@pytest.mark.parametrize("flag", ["--env.nothing", "--model", "--env.answer"])
def test_an_unknown_setting_is_refused(here: Path, flag: str) -> None:
    run = evaluated()
    assert main(["grade", str(run), flag, "1"]) == 2
    assert not (run / GRADES_NAME).exists()


@pytest.mark.parametrize("words", [["--env.graded-paths", "/root,/opt"], ["--env.graded_paths=/root,/opt"]])
def test_settings_may_be_spelled_as_in_a_run(here: Path, words: list[str]) -> None:
    run = evaluated()
    score_with('1 if task.paths == ("/root", "/opt") else 0')
    assert main(["grade", str(run), *words]) == 0
    assert table(run, here) == 1.0


def test_several_runs_and_a_folder_of_runs_are_graded(here: Path) -> None:
    runs = [evaluated(), evaluated()]
    score_with(SECOND)
    assert main(["grade", *map(str, runs)]) == 0
    assert [table(run, here) for run in runs] == [0.75, 0.75]
    score_with(FIRST)
    done = CliRunner().invoke(cli, ["grade", "runs", "--env.reward", "official", "--json"])
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 8)
    assert [table(run, here) for run in runs] == [0.25, 0.25]


def test_one_run_that_cannot_be_graded_does_not_stop_the_others(here: Path) -> None:
    runs = [evaluated(), evaluated()]
    (runs[0] / GRADES_NAME).mkdir()
    score_with(SECOND)
    assert main(["grade", "runs"]) == 2
    assert table(runs[1], here) == 0.75


SANDBOXES = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def sandboxes():
    yield Task("t", "q", solution="echo 1 > a")

@sandboxes.score
async def right(HOOK):
    BODY

async def content(rollout):
    slot = await rollout.sandbox()
    return (await slot.execute("cat a")).output
"""


@pytest.mark.parametrize(
    ("hook", "body"),
    [
        ("sandbox", "return 1.0"),
        ("rollout", 'return float((await (await rollout.sandbox()).execute("cat a")).output == "1\\\\n")'),
        ("rollout", 'return float(await content(rollout) == "1\\n")'),
    ],
)
def test_a_score_that_reads_the_sandbox_needs_the_kept_work(here: Path, hook: str, body: str) -> None:
    text = SANDBOXES.replace("HOOK", hook)
    Path("sandboxes_env.py").write_text(text.replace("BODY", "return 0.0"))
    assert main(["run", "sandboxes_env.py", "--policy", "oracle", "-q"]) == 0
    Path("sandboxes_env.py").write_text(text.replace("BODY", body))
    assert main(["grade", "last"]) in (1, 2)
    assert palaestra.open_run().mean_reward == 0.0


def test_a_score_without_a_sandbox_parameter_is_graded_from_the_journal(here: Path) -> None:
    text = SANDBOXES.replace("HOOK", "rollout")
    Path("sandboxes_env.py").write_text(text.replace("BODY", "return 0.0"))
    assert main(["run", "sandboxes_env.py", "--policy", "oracle", "-q"]) == 0
    Path("sandboxes_env.py").write_text(text.replace("BODY", "return float(bool(rollout.final_response))"))
    assert main(["grade", "last"]) == 0
    assert palaestra.open_run().mean_reward == 1.0
