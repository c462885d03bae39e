"""`palaestra compare`: paired by task, with an interval, and honest about what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from recorded import write_run

from golden_messages import check_message
from palaestra.cli.main import cli, main
from palaestra.rollouts.observe.compare_runs import RunComparison, RunScores, compare
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import Blame, Outcome


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


def compared(first: list[Group], other: list[Group]) -> RunComparison:
    return compare(RunScores.of(first), RunScores.of(other))


FIRST = [group(0, "a", 1.0, 1.0), group(1, "b", 0.0, 1.0), group(2, "c", None, 1.0), group(3, "mine", 1.0)]
OTHER = [
    group(0, "c", 0.0),
    group(1, "b", 0.5),
    group(2, "a", 0.0, 1.0),
    group(3, "theirs", 0.0),
    group(4, "none", None),
]


def test_tasks_are_paired_whatever_their_order_and_size() -> None:
    found = compared(FIRST, OTHER)
    assert [(pair.task, pair.first, pair.other) for pair in found.pairs] == [
        ("a", 1.0, 0.5),
        ("b", 0.5, 0.5),
        ("c", 1.0, 0.0),
    ]
    assert (found.better, found.worse, found.only_first, found.only_other) == (2, 0, ("mine",), ("theirs",))
    assert found.difference == pytest.approx(0.5)
    trials = 0.75 * 0.25 / (1 / 48)  # of the differences 0.5, 0, 1, from -1..1 to 0..1: their mean's share and variance
    square = 4.302653**2 / trials
    middle, reach = 0.75 + square / 2, (square * 0.75 * 0.25 + square**2 / 4) ** 0.5
    bounds = [2 * (middle + sign * reach) / (1 + square) - 1 for sign in (-1, 1)]
    assert [found.low, found.high] == pytest.approx(bounds, abs=1e-4)
    assert found.winner == 0
    check_message(found.undecided)  # every reason is named, not only the first
    alone = compared(FIRST[:1], OTHER)
    assert (alone.low, alone.high) == pytest.approx((0.5 * 0.2066 - 0.7934, 0.5 * 0.2066 + 0.7934), abs=1e-4)


def test_winning_each_of_three_tasks_is_no_proof_and_each_of_ten_is() -> None:
    won, lost = ([group(n, f"t{n}", reward) for n in range(10)] for reward in (1.0, 0.0))
    few = compared(won[:3], lost[:3])
    assert few.low is not None
    assert few.low < 0
    assert (few.winner, few.undecided) == (0, "the interval contains 0")
    assert (compared(won, lost).winner, compared(lost, won).winner) == (1, -1)


def test_no_winner_is_named_where_the_coverage_differs() -> None:
    won, lost = ([group(n, f"t{n}", reward, reward) for n in range(10)] for reward in (1.0, 0.0))
    lost[0] = group(0, "t0", 0.0, None)
    found = compared(won, lost)
    assert found.low is not None
    assert found.low > 0
    assert found.winner == 0
    assert "20 of 20 against 19 of 20" in found.undecided


@pytest.mark.parametrize(
    ("graded", "code", "winner"),
    [
        ((0, 0), "aa", 1),
        ((10, 10), "ab", 1),
        ((10, 0), "aa", 0),
        ((0, 10), "aa", 0),
        ((10, 4), "aa", 0),
        ((0, 0), "ab", 0),
    ],
)
def test_no_winner_is_named_where_other_versions_of_the_score_may_have_judged(
    graded: tuple[int, int], code: str, winner: int
) -> None:
    runs = [RunScores.of([group(n, f"t{n}", reward) for n in range(10)], env="e") for reward in (1.0, 0.0)]
    for run, number, letter in zip(runs, graded, code, strict=True):
        counts = {"graded": number, letter: 10 - number}
        run.versions = {name: count for name, count in counts.items() if count}
    found = compare(*runs)
    assert (found.winner, bool(found.undecided)) == (winner, not winner)


def test_two_runs_in_words_and_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, other = write_run(tmp_path / "first", *FIRST), write_run(tmp_path / "other", *OTHER)

    def said(*argv: object) -> int:
        return main(["compare", *map(str, argv)])

    assert said(first, other) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert "  +0.500  1.000 against 0.500  a" in lines
    assert lines[-3].startswith("+0.500 (-0.622 to +0.950) over 3 tasks: better on 2, worse on 0")
    assert lines[-2].startswith("+0.333 (-0.")
    assert lines[-1].startswith("no winner: ")
    assert "6 of 7 rollouts scored, 4 tasks" in lines[0]
    check_message(told.err, other)
    assert said(other, first, "--json") == 0
    assert json.loads(capsys.readouterr().out)["difference"] == pytest.approx(-0.5)
    empty = write_run(tmp_path / "empty", group(0, "z", 1.0))
    assert said(first, empty) == 2
    check_message(capsys.readouterr().err, "reward")


def test_tasks_that_asked_something_else_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids that are numbers of items pair tasks that have nothing to do with each other."""

    def asking(*asked: str) -> list[Group]:
        return [msgspec.structs.replace(group(n, f"item-{n}", 1.0), asked=each) for n, each in enumerate(asked)]

    first, other = asking("dog", "cat", ""), asking("dog", "cow", "hen")
    assert compared(first, other).asked_otherwise == ("item-1",)
    again = [*other, msgspec.structs.replace(group(3, "item-1", 0.0), asked="cat")]
    assert compared(first, again).asked_otherwise == ()
    paths = [str(write_run(tmp_path / name, *run)) for name, run in (("first", first), ("other", other))]
    cli.main(["compare", *paths], standalone_mode=False)
    check_message(capsys.readouterr().err, "item-1")


def test_those_that_differ_most_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [group(n, f"t{n}", n / 100) for n in range(1, 31)]
    other = [group(n, f"t{n}", 0.0) for n in range(1, 31)]
    paths = [str(write_run(tmp_path / name, *run)) for name, run in (("first", first), ("other", other))]
    cli.main(["compare", *paths], standalone_mode=False)
    shown = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if " against 0.000  t" in line]
    assert shown == [f"t{n}" for n in range(11, 31)]


def test_several_runs_are_compared_with_their_models_and_differing_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, reward in (("small", 0.0), ("large", 1.0), ("large-again", 1.0)):
        config = {"env": {"group_size": 1, "max_agent_turns": len(name)}, "openai": [{"model_name": name}]}
        groups = [group(n, f"t{n}", reward) for n in range(10)]
        paths.append(str(write_run(tmp_path / name, *groups, model=name, config=config)))
    assert main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert 'openai.model_name: "small" | "large" | "large-again"' in out
    assert "env.max_agent_turns: 5 | 5 | 11" in out
    assert "group_size" not in out
    assert f"better: {paths[1]} (large)" in out
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["model"] for run in found["runs"]] == ["small", "large", "large-again"]
    assert [found["winner"], found["others"][0]["winner"]] == [-1, -1]
