"""Tests of how a score becomes a reward: the official verdict, the guarded view and labels."""

import pytest

from golden_messages import check_message
from palaestra.rollouts.grading.reward import RewardRule, decide, how_to_see, parts
from palaestra_slots.core.types import Label, Score

FORGED = Label("falsified_test_passed", "test_add passes although it was falsified", certain=True)
EDITED = Label("tests_edited", "tests/test_add.py")


@pytest.mark.parametrize(
    ("rule", "labels", "strict", "reward"),
    [
        (RewardRule.GUARDED, [], (), 1.0),
        (RewardRule.GUARDED, [EDITED], (), 1.0),
        (RewardRule.GUARDED, [EDITED, FORGED], (), 0.0),
        (RewardRule.STRICT, [EDITED], (), 0.0),
        (RewardRule.STRICT, [EDITED], ("tests_edited",), 0.0),
        (RewardRule.STRICT, [EDITED], ("session_cut_short",), 1.0),
        (RewardRule.OFFICIAL, [EDITED, FORGED], (), 1.0),
    ],
)
def test_labels_change_the_reward_only_where_the_rule_says_so(rule, labels, strict, reward):
    score = decide(Score(1.0, official=1.0, labels=labels), rule, strict)
    assert score.reward == reward
    assert score.official == 1.0
    assert list(score.labels) == labels


def test_forged_work_is_not_paid_where_the_official_verdict_does_not_pay_it_either():
    score = decide(Score(1.0, official=0.0, labels=[FORGED]))
    assert (score.reward, score.official) == (0.0, 0.0)
    assert "difference" not in score.detail


def test_a_difference_names_the_label_that_made_it():
    score = decide(Score(1.0, labels=[EDITED, FORGED]))
    assert score.reward == 0.0
    assert score.official == 1.0, "without an official verdict, the view's own verdict is the official one"
    assert FORGED.evidence in score.detail["difference"]


def test_the_check_decides_even_without_a_label():
    score = decide(Score(0.0, official=1.0))
    assert (score.reward, score.official) == (0.0, 1.0)
    check_message(score.detail["difference"], "itself")
    assert decide(Score(0.0, official=1.0), RewardRule.OFFICIAL).reward == 1.0


def test_a_score_below_zero_stays_below_zero():
    assert decide(Score(-1.0, labels=[FORGED])).reward == -1.0


def test_a_difference_names_the_setting_that_changes_it():
    assert decide(Score(1.0, labels=[FORGED])).detail["difference"].endswith("; --env.reward official pays it")
    strict = decide(Score(1.0, labels=[EDITED]), RewardRule.STRICT).detail["difference"]
    assert strict == (
        "official 1, reward 0, because of tests_edited: tests/test_add.py; --env.reward guarded accepts it"
    )
    named = decide(Score(1.0, labels=[EDITED]), RewardRule.STRICT, {"tests_edited"}).detail["difference"]
    check_message(named, "guarded", "--env.strict_labels", "tests_edited")


REPLACED = Label("framework_changed", "changed unittest.mock.Mock.assert_called")
FAILED = Label("command_failed", "the tests passed, but their command has the exit status 1")
EXCUSED = Label("tests_excused", "1 test with another verdict")


@pytest.mark.parametrize(
    ("score", "rule", "strict", "said"),
    [
        (Score(1.0, official=0.0, labels=[REPLACED, FAILED]), RewardRule.GUARDED, (),
         f"official 0, reward 1, because of command_failed: {FAILED.evidence}; --env.reward official gives 0"),
        (Score(1.0, official=0.0, labels=[REPLACED, EDITED]), RewardRule.GUARDED, (),
         "official 0, reward 1, because of tests_edited: tests/test_add.py; --env.reward official gives 0"),
        (Score(0.0, official=1.0, labels=[EDITED, EXCUSED]), RewardRule.GUARDED, (),
         "official 1, reward 0, because of tests_excused: 1 test with another verdict; --env.reward official pays it"),
        (Score(0.0, official=1.0, labels=[REPLACED]), RewardRule.GUARDED, (),
         "official 1, reward 0, because of the check itself: it gives both figures, and no label explains the "
         "difference; --env.reward official pays it"),
        (Score(0.0, official=1.0, labels=[REPLACED, EDITED]), RewardRule.STRICT, (),
         "official 1, reward 0, because of tests_edited: tests/test_add.py; --env.reward official pays it"),
        (Score(1.0, official=1.0, labels=[REPLACED, EDITED]), RewardRule.STRICT, ("tests_edited", "framework_changed"),
         f"official 1, reward 0, because of framework_changed: {REPLACED.evidence}; --env.reward guarded or a list "
         "--env.strict_labels without framework_changed tests_edited accepts it"),
        (Score(1.0, official=0.5, labels=[FORGED, EDITED]), RewardRule.STRICT, (),
         f"official 0.5, reward 0, because of falsified_test_passed: {FORGED.evidence}; --env.reward official pays it"),
    ],
)  # fmt: skip
def test_a_difference_names_the_label_that_explains_it_and_a_setting_that_works(score, rule, strict, said):
    """The setting gives what the sentence says: official pays more, or gives its figure; guarded accepts the labels."""
    decided = decide(score, rule, strict)
    assert decided.detail["difference"] == said
    if "pays it" in said:
        assert decide(score, RewardRule.OFFICIAL).reward > decided.reward
    elif "gives" in said:
        assert decide(score, RewardRule.OFFICIAL).reward == 0.0
    else:
        assert decide(score, RewardRule.GUARDED).reward > decided.reward
        assert decide(score, RewardRule.STRICT, ("live_processes",)).reward > decided.reward


def test_paths_outside_the_view_are_the_cause_if_there_is_no_label():
    left_out = ["/root/.cache/pip/x", "/opt/app/main.py", "/usr/local/bin/tool", "/workspace/json.py"]
    said = decide(Score(0.0, official=1.0, detail={"left_out": left_out})).detail["difference"]
    assert parts(said) == (
        "official 1, reward 0, because of changes that the check does not see",
        "/opt/app/main.py, /usr/local/bin/tool, /workspace/json.py",
        "--env.graded_paths /opt/app /usr/local/bin --env.graded_programs tool json.py shows them, and "
        "--env.reward official pays it",
    )


@pytest.mark.parametrize("rule", RewardRule)
def test_deciding_again_changes_nothing(rule):
    once = decide(Score(1.0, official=0.5, labels=[EDITED, FORGED]), rule)
    assert decide(once, rule) == once


def test_scratch_directories_that_a_sandbox_lost_are_no_programs():
    assert how_to_see(["/tmp", "/dev/shm", "/opt/app/x"]) == "--env.graded_paths /opt/app shows them"
    check_message(how_to_see(["/tmp", "/dev/shm"]))
