"""The journal: what is appended is read back, a torn tail is forgiven, damage is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_messages import raises
from palaestra.rollouts.events import GroupEnded, GroupStarted, RolloutEnded, RunStarted, TurnTaken
from palaestra.rollouts.journal.journal import Journal, plain, read_journal, without_secrets
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.resume.state import read_finished, repair
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Label, Outcome


def trajectory(group: int, index: int, text: str = "hi") -> Trajectory:
    return Trajectory(
        rollout_id=f"g{group}/{index}",
        group_id=f"g{group}",
        task_id=f"t{group}",
        index=index,
        messages=[{"role": "user", "content": text}],
        outcome=Outcome.NATURAL,
        reward=1.0,
    )


def write(path: Path, numbers: list[int]) -> None:
    journal = Journal(path)
    journal.append(RunStarted(run_id="r", env="e", model="m", seed=0))
    for number in numbers:
        journal.append(GroupStarted(group=Group(group_id=f"g{number}", number=number, task_id=f"t{number}")))
        journal.append(TurnTaken(rollout_id=f"g{number}/0", turn=0, messages=[]))
        for index in (1, 0):
            journal.append(RolloutEnded(trajectory=trajectory(number, index)))
        journal.append(GroupEnded(group_id=f"g{number}", number=number))
    journal.close()


def test_groups_come_back_in_item_order_with_their_trajectories(tmp_path: Path) -> None:
    write(tmp_path / "j.jsonl", [2, 0, 1])
    groups = list(Recording(tmp_path / "j.jsonl"))
    assert [group.number for group in groups] == [0, 1, 2]
    assert [t.index for t in groups[2].trajectories] == [0, 1]


def test_every_prefix_of_a_journal_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "whole.jsonl", [0, 1])
    data = (tmp_path / "whole.jsonl").read_bytes()
    cut = tmp_path / "cut.jsonl"
    for length in range(0, len(data), 7):
        cut.write_bytes(data[:length])
        list(read_journal(cut))
        for group in Recording(cut) if b"\n" in data[:length] else ():
            assert len(group.trajectories) == 2


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, [0])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"event": "messages"\n' + lines[2])
    with pytest.raises(ConfigError, match=r"line 2 is damaged"):
        list(read_journal(path))


async def test_concurrent_commits_cover_everything_appended_before_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")

    async def one(number: int) -> None:
        journal.append(GroupEnded(group_id=f"g{number}", number=number))
        await journal.commit()

    await asyncio.gather(*(one(number) for number in range(50)))
    journal.close()
    journal.close()
    assert sum(1 for _ in read_journal(tmp_path / "j.jsonl")) == 50


@settings(deadline=None)  # it waits for the disk
@given(st.text())
def test_any_text_of_a_model_survives(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "j.jsonl")
        journal = Journal(path)
        journal.append(RolloutEnded(trajectory=trajectory(0, 0, text)))
        journal.close()
        (event,) = read_journal(path)
        assert isinstance(event, RolloutEnded)
        assert event.trajectory.messages[0]["content"] == text


def test_secrets_are_kept_out_at_any_depth() -> None:
    given = {"openai": [{"api_key": "sk-1", "base_url": "u"}], "env": {"modal_secrets": "", "seed": 3}}
    kept = without_secrets(given)
    assert kept["openai"][0] == {"api_key": "***", "base_url": "u"}
    assert kept["env"]["seed"] == 3


@pytest.mark.parametrize("spoilt", [b"", b'{"event": "messa', b"\0" * 40, b'{"ev3nt": "end"}\n', b"\0\0\n", b"\n"])
def test_a_last_line_that_cannot_be_read_is_cut_off_before_others_follow_it(tmp_path: Path, spoilt: bytes) -> None:
    path = tmp_path / "j.jsonl"
    write(path, [0])
    whole = path.read_bytes()
    path.write_bytes(whole + spoilt)
    assert len(list(read_journal(path))) == whole.count(b"\n")
    assert repair(path) is bool(spoilt)
    assert path.read_bytes() == whole
    assert not repair(path)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*journal.jsonl: "):
        Journal(tmp_path / "file" / "journal.jsonl")


def test_a_journal_that_lacks_lines_is_no_run_to_go_on_with(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, [0])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"event":"group"' not in line))
    with raises(ConfigError):
        read_finished(path)


def test_a_label_with_an_undecodable_path_stays_a_label() -> None:
    """Also if something else in the record is what JSON cannot hold."""
    kept = plain([Label("programs_replaced", "/usr/bin/\udcff", certain=True)])
    assert kept == [Label("programs_replaced", "/usr/bin/?", certain=True)]
