"""ATIF documents as messages: from this program's own exports, and from any agent that writes versions 1.0 to 1.8.

Invariant: our own documents give the messages as recorded (None content as empty text, thinking as
`reasoning_content`); others give everything that an OpenAI message can hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.rollouts.export.atif.schema import (
    AtifPart,
    AtifResult,
    AtifStep,
    AtifToolCall,
    Content,
    Document,
    Extra,
    read_document,
)

OURS = "palaestra"
"""The key, in any `extra`, of this program's values."""


def read_atif(path: Path) -> Iterator[Document]:
    """The documents of a file: one (`.json`), or one per line (`.jsonl`). Raises `ConfigError` with the line."""
    if path.suffix != ".jsonl":
        yield _read(path.read_bytes(), str(path))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _read(line, f"{path}, line {number}")


def messages_of(document: Document) -> list[Message]:
    """The conversation in the OpenAI shape. `document.agent.tool_definitions` are its tools."""
    messages: list[Message] = []
    for step in document.steps:
        ours = _ours(step.extra)
        if not ours.get("only_results"):
            messages.append(_message(step, ours))
        messages += [_result(result, step) for result in (step.observation.results if step.observation else ())]
    return messages


def facts_of(document: Document) -> Mapping[str, JSON]:
    """This program's facts about the rollout: reward, outcome, task and more. Empty for documents of others."""
    return _ours(document.extra)


def arguments_text(arguments: Mapping[str, JSON]) -> str:
    """The text of arguments of which only the object is known, as read back from a document."""
    try:
        stored: JSON = msgspec.json.decode(msgspec.json.encode(arguments))
    except UnicodeEncodeError:
        return ""
    return json.dumps(stored, ensure_ascii=False)


def _read(raw: bytes, where: str) -> Document:
    try:
        return read_document(raw)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _message(step: AtifStep, ours: Mapping[str, JSON]) -> Message:
    role = "assistant" if step.source == "agent" else step.source
    message: Message = {"role": role, "content": _content(step.message)}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [_call(call) for call in step.tool_calls]
    message |= ours.get("fields", {})
    return message


def _call(call: AtifToolCall) -> dict[str, JSON]:
    written = _ours(call.extra).get("arguments")
    arguments = written if isinstance(written, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.function_name, "arguments": arguments},
    }


def _result(result: AtifResult, step: AtifStep) -> Message:
    """A tool's answer. One without a call is the next user message."""
    ours, content = _ours(result.extra), _content(result.content if result.content is not None else "")
    call_id = result.source_call_id or ours.get("tool_call_id")
    calls = step.tool_calls or []
    if call_id is None and len(calls) == 1 and step.observation is not None and len(step.observation.results) == 1:
        call_id = calls[0].tool_call_id
    if call_id is None and ours.get("role") != "tool":
        return {"role": "user", "content": content}
    named = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", **named, "content": content, **ours.get("fields", {})}


def _content(content: Content) -> JSON:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: AtifPart) -> dict[str, JSON]:
    if part.source is None:
        return {"type": "text", "text": part.text or ""}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.source.path}}
    return {"type": "audio_url", "audio_url": {"url": part.source.path}}


def _ours(extra: Extra | None) -> Mapping[str, JSON]:
    found = (extra or {}).get(OURS)
    return found if isinstance(found, Mapping) else {}
