"""The growing ledger: turns, segments, rows, and that appending costs what is new."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import (
    Ledger,
    LedgerRecord,
    Piece,
    SegmentReason,
    TokenRow,
    pieces_of,
    record_rows,
    verify_ledger,
)
from palaestra_tokens.testing.fake_engine import toy_tokenizer


def say(ledger: Ledger, segment: int, delta: list[int], *parts: tuple[list[int], str], finish: str = "stop") -> int:
    """One turn: `parts` are (ids, version) of what was sampled, all but the last aborted."""
    prompt, pieces = ledger.prompt(segment, delta), []
    for number, (ids, version) in enumerate(parts):
        reason = finish if number == len(parts) - 1 else "abort"
        sampled = Sampled(ids, [-0.5 - 0.25 * at for at in range(len(ids))], reason, version)
        pieces.append(Piece(sampled, prompt.checksum))
        prompt.grow(array("i", ids))
    return ledger.append(segment, delta, pieces)


def test_a_turn_is_prompt_and_sample() -> None:
    ledger = Ledger(stop_ids=[9])
    segment = ledger.open(SegmentReason.START)
    assert say(ledger, segment, [1, 2, 3], ([4, 9], "7")) == 1
    (row,) = ledger.rows()
    assert row.tokens == [1, 2, 3, 4, 9]
    assert row.masks == [-100, -100, -100, 4, 9]
    assert row.logprobs == [1.0, 1.0, 1.0, -0.5, -0.75]
    assert row.versions == [(3, 5, "7")]
    assert (row.reason, row.finish_reason) == ("start", "stop")


def test_a_second_turn_appends_and_the_first_stays_trained() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1], ([2, 9], ""))
    assert list(ledger.prompt(segment, [5])) == [1, 2, 9, 5]
    say(ledger, segment, [5], ([6, 9], ""))
    (row,) = ledger.rows()
    assert row.masks == [-100, 2, 9, -100, 6, 9]
    assert [(turn.number, turn.prompt_tokens, turn.sampled_tokens) for turn in ledger.turns] == [(1, 1, 2), (2, 4, 2)]


def test_an_aborted_request_stays_one_row_with_both_policies() -> None:
    ledger = Ledger()
    say(ledger, ledger.open(SegmentReason.START), [1], ([2, 3], "a"), ([4, 9], "b"))
    (row,) = ledger.rows()
    assert row.tokens == [1, 2, 3, 4, 9]
    assert row.versions == [(1, 3, "a"), (3, 5, "b")]
    assert [span.reason for span in ledger.record().segments[0].spans] == ["", "", "abort_resume"]
    assert verify_ledger(ledger.record()).ok


def test_segments_are_rows_of_their_own() -> None:
    ledger = Ledger()
    first = ledger.open(SegmentReason.COMPACTION)
    second = ledger.open(SegmentReason.COMPACTION)
    say(ledger, first, [1], ([2], ""))
    say(ledger, second, [1, 7], ([3], ""))
    say(ledger, first, [8], ([4], ""))
    assert [(row.reason, row.tokens) for row in ledger.rows()] == [
        ("start", [1, 2, 8, 4]),
        ("compaction", [1, 7, 3]),
    ]
    assert verify_ledger(ledger.record()).ok


def test_a_segment_without_a_turn_leaves_nothing() -> None:
    ledger = Ledger()
    ledger.open(SegmentReason.START)
    assert ledger.rows() == []
    assert ledger.record().segments == []


@pytest.mark.parametrize("reason", [SegmentReason.START, SegmentReason.ABORT_RESUME])
def test_what_is_no_reason_for_a_segment(reason: SegmentReason) -> None:
    ledger = Ledger()
    ledger.open(SegmentReason.START)
    with pytest.raises(ValueError, match=reason):
        ledger.open(reason)


def test_a_turn_is_appended_whole_or_not_at_all() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    with pytest.raises(ValueError, match="2 ids with 1 log-probabilities"):
        ledger.append(segment, [1], [Piece(Sampled([2, 3], [-1.0], "stop"), 0)])
    assert ledger.rows() == []
    assert ledger.turns == []


def test_a_prompt_that_grows_does_not_change_the_ledger() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1], ([2], ""))
    ledger.prompt(segment, []).grow(array("i", [99]))
    assert ledger.rows()[0].tokens == [1, 2]


def test_a_row_is_as_it_was_when_it_was_looked_at() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    say(ledger, segment, [1], ([2], "a"), ([3, 9], "b"))
    (node,), (before,) = ledger.nodes(toy_tokenizer()), ledger.rows()
    say(ledger, segment, [4, 5], ([6, 9], "c"))
    assert (node.tokens, node.masked_tokens, node.logprobs) == (before.tokens, before.masks, before.logprobs)
    assert node.metadata["versions"] == before.versions
    assert ledger.rows()[0].logprobs == [1.0, -0.5, -0.5, -0.75, 1.0, 1.0, -0.5, -0.75]


def test_what_was_sampled_in_a_turn_of_any_segment() -> None:
    ledger = Ledger()
    first, second = ledger.open(SegmentReason.START), ledger.open(SegmentReason.COMPACTION)
    say(ledger, first, [1], ([2, 3], "a"), ([9], "b"))
    say(ledger, second, [1, 7], ([4], "b"))
    say(ledger, first, [8], ([5, 9], "b"))
    turns = [
        [(p.sampled.ids.tolist(), p.sampled.logprobs.tolist()) for p in pieces_of(t)] for t in ledger.sampled_since(0)
    ]
    assert turns == [[([2, 3], [-0.5, -0.75]), ([9], [-0.5])], [([4], [-0.5])], [([5, 9], [-0.5, -0.75])]]
    assert [pieces_of(turn) for turn in ledger.sampled_since(2)] == [pieces_of(ledger.sampled_since(0)[2])]


def test_a_record_survives_json_and_is_compact() -> None:
    ledger = Ledger(stop_ids=[9])
    segment = ledger.open(SegmentReason.START)
    for number in range(20):
        say(ledger, segment, list(range(100_000, 100_050)), ([200_000 + number] * 50, "v1"))
    raw = msgspec.json.encode(ledger.record())
    again = msgspec.json.decode(raw, type=LedgerRecord)
    assert again == ledger.record()
    assert verify_ledger(again).ok
    assert len(raw) / len(ledger.rows()[0].tokens) < 15  # 9 bytes a token as base64, and the turns


def test_an_own_row_on_disk_is_its_four_fields() -> None:
    row = TokenRow(tokens=[1], masks=[-100])
    assert msgspec.json.encode(row) == b'{"tokens":[1],"masks":[-100],"logprobs":null,"source":"placeholder"}'


def test_a_fork_trains_its_own_turns_alone() -> None:
    """Everything up to the fork is one prompt, and the rest is as it was sampled, an aborted request included."""
    ledger = Ledger(stop_ids=[9])
    say(ledger, ledger.open(SegmentReason.START), [1, 2], ([3, 9], "v1"))
    say(ledger, 0, [4], ([5, 9], "v1"))
    say(ledger, 0, [6], ([7], "v1"), ([8, 9], "v2"))
    record = ledger.forked(2).record()
    assert not verify_ledger(ledger.record(), forked=True).ok
    assert verify_ledger(record, forked=True).ok
    assert not verify_ledger(record).ok
    (row,) = record_rows(record, "g/3")
    assert row.tokens == [1, 2, 3, 9, 4, 5, 9, 6, 7, 8, 9]
    assert row.masks == [-100] * 8 + [7, 8, 9]
    assert row.logprobs == [1.0] * 8 + [-0.5, -0.5, -0.75]
    assert (row.reason, row.versions) == ("branch", [(8, 9, "v1"), (9, 11, "v2")])
    assert [(span.kind, span.sequence_id, span.length) for span in row.spans] == [
        ("prompt", "g/3:1", 8), ("sampled", "g/3:1", 1), ("sampled", "g/3:1.1", 2)
    ]  # fmt: skip
    assert [(turn.number, turn.prompt_tokens, turn.sampled_tokens) for turn in record.turns] == [(1, 8, 3)]


def test_a_fork_whose_history_was_rewritten() -> None:
    """Turns of other segments leave nothing in the record, and the reason of the first one is the real one."""
    ledger = Ledger()
    say(ledger, ledger.open(SegmentReason.START), [1, 2], ([3], ""))
    say(ledger, ledger.open(SegmentReason.TEMPLATE_REWRITE), [1, 4], ([5], ""))
    say(ledger, 1, [6], ([7], ""))
    assert [segment.reason for segment in ledger.forked(1).record().segments] == ["template_rewrite"]
    record = ledger.forked(2).record()
    assert verify_ledger(record, forked=True).ok
    assert [(row.reason, row.tokens, row.masks) for row in record_rows(record)] == [
        ("branch", [1, 4, 5, 6, 7], [-100, -100, -100, -100, 7])
    ]
    assert ledger.forked(3).record().segments == []
