"""Sub-agents for `delegate_task` calls that do not come from Palaestra's agent loop.

    ToolSession(delegates=Delegates(APIServerConfig(base_url="http://127.0.0.1:8000/v1", model_name="m")))

These sub-agents serve `ToolExecutor` and `ToolSession`, whose callers make calls but provide no model. `Delegates` has
the sub-agents' model servers and limits. In a rollout, the agent creates the sub-agents. Invariants: no model is called
before work is delegated, and what a task's sub-agents use counts towards the task's budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from palaestra.agent.loop import AgentLoop, LoopSettings
from palaestra.agent.result import Subagent
from palaestra.agent.subagents import Subagents
from palaestra.tools.builtin.delegate_task import Assignment, SubagentReport, Work
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_tokens.chat_server import Engine, SessionContext
from palaestra_tokens.config import ServerBaseline
from palaestra_tokens.server_group import ServerGroup


class Delegates:
    """Sub-agents for the tasks of one executor or session; `servers` are their model servers. Implements
    `DelegationSource`.

    `settings` apply to each sub-agent. Their `budget` covers all work of one task, except that its
    `wall_s` limits each sub-agent. `on_end` is called for every sub-agent, with the id of its task, however the
    sub-agent ended. The sub-agent's `result` has the conversation and, from a token-exact server, the tokens.

    Raises `ConfigError` for invalid servers. Delegated work raises `EngineError` if a server cannot be reached.
    """

    def __init__(
        self,
        servers: ServerBaseline | Sequence[ServerBaseline],
        *,
        settings: LoopSettings | None = None,
        on_end: Callable[[str, Subagent], None] | None = None,
    ) -> None:
        ServerGroup(servers)  # checks the settings early; the servers in use belong to the loop that opens them
        self._servers = servers
        self._settings = settings or LoopSettings()
        self._on_end = on_end
        self._opening = asyncio.Lock()
        self._engine: Engine | None = None

    def work(self, tools: ToolRuntime) -> Work:
        """Return the function that does delegated work for the task with these tools."""
        subagents: Subagents | None = None

        async def work(assignments: Sequence[Assignment]) -> list[SubagentReport]:
            nonlocal subagents
            if subagents is None:
                subagents = Subagents(await self._above(tools.task_id), tools, wall_s=self._settings.budget.wall_s)
            try:
                return await subagents.work(assignments)
            finally:
                self._tell(tools.task_id, subagents.loop.result.subagents)

        return work

    async def aclose(self) -> None:
        """Close the connections. Call it when no work is in progress; later work opens them again. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def _above(self, task_id: str) -> AgentLoop:
        """Return a loop that stands for the task's caller. It never runs, but counts what the sub-agents use."""
        session = (await self._started_engine()).session(SessionContext(task_id))
        return AgentLoop(session, ToolRuntime(ToolRegistry(), task_id=task_id), self._settings)

    async def _started_engine(self) -> Engine:
        async with self._opening:
            if self._engine is None:
                engine = ServerGroup(self._servers)
                await engine.start()
                self._engine = engine
            return self._engine

    def _tell(self, task_id: str, ended: list[Subagent]) -> None:
        if self._on_end is not None:
            for each in ended:
                self._on_end(task_id, each)
        ended.clear()
