"""The agent loop and what it hands back."""

from palaestra.agent.budget import Budget
from palaestra.agent.calls import ToolHandler
from palaestra.agent.loop import HermesAgentLoop, OnTurn
from palaestra.agent.result import AgentResult, ToolError, Turn

__all__ = ["AgentResult", "Budget", "HermesAgentLoop", "OnTurn", "ToolError", "ToolHandler", "Turn"]
