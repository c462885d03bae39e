"""`AtroposAgent`: an agent that writes its tool calls as Hermes XML.

Environments of the `AgentEnv` form use this agent, and so can programs that run a single agent themselves.
`AgentLoop` runs it, and `HermesText` parses its calls. Invariant: however a run ends, cancellation included,
`agent.result` is a complete trajectory whose messages are the text turns that the model saw and wrote.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from palaestra.agent.loop import AgentLoop, LoopSettings, OnTurn
from palaestra.agent.result import AgentResult, AgentStep, Turn
from palaestra.agent.subagents import SYSTEM_PROMPT, SubagentSetup
from palaestra.agent.tool_calls import handler_runtime
from palaestra.tools.call_text import ToolCall, result_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra_contract.agent_loop import in_conversation
from palaestra_contract.hermes_text import HermesText, result_from, result_text, with_tools
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.errors import ConfigError, EngineError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer, chat_server

AGENT_SYSTEM_PROMPT = (
    "You are a capable agent that solves tasks with tools. Work in small steps: look before you change something, act, "
    "and check what your action did. Trust what the tools say over what you expect."
)

_OF_COMMANDS = frozenset({"exit_code", "returncode", "sandboxed"})
_FOR_HOOKS = frozenset({
    "returncode", "timeout", "sandboxed", "network_isolated", "stateful", "stdout", "stderr", "rung", "duration_s",
    "cpu_s", "max_rss_bytes",
})  # fmt: skip
"""What results of commands tell hooks beyond what a model reads."""


class CallResult(Protocol):
    """The result of a call: a `ToolResult`, or the `ExecutionResult` of an environment's `exec_tool`."""

    @property
    def success(self) -> bool: ...

    @property
    def output(self) -> str: ...

    @property
    def error(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, JSON]: ...


ExecuteTool: TypeAlias = Callable[[ToolCall], Awaitable[CallResult]]


@dataclass(slots=True)
class AgentConfig:
    """Sampling settings and limits of the agent. Existing environments rely on these names and defaults."""

    temperature: float = 0.7
    max_tokens: int | None = 4096
    """The maximum number of tokens in one reply; None leaves the limit to the server."""
    max_steps: int = 50
    """The maximum number of model calls."""
    system_prompt: str | None = None
    """Replaces the default prompt. The tools are described below it unless it already has a `<tools>` block."""
    tool_delay_s: float = 0.0
    """Seconds to wait before every tool call of a run except the first. If set, calls never run concurrently."""
    working_dir: str | None = None
    """The default of the parameter `workdir`, for tools that have this parameter. None means the workspace."""


