"""Official verdicts and labels of a score: the rule for rewards, and everything that shows them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from recorded import embedded

import palaestra
from golden_messages import check_message, raises
from palaestra import ConfigError, Run
from palaestra.cli.main import cli, main
from palaestra.rollouts.journal.reader import open_recording
from palaestra.rollouts.observe.prometheus import exposition

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Label, Score, Task, environment

@environment(toolsets=["terminal"], label_names=["forged", "other"])
def judged(kinds: str = "edited forged hidden honest"):
    for kind in kinds.split():
        shadow = "; touch /usr/local/bin/ls" if kind in ("shadow", "unseen") else ""
        yield Task(id=kind, prompt="p", solution="echo 1 > answer.txt" + shadow)

@judged.score(weight=3)
async def works(task, sandbox, rollout):
    written = await sandbox.read_text("answer.txt", missing="") == "1\\n"
    match task.id:
        case "edited":
            return Score(written, official=written, labels=[Label("tests_edited", f"test_{rollout.index}.py")])
        case "forged":
            return Score(written, official=written, labels=[Label("forged", "test_a passes falsified", certain=True)])
        case "hidden" | "shadow":
            return Score(0.0, official=written)
        case "unseen":
            return await sandbox.stat("/usr/local/bin/ls") is not None
        case "wrong":
            return Score(1.0, official=float("nan"))
        case "unlabelled":
            return Score(1.0, labels=["tests_edited"])
        case "untold" if written:
            return Score(0.0, labels=[Label("other", ["test_a"])])
    return written
"""

STYLE = """
@judged.score
def style(task):
    return Score(1.0, labels=[Label("long_lines", "a.py")] if task.id == "edited" else [])
"""

CLASS_ENV = """
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig, Label, Score

class Graded(HermesAgentBaseEnv):
    name = "graded"
    official_name = "resolved"
    label_names = ["forged", "other"]
    left = 1

    async def setup(self): pass
    async def evaluate(self, *args, **kwargs): pass
    def format_prompt(self, item): return "p"

    async def get_next_item(self):
        self.left -= 1
        return {"id": "one", "solution": "true"} if self.left >= 0 else None

    async def compute_reward(self, item, result, ctx):
        return Score(1.0, {"tests": 2.0}, official=1.0, labels=[Label("forged", "test_a", certain=True)])

    def _build_scored_item(self, item, result, reward):
        print(f"the class saw {reward:g}")
        return super()._build_scored_item(item, result, reward)
"""

FORGED = "official 1, reward 0, because of forged: test_a passes falsified; --env.reward official pays it"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)


def play(**settings: object) -> Run:
    return palaestra.run_sync("my_env.py", policy="oracle", **settings)


def rewards(run: Run) -> dict[str, float | None]:
    return {each.task_id: each.reward for each in run.trajectories}


def told(*words: str) -> str:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("settings", "paid"),
    [
        ({}, ["edited", "honest"]),
        ({"reward": "official"}, ["edited", "forged", "hidden", "honest"]),
        ({"reward": "strict"}, ["honest"]),
        ({"reward": "strict", "strict_labels": ["other"]}, ["edited", "honest"]),
    ],
)
def test_the_setting_decides_which_work_is_paid(settings: dict[str, object], paid: list[str]) -> None:
    run = play(**settings)
    assert sorted(name for name, reward in rewards(run).items() if reward) == paid
    assert run.metrics["official/mean"] == 1.0
    assert run.metrics["official/differs"] == 4 - len(paid)
    assert (run.metrics["labels/forged"], run.metrics["labels/tests_edited"]) == (1, 1)


def test_labels_that_only_strict_reads_are_refused_without_strict() -> None:
    with raises(ConfigError, "strict_labels", "guarded"):
        play(strict_labels=["forged"])
    with pytest.raises(ConfigError, match="reward"):
        play(reward="lenient")


