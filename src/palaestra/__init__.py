"""Palaestra: environments for training and evaluating LLM agents that use tools.

    run = await palaestra.run(count_lines(n=3), policy="oracle", group_size=4)
    run.trajectories[0].reward

Every public name is imported from here. Importing the package loads none of them; each is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.agent import Agent
    from palaestra.agent.budget import Budget
    from palaestra.agent.detached_subagents import Delegates
    from palaestra.agent.known_programs import program_named
    from palaestra.agent.loop import LoopSettings
    from palaestra.agent.programs import AgentAssignment, HostedAgent
    from palaestra.agent.result import AgentResult, AgentStep, SequenceData, ToolError
    from palaestra.contract.agent_env import AgentEnv, AgentEnvConfig
    from palaestra.contract.agent_loop import HermesAgentLoop
    from palaestra.contract.atropos_agent import AGENT_SYSTEM_PROMPT, AgentConfig, AtroposAgent
    from palaestra.contract.base_env import BaseEnv, Item
    from palaestra.contract.hermes_env import HermesAgentBaseEnv
    from palaestra.contract.scored_data import ScoredDataGroup, ScoredDataItem
    from palaestra.contract.suite_classes import (
        EndlessTerminalsEnv,
        HermesSweEnv,
        SweSmithOracleEnv,
        TerminalBench2EvalEnv,
    )
    from palaestra.contract.sync_process_registry import process_registry
    from palaestra.contract.tool_context import ToolContext
    from palaestra.envs.api.declaration import FunctionEnvConfig
    from palaestra.envs.api.function_form import environment
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.envs.run.library import run, run_sync, stream
    from palaestra.envs.run.regrade import grade
    from palaestra.envs.run.rollout_function import RolloutFunction, Scored, Unscored
    from palaestra.envs.run.session import Play, Session, SyncPlay, SyncSession
    from palaestra.envs.run.train import TrainingReport, train
    from palaestra.inference.config import APIServerConfig, ServerBaseline
    from palaestra.inference.engine import Sampled
    from palaestra.inference.engines.function_engine import FunctionEngine
    from palaestra.inference.engines.token_engine import TokenChat
    from palaestra.inference.engines.transformers import TransformersEngine
    from palaestra.inference.parsers import get_parser, list_parsers, register_parser
    from palaestra.inference.server_group import ServerManager
    from palaestra.rollouts.export.token_rows import ExportedRow
    from palaestra.rollouts.export.token_rows import exported_rows as training_rows
    from palaestra.rollouts.finished_run import Run, open_run
    from palaestra.rollouts.journal.reader import list_runs
    from palaestra.rollouts.recorded_tools.recording_policy import open_world
    from palaestra.rollouts.records import Group, Trajectory
    from palaestra.rollouts.rollout import Rollout
    from palaestra.suites.examples.count_lines import count_lines
    from palaestra.suites.examples.terminal_test import TerminalTestEnv
    from palaestra.suites.swe.authoring.build_tasks import BuildOptions as SweBuildOptions
    from palaestra.suites.swe.authoring.build_tasks import build as build_swe_tasks
    from palaestra.suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
    from palaestra.suites.terminal_bench.sandboxes.task_sandbox import TaskSandbox, TaskSandboxSpec
    from palaestra.suites.terminal_bench.sandboxes.task_sandboxes import TaskSandboxes, TaskSandboxSettings
    from palaestra.tools.builtin.clarify import User
    from palaestra.tools.builtin.session_search import Sessions
    from palaestra.tools.call_text import ToolCall, ToolResult
    from palaestra.tools.decorator import tool
    from palaestra.tools.human.approval import Approvals
    from palaestra.tools.human.terminal_prompt import TerminalPerson
    from palaestra.tools.registry.build import build_tool_registry, get_available_toolsets, get_tool_definitions
    from palaestra.tools.registry.catalog import (
        TOOL_TO_TOOLSET_MAP,
        TOOLSET_REQUIREMENTS,
        check_tool_availability,
        check_toolset_requirements,
        get_all_tool_names,
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
        cleanup_all_environments,
        cleanup_vm,
        clear_task_env_overrides,
        get_active_environments_info,
        handle_function_call,
        handle_function_call_async,
        register_task_env_overrides,
        use_session,
    )
    from palaestra.tools.runtime.session_tasks import ToolSessionConfig
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
    from palaestra.trainers.config import TrainingConfig
    from palaestra.trainers.trainer import TrainedRow, Trainer
    from palaestra_slots.core.errors import (
        AcquireTimeout,
        ConfigError,
        ContextExceeded,
        DiskError,
        EngineError,
        EngineRefused,
        EngineReplyError,
        EngineUnavailable,
        GraderError,
        ImageError,
        InfraError,
        IsolationUnavailable,
        PalaestraError,
        PrepareError,
        SandboxError,
        SlotEnded,
        SlotLost,
        StaleLease,
        TaskError,
        ToolUnavailable,
        TrainerError,
        WorkError,
    )
    from palaestra_slots.core.types import (
        JSON,
        AllowList,
        Blame,
        Label,
        Limits,
        Message,
        Network,
        NetworkPolicy,
        Outcome,
        Prices,
        Say,
        Score,
        Task,
        ToolStep,
        Usage,
    )
    from palaestra_slots.processes.registry import ProcessRegistry
    from palaestra_slots.sandbox.artifacts import (
        ArtifactArchiveRequestPayload,
        ArtifactArchiveResponsePayload,
        ArtifactListEntryPayload,
        ArtifactListRequestPayload,
        ArtifactListResponsePayload,
        ArtifactReadRequestPayload,
        ArtifactReadResponsePayload,
    )
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_slots.sandbox.sandbox import Sandbox, SandboxSnapshot, SyncSandbox
    from palaestra_slots.sandbox.slot import (
        Change,
        ExecutionResult,
        FileInfo,
        Mount,
        Rung,
        Slot,
        SlotSpec,
        Snapshot,
        View,
    )
    from palaestra_slots.sandbox.snapshots.cache import Prepared, Recipe

__version__ = "0.1.0"

__all__ = [
    "AGENT_SYSTEM_PROMPT",
    "JSON",
    "TOOLSET_REQUIREMENTS",
    "TOOL_TO_TOOLSET_MAP",
    "APIServerConfig",
    "AcquireTimeout",
    "Agent",
    "AgentAssignment",
    "AgentConfig",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentResult",
    "AgentStep",
    "AllowList",
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
    "Blame",
    "Budget",
    "Change",
    "ConfigError",
    "ContextExceeded",
    "Delegates",
    "DiskError",
    "EndlessTerminalsEnv",
    "EngineError",
    "EngineRefused",
    "EngineReplyError",
    "EngineUnavailable",
    "ExecutionResult",
    "ExportedRow",
    "FileInfo",
    "FunctionEngine",
    "FunctionEnvConfig",
    "GraderError",
    "Group",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "HermesSweEnv",
    "HostedAgent",
    "ImageError",
    "InfraError",
    "IsolationUnavailable",
    "Item",
    "Label",
    "Limits",
    "LocalBackend",
    "LoopSettings",
    "Message",
    "Mount",
    "Network",
    "NetworkPolicy",
    "Outcome",
    "PalaestraError",
    "Play",
    "PrepareError",
    "Prepared",
    "Prices",
    "ProcessRegistry",
    "Recipe",
    "Rollout",
    "RolloutFunction",
    "Run",
    "Rung",
    "Sampled",
    "Sandbox",
    "SandboxError",
    "SandboxSnapshot",
    "Say",
    "Score",
    "Scored",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceData",
    "ServerBaseline",
    "ServerManager",
    "Session",
    "Sessions",
    "Slot",
    "SlotEnded",
    "SlotLost",
    "SlotPool",
    "SlotPoolConfig",
    "SlotSpec",
    "Snapshot",
    "StaleLease",
    "SweBuildOptions",
    "SweSmithOracleEnv",
    "SweSmithOracleEnvConfig",
    "SyncPlay",
    "SyncSandbox",
    "SyncSession",
    "Task",
    "TaskError",
    "TaskSandbox",
    "TaskSandboxSettings",
    "TaskSandboxSpec",
    "TaskSandboxes",
    "TerminalBench2EvalEnv",
    "TerminalPerson",
    "TerminalTestEnv",
    "TokenChat",
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
    "ToolUnavailable",
    "TrainedRow",
    "Trainer",
    "TrainerError",
    "TrainingConfig",
    "TrainingReport",
    "Trajectory",
    "TransformersEngine",
    "Unscored",
    "Usage",
    "User",
    "View",
    "WorkError",
    "build_swe_tasks",
    "build_tool_registry",
    "check_tool_availability",
    "check_toolset_requirements",
    "cleanup_all_environments",
    "cleanup_vm",
    "clear_task_env_overrides",
    "count_lines",
    "environment",
    "get_active_environments_info",
    "get_all_tool_names",
    "get_available_toolsets",
    "get_distribution",
    "get_parser",
    "get_tool_definitions",
    "get_toolset_for_tool",
    "grade",
    "handle_function_call",
    "handle_function_call_async",
    "list_distributions",
    "list_parsers",
    "list_runs",
    "open_run",
    "open_world",
    "print_distribution_info",
    "process_registry",
    "program_named",
    "register_parser",
    "register_task_env_overrides",
    "run",
    "run_sync",
    "sample_toolsets_from_distribution",
    "stream",
    "tool",
    "train",
    "training_rows",
    "use_session",
    "validate_distribution",
]

_MODULES = {
    "AGENT_SYSTEM_PROMPT": "contract.atropos_agent",
    "APIServerConfig": "inference.config",
    "AcquireTimeout": "palaestra_slots.core.errors",
    "Agent": "agent.agent",
    "AgentAssignment": "agent.programs",
    "AgentConfig": "contract.atropos_agent",
    "AgentEnv": "contract.agent_env",
    "AgentEnvConfig": "contract.agent_env",
    "AgentResult": "agent.result",
    "AgentStep": "agent.result",
    "AllowList": "palaestra_slots.core.types",
    "Approvals": "tools.human.approval",
    "ArtifactArchiveRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactArchiveResponsePayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListEntryPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactListResponsePayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactReadRequestPayload": "palaestra_slots.sandbox.artifacts",
    "ArtifactReadResponsePayload": "palaestra_slots.sandbox.artifacts",
    "AtroposAgent": "contract.atropos_agent",
    "BaseEnv": "contract.base_env",
    "BaseEnvConfig": "envs.config.fields",
    "Blame": "palaestra_slots.core.types",
    "Budget": "agent.budget",
    "Change": "palaestra_slots.sandbox.slot",
    "ConfigError": "palaestra_slots.core.errors",
    "ContextExceeded": "palaestra_slots.core.errors",
    "Delegates": "agent.detached_subagents",
    "DiskError": "palaestra_slots.core.errors",
    "EndlessTerminalsEnv": "contract.suite_classes",
    "EngineError": "palaestra_slots.core.errors",
    "EngineRefused": "palaestra_slots.core.errors",
    "EngineReplyError": "palaestra_slots.core.errors",
    "EngineUnavailable": "palaestra_slots.core.errors",
    "ExecutionResult": "palaestra_slots.sandbox.slot",
    "ExportedRow": "rollouts.export.token_rows",
    "FileInfo": "palaestra_slots.sandbox.slot",
    "FunctionEngine": "inference.engines.function_engine",
    "FunctionEnvConfig": "envs.api.declaration",
    "GraderError": "palaestra_slots.core.errors",
    "Group": "rollouts.records",
    "HermesAgentBaseEnv": "contract.hermes_env",
    "HermesAgentEnvConfig": "envs.config.fields",
    "HermesAgentLoop": "contract.agent_loop",
    "HermesSweEnv": "contract.suite_classes",
    "HostedAgent": "agent.programs",
    "ImageError": "palaestra_slots.core.errors",
    "InfraError": "palaestra_slots.core.errors",
    "IsolationUnavailable": "palaestra_slots.core.errors",
    "Item": "contract.base_env",
    "JSON": "palaestra_slots.core.types",
    "Label": "palaestra_slots.core.types",
    "Limits": "palaestra_slots.core.types",
    "LoopSettings": "agent.loop",
    "LocalBackend": "palaestra_slots.sandbox.backends.local",
    "Message": "palaestra_slots.core.types",
    "Mount": "palaestra_slots.sandbox.slot",
    "Network": "palaestra_slots.core.types",
    "NetworkPolicy": "palaestra_slots.core.types",
    "Outcome": "palaestra_slots.core.types",
    "PalaestraError": "palaestra_slots.core.errors",
    "Play": "envs.run.session",
    "PrepareError": "palaestra_slots.core.errors",
    "Prepared": "palaestra_slots.sandbox.snapshots.cache",
    "Prices": "palaestra_slots.core.types",
    "ProcessRegistry": "palaestra_slots.processes.registry",
    "Recipe": "palaestra_slots.sandbox.snapshots.cache",
    "Rollout": "rollouts.rollout",
    "RolloutFunction": "envs.run.rollout_function",
    "Run": "rollouts.finished_run",
    "Rung": "palaestra_slots.sandbox.slot",
    "Sampled": "inference.engine",
    "Sandbox": "palaestra_slots.sandbox.sandbox",
    "SandboxError": "palaestra_slots.core.errors",
    "SandboxSnapshot": "palaestra_slots.sandbox.sandbox",
    "Say": "palaestra_slots.core.types",
    "Score": "palaestra_slots.core.types",
    "ScoredDataGroup": "contract.scored_data",
    "ScoredDataItem": "contract.scored_data",
    "Scored": "envs.run.rollout_function",
    "SequenceData": "agent.result",
    "ServerBaseline": "inference.config",
    "ServerManager": "inference.server_group",
    "Session": "envs.run.session",
    "Sessions": "tools.builtin.session_search",
    "Slot": "palaestra_slots.sandbox.slot",
    "SlotEnded": "palaestra_slots.core.errors",
    "SlotLost": "palaestra_slots.core.errors",
    "SlotPool": "palaestra_slots.sandbox.pool",
    "SlotPoolConfig": "palaestra_slots.sandbox.pool",
    "SlotSpec": "palaestra_slots.sandbox.slot",
    "Snapshot": "palaestra_slots.sandbox.slot",
    "StaleLease": "palaestra_slots.core.errors",
    "SweBuildOptions": "suites.swe.authoring.build_tasks:BuildOptions",
    "SweSmithOracleEnv": "contract.suite_classes",
    "SweSmithOracleEnvConfig": "suites.swe.swe_smith_oracle",
    "SyncPlay": "envs.run.session",
    "SyncSandbox": "palaestra_slots.sandbox.sandbox",
    "SyncSession": "envs.run.session",
    "TOOLSET_REQUIREMENTS": "tools.registry.catalog",
    "TOOL_TO_TOOLSET_MAP": "tools.registry.catalog",
    "Task": "palaestra_slots.core.types",
    "TaskError": "palaestra_slots.core.errors",
    "TaskSandbox": "suites.terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxSettings": "suites.terminal_bench.sandboxes.task_sandboxes",
    "TaskSandboxSpec": "suites.terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxes": "suites.terminal_bench.sandboxes.task_sandboxes",
    "TerminalBench2EvalEnv": "contract.suite_classes",
    "TerminalPerson": "tools.human.terminal_prompt",
    "TerminalTestEnv": "suites.examples.terminal_test",
    "TokenChat": "inference.engines.token_engine",
    "Tool": "tools.tool",
    "ToolCall": "tools.call_text",
    "ToolCallPayload": "tools.serving.payloads",
    "ToolContext": "contract.tool_context",
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
    "ToolSessionConfig": "tools.runtime.session_tasks",
    "ToolSettings": "tools.settings",
    "ToolStep": "palaestra_slots.core.types",
    "ToolUnavailable": "palaestra_slots.core.errors",
    "TrainedRow": "trainers.trainer",
    "Trainer": "trainers.trainer",
    "TrainerError": "palaestra_slots.core.errors",
    "TrainingConfig": "trainers.config",
    "TrainingReport": "envs.run.train",
    "Trajectory": "rollouts.records",
    "TransformersEngine": "inference.engines.transformers",
    "Unscored": "envs.run.rollout_function",
    "Usage": "palaestra_slots.core.types",
    "User": "tools.builtin.clarify",
    "View": "palaestra_slots.sandbox.slot",
    "WorkError": "palaestra_slots.core.errors",
    "build_swe_tasks": "suites.swe.authoring.build_tasks:build",
    "build_tool_registry": "tools.registry.build",
    "check_tool_availability": "tools.registry.catalog",
    "check_toolset_requirements": "tools.registry.catalog",
    "cleanup_all_environments": "tools.runtime.function_calls",
    "cleanup_vm": "tools.runtime.function_calls",
    "clear_task_env_overrides": "tools.runtime.function_calls",
    "count_lines": "suites.examples.count_lines",
    "environment": "envs.api.function_form",
    "get_active_environments_info": "tools.runtime.function_calls",
    "get_all_tool_names": "tools.registry.catalog",
    "get_available_toolsets": "tools.registry.build",
    "get_distribution": "tools.registry.distributions",
    "get_parser": "inference.parsers",
    "get_tool_definitions": "tools.registry.build",
    "get_toolset_for_tool": "tools.registry.catalog",
    "grade": "envs.run.regrade",
    "handle_function_call": "tools.runtime.function_calls",
    "handle_function_call_async": "tools.runtime.function_calls",
    "list_distributions": "tools.registry.distributions",
    "list_parsers": "inference.parsers",
    "list_runs": "rollouts.journal.reader",
    "open_run": "rollouts.finished_run",
    "open_world": "rollouts.recorded_tools.recording_policy",
    "print_distribution_info": "tools.registry.distributions",
    "process_registry": "contract.sync_process_registry",
    "program_named": "agent.known_programs",
    "register_parser": "inference.parsers",
    "register_task_env_overrides": "tools.runtime.function_calls",
    "run": "envs.run.library",
    "run_sync": "envs.run.library",
    "sample_toolsets_from_distribution": "tools.registry.distributions",
    "stream": "envs.run.library",
    "tool": "tools.decorator",
    "train": "envs.run.train",
    "training_rows": "rollouts.export.token_rows:exported_rows",
    "use_session": "tools.runtime.function_calls",
    "validate_distribution": "tools.registry.distributions",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    if not module.startswith("palaestra_slots."):
        module = f"palaestra.{module}"
    value: object = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
