"""Token rows: over all segments each sampled token stands once with mask 1, with its own log-probability."""

from __future__ import annotations

import io
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import META, TWO_CALLS, one_segment, own_row, rollout, say, two_segments

from golden_messages import check_message, raises
from palaestra.rollouts.export.exporter import ExportReport
from palaestra.rollouts.export.token_rows import RowsExporter
from palaestra.rollouts.records import Group, TokenRow, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Outcome
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason

PLACEHOLDER = TokenRow(tokens=[1, 2], masks=[-100, -100])


def exported(*trajectories: Trajectory, placeholders: bool = False) -> tuple[list[dict[str, JSON]], ExportReport]:
    out = io.BytesIO()
    group = Group(group_id="g", number=0, task_id="t", trajectories=list(trajectories))
    meta = type(META)(placeholders=placeholders, everything=True)
    report = RowsExporter().export([group], out, meta)
    return [json.loads(line) for line in out.getvalue().splitlines()], report


def test_one_row_for_each_segment() -> None:
    (first, second), report = exported(rollout(0, TWO_CALLS, 0.5, ledger=two_segments().record()))
    assert first == {
        "schema": "palaestra.row/1",
        "prompt_ids": [1, 2, 3],
        "completion_ids": [10, 11, 9],
        "mask": [1, 1, 1],
        "logprobs": [-0.5, -0.75, -1.0],
        "reward": 0.5,
        "group_id": "000000-sky",
        "segment": 0,
        "policy_version": "step-4",
        "versions": [[0, 3, "step-4"]],
        "spans": [["prompt", "000000-sky/0:1", 0, 3], ["sampled", "000000-sky/0:1", 0, 3]],
        "segments": 2,
        "rollout_id": "000000-sky/0",
        "task_id": "sky",
        "index": 0,
        "outcome": "natural",
        "reason": "start",
        "finish_reason": "stop",
        "source": "engine",
    }
    assert (second["segment"], second["reason"], second["policy_version"]) == (1, "compaction", "step-5")
    assert (report.rollouts, report.records) == (1, 2)
    assert report.remarks == {"has several segments, each with the same reward": 1}


def test_what_the_environment_wrote_is_in_the_completion_and_not_trained() -> None:
    (row,), _ = exported(rollout(0, TWO_CALLS, ledger=one_segment().record()))
    assert row["completion_ids"] == [10, 9, 6, 7, 11, 9]
    assert row["mask"] == [1, 1, 0, 0, 1, 1]
    assert row["logprobs"] == [-0.5, -0.75, 0.0, 0.0, -0.5, -0.75]
    assert row["versions"] == [[0, 2, "step-4"], [4, 6, "step-4"]]
    assert row["spans"] == [
        ["prompt", "000000-sky/0:1", 0, 2],
        ["sampled", "000000-sky/0:1", 0, 2],
        ["prompt", "000000-sky/0:2", 4, 2],
        ["sampled", "000000-sky/0:2", 0, 2],
    ]


def test_the_pieces_of_an_aborted_reply_are_sequences_of_their_own() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    aborted, rest = Sampled([5, 6], [-0.5, -0.5], "abort", "a"), Sampled([7], [-0.25], "stop", "b")
    prompt = ledger.prompt(segment, [1])
    first = Piece(aborted, prompt.checksum)
    prompt.grow(array("i", aborted.ids))
    ledger.append(segment, [1], [first, Piece(rest, prompt.checksum)])
    (row,), _ = exported(rollout(0, TWO_CALLS, ledger=ledger.record()))
    ids = ["000000-sky/0:1", "000000-sky/0:1", "000000-sky/0:1.1"]
    assert [span[1:] for span in row["spans"]] == [[ids[0], 0, 1], [ids[1], 0, 2], [ids[2], 0, 1]]


turn = st.tuples(
    st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=4)
)


@given(st.lists(turn, min_size=1, max_size=6))
def test_each_sampled_token_stands_once_with_mask_1(said: list[tuple[bool, list[int], list[int]]]) -> None:
    ledger, segment = Ledger(), 0
    for number, (rewritten, delta, ids) in enumerate(said):
        if number == 0 or rewritten:
            segment = ledger.open(SegmentReason.HISTORY_EDIT)
        say(ledger, segment, delta, ids, "v")
    rows, _ = exported(rollout(0, TWO_CALLS, ledger=ledger.record()))
    ids = [span[1] for row in rows for span in row["spans"] if span[0] == "sampled"]
    assert len(set(ids)) == len(ids)
    for row in rows:
        masks = [int(kind == "sampled") for kind, _, _, length in row["spans"] for _ in range(length)]
        assert masks == [0] * len(row["prompt_ids"]) + row["mask"]
        assert len(row["completion_ids"]) == len(row["mask"]) == len(row["logprobs"])
        assert row["mask"][0] == 1
        assert all(lp == 0.0 for lp, on in zip(row["logprobs"], row["mask"], strict=True) if not on)
    trained = [(token, lp) for row in rows for token, lp, on in zip(*arrays(row), strict=True) if on]
    assert trained == [(token, -0.5 - 0.25 * place) for _, _, ids in said for place, token in enumerate(ids)]