def test_an_unknown_label_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'tests_editd'.* tests_edited\?"):
        play(reward="strict", strict_labels=["tests_editd"])
    with pytest.raises(ConfigError, match=r"'forge'.* forged\?"):
        play(reward="strict", strict_labels=["forge", "other"])
    with pytest.raises(ConfigError, match="label_names must be a list"):
        palaestra.environment(label_names="forged")(list)


def test_the_record_names_the_cause_of_a_difference_and_the_setting_that_changes_it() -> None:
    kinds = "edited forged hidden shadow honest"
    found = {each.task_id: each for each in play(reward="strict", kinds=kinds).trajectories}
    assert found["forged"].difference == FORGED
    assert found["edited"].difference.endswith("tests_edited: test_0.py; --env.reward guarded accepts it")
    assert "because of programs_shadowed: /usr/local/bin/ls; " in found["shadow"].difference
    assert "because of the check itself: " in found["hidden"].difference
    assert found["honest"].difference == ""


def test_the_console_and_the_summary_show_both_means_the_labels_and_each_cause() -> None:
    out = told("run", "my_env.py", "--policy", "oracle", "--group", "2")
    assert "forged: reward 0 0, official 1 1 · " in out
    assert "edited: reward 1 1 · " in out
    assert re.search(r"  mean reward 0.500 .*, 8 of 8 rollouts scored\n  official 1.000 \(0.510 to 1.000\)\n", out)
    assert re.search(r"  labels: (tests_edited 2, forged 2|forged 2, tests_edited 2)\n", out)
    assert f"  2 rollouts: {FORGED}\n" in out


def test_work_outside_the_view_is_never_worth_0_in_silence() -> None:
    words = ("run", "my_env.py", "--policy", "oracle", "--env.kinds", "unseen")
    out = told(*words)
    line = "1 rollout scored 0 and changed paths that the check did not see: /usr/local/bin/ls; --env.graded_paths"
    assert line in out
    assert "--env.graded_programs ls shows them" in out
    assert "official" not in out
    out = told(*words, "--env.graded_programs", "ls")
    assert "mean reward 1.000" in out
    assert "did not see" not in out
    assert main([*words, "--env.graded_paths", "more"]) == 2


def test_a_run_without_verdicts_and_labels_shows_and_records_none() -> None:
    out = told("run", "my_env.py", "--policy", "oracle", "--env.kinds", "honest")
    out += told("status") + told("status", "--json") + told("runs", "--json") + told("compare", "last", "last")
    run = palaestra.open_run("last")
    out += "".join(path.read_text() for path in run.path.glob("*.jsonl"))
    out = re.sub(r'"(reward|sources|env)":("guarded"|{[^}]*})', "", out)
    assert "official" not in out
    assert "labels" not in out.replace("strict_labels", "")
    assert not {"official", "labels"} & run.to_records()[0].keys()
    assert run.trajectories[0].official_reward == 1.0


def test_weighted_scores_are_combined_and_their_metrics_are_shown() -> None:
    Path("my_env.py").write_text(ENV + STYLE)
    out = told("run", "my_env.py", "--policy", "oracle")
    run = palaestra.open_run("last")
    found = {each.task_id: each for each in run.trajectories}
    assert [label.name for label in found["edited"].labels] == ["tests_edited", "long_lines"]
    assert (found["hidden"].reward, found["hidden"].official) == (0.25, 1.0)
    assert (found["forged"].reward, found["forged"].official) == (0.0, 1.0)
    assert (found["honest"].reward, found["honest"].official) == (1.0, None)
    assert "  metrics: style 1, works 0.75\n" in out
    assert "metrics    style 1, works 0.75\n" in told("status")
    assert embedded(run.path / "report.html")["answers"]["run"]["summary"]["criteria"]["works"] == 0.75


