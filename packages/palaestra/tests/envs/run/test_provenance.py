"""The version of an environment's code, by which runs and grades know that a score is the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from palaestra.envs.discovery import environment_file
from palaestra.envs.run.provenance import environment_hash, provenance


def test_an_installed_environment_has_the_version_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("count_lines", "swe_smith_oracle"):
        file = environment_file(name)
        assert file is not None
        assert environment_hash(name) == hashlib.sha256(file.read_bytes()).hexdigest()
        assert provenance(name)["environment_sha256"] == environment_hash(name)
        assert "git_commit" not in provenance(name)


def test_a_folder_of_tasks_has_the_version_of_the_environment_that_plays_it(tmp_path: Path) -> None:
    (tmp_path / "tasks/one").mkdir(parents=True)
    (tmp_path / "tasks/one/task.toml").write_text("")
    assert environment_hash(str(tmp_path / "tasks")) == environment_hash("terminalbench_2") != ""


@pytest.mark.parametrize("reference", ["my_env.py", "my_env.py:other", "inspect:my_env.py@sums"])
def test_a_file_has_the_version_of_its_content(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment_hash(reference) == ""
    Path("my_env.py").write_text("x = 1")
    assert environment_hash(reference) == hashlib.sha256(b"x = 1").hexdigest()


@pytest.mark.parametrize("reference", ["nothing_of_this_name", "verifiers:some-package", "/no/such/folder"])
def test_an_unknown_file_has_no_version(reference: str) -> None:
    assert environment_hash(reference) == ""
