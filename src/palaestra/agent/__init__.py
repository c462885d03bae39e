"""The agent loop and its results."""

from palaestra.agent.atropos_agent import AgentConfig, AtroposAgent
from palaestra.agent.budget import Budget
from palaestra.agent.loop import HermesAgentLoop, OnTurn
from palaestra.agent.result import AgentResult, AgentStep, ToolError, Turn
from palaestra.agent.tool_calls import ToolHandler

__all__ = [
    "AgentConfig",
    "AgentResult",
    "AgentStep",
    "AtroposAgent",
    "Budget",
    "HermesAgentLoop",
    "OnTurn",
    "ToolError",
    "ToolHandler",
    "Turn",
]
