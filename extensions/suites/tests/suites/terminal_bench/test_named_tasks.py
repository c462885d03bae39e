"""`harbor:NAME`: a dataset of a registry is fetched and run, and errors name the places that were searched."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import palaestra
from golden_messages import raises
from palaestra.envs.discovery import load_environment
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_suites.terminal_bench.named_tasks import Folders, _Named, named_folders
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from suites.terminal_bench.mini import HARBOR
from suites.test_git_checkout import git


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, because Harbor's cache is in it, and an empty folder as the current one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def repository(folder: Path, *names: str) -> dict[str, Any]:
    """A repository with tasks, as the fields of a registry's task."""
    for name in names:
        shutil.copytree(HARBOR / name, folder / "tasks" / name)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "tasks")
    return {"git_url": folder.as_uri(), "git_commit_id": git(folder, "rev-parse", "HEAD")}


def task(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "path": f"tasks/{name}", **fields}


def registry(folder: Path, *datasets: tuple[str, str, list[dict[str, Any]]]) -> Path:
    rows = [{"name": name, "version": version, "description": "", "tasks": tasks} for name, version, tasks in datasets]
    (folder / "registry.json").write_text(json.dumps(rows))
    return folder / "registry.json"


def found(name: str, at: Path | None = None, cache: Path = Path("cache")) -> Folders:
    return asyncio.run(named_folders(name, None if at is None else str(at), cache))


def test_a_dataset_of_a_registry_is_fetched_and_loaded(tmp_path: Path) -> None:
    at = repository(tmp_path / "repository", "partial", "greeting")
    at_registry = registry(tmp_path, ("mini", "1.0", [task("partial", **at), task("greeting", **at)]))
    config = TerminalBench2EvalConfig(
        dataset_name="harbor:mini@1.0", registry=str(at_registry), cache_dir=str(tmp_path / "cache"), task_filter="p*"
    )
    env = TerminalBenchEnvironment(config)
    assert [item.name for item in asyncio.run(env.load())] == ["partial"]
    form = load_environment("harbor:mini@1.0", tmp_path)
    assert form.reference == "harbor:mini@1.0"
    assert form.defaults()[0].dataset_name == "harbor:mini@1.0"
    assert load_environment("harbor://mini", tmp_path).reference == "harbor:mini"


def test_a_folder_of_tasks_comes_before_a_registry(tmp_path: Path) -> None:
    shutil.copytree(HARBOR / "partial", "mini/partial")
    registry(Path(), ("mini", "1.0", []))
    assert load_environment("harbor:mini", Path()).defaults()[0].dataset_name == str(Path("mini").resolve())
    assert load_environment(f"harbor:{HARBOR}", Path()).defaults()[0].dataset_name == str(HARBOR)
    with raises(ConfigError, "/nowhere/at/all"):
        load_environment("harbor:/nowhere/at/all", Path())


def test_the_version_is_chosen_as_harbor_does() -> None:
    local = [{"name": "a", "path": "a"}]
    Path("a").mkdir()
    rows = [
        ("d", version, local if version == wanted else []) for version in ("1.9", "1.10", "beta") for wanted in ["1.10"]
    ]
    registry(Path(), *rows, ("h", "2.0", []), ("h", "head", local))
    assert [name for name, *_ in found("d")] == ["a"]
    assert [name for name, *_ in found("h")] == ["a"]
    with raises(ConfigError):
        found("d@1.9")
    with raises(ConfigError, "beta"):
        found("d@3")


def test_one_bad_task_does_not_prevent_the_others(tmp_path: Path) -> None:
    at = repository(tmp_path / "here/repository", "partial")
    (tmp_path / "secret").mkdir()
    rows = [
        task("partial", **at),
        task("missing", **at),
        {"name": "out", "path": "../secret"},
        {"name": "absolute", "path": str(tmp_path / "secret")},
        task("program", git_url="ext::touch ran", git_commit_id="a" * 40),
        task("private", **repository(tmp_path / "private", "partial")),
        task("gone", git_url=(tmp_path / "here/gone").as_uri(), git_commit_id="a" * 40),
    ]
    registry(Path(), ("mini", "1", rows))
    folders = {name: folder for name, folder, _ in found("mini")}
    assert isinstance(folders["partial"], Path)
    assert (folders["partial"] / "task.toml").is_file()
    assert {name for name, folder in folders.items() if isinstance(folder, TaskError)} == set(folders) - {"partial"}
    assert not Path("ran").exists()


