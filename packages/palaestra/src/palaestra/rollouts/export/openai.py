"""The format `openai`: one line per rollout with `messages` and `tools`, for chat trainers and tuning services.

Sources: the chat completions API (messages), the tool-calling data sets of the Hugging Face trainers (lines). Lines
have no tokens, since the trainer's chat template produces them (the format `rows` has the sampled tokens).

Invariant: the texts are as recorded, and `tools` is an empty list if the prompt lists the tools and the calls are
written as text. `tools` and `arguments` are JSON text, because a column of objects gets the keys of all its rows when
it is loaded as a table, and schemas whose values differ in type cannot be one column. Empty arguments, which mean none,
become `{}`, and malformed ones are kept with a remark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO

from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.chat_messages import ChatMessage, MessageCall, calls_in_text, chat_messages, unanswered
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, omissions
from palaestra.rollouts.records import Group, Trajectory, verdict_fields
from palaestra_slots.core.types import JSON, Message

MALFORMED = "has malformed arguments, kept as text"
UNANSWERED = "has a call without a result"


class OpenAIExporter:
    """`{"messages": […], "tools": JSON text, "id", "task_id", "reward", "outcome", "env", "model"}` per line."""

    name = "openai"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines."""
        report = ExportReport()
        for group in groups:
            for trajectory in report.chosen(group, meta):
                conversation = chat_messages(trajectory.messages)
                messages = [openai_message(message) for message in conversation]
                if meta.text_content:
                    messages = [{**message, "content": message["content"] or ""} for message in messages]
                tools = encode_line([] if calls_in_text(conversation) else group.tools).decode().rstrip()
                line = {"messages": messages, "tools": tools} | rollout_fields(trajectory, meta)
                out.write(encode_line(line))
                report.wrote([*remarks_on(conversation), *_lost(conversation), *omissions(trajectory)])
        return report


def openai_message(message: ChatMessage) -> Message:
    """Return the message with the fields of the API only, in the API's order; thinking becomes `reasoning_content`."""
    content: JSON = message.content
    line: Message = {"role": message.rest.get("role", message.role)}
    if message.calls:
        # The API gives null as the content of a reply that only calls tools.
        content = content or None
    line["content"] = content
    if message.reasoning:
        line["reasoning_content"] = message.reasoning
    if message.calls:
        line["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments_text(call)}}
            for call in message.calls
        ]
    if message.role == "tool":
        line["tool_call_id"] = message.call_id
    if message.name:
        line["name"] = message.name
    return line


def rollout_fields(trajectory: Trajectory, meta: ExportMeta) -> dict[str, JSON]:
    """Return the line's flat fields about its rollout, for filtering a table. `reward` is null if unscored;
    `official`, `labels`, `origin` and `annotations` are there if the rollout has them."""
    return {
        "id": trajectory.rollout_id,
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        **verdict_fields(trajectory),
        "outcome": trajectory.outcome.value,
        "env": meta.env,
        "model": meta.model,
        **meta.marks(trajectory),
    }


def remarks_on(conversation: Sequence[ChatMessage]) -> list[str]:
    """Return remarks on parts that are complete but may cause problems in a trainer."""
    remarks = []
    if any(call.parsed() is None for message in conversation for call in message.calls):
        remarks.append(MALFORMED)
    if unanswered(conversation):
        remarks.append(UNANSWERED)
    return remarks


def _arguments_text(call: MessageCall) -> str:
    return call.arguments if call.arguments.strip() else "{}"


def _lost(conversation: Sequence[ChatMessage]) -> list[str]:
    return [f"without the message field {key!r}" for message in conversation for key in message.rest if key != "role"]
