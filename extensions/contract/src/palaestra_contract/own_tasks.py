"""The settings of a run, for the tasks that a class or a program runs itself outside rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from palaestra.envs.config.build import command_timeout_s, pool_limits
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.rollouts.spec import RecordedTools
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import Tool
from palaestra_contract.tools.session_tasks import ToolSessionConfig
from palaestra_slots.sandbox.backends.registry import make_backend


def policy(config: HermesAgentEnvConfig) -> ToolSessionConfig:
    """Return the permissions and limits of calls outside rollouts."""
    return ToolSessionConfig(
        allow_network=config.allow_network,
        require_sandbox=config.require_sandbox,
        timeout_s=command_timeout_s(config),
        # A replay starts no servers.
        mcp=None if config.world == "replay" else {**config.mcp_servers},
    )


def session_settings(
    config: HermesAgentEnvConfig, tools: Iterable[Tool] = (), world: RecordedTools | None = None
) -> dict[str, Any]:
    """Return the arguments of a `ToolSession` for tasks by name. `tools` are the environment's own, in addition to all
    others."""
    replayed = world is not None and world.replayed
    return {
        "registry": unrestricted(ToolRegistry(tools, settings=config, replayed=replayed)),
        "config": policy(config),
        "backend": make_backend(config.slot_backend, config),
        "settings": config,
        "world": world,
        "limits": pool_limits(config, config.slot_backend),
    }
