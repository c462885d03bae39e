"""Folders of tasks and rows with packed ones: all that can be used, and a message for each that cannot."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.images.task_files import read_task_text
from palaestra_suites.terminal_bench.find_tasks import load_tasks
from palaestra_suites.terminal_bench.import_tasks import read_tasks
from suites.terminal_bench.mini import HARBOR, LEGACY, TASKS, copied


def packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.add(folder, ".")
    return data.getvalue()


def one_file(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, len(content)
        archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def parts(task: Path) -> dict[str, str]:
    """A row in the columns of the public data set."""
    return {
        "task_name": task.name,
        "category": "files",
        "instruction": (task / "instruction.md").read_text(),
        "environment_tar": base64.b64encode(packed(task / "environment")).decode(),
        "tests_tar": base64.b64encode(packed(task / "tests")).decode(),
        "test_sh": (task / "tests/test.sh").read_text(),
    }


def test_a_tree_of_both_formats_is_read_whole(tmp_path: Path) -> None:
    loaded = load_tasks(str(TASKS), tmp_path)
    assert {"greeting", "hello"} <= {task.name for task in loaded.tasks}
    left_out = {each.name: each.reason for each in loaded.left_out}
    assert len(left_out) == 11
    check_message(left_out["needs-gpu"], "GPUs", "environment.gpus")


def test_one_task_folder_is_a_source(tmp_path: Path) -> None:
    assert [task.name for task in load_tasks(str(HARBOR / "greeting"), tmp_path).tasks] == ["greeting"]


def test_two_tasks_of_one_name_are_one_and_a_message(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "hello").symlink_to(LEGACY / "hello")
    loaded = load_tasks(str(tmp_path), tmp_path)
    assert len(loaded.tasks) == 1
    check_message(loaded.left_out[0].reason)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_in_parts(tmp_path: Path, ending: str) -> None:
    rows = [parts(HARBOR / "greeting"), parts(HARBOR / "in-tmp") | {"tests_tar": "%%%"}]
    path = tmp_path / f"tasks.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    loaded = load_tasks(str(path), tmp_path / "cache")
    (task,) = loaded.tasks
    assert (task.name, task.metadata.category) == ("greeting", "files")
    assert task.verifier.folder.joinpath("test_outputs.py").is_file()
    assert task.recipe.dockerfile is not None
    assert task.path.is_relative_to(tmp_path / "cache")
    check_message(str(loaded.left_out[0]), "in-tmp", "row", "column", "tests_tar")
    assert load_tasks(str(path), tmp_path / "cache").tasks == loaded.tasks


def test_rows_with_whole_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    rows = [
        {"path": "some/greeting", "task_binary": packed(HARBOR / "greeting")},
        {"path": "some/broken-toml", "task_binary": packed(HARBOR / "broken-toml")},
        {"path": "some/noise", "task_binary": b"no archive"},
        {"path": "..", "task_binary": packed(HARBOR / "greeting")},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    loaded = load_tasks(str(path), tmp_path / "cache")
    assert [task.name for task in loaded.tasks] == ["greeting"]
    assert [each.name for each in loaded.left_out] == ["broken-toml", "noise", ".."]
    assert "task_binary" in loaded.left_out[1].reason


@pytest.mark.parametrize("packing", ["parts", "whole"])
def test_a_row_names_a_task_that_is_graded_live(tmp_path: Path, packing: str) -> None:
    row = parts(HARBOR / "web-service")
    if packing == "whole":
        folder = copied(HARBOR / "web-service", tmp_path / "copy", {"task.toml": ""})
        row = {"task_name": "web-service", "task_binary": base64.b64encode(packed(folder)).decode()}
    path = tmp_path / "tasks.jsonl"
    for column, live in ({"grading": "live"}, True), ({"grading": "sealed"}, False), ({}, False):
        path.write_text(json.dumps(row | column) + "\n")
        (task,) = load_tasks(str(path), tmp_path / "cache").tasks
        assert task.live is live
    path.write_text(json.dumps(row | {"grading": "alive"}) + "\n")
    check_message(load_tasks(str(path), tmp_path / "cache").left_out[0].reason, "sealed", "live")


def test_a_row_that_cannot_be_unpacked_is_left_out_alone(tmp_path: Path) -> None:
    whole = packed(HARBOR / "greeting")
    torn = whole[:10] + b"\xff" * (len(whole) - 10)  # a gzip header, and no stream behind it
    deep = one_file("task.toml", content=b"a = " + b"[" * 5000)
    rows: list[dict[str, str]] = [
        {"path": "torn", "task_binary": base64.b64encode(torn).decode()},
        {"path": "n" * 300, "task_binary": base64.b64encode(whole).decode()},
        {"path": "deep", "task_binary": base64.b64encode(deep).decode()},
        parts(HARBOR / "greeting") | {"task_name": "surrogate", "instruction": "\ud800"},
        {"path": "greeting", "task_binary": base64.b64encode(whole).decode()},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_tasks(str(path), tmp_path / "cache")
    assert [task.name for task in loaded.tasks] == ["greeting"]
    reasons = [each.reason for each in loaded.left_out]
    expected = ["cannot be unpacked", "is not a valid task name", "task.toml is not TOML", "surrogates not allowed"]
    assert [message in reason for message, reason in zip(expected, reasons, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (one_file("../outside"), "'../outside'"),
        (one_file("/outside"), "environment/Dockerfile is missing"),  # it is taken for a relative path
        (one_file("link", tarfile.SYMTYPE, "../../../../outside"), "points outside"),
        (one_file("link", tarfile.SYMTYPE, "/etc"), "points outside"),
        (one_file("hard", tarfile.LNKTYPE, "/etc/hostname"), "cannot unpack"),
        (one_file("hard", tarfile.LNKTYPE, "../../outside"), "'../../outside'"),
        (one_file("device", tarfile.CHRTYPE), "type that cannot be unpacked"),
        (one_file("fifo", tarfile.FIFOTYPE), "type that cannot be unpacked"),
        (one_file("a/.wh...", content=b""), "environment/Dockerfile is missing"),  # a file name like others
    ],
    ids=["parent", "absolute", "link", "absolute-link", "hard-link", "hard-link-up", "device", "fifo", "whiteout"],
)
def test_an_archive_never_reaches_outside(tmp_path: Path, data: bytes, message: str) -> None:
    row = parts(HARBOR / "greeting") | {"environment_tar": base64.b64encode(data).decode()}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (left_out,) = load_tasks(str(path), tmp_path / "cache").left_out
    assert message in left_out.reason
    assert all(found.parent.name == "environment" for found in tmp_path.rglob("outside"))
    assert not Path("/outside").exists()


def test_an_archive_does_not_write_through_its_own_link(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, kind, link in (("way", tarfile.SYMTYPE, str(tmp_path)), ("way/evil", tarfile.REGTYPE, "")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
    row = parts(HARBOR / "greeting") | {"tests_tar": base64.b64encode(data.getvalue()).decode()}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    assert load_tasks(str(tmp_path / "tasks.jsonl"), tmp_path / "cache").left_out
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh", "environment/Dockerfile", "tests"])
def test_no_file_of_a_task_is_read_through_a_link(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    shutil.copytree(HARBOR / "greeting", secret)
    folder = tmp_path / "tasks/greeting"
    shutil.copytree(secret, folder)
    if (folder / name).is_dir():
        shutil.rmtree(folder / name)
    else:
        (folder / name).unlink()
    (folder / name).symlink_to(secret / name)
    loaded = load_tasks(str(folder), tmp_path / "cache")
    if name.startswith("environment"):  # the build context is read when the task is prepared
        with pytest.raises(TaskError, match="link"):
            read_task_text(loaded.tasks[0].recipe.folder / "Dockerfile")
    else:
        assert "link" in loaded.left_out[0].reason


def test_a_link_inside_a_task_is_not_followed_either(tmp_path: Path) -> None:
    folder = tmp_path / "greeting"
    shutil.copytree(HARBOR / "greeting", folder)
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to("solution/solve.sh")
    (left_out,) = load_tasks(str(folder), tmp_path / "cache").left_out
    assert "instruction.md" in left_out.reason
    (folder / "instruction.md").unlink()
    os.mkfifo(folder / "instruction.md")
    (left_out,) = load_tasks(str(folder), tmp_path / "cache").left_out
    assert "instruction.md" in left_out.reason


def test_a_row_without_instruction_names_the_column(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_name": "empty"}\nno json\n')
    reasons = [str(each) for each in load_tasks(str(path), tmp_path / "cache").left_out]
    assert reasons == [
        "empty: row 1: column 'instruction' is missing or empty",
        "row 2: not JSON: Expecting value: line 1 column 1 (char 0)",
    ]


def test_a_source_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no task"):
        load_tasks(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        load_tasks(str(tmp_path / "tasks.jsonl"), tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        load_tasks(str(tmp_path / "nowhere"), tmp_path)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["--env.task_filter", "greeting,needs-*"], ["greeting", "needs-gpu"]),
        (["--env.task_filter", "needs-gpu"], ["needs-gpu"]),
        (["--task", "greeting,needs-g*"], ["greeting", "needs-gpu"]),
        (["--env.task_filter", "greeting", "--env.skip_tasks", "none"], ["greeting"]),
        (["--env.task_filter", "greet*,needs-gpu", "--env.skip_tasks", "needs-*"], ["greeting"]),
    ],
)
def test_refused_tasks_that_the_settings_leave_out_are_not_named(settings: list[str], names: list[str]) -> None:
    assert [line.name for line in read_tasks(str(HARBOR), settings).lines] == names


def test_a_filter_that_chooses_nothing_is_named_with_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["--env.dataset_name", str(HARBOR), "--env.task_filter", "nope*", "--env.base_image", "host"]
    assert main(["run", "terminalbench_2", *settings, "--policy", "oracle"]) == 2
    said = capsys.readouterr().err
    assert "task_filter 'nope*'" in said
    check_message(said, len(load_tasks(str(HARBOR), tmp_path).tasks))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slots
def test_refused_tasks_are_in_the_summary_and_in_the_reason_of_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("greeting", "needs-gpu"):
        shutil.copytree(HARBOR / name, tmp_path / "tasks" / name)
    words = ["eval", "terminalbench_2", "--env.dataset_name", "tasks", "--env.base_image", "host", "--policy", "noop"]
    assert main([*words, "--samples", "2"]) == 3
    said = capsys.readouterr().err
    assert "over 1 of 2 tasks (1 refused), 2 of 2 rollouts scored" in said
    assert "[1/1] greeting" in said
    assert "exit code 3: 2 rollouts" in said
    assert main(["runs", "--table", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tasks_scored"], row["tasks"], row["tasks_left_out"]) == (1, 2, 1)
    assert main([*words, "--task", "greeting"]) == 0  # the denominator is what was asked for
    assert main([*words, "--task", "needs-gpu"]) == 2
    assert "'needs-gpu' cannot be used: " in capsys.readouterr().err
