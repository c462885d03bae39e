"""The format `atif`: one ATIF-v1.7 document per line, for programs that read agent trajectories.

A message becomes a step, and a tool's result becomes part of the step that called the tool. Steps of the model's own
turns have `metrics`, with the sampled token ids if the engine returned them; earlier replies, which were part of the
prompt, are marked as copied context, so that they are not trained on.

Source: the Agent Trajectory Interchange Format, RFC 0001 of the Harbor project and its published models (0.25).

Invariants: Palaestra's own values are only under the key `palaestra` of an `extra`. With these values, the messages can
be restored as recorded, except that None content becomes empty text and thinking becomes `reasoning_content`.
"""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from operator import attrgetter
from typing import IO

import msgspec

from palaestra.rollouts.export.atropos import encode_line, outcome_fields
from palaestra.rollouts.export.chat_messages import (
    ChatMessage,
    MessageCall,
    chat_messages,
    own_turns,
    part_kind,
    part_text,
)
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, omissions
from palaestra.rollouts.export.openai import remarks_on
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON
from palaestra_tokens.ledger import SequenceSpan, record_rows, sequence_spans

WRITE_VERSION = "ATIF-v1.7"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

Extra = dict[str, JSON]


class _Record(msgspec.Struct, omit_defaults=True):
    """A part of a document, with the fields of the format that Palaestra uses. Unset fields are not written. Fields
    that documents of others may lack have defaults, and fields that only `imports/atif.py` reads come last."""


class AtifSource(_Record):
    """The location of an image."""

    media_type: str = ""
    path: str = ""


class AtifPart(_Record):
    """A part of a message: a text, or an image by reference."""

    type: str
    text: str | None = None
    source: AtifSource | None = None


Content = str | list[AtifPart]


class AtifToolCall(_Record):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JSON]
    extra: Extra | None = None


class AtifResult(_Record, kw_only=True):
    source_call_id: str | None = None
    content: Content | None = None
    extra: Extra | None = None
    subagent_trajectory_ref: list[Extra] | None = None


class AtifObservation(_Record):
    results: list[AtifResult]


class AtifMetrics(_Record):
    """The metrics of one step. `completion_token_ids[T]` and `logprobs[T]` belong to the sampled tokens; `sequences`,
    under the key `palaestra` in `extra`, lists the sampled sequences that contain these tokens, as [id, offset,
    length]."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra | None = None
    cost_usd: float | None = None


class AtifStep(_Record):
    step_id: int
    source: str
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Extra | None = None
    timestamp: str | None = None


class AtifAgent(_Record):
    name: str = ""
    version: str = ""
    model_name: str | None = None
    tool_definitions: list[dict[str, JSON]] | None = None


class FinalMetrics(_Record):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_steps: int | None = None
    total_cost_usd: float | None = None


class Document(_Record):
    """One trajectory."""

    schema_version: str
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent = msgspec.field(default_factory=AtifAgent)
    steps: list[AtifStep] = []
    final_metrics: FinalMetrics | None = None
    extra: Extra | None = None
    notes: str | None = None
    subagent_trajectories: list[Document] | None = None


OURS = "palaestra"
"""The key of Palaestra's values in any `extra`."""

ATIF_EXTRA_SCHEMA = "palaestra.atif/1"


class AtifExporter:
    """One document per line; `jq -s '.[0]'` extracts the first one for a tool that needs one document per file."""

    name = "atif"
    ending = ".jsonl"
    everything = True

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines. A rollout without messages is left out, since its document would have no steps."""
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
    """Return the document of one rollout, and remarks on the parts that the format cannot express."""
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
    return document, {*steps.remarks, *remarks_on(conversation), *omissions(trajectory)}


def _facts(trajectory: Trajectory, meta: ExportMeta) -> dict[str, JSON]:
    """Return the parts of Palaestra's record for which the format has no field."""
    return {
        "schema": ATIF_EXTRA_SCHEMA,
        "run_id": meta.run_id,
        "env": meta.env,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "index": trajectory.index,
        **outcome_fields(trajectory),
        **meta.marks(trajectory),
    }


