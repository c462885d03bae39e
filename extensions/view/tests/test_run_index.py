"""The index of a journal: whole, growing, resumed, damaged, cached; its filters and its figures."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from recorded import TWO_CALLS, call, fields, groups, result, rollout, sky, write_run

from golden_messages import check_message, raises
from palaestra.rollouts.events import (
    JOURNAL_SCHEMA,
    AttemptDiscarded,
    GroupEnded,
    GroupStarted,
    RolloutEnded,
    RunResumed,
    TurnTaken,
)
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.metrics import Figures
from palaestra.rollouts.records import Group, SubagentRecord
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome
from palaestra_tokens.ledger import TokenRow
from palaestra_view.comparison import compared
from palaestra_view.overview import overview
from palaestra_view.rollout_record import rollout_record
from palaestra_view.run_index import RunIndex, number_of
from palaestra_view.summary import run_summary


def filled(path: Path, store: Path | None = None) -> RunIndex:
    index = RunIndex(path / "journal.jsonl", store)
    while index.update():
        continue
    return index


def many(tmp_path: Path, seed: int = 3, tasks: int = 20, **config: JSON) -> Path:
    """A run with rewards, verdicts, labels and failures of all kinds."""
    rng = random.Random(seed)
    made = []
    for number in range(tasks):
        group_id = f"{number:06}-t{number}"
        rollouts = [
            rollout(
                index,
                TWO_CALLS,
                None if (lost := rng.random() < 0.1) else rng.choice([0.0, 0.5, 1.0]),
                rollout_id=f"{group_id}/{index}", group_id=group_id, task_id=f"t{number}",
                outcome=Outcome.INFRA_ERROR if lost else rng.choice([Outcome.NATURAL, Outcome.MAX_TURNS]),
                blame=Blame.SANDBOX if lost else None, error="it died" if lost else "",
                official=rng.choice([None, 1.0, 0.0]),
                labels=[Label("edited", "a.py", True)] if rng.random() < 0.2 else [],
                metrics={"speed": rng.random()}, prompt_tokens=rng.randrange(1000),
                detail={"category": rng.choice("ab")},
            )
            for index in range(4)
        ]  # fmt: skip
        made.append(Group(group_id=group_id, number=number, task_id=f"t{number}", trajectories=rollouts))
    return write_run(tmp_path, *made, config={"env": {"group_size": 4}, **config})


def test_each_rollout_comes_back_as_the_journal_has_it(tmp_path: Path) -> None:
    index = filled(write_run(tmp_path / "run", *groups()))
    total, rows = index.rows()
    assert (total, [row["id"] for row in rows]) == (4, [each.rollout_id for each in sky().trajectories])
    assert [index.trajectory(row["id"]) for row in rows] == sky().trajectories
    assert rows[0]["answer"] == "Oslo −3°, Rome 21°."
    assert [row["segments"] for row in rows] == [2, 1, 0, 0]
    assert index.groups()[1][1]["error"] == "PrepareError: set-up | failed"
    assert index.trajectory("no such") is None
    assert index.neighbours("000000-sky/1") == ("000000-sky/0", "000000-sky/2")


def test_an_index_that_grows_byte_by_byte_is_that_of_the_whole_file(tmp_path: Path) -> None:
    whole = (many(tmp_path / "whole") / "journal.jsonl").read_bytes()
    expected = filled(tmp_path / "whole")
    growing = tmp_path / "growing" / "journal.jsonl"
    growing.parent.mkdir()
    growing.touch()
    index, rng, seen = RunIndex(growing), random.Random(5), [0]
    places = sorted(rng.sample(range(len(whole)), 200))
    for start, stop in itertools.pairwise([0, *places, len(whole)]):
        with growing.open("ab") as file:
            file.write(whole[start:stop])
        index.update(10.0)
        seen.append(index.rows()[0])
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert index.rows(limit=1000) == expected.rows(limit=1000)
    assert index.groups() == expected.groups()
    assert index.facts() == expected.facts()


def test_a_slice_of_no_time_makes_progress(tmp_path: Path) -> None:
    index = RunIndex(many(tmp_path) / "journal.jsonl")
    places = []
    while index.update(0.0):
        places.append(index.progress[0])
    assert len(places) > 100
    assert places[-1] == index.progress[1]


def test_rollouts_in_flight_and_discarded_attempts_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write_run(tmp_path, ended=False)
    journal = Journal(path)
    journal.append(GroupStarted(group=Group(**{**fields(sky()), "trajectories": []})))
    for turn, message in enumerate(TWO_CALLS[:2]):
        journal.append(TurnTaken(rollout_id="000000-sky/0", turn=turn, messages=[message]))
    index = filled(tmp_path)
    assert [each.turn for each in index.turns_so_far("000000-sky/0")] == [0, 1]
    assert index.groups()[1][0]["cells"] == [["000000-sky/0", 0, None, None, None, 0]]
    assert index.totals()["flying"] == 1
    lost = rollout(0, TWO_CALLS, None, outcome=Outcome.INFRA_ERROR, blame=Blame.SANDBOX, error="it died")
    journal.append(AttemptDiscarded(trajectory=lost))
    while index.update():
        continue
    assert (index.turns_so_far("000000-sky/0"), index.totals()["flying"]) == ([], 0)
    assert index.attempts("000000-sky/0") == [{"outcome": "infra_error", "error": "it died"}]
    journal.append(RolloutEnded(trajectory=rollout(0, TWO_CALLS, 1.0)))
    journal.close()
    while index.update():
        continue
    assert index.rows()[1][0]["reward"] == 1.0


def test_a_resumed_group_loses_the_rollouts_that_were_cut_off(tmp_path: Path) -> None:
    cut = rollout(1, TWO_CALLS, None, outcome=Outcome.CANCELLED, blame=Blame.RUN)
    group = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, TWO_CALLS, 0.5), cut])
    write_run(tmp_path, group, ended=False)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(RunResumed(config={}))
    journal.append(GroupStarted(group=Group(group_id="000000-sky", number=0, task_id="sky")))
    index = filled(tmp_path)
    assert [row["reward"] for row in index.rows()[1]] == [0.5]
    journal.append(RolloutEnded(trajectory=rollout(1, TWO_CALLS, 1.0)))
    journal.append(GroupEnded(group_id="000000-sky", number=0))
    journal.close()
    while index.update():
        continue
    assert [row["reward"] for row in index.rows()[1]] == [0.5, 1.0]
    assert [each.reward for each in next(iter(Recording(tmp_path / "journal.jsonl"))).trajectories] == [0.5, 1.0]


def test_the_cached_index_is_used_again_but_not_for_another_file(tmp_path: Path) -> None:
    run, store = many(tmp_path / "run"), tmp_path / "store"
    first = filled(run, store)
    before = {path: path.read_bytes() for path in run.iterdir()}
    again = RunIndex(run / "journal.jsonl", store)
    assert again.progress == first.progress
    assert again.rows() == first.rows()
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    (cached,) = store.iterdir()
    assert cached.stat().st_mode & 0o777 == 0o600
    first.close()
    again.close()
    other = many(tmp_path / "other", seed=9)
    os.replace(other / "journal.jsonl", run / "journal.jsonl")
    assert filled(run, store).rows() == filled_anew(run).rows()
    cached.write_bytes(b"no database" * 100)
    assert filled(run, store).rows() == filled_anew(run).rows()


def filled_anew(path: Path) -> RunIndex:
    return filled(path, None)


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = many(tmp_path) / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if b'"event":"rollout"' in line)
    lines[first] = lines[first][: len(lines[first]) // 2] + b"\n"
    path.write_bytes(b"".join(lines))
    index = filled(tmp_path)
    assert index.rows()[0] == 79
    assert run_summary(index, "run")["damaged"] == 1


def test_numbers_of_more_than_64_bits_are_damage(tmp_path: Path) -> None:
    run = write_run(tmp_path, sky())
    path = run / "journal.jsonl"
    turn = json.dumps({"event": "messages", "rollout_id": f"g/{'9' * 5000}", "turn": 0, "messages": []})
    lines = path.read_text().replace('"index":1,', f'"index":{10**30},').splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], turn + "\n", *lines[-1:]]))
    index = filled(run)
    assert (index.rows()[0], run_summary(index, "run")["damaged"]) == (3, 1)
    assert index.groups()[0] == 1
    assert number_of("9" * 5000) == 0


def test_invalid_utf_8_in_a_text_loses_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path, sky())
    path = run / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b"sunny", b"sun\xff\xfe"))
    index = filled(run)
    texts = [str(message["content"]) for message in index.trajectory("000000-sky/0").messages]  # type: ignore[union-attr]
    assert any("sun\ufffd\ufffd" in text for text in texts)
    assert index.rows()[0] == 4


@pytest.mark.parametrize("content", ["", "no journal\n", '{"event":"group"}\n', "[1]\n"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    index = RunIndex(path)
    if not content:
        assert index.update() is False
        return
    with pytest.raises(ConfigError, match="journal"):
        index.update()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to(many(tmp_path / "run") / "journal.jsonl")
    with pytest.raises(OSError, match="symbolic"):
        RunIndex(tmp_path / "journal.jsonl").update()


FILTERS = {
    (("reward", "<", 1.0),): lambda row: row["reward"] is not None and row["reward"] < 1,
    (("reward", "=", ""),): lambda row: row["reward"] is None,
    (("reward", "!=", ""),): lambda row: row["reward"] is not None,
    (("outcome", ":", "MAX"),): lambda row: "max" in row["outcome"],
    (("outcome", "=", "natural"), ("metric.speed", ">=", 0.5)): lambda row: (
        row["outcome"] == "natural" and row["metrics"]["speed"] >= 0.5
    ),
    (("label", "=", "edited"),): lambda row: "edited" in row["labels"],
    (("label", "=", ""),): lambda row: not row["labels"],
    (("differs", "=", 1.0),): lambda row: row["official"] is not None and row["official"] != row["reward"],
    (("any", ":", "T1"),): lambda row: "t1" in row["task"] or "t1" in row["id"],
    (("category", "=", "a"), ("tokens", ">", 500.0)): lambda row: row["category"] == "a" and row["prompt_tokens"] > 500,
    (("blame", "=", "sandbox"),): lambda row: row["blame"] == "sandbox",
    (("error", ":", "' OR 1=1 --"),): lambda row: False,
}


@pytest.mark.parametrize("where", FILTERS)
def test_a_filter_finds_what_a_plain_loop_finds(
    tmp_path: Path, where: tuple[tuple[str, str, str | float], ...]
) -> None:
    index = filled(many(tmp_path))
    _, every = index.rows(limit=1000)
    expected = [row["id"] for row in every if FILTERS[where](row)]
    total, found = index.rows(where, limit=1000)
    assert (total, [row["id"] for row in found]) == (len(expected), expected)
    assert 0 < total < 80 or "OR" in str(where)


def test_pages_and_orders(tmp_path: Path) -> None:
    index = filled(many(tmp_path))
    _, every = index.rows(sort="metric.speed", descending=True, limit=1000)
    speeds = [row["metrics"]["speed"] for row in every]
    assert speeds == sorted(speeds, reverse=True)
    paged = [
        row
        for start in range(0, 80, 7)
        for row in index.rows(sort="metric.speed", descending=True, offset=start, limit=7)[1]
    ]
    assert paged == every
    for wrong in ("nothing", "reward; DROP TABLE rollouts"):
        with raises(ConfigError):
            index.rows(sort=wrong)
    with raises(ConfigError):
        index.rows([("reward", "~", 1.0)])
    with pytest.raises(ConfigError, match="needs a number"):
        index.rows([("reward", "<", "many")])


def test_a_search_finds_texts_in_all_places_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    index = filled(write_run(tmp_path / "sky", sky()))
    assert [each for each, _ in index.search("OSLO")[0]] == ["000000-sky/3", "000000-sky/1", "000000-sky/0"]
    assert "degrees" in index.search('"degrees": -3')[0][0][1]
    assert [each for each, _ in index.search("two cities,\ntwo")[0]] == ["000000-sky/1", "000000-sky/0"]
    assert index.search('{"city": "Oslo"}')[0]
    assert len(index.search("Rome 21°.")[0]) == 2
    assert index.search("nowhere") == ([], 4, 4)
    assert index.search("-3")[0] == [("000000-sky/1", "-3"), ("000000-sky/0", "-3")]
    large = filled(many(tmp_path / "many"))
    found, after = [], 0
    while after < 80:
        part, after, total = large.search("Oslo", after=after, seconds=0.0)
        found += part
    assert (len(found), total) == (80, 80)


TERMINAL = {"output": 'first line\nTypeError: caf\u00e9 is \\ "None"', "exit_code": 17, "error": None}


def test_a_search_finds_what_was_said_and_not_the_json_around_it(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    listed = call(1, json.dumps({"command": "ls\n-a \u2026"}), "terminal")
    said: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}, image]},
        {"role": "assistant", "content": "", "reasoning": "I think.", "tool_calls": [listed]},
        result(1, json.dumps(TERMINAL)),
        result(2, "plain [text]"),
        {"role": "assistant", "content": None, "tool_calls": [call(3, '{"broken": ', "patch")]},
    ]
    agent = SubagentRecord(
        number=1, turn=1, goal="g", messages=[{"role": "assistant", "content": "below"}], outcome=Outcome.NATURAL
    )
    one = rollout(0, said, 1.0, subagents=[agent], detail={"secret": "detail"}, error="gone wrong")
    index = filled(write_run(tmp_path, Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[one])))
    for text, passage in {
        "fix": "Fix it.", "think": "I think.", "TERMINAL": "terminal", "ls\n-a": "ls -a …", "-a …": "ls -a …",
        "café": 'first line TypeError: café is \\ "None"', '\\ "none': 'first line TypeError: café is \\ "None"',
        "line\ntypeerror": 'first line TypeError: café is \\ "None"', "17": "17", "[text": "plain [text]",
        "broken": '{"broken":', "below": "below", '"error": null': None, '"exit_code": 17': None,
    }.items():  # fmt: skip
        found = index.search(text)[0]
        assert len(found) == 1, text
        assert found[0][1] == passage or (passage is None and text in found[0][1]), text
    keys = ("reward", "rollout_id", "exit_code", "command", "role", "tool_calls", "null", "secret", "wrong", "QUJD")
    assert [key for key in keys if index.search(key)[0]] == []


def test_a_failed_group_has_the_blame_that_the_journal_has(tmp_path: Path) -> None:
    failed = Group(group_id="000000-sky", number=0, task_id="sky", error="TaskError: no tools", blame=Blame.TASK)
    index = filled(write_run(tmp_path, failed))
    assert overview(index)["causes"] == ["1 group failed (task), first 000000-sky: TaskError: no tools"]
    (group,) = Recording(tmp_path / "journal.jsonl")
    assert group.blame is Blame.TASK


def test_the_figures_are_those_of_the_run_itself(tmp_path: Path) -> None:
    run = many(tmp_path)
    figures = Figures(4)
    for group in Recording(run / "journal.jsonl"):
        figures.add(group)
    numbers, found = figures.numbers(), run_summary(filled(run), "run")
    assert found["reward"]["mean"] == pytest.approx(numbers["reward/mean"])
    assert found["reward"]["interval"] == pytest.approx([numbers["reward/mean/low"], numbers["reward/mean/high"]])
    assert found["scored"] == numbers["scored"]
    assert found["planned"] == numbers["rollouts_planned"]
    assert found["differs"] > 0
    assert {f"outcomes/{name}": n for name, n in found["outcomes"].items()}.items() <= numbers.items()
    assert {f"blame/{name}": n for name, n in found["blame"].items()}.items() <= numbers.items()
    assert {f"labels/{name}": n for name, n in found["labels"].items()}.items() <= numbers.items()
    assert found["criteria"]["speed"] == pytest.approx(numbers["metric/speed"])
    assert found["totals"]["prompt_tokens"] == numbers["tokens/prompt"]
    assert found["official"]["mean"] == pytest.approx(numbers["official/mean"])


def scored() -> Group:
    return Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, TWO_CALLS, 1.0)])


def test_runs_are_compared_as_palaestra_compare_does(tmp_path: Path) -> None:
    from palaestra.rollouts.observe.compare_runs import RunScores, compare

    runs = {name: many(tmp_path / name, seed) for seed, name in enumerate(("one", "two", "three"))}
    found = compared({name: filled(path) for name, path in runs.items()}, "one")
    assert set(found) == {"two", "three"}
    scores = {name: RunScores.of(Recording(path / "journal.jsonl")) for name, path in runs.items()}
    for name in ("two", "three"):
        expected = compare(scores[name], scores["one"])
        assert found[name]["difference"] == pytest.approx(expected.difference)
        assert found[name]["interval"] == pytest.approx([expected.low, expected.high])
        assert found[name]["tasks"] == len(expected.pairs)
        check_message(expected.undecided, "rollouts")
        assert found[name]["undecided"] == expected.undecided
        whole = compare(scores[name], scores["one"], unscored=0.0)
        assert whole.pairs != expected.pairs
        counted = found[name]["with_unscored"]
        assert counted["difference"] == pytest.approx(whole.difference)
        assert counted["interval"] == pytest.approx([whole.low, whole.high])
        assert counted["tasks"] == len(whole.pairs)
    whole_runs = {name: filled(write_run(tmp_path / f"whole-{name}", scored())) for name in ("a", "b")}
    again = compared(whole_runs, "a")["b"]
    assert (again["with_unscored"], again["counterfactual"], again["undecided"]) == (
        None,
        False,
        "the interval contains 0",
    )


def test_a_line_of_the_format_is_what_the_journal_writes(tmp_path: Path) -> None:
    """The index reads sizes from the text of packed tokens; both must agree."""
    index = filled(write_run(tmp_path, sky()))
    for row in index.rows()[1]:
        ledger = next(each.ledger for each in sky().trajectories if each.rollout_id == row["id"])
        tokens = 0 if ledger is None else sum(len(segment.tokens) // 4 for segment in ledger.segments)
        assert row["exact"] == tokens
    assert msgspec.json.encode(index.rows()[1])


def test_an_index_is_closed_while_another_thread_fills_it(tmp_path: Path) -> None:
    """SQLite crashes the process if a connection is closed during a statement."""
    first = {"event": "run", "schema": JOURNAL_SCHEMA, "run_id": "r", "env": "e", "model": "m", "seed": 0, "config": {}}
    lines = [first, *({"event": "resume", "at": float(number)} for number in range(5000))]
    (tmp_path / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for number in range(20):
        index = RunIndex(tmp_path / "journal.jsonl")
        with ThreadPoolExecutor(1) as pool:
            filled = pool.submit(index.update, 5.0)
            time.sleep(0.001 * number)
            index.close()
            filled.result(10)
        assert not index.update()


@pytest.mark.parametrize(("source", "shown"), [("placeholder", False), ("environment", True)])
def test_tokens_that_nobody_sampled_are_not_shown(tmp_path: Path, source: str, shown: bool) -> None:
    row = TokenRow(tokens=[0, 1, 2], masks=[-100, -100, 2], source=source)
    group_id = "000000-t0"
    one = rollout(0, TWO_CALLS, 1.0, rollout_id=f"{group_id}/0", group_id=group_id, task_id="t0", ledger=None, row=row)
    index = filled(write_run(tmp_path, Group(group_id=group_id, number=0, task_id="t0", trajectories=[one])))
    record = rollout_record(index, f"{group_id}/0")
    assert bool(record["tokens"]) == shown
