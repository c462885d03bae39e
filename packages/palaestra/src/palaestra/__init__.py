"""Palaestra: environments for training and evaluating LLM agents that use tools.

    run = await palaestra.run(count_lines(n=3), policy="oracle", group_size=4)
    run.trajectories[0].reward

Every public name is imported from here. Importing the package loads none of them; each is loaded on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.agent import Agent
    from palaestra.agent.budget import Budget
    from palaestra.agent.known_programs import program_named
    from palaestra.agent.loop import LoopSettings
    from palaestra.agent.programs import AgentAssignment, HostedAgent
    from palaestra.agent.result import AgentResult, AgentStep, SequenceData, ToolError
    from palaestra.envs.api.declaration import FunctionEnvConfig
    from palaestra.envs.api.function_form import environment
    from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
    from palaestra.envs.run.library import run, run_sync, stream
    from palaestra.envs.run.regrade import grade
    from palaestra.envs.run.rollout_function import RolloutFunction, Scored, Unscored
    from palaestra.envs.run.session import Play, Session, SyncPlay, SyncSession
    from palaestra.rollouts.chat_model import ChatModel
    from palaestra.rollouts.export.token_rows import ExportedRow
    from palaestra.rollouts.export.token_rows import exported_rows as training_rows
    from palaestra.rollouts.finished_run import Run, open_run
    from palaestra.rollouts.journal.reader import list_runs
    from palaestra.rollouts.recorded_tools.recording_policy import open_world
    from palaestra.rollouts.records import Group, Trajectory
    from palaestra.rollouts.rollout import Rollout
    from palaestra.tools.builtin.clarify import User
    from palaestra.tools.call_text import ToolCall, ToolResult
    from palaestra.tools.decorator import tool
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
    from palaestra.tools.registry.registry import ToolRegistry
    from palaestra.tools.settings import ToolSettings
    from palaestra.tools.tool import Tool, ToolMistake, ToolRun, ToolSchema
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
    from palaestra_suites.examples.count_lines import count_lines
    from palaestra_suites.swe.authoring.build_tasks import BuildOptions as SweBuildOptions
    from palaestra_suites.swe.authoring.build_tasks import build as build_swe_tasks
    from palaestra_suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
    from palaestra_suites.terminal_bench.sandboxes.task_sandbox import TaskSandbox, TaskSandboxSpec
    from palaestra_suites.terminal_bench.sandboxes.task_sandboxes import TaskSandboxes, TaskSandboxSettings
    from palaestra_tokens.config import APIServerConfig, ServerBaseline
    from palaestra_tokens.engine import Sampled
    from palaestra_tokens.engines.function_engine import FunctionEngine
    from palaestra_tokens.engines.token_engine import TokenChat
    from palaestra_tokens.engines.transformers import TransformersEngine
    from palaestra_tokens.parsers import get_parser, list_parsers, register_parser
    from palaestra_tokens.server_group import ServerManager
    from palaestra_toolsets.tools.session_search import Sessions
    from palaestra_train.config import TrainingConfig
    from palaestra_train.train_run import TrainingReport, train
    from palaestra_train.trainer import TrainedRow, Trainer

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
    "ChatModel",
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
    "AGENT_SYSTEM_PROMPT": "palaestra_contract.atropos_agent",
    "APIServerConfig": "palaestra_tokens.config",
    "AcquireTimeout": "palaestra_slots.core.errors",
    "Agent": "agent.agent",
    "AgentAssignment": "agent.programs",
    "AgentConfig": "palaestra_contract.atropos_agent",
    "AgentEnv": "palaestra_contract.agent_env",
    "AgentEnvConfig": "palaestra_contract.agent_env",
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
    "AtroposAgent": "palaestra_contract.atropos_agent",
    "BaseEnv": "palaestra_contract.base_env",
    "BaseEnvConfig": "envs.config.fields",
    "Blame": "palaestra_slots.core.types",
    "Budget": "agent.budget",
    "Change": "palaestra_slots.sandbox.slot",
    "ChatModel": "rollouts.chat_model",
    "ConfigError": "palaestra_slots.core.errors",
    "ContextExceeded": "palaestra_slots.core.errors",
    "Delegates": "palaestra_contract.detached_subagents",
    "DiskError": "palaestra_slots.core.errors",
    "EndlessTerminalsEnv": "palaestra_contract.suite_classes",
    "EngineError": "palaestra_slots.core.errors",
    "EngineRefused": "palaestra_slots.core.errors",
    "EngineReplyError": "palaestra_slots.core.errors",
    "EngineUnavailable": "palaestra_slots.core.errors",
    "ExecutionResult": "palaestra_slots.sandbox.slot",
    "ExportedRow": "rollouts.export.token_rows",
    "FileInfo": "palaestra_slots.sandbox.slot",
    "FunctionEngine": "palaestra_tokens.engines.function_engine",
    "FunctionEnvConfig": "envs.api.declaration",
    "GraderError": "palaestra_slots.core.errors",
    "Group": "rollouts.records",
    "HermesAgentBaseEnv": "palaestra_contract.hermes_env",
    "HermesAgentEnvConfig": "envs.config.fields",
    "HermesAgentLoop": "palaestra_contract.agent_loop",
    "HermesSweEnv": "palaestra_contract.suite_classes",
    "HostedAgent": "agent.programs",
    "ImageError": "palaestra_slots.core.errors",
    "InfraError": "palaestra_slots.core.errors",
    "IsolationUnavailable": "palaestra_slots.core.errors",
    "Item": "palaestra_contract.base_env",
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
    "Sampled": "palaestra_tokens.engine",
    "Sandbox": "palaestra_slots.sandbox.sandbox",
    "SandboxError": "palaestra_slots.core.errors",
    "SandboxSnapshot": "palaestra_slots.sandbox.sandbox",
    "Say": "palaestra_slots.core.types",
    "Score": "palaestra_slots.core.types",
    "ScoredDataGroup": "palaestra_contract.scored_data",
    "ScoredDataItem": "palaestra_contract.scored_data",
    "Scored": "envs.run.rollout_function",
    "SequenceData": "agent.result",
    "ServerBaseline": "palaestra_tokens.config",
    "ServerManager": "palaestra_tokens.server_group",
    "Session": "envs.run.session",
    "Sessions": "palaestra_toolsets.tools.session_search",
    "Slot": "palaestra_slots.sandbox.slot",
    "SlotEnded": "palaestra_slots.core.errors",
    "SlotLost": "palaestra_slots.core.errors",
    "SlotPool": "palaestra_slots.sandbox.pool",
    "SlotPoolConfig": "palaestra_slots.sandbox.pool",
    "SlotSpec": "palaestra_slots.sandbox.slot",
    "Snapshot": "palaestra_slots.sandbox.slot",
    "StaleLease": "palaestra_slots.core.errors",
    "SweBuildOptions": "palaestra_suites.swe.authoring.build_tasks:BuildOptions",
    "SweSmithOracleEnv": "palaestra_contract.suite_classes",
    "SweSmithOracleEnvConfig": "palaestra_suites.swe.swe_smith_oracle",
    "SyncPlay": "envs.run.session",
    "SyncSandbox": "palaestra_slots.sandbox.sandbox",
    "SyncSession": "envs.run.session",
    "TOOLSET_REQUIREMENTS": "palaestra_contract.tools.catalog",
    "TOOL_TO_TOOLSET_MAP": "palaestra_contract.tools.catalog",
    "Task": "palaestra_slots.core.types",
    "TaskError": "palaestra_slots.core.errors",
    "TaskSandbox": "palaestra_suites.terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxSettings": "palaestra_suites.terminal_bench.sandboxes.task_sandboxes",
    "TaskSandboxSpec": "palaestra_suites.terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxes": "palaestra_suites.terminal_bench.sandboxes.task_sandboxes",
    "TerminalBench2EvalEnv": "palaestra_contract.suite_classes",
    "TerminalPerson": "tools.human.terminal_prompt",
    "TerminalTestEnv": "palaestra_contract.terminal_test",
    "TokenChat": "palaestra_tokens.engines.token_engine",
    "Tool": "tools.tool",
    "ToolCall": "tools.call_text",
    "ToolCallPayload": "palaestra_contract.tools.payloads",
    "ToolContext": "palaestra_contract.tool_context",
    "ToolError": "agent.result",
    "ToolExecutor": "palaestra_contract.tools.executor",
    "ToolExecutorConfig": "palaestra_contract.tools.executor",
    "ToolExecutorExecuteRequest": "palaestra_contract.tools.payloads",
    "ToolExecutorReleaseRequest": "palaestra_contract.tools.payloads",
    "ToolMistake": "tools.tool",
    "ToolRegistry": "tools.registry.registry",
    "ToolResult": "tools.call_text",
    "ToolResultPayload": "palaestra_contract.tools.payloads",
    "ToolRun": "tools.tool",
    "ToolSchema": "tools.tool",
    "ToolServer": "palaestra_contract.tools.tool_server",
    "ToolServerExecuteRequest": "palaestra_contract.tools.payloads",
    "ToolSession": "palaestra_contract.tools.function_calls",
    "ToolSessionConfig": "palaestra_contract.tools.session_tasks",
    "ToolSettings": "tools.settings",
    "ToolStep": "palaestra_slots.core.types",
    "ToolUnavailable": "palaestra_slots.core.errors",
    "TrainedRow": "palaestra_train.trainer",
    "Trainer": "palaestra_train.trainer",
    "TrainerError": "palaestra_slots.core.errors",
    "TrainingConfig": "palaestra_train.config",
    "TrainingReport": "palaestra_train.train_run",
    "Trajectory": "rollouts.records",
    "TransformersEngine": "palaestra_tokens.engines.transformers",
    "Unscored": "envs.run.rollout_function",
    "Usage": "palaestra_slots.core.types",
    "User": "tools.builtin.clarify",
    "View": "palaestra_slots.sandbox.slot",
    "WorkError": "palaestra_slots.core.errors",
    "build_swe_tasks": "palaestra_suites.swe.authoring.build_tasks:build",
    "build_tool_registry": "tools.registry.build",
    "check_tool_availability": "palaestra_contract.tools.catalog",
    "check_toolset_requirements": "palaestra_contract.tools.catalog",
    "cleanup_all_environments": "palaestra_contract.tools.function_calls",
    "cleanup_vm": "palaestra_contract.tools.function_calls",
    "clear_task_env_overrides": "palaestra_contract.tools.function_calls",
    "count_lines": "palaestra_suites.examples.count_lines",
    "environment": "envs.api.function_form",
    "get_active_environments_info": "palaestra_contract.tools.function_calls",
    "get_all_tool_names": "palaestra_contract.tools.catalog",
    "get_available_toolsets": "tools.registry.build",
    "get_distribution": "tools.registry.distributions",
    "get_parser": "palaestra_tokens.parsers",
    "get_tool_definitions": "tools.registry.build",
    "get_toolset_for_tool": "palaestra_contract.tools.catalog",
    "grade": "envs.run.regrade",
    "handle_function_call": "palaestra_contract.tools.function_calls",
    "handle_function_call_async": "palaestra_contract.tools.function_calls",
    "list_distributions": "tools.registry.distributions",
    "list_parsers": "palaestra_tokens.parsers",
    "list_runs": "rollouts.journal.reader",
    "open_run": "rollouts.finished_run",
    "open_world": "rollouts.recorded_tools.recording_policy",
    "print_distribution_info": "tools.registry.distributions",
    "process_registry": "palaestra_contract.sync_process_registry",
    "program_named": "agent.known_programs",
    "register_parser": "palaestra_tokens.parsers",
    "register_task_env_overrides": "palaestra_contract.tools.function_calls",
    "run": "envs.run.library",
    "run_sync": "envs.run.library",
    "sample_toolsets_from_distribution": "tools.registry.distributions",
    "stream": "envs.run.library",
    "tool": "tools.decorator",
    "train": "palaestra_train.train_run",
    "training_rows": "rollouts.export.token_rows:exported_rows",
    "use_session": "palaestra_contract.tools.function_calls",
    "validate_distribution": "tools.registry.distributions",
}


_OWN = frozenset(["__main__", "agent", "cli", "compat", "envs", "grading", "rollouts", "tools"])


class _OldNames:
    """Asked last, for modules that are not here: brings in the package that finds moved modules by their old names, if
    it is installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("palaestra.") or name.split(".", 2)[1] in _OWN:
            return None
        from palaestra_slots.core.io import plugins

        point = plugins.installed("palaestra.scripts").get("moved_modules")
        found: ModuleSpec | None = None if point is None else point.load()(name)
        return found


sys.meta_path.append(_OldNames())


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    if not module.startswith("palaestra_"):
        module = f"palaestra.{module}"
    try:
        value: object = getattr(import_module(module), attribute or name)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        where = f"./extensions/{package.removeprefix('palaestra_')}"
        text = f"{name} needs the package {package.replace('_', '-')}: in a checkout, pip install {where}"
        raise ModuleNotFoundError(text, name=package) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
