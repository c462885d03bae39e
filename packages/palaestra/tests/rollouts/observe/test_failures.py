"""Failures are gathered by cause, with counts and the first example."""

from __future__ import annotations

from golden_messages import check_message
from palaestra import Group, Outcome, Trajectory
from palaestra.rollouts.observe.failures import Cause, Failures
from palaestra_slots import Blame


def failed(group_id: str, index: int, error: str, blame: Blame) -> Trajectory:
    return Trajectory(
        rollout_id=f"{group_id}/{index}", group_id=group_id, task_id="t", index=index, messages=[],
        outcome=Outcome.INFRA_ERROR, reward=None, blame=blame, error=error,
    )  # fmt: skip


def test_alike_failures_are_one_cause() -> None:
    failures = Failures()
    for number in range(3):
        name = f"{number:06d}-t{number}"
        trajectories = [failed(name, i, f"scoring {name}/{i} failed: line 8", Blame.GRADER) for i in range(2)]
        trajectories.append(failed(name, 2, "no slot", Blame.SANDBOX))
        failures.add(Group(group_id=name, number=number, task_id="t", trajectories=trajectories))
    failures.add(Group(group_id="g", number=4, task_id="t", error="setup failed", blame=Blame.TASK))
    assert [(cause.blame, cause.rollouts, cause.groups, cause.first) for cause in failures.causes()] == [
        ("grader", 6, 0, "000000-t0/0"), ("sandbox", 3, 0, "000000-t0/2"), ("task", 0, 1, "g"),
    ]  # fmt: skip
    assert failures.causes()[0].line() == (
        "6 rollouts failed (grader), first 000000-t0/0: scoring 000000-t0/0 failed: line 8"
    )


def test_causes_are_bounded_and_short() -> None:
    failures = Failures()
    words = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(300)]
    for word in words:
        group = Group(group_id="g", number=0, task_id="t", trajectories=[failed("g", 0, word * 400, Blame.TOOL)])
        failures.add(group)
    causes = failures.causes()
    assert len(causes) == 101
    assert sum(cause.rollouts for cause in causes) == 300
    assert max(len(cause.line()) for cause in causes) < 400


def test_a_cause_keeps_the_end_of_its_error() -> None:
    error = f"its tests do not pass: {', '.join(f'test_{number}' for number in range(200))}\nNo module named 'attrs'"
    failures = Failures()
    failures.add(Group(group_id="g", number=0, task_id="t", error=error, blame=Blame.TASK))
    (cause,) = failures.causes()
    check_message(cause.error, "test_0")
    check_message(cause.error, "attrs")


def test_a_cause_without_an_error_says_so() -> None:
    check_message(Cause("unknown", "", "g/0", rollouts=1).line(), "unknown", "first", "g/0")
