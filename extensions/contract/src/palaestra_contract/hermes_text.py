"""Tool calls as text over any chat server: `<tool_call>` in replies, `<tool_response>` in user turns.

`HermesText` wraps another `ChatServer`, so that the agent loop also works with models that are prompted to
write calls. The inner server sees plain text turns and no `tools`; the loop sees structured calls. Token-exact servers
parse the call formats of other model families themselves.

Invariants: a reply goes back to the server exactly as it was sampled, whatever was parsed from it (T1); if a call
cannot be parsed, the loop answers it with an error (T6). Source of the format: Hermes function calling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from palaestra.agent.replies import Reply, RequestedCall, read_reply
from palaestra.tools.call_text import ToolResult
from palaestra.tools.tool import encodable
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer, chat_server
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    ToolCallMessage,
)
from palaestra_tokens.ledger import Ledger
from palaestra_tokens.parsers import get_parser

# Without `<` and `/`, so that each matches the opening and the closing tag.
_TAGS = ("tool_call>", "think>")
_ANSWER, _ANSWERED = "<tool_response>", "</tool_response>"
_RESULT: Mapping[str, type] = {"success": bool, "output": str, "error": str, "metadata": dict}
_RULES = """\
You can call tools. To call one, write its name and its arguments as one JSON object between tags:
<tool_call>
{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>
One reply may hold several calls. The next message brings one <tool_response> for each of them, in order. A reply \
without a call ends the task, so call tools until the work is done, and only then give the final answer.
These are the tools, as JSON schemas:
<tools>
"""

_Said: TypeAlias = tuple[int, str, tuple[tuple[str, str, str], ...]]
"""A reply as the loop keeps it: its number among the assistant's turns, its content and its calls."""


def with_tools(prompt: str, schemas: Sequence[Mapping[str, JSON]]) -> str:
    """Return the system prompt with the tools described below it. A prompt that already has a `<tools>` block is
    unchanged."""
    if not schemas or "<tools>" in prompt:
        return prompt
    listed = "\n".join(json.dumps(schema.get("function", schema), ensure_ascii=False) for schema in schemas)
    return f"{prompt}\n\n{_RULES}{listed}\n</tools>".lstrip()


class HermesText(ChatServer):
    """The adapter of one rollout. `as_text` returns the conversation as the inner server saw it."""

    def __init__(self, inner: ChatServer) -> None:
        self._inner = chat_server(inner)
        self._parser = get_parser("hermes")
        self._sampled: dict[_Said, Message] = {}
        self._observed: dict[str, str] = {}

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
        """Return one reply, with the calls parsed from its text. `tools` is used only to convert arguments to their
        types; the prompt must describe the tools.

        Raises the errors of the inner server and of `read_reply`.
        """
        given: dict[str, JSON] = {"temperature": temperature, "max_tokens": max_tokens, "extra_body": extra_body}
        request = {name: value for name, value in given.items() if value is not None} | sampling
        completion: object = await self._inner.chat_completion(messages=self.as_text(messages), n=1, **request)
        turn = sum(message.get("role") == "assistant" for message in messages)
        reply = read_reply(completion, turn + 1)
        message = self._read_reply(reply, tools or (), turn)
        finish = "tool_calls" if message.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
        used = reply.prompt_tokens, reply.completion_tokens
        return ChatCompletion(
            choices=[ChatChoice(message=message, finish_reason=finish)],
            usage=CompletionUsage(prompt_tokens=used[0], completion_tokens=used[1], total_tokens=sum(used)),
        )

    @property
    def ledger(self) -> Ledger | None:
        """The inner server's ledger."""
        return self._inner.ledger

    def get_state(self) -> dict[str, JSON] | None:
        """Return the inner server's token record, if it keeps one."""
        return self._inner.get_state()

    def as_text(self, messages: Sequence[Message], turn: int = 0) -> list[Message]:
        """Return structured messages as plain turns; consecutive tool answers become one user turn, joined by
        newlines.

        `turn` counts the assistant turns before these messages.
        """
        plain: list[Message] = []
        answering = False
        for message in messages:
            role = message.get("role")
            if role == "tool" and answering:
                plain[-1]["content"] += "\n" + self._observation(message)
            elif role == "tool":
                plain.append({"role": "user", "content": self._observation(message)})
            elif role == "assistant":
                plain.append(self._spoken(message, turn))
                turn += 1
            else:
                plain.append(dict(message))
            answering = role == "tool"
        return plain

    def _observation(self, message: Message) -> str:
        """Return the `<tool_response>` element for a tool message. Elements are cached, because every turn shows the
        whole history."""
        text = str(message.get("content") or "")
        if text not in self._observed:
            self._observed[text] = observation(text)
        return self._observed[text]

    def _spoken(self, message: Message, turn: int) -> Message:
        """Return an assistant message as it was sampled in this rollout. If it comes from elsewhere, write its calls as
        text."""
        calls = _calls_of(message)
        content = str(message.get("content") or "")
        sampled = self._sampled.get(_reply_key(turn, content, calls))
        return dict(sampled) if sampled is not None else {"role": "assistant", "content": message_text(content, calls)}

    def _read_reply(self, reply: Reply, tools: Sequence[Mapping[str, JSON]], turn: int) -> AssistantMessage:
        """Return the reply with structured calls, for the loop. The sampled text is kept for later requests."""
        content, reasoning, calls = reply.content, reply.reasoning, reply.calls
        sampled: Message = {"role": "assistant", "content": message_text(content, calls)}
        if reasoning:
            sampled["reasoning_content"] = reasoning
        if not calls:  # a scripted policy returns structured calls; a model writes only text
            parsed = self._parser.parse(content, tools=tools, cut=reply.cut_off)
            content, reasoning = parsed.content or "", reasoning or parsed.reasoning
            found = enumerate(parsed.all_tool_calls or ())
            calls = tuple(
                RequestedCall(f"call_{turn + 1}_{index}", call.function.name, call.function.arguments)
                for index, call in found
            )
        # With the turn, because two turns may sample different texts that are parsed into the same message.
        self._sampled[_reply_key(turn, content, calls)] = sampled
        return AssistantMessage(
            content=content,
            reasoning_content=reasoning,
            tool_calls=[
                ToolCallMessage(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in calls
            ]
            or None,
        )


def message_text(text: str, calls: Sequence[RequestedCall]) -> str:
    """Return text and calls as a model would write them."""
    return "\n".join([*([text] if text else []), *(_block(call) for call in calls)])


def _block(call: RequestedCall) -> str:
    arguments = call.arguments or "{}"
    if any(tag in arguments for tag in _TAGS):  # inside JSON, `<` only occurs in strings and may be escaped
        arguments = arguments.replace("<", "\\u003c")
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def observation(text: str) -> str:
    """Return the `<tool_response>` element for one answer in the history."""
    return encodable(result_from(text).to_xml())


def result_in(element: str) -> ToolResult:
    """Return the result that a `<tool_response>` element shows."""
    fields = json.loads(element.removeprefix(_ANSWER).removesuffix(_ANSWERED))
    metadata = fields.get("metadata")
    if metadata is None:  # an output that is an object stands for both
        try:
            metadata = json.loads(fields["output"])
        except (ValueError, RecursionError):
            metadata = None
    return ToolResult(
        fields["success"], fields["output"], fields.get("error", ""), metadata if isinstance(metadata, dict) else {}
    )


def result_text(success: bool, output: str, error: str, metadata: Mapping[str, JSON]) -> str:
    """Return a call's result as the JSON text that the history keeps; `result_from` reads it back.

    The exit code is also a top-level field, so that a command that ran and failed does not count as a tool error.
    """
    fields: dict[str, JSON] = {"success": success, "output": output, "error": error, "metadata": dict(metadata)}
    if "exit_code" in metadata:
        fields["exit_code"] = metadata["exit_code"]
    return json.dumps(fields, default=str)


def result_from(text: str) -> ToolResult:
    """Return the result in a tool message. A JSON object that has an `error` but not all keys of a result, such as the
    answer to a call that the loop refused, becomes a failed result. Other text becomes the output of a successful call.
    The result has no id: results are matched to calls by their order, and an id would only cost tokens."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return ToolResult(True, text)
    if not isinstance(fields, dict):
        return ToolResult(True, text)
    if all(isinstance(fields.get(name), kind) for name, kind in _RESULT.items()):  # a result has all these keys
        return ToolResult(fields["success"], fields["output"], fields["error"], fields["metadata"])
    if fields.get("error"):
        return ToolResult(False, error=str(fields["error"]))
    return ToolResult(True, text)


def _calls_of(message: Message) -> tuple[RequestedCall, ...]:
    return tuple(
        RequestedCall(call.get("id") or "", call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )


def _reply_key(turn: int, content: str, calls: Sequence[RequestedCall]) -> _Said:
    return turn, content, tuple((call.id, call.name, call.arguments) for call in calls)
