import json
from contextlib import closing

import pytest

from palaestra.envs.run.report_metrics import MetricsFile
from palaestra.rollouts.observe.intervals import mean_interval
from palaestra.rollouts.observe.metrics import Figures, quantile, summarise
from palaestra.rollouts.records import Beside, Group, ToolErrorRecord, Trajectory, TurnRecord
from palaestra_slots.core.types import Blame, Outcome


class FixedClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 1_700_000_000.5

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


def trajectory(index, reward, outcome=Outcome.NATURAL, **fields):
    identity = {"rollout_id": f"r{index}", "group_id": "g", "task_id": "t", "index": index, "messages": []}
    return Trajectory(**identity, reward=reward, outcome=outcome, **fields)


def group(*trajectories):
    return Group(group_id="g", number=0, task_id="t", trajectories=list(trajectories))


def of_one_task(name, mean):
    """A metric over the values of one task: its interval is that of one value, 1 / (1 + z^2) sure."""
    like = 1 / (1 + 1.959964**2)
    bounds = {f"{name}/low": like * mean, f"{name}/high": like * mean + 1 - like}
    return {name: pytest.approx(mean)} | {end: pytest.approx(bound) for end, bound in bounds.items()}


def test_what_a_run_amounts_to():
    numbers = summarise(
        [
            group(
                trajectory(
                    0,
                    1.0,
                    metrics={"f2p": 1.0},
                    turns=[TurnRecord(number=1), TurnRecord(number=2)],
                    prompt_tokens=100,
                    completion_tokens=10,
                    tool_calls_attempted=3,
                    tool_calls_schema_valid=2,
                    tool_errors=[ToolErrorRecord(turn=1, tool="x", arguments="", error="no such tool")],
                    beside=Beside(duration_s=4.0, stages={"model": 1.0}),
                ),
                trajectory(1, 0.0, Outcome.MAX_TURNS, metrics={"f2p": 0.5}, beside=Beside(stages={"model": 3.0})),
                trajectory(2, None, Outcome.INFRA_ERROR, blame=Blame.SANDBOX),
            ),
            group(),
        ]
    )
    assert numbers == {
        "groups": 2,
        "groups_failed": 1,
        "rollouts": 3,
        "rollouts_planned": 3,
        "scored": 2,
        "outcomes/natural": 1,
        "outcomes/max_turns": 1,
        "outcomes/infra_error": 1,
        "blame/sandbox": 1,
        **of_one_task("blame_rate/sandbox", 1 / 3),
        **of_one_task("reward/mean", 0.5),
        "reward/std": 0.5,
        **of_one_task("reward/mean_with_unscored", 1 / 3),
        **of_one_task("percent_correct", 0.5),
        **of_one_task("percent_correct_with_unscored", 1 / 3),
        "turns/mean": pytest.approx(2 / 3),
        "tokens/prompt": 100,
        "tokens/completion": 10,
        "tool_errors_count": 1,
        "tool_calls_attempted": 3,
        "tool_calls_valid": 2,
        "stage/model/p50": 2.0,
        "stage/model/p95": pytest.approx(2.9),
        "stage/rollout/p50": 4.0,
        "stage/rollout/p95": 4.0,
        "metric/f2p": 0.75,
    }


def test_intervals_costs_and_stages_where_there_is_enough_to_know():
    one = trajectory(0, 1.0, cost=0.25, beside=Beside(turn_s=[(1.0, 5.0), (2.0, 0.0)], stages={"tool": 5.0}))
    other = Group(group_id="h", number=1, task_id="t", trajectories=[trajectory(1, 0.0, cost=0.5)], prepare_s=3.0)
    numbers = summarise([group(one), other])
    assert numbers["cost"] == 0.75
    assert (numbers["stage/model/p50"], numbers["stage/tool/p50"], numbers["stage/prepare/p50"]) == (3.0, 5.0, 3.0)
    assert numbers["reward/mean/low"] < numbers["reward/mean"] < numbers["reward/mean/high"]
    assert numbers["reward/mean"] == numbers["reward/mean_with_unscored"] == 0.5
    assert numbers["reward/mean/low"] == numbers["reward/mean_with_unscored/low"]