class AtroposAgent:
    """One agent. `run` may be called again after it has returned, but not while it runs.

    `limits` has what `config` has not: `extra_body`, `max_context_tokens` and `budget`.

    `execute_tool` runs one call and returns its result; it raises `InfraError` for an infrastructure failure. A server
    that continues token ids records the agent's tokens, with its own tokenizer; `tokenizer` is not used. `on_loop` is
    called with each loop before the loop starts, so that `Subagents` can connect to it. Raises `ConfigError` if there
    are tools but no `execute_tool`.
    """

    def __init__(
        self,
        server: ChatServer,
        tools: ToolRegistry | None = None,
        config: AgentConfig | None = None,
        tokenizer: object = None,
        execute_tool: ExecuteTool | None = None,
        *,
        limits: LoopSettings | None = None,
        on_turn: OnTurn | None = None,
        clock: Clock | None = None,
        on_loop: Callable[[AgentLoop, AtroposAgent], None] | None = None,
    ) -> None:
        self.server = server
        self.tools = tools if tools is not None else ToolRegistry()
        self.config = config or AgentConfig()
        if execute_tool is None and self.tools.list_tools():
            raise ConfigError("AtroposAgent has tools but nothing to run them with: pass execute_tool=")
        self.result = AgentResult(messages=[])
        self._execute = execute_tool
        self._limits = limits or LoopSettings()
        self._on_turn = on_turn
        self._clock = clock or SystemClock()
        self._on_loop = on_loop
        self._called = False
        self._chats: tuple[ChatServer, ChatServer] | None = None

    def _chat(self) -> ChatServer:
        """Return the server of all conversations of this agent, so that its turns continue each other's tokens."""
        if self._chats is None or self._chats[0] is not self.server:
            self._chats = self.server, in_conversation(chat_server(self.server))
        return self._chats[1]

    async def run(self, task: str, initial_messages: Sequence[Message] | None = None) -> AgentResult:
        """Work on a task until a reply calls no tool or a limit is reached. `initial_messages` precede the task in the
        conversation.

        Failures of the server or the sandbox are outcomes of the result. Cancellation, configuration errors and bugs
        are raised.
        """
        return await self.converse([*(initial_messages or ()), {"role": "user", "content": task}])

    async def converse(self, messages: Sequence[Message]) -> AgentResult:
        """Continue a conversation until a reply calls no tool or a limit is reached. The agent's system prompt is added
        if the conversation does not begin with one."""
        await self._go_on(self.opening(messages), self.config.max_steps)
        return self.result

    async def run_single_turn(self, messages: Sequence[Message], execute_tools: bool = True) -> AgentStep:
        """Get one reply to exactly these messages. If `execute_tools` is true, also run the calls in the reply. Raises
        `EngineError` if there is no reply."""
        if execute_tools:
            result = await self._go_on(messages, 1)
            if not result.steps:
                raise EngineError(result.error or str(result.outcome))
            return result.steps[-1]
        chat = HermesText(self._chat())
        completion = await chat.chat_completion(
            messages=messages,
            tools=self.tools.definitions(),
            temperature=self.config.temperature,
            max_tokens=self.config.max_tokens,
            extra_body=self._limits.extra_body,
        )
        said = completion.choices[0].message.model_dump()
        turn = sum(message.get("role") == "assistant" for message in messages)
        return steps_of([said], chat.as_text([said], turn))[0]

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation with the tools described in its system prompt, unless that prompt already has a
        `<tools>` block. If the first message is no system prompt, the agent's system prompt is added."""
        if messages and messages[0].get("role") == "system":
            prompt = with_tools(str(messages[0].get("content") or ""), self.tools.definitions())
            return [{**messages[0], "content": prompt}, *messages[1:]]
        return [{"role": "system", "content": self._build_system_prompt()}, *messages]

    def _build_system_prompt(self) -> str:
        """Return the agent's system prompt with the tools. Existing environments call this method by name."""
        prompt = AGENT_SYSTEM_PROMPT if self.config.system_prompt is None else self.config.system_prompt
        return with_tools(prompt, self.tools.definitions())

    def new_subagent(self, setup: SubagentSetup) -> TextConversation:
        """Return a sub-agent that writes its calls as text. It has this agent's sampling settings, delay between calls
        and working directory."""

        async def execute(call: ToolCall) -> CallResult:
            return result_of((await setup.tools.call(call.name, call.arguments, by_agent=True)).reply)

        agent = AtroposAgent(
            setup.server,
            setup.tools.registry,
            replace(self.config, system_prompt=SYSTEM_PROMPT, max_steps=setup.max_turns),
            execute_tool=execute,
            limits=replace(self._limits, budget=setup.budget),
            on_turn=setup.on_turn,
            clock=self._clock,
        )
        return agent._conversation(agent.opening([{"role": "user", "content": setup.work}]), setup.max_turns)

    async def _go_on(self, messages: Sequence[Message], max_turns: int) -> AgentResult:
        talk = self._conversation(messages, max_turns)
        if self._on_loop is not None:
            self._on_loop(talk.loop, self)
        try:
            await talk.run()
        finally:
            self.result = talk.loop.result
        return self.result

    def _conversation(self, messages: Sequence[Message], max_turns: int) -> TextConversation:
        chat, self._called = HermesText(self._chat()), False
        loop = self._loop(chat, max_turns, sum(message.get("role") == "assistant" for message in messages))
        return TextConversation(self, loop, chat, list(messages))

    def _loop(self, chat: HermesText, max_turns: int, earlier: int) -> AgentLoop:
        """Return the agent loop, set up for this agent. The history already has `earlier` turns of the assistant."""

        def report_turn(turn: Turn, added: list[Message]) -> Awaitable[None] | None:
            return self._on_turn(turn, chat.as_text(added, earlier + turn.number - 1)) if self._on_turn else None

        definitions, config = self.tools.definitions(), self.config
        return AgentLoop(
            chat,
            handler_runtime(self._handle, definitions, self.tools.list_tools(), None),
            replace(self._limits, max_turns=max_turns, temperature=config.temperature, max_tokens=config.max_tokens),
            definitions=definitions,
            parallel_safe=frozenset() if config.tool_delay_s > 0 else self.tools.parallel_safe(),
            on_turn=report_turn,
            clock=self._clock,
        )

    async def _handle(self, name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        assert self._execute is not None
        if self._called and self.config.tool_delay_s > 0:
            await self._clock.sleep(self.config.tool_delay_s)
        self._called = True
        if self.config.working_dir is not None and self._takes_workdir(name):
            arguments = {"workdir": self.config.working_dir, **arguments}
        result = await self._execute(ToolCall(name, arguments))
        metadata = result.metadata
        if metadata.keys() >= _OF_COMMANDS:  # the form for hooks; the model reads the same text as in a rollout
            metadata = {name: value for name, value in metadata.items() if name not in _FOR_HOOKS}
        return result_text(result.success, result.output, result.error, metadata)

    def _takes_workdir(self, name: str) -> bool:
        tool = self.tools.get(name)
        return tool is not None and "workdir" in tool.schema.parameters


@dataclass(frozen=True, slots=True)
class TextConversation:
    """One conversation of an `AtroposAgent`. After `run`, however it ended, `loop.result` holds the conversation as
    text."""

    agent: AtroposAgent
    loop: AgentLoop
    chat: HermesText
    messages: list[Message]

    async def run(self) -> AgentResult:
        before = len(self.messages)
        try:
            return await self.loop.run(self.messages)
        finally:
            _tell(self.loop.result, self.chat, before)


def _tell(result: AgentResult, chat: HermesText, before: int) -> None:
    """Set the result's steps, and set its history to the text that the model saw. The first `before` messages are the
    prompt."""
    answer = result.final_response if len(result.messages) > before else ""
    plain = chat.as_text(result.messages)
    prompt = len(chat.as_text(result.messages[:before]))
    result.steps = steps_of(result.messages[before:], plain[prompt:])
    if result.steps:
        result.steps[-1].sequence_data = result.trajectory_data
    result.answer, result.messages = answer, plain


def steps_of(messages: Sequence[Message], plain: Sequence[Message]) -> list[AgentStep]:
    """Return the assistant's turns in a structured history, with their calls and results; `plain` is the history as
    text."""
    texts = [str(message["content"]) for message in plain if message["role"] == "assistant"]
    steps: list[AgentStep] = []
    for message in messages:
        if message.get("role") == "assistant":
            calls = [_parse_call(call) for call in message.get("tool_calls") or ()]
            steps.append(AgentStep(len(steps) + 1, texts[len(steps)], calls))
        elif message.get("role") == "tool" and steps:
            steps[-1].tool_results.append(result_from(str(message.get("content") or "")))
    return steps


def _parse_call(call: Mapping[str, JSON]) -> ToolCall:
    name, text = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, raw_text=text, uniq_id=call["id"], error=f"Malformed tool call: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, raw_text=text, uniq_id=call["id"], error="Malformed tool call: not an object")
    return ToolCall(name, arguments, raw_text=text, uniq_id=call["id"])
