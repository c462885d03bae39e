"""The format `sharegpt`: turns of `from` and `value`, with tools, calls and results as tagged text, in Hermes form.

Source: the function-calling data sets of the Hermes models. Turns alternate strictly: at most one `system`, then
`human` and `gpt`. After a `gpt` turn with calls comes one `tool` turn with all the results. The last turn is `gpt`. The
contents of tags are JSON (some published rows have Python literals, which readers of tool calls do not accept).

Invariant: a conversation can be read back from the file, and the report lists everything that the form cannot hold.
Call ids are not written; results are in the order of their calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.chat_messages import ChatMessage, MessageCall, calls_in_text, chat_messages
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, omissions
from palaestra.rollouts.export.openai import remarks_on, rollout_fields
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON

_TOOLS_TEXT = """\
You can call functions. Their signatures, as JSON schemas, stand between <tools> tags:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments between <tool_call> tags, one pair of tags per call:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
What they return comes back between <tool_response> tags."""

NOT_TEXT = "without message parts that are not text"


class Unfit(ValueError):
    """The conversation cannot be written in alternating turns. The error's message gives the reason."""


class ShareGPTExporter:
    """`{"conversations": [{"from", "value"}], "tools": JSON text, "id", "task_id", "reward", …}` per line."""

    name = "sharegpt"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines. A conversation that is `Unfit` is left out and counted."""
        report = ExportReport()
        for group in groups:
            for trajectory in report.chosen(group, meta):
                conversation = chat_messages(trajectory.messages)
                try:
                    turns, remarks = alternating(conversation, group.tools)
                except Unfit as unfit:
                    report.left_out[str(unfit)] += 1
                    continue
                line = {"conversations": turns, "tools": _json(group.tools)} | rollout_fields(trajectory, meta)
                out.write(encode_line(line))
                report.wrote([*remarks, *remarks_on(conversation), *omissions(trajectory)])
        return report


def alternating(
    conversation: Sequence[ChatMessage], tools: Sequence[Mapping[str, JSON]]
) -> tuple[list[dict[str, str]], set[str]]:
    """Return the turns, and remarks on everything that was changed or left out. Raises `Unfit`."""
    turns = _Turns(calls_in_text(conversation))
    for message in conversation:
        turns.take(message)
    turns.end()
    if tools and not turns.in_text:
        turns.system.append(_TOOLS_TEXT.format(tools=_tag_content(list(tools))))
    opening = [{"from": "system", "value": "\n\n".join(turns.system)}] if turns.system else []
    return [*opening, *turns.turns], turns.remarks


class _Turns:
    """The turns so far. `_open` holds the calls of the last turn, and `_results` the messages with their results.

    With `in_text`, the messages already have this form, except that results come in user messages.
    """

    def __init__(self, in_text: bool) -> None:
        self.in_text = in_text
        self.system: list[str] = []
        self.turns: list[dict[str, str]] = []
        self.remarks: set[str] = set()
        self._open: list[MessageCall] = []
        self._results: list[ChatMessage] = []

    def take(self, message: ChatMessage) -> None:
        """Add one message."""
        if not message.only_text:
            self.remarks.add(NOT_TEXT)
        self.remarks |= {f"without the message field {key!r}" for key in message.rest if key != "role"}
        if message.role == "tool":
            self._add_result(message)
            return
        if message.name:
            self.remarks.add("without the speaker's name")
        self._write_results()
        if message.role == "system" and not self.turns:
            self.system.append(message.text)
        elif message.role in ("user", "system"):
            self._human(message)
        elif message.role == "assistant":
            self._gpt(message)
        else:
            raise Unfit(f"has a message with the role {message.role!r}")

    def end(self) -> None:
        """Close the last turn. Turns after the last reply are removed, because readers count turns in pairs."""
        self._write_results()
        while self.turns and self.turns[-1]["from"] != "gpt":
            self.turns.pop()
            self.remarks.add("without the messages after the last reply")
        if not self.turns:
            raise Unfit("has no reply from the model")

    def _human(self, message: ChatMessage) -> None:
        if message.role == "system":
            self.remarks.add("a later system message is written as a human turn")
        last = self.turns[-1]["from"] if self.turns else ""
        if self.in_text and last == "gpt" and message.text.startswith("<tool_response>"):
            self._add_turn("tool", message.text)
        elif last in ("human", "tool"):
            self.remarks.add(f"a human message is joined to the {last} turn before it")
            self.turns[-1]["value"] += f"\n\n{message.text}"
        else:
            self._add_turn("human", message.text)

    def _gpt(self, message: ChatMessage) -> None:
        if not self.turns:
            raise Unfit("begins with the model, not with a human")
        self._open = list(message.calls)
        if self.turns[-1]["from"] == "gpt":
            self.remarks.add("replies without anything between them are joined")
            self.turns[-1]["value"] += f"\n\n{_spoken(message)}"
        else:
            self._add_turn("gpt", _spoken(message))
        if "<tool_call>" in message.text and not self.in_text:
            self.remarks.add("has text that looks like a call")

    def _add_result(self, message: ChatMessage) -> None:
        if not self._open:
            raise Unfit("has a tool result without a call")
        self._results.append(message)

    def _write_results(self) -> None:
        """Write the results of the last calls as one turn, in the order of the calls."""
        if self._results:
            # Reversed, so that of several calls with the same id the first one counts.
            order = {call.id: place for place, call in reversed(list(enumerate(self._open)))}
            self._results.sort(key=lambda result: order.get(result.call_id, len(order)))
            names = {call.id: call.name for call in self._open}
            self._add_turn("tool", "\n".join(_returned(result, names) for result in self._results))
        self._open, self._results = [], []

    def _add_turn(self, speaker: str, value: str) -> None:
        self.turns.append({"from": speaker, "value": value})


def _spoken(message: ChatMessage) -> str:
    """Return a reply in the form in which the model would have written it: thinking, text, calls."""
    parts = [f"<think>\n{message.reasoning}\n</think>"] if message.reasoning else []
    parts += [message.text] if message.text else []
    parts += [_tagged("tool_call", {"name": call.name, "arguments": _arguments_value(call)}) for call in message.calls]
    return "\n".join(parts)


def _arguments_value(call: MessageCall) -> JSON:
    """Return the arguments as an object. Malformed text stays text, so that it does not look well-formed."""
    parsed = call.parsed()
    return call.arguments if parsed is None else parsed


def _returned(result: ChatMessage, names: Mapping[str, str]) -> str:
    name = result.name or names.get(result.call_id, "")
    return _tagged("tool_response", {"name": name, "content": result.text})


def _tagged(tag: str, value: JSON) -> str:
    return f"<{tag}>\n{_tag_content(value)}\n</{tag}>"


def _tag_content(value: JSON) -> str:
    """Return JSON for a tag's content. A closing tag inside it is escaped as JSON, so that no reader stops too
    early."""
    return _json(value).replace("</tool", "\\u003c/tool")


def _json(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False)
