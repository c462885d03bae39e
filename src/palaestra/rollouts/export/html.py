"""Writes the report: one HTML file with every rollout of a run, to open from disk, search, print and share.

`write_report` always writes the whole page. A rollout's messages are shown as turns, reasoning, and each tool call with
its result; messages of an unexpected shape are shown as well as possible. Invariants: nothing that a model, a tool or a
task wrote can run in the page (everything is escaped and printable, and the page's policy allows only its own script
and style); every text is bounded, and cuts are marked; the page loads nothing; a reader sees the old page or the new
one, never a part of one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from palaestra.core.config import DEFAULT, is_secret
from palaestra.core.io.durable_files import replaced
from palaestra.core.printable import StyledText, printable, spans, without_middle
from palaestra.core.types import JSON, Message
from palaestra.rollouts.grading.reward import DIFFERENCE
from palaestra.rollouts.observe.console import duration
from palaestra.rollouts.observe.failures import Cause
from palaestra.rollouts.observe.intervals import in_words
from palaestra.rollouts.observe.metrics import Figures
from palaestra.rollouts.observe.verdicts import official_name, official_words
from palaestra.rollouts.records import Beside, Group, InnerCallRecord, Trajectory

BLOCK_CHARS = 100_000
"""The maximum number of characters of one text on a page: more than anyone reads, and few enough for a browser."""

PAGE_CHARS = 40_000_000
"""The number of characters on a page after which all further texts are cut short. Browsers get slow somewhat above this
size."""

_SHORT_CHARS = 1_000
_LONG_LINES = 24
_LONG_CHARS = 3_000
_INLINE_CHARS = 100
_BLOCK_NAMES = frozenset({"command", "content", "patch", "output", "code", "old_string", "new_string"})
_DIFF_NAMES = frozenset({"patch", "diff", "model_patch", "agent_patch"})
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
_REASONING_KEYS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Block:
    """A text in its own box. A `long` text is folded; `lines` is its number of lines before any cut."""

    spans: tuple[StyledText, ...]
    lines: int
    long: bool


@dataclass(frozen=True, slots=True)
class Fields:
    """An object's entries: short values as text next to their names, longer values as blocks."""

    inline: tuple[tuple[str, str], ...] = ()
    blocks: tuple[tuple[str, Block], ...] = ()


@dataclass(frozen=True, slots=True)
class ShownResult:
    """A tool's answer. `exit_code` and `error` come from the reply, if it has them."""

    fields: Fields
    exit_code: int | None = None
    error: Block | None = None


@dataclass(slots=True)
class ShownCall:
    """One tool call; `malformed` if its arguments are not a JSON object."""

    name: str
    arguments: Fields
    malformed: bool = False
    result: ShownResult | None = None


