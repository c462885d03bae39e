"""Writes the files of a batch from its journal: `batch_N.jsonl`, `trajectories.jsonl`, `discarded.jsonl`,
`statistics.json` and `checkpoint.json`.

All files are rewritten whenever the batch ends or stops, so a resumed batch counts all of its samples. Each new file
replaces the old one atomically.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from palaestra.rollouts.export.atropos import encode_line
from palaestra.rollouts.export.batch import batch_line, samples
from palaestra.rollouts.export.duplicates import REPEATED, duplicates_of
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport, discarded
from palaestra.rollouts.export.sharegpt import Unfit
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.types import JSON


@dataclass(slots=True)
class BatchReport:
    """The result of a batch. `discarded` and `failed` count samples by reason."""

    kept: int = 0
    without_reasoning: int = 0
    rows: array[int] = field(default_factory=lambda: array("q"))
    """The numbers of the rows of the prompt file that have a scored sample, in order."""
    discarded: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    tools: dict[str, Counter[str]] = field(default_factory=dict)
    unknown_tools: Counter[str] = field(default_factory=Counter)
    """Calls of tools that the agent did not have, by name, in kept and discarded samples."""
    schemas: dict[str, JSON] = field(default_factory=dict)
    """The definitions of all tools of the batch, by name."""
    turns: int = 0
    turns_with_reasoning: int = 0

    def add(self, line: Mapping[str, JSON]) -> None:
        """Count a kept sample, given its line of data."""
        self.kept += 1
        for name, stats in line["tool_stats"].items():
            if stats["count"]:
                self.tools.setdefault(name, Counter()).update(stats)
        reasoning = line["reasoning_stats"]
        self.turns += reasoning["total_assistant_turns"]
        self.turns_with_reasoning += reasoning["turns_with_reasoning"]
        self.without_reasoning += not reasoning["has_any_reasoning"]


def write_batch_files(folder: Path) -> BatchReport:
    """Write the files of the batch in this folder, and return the result of the batch. Raises `DiskError`, and
    `ConfigError` for a damaged journal."""
    recording = Recording(folder / "journal.jsonl")
    meta, report = recording.meta, BatchReport()
    with writing(folder):
        with ExitStack() as files:
            kept = files.enter_context(replaced(folder / "trajectories.jsonl"))
            refused = files.enter_context(replaced(folder / "discarded.jsonl"))
            batch: tuple[int, ExitStack, IO[bytes]] | None = None
            for row in _sample_lines(recording, meta, report, refused):
                number = row["metadata"]["batch_num"]
                if batch is None or batch[0] != number:
                    if batch is not None:
                        batch[1].close()
                    own = files.enter_context(ExitStack())
                    batch = number, own, own.enter_context(replaced(folder / f"batch_{number}.jsonl"))
                line = encode_line(row)
                batch[2].write(line)
                kept.write(line)
        if (meta.config.get("env") or {}).get("lean"):
            _write_json(folder / "tools.json", report.schemas)
        _write_json(folder / "statistics.json", _statistics(folder, meta, report))
        checkpoint = {
            "run_name": folder.name,
            "completed_prompts": list(report.rows),
            "last_updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        _write_json(folder / "checkpoint.json", checkpoint)
    return report


def _sample_lines(
    recording: Recording, meta: ExportMeta, report: BatchReport, refused: IO[bytes]
) -> Iterator[dict[str, JSON]]:
    """Yield a line of data for each kept sample, in order. For every other sample, and for every group that failed as a
    whole, write a line with the reason to `refused`."""

    def write_refusal(number: int, kind: Counter[str], reason: str, **more: str) -> None:
        kind[reason] += 1
        name = "failed" if kind is report.failed else "discarded"
        refused.write(encode_line({"prompt_index": number, "kind": name, "reason": reason, **more}))

    unscored, duplicates = ExportReport(), duplicates_of(meta)
    for group in recording:
        known = {tool["function"]["name"]: tool for tool in group.tools}
        report.schemas |= known
        if group.error:
            write_refusal(group.number, report.failed, group.error)
        for trajectory in group.trajectories:
            called = (name for turn in trajectory.turns for name in turn.tools)
            report.unknown_tools.update(name for name in called if name not in known)
            if not trajectory.scored:
                write_refusal(group.number, report.failed, trajectory.error or trajectory.outcome.value)
    for group, trajectory, names in samples(recording, meta, unscored):
        if not report.rows or report.rows[-1] != group.number:
            report.rows.append(group.number)
        if why := discarded(trajectory):
            write_refusal(group.number, report.discarded, "; ".join(why))
            continue
        if duplicates is not None and (earlier := duplicates.repeats(trajectory.rollout_id, trajectory.messages)):
            write_refusal(group.number, report.discarded, REPEATED, repeats=earlier)
            continue
        try:
            line, _ = batch_line(group, trajectory, meta, names)
        except Unfit as unfit:
            write_refusal(group.number, report.discarded, str(unfit))
            continue
        report.add(line)
        yield line


def _statistics(folder: Path, meta: ExportMeta, report: BatchReport) -> dict[str, JSON]:
    env: Mapping[str, JSON] = meta.config.get("env") or {}
    batches = {number // max(1, int(env.get("batch_size") or 1)) for number in report.rows}
    return {
        "run_name": folder.name,
        "distribution": env.get("distribution"),
        "total_prompts": len(report.rows),
        "total_batches": len(batches),
        "batch_size": env.get("batch_size"),
        "model": meta.model,
        "completed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "duration_seconds": round(time.time() - meta.started_at, 2),
        "samples": {
            "kept": report.kept,
            "discarded": dict(report.discarded),
            "failed": dict(report.failed),
        },
        "tool_statistics": {name: _rates(counts) for name, counts in sorted(report.tools.items())},
        "unknown_tools": dict(report.unknown_tools.most_common()),
        "reasoning_statistics": {
            "total_assistant_turns": report.turns,
            "turns_with_reasoning": report.turns_with_reasoning,
            "turns_without_reasoning": report.turns - report.turns_with_reasoning,
            "samples_without_reasoning": report.without_reasoning,
        },
    }


def _rates(counts: Counter[str]) -> dict[str, JSON]:
    count = counts["count"]
    return dict(counts) | {
        "success_rate": round(100 * counts["success"] / count, 2),
        "failure_rate": round(100 * counts["failure"] / count, 2),
    }


def _write_json(path: Path, value: JSON) -> None:
    with replaced(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
