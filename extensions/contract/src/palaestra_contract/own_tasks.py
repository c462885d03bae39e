"""The settings of a run, for the tasks that a class or a program runs itself outside rollouts."""

from __future__ import annotations

from palaestra.envs.config.build import command_timeout_s
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_contract.tools.session_tasks import ToolSessionConfig


def policy(config: HermesAgentEnvConfig) -> ToolSessionConfig:
    """Return the permissions and limits of calls outside rollouts."""
    return ToolSessionConfig(
        allow_network=config.allow_network,
        require_sandbox=config.require_sandbox,
        timeout_s=command_timeout_s(config),
        # A replay starts no servers.
        mcp=None if config.world == "replay" else {**config.mcp_servers},
    )
