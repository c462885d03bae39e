"""Messages as chat templates expect them, made from messages in the OpenAI shape.

Templates want text as text (what is none they print as Python would), arguments as an object, names on tool results,
and thinking in a field that differs from family to family. Invariant: the messages given are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Where templates look for thinking: Qwen, GLM and DeepSeek; gpt-oss; others."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def for_template(messages: Sequence[Message], reasoning_field: str | None, *, joined: bool = False) -> list[Message]:
    """All of them. `reasoning_field` None writes thinking into the content, as families without a field do. `joined`
    writes what a call comes with into its thinking, for templates that refuse both at once. Raises `ConfigError`.
    """
    names: dict[str, str] = {}
    ready = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"Message {number} is {message!r:.100}, not an object with a role and content.")
        if not isinstance(message.get("content", ""), str):
            message = {**message, "content": content_of(message)}
        if message.get("role") == "assistant":
            message = assistant_message(message, reasoning_field)
            if joined and reasoning_field in message and message["content"] and "tool_calls" in message:
                message |= {reasoning_field: f"{message[reasoning_field]}\n\n{message['content']}", "content": ""}
            names.update({call.get("id", ""): call["function"]["name"] for call in message.get("tool_calls", ())})
        elif message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            message = {**message, "name": name} if name else message
        ready.append(message)
    return ready


def assistant_message(message: Message, reasoning_field: str | None) -> Message:
    """One assistant message: content never None, thinking where the template looks for it, arguments as objects."""
    ready: Message = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := reasoning_of(message):
        if reasoning_field is None:
            ready["content"] = f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{ready['content']}"
        else:
            ready[reasoning_field] = reasoning
    if calls := message.get("tool_calls"):
        ready["tool_calls"] = [_call(call) for call in calls]
    return ready


def content_of(message: Mapping[str, JSON]) -> str:
    """The text of a message: none is the empty one, the parts of a list are joined. Raises `ConfigError` where there is
    something else than text in it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, Sequence) else [None]
    joined = [text for text in texts if text is not None]
    if content is not None and len(joined) < len(texts):
        raise ConfigError(
            f"A message ({message.get('role')}) holds what is no text: {content!r:.200}. Token-exact chat takes text, "
            "or a list of parts {'type': 'text', 'text': …}; pictures and data must be turned into it first."
        )
    return "".join(joined)


def _text_of(part: JSON) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def reasoning_of(message: Mapping[str, JSON]) -> str:
    """The thinking of a message, under whichever name it stands."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _call(call: Mapping[str, JSON]) -> dict[str, JSON]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"A tool call of an assistant message has no function with a name: {call!r:.200}.")
    written = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    return {"id": call.get("id", ""), "type": "function", "function": written}


def _arguments(arguments: JSON) -> JSON:
    """The object that the text stands for. Text that stands for none is shown inside one: templates walk its keys."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"malformed": arguments}
