"""The format `atif`: one ATIF-v1.7 document per line, for everything that reads agent trajectories; and the way back.

A message becomes a step, and a tool's result part of the step that called it. Steps of the model's own turns have
`metrics`, with the sampled token ids if the engine gave them; earlier replies, which were part of the prompt, are
marked as copied context, so that they are not trained on.

Invariants: every document passes the checks of `schema`; our own values are under the key `palaestra` of an `extra` and
nowhere else; `messages_of` gives the messages back as recorded (None content as empty text, thinking as
`reasoning_content`), and, from documents of others, everything that an OpenAI message can hold.
"""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.ledger import record_rows
from palaestra.rollouts.export.atif.schema import (
    IMAGE_TYPES,
    WRITE_VERSION,
    AtifAgent,
    AtifPart,
    AtifResult,
    AtifSource,
    AtifStep,
    AtifToolCall,
    Content,
    Document,
    Extra,
    FinalMetrics,
    Metrics,
    Observation,
    check,
    read_document,
)
from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, omissions, outcome_fields
from palaestra.rollouts.export.messages import (
    ChatMessage,
    MessageCall,
    chat_messages,
    own_turns,
    part_kind,
    part_text,
)
from palaestra.rollouts.export.openai import remarks_on
from palaestra.rollouts.records import Group, Trajectory

OURS = "palaestra"
"""The key, in any `extra`, of this program's values."""

ATIF_EXTRA_SCHEMA = "palaestra.atif/1"


class AtifExporter:
    """One document per line; `jq -s '.[0]'` takes one out for a tool that wants a file of its own."""

    name = "atif"
    ending = ".jsonl"
    everything = True

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines. A rollout without messages would be a document without steps: it is left out."""
        report = ExportReport()
        for group in groups:
            for trajectory in report.chosen(group, meta):
                if not trajectory.messages:
                    report.left_out["without messages"] += 1
                    continue
                document, remarks = atif_document(trajectory, group.tools, meta)
                out.write(encode_line(msgspec.to_builtins(document)))
                report.wrote(remarks)
        return report


def atif_document(
    trajectory: Trajectory, tools: Sequence[Mapping[str, JSON]], meta: ExportMeta
) -> tuple[Document, set[str]]:
    """The checked document of one rollout, and remarks on what it cannot express."""
    conversation = chat_messages(trajectory.messages)
    steps = _Steps(trajectory)
    for message, turn in zip(conversation, own_turns(conversation, len(trajectory.turns)), strict=True):
        steps.take(message, turn)
    document = Document(
        schema_version=WRITE_VERSION,
        session_id=f"{meta.run_id}/{trajectory.rollout_id}",
        trajectory_id=trajectory.rollout_id,
        agent=AtifAgent(
            name="palaestra",
            version=version("palaestra"),
            model_name=meta.model or None,
            tool_definitions=[dict(tool) for tool in tools] or None,
        ),
        steps=steps.steps,
        final_metrics=FinalMetrics(
            total_prompt_tokens=trajectory.prompt_tokens or None,
            total_completion_tokens=trajectory.completion_tokens or None,
            total_steps=len(steps.steps),
        ),
        extra={OURS: _facts(trajectory, meta)},
    )
    check(document)
    return document, {*steps.remarks, *remarks_on(conversation), *omissions(trajectory)}


def _facts(trajectory: Trajectory, meta: ExportMeta) -> dict[str, JSON]:
    """The parts of our record without a field in the format."""
    return {
        "schema": ATIF_EXTRA_SCHEMA,
        "run_id": meta.run_id,
        "env": meta.env,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "index": trajectory.index,
        **outcome_fields(trajectory),
    }


class _Steps:
    """The steps so far."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.steps: list[AtifStep] = []
        self.remarks: set[str] = set()
        self._turns = dict(enumerate(trajectory.turns, 1))
        self._sampled = _sampled(trajectory)
        if len(self._sampled) < len(trajectory.turns) and trajectory.ledger is not None:
            self.remarks.add("without the token ids of some turns")

    def take(self, message: ChatMessage, turn: int | None) -> None:
        """Add one message; `turn` is the model's own turn (from 1) in which it was written."""
        if message.role == "tool":
            self._result(message)
        elif message.role == "assistant":
            self.steps.append(self._agent_step(message, turn))
        else:
            source = "user" if message.role == "user" else "system"
            unknown = {} if message.role in ("user", "system") else {"role": message.role}
            self.steps.append(self._step(source, message, {**message.rest, **unknown}))

    def _step(self, source: str, message: ChatMessage, fields: Mapping[str, JSON]) -> AtifStep:
        named = {"name": message.name} if message.name else {}
        return AtifStep(
            step_id=len(self.steps) + 1,
            source=source,
            message=self._content(message),
            extra=_ours({"fields": {**fields, **named}} if fields or named else {}),
        )

    def _agent_step(self, message: ChatMessage, turn: int | None) -> AtifStep:
        step = self._step("agent", message, message.rest)
        step.reasoning_content = message.reasoning or None
        step.tool_calls = [_tool_call(call) for call in message.calls] or None
        if turn is None:
            step.is_copied_context = True
        else:
            step.llm_call_count = 1
            step.metrics = self._metrics(turn)
        return step

    def _metrics(self, turn: int) -> Metrics:
        cost, (ids, logprobs) = self._turns[turn], self._sampled.get(turn, (None, None))
        return Metrics(
            prompt_tokens=cost.prompt_tokens or None,
            completion_tokens=cost.completion_tokens or None,
            completion_token_ids=ids,
            logprobs=logprobs,
            extra=_ours({"finish_reason": cost.finish_reason} if cost.finish_reason else {}),
        )

    def _result(self, message: ChatMessage) -> None:
        """Add a tool's result to the agent's step before it, or to a step of its own."""
        if not self.steps or self.steps[-1].source != "agent":
            own = AtifStep(
                step_id=len(self.steps) + 1, source="system", message="", extra=_ours({"only_results": True})
            )
            if not self.steps or not (self.steps[-1].extra or {}).get(OURS, {}).get("only_results"):
                self.steps.append(own)
        step = self.steps[-1]
        called = message.call_id in {call.tool_call_id for call in step.tool_calls or ()}
        fields = {**message.rest, **({"name": message.name} if message.name else {})}
        kept: Extra = {"fields": fields} if fields else {}
        if not called:
            kept |= {"role": "tool"} | ({"tool_call_id": message.call_id} if message.call_id else {})
        result = AtifResult(
            source_call_id=message.call_id if called else None, content=self._content(message), extra=_ours(kept)
        )
        step.observation = step.observation or Observation(results=[])
        step.observation.results.append(result)

    def _content(self, message: ChatMessage) -> Content:
        if isinstance(message.content, str):
            return message.content
        return [self._part(part) for part in message.content]

    def _part(self, part: JSON) -> AtifPart:
        if (text := part_text(part)) is not None:
            return AtifPart(type="text", text=text)
        if (source := _image(part)) is not None:
            return AtifPart(type="image", source=source)
        self.remarks.add(f"without a part of a message, of the kind {part_kind(part)!r}")
        return AtifPart(type="text", text=f"[{part_kind(part)}]")