@dataclass(slots=True)
class ShownMessage:
    """One message with the results of its calls. `turn` counts the model's turns from 0; None for other messages."""

    role: str
    content: Block | None = None
    reasoning: list[Block] = field(default_factory=list)
    calls: list[ShownCall] = field(default_factory=list)
    result: ShownResult | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over training steps, each with a label and its points (step, value) in ascending order."""

    title: str
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]


class PageBudget:
    """Counts how much text still fits. A text that is too long is cut in the middle. On a full page, only a short
    beginning and end of each text are shown."""

    def __init__(self, block_chars: int = BLOCK_CHARS, page_chars: int = PAGE_CHARS) -> None:
        self._block_chars = block_chars
        self._left = page_chars

    @property
    def full(self) -> bool:
        """Whether the page is full, so that all further texts are cut short."""
        return self._left <= 0

    def block(self, text: str, *, diff: bool = False, markdown: bool = False) -> Block:
        """Return the bounded text, coloured by its escape sequences, shown as a diff, or with styled Markdown."""
        lines = text.count("\n") + 1
        shown = self._bounded(text.strip("\n"))
        long = lines > _LONG_LINES or len(shown) > _LONG_CHARS
        styled = diff_spans(shown) if diff else markdown_spans(shown) if markdown else spans(shown)
        return Block(tuple(styled), lines, long)

    def fields(self, entries: Mapping[str, JSON]) -> Fields:
        """Return the entries of an object, inline or as blocks."""
        inline: list[tuple[str, str]] = []
        blocks: list[tuple[str, Block]] = []
        for key, value in entries.items():
            name = printable(str(key)[:_INLINE_CHARS])
            text = value if isinstance(value, str) else as_json(value)
            if isinstance(value, str) and (name in _BLOCK_NAMES or "\n" in value or len(value) > _INLINE_CHARS):
                blocks.append((name, self.block(value, diff=name in _DIFF_NAMES)))
            elif len(text) > _INLINE_CHARS:
                blocks.append((name, self.block(as_json(value, indent=2))))
            else:
                inline.append((name, printable(text) if text else "(empty)"))
        return Fields(tuple(inline), tuple(blocks))

    def _bounded(self, text: str) -> str:
        limit = min(self._block_chars, _SHORT_CHARS) if self.full else self._block_chars
        if len(text) > limit:
            head, tail = text[: limit * 3 // 4], text[-(limit // 4) :]
            text = f"{head}\n… {len(text) - limit:,} characters are not shown here …\n{tail}"
        self._left -= len(text)
        return text


def conversation(messages: Sequence[Message], page: PageBudget, turns: int) -> list[ShownMessage]:
    """Return the messages in order. A tool's answer is shown with its call, or alone if the latest reply has no call
    with its id.

    The last `turns` assistant messages are the model's own; earlier assistant messages were part of the prompt.
    """
    entries: list[ShownMessage] = []
    waiting: dict[str, ShownCall] = {}
    own = turns - sum(message.get("role") == "assistant" for message in messages)
    for message in messages:
        role = str(message.get("role") or "?")
        if role == "tool":
            result = _result(message.get("content"), page)
            call = waiting.pop(str(message.get("tool_call_id")), None)
            if call is None:
                entries.append(ShownMessage("tool", result=result))
            else:
                call.result = result
            continue
        entry = _entry(printable(role[:_INLINE_CHARS]), message, page)
        if role == "assistant":
            calls = list(_calls(message.get("tool_calls"), page))
            waiting = dict(calls)
            entry.calls = [call for _, call in calls]
            entry.turn = own if 0 <= own < turns else None
            own += 1
        entries.append(entry)
    return entries


def inside(trajectory: Trajectory, page: PageBudget) -> list[ShownMessage]:
    """Return messages for the work inside a rollout's tool calls: the calls that its programs made, and its sub-agents'
    conversations."""
    entries = [_program(trajectory.inner_calls, page)] if trajectory.inner_calls else []
    for each in trajectory.every_subagent():
        head = f"{each.goal}\n({each.outcome.value}{': ' if each.error else ''}{each.error})"
        entries.append(ShownMessage(f"sub-agent {each.number}, started in turn {each.turn}", content=page.block(head)))
        entries += conversation(each.messages, page, 0)
        if each.inner_calls:
            entries.append(_program(each.inner_calls, page))
    return entries


def _program(calls: Sequence[InnerCallRecord], page: PageBudget) -> ShownMessage:
    shown = [
        ShownCall(
            printable(f"{call.tool[:_INLINE_CHARS]} (turn {call.turn})"),
            page.fields(_parsed(call.arguments) or {"": call.arguments}),
            result=_result(call.reply, page),
        )
        for call in calls
    ]
    return ShownMessage("calls of programs", calls=shown)


def diff_spans(text: str) -> Iterator[StyledText]:
    """Yield a patch, unified or in the `*** Begin Patch` form, line by line."""
    for line in text.splitlines(keepends=True):
        css = {"+": "t-add", "-": "t-del", "@": "t-hunk", "*": "t-hunk"}.get(line[:1], "")
        yield StyledText(printable(line), "t-hunk" if line.startswith(("+++", "---", "diff ")) else css)


_IN_TABLE = re.compile(r"/(pass@\d+|mean_reward|pass_rate|scored|planned|tasks|attempts|unscored|tasks_not_run)(/|$)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_HEADING = re.compile(r"^#{1,6} ")
_STYLED = re.compile(r"(?P<code>`[^`\n]+`)|(?P<bold>\*\*[^*\n]+\*\*)")


def markdown_spans(text: str) -> Iterator[StyledText]:
    """Yield Markdown text with styled headings, bold text and code. No character is changed."""
    fenced = False
    for line in text.splitlines(keepends=True):
        if _FENCE.match(line):
            fenced = not fenced
            yield StyledText(printable(line), "t-code t-dim")
        elif fenced:
            yield StyledText(printable(line), "t-code")
        elif _HEADING.match(line):
            yield StyledText(printable(line), "t-bold")
        else:
            yield from _inline(line)


def _inline(line: str) -> Iterator[StyledText]:
    at = 0
    for found in _STYLED.finditer(line):
        yield from spans(line[at : found.start()])
        yield StyledText(printable(found.group()), "t-code" if found["code"] else "t-bold")
        at = found.end()
    yield from spans(line[at:])


def _entry(role: str, message: Message, page: PageBudget) -> ShownMessage:
    text = _text(message.get("content"))
    thoughts = [thought for key in _REASONING_KEYS if isinstance(thought := message.get(key), str) and thought]
    if role == "assistant":
        thoughts += _THINK.findall(text)
        text = _THINK.sub("", text)
    return ShownMessage(
        role,
        content=page.block(text, markdown="\x1b" not in text) if text.strip() else None,
        reasoning=[page.block(thought) for thought in dict.fromkeys(thoughts) if thought.strip()],
    )


def _calls(requested: JSON, page: PageBudget) -> Iterator[tuple[str, ShownCall]]:
    for request in requested if isinstance(requested, list) else []:
        request = request if isinstance(request, dict) else {}
        function = request.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments")
        parsed = arguments if isinstance(arguments, dict) else _parsed(arguments or "{}")
        shown = page.fields(parsed) if parsed is not None else Fields(blocks=(("", page.block(_text(arguments))),))
        name = printable(str(function.get("name"))[:_INLINE_CHARS])
        yield str(request.get("id")), ShownCall(name, shown, malformed=parsed is None)


def _result(content: JSON, page: PageBudget) -> ShownResult:
    reply = _parsed(content) if isinstance(content, str) else None
    if reply is None:
        return ShownResult(Fields(blocks=(("", page.block(_text(content) or "(no output)")),)))
    exit_code, error = reply.get("exit_code"), reply.get("error")
    coded = isinstance(exit_code, int) and not isinstance(exit_code, bool)
    taken = {name for name, known in (("exit_code", coded), ("error", not error or isinstance(error, str))) if known}
    return ShownResult(
        page.fields({key: value for key, value in reply.items() if key not in taken}),
        exit_code=exit_code if coded else None,
        error=page.block(error) if error and isinstance(error, str) else None,
    )


def _text(content: JSON) -> str:
    """Return the text of a message's content, which may be a string, a list of parts, or None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else as_json(content, indent=2)
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        parts.append(text if isinstance(text, str) else f"[{as_json(part)[:200]}]")
    return "\n".join(parts)


