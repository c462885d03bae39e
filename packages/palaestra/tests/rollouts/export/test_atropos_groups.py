"""The format `atropos` is the file that a run writes, made again."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import META, TWO_CALLS, broken, rollout, sky

from palaestra.rollouts.export.atropos import AtroposExporter, GroupsFile
from palaestra.rollouts.records import Group


@pytest.mark.parametrize("messages", [True, False])
def test_the_same_bytes_as_the_run_wrote(messages: bool, tmp_path: Path) -> None:
    with GroupsFile(tmp_path / "groups.jsonl", env=META.env, model=META.model, messages=messages) as file:
        for group in (broken(), sky()):
            file.add(group)
    out = io.BytesIO()
    meta = replace(META, config={"env": {"include_messages": messages}})
    report = AtroposExporter().export([sky(), broken()], out, meta)
    assert out.getvalue() == file.path.read_bytes()
    assert (report.records, report.rollouts, report.to_dict()["left_out"]) == (1, 3, {"unscored": 1})


@pytest.mark.parametrize(("everything", "lines"), [(False, 1), (True, 2)])
def test_groups_of_equal_scores_are_left_out_where_the_run_left_them_out(everything: bool, lines: int) -> None:
    equal = Group(group_id="e", number=1, task_id="e", trajectories=[rollout(n, TWO_CALLS, 0.5) for n in range(2)])
    out = io.BytesIO()
    meta = replace(META, config={"env": {"ensure_scores_are_not_same": True}}, everything=everything)
    report = AtroposExporter().export([sky(), equal], out, meta)
    assert len(out.getvalue().splitlines()) == lines
    assert report.left_out["in a group of equal scores"] == (0 if everything else 2)
