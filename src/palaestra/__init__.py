"""Palaestra: one agent loop, one tool registry and one pool of isolated slots, for chat, batch generation and RL.

Every public name is imported from here. Importing the package loads none of them: each is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.atropos_agent import AGENT_SYSTEM_PROMPT, AgentConfig, AtroposAgent
    from palaestra.agent.detached_subagents import Delegates
    from palaestra.agent.loop import HermesAgentLoop
    from palaestra.agent.result import AgentResult, AgentStep, SequenceData, ToolError
    from palaestra.core.types import AllowList, Limits, Network, NetworkPolicy, Outcome, Say, Score, Task, ToolStep
    from palaestra.envs.api.agent_env import AgentEnv, AgentEnvConfig
    from palaestra.envs.api.base_env import BaseEnv, Item
    from palaestra.envs.api.function_env import environment
    from palaestra.envs.api.hermes_env import HermesAgentBaseEnv
    from palaestra.envs.api.scored_data import ScoredDataGroup, ScoredDataItem
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.inference.config import APIServerConfig, ServerBaseline
    from palaestra.inference.parsers import get_parser, list_parsers, register_parser
    from palaestra.inference.server_group import ServerManager
    from palaestra.processes.registry import ProcessRegistry
    from palaestra.rollouts.grading.tool_context import ToolContext
    from palaestra.rollouts.recorded_tools.recording_policy import open_world
    from palaestra.sandbox.artifacts import (
        ArtifactArchiveRequestPayload,
        ArtifactArchiveResponsePayload,
        ArtifactListEntryPayload,
        ArtifactListRequestPayload,
        ArtifactListResponsePayload,
        ArtifactReadRequestPayload,
        ArtifactReadResponsePayload,
    )
    from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra.sandbox.slot import ExecutionResult, Slot
    from palaestra.tools.call_text import ToolCall, ToolResult
    from palaestra.tools.decorator import tool
    from palaestra.tools.registry.build import build_tool_registry, get_tool_definitions
    from palaestra.tools.registry.catalog import (
        TOOL_TO_TOOLSET_MAP,
        TOOLSET_REQUIREMENTS,
        check_tool_availability,
        check_toolset_requirements,
        get_all_tool_names,
        get_available_toolsets,
        get_toolset_for_tool,
    )
    from palaestra.tools.registry.distributions import (
        get_distribution,
        list_distributions,
        print_distribution_info,
        sample_toolsets_from_distribution,
        validate_distribution,
    )
    from palaestra.tools.registry.registry import ToolRegistry
    from palaestra.tools.runtime.executor import ToolExecutor, ToolExecutorConfig
    from palaestra.tools.runtime.function_calls import (
        ToolSession,
        ToolSessionConfig,
        cleanup_all_environments,
        cleanup_vm,
        clear_task_env_overrides,
        get_active_environments_info,
        handle_function_call,
        handle_function_call_async,
        register_task_env_overrides,
        use_session,
    )
    from palaestra.tools.runtime.sync_process_registry import process_registry
    from palaestra.tools.serving.payloads import (
        ToolCallPayload,
        ToolExecutorExecuteRequest,
        ToolExecutorReleaseRequest,
        ToolResultPayload,
        ToolServerExecuteRequest,
    )
    from palaestra.tools.serving.tool_server import ToolServer
    from palaestra.tools.settings import ToolSettings
    from palaestra.tools.tool import Tool, ToolMistake, ToolRun, ToolSchema

__version__ = "0.1.0"

__all__ = [
    "AGENT_SYSTEM_PROMPT",
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
    "SequenceData",
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
    "ToolSessionConfig",
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
    "AGENT_SYSTEM_PROMPT": "agent.atropos_agent",
    "APIServerConfig": "inference.config",
    "AgentConfig": "agent.atropos_agent",
    "AgentEnv": "envs.api.agent_env",
    "AgentEnvConfig": "envs.api.agent_env",
    "AgentResult": "agent.result",
    "AgentStep": "agent.result",
    "AllowList": "core.types",
    "ArtifactArchiveRequestPayload": "sandbox.artifacts",
    "ArtifactArchiveResponsePayload": "sandbox.artifacts",
    "ArtifactListEntryPayload": "sandbox.artifacts",
    "ArtifactListRequestPayload": "sandbox.artifacts",
    "ArtifactListResponsePayload": "sandbox.artifacts",
    "ArtifactReadRequestPayload": "sandbox.artifacts",
    "ArtifactReadResponsePayload": "sandbox.artifacts",
    "AtroposAgent": "agent.atropos_agent",
    "BaseEnv": "envs.api.base_env",
    "BaseEnvConfig": "envs.config.fields",
    "Delegates": "agent.detached_subagents",
    "ExecutionResult": "sandbox.slot",
    "HermesAgentBaseEnv": "envs.api.hermes_env",
    "HermesAgentEnvConfig": "envs.config.fields",
    "HermesAgentLoop": "agent.loop",
    "Item": "envs.api.base_env",
    "Limits": "core.types",
    "Network": "core.types",
    "NetworkPolicy": "core.types",
    "Outcome": "core.types",
    "ProcessRegistry": "processes.registry",
    "Say": "core.types",
    "Score": "core.types",
    "ScoredDataGroup": "envs.api.scored_data",
    "ScoredDataItem": "envs.api.scored_data",
    "SequenceData": "agent.result",
    "ServerBaseline": "inference.config",
    "ServerManager": "inference.server_group",
    "Slot": "sandbox.slot",
    "SlotPool": "sandbox.pool",
    "SlotPoolConfig": "sandbox.pool",
    "TOOLSET_REQUIREMENTS": "tools.registry.catalog",
    "TOOL_TO_TOOLSET_MAP": "tools.registry.catalog",
    "Task": "core.types",
    "Tool": "tools.tool",
    "ToolCall": "tools.call_text",
    "ToolCallPayload": "tools.serving.payloads",
    "ToolContext": "rollouts.grading.tool_context",
    "ToolError": "agent.result",
    "ToolExecutor": "tools.runtime.executor",
    "ToolExecutorConfig": "tools.runtime.executor",
    "ToolExecutorExecuteRequest": "tools.serving.payloads",
    "ToolExecutorReleaseRequest": "tools.serving.payloads",
    "ToolMistake": "tools.tool",
    "ToolRegistry": "tools.registry.registry",
    "ToolResult": "tools.call_text",
    "ToolResultPayload": "tools.serving.payloads",
    "ToolRun": "tools.tool",
    "ToolSchema": "tools.tool",
    "ToolServer": "tools.serving.tool_server",
    "ToolServerExecuteRequest": "tools.serving.payloads",
    "ToolSession": "tools.runtime.function_calls",
    "ToolSessionConfig": "tools.runtime.function_calls",
    "ToolSettings": "tools.settings",
    "ToolStep": "core.types",
    "build_tool_registry": "tools.registry.build",
    "check_tool_availability": "tools.registry.catalog",
    "check_toolset_requirements": "tools.registry.catalog",
    "cleanup_all_environments": "tools.runtime.function_calls",
    "cleanup_vm": "tools.runtime.function_calls",
    "clear_task_env_overrides": "tools.runtime.function_calls",
    "environment": "envs.api.function_env",
    "get_active_environments_info": "tools.runtime.function_calls",
    "get_all_tool_names": "tools.registry.catalog",
    "get_available_toolsets": "tools.registry.catalog",
    "get_distribution": "tools.registry.distributions",
    "get_parser": "inference.parsers",
    "get_tool_definitions": "tools.registry.build",
    "get_toolset_for_tool": "tools.registry.catalog",
    "handle_function_call": "tools.runtime.function_calls",
    "handle_function_call_async": "tools.runtime.function_calls",
    "list_distributions": "tools.registry.distributions",
    "list_parsers": "inference.parsers",
    "open_world": "rollouts.recorded_tools.recording_policy",
    "print_distribution_info": "tools.registry.distributions",
    "process_registry": "tools.runtime.sync_process_registry",
    "register_parser": "inference.parsers",
    "register_task_env_overrides": "tools.runtime.function_calls",
    "sample_toolsets_from_distribution": "tools.registry.distributions",
    "tool": "tools.decorator",
    "use_session": "tools.runtime.function_calls",
    "validate_distribution": "tools.registry.distributions",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra' has no attribute {name!r}")
    value: object = getattr(import_module(f"palaestra.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
