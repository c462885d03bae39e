"""The format `inspect`: a log of an Inspect evaluation (`.eval`), for Inspect's viewer and the programs that read logs.

Each rollout is a sample, and the rollouts of a task are its epochs. The scores of a sample are `reward`, `official` if
there is an official verdict, and the environment's own metrics. Palaestra's own values are in the sample's metadata
under `palaestra`, with what people have said about the rollout (`annotations`) and its new score (`regraded`). Tokens,
times of turns and the events of a transcript are left out.

Source: the models of `inspect_ai.log` (0.3.285), version 2 of the format. Inspect itself compresses with zstd, and
reads deflated members too.
"""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import IO

import msgspec

from palaestra.rollouts.export.atropos import encode_line, outcome_fields
from palaestra.rollouts.export.chat_messages import ChatMessage, chat_messages, own_turns, part_kind, part_text
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, omissions
from palaestra.rollouts.export.openai import remarks_on
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON, Outcome

OURS = "palaestra"
"""The key of Palaestra's values in a sample's metadata."""

ANNOTATIONS, REGRADED = "annotations", "regraded"
"""Among these values, the keys of what people have said about the rollout, and of the score of `palaestra grade`."""

HEADER, START, SAMPLES, SUMMARIES = "header.json", "_journal/start.json", "samples/", "summaries.json"
"""The members of an archive. `SAMPLES` is the beginning of the samples' names."""

LOG_VERSION = 2
_STOPS = {Outcome.NATURAL: "stop", Outcome.LENGTH: "max_tokens"}
_LIMITS = {Outcome.MAX_TURNS: "message", Outcome.LENGTH: "token", Outcome.BUDGET: "cost"}
_ROLES = ("system", "user", "assistant", "tool")