class _Steps:
    """The steps so far."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.steps: list[AtifStep] = []
        self.remarks: set[str] = set()
        self._turns = dict(enumerate(trajectory.turns, 1))
        self._sampled = _sampled_turns(trajectory)
        if len(self._sampled) < len(trajectory.turns) and trajectory.ledger is not None:
            self.remarks.add("without the token ids of some turns")

    def take(self, message: ChatMessage, turn: int | None) -> None:
        """Add one message. `turn` is the number (from 1) of the model's turn that wrote it."""
        if message.role == "tool":
            self._add_result(message)
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

    def _metrics(self, turn: int) -> AtifMetrics:
        cost, (ids, logprobs, spans) = self._turns[turn], self._sampled.get(turn, (None, None, ()))
        kept: Extra = {"finish_reason": cost.finish_reason} if cost.finish_reason else {}
        if spans:
            kept["sequences"] = [(span.sequence_id, span.offset, span.length) for span in spans]
        return AtifMetrics(
            prompt_tokens=cost.prompt_tokens or None,
            completion_tokens=cost.completion_tokens or None,
            completion_token_ids=ids,
            logprobs=logprobs,
            extra=_ours(kept),
        )

    def _add_result(self, message: ChatMessage) -> None:
        """Add a tool's result to the agent's step before it, or to a step of its own."""
        # ATIF keeps results only in the step that called. A history that was rewritten may have lost that step.
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
        step.observation = step.observation or AtifObservation(results=[])
        step.observation.results.append(result)

    def _content(self, message: ChatMessage) -> Content:
        if isinstance(message.content, str):
            return message.content
        return [self._part(part) for part in message.content]

    def _part(self, part: JSON) -> AtifPart:
        if (text := part_text(part)) is not None:
            return AtifPart(type="text", text=text)
        if (source := _image_source(part)) is not None:
            return AtifPart(type="image", source=source)
        self.remarks.add(f"without a message part of the kind {part_kind(part)!r}")
        return AtifPart(type="text", text=f"[{part_kind(part)}]")


def _tool_call(call: MessageCall) -> AtifToolCall:
    """Return the call, with the text of its arguments if that text cannot be restored from the object."""
    parsed = call.parsed()
    exact = parsed is not None and arguments_text(parsed) == call.arguments
    kept: Extra = {} if exact else {"arguments": call.arguments}
    return AtifToolCall(tool_call_id=call.id, function_name=call.name, arguments=parsed or {}, extra=_ours(kept))


def _image_source(part: JSON) -> AtifSource | None:
    """Return the location of an image; None if its address does not show a supported type, or if the image has further
    settings, such as `detail`."""
    link = part.get("image_url") if isinstance(part, Mapping) else None
    url = link.get("url") if isinstance(link, Mapping) else link
    if not isinstance(url, str) or (isinstance(link, Mapping) and set(link) - {"url"}):
        return None
    named = url.removeprefix("data:").partition(";")[0] if url.startswith("data:") else mimetypes.guess_type(url)[0]
    return AtifSource(media_type=named, path=url) if named in IMAGE_TYPES else None


def _sampled_turns(trajectory: Trajectory) -> dict[int, tuple[list[int], list[float], list[SequenceSpan]]]:
    """Return the sampled ids[T] and logprobs[T] of each turn, and the sequences that contain them. Segments of
    sub-agents are ignored; if the other segments have more or fewer model calls than the agent has turns, the result is
    empty. Turns without sampled ids, or with a log-probability that is not finite, are left out."""
    ledger = trajectory.ledger
    if ledger is None:
        return {}
    beside = trajectory.of_subagents
    own = [turn.number for turn in ledger.turns if turn.segment not in beside]
    if len(own) != len(trajectory.turns):
        return {}
    sampled: dict[int, tuple[list[int], list[float], list[SequenceSpan]]] = {number: ([], [], []) for number in own}
    for row in record_rows(ledger):
        assert row.logprobs is not None
        for number, spans in groupby(ledger.segments[row.segment].spans, attrgetter("turn")):
            if number not in sampled:
                continue
            ids, logprobs, sequences = sampled[number]
            of_turn = list(spans)
            for span in of_turn[1:]:  # the first span is the prompt
                ids += row.tokens[span.start : span.stop]
                logprobs += row.logprobs[span.start : span.stop]
            sequences += [each for each in sequence_spans(of_turn, trajectory.rollout_id) if each.kind == "sampled"]
    turns = enumerate(sampled.values(), 1)
    # A sum is finite only if each of its values is. JSON has no infinite numbers.
    return {turn: each for turn, each in turns if each[0] and math.isfinite(sum(each[1]))}


def _ours(values: Extra) -> Extra | None:
    return {OURS: values} if values else None


def arguments_text(arguments: Mapping[str, JSON]) -> str:
    """Return arguments as JSON text when only the object is known, for example after reading a document back; empty if
    UTF-8 cannot encode them."""
    try:
        stored: JSON = msgspec.json.decode(msgspec.json.encode(arguments))
    except UnicodeEncodeError:
        return ""
    return json.dumps(stored, ensure_ascii=False)
