"""The format `openai`: one line per rollout with `messages` and `tools`, as chat trainers and tuning services take.

Source: the chat completions API for messages, the tools data sets of the Hugging Face trainers for the line. Not the
place for tokens: what a trainer makes of these messages is its template's affair (`rows` has what was sampled).

It keeps: the texts are as recorded, and `tools` are empty where they stand in the prompt. `arguments` stay JSON text,
since a column of objects gets the keys of all its rows when it is loaded as a table; no text at all, which stands for
no arguments, becomes `{}`, and a malformed text stays what it is and is remarked upon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO

from palaestra.core.types import JSON, Message
from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, apart
from palaestra.rollouts.export.messages import Call, Said, calls_in_text, heard, unanswered
from palaestra.rollouts.records import Group, Trajectory

MALFORMED = "has malformed arguments, kept as text"
UNANSWERED = "has a call without a result"


class OpenAIExporter:
    """`{"messages": […], "tools": […], "id", "task_id", "reward", "outcome", "env", "model"}` per line."""

    name = "openai"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines."""
        report = ExportReport()
        for group in groups:
            for trajectory in report.chosen(group, meta):
                conversation = heard(trajectory.messages)
                messages = [openai_message(message) for message in conversation]
                tools = [] if calls_in_text(conversation) else group.tools
                line = {"messages": messages, "tools": tools} | facts(trajectory, meta)
                out.write(encode_line(line))
                report.wrote([*remarks_on(conversation), *_lost(conversation), *apart(trajectory)])
        return report


def openai_message(message: Said) -> Message:
    """The message with the fields of the shape, in its order, and no others; thinking as `reasoning_content`."""
    content: JSON = message.content
    line: Message = {"role": message.rest.get("role", message.role)}
    if message.calls:
        content = content or None
    line["content"] = content
    if message.reasoning:
        line["reasoning_content"] = message.reasoning
    if message.calls:
        line["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.calls
        ]
    if message.role == "tool":
        line["tool_call_id"] = message.call_id
    if message.name:
        line["name"] = message.name
    return line


def facts(trajectory: Trajectory, meta: ExportMeta) -> dict[str, JSON]:
    """What a line says of its rollout: flat, so that a table can be filtered by it. `reward` is null if unscored."""
    return {
        "id": trajectory.rollout_id,
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome.value,
        "env": meta.env,
        "model": meta.model,
    }


def remarks_on(conversation: Sequence[Said]) -> list[str]:
    """What a trainer may stumble over, though nothing of it is lost."""
    remarks = []
    if any(call.parsed() is None for message in conversation for call in message.calls):
        remarks.append(MALFORMED)
    if unanswered(conversation):
        remarks.append(UNANSWERED)
    return remarks


def _arguments(call: Call) -> str:
    return call.arguments if call.arguments.strip() else "{}"


def _lost(conversation: Sequence[Said]) -> list[str]:
    return [f"without the message field {key!r}" for message in conversation for key in message.rest if key != "role"]
