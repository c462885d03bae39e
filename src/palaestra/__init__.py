"""Palaestra: one agent loop, one tool registry and one pool of isolated slots, for chat, batch generation and RL.

Every public name is imported from here. Importing the package loads none of them: each is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra.agent.atropos_agent import AgentConfig, AtroposAgent
    from palaestra.agent.loop import HermesAgentLoop
    from palaestra.agent.result import AgentResult, AgentStep, ToolError
    from palaestra.core.types import Outcome, Score, Task, ToolStep
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
    from palaestra.sandbox.base import ExecutionResult, Slot
    from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra.tools.executor import ToolExecutor, ToolExecutorConfig
    from palaestra.tools.registry import ToolRegistry, build_tool_registry, get_tool_definitions
    from palaestra.tools.schema import ToolSchema
    from palaestra.tools.wire import ToolCall, ToolResult

__version__ = "0.1.0"

__all__ = [
    "APIServerConfig",
    "AgentConfig",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentResult",
    "AgentStep",
    "AtroposAgent",
    "BaseEnv",
    "BaseEnvConfig",
    "ExecutionResult",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "Item",
    "Outcome",
    "ProcessRegistry",
    "Score",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "Slot",
    "SlotPool",
    "SlotPoolConfig",
    "Task",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolExecutor",
    "ToolExecutorConfig",
    "ToolRegistry",
    "ToolResult",
    "ToolSchema",
    "ToolStep",
    "build_tool_registry",
    "environment",
    "get_parser",
    "get_tool_definitions",
    "list_parsers",
    "register_parser",
]

_MODULES = {
    "APIServerConfig": "inference.config",
    "AgentConfig": "agent.atropos_agent",
    "AgentEnv": "envs.agent_env",
    "AgentEnvConfig": "envs.agent_env_config",
    "AgentResult": "agent.result",
    "AgentStep": "agent.result",
    "AtroposAgent": "agent.atropos_agent",
    "BaseEnv": "envs.base_env",
    "BaseEnvConfig": "envs.config",
    "ExecutionResult": "sandbox.base",
    "HermesAgentBaseEnv": "envs.hermes_base_env",
    "HermesAgentEnvConfig": "envs.config",
    "HermesAgentLoop": "agent.loop",
    "Item": "envs.base_env",
    "Outcome": "core.types",
    "ProcessRegistry": "processes.registry",
    "Score": "core.types",
    "ScoredDataGroup": "envs.base_env",
    "ScoredDataItem": "envs.base_env",
    "ServerBaseline": "inference.config",
    "ServerManager": "inference.servers",
    "Slot": "sandbox.base",
    "SlotPool": "sandbox.pool",
    "SlotPoolConfig": "sandbox.pool",
    "Task": "core.types",
    "ToolCall": "tools.wire",
    "ToolContext": "rollouts.context",
    "ToolError": "agent.result",
    "ToolExecutor": "tools.executor",
    "ToolExecutorConfig": "tools.executor",
    "ToolRegistry": "tools.registry",
    "ToolResult": "tools.wire",
    "ToolSchema": "tools.schema",
    "ToolStep": "core.types",
    "build_tool_registry": "tools.registry",
    "environment": "envs.function",
    "get_parser": "inference.parsers",
    "get_tool_definitions": "tools.registry",
    "list_parsers": "inference.parsers",
    "register_parser": "inference.parsers",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra' has no attribute {name!r}")
    value: object = getattr(import_module(f"palaestra.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
