"""Converts an environment's configuration into the parts of a run: the agent's settings, tools, network and slots."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.agent.budget import Budget
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.rollouts.grading.reward import RewardRule
from palaestra.rollouts.spec import AgentSettings, RecordedTools
from palaestra.tools.mcp.mcp_config import toolset_of
from palaestra.tools.registry.build import RunConditions, ToolServer, build_tool_registry, installed_tools
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import States, Tool
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Network, NetworkPolicy, Prices
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend, Rung
from palaestra_tokens.config import APIServerConfig

if TYPE_CHECKING:
    from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
    from palaestra.tools.mcp.run_servers import MCPServers
    from palaestra_slots.sandbox.snapshots.cache import Prepared
    from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

logger = logging.getLogger(__name__)


def agent_settings(config: HermesAgentEnvConfig) -> AgentSettings:
    lasting = {"memory": "memory_dir", "session_search": "sessions_dir"}
    return AgentSettings(
        max_turns=config.max_agent_turns,
        temperature=config.agent_temperature,
        max_tokens=config.max_token_length,
        system_prompt=system_prompt(config),
        extra_body=extra_body(config),
        tool_timeout_s=command_timeout_s(config),
        budget=budget(config),
        prices=prices(config),
        beyond=frozenset(name for name, each in lasting.items() if vars(config).get(each)),
        freeze=config.freeze_slots,
        reward=RewardRule(config.reward),
        strict_labels=frozenset(config.strict_labels),
    )


def command_timeout_s(config: HermesAgentEnvConfig) -> float:
    """Return the time limit of a command whose call sets none, in seconds."""
    if config.slot_backend == "modal" and "modal_execution_timeout" in config.model_fields_set:
        return float(getattr(config, "modal_execution_timeout", 0))
    return float(config.terminal_timeout)


THINKING_PROMPT = """\
Before you answer or call a tool, think step by step inside <think> and </think> tags. Put only your thoughts there."""


def system_prompt(config: HermesAgentEnvConfig) -> str | None:
    """Return the agent's system message. If the settings request thinking, the text that asks the model for it comes
    first."""
    thinking = config.custom_thinking_prompt or (THINKING_PROMPT if config.thinking_mode else None)
    return "\n\n".join(filter(None, (thinking, config.system_prompt))) or None


def extra_body(config: HermesAgentEnvConfig) -> dict[str, JSON] | None:
    """Return the additional fields of every model request: the reasoning settings, and the configured fields."""
    body: dict[str, JSON] = {}
    if config.reasoning_effort is not None:
        body["reasoning_effort"] = config.reasoning_effort
    if config.max_reasoning_tokens is not None:
        body["reasoning"] = {"max_tokens": config.max_reasoning_tokens}
    return {**body, **(config.extra_body or {})} or None


def budget(config: HermesAgentEnvConfig) -> Budget:
    """Return the limits of one rollout, except `max_agent_turns`, because reaching that limit has an outcome of its
    own."""
    return Budget(
        tokens=config.max_rollout_tokens,
        completion_tokens=config.max_rollout_completion_tokens,
        output_bytes=config.max_rollout_output_bytes,
        cost=config.max_rollout_cost,
        wall_s=config.worker_timeout if config.worker_timeout > 0 else None,
        prices=prices(config),
    )


def prices(config: BaseEnvConfig) -> Prices | None:
    """Return the prices of the model's tokens; None if they are not set."""
    if config.prompt_price is None or config.completion_price is None:
        return None
    return Prices(config.prompt_price, config.completion_price)


