"""Palaestra: one agent loop, one tool registry and one pool of isolated slots, for chat, batch generation and RL.

Every public name is imported from here. Importing the package loads none of them: each is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.atropos_agent import AgentConfig, AtroposAgent
    from palaestra.agent.delegates import Delegates
    from palaestra.agent.loop import HermesAgentLoop
    from palaestra.agent.result import AgentResult, AgentStep, ToolError
    from palaestra.core.types import AllowList, Limits, Network, NetworkPolicy, Outcome, Say, Score, Task, ToolStep
    from palaestra.envs.agent_env import AgentEnv
    from palaestra.envs.agent_env_config import AgentEnvConfig
    from palaestra.envs.base_env import BaseEnv, Item, ScoredDataGroup, ScoredDataItem
    from palaestra.envs.config import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.envs.function import environment
    from palaestra.envs.hermes_base_env import HermesAgentBaseEnv
    from palaestra.inference.config import APIServerConfig, ServerBaseline
    from palaestra.inference.parsers import get_parser, list_parsers, register_parser
    from palaestra.inference.servers import ServerManager
    from palaestra.processes.registry import ProcessRegistry
    from palaestra.rollouts.context import ToolContext
    from palaestra.rollouts.world.modes import open_world
    from palaestra.sandbox.base import ExecutionResult, Slot
    from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra.tools.catalog import (
        TOOL_TO_TOOLSET_MAP,
        TOOLSET_REQUIREMENTS,
        check_tool_availability,
        check_toolset_requirements,
        get_all_tool_names,
        get_available_toolsets,
        get_toolset_for_tool,
    )
    from palaestra.tools.distributions import (
        get_distribution,
        list_distributions,
        print_distribution_info,
        sample_toolsets_from_distribution,
        validate_distribution,
    )
    from palaestra.tools.executor import ToolExecutor, ToolExecutorConfig
    from palaestra.tools.functions import tool
    from palaestra.tools.process_registry import process_registry
    from palaestra.tools.registry import ToolRegistry, build_tool_registry, get_tool_definitions
    from palaestra.tools.schema import Tool, ToolMistake, ToolRun, ToolSchema
    from palaestra.tools.serving.payloads import (
        ArtifactArchiveRequestPayload,
        ArtifactArchiveResponsePayload,
        ArtifactListEntryPayload,
        ArtifactListRequestPayload,
        ArtifactListResponsePayload,
        ArtifactReadRequestPayload,
        ArtifactReadResponsePayload,
        ToolCallPayload,
        ToolExecutorExecuteRequest,
        ToolExecutorReleaseRequest,
        ToolResultPayload,
        ToolServerExecuteRequest,
    )
    from palaestra.tools.serving.tool_server import ToolServer
    from palaestra.tools.session import (
        ToolSession,
        cleanup_all_environments,
        cleanup_vm,
        clear_task_env_overrides,
        get_active_environments_info,
        handle_function_call,
        handle_function_call_async,
        register_task_env_overrides,
        use_session,
    )
    from palaestra.tools.settings import ToolSettings
    from palaestra.tools.wire import ToolCall, ToolResult

__version__ = "0.1.0"

__all__ = [
    "TOOLSET_REQUIREMENTS",
    "TOOL_TO_TOOLSET_MAP",
    "APIServerConfig",
    "AgentConfig",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentResult",
    "AgentStep",
    "AllowList",
    "ArtifactArchiveRequestPayload",
    "ArtifactArchiveResponsePayload",
    "ArtifactListEntryPayload",
    "ArtifactListRequestPayload",
    "ArtifactListResponsePayload",
    "ArtifactReadRequestPayload",
    "ArtifactReadResponsePayload",
    "AtroposAgent",
    "BaseEnv",
    "BaseEnvConfig",
    "Delegates",
    "ExecutionResult",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "Item",
    "Limits",
    "Network",
    "NetworkPolicy",
    "Outcome",
    "ProcessRegistry",
    "Say",
    "Score",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "Slot",
    "SlotPool",
    "SlotPoolConfig",
    "Task",
    "Tool",
    "ToolCall",
    "ToolCallPayload",
    "ToolContext",
    "ToolError",
    "ToolExecutor",
    "ToolExecutorConfig",
    "ToolExecutorExecuteRequest",
    "ToolExecutorReleaseRequest",
    "ToolMistake",
    "ToolRegistry",
    "ToolResult",
    "ToolResultPayload",
    "ToolRun",
    "ToolSchema",
    "ToolServer",
    "ToolServerExecuteRequest",
    "ToolSession",
    "ToolSettings",
    "ToolStep",
    "build_tool_registry",
    "check_tool_availability",
    "check_toolset_requirements",
    "cleanup_all_environments",
    "cleanup_vm",
    "clear_task_env_overrides",
    "environment",
    "get_active_environments_info",
    "get_all_tool_names",
    "get_available_toolsets",
    "get_distribution",
    "get_parser",
    "get_tool_definitions",
    "get_toolset_for_tool",
    "handle_function_call",
    "handle_function_call_async",
    "list_distributions",
    "list_parsers",
    "open_world",
    "print_distribution_info",
    "process_registry",
    "register_parser",
    "register_task_env_overrides",
    "sample_toolsets_from_distribution",
    "tool",
    "use_session",
    "validate_distribution",
]

_MODULES = {
    "APIServerConfig": "inference.config",
    "AgentConfig": "agent.atropos_agent",
    "AgentEnv": "envs.agent_env",
    "AgentEnvConfig": "envs.agent_env_config",
    "AgentResult": "agent.result",
    "AgentStep": "agent.result",
    "AllowList": "core.types",
    "ArtifactArchiveRequestPayload": "tools.serving.payloads",
    "ArtifactArchiveResponsePayload": "tools.serving.payloads",
    "ArtifactListEntryPayload": "tools.serving.payloads",
    "ArtifactListRequestPayload": "tools.serving.payloads",
    "ArtifactListResponsePayload": "tools.serving.payloads",
    "ArtifactReadRequestPayload": "tools.serving.payloads",
    "ArtifactReadResponsePayload": "tools.serving.payloads",
    "AtroposAgent": "agent.atropos_agent",
    "BaseEnv": "envs.base_env",
    "BaseEnvConfig": "envs.config",
    "Delegates": "agent.delegates",
    "ExecutionResult": "sandbox.base",
    "HermesAgentBaseEnv": "envs.hermes_base_env",
    "HermesAgentEnvConfig": "envs.config",
    "HermesAgentLoop": "agent.loop",
    "Item": "envs.base_env",
    "Limits": "core.types",
    "Network": "core.types",
    "NetworkPolicy": "core.types",
    "Outcome": "core.types",
    "ProcessRegistry": "processes.registry",
    "Say": "core.types",
    "Score": "core.types",
    "ScoredDataGroup": "envs.base_env",
    "ScoredDataItem": "envs.base_env",
    "ServerBaseline": "inference.config",
    "ServerManager": "inference.servers",
    "Slot": "sandbox.base",
    "SlotPool": "sandbox.pool",
    "SlotPoolConfig": "sandbox.pool",
    "TOOLSET_REQUIREMENTS": "tools.catalog",
    "TOOL_TO_TOOLSET_MAP": "tools.catalog",
    "Task": "core.types",
    "Tool": "tools.schema",
    "ToolCall": "tools.wire",
    "ToolCallPayload": "tools.serving.payloads",
    "ToolContext": "rollouts.context",
    "ToolError": "agent.result",
    "ToolExecutor": "tools.executor",
    "ToolExecutorConfig": "tools.executor",
    "ToolExecutorExecuteRequest": "tools.serving.payloads",
    "ToolExecutorReleaseRequest": "tools.serving.payloads",
    "ToolMistake": "tools.schema",
    "ToolRegistry": "tools.registry",
    "ToolResult": "tools.wire",
    "ToolResultPayload": "tools.serving.payloads",
    "ToolRun": "tools.schema",
    "ToolSchema": "tools.schema",
    "ToolServer": "tools.serving.tool_server",
    "ToolServerExecuteRequest": "tools.serving.payloads",
    "ToolSession": "tools.session",
    "ToolSettings": "tools.settings",
    "ToolStep": "core.types",
    "build_tool_registry": "tools.registry",
    "check_tool_availability": "tools.catalog",
    "check_toolset_requirements": "tools.catalog",
    "cleanup_all_environments": "tools.session",
    "cleanup_vm": "tools.session",
    "clear_task_env_overrides": "tools.session",
    "environment": "envs.function",
    "get_active_environments_info": "tools.session",
    "get_all_tool_names": "tools.catalog",
    "get_available_toolsets": "tools.catalog",
    "get_distribution": "tools.distributions",
    "get_parser": "inference.parsers",
    "get_tool_definitions": "tools.registry",
    "get_toolset_for_tool": "tools.catalog",
    "handle_function_call": "tools.session",
    "handle_function_call_async": "tools.session",
    "list_distributions": "tools.distributions",
    "list_parsers": "inference.parsers",
    "open_world": "rollouts.world.modes",
    "print_distribution_info": "tools.distributions",
    "process_registry": "tools.process_registry",
    "register_parser": "inference.parsers",
    "register_task_env_overrides": "tools.session",
    "sample_toolsets_from_distribution": "tools.distributions",
    "tool": "tools.functions",
    "use_session": "tools.session",
    "validate_distribution": "tools.distributions",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra' has no attribute {name!r}")
    value: object = getattr(import_module(f"palaestra.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
