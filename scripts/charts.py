"""Draws charts as SVG: bars and lines with axes, for `plots.py`.

A chart is 480 pixels wide with text of at least 14.5 pixels, so that the text still has 11 pixels when a phone of 400
pixels shrinks the chart. Colours follow the reader's light or dark scheme. The chart has its own background, because
the scheme of a page can differ from that of the system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, MARGIN = 480, 16

COLORS = """
svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; --back: #fff; --text: #1f2328;
  --soft: #57606a; --grid: #d8dee4; --own: #0969da; --peer: #8c959f; --second: #bc4c00; --third: #1a7f37 }
@media (prefers-color-scheme: dark) { svg { --back: #16181c; --text: #e6edf3; --soft: #a0a8b2; --grid: #343a42;
  --own: #58a6ff; --peer: #848d97; --second: #f0883e; --third: #56d364 } }
text { fill: var(--text); font-size: 15px }
.title { font-weight: 600 } .soft { fill: var(--soft); font-size: 14.5px }
.end { text-anchor: end } .mid { text-anchor: middle }
"""
"""The colours and the text of every drawing."""

STYLE = """
.back { fill: var(--back); stroke: var(--grid) } .grid { stroke: var(--grid) } .axis { fill: none; stroke: var(--soft) }
.own { fill: var(--own) } .peer { fill: var(--peer) } .line { fill: none; stroke-width: 2.5; stroke: var(--hue) }
.faint { stroke-width: 1.2; opacity: 0.55 } .dot, .name { fill: var(--hue) }
.name { font-weight: 600; font-size: 14.5px }
"""


@dataclass(frozen=True)
class Bar:
    """One bar with its name, its value on the axis, and the value as it is printed."""

    name: str
    value: float
    printed: str
    own: bool = False


@dataclass(frozen=True)
class Span:
    """One bar of a waterfall from `start` on, with its parts: their colours (own, second, peer) and lengths."""

    name: str
    start: float
    parts: Sequence[tuple[str, float]]
    printed: str


@dataclass(frozen=True)
class Line:
    """One line through points in the colour `hue` (own, peer, second or third). Its name is printed next to its last
    point; a line without a name is thin."""

    points: Sequence[tuple[float, float]]
    hue: str
    name: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis with its label, which includes the unit. It begins at zero; a horizontal axis whose first tick is above
    zero is logarithmic and begins there."""

    label: str
    ticks: Sequence[float]
    end: float


def bars(title: str, described: str, groups: dict[str, Sequence[Bar]], axis: Axis, notes: Sequence[str]) -> str:
    """Draw horizontal bars below the headings of their groups, on one axis from zero."""
    left, right = MARGIN, WIDTH - MARGIN - 70  # the longest bar leaves room for its value

    def x(value: float) -> float:
        return left + (right - left) * value / axis.end

    parts: list[str] = []
    y = 58.0
    for heading, group in groups.items():
        parts.append(_text(left, y + 4, heading, "soft"))
        y += 14
        for bar in group:
            parts.append(_text(left, y + 15, bar.name))
            y += 22
            width = max(1.5, x(bar.value) - left) if bar.value else 0.0
            kind = "own" if bar.own else "peer"
            parts.append(f'<rect class="{kind}" x="{left}" y="{y:g}" width="{width:.1f}" height="15" rx="1.5"/>')
            parts.append(_text(left + width + 6, y + 13, bar.printed, "title"))
            y += 22
        y += 20
    y -= 14
    grid = []
    for tick in axis.ticks:
        grid.append(f'<path class="grid" d="M{x(tick):.1f} 44V{y:g}"/>')
        grid.append(_text(x(tick), y + 17, f"{tick:g}", "soft mid" if tick else "soft"))
    grid.append(f'<path class="axis" d="M{left} 44V{y:g}H{right}"/>')
    y += 38
    parts.append(_text(left, y, axis.label, "soft"))
    return _svg(title, described, [*grid, *parts], y, notes)


def waterfall(
    title: str, described: str, spans: Sequence[Span], axis: Axis, legend: dict[str, str], notes: Sequence[str]
) -> str:
    """Draw bars below each other, each from its own beginning on the axis. `legend` names the colours."""
    left, right = MARGIN + 172, WIDTH - MARGIN - 44

    def x(value: float) -> float:
        return left + (right - left) * value / axis.end

    parts: list[str] = []
    y = 44.0
    for span in spans:
        parts.append(_text(left - 8, y + 13, span.name, "soft end"))
        at = span.start
        for hue, length in span.parts:
            width = max(0.0, x(at + length) - x(at))
            parts.append(
                f'<rect style="fill: var(--{hue})" x="{x(at):.1f}" y="{y + 2:g}" width="{width:.1f}" height="13"/>'
            )
            at += length
        parts.append(_text(x(at) + 4, y + 14, span.printed, "soft"))
        y += 19
    grid = []
    for tick in axis.ticks:
        grid.append(f'<path class="grid" d="M{x(tick):.1f} 40V{y + 4:g}"/>')
        grid.append(_text(x(tick), y + 20, f"{tick:g}", "soft mid"))
    y += 42
    parts.append(_text((left + right) / 2, y, axis.label, "soft mid"))
    for hue, name in legend.items():
        y += 20
        parts.append(f'<rect style="fill: var(--{hue})" x="{MARGIN}" y="{y - 11:g}" width="13" height="13"/>')
        parts.append(_text(MARGIN + 20, y, name, "soft"))
    return _svg(title, described, [*grid, *parts], y, notes)


def lines(
    title: str, described: str, drawn: Sequence[Line], axes: tuple[Axis, Axis], notes: Sequence[str], room: float
) -> str:
    """Draw lines on a horizontal and a vertical axis. `room` is the width of the lines' names on the right."""
    x_axis, y_axis = axes
    left, right, top, bottom = MARGIN + 36, WIDTH - MARGIN - room, 76.0, 290.0
    logarithmic = x_axis.ticks[0] > 0

    def x(value: float) -> float:
        low = x_axis.ticks[0]
        share = math.log(value / low) / math.log(x_axis.end / low) if logarithmic else value / x_axis.end
        return left + (right - left) * share

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / y_axis.end

    parts = [_text(MARGIN, 58, y_axis.label, "soft")]
    for tick in y_axis.ticks:
        parts.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{right:g}"/>')
        parts.append(_text(left - 8, y(tick) + 5, f"{tick:g}", "soft end"))
    for tick in x_axis.ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom:g}v5"/>')
        parts.append(_text(x(tick), bottom + 22, f"{tick:g}", "soft mid"))
    parts.append(f'<path class="axis" d="M{left} {top:g}V{bottom:g}H{right:g}"/>')
    parts.append(_text((left + right) / 2, bottom + 44, x_axis.label, "soft mid"))
    named = [line for line in drawn if line.name]
    places = _apart([y(line.points[-1][1]) for line in named])
    for line in drawn:
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        kind = "line" if line.name else "line faint"
        parts.append(f'<polyline class="{kind}" style="--hue: var(--{line.hue})" points="{path}"/>')
        if line.name:
            parts += [
                f'<circle class="dot" style="--hue: var(--{line.hue})" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3.5"/>'
                for at, value in line.points
            ]
    for line, place in zip(named, places, strict=True):
        parts.append(_text(right + 8, place + 5, line.name, "name", f' style="--hue: var(--{line.hue})"'))
    return _svg(title, described, parts, bottom + 44, notes)


def _apart(places: Sequence[float], least: float = 18) -> list[float]:
    """Move names apart that would overlap, and keep their order."""
    moved = list(places)
    order = sorted(range(len(places)), key=lambda number: places[number])
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{more}>{escape(text, quote=False)}</text>'


def _svg(title: str, described: str, parts: Sequence[str], y: float, notes: Sequence[str]) -> str:
    rows = [_text(MARGIN, y + 26 + 19 * number, note, "soft") for number, note in enumerate(notes)]
    height = y + 22 + 19 * len(notes)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
        f' role="img" aria-labelledby="title desc">\n<title id="title">{escape(title, quote=False)}</title>\n'
        f'<desc id="desc">{escape(described, quote=False)}</desc>\n<style>{COLORS}{STYLE}</style>\n'
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6"/>'
    )
    return "\n".join([head, _text(MARGIN, 29, title, "title"), *parts, *rows, "</svg>"]) + "\n"