def test_what_harbor_has_downloaded_is_used(home: Path) -> None:
    packages = home / ".cache/harbor/tasks/packages/org/thing"
    for digest in ("a" * 64, "b" * 64):
        shutil.copytree(HARBOR / "partial", packages / digest)
    assert found("org/thing@sha256:" + "b" * 64) == [("thing", packages / ("b" * 64), False)]
    with raises(ConfigError, "downloaded", "org/thing"):
        found("org/thing")
    shutil.rmtree(packages / ("a" * 64))
    assert found("org/thing") == [("thing", packages / ("b" * 64), False)]
    # The name of this folder was made by Harbor 0.26, `GitTaskId.get_local_path`.
    of_git = home / ".cache/harbor/tasks/2GXpeH2Y2s6uQXBz992YGE/x"
    of_git.mkdir(parents=True)
    assert _Named("x", "tasks/x", "https://github.com/a/b.git", "a" * 40).in_harbors_cache() == of_git
    assert _Named("x", "tasks/x", "https://github.com/a/b.git", "main").in_harbors_cache() is None


def test_errors_name_the_places_that_were_searched(tmp_path: Path) -> None:
    with raises(ConfigError, "'mini@1'", "/here/registry.json"):
        found("mini@1")
    registry(Path(), ("minimal", "1", []))
    with raises(ConfigError, "minimal", "harbor download mini`"):
        found("mini")
    with raises(ConfigError, "packages/org/mini"):
        found("org/mini")
    with raises(ConfigError):
        found("mini", tmp_path / "none.json")
    Path("registry.json").write_text('{"datasets": []}')
    with raises(ConfigError):
        found("mini")
    with raises(ConfigError, "terminal-bench"):
        load_environment("terminal-bench@2.0", Path())


@pytest.mark.slots
def test_a_run_of_a_registrys_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = repository(tmp_path / "here/repository", "partial", "word-counts")
    registry(Path(), ("mini", "1.0", [task("partial", **at), task("word-counts", **at)]))
    command = [
        sys.executable,
        "-m",
        "palaestra",
        "eval",
        "harbor:mini@1.0",
        "--policy",
        "oracle",
        "--env.base_image",
        "host",
        "--json",
    ]
    done = subprocess.run([*command, "--env.cache_dir", "cache"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rollouts"], result["mean_reward"]) == (2, 1.0)


@pytest.mark.slots
@pytest.mark.parametrize("reference", ["harbor:mini@1.0", "harbor:repository/tasks"])
def test_a_killed_run_resumes_elsewhere(tmp_path: Path, reference: str) -> None:
    """A dataset and a folder: the run is killed during a rollout, and resumed from another folder."""
    names = ("greeting", "partial", "word-counts")
    at = repository(tmp_path / "here/repository", *names)
    registry(Path(), ("mini", "1.0", [task(name, **at) for name in names]))
    settings = ["--policy", "oracle", "--group", "3", "--concurrency", "1", "--env.cache_dir", "cache"]
    palaestra_command = [sys.executable, "-m", "palaestra"]
    with subprocess.Popen(
        [*palaestra_command, "run", reference, *settings, "--env.base_image", "host"], stderr=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + 60
        while len(ended(tmp_path)) < 4:
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.kill()
    before = ended(tmp_path)
    assert len(before) < 9
    (journal,) = (tmp_path / "here/runs").glob("*/*/journal.jsonl")
    resume = [*palaestra_command, "resume", str(journal.parent)]
    done = subprocess.run(resume, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    run = palaestra.open_run(journal.parent)
    assert {each.rollout_id for each in run.trajectories} >= set(before)
    assert sorted(each.task_id for each in run.trajectories) == sorted([*names] * 3)
    assert [each.reward for each in run.trajectories] == [1.0] * 9


def ended(folder: Path) -> list[str]:
    """The ids of the rollouts that have ended."""
    journals = list((folder / "here/runs").glob("*/*/journal.jsonl"))
    lines = [line for line in journals[0].read_text().splitlines() if line.endswith("}")] if journals else []
    events = [event for event in map(json.loads, lines) if event["event"] == "rollout"]
    return [event["trajectory"]["rollout_id"] for event in events]