def test_status_runs_report_and_files_have_verdicts_and_labels() -> None:
    run = play()
    shown = told("status")
    assert re.search(r"^official   1.000 \(.*\)$", shown, re.MULTILINE)
    assert re.search(r"^labels     (tests_edited 1, forged 1|forged 1, tests_edited 1)$", shown, re.MULTILINE)
    status = json.loads(told("status", "--json"))
    assert (status["official"], status["labels"]["forged"], status["mean_reward"]) == (1.0, 1, 0.5)
    assert ", official 1.000)" in told("runs")
    assert json.loads(told("runs", "--json"))[0]["official"] == 1.0
    first = embedded(run.path / "report.html")["answers"]["run"]
    assert first["summary"]["official"]["mean"] == 1.0
    check_message(first["verdicts"], "official 1", "reward 0", "forged")
    assert first["summary"]["differs"] == 2
    told("report", "last", "--out", "again.html")
    again = embedded(Path("again.html"))["answers"]
    assert again["run"]["verdicts"] == first["verdicts"]
    labels = [label for name, each in again.items() if name.startswith("rollout?") for label in each.get("labels", ())]
    assert {"name": "forged", "evidence": "test_a passes falsified", "certain": True} in labels
    numbers = exposition(run.status, 0.0)
    assert "palaestra_official_mean 1\n" in numbers
    assert 'palaestra_labelled_rollouts_total{label="forged"} 1\n' in numbers
    records = {each["task_id"]: each for each in run.to_records()}
    assert (records["forged"]["official"], records["forged"]["labels"]) == (1.0, ["forged"])
    assert (records["honest"]["official"], records["honest"]["labels"]) == (1.0, [])
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["official/mean"], last["labels/forged"], last["reward/mean"]) == (1.0, 1, 0.5)
    for line in (run.path / "groups.jsonl").read_text().splitlines():
        group = json.loads(line)
        assert group["scores"] == [records[group["task_id"]]["reward"]]
        if group["task_id"] == "forged":
            assert group["rollouts"][0]["official"] == 1.0
            assert group["rollouts"][0]["labels"][0]["name"] == "forged"


@pytest.mark.parametrize("form", ["openai", "atif"])
def test_exports_carry_verdicts_for_a_trainer_to_weigh(form: str) -> None:
    play()
    told("export", "last", "--to", form, "--out", "out.jsonl")
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    found = {each.get("task_id") or each["extra"]["palaestra"]["task_id"]: each for each in lines}
    forged, honest = (found[name].get("extra", {}).get("palaestra", found[name]) for name in ("forged", "honest"))
    assert (forged["reward"], forged["official"]) == (0.0, 1.0)
    assert forged["labels"] == [{"name": "forged", "evidence": "test_a passes falsified", "certain": True}]
    assert not {"official", "labels"} & honest.keys()


def test_eval_and_compare_use_both_verdicts() -> None:
    told("eval", "my_env.py", "--policy", "oracle", "--group", "2")
    out = told("eval", "my_env.py", "--policy", "oracle", "--group", "2", "--env.reward", "official")
    assert "pass@2 1.000 (0.510 to 1.000), official pass@1 1.000" in out
    folder = palaestra.open_run("last:2").path / "evaluation"
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    assert (metrics["pass@1"], metrics["official/pass@1"], metrics["labels/forged"]) == (0.5, 1.0, 2)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {each["task_id"]: each.get("official") for each in samples}["forged"] == 1.0
    assert sum(bool(each.get("labels")) for each in samples) == 4
    shown = told("compare", "last", "last:2")
    assert "+0.500 " in shown
    assert re.search(r"^by official: \+0.000 .*, 1.000 against 1.000; no winner: .* \(--by official\)$", shown, re.M)
    shown = told("compare", "last", "last:2", "--by", "official")
    assert "mean official 1.000" in shown
    assert "+0.500" not in shown
    both = json.loads(told("compare", "last", "last:2", "--json"))
    assert (both["difference"], both["official"]["difference"]) == (0.5, 0.0)


