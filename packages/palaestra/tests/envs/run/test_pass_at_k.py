"""What an evaluation comes to: pass rates against counting, figures of hand-made attempts."""

from __future__ import annotations

from itertools import combinations

import pytest

from golden_messages import check_message
from palaestra.envs.run.evaluate import in_short
from palaestra.envs.run.pass_at_k import figures, sample
from palaestra.rollouts.observe.metrics import pass_at_k, pass_hat_k
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.types import Blame, Outcome


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 3, 2), (4, 4, 4), (1, 1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (n - passed), k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(n, passed, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_what_cannot_be_told_is_refused() -> None:
    for n, passed, k in ((2, 3, 1), (2, 1, 3), (2, 1, 0)):
        for rate in (pass_at_k, pass_hat_k):
            with pytest.raises(ValueError, match="cannot be computed"):
                rate(n, passed, k)


def attempt(task: str, index: int, reward: float | None) -> Trajectory:
    return Trajectory(
        rollout_id=f"{task}/{index}",
        group_id=task,
        task_id=task,
        index=index,
        messages=[],
        outcome=Outcome.INFRA_ERROR if reward is None else Outcome.NATURAL,
        reward=reward,
        blame=Blame.GRADER if reward is None else None,
    )


def test_an_evaluation_counts_attempts_apart_from_tasks() -> None:
    rewards: dict[str, list[float | None]] = {"a": [1.0, 0.0, 1.0, 0.0], "b": [0.5, 0.0, None, 0.0]}
    done = [attempt(name, index, reward) for name, row in rewards.items() for index, reward in enumerate(row)]
    found = figures(done, 4, tasks=3, labels={"a": ("category/files",), "b": ("category/text",)})
    assert (found["tasks"], found["tasks_not_run"], found["attempts"]) == (3, 1, 8)
    assert (found["unscored"], found["unscored/grader"]) == (1, 1)
    assert (found["planned"], found["scored"]) == (12, 7)
    assert found["pass_rate"] == pytest.approx(2 / 7)
    assert found["mean_reward"] == pytest.approx(2.5 / 7)
    assert found["mean_reward/low"] < 2.5 / 7 < found["mean_reward/high"]
    assert found["pass@1"] == pytest.approx((0.5 + 0) / 2)
    assert found["pass@2"] == pytest.approx((5 / 6 + 0) / 2)
    assert (found["pass@4"], found["pass@4/tasks"]) == (1.0, 1)
    assert (found["pass^2"], found["pass^4"]) == (pytest.approx((1 / 6 + 0) / 2), 0.0)
    assert found["pass^2/low"] < found["pass^2"] < found["pass^2/high"]
    assert found["pass@1/low"] < found["pass@1"] < found["pass@1/high"]
    assert found["category/files/pass@1"] == 0.5
    assert found["category/text/pass_rate"] == 0
    assert [sample(each)["passed"] for each in done] == [True, False, True, False, False, False, None, False]


def test_the_line_for_people_counts_the_tasks_that_the_rate_is_over() -> None:
    figure = {"pass@1": 0.5, "pass@1/low": 0.1, "pass@1/high": 0.9, "pass@1/tasks": 3, "tasks": 4}
    assert in_short(figure).endswith("over 3 of 4 tasks (1 without a score)")
    assert in_short({**figure, "pass@1/tasks": 4}).endswith("over 4 tasks")
    assert in_short({**figure, "planned": 16, "scored": 13}).endswith(
        "3 of 4 tasks (1 without a score), 13 of 16 rollouts scored"
    )


def test_the_line_for_people_names_the_tasks_that_a_rate_leaves_out() -> None:
    scored: dict[str, list[float | None]] = {str(task): [None, 0.0, 0.0, 0.0] for task in range(8)}
    scored |= {"8": [1.0] * 4, "9": [1.0] * 4}
    done = [attempt(name, index, reward) for name, row in scored.items() for index, reward in enumerate(row)]
    found = figures(done, 4, tasks=10)
    line, warning = in_short(found).splitlines()
    assert "pass@2 0.200 (0.045 to 0.573), pass@4 1.000 (0.342 to 1.000) over only 2 of 10 tasks," in line
    assert "pass@4 leaves out 8 tasks" in warning
    whole = figures([each for each in done if each.index], 3, tasks=10)
    assert "only" not in in_short(whole)
    # Of tasks that were chosen, the line says so, whether or not the number of all is known.
    assert "over 10 tasks chosen of 30" in in_short({**whole, "tasks_chosen": 1, "tasks_total": 30})
    check_message(in_short({**whole, "tasks_chosen": 1}))
    assert "chosen" not in in_short({**whole, "tasks_chosen": 1, "tasks_total": 10})


def test_mean_share_and_pass_at_1_of_one_evaluation_have_one_interval() -> None:
    for rewards in ([[0.0] * 4] * 5, [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0, 1.0, 1.0, 0.0]]):
        done = [attempt(str(task), n, reward) for task, row in enumerate(rewards) for n, reward in enumerate(row)]
        found = figures(done, 4, tasks=len(rewards))
        for end in ("low", "high"):
            assert found[f"pass@1/{end}"] == pytest.approx(found[f"mean_reward/{end}"])
            assert found[f"pass@1/{end}"] == pytest.approx(found[f"pass_rate/{end}"])


def test_an_evaluation_without_pass_at_k_shows_its_own_figures() -> None:
    assert in_short({"eval/pct": 0.5, "note": "x"}) == "pct 0.5"
