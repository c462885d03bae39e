"""Settings, variables and the contract's names lead to the same pool."""

from __future__ import annotations

import asyncio

import pytest

from palaestra.core.config import merge
from palaestra.core.errors import ConfigError
from palaestra.envs.config.build import create_tool_backend, make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.envs.config.layers import read_environ
from palaestra.sandbox.backends.docker import DockerBackend
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.backends.ssh import SSHBackend
from palaestra.sandbox.docker_pool import DockerDirectBackend
from palaestra.sandbox.pool import SlotPool, ToolBackend
from palaestra.sandbox.slot import SlotSpec


def by_variables(**variables: str) -> HermesAgentEnvConfig:
    return merge(HermesAgentEnvConfig, [read_environ(variables, "env", HermesAgentEnvConfig)]).value


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


def test_docker_direct_has_images_per_trajectory() -> None:
    pool = create_tool_backend(HermesAgentEnvConfig(tool_pool_mode="docker_direct", docker_image="a:1"))
    assert isinstance(pool, DockerDirectBackend)
    assert isinstance(pool.backend, DockerBackend)


def test_the_usual_pool_is_of_this_machine() -> None:
    assert isinstance(create_tool_backend(HermesAgentEnvConfig()).backend, LocalBackend)


def test_what_no_run_can_start_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="daytona"):
        create_tool_backend(HermesAgentEnvConfig(terminal_backend="daytona"))


@pytest.mark.slots
def test_the_contracts_calls_of_a_tool_backend() -> None:
    async def main() -> None:
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

    asyncio.run(main())
