"""Trackers in processes of their own: the services' real clients, and children that misbehave."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.rollouts.observe.trackers.subprocess_tracker import MOST_WAITING, ChildTracker, start_tracker
from palaestra.rollouts.observe.trackers.tracker import RunLabel
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON

Notes = list[str]


def label(folder: Path, **fields: JSON) -> RunLabel:
    return RunLabel(project="words", name="night", run_id="20260101T000000Z-0a1b", folder=folder, **fields)


async def tracked(service: str, told: RunLabel) -> Notes:
    """Two steps and a rollout to look at, through the service's own client."""
    notes: Notes = []
    tracker = await start_tracker(service, told, notes.append)
    assert tracker is not None
    tracker.log(2, {"train/reward/mean": 0.25, "train/tool_errors_count": 3})
    tracker.log(4, {"train/reward/mean": 0.75})
    tracker.show(4, "train/rollouts", [("[USER]\nhello", 0.5)])
    await tracker.aclose()
    await tracker.aclose()
    return notes


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file. Source of the form: LevelDB's log format, after 7 bytes of its own."""
    data, at, part = path.read_bytes(), 7, b""
    while at < len(data):
        room = 32_768 - at % 32_768
        if room < 7:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


async def test_weights_and_biases_writes_offline_what_it_was_told(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    notes = await tracked("wandb", label(tmp_path, mode="offline", settings={"env": {"group_size": 4}}))
    assert notes == [], (tmp_path / "wandb.log").read_text()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, runs = [], []
    for data in wandb_records(written):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            runs.append((record.run.run_id, record.run.project, record.run.display_name))
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert runs == [("20260101T000000Z-0a1b", "words", "night")]
    assert [line["_step"] for line in history] == [2, 4]
    assert (history[0]["train/reward/mean"], history[0]["train/tool_errors_count"]) == (0.25, 3)
    assert history[1]["train/reward/mean"] == 0.75
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/train/*.json")
    assert json.loads(table.read_text()) == {"columns": ["text", "score"], "data": [["[USER]\nhello", 0.5]]}


def _modes(folder: Path) -> dict[str, str]:
    """The files that others could read or change if the folder were open to them."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert found
    return {str(path): oct(path.stat().st_mode) for path in found if path.stat().st_mode & 0o077}


async def test_the_files_of_weights_and_biases_are_for_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("OPENAI_API_KEY", "Zx9-quiet7Lantern42Vq")
    await tracked("wandb", label(tmp_path, mode="offline", settings={"env": {"group_size": 4}}))
    assert _modes(tmp_path) == {}
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"quiet7Lantern" in path.read_bytes()]
    assert kept == []


async def test_trackio_keeps_what_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="needs the extra trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    notes = await tracked("trackio", label(tmp_path))
    assert notes == [], (tmp_path / "trackio.log").read_text()
    assert _modes(tmp_path) == {}
    with sqlite3.connect(tmp_path / "trackio/words.db") as kept:
        rows = kept.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("night", 2), ("night", 4), ("night", 4)]
    assert json.loads(rows[0][2])["train/tool_errors_count"] == 3
    assert json.loads(rows[2][2])["train/rollouts/0/score"] == 0.5


async def test_a_service_that_is_not_installed_is_said_and_left_out(tmp_path: Path) -> None:
    notes: Notes = []
    assert await start_tracker("no_such_tracker", label(tmp_path), notes.append) is None
    (note,) = notes
    check_message(note, "no_such_tracker", install_command("no_such_tracker"))
    assert list(tmp_path.iterdir()) == []


async def test_a_tracker_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    notes: Notes = []
    assert await start_tracker("json", label(tmp_path / "gone"), notes.append) is None
    check_message(notes[0], "json")


async def test_a_folder_that_a_service_left_is_not_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    notes: Notes = []
    assert await start_tracker("no_such_tracker", label(tmp_path), notes.append) is None
    assert "is not installed" in notes[0]


def with_child(
    folder: Path, code: str, use: Callable[[ChildTracker, Notes], Awaitable[None]], **options: float
) -> Notes:
    """Notes of a tracker whose process runs `code`."""
    notes: Notes = []

    async def main() -> None:
        with (folder / "child.log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log
            )
        tracker = ChildTracker("tracker", child, folder / "child.log", notes.append, **options)
        await use(tracker, notes)
        await tracker.aclose()
        assert child.returncode is not None

    asyncio.run(main())
    return notes


def test_a_child_that_fails_is_said_once_and_never_raised(tmp_path: Path) -> None:
    async def use(tracker: ChildTracker, notes: Notes) -> None:
        tracker.log(1, {"a": 1.0})
        await tracker._child.wait()
        for step in range(2, 5):
            tracker.log(step, {"a": 1.0})
        assert len(notes) == 1

    (note,) = with_child(tmp_path, "raise SystemExit('the service is down')", use)
    check_message(note, "WARNING", "tracker")
    check_message(note, "metrics.jsonl")


def test_a_failure_at_the_very_end_is_said_too(tmp_path: Path) -> None:
    async def use(tracker: ChildTracker, notes: Notes) -> None:
        tracker.log(1, {"a": 1.0})

    (note,) = with_child(tmp_path, "import sys; sys.stdin.read(); raise SystemExit('could not sync')", use)
    check_message(note, "could not sync")


def test_a_child_that_does_not_read_costs_no_memory_and_is_ended(tmp_path: Path) -> None:
    async def use(tracker: ChildTracker, notes: Notes) -> None:
        line = {"x" * 1_000: 1.0}
        for step in range(2 * MOST_WAITING // 1_000):
            tracker.log(step, line)
        check_message(notes[0])
        assert tracker._pipe.transport.get_write_buffer_size() < MOST_WAITING + 2_000

    notes = with_child(tmp_path, "import signal; signal.pause()", use, grace_s=0.2)
    assert len(notes) == 1
