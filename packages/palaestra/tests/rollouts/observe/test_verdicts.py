"""The lines about official verdicts in a run's summary and report."""

from golden_messages import check_message
from palaestra.rollouts.observe.verdicts import VerdictCounts, labels_line, official_words
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON, Outcome


def group(number: int, reward: float, official: float | None, **detail: JSON) -> Group:
    trajectory = Trajectory(
        rollout_id=f"g{number}/0", group_id=f"g{number}", task_id=f"t{number}", index=0, messages=[],
        outcome=Outcome.NATURAL, reward=reward, official=official, detail=detail,
    )  # fmt: skip
    return Group(group_id=f"g{number}", task_id=f"t{number}", number=number, trajectories=[trajectory])


def lines(*groups: Group) -> list[str]:
    verdicts = VerdictCounts()
    for each in groups:
        verdicts.add(each)
    return list(verdicts.lines())


def test_rollouts_with_one_cause_share_a_line_and_their_evidence_is_bounded() -> None:
    said = "official 1, reward 0, because of edited: test_{}.py; --env.reward official pays it"
    (line,) = lines(*(group(number, 0.0, 1.0, difference=said.format(number)) for number in range(50)))
    assert line == (
        "50 rollouts: official 1, reward 0, because of edited: test_0.py, test_1.py, test_2.py …; "
        "--env.reward official pays it"
    )


def test_very_many_causes_are_counted() -> None:
    said = "official 1, reward 0, because of cause{}: x; y"
    shown = lines(*(group(number, 0.0, 1.0, difference=said.format(number)) for number in range(300)))
    assert len(shown) == 6
    check_message(shown[-1], "295")


def test_unseen_paths_count_only_for_work_without_reward_and_verdict() -> None:
    path = ["/opt/a", "/root/.cache/b"]
    assert lines(group(0, 1.0, None, left_out=path), group(1, 0.0, 0.0, left_out=path)) == []
    assert lines(group(0, 0.0, None, left_out=["/root/.cache/b", "/var/lib/dpkg/status"])) == []
    (line,) = lines(group(0, 0.0, None, left_out=path))
    check_message(line, "rollout", "/opt/a", "--env.graded_paths", "/opt")


def test_names() -> None:
    assert (official_words("official"), official_words("resolved")) == ("official", "official (resolved)")
    assert labels_line({"a": 1, "b": 3}) == "b 3, a 1"
