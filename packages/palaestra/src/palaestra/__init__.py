"""Palaestra: environments for training and evaluating LLM agents that use tools.

    run = await palaestra.run(count_lines(n=3), policy="oracle", group_size=4)
    run.trajectories[0].reward

The public names of environments, runs and their results. Importing the package loads none of them; each is loaded on
first use. The names of the other packages (`palaestra_slots`, `palaestra_tokens` and installed extensions) can be
imported from here too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.agent import Agent
    from palaestra.agent.budget import Budget
    from palaestra.agent.known_programs import program_named
    from palaestra.agent.loop import LoopSettings
    from palaestra.agent.programs import AgentAssignment, HostedAgent
    from palaestra.agent.result import AgentResult, ToolError
    from palaestra.envs.api.declaration import FunctionEnvConfig
    from palaestra.envs.api.function_form import environment
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
    from palaestra.tools.registry.registry import ToolRegistry
    from palaestra.tools.tool import Tool, ToolMistake, ToolRun, ToolSchema
    from palaestra_slots.core.errors import (
        ConfigError,
        EngineError,
        InfraError,
        PalaestraError,
        PrepareError,
        SandboxError,
        TaskError,
        ToolUnavailable,
    )
    from palaestra_slots.core.types import (
        JSON,
        Label,
        Message,
        NetworkPolicy,
        Outcome,
        Prices,
        Say,
        Score,
        Task,
        ToolStep,
    )
    from palaestra_slots.sandbox.sandbox import Sandbox
    from palaestra_slots.sandbox.slot import Slot

__version__ = "0.1.0"

__all__ = [
    "JSON",
    "Agent",
    "AgentAssignment",
    "AgentResult",
    "Budget",
    "ChatModel",
    "ConfigError",
    "EngineError",
    "ExportedRow",
    "FunctionEnvConfig",
    "Group",
    "HostedAgent",
    "InfraError",
    "Label",
    "LoopSettings",
    "Message",
    "NetworkPolicy",
    "Outcome",
    "PalaestraError",
    "Play",
    "PrepareError",
    "Prices",
    "Rollout",
    "RolloutFunction",
    "Run",
    "Sandbox",
    "SandboxError",
    "Say",
    "Score",
    "Scored",
    "Session",
    "Slot",
    "SyncPlay",
    "SyncSession",
    "Task",
    "TaskError",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolMistake",
    "ToolRegistry",
    "ToolResult",
    "ToolRun",
    "ToolSchema",
    "ToolStep",
    "ToolUnavailable",
    "Trajectory",
    "Unscored",
    "User",
    "environment",
    "grade",
    "list_runs",
    "open_run",
    "open_world",
    "program_named",
    "run",
    "run_sync",
    "stream",
    "tool",
    "training_rows",
]

_MODULES = {
    "JSON": "palaestra_slots.core.types",
    "Agent": "agent.agent",
    "AgentAssignment": "agent.programs",
    "AgentResult": "agent.result",
    "Budget": "agent.budget",
    "ChatModel": "rollouts.chat_model",
    "ConfigError": "palaestra_slots.core.errors",
    "EngineError": "palaestra_slots.core.errors",
    "ExportedRow": "rollouts.export.token_rows",
    "FunctionEnvConfig": "envs.api.declaration",
    "Group": "rollouts.records",
    "HostedAgent": "agent.programs",
    "InfraError": "palaestra_slots.core.errors",
    "Label": "palaestra_slots.core.types",
    "LoopSettings": "agent.loop",
    "Message": "palaestra_slots.core.types",
    "NetworkPolicy": "palaestra_slots.core.types",
    "Outcome": "palaestra_slots.core.types",
    "PalaestraError": "palaestra_slots.core.errors",
    "Play": "envs.run.session",
    "PrepareError": "palaestra_slots.core.errors",
    "Prices": "palaestra_slots.core.types",
    "Rollout": "rollouts.rollout",
    "RolloutFunction": "envs.run.rollout_function",
    "Run": "rollouts.finished_run",
    "Sandbox": "palaestra_slots.sandbox.sandbox",
    "SandboxError": "palaestra_slots.core.errors",
    "Say": "palaestra_slots.core.types",
    "Score": "palaestra_slots.core.types",
    "Scored": "envs.run.rollout_function",
    "Session": "envs.run.session",
    "Slot": "palaestra_slots.sandbox.slot",
    "SyncPlay": "envs.run.session",
    "SyncSession": "envs.run.session",
    "Task": "palaestra_slots.core.types",
    "TaskError": "palaestra_slots.core.errors",
    "Tool": "tools.tool",
    "ToolCall": "tools.call_text",
    "ToolError": "agent.result",
    "ToolMistake": "tools.tool",
    "ToolRegistry": "tools.registry.registry",
    "ToolResult": "tools.call_text",
    "ToolRun": "tools.tool",
    "ToolSchema": "tools.tool",
    "ToolStep": "palaestra_slots.core.types",
    "ToolUnavailable": "palaestra_slots.core.errors",
    "Trajectory": "rollouts.records",
    "Unscored": "envs.run.rollout_function",
    "User": "tools.builtin.clarify",
    "environment": "envs.api.function_form",
    "grade": "envs.run.regrade",
    "list_runs": "rollouts.journal.reader",
    "open_run": "rollouts.finished_run",
    "open_world": "rollouts.recorded_tools.recording_policy",
    "program_named": "agent.known_programs",
    "run": "envs.run.library",
    "run_sync": "envs.run.library",
    "stream": "envs.run.library",
    "tool": "tools.decorator",
    "training_rows": "rollouts.export.token_rows:exported_rows",
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
    module, _, attribute = _MODULES.get(name, "").partition(":")
    if not module:
        source, attribute = _package_with(name), name
    else:
        source = import_module(module if module.startswith("palaestra_") else f"palaestra.{module}")
    value: object = getattr(source, attribute or name)
    globals()[name] = value
    return value


def _package_with(name: str) -> ModuleType:
    """Return the other package that has this public name: scripts that were written for one package import all names
    from here."""
    missing = f"module 'palaestra' has no attribute {name!r}"
    if name.startswith("_") or name in _OWN:  # Python itself asks for these when it imports
        raise AttributeError(missing)
    for module in map(import_module, packages_with_names()):
        if name in module.__all__:
            return module
    if (
        "palaestra_contract" not in sys.modules
    ):  # no AttributeError, because `from palaestra import` would hide its text
        text = f"{missing}; names of existing scripts need palaestra-contract: pip install ./extensions/contract"
        raise ModuleNotFoundError(text, name="palaestra_contract")
    raise AttributeError(missing)


def packages_with_names() -> tuple[str, ...]:
    """Return the other packages whose public names can be imported from here: the libraries, and the installed
    extensions that have an entry point in `palaestra.names`."""
    from palaestra_slots.core.io import plugins

    extensions = plugins.installed("palaestra.names").values()
    return ("palaestra_slots", "palaestra_tokens", *(point.value for point in extensions))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
