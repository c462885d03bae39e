"""What a run has used, and how its rollouts came about, is the same in every place that shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import rollout, write_run

from palaestra.cli.main import main
from palaestra.envs.run.run_table import FORMATS, table_row
from palaestra.rollouts.events import (
    JOURNAL_SCHEMA,
    AttemptDiscarded,
    GroupEnded,
    GroupStarted,
    JournalEvent,
    ReplyReceived,
    RolloutEnded,
    RolloutResumed,
    RunEnded,
    RunResumed,
    TurnTaken,
)
from palaestra.rollouts.finished_run import open_run
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.records import MODEL_COST, Beside, Group, Trajectory
from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade, write_grades
from palaestra_slots.core.types import Blame, Outcome

GROUP = Group(group_id="g", number=0, task_id="t")
CODE = {"provenance": {"environment_sha256": "a" * 64}}
OTHER = {"provenance": {"environment_sha256": "b" * 64}}


def ended(index: int, at: float, reward: float | None = 1.0, tokens: int = 10, **fields: object) -> Trajectory:
    one = rollout(index, [], reward, rollout_id=f"g/{index}", group_id="g", task_id="t", **fields)
    one.prompt_tokens, one.cost, one.beside = tokens, tokens / 10, Beside(started_at=at)
    return one


def failed(index: int, at: float, blame: Blame = Blame.ENGINE, tokens: int = 10) -> Trajectory:
    outcome = Outcome.INFRA_ERROR if blame is Blame.SANDBOX else Outcome.API_ERROR
    return ended(index, at, None, tokens, outcome=outcome, blame=blame, error="it failed")


def turn(index: int, number: int = 1, tokens: int = 10) -> TurnTaken:
    return TurnTaken(
        rollout_id=f"g/{index}", turn=number, messages=[], tokens=(tokens, 0), cost=tokens / 10 if tokens else None
    )


START, END = GroupStarted(group=GROUP), GroupEnded(group_id="g", number=0)
RESUME = RunResumed(schema=JOURNAL_SCHEMA, config=CODE)
HISTORIES: dict[str, tuple[list[JournalEvent], int]] = {
    "one attempt": ([START, RolloutEnded(trajectory=ended(0, 1.0)), END], 10),
    "an attempt that was replaced": (
        [START, AttemptDiscarded(trajectory=failed(0, 1.0, Blame.SANDBOX, 30)),
         RolloutEnded(trajectory=ended(0, 2.0)), END], 40,
    ),
    "a failure that a resumed run continued": (
        [START, turn(0), RolloutEnded(trajectory=failed(0, 1.0)), END, RESUME, START,
         RolloutResumed(rollout_id="g/0", turns=1), RolloutEnded(trajectory=ended(0, 2.0, tokens=25)), END], 25,
    ),
    "a failure that a resumed run repeated": (
        [START, RolloutEnded(trajectory=failed(0, 1.0)), END, RESUME, START,
         RolloutEnded(trajectory=ended(0, 2.0, tokens=25)), END], 35,
    ),
    "turns that were lost in a kill": (
        [START, turn(0, 1, 50), RESUME, START, RolloutEnded(trajectory=ended(0, 2.0)), END], 50,
    ),
    "in flight": ([START, turn(0), turn(0, 2), ReplyReceived(rollout_id="g/0", tokens=(5, 0), cost=0.5)], 25),
    "the same record twice": (
        [START, RolloutEnded(trajectory=ended(0, 1.0)), RolloutEnded(trajectory=ended(0, 1.0)), END], 10,
    ),
}  # fmt: skip


def played(folder: Path, *events: JournalEvent, reason: str = "done", **config: object) -> Path:
    write_run(folder, ended=False, config={"env": {"group_size": 1}, **CODE, **config})
    journal = Journal(folder / "journal.jsonl")
    for each in events:
        each.at = 2.0
        journal.append(each)
    if reason:
        journal.append(RunEnded(at=60.0, reason=reason))
    journal.close()
    return folder


def viewed(folder: Path) -> dict[str, object]:
    index = pytest.importorskip("palaestra_view.run_index").RunIndex(folder / "journal.jsonl")
    while index.update(0.0):  # one line at a time
        pass
    found: dict[str, object] = pytest.importorskip("palaestra_view.summary").run_summary(index, folder.name)
    return found


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("slots", [None, 3.0])
def test_every_place_shows_the_same_tokens_cost_and_time(tmp_path: Path, name: str, slots: float | None) -> None:
    events, tokens = HISTORIES[name]
    folder = played(tmp_path / "run", *events)
    if slots is not None:
        (folder / "metrics.jsonl").write_text(json.dumps({"rollouts": 1, "slots/cost": slots}) + "\n")
    run, row, totals = open_run(folder), table_row(folder), viewed(folder)["totals"]
    assert isinstance(totals, dict)
    cost = tokens / 10 + (slots or 0.0)
    assert run.status.prompt_tokens == row.prompt_tokens == totals["prompt_tokens"] == tokens
    assert run.metrics["tokens/prompt"] == tokens
    assert run.status.cost == row.cost == totals["cost"] == run.metrics["cost"] == pytest.approx(cost)
    assert run.status.seconds == row.seconds == run.metrics["seconds"]


def test_the_models_that_an_environment_asks_cost_the_same_everywhere(tmp_path: Path) -> None:
    one = ended(0, 1.0, metrics={MODEL_COST: 0.25})
    folder = played(tmp_path / "run", START, RolloutEnded(trajectory=one), END)
    # The grade asked no model again; what the rollout has cost stays.
    write_grades(folder, [Grade(schema=GRADE_SCHEMA, at=1.0, rollout_id="g/0", reward=0.0, metrics=one.metrics)])
    run = open_run(folder)
    (record,) = run.to_records()
    assert run.status.cost == run.metrics["cost"] == record["cost"] == table_row(folder).cost == 1.25


def test_an_incomplete_number_says_so(tmp_path: Path) -> None:
    some = played(tmp_path / "some", START, turn(0), turn(0, 2, 0), reason="")
    none = played(tmp_path / "none", START, turn(0, 1, 0), reason="")
    for form in ("text", "markdown", "latex", "html"):
        assert "at least 1.0000" in FORMATS[form]([table_row(some)])
        assert "at least 10" in FORMATS[form]([table_row(some)])
        assert "unknown" in FORMATS[form]([table_row(none)])


@pytest.mark.parametrize(
    ("events", "filtered", "again"),
    [
        ([START, RolloutEnded(trajectory=failed(0, 1.0, Blame.FILTER)), END], 1, 0),
        ([START, RolloutEnded(trajectory=failed(0, 1.0, Blame.FILTER)), END, RESUME, START, END], 1, 0),
        (HISTORIES["a failure that a resumed run continued"][0], 0, 1),
        (HISTORIES["a failure that a resumed run repeated"][0], 0, 1),
        (
            [START, AttemptDiscarded(trajectory=failed(0, 1.0, Blame.FILTER)), RolloutEnded(trajectory=ended(0, 2.0)),
             END], 0, 1,
        ),
        (HISTORIES["an attempt that was replaced"][0], 0, 0),
    ],
)  # fmt: skip
def test_results_that_are_not_the_first_answer_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], events: list[JournalEvent], filtered: int, again: int
) -> None:
    other = GroupStarted(group=Group(group_id="h", number=1, task_id="u"))
    scored = rollout(0, [], 1.0, rollout_id="h/0", group_id="h", task_id="u")
    whole = [*events, other, RolloutEnded(trajectory=scored), GroupEnded(group_id="h", number=1)]
    folder = played(tmp_path / "run", *whole)
    status, row, shown = open_run(folder).status, table_row(folder), viewed(folder)
    assert (status.filtered, row.filtered) == (filtered, filtered)
    assert status.asked_again == row.asked_again == shown["asked_again"] == again
    main(["compare", str(folder), str(folder)])
    line = capsys.readouterr().out.splitlines()[0]
    assert ("filter" in line, "asked again" in line) == (bool(filtered), bool(again))


def test_scores_of_several_versions_are_named_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = RunResumed(schema=JOURNAL_SCHEMA, config={"env": {"group_size": 2}, **OTHER})
    parts = [START, RolloutEnded(trajectory=ended(0, 1.0)), later, START, RolloutEnded(trajectory=ended(1, 2.0)), END]
    mixed, whole = played(tmp_path / "mixed", *parts), played(tmp_path / "whole", *parts[:2], END)

    def versions() -> tuple[dict[str, int], bool, bool, bool]:
        """The counts, and whether the table, `status` and `compare` warn."""
        status, shown = open_run(mixed).status, viewed(mixed)
        assert status.score_versions == dict(table_row(mixed).score_versions) == shown["score_versions"]
        said = []
        for words in (["runs", "--table", str(mixed)], ["status", str(mixed)], ["compare", str(mixed), str(whole)]):
            main(words)
            told = capsys.readouterr()
            said.append("different versions" in told.out + told.err)
        assert bool(shown["mixed_scores"]) == said[1]
        return status.score_versions, *said

    assert versions() == ({"a" * 8: 1, "b" * 8: 1}, True, True, True)
    grades = [
        Grade(schema=GRADE_SCHEMA, at=1.0, rollout_id=f"g/{index}", reward=1.0, version="b" * 64) for index in (0, 1)
    ]
    write_grades(mixed, grades[1:])
    assert versions()[1:] == (True, True, True), "the other of two rollouts was graded"
    write_grades(mixed, [Grade(schema=GRADE_SCHEMA, at=1.0, rollout_id="g/0", reward=1.0)])
    assert versions()[1:] == (True, True, True), "nobody knows which version graded it"
    write_grades(mixed, grades)
    assert versions() == ({"b" * 8: 2}, False, False, True), "the other run has the earlier score"
    write_grades(whole, grades[:1])
    assert versions()[3] is False
    write_grades(whole, [Grade(schema=GRADE_SCHEMA, at=2.0, rollout_id="g/0", reward=1.0, version="c" * 64)])
    assert versions()[3] is True, "the score has changed between the two grades"
