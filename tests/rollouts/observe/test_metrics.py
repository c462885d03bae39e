import json
from contextlib import closing

import pytest

from palaestra.core.types import Blame, Outcome
from palaestra.envs.run.report_metrics import MetricsFile
from palaestra.rollouts.observe.intervals import mean_interval, rate_interval
from palaestra.rollouts.observe.metrics import quantile, summarise
from palaestra.rollouts.records import Beside, Group, ToolErrorRecord, Trajectory, TurnRecord


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
        "scored": 2,
        "outcomes/natural": 1,
        "outcomes/max_turns": 1,
        "outcomes/infra_error": 1,
        "blame/sandbox": 1,
        "blame_rate/sandbox": pytest.approx(1 / 3),
        "blame_rate/sandbox/low": pytest.approx(0.0615, abs=1e-4),
        "blame_rate/sandbox/high": pytest.approx(0.7923, abs=1e-4),
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/mean_with_unscored": pytest.approx(1 / 3),
        "percent_correct": 0.5,
        "percent_correct/low": pytest.approx(0.0945, abs=1e-4),
        "percent_correct/high": pytest.approx(0.9055, abs=1e-4),
        "percent_correct_with_unscored": pytest.approx(1 / 3),
        "percent_correct_with_unscored/low": pytest.approx(0.0615, abs=1e-4),
        "percent_correct_with_unscored/high": pytest.approx(0.7923, abs=1e-4),
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
    numbers = summarise([group(trajectory(0, 1.0), trajectory(1, None, **lost)), group(trajectory(0, 1.0))])
    assert (numbers["reward/mean/low"], numbers["reward/mean/high"]) == (1.0, 1.0)
    low, high = mean_interval([[1.0, 0.0], [1.0]])
    assert numbers["reward/mean_with_unscored/low"] == pytest.approx(low)
    assert numbers["reward/mean_with_unscored/high"] == pytest.approx(high)


def test_rollouts_of_one_group_tell_less_of_the_share_that_is_correct_than_as_many_of_other_groups():
    def interval(*groups_of_rewards):
        rewards = [group(*(trajectory(i, each) for i, each in enumerate(those))) for those in groups_of_rewards]
        numbers = summarise(rewards)
        return numbers["percent_correct/low"], numbers["percent_correct/high"]

    alike = interval(*[[1.0] * 8] * 3, *[[0.0] * 8] * 3)
    mixed = interval(*[[1.0, 0.0] * 4] * 6)
    assert alike == pytest.approx(mean_interval([[1.0] * 8] * 3 + [[0.0] * 8] * 3))
    assert mixed == pytest.approx(rate_interval(24, 48))
    assert alike[0] < mixed[0] < 0.5 < mixed[1] < alike[1]
    assert interval(*[[1.0] * 8] * 3) == pytest.approx(rate_interval(24, 24)), "no width is no certainty"
    assert interval([1.0, 0.0]) == pytest.approx(rate_interval(1, 2))


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
