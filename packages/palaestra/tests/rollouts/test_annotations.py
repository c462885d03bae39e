"""Annotations: one append-only file that many writers share, and that may come from anybody."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from palaestra.rollouts.annotations import (
    ANNOTATION_SCHEMA,
    ANNOTATIONS_NAME,
    MOST_NOTE_CHARS,
    Annotation,
    annotation,
    read_annotations,
    write_annotations,
)
from palaestra_slots.core.errors import ConfigError

WRITER = """
import sys
from pathlib import Path
from palaestra.rollouts.annotations import annotation, write_annotations
for n in range(50):
    write_annotations(Path(sys.argv[1]), [annotation("g/0", sys.argv[2], tags=[f"{sys.argv[2]}-{n}"], note="x" * 5000)])
"""


def test_later_lines_add_and_take_back(tmp_path: Path) -> None:
    write_annotations(tmp_path, [annotation("g/0", "ada", tags=["slow", "odd"], verdict="hack")])
    write_annotations(tmp_path, [annotation("g/0", "bob", untag=["slow"], tags=["odd", "new"], note=" Why? ")])
    write_annotations(tmp_path, [annotation("g/1", "bob", verdict="grader_mistake")])
    found = read_annotations(tmp_path).by_rollout
    said = found["g/0"]
    assert (said.tags, said.verdict, said.verdict_author, said.author) == (["odd", "new"], "hack", "ada", "bob")
    assert [(note.text, note.author) for note in said.notes] == [("Why?", "bob")]
    assert found["g/1"].to_dict() == {"verdict": "grader_mistake", "verdict_author": "bob"}
    write_annotations(tmp_path, [annotation("g/0", "bob", verdict="none")])
    assert read_annotations(tmp_path).by_rollout["g/0"].verdict == ""
    assert len((tmp_path / ANNOTATIONS_NAME).read_bytes().splitlines()) == 4
    assert stat.S_IMODE((tmp_path / ANNOTATIONS_NAME).stat().st_mode) == 0o600


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in ("a", "b", "c")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = read_annotations(tmp_path)
    assert found.damaged == 0
    assert set(found.by_rollout["g/0"].tags) == {f"{name}-{n}" for name in "abc" for n in range(50)}
    assert len(found.by_rollout["g/0"].notes) == 150


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    write_annotations(tmp_path, [annotation("g/0", "ada", tags=["one"])])
    path = tmp_path / ANNOTATIONS_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    write_annotations(tmp_path, [annotation("g/0", "ada", tags=["two"])])
    found = read_annotations(tmp_path)
    assert (found.by_rollout["g/0"].tags, found.damaged) == (["one", "two"], 1)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        msgspec.json.encode(Annotation(schema="palaestra.annotation/9", at=1.0, author="x", rollout_id="g/0")),
        msgspec.json.encode(Annotation(schema=ANNOTATION_SCHEMA, at=1.0, author="x", rollout_id="g/0", tags=["<b>"])),
        msgspec.json.encode(Annotation(schema=ANNOTATION_SCHEMA, at=1.0, author="", rollout_id="g/0", tags=["a"])),
        msgspec.json.encode(Annotation(schema=ANNOTATION_SCHEMA, at=1.0, author="x", rollout_id="g/0", verdict="god")),
    ],
)
def test_lines_of_others_are_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / ANNOTATIONS_NAME).write_bytes(line + b"\n")
    write_annotations(tmp_path, [annotation("g/0", "ada", tags=["mine"])])
    found = read_annotations(tmp_path)
    assert (found.by_rollout["g/0"].tags, found.damaged) == (["mine"], 1)


def test_a_link_or_a_device_is_neither_written_nor_read(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    said = [annotation("g/0", "ada", tags=["a"])]
    for make in (lambda path: path.symlink_to(victim), os.mkfifo, lambda path: path.mkdir()):
        path = tmp_path / ANNOTATIONS_NAME
        make(path)
        with pytest.raises((ConfigError, OSError)):
            write_annotations(tmp_path, said)
        with pytest.raises(ConfigError):
            read_annotations(tmp_path)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tags": ["two words"]}, "is not a tag"),
        ({"tags": ["x" * 61]}, "is not a tag"),
        ({"tags": [f"t{n}" for n in range(21)]}, "at most 20"),
        ({"note": "x" * (MOST_NOTE_CHARS + 1)}, "at most 10000"),
        ({"verdict": "cheat"}, "hack, grader_mistake"),
        ({}, "is empty"),
        ({"note": "  \n"}, "is empty"),
    ],
)
def test_a_wrong_annotation_gets_a_reason(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        annotation("g/0", "ada", **given)


def test_any_text_can_be_a_note(tmp_path: Path) -> None:
    write_annotations(tmp_path, [annotation("g/0", "ada", note="line\nline \ud800 \u2028 \x00")])
    assert read_annotations(tmp_path).by_rollout["g/0"].notes[0].text == "line\nline ? \u2028 \x00"
