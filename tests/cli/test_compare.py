"""`palaestra compare`: paired by task, with an interval, and honest about what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from recorded import write_run

from palaestra.cli.main import cli, main
from palaestra.core.types import Blame, Outcome
from palaestra.rollouts.observe.compare_runs import compare
from palaestra.rollouts.observe.intervals import student
from palaestra.rollouts.records import Group, Trajectory


def group(number: int, task: str, *rewards: float | None) -> Group:
    rollouts = [
        Trajectory(
            rollout_id=f"{number}/{index}", group_id=f"g{number}", task_id=task, index=index, messages=[],
            outcome=Outcome.INFRA_ERROR if reward is None else Outcome.NATURAL, reward=reward,
            blame=Blame.SANDBOX if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(group_id=f"g{number}", number=number, task_id=task, trajectories=rollouts)


FIRST = [group(0, "a", 1.0, 1.0), group(1, "b", 0.0, 1.0), group(2, "c", None, 1.0), group(3, "mine", 1.0)]
OTHER = [
    group(0, "c", 0.0),
    group(1, "b", 0.5),
    group(2, "a", 0.0, 1.0),
    group(3, "theirs", 0.0),
    group(4, "none", None),
]


def test_tasks_are_paired_whatever_their_order_and_size() -> None:
    found = compare(FIRST, OTHER)
    assert [(pair.task, pair.first, pair.other) for pair in found.pairs] == [
        ("a", 1.0, 0.5),
        ("b", 0.5, 0.5),
        ("c", 1.0, 0.0),
    ]
    assert (found.better, found.worse, found.only_first, found.only_other) == (2, 0, ("mine",), ("theirs",))
    assert found.difference == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 - 4.302653 * 0.5 / 3**0.5)  # by hand: differences 0.5, 0, 1
    assert found.high == pytest.approx(0.5 + 4.302653 * 0.5 / 3**0.5)
    assert compare(FIRST[:1], OTHER).low is None


@pytest.mark.parametrize(("freedom", "tabulated"), [(1, 12.7062), (3, 3.1824), (5, 2.5706), (30, 2.0423)])
def test_the_quantiles_are_those_of_the_tables(freedom: int, tabulated: float) -> None:
    assert student(freedom) == pytest.approx(tabulated, rel=2e-4)


def test_two_runs_in_words_and_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = write_run(tmp_path / "first", *FIRST), write_run(tmp_path / "other", *OTHER)

    def said(*argv: object) -> int:
        return main(["compare", *map(str, argv)])

    assert said(first, other) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == "  +0.500  1.000 against 0.500  a"
    assert lines[-2] == "+0.500 (-0.742 to +1.742) over 3 tasks: better on 2, worse on 0"
    assert lines[-1] == "+0.333 (-0.384 to +1.050) with the unscored as 0, over 3 tasks"
    assert f"1 tasks have a reward only in {other}" in told.err
    assert said(other, first, "--json") == 0
    assert json.loads(capsys.readouterr().out)["difference"] == pytest.approx(-0.5)
    empty = write_run(tmp_path / "empty", group(0, "z", 1.0))
    assert said(first, empty) == 2
    assert "no task has a reward in both: 4 have one in the first run, 1 in the other" in capsys.readouterr().err


def test_tasks_that_asked_something_else_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that are numbers of items pair tasks that have nothing to do with each other."""

    def asking(*asked: str) -> list[Group]:
        return [msgspec.structs.replace(group(n, f"item-{n}", 1.0), asked=each) for n, each in enumerate(asked)]

    first, other = asking("dog", "cat", ""), asking("dog", "cow", "hen")
    assert compare(first, other).asked_otherwise == ("item-1",)
    again = [*other, msgspec.structs.replace(group(3, "item-1", 0.0), asked="cat")]
    assert compare(first, again).asked_otherwise == ()
    paths = [str(write_run(tmp_path / name, *run)) for name, run in (("first", first), ("other", other))]
    cli.main(["compare", *paths], standalone_mode=False)
    assert "1 of these tasks, item-1 first, asked something else" in capsys.readouterr().err


def test_those_that_differ_most_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [group(n, f"t{n}", n / 100) for n in range(1, 31)]
    other = [group(n, f"t{n}", 0.0) for n in range(1, 31)]
    paths = [str(write_run(tmp_path / name, *run)) for name, run in (("first", first), ("other", other))]
    cli.main(["compare", *paths], standalone_mode=False)
    shown = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:20]]
    assert shown == [f"t{n}" for n in range(11, 31)]
