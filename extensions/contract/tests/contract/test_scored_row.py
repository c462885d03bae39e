"""The row that `_build_scored_item` returns is a mapping that also unpacks into a pair."""

from __future__ import annotations

import json
from collections.abc import Iterator

from golden_messages import raises
from palaestra_contract.scored_data import ScoredRow, checked_row
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON


def made() -> ScoredRow:
    return ScoredRow(scores=1.0, messages=[])


def test_a_row_unpacks_into_itself_and_an_empty_backlog() -> None:
    row, backlog = made()
    assert row == {"scores": 1.0, "messages": []}
    assert backlog == []
    pairs = [(row, backlog) for row, backlog in [made()]]
    assert pairs == [({"scores": 1.0, "messages": []}, [])]


def test_every_other_iteration_yields_keys() -> None:
    row = made()
    assert sorted(row) == ["messages", "scores"]
    assert list(row) == ["scores", "messages"]
    assert [key for key in row] == ["scores", "messages"]  # noqa: C416
    assert set(row) == {"scores", "messages"}
    assert {**row} == dict(row) == json.loads(json.dumps(row))

    def keys() -> Iterator[JSON]:
        yield from row

    assert list(keys()) == ["scores", "messages"]


def test_a_group_of_one_row_stands_for_the_row() -> None:
    said: JSON = [{"role": "assistant", "content": "a"}]
    group: JSON = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "messages": [said]}
    assert checked_row(group, "one") == {"tokens": [1, 2], "masks": [-100, 2], "scores": 1.0, "messages": said}
    with raises(TaskError):
        checked_row({"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [1.0, 0.0]}, "two")
