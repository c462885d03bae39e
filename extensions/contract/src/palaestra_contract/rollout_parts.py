"""Parts of class environments' rollouts: the model server, the tools and an agent loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

from palaestra.agent.result import AgentResult
from palaestra.envs.config.build import extra_body
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.rollouts.rollout import CURRENT, Rollout, RolloutTool
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.registry.registry import Kit
from palaestra_contract.agent_loop import HermesAgentLoop
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import ChatCompletion, TextCompletion

Tools: TypeAlias = tuple[list[dict[str, JSON]], set[str]]
"""The tools of a rollout in the form that the hooks of class environments use: the definitions for the model, and the
valid names."""


class RolloutServer(ChatServer):
    """The model server for the code of one rollout. Chats belong to the rollout, so that a scripted policy can play
    them; other attributes are those of the run's server."""

    def __init__(self, group: ChatServer, session: ChatServer, placeholders: bool = False) -> None:
        self._group = group
        self._session = session
        self._placeholders = placeholders

    def managed_server(self, **options: Any) -> ChatServer:
        """Return a server that adds placeholder tokens to its replies, if the settings allow that; otherwise what the
        run's server returns."""
        if self._placeholders:
            from palaestra_contract.helpers.dummy_server import DummyManagedServer  # only existing scripts need it

            return DummyManagedServer(self)
        managed: ChatServer = self._group.managed_server(**options)  # type: ignore[attr-defined]
        return managed

    async def chat_completion(self, **request: JSON) -> ChatCompletion:
        return await self._session.chat_completion(**request)

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        return await self._group.completion(prompt=prompt, **request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def tools_of(kit: Kit) -> Tools:
    """Return the definitions and the names of a group's tools, as a copy that the class may change."""
    return deepcopy(list(kit.definitions)), set(kit.names)


def offered_kit(kit: Kit, definitions: Sequence[dict[str, JSON]], names: Collection[str]) -> Kit:
    """Return the kit with these tools in place of its own. They may be any tools of the package; the model gets the
    definitions that the class gives."""
    shown = [each for each in definitions if each.get("function", each).get("name") in names]
    if shown == kit.definitions and set(names) == set(kit.names):
        return kit
    known = unrestricted(kit.registry)
    tools = [tool for each in shown if (tool := known.get(each["function"]["name"])) is not None]
    return Kit(kit.registry.with_tools(tools), kit.toolsets, shown)


async def run_agent_loop(
    server: Callable[[], ChatServer],
    config: HermesAgentEnvConfig,
    task_id: str | Rollout,
    tools: list[Any],
    valid_names: set[str] | None,
    messages: list[Message] | None,
    tool_handler: RolloutTool | None,
) -> AgentResult:
    """Do what `_run_agent_loop` does by default: run the rollout's agent or, outside rollouts, a loop that calls
    `server`."""
    if isinstance(task_id, Rollout):
        return await task_id.run_agent(tools if messages is None else messages)
    messages, names = messages if messages is not None else [], valid_names or set()
    rollout = CURRENT.get()
    if rollout is not None:
        rollout.seat.offer(offered_kit(rollout.seat.kit, tools, names))
        own = tool_handler is None or tool_handler == rollout.tools.handle
        return await rollout.run_agent(messages, tool_handler=None if own else tool_handler)
    loop = HermesAgentLoop(
        server(),
        tools,
        names,
        max_turns=config.max_agent_turns,
        task_id=task_id,
        temperature=config.agent_temperature,
        max_tokens=config.max_token_length,
        extra_body=extra_body(config),
        tool_handler=tool_handler,
    )
    return await loop.run(messages)
