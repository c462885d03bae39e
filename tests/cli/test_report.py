"""`palaestra report`: the page of a run at any time, with what its first screen must answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorded import write_run

from palaestra.cli.main import main
from palaestra.core.types import Blame, Outcome
from palaestra.rollouts.export.html import _own_figures
from palaestra.rollouts.records import Beside, Group, Trajectory


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
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    config = {
        "env": {"group_size": 2, "max_agent_turns": 7},
        "openai": [{"api_key": None, "temperature": 1}],
        "sources": {"env.max_agent_turns": "command line", "env.group_size": "default", "openai.api_key": "***"},
        "provenance": {"palaestra": "0.1.0", "git_commit": "abc123"},
    }
    groups = [group(0, "files", 1.0, 0.0), group(1, "text", 0.0, None)]
    folder = write_run(tmp_path / "run", *groups, ended=False, config=config)
    assert main(["report", str(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == folder / "report.html"
    return path.read_text()


def test_the_first_page_has_pass_at_k_categories_cost_failures_and_settings(page: str) -> None:
    assert [head for head in re.findall(r"<th>([^<]*)</th>", page) if head.startswith("pass@")] == ["pass@1", "pass@2"]
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert [row[:3] for row in rows if row] == [
        ["all tasks", "2", "3 of 4"], ["files", "1", "2 of 2"], ["text", "1", "1 of 2"],
    ]  # fmt: skip
    assert "<b>1.00</b><span>cost" in page
    assert "<b>200</b><span>tokens written, 4,000 read" in page
    assert "1 rollout failed (grader), first g1/1: no such column" in page
    assert "env.max_agent_turns (command line)" in page
    assert "abc123" in page
    assert "group_size" not in page
    assert "api_key" not in page


def test_the_report_of_a_run_that_goes_on_says_so(page: str) -> None:
    assert "<dt>state</dt><dd>killed</dd>" in page


def test_a_group_that_has_not_ended_is_planned_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"env": {"group_size": 2}}
    folder = write_run(tmp_path / "run", group(0, "files", 1.0, 0.0), group(1, "text", 1.0, 1.0), config=config)
    journal = folder / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"event":"end"' not in line]
    ended = [line for line in lines if '"group_end"' in line]
    journal.write_text("".join(line for line in lines if line != ended[-1]))
    assert main(["status", str(folder)]) == 0
    assert "of 4 rollouts scored" in capsys.readouterr().out
    assert main(["compare", str(folder), str(folder)]) == 0
    assert "2 of 4 rollouts scored" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert "2<small>/4</small>" in Path(capsys.readouterr().out.strip()).read_text()


def test_the_bar_of_stages_counts_no_time_twice_and_keeps_its_colours(page: str) -> None:
    legends = re.findall(r'<li class="s(\d)"><i></i>(\w+) ([^<]*)</li>', page)[:5]
    assert [(name, seconds) for _, name, seconds in legends] == [
        ("acquire", "0.1s"), ("agent", "0.5s"), ("model", "2.5s"), ("tool", "2.0s"), ("grade", "1.0s"),
    ]  # fmt: skip
    assert [colour for colour, _, _ in legends] == ["1", "3", "4", "5", "7"]


def test_empty_and_repeated_details_are_left_out_and_markdown_is_styled(page: str) -> None:
    assert "kept" in page
    for noise in ("hidden", "tampering"):
        assert f"<dt>{noise}</dt>" not in page
    assert page.count("<dt>tests</dt>") == 5, "once for each rollout, and the mean on the first page"
    assert '<span class="t-bold"># Title' in page
    assert '<span class="t-bold">**bold**</span> and <span class="t-code">`code`</span>' in page


def test_figures_that_the_table_has_are_not_repeated() -> None:
    own = {"eval/planned": 4.0, "eval/pass@1": 0.5, "eval/pass@1/low": 0.1, "eval/category/a/mean_reward": 1.0}
    assert _own_figures({**own, "eval/seconds": 3.0}) == {"eval/seconds": 3.0}
    assert _own_figures({"eval/mean_reward": 1.0}) == {"eval/mean_reward": 1.0}, "the environment's own"


def test_open_or_close_all_reaches_the_conversations(page: str) -> None:
    assert 'all(".group, .rollout")' in page
