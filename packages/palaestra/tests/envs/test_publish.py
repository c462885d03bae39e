from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.envs.publish import publish
from palaestra_slots.core.errors import ConfigError

SOURCE = '''"""Words in a file."""

import json
from pathlib import Path

import msgspec
from palaestra import Task, environment

WORDS = json.loads(Path(__file__).with_name("words.json").read_text())


@environment(toolsets=["terminal"])
def words(n: int = 2):
    """Count words."""
    for i, word in enumerate(WORDS[:n]):
        yield Task(f"word-{i}", "Copy the word", files={"a": word}, solution="cp a b", answer=word)


@words.score
async def right(task, sandbox):
    return await sandbox.read_text("b", missing="") == task.answer
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("words.json").write_text('["a", "b"]')
    Path("words_env.py").write_text(SOURCE)
    return Path("words_env.py")


@pytest.mark.slow
@pytest.mark.slots
def test_a_published_environment_runs_by_name_elsewhere(source: Path, tmp_path: Path) -> None:
    made = publish("words_env.py", Path("dist"), version="1.2", data=[Path("words.json")])
    assert (made.name, made.ours) == ("words", ["palaestra"])
    assert [each.partition(">=")[0] for each in made.requires] == ["msgspec"]
    target, other = tmp_path / "installed", tmp_path / "other"
    other.mkdir()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(made.path)], check=True)
    source.unlink()
    environ = {**os.environ, "PYTHONPATH": str(target)}
    palaestra = [sys.executable, "-m", "palaestra"]
    show = subprocess.run(
        [*palaestra, "env", "list"], cwd=other, env=environ, capture_output=True, text=True, check=True
    )
    assert "words " in show.stdout
    run = [*palaestra, "run", "words", "--policy", "oracle", "--json"]
    played = subprocess.run(run, cwd=other, env=environ, capture_output=True, text=True, check=True)
    assert '"mean_reward": 1.0' in played.stdout


def test_a_file_that_is_missing_in_the_wheel_is_noticed(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"words\.json"):
        publish("words_env.py", Path("dist"))
    assert not Path("dist").exists()


def test_the_same_environment_gives_the_same_wheel(source: Path) -> None:
    data = [Path("words.json")]
    first, second = (publish("words_env.py", Path(folder), data=data).path.read_bytes() for folder in ("one", "two"))
    assert first == second


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import helper", "helper.py"),
        ("def late():\n    from helper import x", "helper.py"),
        ("DATA = '{here}/words.json'", "words.json"),
        ("DATA = '{home}/models/x'", "models/x"),
    ],
)
def test_what_only_this_machine_has_is_refused(source: Path, tmp_path: Path, code: str, names: str) -> None:
    Path("helper.py").write_text("x = 1")
    source.write_text(SOURCE + code.format(here=tmp_path.resolve(), home=Path.home().resolve()) + "\n")
    with pytest.raises(ConfigError, match=names):
        publish("words_env.py", Path("dist"))
    assert not Path("dist").exists()


@pytest.mark.parametrize(
    ("reference", "version", "data"),
    [
        ("words_env.py", "one", ""),
        ("words", "1", ""),
        ("words_env.py", "1", "missing.json"),
        ("words_env.py", "1", "."),
    ],
)
def test_what_makes_no_package_is_refused(source: Path, reference: str, version: str, data: str) -> None:
    with pytest.raises(ConfigError):
        publish(reference, Path("dist"), version=version, data=[Path(data)] if data else [])
    assert not Path("dist").exists()


@pytest.mark.parametrize("name", ["json.py", "palaestra_words.py", "my-words.py"])
def test_a_file_that_would_hide_another_package_is_refused(source: Path, name: str) -> None:
    source.rename(name)
    with pytest.raises(ConfigError, match="rename"):
        publish(name, Path("dist"))
