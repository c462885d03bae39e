"""Reads ATIF documents (versions 1.0 to 1.8), one JSON object each: those of Harbor and of others, and our exporter's.

A step of an agent becomes an assistant message, and its observation the tools' results. With the values that our
exporter keeps under `palaestra`, the recorded messages, the outcome and the reward are restored. Harbor writes rewards
next to a document, which `trial_verdict` reads.

Source: the Agent Trajectory Interchange Format, RFC 0001 of the Harbor project, and its published models (1.8).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from palaestra.rollouts.export.atif import OURS, AtifStep, AtifToolCall, Content, Document, Extra, arguments_text
from palaestra.rollouts.records import Beside, SubagentRecord, Trajectory, TurnRecord
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import read_regular
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome
from palaestra_view.imports.documents import decoded
from palaestra_view.imports.source import (
    Imported,
    LogFacts,
    count_of,
    finite,
    index_of,
    mapping_of,
    name_of,
    numbers_of,
    objects_of,
    seconds_of,
    text_of,
)

NAME = "atif"
_VERSION = "ATIF-v1"
_MOST_DEEP = 8
_RESULT_BYTES = 4 << 20

_documents: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Document)


def read_document(data: bytes) -> Document:
    """Return the document. Raises `ConfigError` with the reason, without the file's name."""
    document: Document = decoded(data, _documents)
    if not document.schema_version.startswith(_VERSION):
        raise ConfigError(f"{document.schema_version[:40]!r} is not a version of ATIF that can be read: 1.0 to 1.8 can")
    return document


def facts(data: bytes) -> LogFacts:
    """Return the facts about a file from its first document."""
    document = read_document(data)
    ours = _ours(document.extra)
    agent = f"{document.agent.name} {document.agent.version}".strip()
    return LogFacts(
        format=NAME,
        env=name_of(ours.get("env")) or agent,
        model=name_of(document.agent.model_name),
        run_id=name_of(ours.get("run_id")) or name_of(document.session_id),
        started_at=_times(document)[0],
        provenance={"agent": agent, "format": document.schema_version},
    )


def read(data: bytes, verdict: Mapping[str, JSON] | None = None) -> Iterator[Imported]:
    """Yield the rollout of a document. `verdict` has the values of `trial_verdict`, if there are any. Raises
    `ConfigError` with the reason, without the file's name."""
    document = read_document(data)
    ours = {**_ours(document.extra), **(verdict or {})}
    started, ended = _times(document)
    final = document.final_metrics
    turns = _turn_records(document)
    costs = [step.metrics.cost_usd for step in document.steps if step.metrics and step.metrics.cost_usd]
    named = document.trajectory_id or document.session_id or ""
    yield Imported(
        trajectory=Trajectory(
            rollout_id="",
            group_id=name_of(ours.get("group_id")),
            task_id=name_of(ours.get("task_id")) or name_of(named),
            index=index_of(ours.get("index")),
            messages=messages_of(document),
            outcome=outcome_of(ours.get("outcome")),
            reward=finite(ours.get("reward")),
            official=finite(ours.get("official")),
            labels=labels_of(ours.get("labels")),
            blame=blame_of(ours.get("blame")),
            error=text_of(ours.get("error")),
            metrics=numbers_of(ours.get("metrics")),
            detail=dict(mapping_of(ours.get("detail"))) | ({"notes": document.notes} if document.notes else {}),
            prompt_tokens=(final and count_of(final.total_prompt_tokens)) or sum(each.prompt_tokens for each in turns),
            completion_tokens=(final and count_of(final.total_completion_tokens))
            or sum(each.completion_tokens for each in turns),
            cost=finite(final.total_cost_usd) if final and final.total_cost_usd is not None else sum(costs) or None,
            turns=turns,
            tool_calls_attempted=sum(len(each.tools) for each in turns),
            subagents=_subagents(document, _MOST_DEEP),
            beside=Beside(started_at=started, duration_s=max(0.0, ended - started)),
        ),
        tools=objects_of(document.agent.tool_definitions),
    )


def messages_of(document: Document) -> list[Message]:
    """Return the conversation in the OpenAI shape. A document of our exporter gives the recorded messages, except that
    None content is empty text and thinking is `reasoning_content`."""
    messages: list[Message] = []
    for step in document.steps:
        ours = _ours(step.extra)
        if not ours.get("only_results"):
            messages.append(_step_message(step, ours))
        for each in step.observation.results if step.observation else ():
            kept = _ours(each.extra)
            call_id = each.source_call_id or kept.get("tool_call_id")
            called = {} if call_id is None else {"tool_call_id": call_id}
            refs = "".join(
                f"[sub-agent {name_of(ref.get('trajectory_id'))}]" for ref in each.subagent_trajectory_ref or ()
            )
            content = refs if each.content is None else _chat_content(each.content)
            messages.append({"role": "tool", **called, "content": content, **mapping_of(kept.get("fields"))})
    return messages


