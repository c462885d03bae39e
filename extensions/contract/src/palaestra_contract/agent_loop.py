"""`HermesAgentLoop`: the agent loop under the name and with the arguments that existing scripts use.

Source of the arguments: `environments/agent_loop.py` of Hermes Agent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from palaestra.agent.budget import Budget
from palaestra.agent.loop import AgentLoop, LoopSettings, OnTurn
from palaestra.agent.tool_calls import ToolHandler, handler_runtime
from palaestra.tools.runtime.runtime import ToolRuntime, tools_of_task
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ChatServer, chat_server


def in_conversation(server: ChatServer) -> ChatServer:
    """Return the server for one conversation. If the server continues token ids, it then records its tokens."""
    exact = server.ledger is None and getattr(server, "token_exact", False)
    managed: ChatServer = server.managed_server() if exact else server  # type: ignore[attr-defined]
    return managed


async def _own_slot(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
    """Run a call of a loop that has no `tool_handler`. If `task_id` names a rollout, its tools run the call; otherwise,
    the package's tools run it in the task's own slot."""
    if (found := tools_of_task(task_id)) is not None:
        return await found.tools().handle(name, arguments)
    from palaestra_contract.tools.function_calls import handle_function_call_async  # here: it imports the sandbox

    return await handle_function_call_async(name, arguments, task_id)


class HermesAgentLoop(AgentLoop):
    """One rollout of one agent. `run` may be called again after it has returned.

    `tool_schemas` are OpenAI function schemas; `valid_tool_names` defaults to their names. `tool_handler` is a
    `ToolRuntime`, or a function that runs one call and returns the JSON text for the model. By default, the tools of
    the rollout that `task_id` names run the calls. If there is no such rollout, calls run through
    `handle_function_call`, which leases a slot for the task until `cleanup_vm(task_id)`. A server that continues token
    ids records the loop's tokens. `max_tokens` limits one reply,
    `max_context_tokens` the conversation, and `budget` the whole rollout. Calls of the `parallel_safe` tools may run
    concurrently. The tools `memory` and `session_search`, which use data from outside this conversation, are refused
    unless `beyond` names them, because rollouts must not learn from each other.

    `budget_config` has no effect: each tool limits its own results.
    """

    def __init__(
        self,
        server: ChatServer,
        tool_schemas: Sequence[Mapping[str, JSON]],
        valid_tool_names: Collection[str] | None = None,
        max_turns: int = 30,
        task_id: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        extra_body: Mapping[str, JSON] | None = None,
        tool_handler: ToolHandler | ToolRuntime | None = None,
        max_context_tokens: int | None = None,
        budget_config: object = None,
        *,
        parallel_safe: Collection[str] = frozenset(),
        on_turn: OnTurn | None = None,
        clock: Clock | None = None,
        budget: Budget | None = None,
        beyond: Collection[str] = frozenset(),
    ) -> None:
        if valid_tool_names is None:
            valid_tool_names = {schema["function"]["name"] for schema in tool_schemas}
        if not isinstance(tool_handler, ToolRuntime):
            tool_handler = handler_runtime(tool_handler or _own_slot, tool_schemas, valid_tool_names, task_id)
        super().__init__(
            in_conversation(chat_server(server)),
            tool_handler,
            LoopSettings(
                max_turns, temperature, max_tokens, extra_body, max_context_tokens, budget or Budget(), beyond
            ),
            definitions=tool_schemas,
            names=valid_tool_names,
            parallel_safe=parallel_safe,
            on_turn=on_turn,
            clock=clock,
        )

    def resize_tool_pool(self, size: int) -> None:
        """Do nothing: tools are coroutines and need no threads. Programs written for a thread-based loop call this
        method."""