class InspectExporter:
    """One archive with a sample for each rollout."""

    name = "inspect"
    ending = ".eval"
    everything = True

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the archive. A rollout without messages is left out."""
        report = ExportReport()
        epochs: Counter[str] = Counter()
        values: dict[str, list[float]] = {}
        summaries: list[JSON] = []
        started = {"version": LOG_VERSION, "eval": _spec(meta), "plan": _PLAN}
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            _add_member(archive, START, started)
            for group in groups:
                for trajectory in report.chosen(group, meta):
                    if not trajectory.messages:
                        report.left_out["without messages"] += 1
                        continue
                    epochs[trajectory.task_id] += 1
                    epoch = epochs[trajectory.task_id]
                    sample, remarks = inspect_sample(trajectory, epoch, meta)
                    _add_member(archive, f"{SAMPLES}{trajectory.task_id}_epoch_{epoch}.json", sample)
                    summaries.append({name: sample[name] for name in _SUMMARY if name in sample} | {"completed": True})
                    for name, score in sample["scores"].items():
                        values.setdefault(name, []).append(score["value"])
                    report.wrote(remarks)
            _add_member(archive, SUMMARIES, summaries)
            _add_member(archive, HEADER, _header(meta, started, len(summaries), values))
        return report


def inspect_sample(trajectory: Trajectory, epoch: int, meta: ExportMeta) -> tuple[dict[str, JSON], set[str]]:
    """Return the sample of one rollout, and remarks on what it lacks."""
    conversation = chat_messages(trajectory.messages)
    turns = own_turns(conversation, len(trajectory.turns))
    remarks: set[str] = set()
    messages = [
        _inspect_message(message, turn is not None, meta.model, remarks)
        for message, turn in zip(conversation, turns, strict=True)
    ]
    replies = [each for each in messages if each["role"] == "assistant"]
    # Inspect shows this as the sample's input; system messages are the same for all tasks.
    asked = next((message.text for message in conversation if message.role == "user"), "")
    beside = trajectory.beside
    usage = {"input_tokens": trajectory.prompt_tokens, "output_tokens": trajectory.completion_tokens}
    usage["total_tokens"] = trajectory.prompt_tokens + trajectory.completion_tokens
    cost = {} if trajectory.cost is None else {"total_cost": trajectory.cost}
    sample: dict[str, JSON] = {
        "id": trajectory.task_id,
        "epoch": epoch,
        "input": asked,
        "target": "",
        "messages": messages,
        "output": _model_output(trajectory, replies, meta.model),
        "scores": dict(_scores(trajectory)),
        "metadata": {OURS: _facts(trajectory, meta)},
        "store": {},
        "events": [],
        "model_usage": {meta.model or "none": {**usage, **cost}},
        "total_time": beside.duration_s,
        "attachments": {},
    }
    if beside.started_at:
        sample["started_at"] = _when(beside.started_at)
        sample["completed_at"] = _when(beside.started_at + beside.duration_s)
    if trajectory.outcome in _LIMITS:
        reached = {"type": _LIMITS[trajectory.outcome], "limit": float(len(trajectory.turns))}
        sample["limit"] = {**reached, "reason": trajectory.error or trajectory.outcome.value}
    # Inspect's log has one form of error, with a traceback in plain text and in ANSI colours.
    elif trajectory.outcome is not Outcome.NATURAL:
        message = trajectory.error or trajectory.outcome.value
        sample["error"] = {"message": message, "traceback": message, "traceback_ansi": message}
    return sample, {*remarks, *remarks_on(conversation), *omissions(trajectory)}


_SUMMARY = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "total_time", "started_at",
            "completed_at")  # fmt: skip
_PLAN: dict[str, JSON] = {"name": "plan", "steps": [{"solver": OURS, "params": {}, "params_passed": {}}], "config": {}}


def _spec(meta: ExportMeta) -> dict[str, JSON]:
    env: Mapping[str, JSON] = meta.config.get("env") or {}
    return {
        "eval_id": meta.run_id,
        "run_id": meta.run_id,
        "created": _when(meta.started_at),
        "task": meta.env,
        "task_id": meta.run_id,
        "dataset": {"name": meta.env},
        "model": meta.model or "none",
        "config": {"epochs": int(env.get("group_size") or 1)},
        "packages": {OURS: version(OURS)},
    }


def _header(meta: ExportMeta, started: Mapping[str, JSON], samples: int, values: Mapping[str, list[float]]) -> JSON:
    scores = [
        {
            "name": name,
            "scorer": name,
            "scored_samples": len(found),
            "unscored_samples": samples - len(found),
            "params": {},
            "metrics": {"mean": {"name": "mean", "value": math.fsum(found) / len(found), "params": {}}},
        }
        for name, found in values.items()
    ]
    results = {"total_samples": samples, "completed_samples": samples, "scores": scores}
    if scores:
        results["headline"] = {"scorer": scores[0]["name"], "score": scores[0]["name"], "metric": "mean"}
    stats = {"started_at": _when(meta.started_at), "completed_at": _when(meta.started_at), "model_usage": {}}
    return {**started, "status": "success", "results": results, "stats": stats}


def _scores(trajectory: Trajectory) -> Iterator[tuple[str, JSON]]:
    if trajectory.reward is not None:
        why = {"explanation": trajectory.difference} if trajectory.difference else {}
        yield "reward", {"value": trajectory.reward, **why}
        if trajectory.official is not None:
            yield "official", {"value": trajectory.official}
        for name, value in trajectory.metrics.items():
            if name not in ("reward", "official"):
                yield name, {"value": value}


def _facts(trajectory: Trajectory, meta: ExportMeta) -> dict[str, JSON]:
    grade = meta.grades.get(trajectory.rollout_id)
    return {
        "rollout_id": trajectory.rollout_id,
        "group_id": trajectory.group_id,
        "index": trajectory.index,
        **outcome_fields(trajectory),
        **meta.marks(trajectory),
        **({} if grade is None else {REGRADED: msgspec.to_builtins(grade)}),
    }


def _inspect_message(message: ChatMessage, own: bool, model: str, remarks: set[str]) -> dict[str, JSON]:
    role = message.role if message.role in _ROLES else "user"
    made: dict[str, JSON] = {"role": role, "content": _content(message, remarks)}
    if message.role not in _ROLES:
        remarks.add(f"with a message of the role {message.role!r} as a user's")
    if role == "assistant":
        made |= {"source": "generate", "model": model} if own else {}
        if message.calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "function": call.name,
                    "arguments": {} if (parsed := call.parsed()) is None else parsed,
                    "type": "function",
                    # Inspect's arguments are an object, so malformed ones are only in the error.
                    **({"parse_error": f"malformed arguments: {call.arguments}"} if parsed is None else {}),
                }
                for call in message.calls
            ]
    if role == "tool":
        made |= {"tool_call_id": message.call_id, "function": message.name or None}
    return made


def _content(message: ChatMessage, remarks: set[str]) -> JSON:
    if isinstance(message.content, str) and not message.reasoning:
        return message.content
    parts: list[JSON] = [{"type": "reasoning", "reasoning": message.reasoning}] if message.reasoning else []
    for part in [message.content] if isinstance(message.content, str) else message.content:
        if (text := part_text(part)) is not None:
            parts.append({"type": "text", "text": text})
        elif isinstance(link := part.get("image_url") if isinstance(part, Mapping) else None, Mapping):
            parts.append({"type": "image", "image": str(link.get("url"))})
        else:
            remarks.add(f"without a message part of the kind {part_kind(part)!r}")
            # A reader of the log should see that something was there.
            parts.append({"type": "text", "text": f"[{part_kind(part)}]"})
    return parts


def _model_output(trajectory: Trajectory, replies: list[dict[str, JSON]], model: str) -> dict[str, JSON]:
    if not replies:
        return {"model": model, "choices": [], "completion": ""}
    last = replies[-1]
    content = last["content"]
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content).strip()
    stop = _STOPS.get(trajectory.outcome, "tool_calls" if last.get("tool_calls") else "unknown")
    return {"model": model, "choices": [{"message": last, "stop_reason": stop}], "completion": text}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _add_member(archive: zipfile.ZipFile, name: str, value: JSON) -> None:
    """Add a member with a fixed time, so that the same run gives the same archive."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, encode_line(msgspec.to_builtins(value)))
