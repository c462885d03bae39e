"""Paths in settings mean what a shell would make of them, or are refused with the name of the setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import palaestra
from golden_messages import check_message, raises
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.config.host_path import HostPath
from palaestra_chat.batch.prompts import BatchConfig
from palaestra_slots.core.config import local_path, slot_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import ReplayPolicy, policy_named


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.delenv("NOWHERE", raising=False)
    return tmp_path


HOST_PATHS = [
    "data_path_to_save_groups", "data_dir_to_save_evals", "workspace_store", "world_file", "timings_from", "memory_dir",
    "sessions_dir", "skills_dir", "rl_dir", "rl_model", "drain_file", "singularity_image", "ssh_key", "dataset_name",
]  # fmt: skip


@pytest.mark.parametrize("name", HOST_PATHS)
def test_a_path_on_this_machine_is_expanded(home: Path, name: str) -> None:
    given: dict[str, JSON] = {name: "~/x"}
    assert getattr(HermesAgentEnvConfig(**given), name) == f"{home}/x"
    given[name] = "${DATA}/x"
    assert getattr(HermesAgentEnvConfig(**given), name) == f"{home}/data/x"
    given[name] = "$NOWHERE/x"
    with raises(ConfigError, name):
        HermesAgentEnvConfig(**given)


def test_other_settings_keep_their_text() -> None:
    assert HermesAgentEnvConfig(system_prompt="~ costs $5 and $NOWHERE").system_prompt == "~ costs $5 and $NOWHERE"


def test_a_class_that_declares_the_setting_again_still_expands_it(home: Path) -> None:
    class Own(HermesAgentEnvConfig):
        dataset_name: str | None = "~/rows.jsonl"

    assert Own(dataset_name="~/a.jsonl").dataset_name == f"{home}/a.jsonl"


def test_files_of_a_batch_and_a_server_are_expanded(home: Path) -> None:
    assert BatchConfig(prefill_messages_file="~/m.json").prefill_messages_file == f"{home}/m.json"
    assert APIServerConfig(model_name="$DATA/model").model_name == f"{home}/data/model"


def test_a_replay_in_the_home_is_found(home: Path) -> None:
    (home / "run.jsonl").write_text("")
    assert isinstance(policy_named("replay:~/run.jsonl"), ReplayPolicy)


def test_an_option_with_an_equals_sign_is_expanded(home: Path) -> None:
    @click.command()
    @click.option("--out", type=HostPath())
    def command(out: Path) -> None:
        click.echo(out)

    assert CliRunner().invoke(command, ["--out=~/x"]).output.strip() == f"{home}/x"
    refused = CliRunner().invoke(command, ["--out=$NOWHERE/x"])
    assert refused.exit_code == 2
    check_message(refused.output, "NOWHERE")


def test_a_path_in_the_sandbox_knows_its_home() -> None:
    given = ["~", "~/out/", "$HOME/x", "/opt/./t"]
    assert HermesAgentEnvConfig(graded_paths=given).graded_paths == ["/root", "/root/out", "/root/x", "/opt/t"]


@pytest.mark.parametrize("path", ["out", "", "~user/x", "$DATA", "/opt/*", "/opt/../etc"])
def test_a_path_in_the_sandbox_that_cannot_be_meant_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="graded_paths"):
        HermesAgentEnvConfig(graded_paths=[path])
    with raises(ConfigError):
        slot_path(path)


def test_a_lone_dollar_is_a_character() -> None:
    assert local_path("a$") == Path("a$")


@pytest.mark.slots
def test_a_task_may_name_a_path_in_the_home_of_its_sandbox(home: Path) -> None:
    @palaestra.environment
    def homely() -> Iterator[palaestra.Task]:
        yield palaestra.Task(id="kept", prompt="?", solution="echo 1 > ~/out.txt", paths=["~/out.txt"])
        yield palaestra.Task(id="odd", prompt="?", solution="echo 1 > ~/out.txt", paths=["out.txt"])

    @homely.score
    async def correct(sandbox: palaestra.Slot) -> bool:
        return (await sandbox.read_text("/root/out.txt", missing="")) == "1\n"

    played = palaestra.run_sync(homely, policy="oracle", folder=home)
    groups = {group.task_id: group for group in played.groups}
    assert [each.reward for each in groups["kept"].trajectories] == [1.0]
    assert "'out.txt' is not an absolute" in groups["odd"].error
