"""The Python API of Atropos and Hermes, for which existing scripts were written: their classes of environments, pools
and helpers, `palaestra env port`, and names that have no effect here.

Environments that are written for Palaestra need none of it. No module below this package imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from palaestra.agent.result import AgentStep, SequenceData
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.tools.human.approval import Approvals
    from palaestra.tools.human.terminal_prompt import TerminalPerson
    from palaestra.tools.registry.build import build_tool_registry, get_available_toolsets, get_tool_definitions
    from palaestra.tools.registry.distributions import (
        get_distribution,
        list_distributions,
        print_distribution_info,
        sample_toolsets_from_distribution,
        validate_distribution,
    )
    from palaestra.tools.settings import ToolSettings
    from palaestra_contract.agent_env import AgentEnv, AgentEnvConfig
    from palaestra_contract.agent_loop import HermesAgentLoop
    from palaestra_contract.atropos_agent import AGENT_SYSTEM_PROMPT, AgentConfig, AtroposAgent
    from palaestra_contract.base_env import BaseEnv, Item
    from palaestra_contract.detached_subagents import Delegates
    from palaestra_contract.hermes_env import HermesAgentBaseEnv
    from palaestra_contract.scored_data import ScoredDataGroup, ScoredDataItem
    from palaestra_contract.suite_classes import (
        EndlessTerminalsEnv,
        HermesSweEnv,
        SweSmithOracleEnv,
        TerminalBench2EvalEnv,
    )
    from palaestra_contract.sync_process_registry import process_registry
    from palaestra_contract.terminal_test import TerminalTestEnv
    from palaestra_contract.tool_context import ToolContext
    from palaestra_contract.tools.catalog import (
        TOOL_TO_TOOLSET_MAP,
        TOOLSET_REQUIREMENTS,
        check_tool_availability,
        check_toolset_requirements,
        get_all_tool_names,
        get_toolset_for_tool,
    )
    from palaestra_contract.tools.executor import ToolExecutor, ToolExecutorConfig
    from palaestra_contract.tools.function_calls import (
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
    from palaestra_contract.tools.payloads import (
        ToolCallPayload,
        ToolExecutorExecuteRequest,
        ToolExecutorReleaseRequest,
        ToolResultPayload,
        ToolServerExecuteRequest,
    )
    from palaestra_contract.tools.session_tasks import ToolSessionConfig
    from palaestra_contract.tools.tool_server import ToolServer
    from palaestra_slots.sandbox.artifacts import (
        ArtifactArchiveRequestPayload,
        ArtifactArchiveResponsePayload,
        ArtifactListEntryPayload,
        ArtifactListRequestPayload,
        ArtifactListResponsePayload,
        ArtifactReadRequestPayload,
        ArtifactReadResponsePayload,
    )

_MODULES = {
    "AGENT_SYSTEM_PROMPT": "atropos_agent",
    "TOOLSET_REQUIREMENTS": "tools.catalog",
    "TOOL_TO_TOOLSET_MAP": "tools.catalog",
    "AgentConfig": "atropos_agent",
    "AgentEnv": "agent_env",
    "AgentEnvConfig": "agent_env",
    "AgentStep": "palaestra.agent.result",
    "Approvals": "palaestra.tools.human.approval",
    "ArtifactArchiveRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactArchiveResponsePayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListEntryPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListResponsePayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactReadRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactReadResponsePayload": "palaestra_slots.sandbox.artifacts",
    "AtroposAgent": "atropos_agent",
    "BaseEnv": "base_env",
    "BaseEnvConfig": "palaestra.envs.config.fields",
    "Delegates": "detached_subagents",
    "EndlessTerminalsEnv": "suite_classes",
    "HermesAgentBaseEnv": "hermes_env",
    "HermesAgentEnvConfig": "palaestra.envs.config.fields",
    "HermesAgentLoop": "agent_loop",
    "HermesSweEnv": "suite_classes",
    "Item": "base_env",
    "ScoredDataGroup": "scored_data",
    "ScoredDataItem": "scored_data",
    "SequenceData": "palaestra.agent.result",
    "SweSmithOracleEnv": "suite_classes",
    "TerminalBench2EvalEnv": "suite_classes",
    "TerminalPerson": "palaestra.tools.human.terminal_prompt",
    "TerminalTestEnv": "terminal_test",
    "ToolCallPayload": "tools.payloads",
    "ToolContext": "tool_context",
    "ToolExecutor": "tools.executor",
    "ToolExecutorConfig": "tools.executor",
    "ToolExecutorExecuteRequest": "tools.payloads",
    "ToolExecutorReleaseRequest": "tools.payloads",
    "ToolResultPayload": "tools.payloads",
    "ToolServer": "tools.tool_server",
    "ToolServerExecuteRequest": "tools.payloads",
    "ToolSession": "tools.function_calls",
    "ToolSessionConfig": "tools.session_tasks",
    "ToolSettings": "palaestra.tools.settings",
    "build_tool_registry": "palaestra.tools.registry.build",
    "check_tool_availability": "tools.catalog",
    "check_toolset_requirements": "tools.catalog",
    "cleanup_all_environments": "tools.function_calls",
    "cleanup_vm": "tools.function_calls",
    "clear_task_env_overrides": "tools.function_calls",
    "get_active_environments_info": "tools.function_calls",
    "get_all_tool_names": "tools.catalog",
    "get_available_toolsets": "palaestra.tools.registry.build",
    "get_distribution": "palaestra.tools.registry.distributions",
    "get_tool_definitions": "palaestra.tools.registry.build",
    "get_toolset_for_tool": "tools.catalog",
    "handle_function_call": "tools.function_calls",
    "handle_function_call_async": "tools.function_calls",
    "list_distributions": "palaestra.tools.registry.distributions",
    "print_distribution_info": "palaestra.tools.registry.distributions",
    "process_registry": "sync_process_registry",
    "register_task_env_overrides": "tools.function_calls",
    "sample_toolsets_from_distribution": "palaestra.tools.registry.distributions",
    "use_session": "tools.function_calls",
    "validate_distribution": "palaestra.tools.registry.distributions",
}

__all__ = [
    "AGENT_SYSTEM_PROMPT",
    "TOOLSET_REQUIREMENTS",
    "TOOL_TO_TOOLSET_MAP",
    "AgentConfig",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentStep",
    "Approvals",
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
    "EndlessTerminalsEnv",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "HermesSweEnv",
    "Item",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceData",
    "SweSmithOracleEnv",
    "TerminalBench2EvalEnv",
    "TerminalPerson",
    "TerminalTestEnv",
    "ToolCallPayload",
    "ToolContext",
    "ToolExecutor",
    "ToolExecutorConfig",
    "ToolExecutorExecuteRequest",
    "ToolExecutorReleaseRequest",
    "ToolResultPayload",
    "ToolServer",
    "ToolServerExecuteRequest",
    "ToolSession",
    "ToolSessionConfig",
    "ToolSettings",
    "build_tool_registry",
    "check_tool_availability",
    "check_toolset_requirements",
    "cleanup_all_environments",
    "cleanup_vm",
    "clear_task_env_overrides",
    "get_active_environments_info",
    "get_all_tool_names",
    "get_available_toolsets",
    "get_distribution",
    "get_tool_definitions",
    "get_toolset_for_tool",
    "handle_function_call",
    "handle_function_call_async",
    "list_distributions",
    "print_distribution_info",
    "process_registry",
    "register_task_env_overrides",
    "sample_toolsets_from_distribution",
    "use_session",
    "validate_distribution",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