def trial_verdict(path: Path) -> dict[str, JSON]:
    """Return what Harbor wrote about the trial whose document is at `path` (`TRIAL/agent/trajectory.json`): its task,
    its rewards and its exception, under the names of our export's values; empty if there is no such file."""
    result = path.parent.parent / "result.json"
    try:
        value = decoded(read_regular(result, _RESULT_BYTES)) if path.parent.name == "agent" else None
    except (OSError, ConfigError):
        return {}
    found = mapping_of(value)
    rewards = numbers_of(mapping_of(found.get("verifier_result")).get("rewards"))
    failure = mapping_of(found.get("exception_info"))
    given: dict[str, JSON] = {"task_id": name_of(found.get("task_name"))} if found.get("task_name") else {}
    if rewards:
        given |= {"reward": rewards.get("reward", next(iter(rewards.values()))), "metrics": rewards}
    if failure:
        kind, message = text_of(failure.get("exception_type")), text_of(failure.get("exception_message"))
        given |= {"error": f"{kind}: {message}", "outcome": Outcome.INFRA_ERROR.value}
    return given


def outcome_of(value: JSON) -> Outcome:
    """Return the outcome with this name, or `NATURAL`, because most files record only conversations that ended."""
    return Outcome(value) if value in [each.value for each in Outcome] else Outcome.NATURAL


def blame_of(value: JSON) -> Blame | None:
    """Return the failure attribution with this name, or None."""
    return Blame(value) if value in [each.value for each in Blame] else None


def labels_of(value: JSON) -> list[Label]:
    """Return labels as our exports write them."""
    return [
        Label(name_of(each.get("name")), text_of(each.get("evidence")), each.get("certain") is True)
        for each in objects_of(value)
    ]


def _step_message(step: AtifStep, ours: Mapping[str, JSON]) -> Message:
    role = "assistant" if step.source == "agent" else step.source
    message: Message = {"role": role, "content": _chat_content(step.message)}
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": each.tool_call_id,
                "type": "function",
                "function": {"name": each.function_name, "arguments": _arguments_text(each)},
            }
            for each in step.tool_calls
        ]
    return message | dict(mapping_of(ours.get("fields")))


def _arguments_text(call: AtifToolCall) -> str:
    kept = _ours(call.extra).get("arguments")
    return kept if isinstance(kept, str) else arguments_text(call.arguments) or json.dumps(call.arguments)


def _chat_content(content: Content) -> JSON:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text or ""}
        if part.source is None
        else {"type": "image_url", "image_url": {"url": part.source.path}}
        if part.type == "image"
        else {"type": part.type, "path": part.source.path}
        for part in content
    ]


def _turn_records(document: Document) -> list[TurnRecord]:
    """Return a record of each model call; copied context and steps without a model call are none."""
    found: list[TurnRecord] = []
    for step in document.steps:
        if step.source != "agent" or step.is_copied_context:
            continue
        metrics = step.metrics
        reason = _ours(metrics.extra).get("finish_reason") if metrics else None
        found.append(
            TurnRecord(
                number=len(found) + 1,
                finish_reason=reason if isinstance(reason, str) else None,
                prompt_tokens=count_of(metrics.prompt_tokens) if metrics else 0,
                completion_tokens=count_of(metrics.completion_tokens) if metrics else 0,
                tools=tuple(call.function_name for call in step.tool_calls or ()),
            )
        )
    return found


def _subagents(document: Document, deep: int) -> list[SubagentRecord]:
    started: dict[JSON, int] = {}
    for turn, step in enumerate((each for each in document.steps if each.source == "agent"), 1):
        for result in step.observation.results if step.observation else ():
            started |= {ref.get("trajectory_id"): turn for ref in result.subagent_trajectory_ref or ()}
    return [
        SubagentRecord(
            number=number,
            turn=started.get(each.trajectory_id, 0),
            goal=next((text_of(step.message) for step in each.steps if step.source == "user"), ""),
            messages=messages_of(each),
            outcome=Outcome.NATURAL,
            turns=_turn_records(each),
            subagents=_subagents(each, deep - 1),
        )
        for number, each in enumerate(document.subagent_trajectories or (), 1)
        if deep
    ]


def _times(document: Document) -> tuple[float, float]:
    times = [found for step in document.steps if (found := seconds_of(step.timestamp))]
    return (min(times), max(times)) if times else (0.0, 0.0)


def _ours(extra: Extra | None) -> Mapping[str, JSON]:
    return mapping_of((extra or {}).get(OURS))
