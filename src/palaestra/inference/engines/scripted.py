"""An engine without a model: a scripted policy in the shape of chat completions.

It proves environments (oracle, noop, patch) and repeats runs exactly (replay), with the same loop, validation, tools
and grading as a model. Not token-exact. Invariant: the reply depends on the rollout's context and the messages alone,
ids included. Tokens are estimated: UTF-8 bytes of the text, divided by four and rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.types import JSON, Message, ToolStep
from palaestra.inference.chat_server import ChatServer, ServerEngine, SessionContext
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    ToolCallMessage,
)
from palaestra.inference.engines.policies import (
    COMMANDS,
    Act,
    NoopPolicy,
    OraclePolicy,
    PatchPolicy,
    Policy,
    RecordedReply,
    ReplayPolicy,
)

BYTES_PER_TOKEN = 4

_NEEDS_FILE: Mapping[str, Callable[[Path], Policy]] = {"patch": PatchPolicy, "replay": ReplayPolicy}


class ScriptedEngine(ServerEngine):
    """Plays a policy. `policy` None makes the one that the config's `model_name` names."""

    def __init__(self, config: APIServerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self._policy = policy or policy_named(config.model_name, config.replay_file)

    async def start(self) -> None:
        """Read the policy's files. Raises `ConfigError`."""
        await self._policy.start()

    async def aclose(self) -> None:
        """Nothing is open."""

    def session(self, context: SessionContext) -> ChatServer:
        """The policy playing one rollout."""
        return ScriptedSession(self.name, self._policy, context)

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """One reply outside any rollout: policies that need a task raise `TaskError`."""
        return await self.session(SessionContext()).chat_completion(messages=messages, **request)


class ScriptedSession(ChatServer):
    """A policy for one rollout."""

    def __init__(self, name: str, policy: Policy, context: SessionContext) -> None:
        self._name = name
        self._policy = policy
        self._context = context

    def child(self, number: int = 0) -> ScriptedSession:
        """The same policy for a sub-agent of the rollout."""
        return ScriptedSession(self._name, self._policy, replace(self._context, branch=number, tools=None))

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        **sampling: JSON,
    ) -> ChatCompletion:
        """The policy's next turn. Sampling settings have no effect."""
        act = self._policy.act(self._context, messages)
        if isinstance(self._policy, OraclePolicy):
            self._check(act, self._context.tools if tools is None else [tool["function"]["name"] for tool in tools])
        turn = 1 + sum(message.get("role") == "assistant" for message in messages)
        message, finish_reason = _said(act, turn)
        prompt_tokens, completion_tokens = _tokens(messages), _tokens([message.model_dump()])
        if isinstance(act, RecordedReply):
            prompt_tokens = prompt_tokens if act.prompt_tokens is None else act.prompt_tokens
            completion_tokens = completion_tokens if act.completion_tokens is None else act.completion_tokens
        return ChatCompletion(
            id=f"{self._context.rollout_id}/{turn}",
            model=self._name,
            choices=[ChatChoice(index=i, message=message, finish_reason=finish_reason) for i in range(n)],
            usage=CompletionUsage(
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                total_tokens=prompt_tokens + completion_tokens,
            ),
        )

    def _check(self, act: Act, had: Collection[str] | None) -> None:
        """Raises `TaskError` for a shell command of a solution if the agent has no `terminal`: otherwise the call would
        be answered like a model's mistake, and the solution scored as wrong without having run."""
        if had is None or isinstance(act, str | RecordedReply) or COMMANDS in had:
            return
        if all(step.name != COMMANDS for step in act):
            return
        name = self._context.task.id if self._context.task is not None else ""
        has = f"only {', '.join(sorted(had))}" if had else "no tool"
        raise TaskError(
            f"Task '{name}': its solution has commands for the tool {COMMANDS}, and the agent has {has}. "
            f"Add its toolset, or write the steps as ToolStep with other tools."
        )


def policy_named(model_name: str, replay_file: str | None = None) -> Policy:
    """`oracle`, `noop`, `patch:FILE`, `replay:FILE`, or `replay` with a separate file. Raises `ConfigError`."""
    name, _, file = model_name.partition(":")
    if model_name == "oracle":
        return OraclePolicy()
    if model_name == "noop":
        return NoopPolicy()
    if name in _NEEDS_FILE:
        file = file or (replay_file if name == "replay" else None) or ""
        if not file:
            raise ConfigError(f"Policy '{name}' needs a file: write {name}:FILE.")
        return _NEEDS_FILE[name](Path(file))
    raise ConfigError(f"There is no scripted policy '{model_name}'; available: oracle, noop, patch:FILE, replay:FILE.")


def _said(act: str | Sequence[ToolStep] | RecordedReply, turn: int) -> tuple[AssistantMessage, str]:
    if isinstance(act, RecordedReply):
        return act.message, act.finish_reason or ("tool_calls" if act.message.tool_calls else "stop")
    if isinstance(act, str):
        return AssistantMessage(content=act), "stop"
    calls = [_call(step, f"call_{turn}_{index}") for index, step in enumerate(act)]
    return AssistantMessage(tool_calls=calls), "tool_calls"


def _call(step: ToolStep, call_id: str) -> ToolCallMessage:
    arguments = msgspec.json.encode(dict(step.arguments)).decode()
    return ToolCallMessage(id=call_id, function=FunctionCall(name=step.name, arguments=arguments))


def _tokens(messages: Iterable[Message]) -> int:
    return -(-sum(_text_bytes(message) for message in messages) // BYTES_PER_TOKEN)


def _text_bytes(message: Message) -> int:
    texts = [message.get("content"), message.get("reasoning_content")]
    for call in message.get("tool_calls") or ():
        texts += [call["function"]["name"], call["function"]["arguments"]]
    return sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
