"""Files of other programs in the viewer: groups and ids, the cache, large files in slices, and damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recorded import embedded, rollout, sky, write_run

from golden_messages import check_message, raises
from palaestra.cli.main import main
from palaestra.rollouts.annotations import annotation, write_annotations
from palaestra.rollouts.records import Beside, Group
from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade, write_grades
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_view.comparison import compared
from palaestra_view.overview import overview
from palaestra_view.rollout_record import CUT, rollout_record, text_at
from palaestra_view.runs import OpenRuns, index_store, open_runs
from palaestra_view.summary import run_summary

SUMS = Path(__file__).parent / "imports/logs/sums.eval"


def line(task: str, reward: float | None, text: str = "hi") -> str:
    return json.dumps({"task_id": task, "reward": reward, "messages": [{"role": "user", "content": text}]}) + "\n"


def opened(path: Path, store: Path | None = None) -> OpenRuns:
    runs = open_runs(str(path), store)
    for name in runs:
        while runs.update(name, 5.0):
            continue
    assert runs.problems == {}
    return runs


def test_rollouts_of_a_task_are_a_group_and_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line("a", 1.0) + line("b", None) + line("a", 0.0) + "{broken\n" + line("", 0.5))
    runs = opened(path)
    (name,) = runs
    _, rows = runs[name].rows()
    assert [(row["id"], row["task"], row["reward"]) for row in rows] == [
        ("000000-a/0", "a", 1.0), ("000000-a/1", "a", 0.0), ("000001-b/0", "b", None),
        ("000002-conversation/0", "conversation", 0.5),
    ]  # fmt: skip
    summary = run_summary(runs[name], name)
    assert (summary["state"], summary["kind"], summary["damaged"], summary["tasks"]) == ("done", "import", 1, 3)
    assert summary["path"] == str(path)
    record = rollout_record(runs[name], "000000-a/1")
    assert record["commands"] == {"look at this file": f"palaestra view {path}"}
    assert record["before"] == "000000-a/0"


def test_a_file_without_rewards_is_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line("a", None) * 2 + line("b", None))
    assert main(["view", str(path), "--html", str(tmp_path / "chats.html")]) == 0
    found = embedded(tmp_path / "chats.html")
    assert len(found["rows"]) == 3
    assert found["answers"]["run"]["scores"][0]["tasks"] == 2


def test_a_value_that_is_nested_deeply_hides_no_other_rollout(tmp_path: Path) -> None:
    content = "[" * 900 + '"x"' + "]" * 900
    deep = f'{{"messages": [{{"role": "user", "content": {content}}}]}}\n'
    path = tmp_path / "chats.jsonl"
    path.write_text(line("a", 1.0) + deep)
    runs = opened(path)
    (name,) = runs
    _, rows = runs[name].rows()
    with pytest.raises(ConfigError, match="nested too deeply"):
        rollout_record(runs[name], rows[1]["id"])
    assert main(["view", str(path), "--html", str(tmp_path / "chats.html")]) == 0
    answers = embedded(tmp_path / "chats.html")["answers"]
    assert [key for key in answers if key.startswith("rollout?")] == [f"rollout?{rows[0]['id']}"]


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, store = tmp_path / "chats.jsonl", tmp_path / "cache"
    path.write_text(line("a", 1.0))
    for _ in range(2):
        opened(path, store).close()
    (folder,) = (store / "imports").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    (kept,) = folder.iterdir()
    before = kept.stat()
    assert before.st_mode & 0o077 == 0
    path.write_text(line("a", 1.0) + line("b", 0.0))
    runs = opened(path, store)
    (name,) = runs
    assert runs[name].rows()[0] == 2
    runs.close()
    assert kept.stat().st_mtime_ns == before.st_mtime_ns
    assert len(list((store / "imports").iterdir())) == 2


def test_old_copies_and_what_a_killed_viewer_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    imports = tmp_path / "palaestra/view/imports"
    imports.mkdir(parents=True)
    for name, age in (
        ("old.jsonl", 40), ("new.jsonl", 1), (".old.jsonl.1.ab.tmp", 40),  # as earlier versions named them
        ("a/journal.jsonl", 40), ("b/journal.jsonl", 40), ("b/annotations.jsonl", 1),
    ):  # fmt: skip
        (imports / name).parent.mkdir(exist_ok=True)
        (imports / name).touch()
        then = (imports / name).stat().st_mtime - age * 86_400
        os.utime(imports / name, (then, then))
        os.utime((imports / name).parent, (then, then))
    index_store()
    assert sorted(path.name for path in imports.iterdir()) == ["b", "new.jsonl"]
    assert len(list((imports / "b").iterdir())) == 2


def test_a_large_file_is_read_in_slices_and_leaves_nothing_if_it_is_closed(tmp_path: Path) -> None:
    path, store = tmp_path / "chats.jsonl", tmp_path / "cache"
    path.write_text("".join(line(f"task-{n}", 1.0, "x" * 2000) for n in range(2000)))
    runs = OpenRuns(tmp_path, [path], store)
    (name,) = runs
    for _ in range(4):  # one event each: a group, a rollout, …
        runs.update(name, 0.0)
    read, size = runs[name].progress
    assert 0 < read < size == path.stat().st_size
    assert 0 < runs[name].rows()[0] < 2000
    assert run_summary(runs[name], name)["state"] == "running"
    runs.close()
    assert list((store / "imports").iterdir()) == []


def test_a_long_text_is_cut_and_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line("a", 1.0, "x" * 50_000_000))
    runs = opened(path)
    (name,) = runs
    content = rollout_record(runs[name], "000000-a/0")["messages"][0]["content"]
    assert content["chars"] == 50_000_000
    assert text_at(runs[name], "000000-a/0", content[CUT], 49_999_990, 100) == "x" * 10


def test_a_folder_of_logs_is_a_list_of_runs_that_can_be_compared(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.eval").write_bytes(SUMS.read_bytes())
    (tmp_path / "notes.json").write_text("{}")
    runs = opened(tmp_path)
    assert sorted(runs) == ["one.eval", "two.eval"]
    found = compared({name: runs[name] for name in runs}, "one.eval")
    assert found["two.eval"]["difference"] == 0.0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a,b\n", "is in no format that can be shown"),
        (b'{"messages": []}\n', "nothing that can be shown: record 1: it has no messages"),
        (b'{"schema_version": "ATIF-v1.7", "steps": 1}', "it is not what was expected"),
    ],
)
def test_a_file_that_cannot_be_shown_is_an_error_with_the_reason(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"file\.jsonl"):
        open_runs(str(path))
    for words in (["--no-open"], ["--html", str(tmp_path / "x.html")]):
        assert main(["view", str(path), *words]) == 2
        assert reason in capsys.readouterr().err


def test_a_name_in_a_log_chooses_no_tokenizer_and_no_path(tmp_path: Path) -> None:
    config: dict[str, JSON] = {"tokenizer_name": str(tmp_path), "group_size": 1 << 40}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], "env": "../../x", "config": config}))
    runs = opened(path)
    (name,) = runs
    assert runs[name].config()["env"] == {"group_size": 0}
    assert "openai" not in runs[name].config()


def test_a_log_as_one_html_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sums.html"
    assert main(["view", str(SUMS), "--html", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out)}
    found = embedded(out)
    assert [row["task"] for row in found["rows"]] == ["one", "one", "2", "2", "bad", "bad"]
    assert found["answers"]["run"]["provenance"]["format"] == "inspect"


CONVERSATIONS: dict[str, JSON] = {
    "openai": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    "atif": {"schema_version": "ATIF-v1.7", "agent": {"name": "a", "version": "1"},
             "steps": [{"step_id": 1, "source": "user", "message": "hi"}]},
}  # fmt: skip


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_a_file_without_any_reward_is_shown(form: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CONVERSATIONS[form]) + "\n")
    runs = opened(path)
    (name,) = runs
    found = overview(runs[name])
    assert found["scores"] == [{"name": "", "tasks": 1, "planned": 1, "scored": 0}]
    assert (run_summary(runs[name], name)["scored"], runs[name].rows()[0]) == (0, 1)
    assert main(["view", str(path), "--html", str(tmp_path / "x.html")]) == 0


def test_a_reward_that_is_no_number_is_named_and_a_missing_one_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(line("a", 1.0) + line("b", "high") + line("c", None))  # type: ignore[arg-type]
    runs = opened(path)
    found = overview(runs["chats.jsonl"])
    assert found["causes"] == ['1 rollout failed (unknown), first 000001-b/0: its reward is not a number: "high"']
    assert found["first_failures"] == ["000001-b/0"]


def test_what_people_said_about_a_run_is_in_its_inspect_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, log = write_run(tmp_path / "run", sky()), tmp_path / "sky.eval"
    first, second = "000000-sky/0", "000000-sky/1"
    tags = [f"tag-{n}" for n in range(25)]
    write_annotations(run, [annotation(first, "ada", tags=tags[:20], note="look <b>here</b>", verdict="hack")])
    write_annotations(run, [annotation(first, "bob", tags=tags[20:])])
    write_grades(
        run, [Grade(schema=GRADE_SCHEMA, at=3.0, rollout_id=second, before=0.5, reward=0.0, metrics={"x": 2.0})]
    )
    assert main(["export", str(run), "--to", "inspect", "--out", str(log)]) == 0
    check_message(capsys.readouterr().err, "palaestra")
    for _ in range(2):  # the second time from the cache
        runs = opened(log, tmp_path / "cache")
        marks = runs.marks("sky.eval")
        judgement = marks.of(first)["judgement"]
        assert (judgement["tags"], judgement["verdict"], judgement["verdict_author"]) == (tags, "hack", "ada")
        assert [(each["text"], each["author"]) for each in judgement["notes"]] == [("look <b>here</b>", "ada")]
        assert marks.of(second)["grade"] | {"labels": []} == {
            "schema": GRADE_SCHEMA, "at": 3.0, "rollout_id": second, "before": 0.5, "reward": 0.0, "labels": [],
            "metrics": {"x": 2.0},
        }  # fmt: skip
        assert [row["id"] for row in runs["sky.eval"].rows([("tag", "=", "tag-24")])[1]] == [first]
        (row,) = runs["sky.eval"].rows([("changed", "=", 1)])[1]
        assert (row["id"], row["reward"], row["recorded"]) == (second, 0.0, 0.5)
        assert "annotations" not in rollout_record(runs["sky.eval"], first).get("detail", {})
        runs.close()
    assert main(["export", str(run), "--to", "openai", "--out", str(tmp_path / "sky.jsonl")]) == 0
    check_message(capsys.readouterr().err, "palaestra")
    runs = opened(tmp_path / "sky.jsonl")
    assert runs.marks("sky.jsonl").of(first)["judgement"]["verdict"] == "hack"


def test_what_one_file_says_about_its_rollouts_is_data_and_stays_with_it(tmp_path: Path) -> None:
    said: dict[str, JSON] = {
        "tags": ["good", "b ad", 3, "x" * 61], "verdict": "cheat", "notes": [{"text": "n" * 10_001}, 7, {"text": "no"}],
        "rollout_id": "000000-b/0",
    }  # fmt: skip
    for name, line in (("one", {"annotations": said}), ("two", {"annotations": "x"}), ("three", {})):
        lines = [{"task_id": task, "messages": [{"role": "user", "content": "x"}], **line} for task in ("a", "b")]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = {}
    for name in ("one", "two", "three"):
        runs = opened(tmp_path / f"{name}.jsonl", tmp_path / "cache")
        found[name] = runs.marks(f"{name}.jsonl").of("000000-a/0")["judgement"]
        runs.close()
    assert (found["two"], found["three"]) == ({}, {})
    assert found["one"].keys() == {"tags", "notes"}
    assert found["one"]["tags"] == ["good"]
    assert [note["text"] for note in found["one"]["notes"]] == ["no"]


def test_a_folder_names_each_log_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.eval").write_bytes(SUMS.read_bytes())
    (tmp_path / "torn.eval").write_bytes(SUMS.read_bytes()[:100])
    (tmp_path / "other.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    (tmp_path / "settings.json").write_text("{}")
    assert main(["view", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 0
    told = sorted(capsys.readouterr().err.splitlines())
    assert [line.partition(" ")[0] for line in told] == ["other.jsonl", "torn.eval"]
    check_message(told[1])
    runs = open_runs(str(tmp_path))
    assert sorted(runs.problems) == ["other.jsonl", "torn.eval"]
    runs.close()
    (tmp_path / "good.eval").unlink()
    with raises(ConfigError):
        open_runs(str(tmp_path))


def test_a_time_that_a_log_does_not_have_is_not_0(tmp_path: Path) -> None:
    timed = [rollout(n, sky().trajectories[0].messages, 1.0, beside=Beside(duration_s=2.0)) for n in range(2)]
    timed[0].beside.turn_s = [(1.0, 0.5)]
    group = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=timed)
    runs = opened(write_run(tmp_path / "run", group))
    assert [row["model_s"] for row in runs["run"].rows()[1]] == [1.0, None]
    assert main(["export", str(tmp_path / "run"), "--to", "inspect", "--out", str(tmp_path / "sky.eval")]) == 0
    totals = opened(tmp_path / "sky.eval")["sky.eval"].totals()
    assert (totals["seconds"], totals["model_s"], totals["tool_s"]) == (4.0, None, None)
    (tmp_path / "chats.jsonl").write_text(line("a", 1.0))
    totals = opened(tmp_path / "chats.jsonl")["chats.jsonl"].totals()
    assert (totals["seconds"], totals["model_s"]) == (None, None)