def mcp_servers(config: BaseEnvConfig, *, forgiving: bool = False) -> MCPServers | None:
    """Return the enabled MCP servers of a run, not yet open; None if there are none. A replay reads servers and tools
    from the recorded run's journal. `forgiving` servers may fail to start. Raises `ConfigError`."""
    if not isinstance(config, HermesAgentEnvConfig) or not config.mcp_servers:
        return None
    from palaestra.tools.mcp.run_servers import MCPServers  # imported here, because most runs have no servers

    without = config.disabled_toolsets or ()
    if config.world != "replay" or config.world_file is None:
        return MCPServers(config.mcp_servers, without=without, forgiving=forgiving)
    from palaestra.rollouts.journal.reader import open_recording

    recording = Path(config.world_file)
    folder = recording if recording.is_dir() else recording.parent
    return MCPServers.recorded(config.mcp_servers, open_recording(folder).tools(), without=without)


def kit(
    config: HermesAgentEnvConfig,
    toolsets: Sequence[str] | None,
    rng: random.Random,
    extra: Iterable[Tool] = (),
    servers: MCPServers | None = None,
    shared: States | None = None,
) -> Kit:
    """Choose the tools of one group. Its toolsets are drawn from the configuration's `distribution` if that is set;
    otherwise they are the configuration's `enabled_toolsets` or, if those are None, `toolsets`. `rng` is the group's
    random generator; `extra` are the environment's own tools; `shared` holds objects that the tools of all groups
    share."""
    if config.distribution is not None:
        from palaestra.tools.registry.distributions import sample_toolsets_from_distribution  # imported here, as above

        enabled: Sequence[str] | None = sample_toolsets_from_distribution(config.distribution, rng)
    else:
        enabled = config.enabled_toolsets if config.enabled_toolsets is not None else toolsets
    registry = tools_with(servers, enabled, config, extra, shared=shared)
    return Kit(registry, () if enabled is None else (*enabled, *(servers.toolsets() if servers is not None else ())))


def warn_of_every_tool(config: HermesAgentEnvConfig, kit: Kit) -> None:
    """Log a warning if agents get all tools of this machine, `kit`, because the settings choose none."""
    if config.enabled_toolsets is None and config.distribution is None:
        logger.warning(
            "enabled_toolsets is not set, so agents get every tool that works here: %s. Set it for training, for "
            "example to `terminal file`.",
            ", ".join(kit.names),
        )


def tools_with(
    servers: MCPServers | None,
    enabled: Sequence[str] | None,
    config: HermesAgentEnvConfig,
    extra: Iterable[Tool],
    tool_server: ToolServer | None = None,
    shared: States | None = None,
) -> ToolRegistry:
    """Return `extra` and the tools of the enabled toolsets and of the run's MCP servers, without the tools of disabled
    toolsets. If there is a tool server, external tools run there."""
    offered = servers.installed() if servers is not None else ()
    own = {toolset_of(name) for name in config.mcp_servers}
    disabled = [name for name in config.disabled_toolsets or () if name not in own]
    if enabled is not None:
        enabled = list(dict.fromkeys([*enabled, *(each.toolset for each in offered)]))
    # These tools are passed as the run's own, so that a configured server is used whatever network the slots have.
    brought = [*extra, *(tool for each in offered for tool in each.tools)]
    installed = (*installed_tools(), *(replace(each, tools=()) for each in offered)) if offered else None
    return build_tool_registry(
        enabled,
        disabled,
        tool_server,
        brought,
        strict=config.strict_tools,
        installed=installed,
        settings=config,
        conditions=RunConditions(config.allow_network, config.world == "replay", shared),
    )