def test_the_interval_with_the_unscored_takes_them_as_zeros_of_their_group():
    lost = {"outcome": Outcome.INFRA_ERROR, "blame": Blame.SANDBOX}
    other = Group(group_id="h", number=1, task_id="u", trajectories=[trajectory(0, 1.0)])
    numbers = summarise([group(trajectory(0, 1.0), trajectory(1, None, **lost)), other])
    assert (numbers["reward/mean/low"], numbers["reward/mean/high"]) == pytest.approx(mean_interval([[1.0], [1.0]]))
    low, high = mean_interval([[1.0, 0.0], [1.0]])
    assert numbers["reward/mean_with_unscored/low"] == pytest.approx(low)
    assert numbers["reward/mean_with_unscored/high"] == pytest.approx(high)


def test_a_mean_and_its_share_have_the_same_interval_over_tasks_and_not_over_groups():
    again = [Group(group_id=f"g{n}", number=n, task_id="t", trajectories=[trajectory(0, 0.0)]) for n in range(9)]
    other = Group(group_id="h", number=9, task_id="u", trajectories=[trajectory(0, 0.0)])
    numbers = summarise([*again, other])
    for name in ("reward/mean", "percent_correct"):
        assert (numbers[f"{name}/low"], numbers[f"{name}/high"]) == pytest.approx(mean_interval([[0.0] * 9, [0.0]]))


def test_a_group_that_could_not_be_prepared_lacks_its_rollouts():
    figures = Figures(group_size=4)
    figures.add(group(*(trajectory(index, 1.0) for index in range(4))))
    figures.add(Group(group_id="h", number=1, task_id="u", error="no image"))
    numbers = figures.numbers()
    assert (numbers["rollouts"], numbers["rollouts_planned"], numbers["scored"]) == (4, 8, 4)
    assert (numbers["reward/mean"], numbers["reward/mean_with_unscored"]) == (1.0, 0.5)


def test_refused_tasks_count_as_unscored_rollouts():
    figures = Figures(group_size=2)
    figures.add(group(trajectory(0, 1.0), trajectory(1, 1.0)))
    figures.refused = 3
    found = figures.numbers()
    assert (found["rollouts_planned"], found["reward/mean"]) == (8, 1.0)
    assert found["reward/mean_with_unscored"] == found["percent_correct_with_unscored"] == 0.25
    assert found["reward/mean_with_unscored/low"] < 0.25 < found["reward/mean_with_unscored/high"]


def test_nothing_measured_is_left_out_rather_than_zero():
    numbers = summarise([group(trajectory(0, None, Outcome.API_ERROR))])
    assert not {"reward/mean", "reward/std", "percent_correct"} & numbers.keys()
    assert "turns/mean" not in summarise([])


@pytest.mark.parametrize(("values", "q", "expected"), [([3], 0.95, 3), ([1, 2], 0.5, 1.5), ([4, 1, 2, 3], 1, 4)])
def test_quantiles(values, q, expected):
    assert quantile(values, q) == expected


def test_lines_are_added_and_readable_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with closing(MetricsFile(path, clock=FixedClock())) as file:
        file.log(3, {"reward/mean": 0.5})
        assert json.loads(path.read_text()) == {
            "schema": "palaestra.metrics/1",
            "time": 1_700_000_000.5,
            "step": 3,
            "reward/mean": 0.5,
        }


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    with closing(MetricsFile(path)) as file:
        file.log(2, {})
    assert [line[:6] for line in path.read_text().splitlines()] == ['{"step', '{"ste', '{"sche']


def test_a_number_json_cannot_hold_is_null(tmp_path):
    with closing(MetricsFile(tmp_path / "m.jsonl")) as file:
        file.log(0, {"loss": float("nan")})
        assert json.loads(file.path.read_text())["loss"] is None
