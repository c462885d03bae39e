"""A run's folder that somebody else made: commands that read it run nothing, wait for nothing and show text as text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recorded import embedded

from cli.test_replay import HERE, NOISY, change, palaestra, record
from golden_messages import check_message
from palaestra.rollouts.events import AnyJournalEvent, RolloutEnded, RunStarted
from palaestra.rollouts.finished_run import open_run

SCRIPT = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
"""Text that a page must not read as markup."""

READING = (["status"], ["report"], ["export", "--to", "openai"], ["compare"], ["grade"], ["replay"], ["verify"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slots
def test_a_grading_again_runs_no_file_that_the_folder_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "1", "--env.save_workspaces", "true")
    ran = folder / "ran"
    away = run.rename(folder / "elsewhere")
    for place in (away / "recorded_env.py", folder / "evil_env.py"):
        place.write_text(f"open({str(ran)!r}, 'w')\n{NOISY}")

    def forge(event: AnyJournalEvent) -> None:
        if isinstance(event, RunStarted):
            event.config["environment"] = str(folder / "evil_env.py")
            event.config["folder"] = str(away)
            event.config["env"] |= {"isolation": "none", "workspace_store": str(ran)}

    change(away, forge)
    capsys.readouterr()
    assert palaestra("grade", away) == 2
    assert "--environment" in capsys.readouterr().err
    assert not ran.exists()
    assert palaestra("grade", away, "--environment", "recorded_env.py") in (0, 1)
    assert not ran.exists()


@pytest.mark.slots
def test_a_training_resumes_with_no_server_that_the_folder_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    (run / "training").mkdir()
    (run / "training" / "settings.json").write_text('{"trainer": "trl", "training": {"steps": 1}}')

    def forge(event: AnyJournalEvent) -> None:
        if isinstance(event, RunStarted):
            event.env = event.config["environment"] = "count_lines"
            event.config["env"] |= {"isolation": "none"}
            event.config["openai"] = [{"model_name": "elsewhere/model", "base_url": "http://elsewhere"}]
            event.config["sources"] |= {"openai.model_name": "--model", "env.isolation": "--isolation"}

    change(run, forge)
    capsys.readouterr()
    assert palaestra("train", "--resume", run) == 2
    said = capsys.readouterr().err
    check_message(said, "--model")


@pytest.mark.slots
def test_a_report_shows_what_a_run_says_as_text(folder: Path) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "2")

    def forge(event: AnyJournalEvent) -> None:
        if isinstance(event, RunStarted):
            event.env = event.model = SCRIPT
            event.config["note"] = SCRIPT
        elif isinstance(event, RolloutEnded):
            event.trajectory.error = SCRIPT
            event.trajectory.detail[SCRIPT] = SCRIPT
            for message in event.trajectory.messages:
                message["content"] = SCRIPT

    change(run, forge)
    assert palaestra("report", run) == 0
    (page,) = run.glob("*.html")
    text = page.read_text()
    assert "<img src=x" not in text
    assert "alert(2)</script>" not in text
    assert "onerror" in str(embedded(page)["answers"])


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_in_a_run_is_waited_for_or_followed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FIFOs, links and directories in the place of a run's files."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    secret = folder / "secret.jsonl"
    secret.write_text(json.dumps({"event": "secret"}) + "\n")
    files = [path for path in run.iterdir() if path.is_file()]
    for kind in ("fifo", "directory", "link"):
        for path in files:
            kept = path.read_bytes()
            path.unlink()
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "directory":
                path.mkdir()
            else:
                path.symlink_to(secret)
            for command, *options in READING:
                capsys.readouterr()
                assert palaestra(command, run, *options) in (0, 1, 2, 3)
                shown = capsys.readouterr()
                assert "Traceback" not in shown.err, (command, kind, path.name)
                assert '"secret"' not in shown.out + shown.err
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(kept)
    assert secret.read_text() == json.dumps({"event": "secret"}) + "\n"


@pytest.mark.slots
@pytest.mark.parametrize("name", ["status.json", "origin", "metrics.jsonl", "training/steps.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "hole", "device", "deep"])
def test_no_name_of_a_run_makes_a_reader_wait_or_take_much(
    kind: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run is found by its id, as the last one, or in the list of runs."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "hole":
            path.touch()
            os.truncate(path, 1 << 40)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.write_text("[" * 100_000 + "\n" + '{"kind": "step", "step": [], "reward": 1}\n')
    for argv in (["status", "last"], ["runs"], ["report", run.name], ["replay", run.name, *HERE]):
        capsys.readouterr()
        assert palaestra(*argv) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slots
def test_no_line_of_a_journal_breaks_a_reader(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    journal = run / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    deep = '{"event": "note", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    broken: list[tuple[str, ...]] = [(json.dumps(lines[0]), deep, *map(json.dumps, lines[1:]))]
    for name, value in {"openai": 3, "env": [], "sources": [[]], "provenance": "x", "command": {}, "folder": 5}.items():
        broken.append(tuple(map(json.dumps, [{**lines[0], "config": {**lines[0]["config"], name: value}}, *lines[1:]])))
    broken.append(tuple(map(json.dumps, [{**lines[0], "at": -1e300}, *lines[1:]])))
    for line in lines:
        if line["event"] == "rollout":
            line["trajectory"]["reward"] = -1e300
    broken.append(tuple(map(json.dumps, lines)))
    for each in broken:
        journal.write_text("\n".join(each) + "\n")
        for command, *options in (*READING, ["runs"]):
            capsys.readouterr()
            assert palaestra(command, *([run] if command != "runs" else []), *options) in (0, 1, 2, 3)
            assert "Traceback" not in capsys.readouterr().err
    journal.write_bytes(b"")
    os.truncate(journal, 1 << 40)
    for command in ("status", "report", "verify", "resume"):
        assert palaestra(command, run) == 2
        assert "256 MiB" in capsys.readouterr().err


@pytest.mark.slots
def test_a_link_that_waits_for_a_name_is_not_written_through(folder: Path) -> None:
    """In the place of a file that is written before it replaces another, and below the folder's top."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    victim, outside = folder / "victim", folder / "outside"
    victim.write_text("kept")
    outside.mkdir()
    for name in ("report.html", "status.json"):
        (run / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
    assert palaestra("report", run) == 0
    assert victim.read_text() == "kept"
    for name in ("report.html", "status.json"):
        (run / f".{name}.{os.getpid()}.tmp").unlink()
    (run / "workspaces").mkdir()
    (run / "workspaces/000001-task-1").symlink_to(outside)
    keep = ("--tasks", "2", "--env.save_workspaces", "true", "--policy", "oracle")
    assert palaestra("resume", run, *keep) == 2
    assert os.listdir(outside) == []


@pytest.mark.slots
def test_an_export_stays_in_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link, a FIFO or a device waits in the place where the export is written."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    victim, outside = folder / "victim", folder / "outside"
    victim.write_text("kept")
    outside.mkdir()
    (run / "exports").mkdir()
    (run / f"exports/.openai.jsonl.{os.getpid()}.tmp").symlink_to(victim)
    (run / "exports/openai.jsonl").symlink_to("/dev/full")
    os.mkfifo(run / "exports/openai_1.jsonl")
    assert palaestra("export", run, "--to", "openai") == 0
    assert victim.read_text() == "kept"
    assert (run / "exports/openai_2.jsonl").is_file()
    (run / "exports").rename(folder / "away")
    (run / "exports").symlink_to(outside)
    capsys.readouterr()
    assert palaestra("export", run, "--to", "openai") == 2
    assert "is a link" in capsys.readouterr().err
    assert os.listdir(outside) == []


@pytest.mark.slots
@pytest.mark.parametrize("flag", ["--env.isolation=none", "--env.mcp_servers={evil}", "--show-config", "-h", "x"])
def test_a_recorded_command_is_no_flag(flag: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded command is the first word of a command line that resumes the run."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1").rename(folder / "elsewhere")
    evil = json.dumps({"evil": {"command": "touch", "args": [str(folder / "ran")]}})

    def forge(event: AnyJournalEvent) -> None:
        if isinstance(event, RunStarted):
            event.config["command"] = flag.format(evil=evil) if "{" in flag else flag

    change(run, forge)
    capsys.readouterr()
    assert palaestra("resume", run, "--environment", "recorded_env.py", "--policy", "oracle") == 2
    shown = capsys.readouterr()
    assert "which cannot be continued" in shown.err
    assert shown.out == ""
    assert not (folder / "ran").exists()


@pytest.mark.slots
def test_settings_of_a_training_have_a_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    (run / "training").mkdir()
    wrong = "3", "{}", '{"trainer": "trl", "training": 3}', '{"trainer": "evil", "training": {}}', "[" * 100_000
    for text in wrong:
        (run / "training/settings.json").write_text(text)
        capsys.readouterr()
        assert palaestra("train", "--resume", run, "--model", "m") == 2
        assert "training run" in capsys.readouterr().err


LOOKING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def noisy():
    yield Task(id="task-0", prompt="?", files={"a.txt": "x"})

@noisy.score
async def there(sandbox):
    assert "secret" not in (await sandbox.execute("ls /workspace; cat /workspace/*")).output
    return 1
"""


@pytest.mark.slots
@pytest.mark.slow
def test_a_kept_workspace_shows_no_file_of_this_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path leads out of the run's folder, or links in it do: the server that mounts it sees the host."""
    run = record(folder, NOISY, "process", "--env.total_steps", "1", "--env.save_workspaces", "true")
    (folder / "looking_env.py").write_text(LOOKING)
    host = folder / "host"
    (host / "0/root/workspace").mkdir(parents=True)
    (host / "0/usr").mkdir()
    (host / "0/root/workspace/secret").write_text("secret")
    (kept,) = run.glob("workspaces/*/0")

    def name(value: object) -> None:
        def forge(event: AnyJournalEvent) -> None:
            if isinstance(event, RolloutEnded):
                event.trajectory.beside.sandbox["workspace"] = value

        change(run, forge)

    for value in (str(host), 5, ["x"], f"{run}/workspaces/../../../../{host.name}", "\x00"):
        name(value)
        capsys.readouterr()
        assert palaestra("grade", run, "--environment", "looking_env.py") == 2, value
        assert "workspace" in capsys.readouterr().err
    name(str(kept))
    for linked in ("", "0", "0/root", "1/root"):
        original = (kept / linked).rename(folder / "original")
        target = host if linked == "" else host / "0" if linked == "0" else host / "0/root"
        for prefix in ("", "/host"):  # as the server sees it
            (kept / linked).symlink_to(f"{prefix}{target}")
            capsys.readouterr()
            assert palaestra("grade", run, "--environment", "looking_env.py") == 2, linked
            (kept / linked).unlink()
        original.rename(kept / linked)
    assert palaestra("grade", run, "--environment", "looking_env.py") == 0


@pytest.mark.slots
def test_metrics_of_another_shape_are_no_metrics(folder: Path) -> None:
    run = record(folder, NOISY, "process", "--env.total_steps", "1")
    before = open_run(run).metrics
    for text in ("3", "[]", '"x"', '{"rollouts": []}', "{", '{"rollouts": 1e999}'):
        (run / "metrics.jsonl").write_text(f"{text}\n")
        found = open_run(run).metrics
        assert found.keys() <= before.keys()
