"""Settings, variables and the contract's names lead to the same pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.config.layers import read_environ
from palaestra_contract.pools import DockerDirectBackend, create_tool_backend
from palaestra_slots.core.config import merge
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.backends.docker import DockerBackend
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.ssh import SSHBackend
from palaestra_slots.sandbox.pool import SlotPool, ToolBackend
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_tokens.config import APIServerConfig


def by_variables(**variables: str) -> HermesAgentEnvConfig:
    return merge(HermesAgentEnvConfig, [read_environ(variables, "env", HermesAgentEnvConfig)]).value


def parse(words: list[str], environ: Mapping[str, str] | None = None) -> Parsed[HermesAgentEnvConfig, APIServerConfig]:
    parsed = CommandLine("x", HermesAgentEnvConfig, APIServerConfig, command="process").parse(words, environ or {})
    assert isinstance(parsed, Parsed)
    return parsed


@pytest.mark.parametrize(
    "config",
    [
        HermesAgentEnvConfig(tool_pool_mode="docker", docker_image="a:1", slots_per_container=3, max_containers=2),
        HermesAgentEnvConfig(terminal_backend="docker", docker_image="a:1", slots_per_container=3, max_containers=2),
        by_variables(
            TERMINAL_ENV="docker", TERMINAL_DOCKER_IMAGE="a:1", TERMINAL_NOMAD_SLOTS="3", TERMINAL_NOMAD_MAX="2"
        ),
        by_variables(
            TERMINAL_ENV="slot_pool", TERMINAL_SLOT_BACKEND="docker", TERMINAL_DOCKER_IMAGE="a:1",
            TERMINAL_NOMAD_SLOTS="3", TERMINAL_NOMAD_MAX="2",
        ),
    ],
    ids=["tool_pool_mode", "terminal_backend", "TERMINAL_ENV", "TERMINAL_SLOT_BACKEND"],
)  # fmt: skip
def test_all_ways_lead_to_the_same_pool(config: HermesAgentEnvConfig) -> None:
    for pool in (make_pool(config), create_tool_backend(config)):
        assert isinstance(pool, ToolBackend)
        assert isinstance(pool.backend, DockerBackend)
        assert pool.backend.capacity == 6
        assert pool.backend.place_spec(SlotSpec()).image == "a:1"


def test_the_variables_of_ssh_are_in_force() -> None:
    config = by_variables(
        TERMINAL_ENV="ssh", TERMINAL_SSH_HOST="far", TERMINAL_SSH_USER="me", TERMINAL_SSH_PORT="2222",
        TERMINAL_SSH_KEY="/k",
    )  # fmt: skip
    backend = make_pool(config).backend
    assert isinstance(backend, SSHBackend)
    words = list(backend.command(backend.place_spec(SlotSpec()), ["true"]))
    assert " ".join(words[words.index("-l") : words.index("-l") + 6]) == "-l me -p 2222 -i /k"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 60.0),
        ({"acquire_timeout_s": 5.0}, 5.0),
        ({"modal_acquire_timeout": 7.0, "acquire_timeout_s": 5.0}, 7.0),
    ],
)
def test_the_wait_for_a_slot_of_modal_is_the_one_that_is_set(settings: dict[str, float], seconds: float) -> None:
    pool = make_pool(HermesAgentEnvConfig(tool_pool_mode="modal", **settings))  # type: ignore[arg-type]
    assert pool.config.acquire_timeout == seconds


def test_docker_direct_has_images_per_trajectory() -> None:
    pool = create_tool_backend(HermesAgentEnvConfig(tool_pool_mode="docker_direct", docker_image="a:1"))
    assert isinstance(pool, DockerDirectBackend)
    assert isinstance(pool.backend, DockerBackend)


def test_the_usual_pool_is_of_this_machine() -> None:
    assert isinstance(create_tool_backend(HermesAgentEnvConfig()).backend, LocalBackend)


def test_what_no_run_can_start_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="daytona"):
        create_tool_backend(HermesAgentEnvConfig(terminal_backend="daytona"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--backend docker --env.privileged true", "docker_privileged"),
        ("--backend modal --env.slots_per_container 3", "modal_slots_per_sandbox"),
        ("--backend docker --env.modal_gpu A100", "modal_gpu"),
        ("--backend singularity --env.container_memory 2g", "container_memory"),
        ("--env.docker_image py:1", "docker_image.*docker.*local.*tool_pool_mode"),
        ("--env.creates_per_s 2", "creates_per_s"),
        ("--backend ssh --env.backend_options.level 5", "backend_options"),
    ],
)
def test_a_flag_that_the_backend_does_not_read_is_refused(words: str, named: str) -> None:
    parsed = parse(words.split())
    with pytest.raises(ConfigError, match=named):
        parsed.env_config.check_runnable(parsed.sources)


@pytest.mark.parametrize(
    "words",
    [
        "--backend docker --backend modal=overflow --env.docker_image py:1 --env.modal_gpu A100",
        "--backend docker_direct --env.docker_image py:1 --env.max_containers 3",
        "--backend docker --env.privileged false",
        "--backend default --env.terminal_backend modal --env.modal_image a:1",
    ],
)
def test_a_flag_that_a_backend_reads_or_that_changes_nothing_is_accepted(words: str) -> None:
    parsed = parse(words.split())
    parsed.env_config.check_runnable(parsed.sources)


def test_files_and_variables_may_hold_settings_of_other_backends(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text("env: {docker_image: a:1, modal_gpu: T4}")
    parsed = parse(["--config", str(tmp_path / "all.yaml"), "--backend", "docker"], {"TERMINAL_SSH_HOST": "far"})
    parsed.env_config.check_runnable(parsed.sources)


@pytest.mark.slots
async def test_the_contracts_calls_of_a_tool_backend() -> None:
    pool: SlotPool = create_tool_backend(HermesAgentEnvConfig())
    await pool.start()
    try:
        slot = await pool.acquire("t")
        (result,) = await pool.execute_batch([(slot, "bash", {"command": "sleep 9"})], timeout_s=0.3)
        assert result.metadata["timeout"] is True
        assert pool.default_timeout_s > 0
        await pool.release(slot, reset_workspace=True)
    finally:
        await pool.stop()
