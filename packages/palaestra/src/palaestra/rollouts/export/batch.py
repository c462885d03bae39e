"""The format `batch`: the rows of hermes-agent's batch runner, which data pipelines of that project read.

A line has `prompt_index, conversations, metadata, completed, partial, api_calls, toolsets_used, tool_stats,
tool_error_counts, reasoning_stats`. `tool_stats` and `tool_error_counts` have the same keys in every line, so that the
lines load as one table. The keys are all built-in tools of this Palaestra version and the tools of the run's first
group. A batch with the setting `lean` repeats neither the tools' schemas nor counts of 0 in each line. Discarded
samples (score 0) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import IO

from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.chat_messages import ChatMessage, chat_messages
from palaestra.rollouts.export.exporter import DISCARDED, ExportMeta, ExportReport, discarded, omissions
from palaestra.rollouts.export.openai import remarks_on
from palaestra.rollouts.export.sharegpt import Unfit, alternating
from palaestra.rollouts.records import Group, Trajectory
from palaestra.tools.registry.build import all_tools
from palaestra_slots.core.types import JSON, Message, Outcome

SCRATCHPADS = ("<think>", "<REASONING_SCRATCHPAD>")
"""Tags of reasoning in the text of a reply."""


class BatchExporter:
    """One line per kept sample."""

    name = "batch"
    ending = ".jsonl"
    everything = False

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the lines. Discarded samples, and samples whose conversations cannot be written, are left out and
        counted."""
        report = ExportReport()
        for group, trajectory, names in samples(groups, meta, report):
            if why := discarded(trajectory):
                report.left_out[f"{DISCARDED}: {'; '.join(why)}"] += 1
                continue
            try:
                line, remarks = batch_line(group, trajectory, meta, names)
            except Unfit as unfit:
                report.left_out[str(unfit)] += 1
                continue
            out.write(encode_line(line))
            report.wrote(remarks)
        return report


def samples(
    groups: Iterable[Group], meta: ExportMeta, report: ExportReport
) -> Iterator[tuple[Group, Trajectory, Sequence[str]]]:
    """Yield each trajectory to export, with its group and the names of all tools that a line counts."""
    # The groups are read one at a time, and only the first is needed for the names, so it is put back in front.
    waiting = iter(groups)
    first = next(waiting, None)
    if first is None:
        return
    own = (tool["function"]["name"] for tool in first.tools)
    names = sorted({*(tool.name for tool in all_tools()), *own})
    for group in chain([first], waiting):
        for trajectory in report.chosen(group, meta):
            yield group, trajectory, names


def batch_line(
    group: Group, trajectory: Trajectory, meta: ExportMeta, names: Sequence[str]
) -> tuple[dict[str, JSON], list[str]]:
    """Return the line of a sample, and remarks on it. Raises `Unfit`."""
    env: Mapping[str, JSON] = meta.config.get("env") or {}
    conversation = chat_messages(_without(trajectory.messages, env.get("ephemeral_system_prompt")))
    lean = bool(env.get("lean"))
    turns, remarks = alternating(conversation, () if lean else group.tools)
    stats, errors = tool_stats(trajectory, names)
    if lean:
        stats = {name: counts for name, counts in stats.items() if counts["count"]}
        errors = {name: count for name, count in errors.items() if count}
    line: dict[str, JSON] = {
        "prompt_index": group.number,
        "conversations": turns,
        "metadata": {
            "batch_num": group.number // max(1, int(env.get("batch_size") or 1)),
            "timestamp": datetime.fromtimestamp(trajectory.beside.started_at, UTC).isoformat(),
            "model": meta.model,
            **meta.marks(trajectory),
        },
        "completed": trajectory.outcome is Outcome.NATURAL,
        "partial": trajectory.outcome is not Outcome.NATURAL,
        "api_calls": len(trajectory.turns),
        "toolsets_used": list(group.toolsets),
        "tool_stats": stats,
        "tool_error_counts": errors,
        "reasoning_stats": reasoning_stats(conversation),
    }
    return line, [*remarks, *remarks_on(conversation), *omissions(trajectory)]


def _without(messages: Sequence[Message], ephemeral: str | None) -> Sequence[Message]:
    """Return the messages without the first one if it is the system message `ephemeral`, which is not written to the
    file."""
    first = messages[0] if messages else {}
    hidden = ephemeral and first.get("role") == "system" and first.get("content") == ephemeral
    return messages[1:] if hidden else messages


def tool_stats(trajectory: Trajectory, names: Sequence[str]) -> tuple[dict[str, JSON], dict[str, int]]:
    """Return the numbers of calls, successes and failures of each tool, and a mapping with the failures alone. Calls of
    tools that are not in `names` are not counted."""
    calls = Counter(name for turn in trajectory.turns for name in turn.tools)
    failed = Counter(error.tool for error in trajectory.tool_errors)
    stats: dict[str, JSON] = {}
    for name in names:
        failures = min(failed[name], calls[name])
        stats[name] = {"count": calls[name], "success": calls[name] - failures, "failure": failures}
    return stats, {name: stats[name]["failure"] for name in names}


def reasoning_stats(conversation: Sequence[ChatMessage]) -> dict[str, JSON]:
    """Return the numbers of replies with and without reasoning."""
    replies = [message for message in conversation if message.role == "assistant"]
    reasoned = sum(map(has_reasoning, replies))
    return {
        "total_assistant_turns": len(replies),
        "turns_with_reasoning": reasoned,
        "turns_without_reasoning": len(replies) - reasoned,
        "has_any_reasoning": reasoned > 0,
    }


def has_reasoning(message: ChatMessage) -> bool:
    """Return whether a reply has reasoning: in a field of its own, or between tags in its text."""
    return bool(message.reasoning) or any(tag in message.text for tag in SCRATCHPADS)
