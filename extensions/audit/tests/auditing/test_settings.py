"""The settings that an audit keeps, and what its results depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.envs.config.secret_flags import missing_settings, split_secrets
from palaestra_audit.audit import _task_digest
from palaestra_audit.code_digests import _referenced_files
from palaestra_slots.core.types import Task


@pytest.mark.parametrize(
    ("words", "secret"),
    [
        (["--env.seed", "3", "--env.only_tasks", "a", "b"], []),
        (["--openai.api_key", "x"], ["--openai.api_key"]),
        (["--openai.api-key=x"], ["--openai.api-key"]),
        (["--env.env_vars.HOME", "/x"], ["--env.env_vars.HOME"]),
        (["--env.judge", '{"model": "a", "api_key": "x"}'], ["--env.judge"]),
        (["--base-url", "http://user:word@host/v1"], ["--base-url"]),
        (["--env.metrics_token=x"], ["--env.metrics_token"]),
        (["--env.extra_body", '{"headers": {"authorization": "Bearer x"}}'], ["--env.extra_body"]),
    ],
)
def test_secret_settings_are_left_out(words: list[str], secret: list[str]) -> None:
    assert split_secrets(["--env.group_size", "1", *words]) == (
        ["--env.group_size", "1", *([] if secret else words)],
        secret,
    )


def test_a_secret_setting_is_missing_unless_something_sets_it() -> None:
    secret = ["--openai.api-key", "--env.judge_api_key", "--base-url"]
    sources = {"openai.api_key": "default", "env.judge_api_key": "environment"}
    assert missing_settings(secret, ["--base-url", "http://a:b@host"], sources) == ["--openai.api-key"]
    several = {"openai[0].api_key": "environment", "openai[1].api_key": "default"}
    assert missing_settings(secret[:1], [], several) == []


def test_results_depend_on_the_files_of_the_code_and_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_eval.py"
    for text in ("a", "b"):
        file.write_text(text)
        assert set(_referenced_files("inspect:my_eval.py@task")) == set(_referenced_files("my_eval.py:task")) == {file}
    assert not set(_referenced_files("verifiers:words"))

    digests = set()
    for text in ("a", "b"):
        file.write_text(text)
        digests.add(_task_digest(Task(id="a", prompt="b", data={"file": file}), "salt"))
    assert len(digests) == 2


def test_a_task_has_one_digest_in_every_process() -> None:
    code = """
from palaestra_audit.audit import _task_digest
from palaestra_slots.core.types import Task
task = Task(id="a", prompt="b", data={"words": frozenset("abcdefgh"), "of": {"b": 1, "a": {"c", "d"}}})
print(_task_digest(task, ""))
"""
    found = set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert len(found) == 1