def test_resume_and_replay_keep_the_rule_and_the_verdicts() -> None:
    play(group_size=1, reward="strict")
    told("resume", "last", "--group", "2")
    run = palaestra.open_run("last")
    assert [len(group.trajectories) for group in run.groups] == [2] * 4
    assert [(each.reward, each.official) for each in run.trajectories if each.task_id == "edited"] == [(0.0, 1.0)] * 2
    assert run.metrics["labels/forged"] == 2
    assert main(["replay", "last"]) == 0, "the recorded rule is used"


def test_journals_of_earlier_versions_load() -> None:
    run = play(kinds="honest")
    journal = run.path / "journal.jsonl"
    text = journal.read_text()
    older = text.replace('"reward":"guarded",', "").replace('"strict_labels":[],', "")
    assert len(older) < len(text)
    journal.write_text(older)
    (group,) = open_recording(run.path)
    assert (group.trajectories[0].official, list(group.trajectories[0].labels)) == (None, [])
    assert "official" not in told("status", str(run.path)) + told(
        "resume",
        str(run.path),
        *("--environment", "my_env.py:judged", "--group", "2", "--policy", "oracle", "--env.kinds", "honest"),
    )
    assert [each.reward for each in palaestra.open_run(run.path).trajectories] == [1.0, 1.0]


def test_kept_work_is_graded_again_with_another_rule() -> None:
    run = play(save_workspaces=True, kinds="edited forged honest")
    assert rewards(run)["forged"] == 0.0
    out = told("grade", "last", "--env.reward", "official")
    assert "forged/0: 0 (official 1) -> 1 (official 1), forged\n" in out
    check_message(out, "3 rollouts")
    lines = [json.loads(line) for line in told("grade", "last", "--env.reward", "strict", "--json").splitlines()[:3]]
    assert {each["task_id"]: each["reward"] for each in lines} == {"edited": 0.0, "forged": 0.0, "honest": 1.0}
    assert lines[0]["labels"][0]["name"] == "tests_edited"
    forged = next(each for each in run.trajectories if each.task_id == "forged")
    assert asyncio.run(palaestra.grade("my_env.py", forged, reward="official")).reward == 1.0
    with pytest.raises(ConfigError, match="lenient"):
        asyncio.run(palaestra.grade("my_env.py", forged, reward="lenient"))


def test_class_environments_name_their_verdict_and_see_the_decided_reward() -> None:
    Path("class_env.py").write_text(CLASS_ENV)
    strict = ("--env.reward", "strict", "--env.strict_labels", "other")  # `forged` is certain, and its own
    out = told("run", "class_env.py", "--policy", "oracle", "--group", "1", *strict)
    assert "the class saw 0\n" in out
    assert "official (resolved) 1.000" in out
    assert "metrics: tests 2" in out
    assert re.search(r"^official   resolved 1.000", told("status"), re.MULTILINE)
    report = embedded(palaestra.open_run("last").path / "report.html")
    assert report["answers"]["run"]["summary"]["official_name"] == "official (resolved)"
    (row,) = palaestra.open_run("last").to_rows(placeholders=True)
    assert (row["reward"], row["official"], row["labels"][0]["name"]) == (0.0, 1.0, "forged")
    told("run", "class_env.py", "--policy", "oracle", "--group", "1", "--env.reward", "official")
    assert palaestra.open_run("last").mean_reward == 1.0


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("wrong", "nan, which is not an official verdict"),
        ("unlabelled", r"labels \('tests_edited',\)|labels \['tests"),
        ("untold", "whose evidence is text"),  # only over the work, and not over the prepared workspace
    ],
)
def test_a_score_with_a_wrong_verdict_or_label_is_a_failure_of_the_grader(kind: str, error: str) -> None:
    (trajectory,) = play(kinds=kind, infra_retries=0).trajectories
    assert (trajectory.reward, trajectory.blame) == (None, "grader")
    assert re.search(error, trajectory.error)
