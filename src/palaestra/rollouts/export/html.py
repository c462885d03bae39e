"""The report: one HTML file with every rollout of a run, to open from disk, search, print and send on.

Not a server and not live: `write_report` writes the whole page again. It keeps: nothing a model, a tool or a task wrote
can act in the page (everything is escaped, and the page's own policy lets no other script or style run), the page loads
nothing from anywhere, and a reader sees the old page or the new one, never half.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from palaestra.core.types import JSON
from palaestra.rollouts.export.conversation import Block, Entry, Fields, Page, as_json, conversation, inside
from palaestra.rollouts.export.printable import printable
from palaestra.rollouts.metrics import Figures
from palaestra.rollouts.replacing import replaced
from palaestra.rollouts.tally import duration
from palaestra.rollouts.trajectory import Group, Trajectory

_STAGES = ("acquire", "setup", "model", "tool", "seal", "grade")


@dataclass(frozen=True, slots=True)
class RolloutView:
    """One rollout as the template shows it. `strip` holds (stage, seconds, left, width), the last two in percent."""

    anchor: str
    record: Trajectory
    entries: list[Entry]
    error: Block | None
    strip: list[tuple[str, float, float, float]]
    metrics: list[tuple[str, str]]
    detail: Fields
    facts: list[tuple[str, str]]

    @property
    def turn_notes(self) -> list[str]:
        """What each turn cost, in the order of the turns."""
        seconds = self.record.beside.turn_s
        notes = []
        for place, turn in enumerate(self.record.turns):
            parts = [turn.finish_reason or "", f"{turn.prompt_tokens:,} → {turn.completion_tokens:,} tokens"]
            if place < len(seconds):
                parts += [f"model {duration(seconds[place][0])}", f"tools {duration(seconds[place][1])}"]
            notes.append(" · ".join(filter(None, parts)))
        return notes


@dataclass(frozen=True, slots=True)
class GroupView:
    """One task with its rollouts. `cut_short` tells that the page was full before it."""

    record: Group
    rollouts: list[RolloutView]
    error: Block | None
    tools: list[tuple[str, str, Block]]
    mean: float | None
    cut_short: bool


def write_report(path: Path, groups: Iterable[Group], meta: Mapping[str, JSON], page: Page | None = None) -> None:
    """Write the page to `path`, all at once. Blocks for as long as that takes: call it from a thread during a run.

    `groups` is gone through twice, for the figures at the top and for the page, and shown in its order; one group at a
    time is in memory. `meta` is shown at the top: `env`, `model` and `started_at` (seconds since the epoch) have places
    of their own, any other entry is listed. `page` says how much text fits.
    """
    figures, page = Figures(), page or Page()
    for group in groups:
        figures.add(group)
    style, script = _own("report.css"), _own("report.js")
    pieces = _template().generate(
        meta=meta,
        facts=_pairs({key: value for key, value in meta.items() if key not in ("env", "model", "started_at")}),
        started=_when(meta.get("started_at")),
        groups=(_group_view(group, page) for group in groups),
        numbers=figures.numbers(),
        outcomes=figures.outcomes.most_common(),
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.writelines(piece.encode() for piece in pieces)


def _group_view(group: Group, page: Page) -> GroupView:
    rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
    full = page.full
    return GroupView(
        record=group,
        rollouts=[_rollout_view(group, trajectory, page) for trajectory in group.trajectories],
        error=page.block(group.error) if group.error else None,
        tools=[_tool(tool, page) for tool in group.tools],
        mean=sum(rewards) / len(rewards) if rewards else None,
        cut_short=full,
    )


def _rollout_view(group: Group, trajectory: Trajectory, page: Page) -> RolloutView:
    return RolloutView(
        anchor=f"r{group.number}-{trajectory.index}",
        record=trajectory,
        entries=[*conversation(trajectory.messages, page, len(trajectory.turns)), *inside(trajectory, page)],
        error=page.block(trajectory.error) if trajectory.error else None,
        strip=_strip(trajectory.beside.stages),
        metrics=[(printable(name), f"{value:g}") for name, value in trajectory.metrics.items()],
        detail=page.fields(trajectory.detail),
        facts=_facts(trajectory),
    )


def _strip(stages: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Where the seconds went, stage beside stage. Waiting for something else is not among the stages and not shown."""
    known = [stage for stage in _STAGES if stage in stages]
    names = [*known, *(stage for stage in stages if stage not in _STAGES)]
    total = sum(max(0.0, stages[name]) for name in names) or 1.0
    strip, left = [], 0.0
    for name in names:
        width = 100 * max(0.0, stages[name]) / total
        strip.append((name, stages[name], left, width))
        left += width
    return strip


def _facts(trajectory: Trajectory) -> list[tuple[str, str]]:
    valid, attempted = trajectory.tool_calls_schema_valid, trajectory.tool_calls_attempted
    facts = {
        "tokens": f"{trajectory.prompt_tokens:,} read, {trajectory.completion_tokens:,} written",
        "tool calls": f"{attempted}, {valid} valid, {len(trajectory.tool_errors)} failed",
    }
    if rows := trajectory.rows:
        recorded, trained = (
            sum(len(row.tokens) for row in rows),
            sum(mask != -100 for row in rows for mask in row.masks),
        )
        segments = "" if len(rows) == 1 else f" in {len(rows)} rows"
        facts["recorded tokens"] = f"{recorded:,} ({rows[0].source}){segments}, {trained:,} trained"
    if trajectory.beside.started_at:
        facts["started"] = _when(trajectory.beside.started_at)
    return [*facts.items(), *_pairs(trajectory.beside.sandbox), ("id", trajectory.rollout_id)]


def _tool(tool: Mapping[str, JSON], page: Page) -> tuple[str, str, Block]:
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    schema = page.block(as_json(function.get("parameters"), indent=2))
    return printable(str(function.get("name"))), printable(str(function.get("description") or "")), schema


def _pairs(entries: Mapping[str, JSON]) -> list[tuple[str, str]]:
    pairs = []
    for name, value in entries.items():
        text = value if isinstance(value, str) else as_json(value)
        pairs.append((printable(name), printable(text[:500])))
    return pairs


def _when(started_at: JSON) -> str:
    if isinstance(started_at, int | float):
        return datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return printable(str(started_at)) if started_at else ""


def _verdict(reward: float | None) -> str:
    """The word by which rewards are coloured and filtered."""
    if reward is None:
        return "unscored"
    return "full" if reward >= 1 else "partial" if reward > 0 else "zero"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"verdict": _verdict, "duration": duration, "printable": lambda value: printable(str(value))}
    return environment.from_string(_own("report.html.jinja"))


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
