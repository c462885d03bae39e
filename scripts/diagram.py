"""Draws the diagram of the architecture page as SVG: the spine of a run, from the command to the slot server.

Like a chart, the diagram is 480 pixels wide, so that its text stays readable on a phone.
"""

from __future__ import annotations

from html import escape

from charts import COLORS, MARGIN, WIDTH

SPINE = (
    ("cli/main · envs/run", "parse settings, build the run"),
    ("rollouts/runner", "tasks to groups, concurrency"),
    ("rollouts/group", "prepare once, fork, retry"),
    ("rollouts/rollout", "set up, act, seal, grade, record"),
    ("agent/loop", "ask, run calls, append results"),
    ("tools/runtime", "check, run and encode calls"),
    ("sandbox/slot", "commands and files"),
    ("sandbox/slotd", "namespaces, layers, processes"),
)
EVENTS = ("event stream", "first the journal,", "then limits, status,", "console, metrics,", "trackers, spans")
CHAT = ("chat middleware", "recorded turns,", "spans, freezing")
ENGINE = ("tokens/engines", "tokens to the ledger")
TOOL = ("tool middleware", "resume, spans,", "recorded answers")

LEFT, SIDE, GAP = 264, 160, 24
"""The widths of the two columns and of the space between them."""

TOP, PITCH, LINE, PADDING = 16, 72, 19, 10
RIGHT = MARGIN + LEFT + GAP

STYLE = """
.back { fill: var(--back); stroke: var(--grid) } .box { fill: none; stroke: var(--own); stroke-width: 1.5 }
.side { fill: none; stroke: var(--soft) } .way { fill: none; stroke: var(--soft); stroke-width: 1.5 }
.dashed { stroke-dasharray: 5 3 } .head { fill: var(--soft) }
"""


def spine() -> str:
    """Draw the spine on the left, and the events, the middleware and the engine on the right."""
    parts: list[str] = []
    for number, words in enumerate(SPINE):
        parts += _box(MARGIN, _row(number), LEFT, words, "box")
        if number:
            middle = MARGIN + LEFT / 2
            parts.append(_arrow(f"M{middle:g} {_row(number) - PITCH + _height(words)}V{_row(number)}"))
    parts += _box(RIGHT, _row(1), SIDE, EVENTS, "side", _row(3) - _row(1) + _height(SPINE[3]))
    for number in (1, 2, 3):
        parts.append(_arrow(f"M{MARGIN + LEFT} {_row(number) + 24}H{RIGHT}"))
    parts += _box(RIGHT, _row(4) - 6, SIDE, CHAT, "side dashed")
    parts.append(_arrow(f"M{MARGIN + LEFT} {_row(4) + 24}H{RIGHT}"))
    parts += _box(RIGHT, _row(5) + 8, SIDE, ENGINE, "side")
    parts.append(_arrow(f"M{RIGHT + SIDE / 2:g} {_row(4) - 6 + _height(CHAT)}V{_row(5) + 8}"))
    parts += _box(RIGHT, _row(6) + 8, SIDE, TOOL, "side dashed")
    parts.append(f'<path class="way dashed" d="M{MARGIN + LEFT} {_row(5) + 24}h12V{_row(6) + 40}H{RIGHT}"/>')
    height = _row(len(SPINE) - 1) + _height(SPINE[-1]) + TOP
    described = "; ".join(f"{name}: {does}" for name, does in SPINE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' role="img" aria-labelledby="title desc">\n<title id="title">The spine of a run</title>\n'
        f'<desc id="desc">{escape(described, quote=False)}</desc>\n<style>{COLORS}{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>\n'
    ) + "\n".join([*parts, "</svg>\n"])


def _row(number: int) -> int:
    return TOP + PITCH * number


def _height(words: tuple[str, ...]) -> int:
    return LINE * len(words) + PADDING


def _box(x: int, y: int, width: int, words: tuple[str, ...], kind: str, height: int = 0) -> list[str]:
    """Draw a box with its name and the lines below it."""
    rect = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height or _height(words)}" rx="5"/>'
    first = y + 20 + (height - _height(words)) // 2 if height else y + 20
    kinds = ["title", *["soft"] * (len(words) - 1)]
    texts = [
        f'<text class="{kind} mid" x="{x + width / 2:g}" y="{first + LINE * number}">{word}</text>'
        for number, (kind, word) in enumerate(zip(kinds, words, strict=True))
    ]
    return [rect, *texts]


def _arrow(path: str) -> str:
    return f'<path class="way" marker-end="url(#head)" d="{path}"/>'