def _parsed(text: JSON) -> dict[str, JSON] | None:
    """Return the JSON object in the text, or None."""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_json(value: JSON, indent: int | None = None) -> str:
    """Return the value as JSON text for a reader; values that JSON cannot hold are shown as Python's `str` returns
    them."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except RecursionError:
        return "(nested too deeply to show)"


_STAGES = ("admit", "acquire", "setup", "agent", "model", "tool", "seal", "grade")
"""The stages of a rollout in order, each with its own colour."""


def write_report(
    path: Path,
    groups: Iterable[Group],
    meta: Mapping[str, JSON],
    figures: Figures,
    page: PageBudget | None = None,
    *,
    own: Mapping[str, float] | None = None,
    causes: Sequence[Cause] = (),
    verdicts: Sequence[str] = (),
    config: Mapping[str, JSON] | None = None,
    charts: Sequence[Chart] = (),
) -> None:
    """Write the page to `path` atomically. Blocks, so call it from a thread during a run.

    `groups` are shown in their order; one group at a time is in memory. `figures` are their metrics, shown at the top.
    `meta` is shown at the top: `env`, `model` and `started_at` (seconds since the epoch) have places of their own, and
    any other entry is listed. `page` limits the text. `own` has the environment's own metrics, `causes` has the causes
    of failures, `verdicts` has lines about official verdicts, and `config` has the run's recorded settings. `charts`
    are drawn at the top.
    """
    page = page or PageBudget()
    style, script = _own("report.css"), _own("report.js")
    pieces = _template().generate(
        meta=meta,
        facts=_pairs({key: value for key, value in meta.items() if key not in ("env", "model", "started_at")}),
        started=_when(meta.get("started_at")),
        groups=(_group_view(group, page) for group in groups),
        numbers=figures.numbers(),
        outcomes=figures.outcomes.most_common(),
        scores=_score_table(figures),
        official=lambda: official_words(official_name(config or {})),
        labels=figures.labels.most_common(),
        verdicts=list(verdicts),
        own=[
            (printable(name), f"{value:.6g}") for name, value in (figures.criteria() | _own_figures(own or {})).items()
        ],
        causes=[printable(cause.line()) for cause in causes],
        settings=_settings(config or {}),
        charts=[view for chart in charts if (view := _chart_view(chart)) is not None],
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as file:
        file.writelines(piece.encode() for piece in pieces)


def _chart_view(chart: Chart) -> dict[str, Any] | None:
    """Return the template's data for a chart in a box of 100 by 30; None if the chart has no finite point."""
    curves = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in chart.curves]
    everything = [point for _, points in curves for point in points]
    if not everything:
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    left, width = min(xs), (max(xs) - min(xs)) or 1.0
    low, height = min(ys), (max(ys) - min(ys)) or 1.0
    return {
        "title": printable(chart.title),
        "low": f"{low:.3g}",
        "high": f"{max(ys):.3g}",
        "first": f"{left:g}",
        "last": f"{max(xs):g}",
        "curves": [
            (
                printable(name),
                " ".join(f"{100 * (x - left) / width:.2f},{29 - 28 * (y - low) / height:.2f}" for x, y in points),
                f"{points[-1][1]:.3g}",
            )
            for name, points in curves
            if points
        ],
    }