def server_settings(config: BaseEnvConfig, servers: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """Return the servers. A server that sets no tokenizer gets the environment's tokenizer. A server that sets no
    parser gets the environment's parser if that was set."""
    told: dict[str, str] = {}
    if config.tokenizer_name != "none":
        told["tokenizer_name"] = config.tokenizer_name
    if isinstance(config, HermesAgentEnvConfig) and "tool_call_parser" in config.model_fields_set:
        told["tool_parser"] = config.tool_call_parser
    return [
        server.model_copy(update={name: value for name, value in told.items() if name not in server.model_fields_set})
        for server in servers
    ]


def network_policy(allowed: bool) -> NetworkPolicy:
    """Return the network policy of a run. Preparation and the agent have a network if it is `allowed`, grading only if
    the task sets one."""
    network = Network.ON if allowed else Network.OFF
    return NetworkPolicy(prepare=network, agent=network, grade=Network.OFF)


def make_recorded_tools(config: BaseEnvConfig) -> RecordedTools:
    """Return the recorded replies of a run's tools. Raises `ConfigError` for a recording that cannot be read."""
    reads = config.world in ("replay", "fill")
    recording = config.world_file if reads else None  # in the other modes, the run's folder contains it

    def opened() -> RunWorld:
        # Imported here, because most runs call no tool that reaches outside.
        from palaestra.rollouts.recorded_tools.recording_policy import open_world

        return open_world(config.world, recording, strict=config.world_miss == "fail")

    recorded_tools = RecordedTools(opened)
    if reads:
        # Opened now: otherwise, only the first call of a tool would report a recording that cannot be read.
        recorded_tools.opened()
    return recorded_tools


def make_prepared(
    config: BaseEnvConfig, backend: Backend, trouble: Callable[[ConfigError], None]
) -> Callable[[], Prepared] | None:
    """Return what makes the prepared workspaces of this machine on first use; None if the settings do not keep any, or
    if the slots are not local. `trouble` is called when a workspace cannot be kept for other runs.

    Raises `ConfigError` for a `workspace_store` that cannot be used.
    """
    if not config.keep_workspaces or not isinstance(backend, LocalBackend):
        return None
    named, max_bytes = config.workspace_store, config.workspace_store_bytes
    opened = None if named is None else _store(local_path(named), max_bytes)  # now, because it may not be usable

    @functools.cache
    def prepared() -> Prepared:
        # Imported here, because only tasks with a recipe share workspaces with other runs.
        from palaestra_slots.sandbox.snapshots.cache import Prepared
        from palaestra_slots.sandbox.snapshots.folder import default_folder

        open_store = (lambda: _store(default_folder(), max_bytes)) if opened is None else opened.open
        return Prepared(backend, open_store, trouble=trouble)

    return prepared


def _store(folder: Path, max_bytes: int) -> SnapshotStore:
    from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

    return SnapshotStore(folder, max_bytes=max_bytes).open()


def unshared_because(config: BaseEnvConfig, backend: Backend) -> str:
    """Return why the `recipe` of tasks has no effect, although the settings keep prepared workspaces; otherwise
    nothing."""
    if not config.keep_workspaces:
        return ""
    if not isinstance(backend, LocalBackend):
        return f"sandboxes of the backend {backend.name} keep no prepared workspaces for other runs"
    if backend.rung < Rung.USERNS:
        return f"the isolation level {backend.rung.label} keeps no prepared workspaces for other runs"
    return ""


def make_pool(config: BaseEnvConfig, *, local: bool = False, start_when_used: bool = False) -> SlotPool:
    """Return the slots of a run. If `local`, they are on this machine, whatever backend the settings name. Raises
    `ConfigError` for an unknown backend, or for settings that the backend rejects. `start_when_used` is that of
    `SlotPool`."""
    name = config.slot_backend if isinstance(config, HermesAgentEnvConfig) and not local else "local"
    return SlotPool(pool_limits(config, name), make_backend(name, config), start_when_used=start_when_used)


def pool_limits(config: BaseEnvConfig, backend: str) -> SlotPoolConfig:
    """Return how many slots of the backend a run may have, and how long it waits for one."""
    slots = config.slots
    if slots is None and isinstance(config, HermesAgentEnvConfig) and "tool_pool_size" in config.model_fields_set:
        slots = config.tool_pool_size
    wait_s = config.acquire_timeout_s
    if isinstance(config, HermesAgentEnvConfig) and backend == "modal":
        wait_s = config.modal_wait_s
    return SlotPoolConfig(max_slots=slots, acquire_timeout=wait_s)
