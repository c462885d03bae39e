"""A run is read back one group at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import broken, sky, write_run

from golden_messages import raises
from palaestra.rollouts.journal.reader import Recording, open_recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.errors import ConfigError


def bare(number: int) -> Group:
    return Group(group_id=f"{number:06d}-t", number=number, task_id="t")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_same_groups_in_item_order_whatever_ended_first(order: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", sky(), broken(), order=order)
    recording = open_recording(folder)
    assert list(recording) == list(recording) == [sky(), broken()]
    assert (recording.finished, recording.unfinished) == (2, 0)
    assert (recording.meta.run_id, recording.meta.env, recording.meta.seed) == ("run-1", "weather", 7)


def test_every_prefix_of_a_journal_gives_the_groups_that_end_in_it(tmp_path: Path) -> None:
    journal = write_run(tmp_path / "run", sky(), bare(1), bare(2), order=(2, 0, 1)) / "journal.jsonl"
    whole, groups = journal.read_bytes(), list(Recording(journal))
    ends, offset = {}, 0
    for line in whole.splitlines(keepends=True):
        offset += len(line)
        if b'"event":"group_end"' in line:
            ends[json.loads(line)["number"]] = offset - 1  # a line without its newline counts
    assert list(ends) == [2, 0, 1]
    for length in range(whole.index(b"\n"), len(whole) + 1, 97):
        journal.write_bytes(whole[:length])
        assert list(Recording(journal)) == [group for group in groups if ends[group.number] <= length]


def test_groups_that_had_not_ended_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", bare(0), bare(1), bare(2), order=(1,), ended=False)
    recording = open_recording(folder)
    assert (recording.finished, recording.unfinished) == (1, 2)
    assert [group.number for group in recording] == [1]


def test_a_group_that_was_taken_up_again_is_none_of_the_finished(tmp_path: Path) -> None:
    journal = write_run(tmp_path / "run", bare(0), bare(1)) / "journal.jsonl"
    again = next(line for line in journal.read_bytes().splitlines(keepends=True) if b'"event":"group",' in line)
    journal.write_bytes(journal.read_bytes() + again)
    recording = Recording(journal)
    assert (recording.finished, recording.unfinished) == (1, 1)
    assert list(recording.numbers) == [group.number for group in recording]


def test_two_groups_with_one_number_are_damage(tmp_path: Path) -> None:
    first, second = (
        write_run(tmp_path / name, group) / "journal.jsonl" for name, group in (("a", bare(0)), ("b", sky()))
    )
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with raises(ConfigError, "000000-t", "000000-sky"):
        Recording(first)


def test_a_group_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    journal = write_run(tmp_path / "run", bare(-1), sky()) / "journal.jsonl"
    stream = iter(Recording(journal))
    assert next(stream).number == -1
    with journal.open("r+b") as file:
        place = file.read().index(b"two calls")
        file.seek(place)
        file.write(b"2   calls")
    assert next(stream).trajectories[1].messages[2]["reasoning_content"] == "Two cities,\n2   calls."


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", sky(), broken())
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:40] + b"\n"
    (folder / "journal.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=r"line 3 is damaged"):
        open_recording(folder)


def test_what_is_no_run_folder_is_said_and_the_latest_run_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "env--m" / "20260801", broken())
    with raises(ConfigError, "runs/env", "--m", "/20260801"):
        open_recording(Path("nowhere"))
    with pytest.raises(ConfigError, match=r"has no journal\.jsonl.*20260801"):
        open_recording(Path("runs"))


@pytest.mark.parametrize("content", [b"", b'{"event": "end", "reason": "done"}\n', b"PK\3\4 no text at all"])
def test_a_file_that_is_no_journal_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content)
    with raises(ConfigError):
        open_recording(tmp_path)


def test_a_journal_of_a_later_form_is_refused(tmp_path: Path) -> None:
    journal = write_run(tmp_path, broken()) / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"run_id"', b'"schema":"palaestra.journal/9","run_id"', 1))
    with pytest.raises(ConfigError, match=r"palaestra\.journal/9"):
        open_recording(tmp_path)


def test_a_rollout_of_a_group_that_never_began_is_said_in_words(tmp_path: Path) -> None:
    journal = write_run(tmp_path, sky()) / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"event":"group",' not in line))
    with raises(ConfigError, "000000-sky"):
        Recording(journal)


def test_what_is_no_journal_is_not_called_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text("tokens\nmasks\n")
    with raises(ConfigError):
        Recording(path)