def _score_table(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Return the column heads and rows of the table of scores, over all tasks and by category."""
    found = list(figures.scores())
    metrics = [name for name in ("mean_reward", "pass_rate", *found[0][1]) if f"{name}/low" in found[0][1]]
    metrics = list(dict.fromkeys(metrics))
    rows = []
    for label, scores in found:
        cells = [printable(label) or "all tasks", str(scores["tasks"]), f"{scores['scored']} of {scores['planned']}"]
        for name in metrics:
            if name not in scores:
                cells.append("–")
                continue
            bounds = (scores[f"{name}/low"], scores[f"{name}/high"]) if f"{name}/low" in scores else None
            few = scores.get(f"{name}/tasks", scores["tasks"])
            cells.append(f"{scores[name]:.3f}{in_words(bounds)}{'' if few == scores['tasks'] else f', {few} tasks'}")
        rows.append(cells)
    return ["", "tasks", "scored", *(name.replace("_", " ") for name in metrics)], rows


def _own_figures(own: Mapping[str, float]) -> dict[str, float]:
    """Return the environment's own metrics, without the evaluation metrics that the table of scores shows."""
    if "eval/planned" not in own:
        return dict(own)
    return {name: value for name, value in own.items() if not _IN_TABLE.search(name)}


def _settings(config: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Return the versions, and the settings that were set explicitly, with their sources. Secrets are left out."""
    env, servers = config.get("env") or {}, config.get("openai") or [{}]
    shown: dict[str, JSON] = {}
    for name, source in (config.get("sources") or {}).items():
        part, _, key = name.partition(".")
        values = env if part == "env" else servers[0] if part == "openai" else {}
        if source != DEFAULT and key in values and not is_secret(key):
            shown[f"{name} ({source})"] = values[key]
    facts = config.get("provenance") or {}
    names = ("palaestra", "python", "platform", "git_commit", "environment_sha256")
    return _pairs(shown | {name: facts[name] for name in names if name in facts})


def _group_view(group: Group, page: PageBudget) -> dict[str, Any]:
    """Return the template's data for one task and its rollouts. `cut_short` is true if the page was full before this
    task."""
    rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
    return {
        "record": group,
        "cut_short": page.full,
        "rollouts": [_rollout_view(group, trajectory, page) for trajectory in group.trajectories],
        "error": page.block(group.error) if group.error else None,
        "tools": [_tool(tool, page) for tool in group.tools],
        "mean": sum(rewards) / len(rewards) if rewards else None,
    }


def _rollout_view(group: Group, trajectory: Trajectory, page: PageBudget) -> dict[str, Any]:
    """Return the template's data for one rollout."""
    return {
        "anchor": f"r{group.number}-{trajectory.index}",
        "record": trajectory,
        "entries": [*conversation(trajectory.messages, page, len(trajectory.turns)), *inside(trajectory, page)],
        "error": page.block(trajectory.error) if trajectory.error else None,
        "strip": _strip(trajectory.beside),
        "metrics": [(printable(name), f"{value:g}") for name, value in trajectory.metrics.items()],
        "detail": page.fields(
            {
                name: value
                for name, value in trajectory.detail.items()
                if value not in (None, "", [], {}) and trajectory.metrics.get(name) != value and name != DIFFERENCE
            }
        ),
        "labels": [
            (label.name, f"{label.evidence[:_SHORT_CHARS]}{' (certain)' if label.certain else ''}")
            for label in trajectory.labels
        ],
        "difference": page.block(trajectory.difference) if trajectory.difference else None,
        "facts": _facts(trajectory),
        "turn_notes": _turn_notes(trajectory),
    }


def _turn_notes(trajectory: Trajectory) -> list[str]:
    """Return a line of text for each turn, in order: its finish reason, its tokens and its durations."""
    seconds = trajectory.beside.turn_s
    notes = []
    for place, turn in enumerate(trajectory.turns):
        parts = [turn.finish_reason or "", f"{turn.prompt_tokens:,} → {turn.completion_tokens:,} tokens"]
        if place < len(seconds):
            parts += [f"model {duration(seconds[place][0])}", f"tools {duration(seconds[place][1])}"]
        notes.append(" · ".join(filter(None, parts)))
    return notes


def _strip(beside: Beside) -> list[tuple[str, float, float, float, int]]:
    """Return (stage, seconds, left, width, colour) for each stage, with left and width in percent. `agent` is the
    agent's time without its model calls and tools."""
    stages = dict(beside.stages)
    if beside.turn_s:
        stages["model"] = sum(model_s for model_s, _ in beside.turn_s)
    if "agent" in stages:
        stages["agent"] = max(0.0, stages["agent"] - stages.get("model", 0.0) - stages.get("tool", 0.0))
    known = [stage for stage in _STAGES if stage in stages]
    names = [*known, *(stage for stage in stages if stage not in _STAGES)]
    total = sum(max(0.0, stages[name]) for name in names) or 1.0
    strip, left = [], 0.0
    for name in names:
        width = 100 * max(0.0, stages[name]) / total
        colour = _STAGES.index(name) if name in _STAGES else len(_STAGES)
        strip.append((name, stages[name], left, width, colour))
        left += width
    return strip


def _facts(trajectory: Trajectory) -> list[tuple[str, str]]:
    valid, attempted = trajectory.tool_calls_schema_valid, trajectory.tool_calls_attempted
    facts = {
        "tokens": f"{trajectory.prompt_tokens:,} read, {trajectory.completion_tokens:,} written",
        "tool calls": f"{attempted}, {valid} valid, {len(trajectory.tool_errors)} failed",
    }
    if sizes := trajectory.row_sizes:
        recorded, trained = map(sum, zip(*sizes, strict=True))
        source = "engine" if trajectory.row is None else trajectory.row.source
        segments = "" if len(sizes) == 1 else f" in {len(sizes)} rows"
        facts["recorded tokens"] = f"{recorded:,} ({source}){segments}, {trained:,} trained"
    if trajectory.beside.started_at:
        facts["started"] = _when(trajectory.beside.started_at)
    return [*facts.items(), *_pairs(trajectory.beside.sandbox), ("id", trajectory.rollout_id)]


def _tool(tool: Mapping[str, JSON], page: PageBudget) -> tuple[str, str, Block]:
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else tool
    schema = page.block(as_json(function.get("parameters"), indent=2))
    return printable(str(function.get("name"))), printable(str(function.get("description") or "")), schema


def _pairs(entries: Mapping[str, JSON]) -> list[tuple[str, str]]:
    pairs = []
    for name, value in entries.items():
        text = value if isinstance(value, str) else as_json(value)
        pairs.append((printable(name), printable(without_middle(text, 500))))
    return pairs


def _when(started_at: JSON) -> str:
    if isinstance(started_at, int | float):
        return datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return printable(str(started_at)) if started_at else ""


def _verdict(reward: float | None) -> str:
    """Return the keyword by which the page colours and filters rewards."""
    if reward is None:
        return "unscored"
    return "full" if reward >= 1 else "partial" if reward > 0 else "zero"


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,  # for all output of the template
    )
    environment.filters |= {"verdict": _verdict, "duration": duration, "printable": lambda value: printable(str(value))}
    return environment.from_string(_own("report.html.jinja"))


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
