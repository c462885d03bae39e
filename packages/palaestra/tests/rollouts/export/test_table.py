"""The table of tasks: means over scored rollouts only, whatever the texts hold."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from recorded import META, broken, rollout, sky

from palaestra.rollouts.export.table import MarkdownExporter, TableExporter
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import Label, Outcome

ALL = replace(META, everything=True)


def table(*groups: Group, everything: bool = True) -> list[dict[str, str]]:
    out = io.BytesIO()
    TableExporter().export(groups, out, replace(META, everything=everything))
    assert not out.closed
    return list(csv.DictReader(io.StringIO(out.getvalue().decode(), newline="")))


def test_means_are_over_scored_rollouts_only() -> None:
    task, failed, total = table(sky(), broken())
    assert (task["rollouts"], task["scored"], task["mean"], task["best"]) == ("4", "3", "0.416667", "1")
    assert (task["rewards"], task["outcomes"]) == ("1 0.25 0", "natural:2 max_turns:1 infra_error:1")
    assert task["error"] == "SlotLost: it died at once"
    assert (failed["rollouts"], failed["mean"], failed["error"]) == ("0", "", "PrepareError: set-up | failed")
    assert (total["task"], total["rollouts"], total["scored"], total["rewards"]) == ("TOTAL", "4", "3", "")


def test_official_verdicts_and_labels_have_columns() -> None:
    forged = rollout(0, [], 0.0, official=1.0, labels=[Label("tests_edited", "a"), Label("tests_edited", "b")])
    honest = rollout(1, [], 1.0, labels=[Label("audited_call", "c")])
    unscored = rollout(2, [], None, outcome=Outcome.CANCELLED)
    groups = [Group(group_id=f"g{n}", number=n, task_id=f"t{n}", trajectories=found)
              for n, found in enumerate([[forged, honest, unscored], [honest]])]  # fmt: skip
    judged, plain, total = table(*groups)
    assert (judged["mean"], judged["official"]) == ("0.5", "1")
    assert judged["labels"] == "tests_edited:1 audited_call:1"
    assert (plain["official"], plain["labels"]) == ("", "audited_call:1")
    assert (total["official"], total["labels"]) == ("1", "audited_call:2 tests_edited:1")


def test_only_the_scored_ones_on_request() -> None:
    task, _ = table(sky(), everything=False)
    assert (task["rollouts"], task["scored"], task["error"]) == ("3", "3", "")


def test_texts_cannot_break_the_table() -> None:
    nasty = 'a|b,"c"\nd\\'
    group = Group(group_id="g", number=0, task_id=nasty, trajectories=[rollout(0, [], None, outcome=Outcome.CANCELLED)])
    line, _ = table(group)
    assert line["task"] == nasty
    out = io.BytesIO()
    MarkdownExporter().export([group], out, ALL)
    row = out.getvalue().decode().splitlines()[2]
    assert row.startswith('| a\\|b,"c" d\\\\ | 1 | 0 |')
    assert len(out.getvalue().decode().splitlines()) == 4


def test_a_carriage_return_stays_in_its_cell() -> None:
    names = ["a\rb", "a\r\nb", "\r", "b\r\n"]
    groups = [Group(group_id=f"g{n}", number=n, task_id=name, trajectories=[]) for n, name in enumerate(names)]
    assert [line["task"] for line in table(*groups)] == [*names, "TOTAL"]
    out = io.BytesIO()
    MarkdownExporter().export(groups, out, ALL)
    assert len(out.getvalue().decode().splitlines()) == 3 + len(names)