def arrays(row: dict[str, JSON]) -> tuple[list[int], list[float], list[int]]:
    return row["completion_ids"], row["logprobs"], row["mask"]


@pytest.mark.parametrize(("fields", "has_shape"), [({}, False), ({"row": PLACEHOLDER}, True)])
def test_tokens_that_nobody_sampled_are_refused(fields: dict[str, JSON], has_shape: bool) -> None:
    """Placeholders are only offered where there are some to export."""
    with raises(ConfigError, "000000-sky/0") as error:
        exported(rollout(0, TWO_CALLS, **fields))
    assert ("--placeholders" in str(error.value)) == has_shape


def test_a_rollout_in_which_nothing_was_said_is_left_out_and_the_others_are_not() -> None:
    """A prompt that is too long for the model has a score and no tokens, though its server is token-exact."""
    one = rollout(0, TWO_CALLS, 1.0, ledger=one_segment().record())
    silent = rollout(1, [], 0.0, outcome=Outcome.BUDGET, row=TokenRow(tokens=[7], masks=[-100]))
    rows, report = exported(one, silent)
    assert [row["rollout_id"] for row in rows] == [one.rollout_id]
    assert report.left_out == {"without tokens": 1}


def test_placeholders_on_request_train_nothing() -> None:
    (row,), report = exported(rollout(0, TWO_CALLS, row=PLACEHOLDER), rollout(1, TWO_CALLS), placeholders=True)
    assert (row["prompt_ids"], row["completion_ids"], row["mask"], row["logprobs"]) == ([1, 2], [], [], None)
    assert (row["source"], row["policy_version"], row["versions"]) == ("placeholder", None, [])
    assert report.left_out == {"without tokens": 1}
    check_message(report.remarks, "placeholder")


def test_an_export_of_placeholders_that_finds_none_is_refused() -> None:
    with raises(ConfigError):
        exported(rollout(0, TWO_CALLS), rollout(1, TWO_CALLS), placeholders=True)


def test_an_environments_own_row_comes_before_the_ledger() -> None:
    (row,), _ = exported(rollout(0, TWO_CALLS, row=own_row(), ledger=one_segment().record()))
    assert (row["prompt_ids"], row["completion_ids"], row["logprobs"]) == ([3], [4, 5], [-1.0, -2.0])
    assert (row["source"], row["spans"]) == ("environment", [])


def test_several_policies_in_one_segment_are_told_by_place() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1], [2], "a")
    say(ledger, segment, [3], [4], "b")
    (row,), _ = exported(rollout(0, TWO_CALLS, ledger=ledger.record()))
    assert row["policy_version"] is None
    assert row["versions"] == [[0, 1, "a"], [2, 3, "b"]]


def test_a_segment_without_a_sampled_token_is_no_row() -> None:
    ledger = Ledger()
    say(ledger, ledger.open(SegmentReason.START), [1, 2], [], "a")
    rows, report = exported(rollout(0, TWO_CALLS, ledger=ledger.record()))
    assert rows == []
    assert report.left_out == {"without tokens": 1}


@pytest.mark.parametrize(
    ("row", "reward", "message"),
    [
        (TokenRow(tokens=[1, 2], masks=[1], source="engine"), 1.0, r"differ in length: \[1, 2\]"),
        (TokenRow(tokens=[1], masks=[1], logprobs=[], source="engine"), 1.0, "differ in length"),
        (TokenRow(tokens=[1, 2], masks=[-100, 3], source="engine"), 1.0, "token 1: the mask is 3"),
        (TokenRow(tokens=[1], masks=[1], logprobs=[float("nan")], source="engine"), 1.0, "log-probability nan"),
        (TokenRow(tokens=[1], masks=[1], source="engine"), float("inf"), "the reward inf"),
    ],
)
def test_what_contradicts_itself_reaches_no_trainer(row: TokenRow, reward: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exported(rollout(0, TWO_CALLS, reward, row=row))