def _tool_call(call: MessageCall) -> AtifToolCall:
    """The call; with the text of its arguments if the object does not say it all."""
    parsed = call.parsed()
    exact = parsed is not None and arguments_text(parsed) == call.arguments
    kept: Extra = {} if exact else {"arguments": call.arguments}
    return AtifToolCall(tool_call_id=call.id, function_name=call.name, arguments=parsed or {}, extra=_ours(kept))


def _image(part: JSON) -> AtifSource | None:
    """Where an image is, if its address shows its type."""
    link = part.get("image_url") if isinstance(part, Mapping) else None
    url = link.get("url") if isinstance(link, Mapping) else link
    if not isinstance(url, str) or (isinstance(link, Mapping) and set(link) - {"url"}):
        return None
    named = url.removeprefix("data:").partition(";")[0] if url.startswith("data:") else mimetypes.guess_type(url)[0]
    return AtifSource(media_type=named, path=url) if named in IMAGE_TYPES else None


def _sampled(trajectory: Trajectory) -> dict[int, tuple[list[int], list[float]]]:
    """The sampled ids[T] and logprobs[T] of each turn. Sub-agents have segments of the ledger to themselves; nothing if
    the rest has other calls than the agent's turns."""
    ledger = trajectory.ledger
    if ledger is None:
        return {}
    beside = trajectory.of_subagents
    own = [turn.number for turn in ledger.turns if turn.segment not in beside]
    if len(own) != len(trajectory.turns):
        return {}
    sampled: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in own}
    for row in record_rows(ledger):
        assert row.logprobs is not None
        for span in ledger.segments[row.segment].spans:
            if span.kind == "sampled" and span.turn in sampled:
                sampled[span.turn][0].extend(row.tokens[span.start : span.stop])
                sampled[span.turn][1].extend(row.logprobs[span.start : span.stop])
    turns = enumerate(sampled.values(), 1)
    return {turn: each for turn, each in turns if each[0] and math.isfinite(sum(each[1]))}


def _ours(values: Extra) -> Extra | None:
    return {OURS: values} if values else None


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
        ours = _values_of(step.extra)
        if not ours.get("only_results"):
            messages.append(_message(step, ours))
        messages += [_result_message(result, step) for result in (step.observation.results if step.observation else ())]
    return messages


def facts_of(document: Document) -> Mapping[str, JSON]:
    """This program's facts about the rollout: reward, outcome, task and more. Empty for documents of others."""
    return _values_of(document.extra)


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
    message: Message = {"role": role, "content": _message_content(step.message)}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [_message_call(call) for call in step.tool_calls]
    message |= ours.get("fields", {})
    return message


def _message_call(call: AtifToolCall) -> dict[str, JSON]:
    written = _values_of(call.extra).get("arguments")
    arguments = written if isinstance(written, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.tool_call_id,
        "type": "function",
        "function": {"name": call.function_name, "arguments": arguments},
    }


def _result_message(result: AtifResult, step: AtifStep) -> Message:
    """A tool's answer. One without a call is the next user message."""
    ours, content = _values_of(result.extra), _message_content(result.content if result.content is not None else "")
    call_id = result.source_call_id or ours.get("tool_call_id")
    calls = step.tool_calls or []
    if call_id is None and len(calls) == 1 and step.observation is not None and len(step.observation.results) == 1:
        call_id = calls[0].tool_call_id
    if call_id is None and ours.get("role") != "tool":
        return {"role": "user", "content": content}
    named = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", **named, "content": content, **ours.get("fields", {})}


def _message_content(content: Content) -> JSON:
    return content if isinstance(content, str) else [_message_part(part) for part in content]


def _message_part(part: AtifPart) -> dict[str, JSON]:
    if part.source is None:
        return {"type": "text", "text": part.text or ""}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.source.path}}
    return {"type": "audio_url", "audio_url": {"url": part.source.path}}


def _values_of(extra: Extra | None) -> Mapping[str, JSON]:
    found = (extra or {}).get(OURS)
    return found if isinstance(found, Mapping) else {}
