"""`Agent`: a model with tools, for programs that need an answer and have no environment.

    result = await Agent("Qwen/Qwen3-8B", base_url="http://localhost:8000/v1", tools=[forecast, "terminal"]).run("…")
    print(result.final_response)

An `Agent` runs the same loop as a rollout, but needs no environment: the program passes the model server, the tools and
optionally a sandbox. Nothing is recorded or scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

from palaestra.agent.loop import AgentLoop, LoopSettings
from palaestra.agent.result import AgentResult
from palaestra.tools.decorator import tool
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import Tool
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.threads import run_blocking
from palaestra_slots.core.types import Message
from palaestra_slots.sandbox.sandbox import Sandbox
from palaestra_slots.sandbox.slot import Slot
from palaestra_tokens.config import APIServerConfig, ServerBaseline
from palaestra_tokens.server_group import ServerGroup

ToolSource: TypeAlias = Tool | Callable[..., object] | str
"""A tool, a typed function with a docstring, or the name of a toolset."""


class Agent:
    """Answers prompts with a model. `tools` lists tools, typed functions and names of toolsets.

    The model is `model` at `base_url`. If `server` is set (to one or more configurations), it replaces `model`,
    `base_url` and `api_key`. The tools work in `sandbox`, which must be open. If `sandbox` is None, each `run` whose
    tools need a sandbox opens a new one without a network. Raises `ConfigError` for invalid tools or server settings.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        server: ServerBaseline | Sequence[ServerBaseline] | None = None,
        tools: Sequence[ToolSource] = (),
        system_prompt: str | None = None,
        settings: LoopSettings | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.registry = _registry(tools)
        self.system_prompt = system_prompt
        self.settings = settings or LoopSettings()
        self.sandbox = sandbox
        if server is None and base_url is None:
            raise ConfigError('an Agent needs a model server: pass base_url="http://127.0.0.1:8000/v1" or server=')
        self._servers = server or APIServerConfig(model_name=model, base_url=base_url, api_key=api_key)
        with python_names():
            ServerGroup(self._servers)  # checks the settings early; each run opens its own connections

    async def run(self, prompt: str | Sequence[Message]) -> AgentResult:
        """Converse until the model is done or a limit is reached. `prompt` is the user's message or a list of messages.

        The result's `outcome` and `error` report a server or sandbox that fails during the conversation. Raises
        `EngineError` if a server fails before the conversation starts.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        async with AsyncExitStack() as stack:
            server = ServerGroup(self._servers)
            stack.push_async_callback(server.aclose)
            with python_names():
                await server.start()

            async def slot() -> Slot:
                if self.sandbox is not None:
                    return self.sandbox.slot
                own: Sandbox = await stack.enter_async_context(Sandbox())
                return own.slot

            user_task = next((str(each["content"]) for each in messages if each.get("role") == "user"), "")
            runtime = await stack.enter_async_context(ToolRuntime(self.registry, slot, "agent", user_task))
            return await AgentLoop(server, runtime, self.settings).run(messages)

    def run_sync(self, prompt: str | Sequence[Message]) -> AgentResult:
        """Call `run` from synchronous code. In a notebook, this works although an event loop is already running."""
        return run_blocking(self.run(prompt))


def _registry(tools: Sequence[ToolSource]) -> ToolRegistry:
    toolsets = [each for each in tools if isinstance(each, str)]
    own = [each if isinstance(each, Tool) else tool(each) for each in tools if not isinstance(each, str)]
    return build_tool_registry(toolsets, extra=own)
