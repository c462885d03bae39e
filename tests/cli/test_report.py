"""`palaestra report`: the page of a run at any time, with what its first screen must answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import embedded, write_run

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra_slots.core.types import JSON, Blame, Outcome


def group(number: int, category: str, *rewards: float | None) -> Group:
    rollouts = [
        Trajectory(
            rollout_id=f"g{number}/{index}", group_id=f"g{number}", task_id=f"t{number}", index=index, reward=reward,
            messages=[{"role": "user", "content": "# Title\n**bold** and `code`"}],
            outcome=Outcome.INFRA_ERROR if reward is None else Outcome.NATURAL,
            blame=Blame.GRADER if reward is None else None, error="" if reward is not None else "no such column",
            prompt_tokens=1000, completion_tokens=50, cost=0.25, metrics={"tests": 3.0},
            detail={"category": category, "hidden": [], "tampering": None, "tests": 3.0, "output": "kept"},
            beside=Beside(stages={"acquire": 0.1, "agent": 5.0, "tool": 2.0, "grade": 1.0}, turn_s=[(2.5, 2.0)]),
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(group_id=f"g{number}", number=number, task_id=f"t{number}", trajectories=rollouts)


@pytest.fixture
def first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, JSON]:
    """What the first page of a killed run shows."""
    config = {
        "env": {"group_size": 2, "max_agent_turns": 7},
        "openai": [{"api_key": None, "temperature": 1}],
        "sources": {"env.max_agent_turns": "command line", "env.group_size": "default", "openai.api_key": "***"},
        "provenance": {"palaestra": "0.1.0", "git_commit": "abc123"},
    }
    broken = Group(group_id="g2", number=2, task_id="t2", error="PrepareError: no disk", blame=Blame.TASK)
    groups = [group(0, "files", 1.0, 0.0), group(1, "text", 0.0, None), broken]
    folder = write_run(tmp_path / "run", *groups, ended=False, config=config)
    assert main(["report", str(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == folder / "report.html"
    found: dict[str, JSON] = embedded(path)["answers"]["run"]
    return found


def test_the_first_page_has_pass_at_k_categories_cost_failures_and_settings(first: dict[str, JSON]) -> None:
    rows = [(row["name"], row["tasks"], row["scored"], row["planned"]) for row in first["scores"]]
    assert rows == [("", 3, 3, 6), ("files", 1, 2, 2), ("text", 1, 1, 2)]
    assert {"pass@1", "pass@2", "mean_reward"} <= first["scores"][0].keys()
    assert first["summary"]["totals"]["cost"] == 1.0
    assert first["summary"]["totals"]["prompt_tokens"] == 4000
    check_message(first["causes"], "(grader)", "g1/1", "no such column")
    check_message(first["causes"], "(task)", "g2", "PrepareError", "no disk")
    assert first["settings"] == {"env.max_agent_turns": {"value": 7, "source": "command line"}}
    assert first["provenance"]["git_commit"] == "abc123"


def test_the_report_of_a_run_that_goes_on_says_so(first: dict[str, JSON]) -> None:
    assert first["summary"]["state"] == "killed"


def test_a_group_that_has_not_ended_is_planned_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"env": {"group_size": 2}}
    folder = write_run(tmp_path / "run", group(0, "files", 1.0, 0.0), group(1, "text", 1.0, 1.0), config=config)
    journal = folder / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"event":"end"' not in line]
    ended = [line for line in lines if '"group_end"' in line]
    kept = [line for line in lines if line != ended[-1] and not ('"rollout"' in line and '"g1/1"' in line)]
    journal.write_text("".join(kept))
    assert main(["report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"]) == (str(folder), "killed")
    first = embedded(Path(found["path"]))["answers"]["run"]
    assert (first["summary"]["scored"], first["summary"]["planned"]) == (3, 4)
    assert (first["scores"][0]["scored"], first["scores"][0]["planned"]) == (3, 4)


def test_figures_that_the_table_has_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", group(0, "files", 1.0, 0.0))
    own = {"eval/planned": 4.0, "eval/pass@1": 0.5, "eval/pass@1/low": 0.1, "eval/category/a/mean_reward": 1.0}
    line = {**own, "eval/seconds": 3.0, "reward/mean": 0.5, "rollouts": 2}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(folder)]) == 0
    assert embedded(folder / "report.html")["answers"]["run"]["own"] == {"eval/seconds": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps({"eval/mean_reward": 1.0, "rollouts": 2}) + "\n")
    assert main(["report", str(folder)]) == 0
    own = embedded(folder / "report.html")["answers"]["run"]["own"]
    assert own == {"eval/mean_reward": 1.0}, "the environment's own"


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", group(0, "files", 1.0))
    (tmp_path / "taken").touch()
    assert main(["report", str(folder), "--out", str(tmp_path / "taken/x.html")]) == 2
    assert "taken/x.html" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
