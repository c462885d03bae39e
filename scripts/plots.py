"""The plots of the documentation: each is drawn from what a benchmark measured, in `docs/pictures/data`.

To measure again, run the command in the data file; `make pictures` then draws the plots. A data file also contains the
date, the machine and its load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charts import Axis, Bar, Line, Span, bars, lines
from charts import waterfall as spans_below

Data = Mapping[str, Any]
"""The JSON that a benchmark writes."""


@dataclass(frozen=True)
class Plot:
    """A picture's data file and the function that draws it."""

    data: str
    draw: Callable[[Data], str]

    def svg(self, folder: Path) -> str:
        return self.draw(json.loads((folder / self.data).read_text()))


def slots(data: Data) -> str:
    """Draw the time until a sandbox is there and that of a command, next to Docker."""
    value = rows(data)

    def pair(own: str, peer: str, name: str) -> list[Bar]:
        return [
            Bar("Palaestra", value[own], f"{value[own]:.1f} ms", own=True),
            Bar(name, value[peer], f"{value[peer]:.0f} ms"),
        ]

    groups = {
        "a sandbox with a prepared workspace of 5,000 files": pair(
            "fork of 5000 files", "docker run, 5000 files", "docker run, from an image with the files"
        ),
        "the same with 50,000 files": pair("fork of 50000 files", "docker run, 50000 files", "docker run"),
        "one command in a running sandbox": pair("stateless command", "docker exec", "docker exec"),
    }
    most = max(bar.value for group in groups.values() for bar in group)
    step = 50 if most < 250 else 100
    axis = Axis("milliseconds", range(0, int(most) + 1, step), most)
    return bars("Sandboxes in milliseconds", described(groups), groups, axis, measured(data))


def tokens(data: Data) -> str:
    """Draw how many rollouts a trainer would train on other tokens than the sampled ones."""
    value = rows(data)
    recorded = 100 * value["violations"] / value["rollouts"]

    def pair(rate: str) -> list[Bar]:
        encoded = value[f"rollouts that decode-and-re-encode changes at {rate}"]
        return [
            Bar("Palaestra: the recorded tokens", recorded, f"{recorded:g} %", own=True),
            Bar("the transcript, tokenised again", encoded, f"{encoded:.0f} %"),
        ]

    groups = {f"{rate} of the sampled tokens are not the tokenizer's choice": pair(rate) for rate in ("0.05 %", "5 %")}
    axis = Axis("% of rollouts that train on tokens that were not sampled", range(0, 101, 25), 100)
    count = f"{value['rollouts']:,.0f} rollouts, templates of {value['template families']:.0f} model families,"
    notes = [count, f"{value['tokens trained, each once'] / 1e6:.1f} million sampled tokens", *measured(data)]
    return bars("Exact tokens", described(groups), groups, axis, notes)


def learning(data: Data) -> str:
    """Draw the reward over the steps of a training: that of held-out tasks, and that of the training."""
    drawn, said = [], []
    learned = {name.removesuffix(", learned"): curve for name, curve in data["curves"].items() if "learned" in name}
    for hue, (seed, curve) in zip(("own", "second", "third"), learned.items(), strict=False):
        rewards = [f"{reward:.2f}" for _, reward in curve["evaluation"]]
        drawn += [Line(curve["step"], hue), Line(curve["evaluation"], hue, f"{seed}: {rewards[-1]}")]
        said.append(f"{seed} {', '.join(rewards)}")
    steps = max(step for curve in learned.values() for step, _ in curve["step"])
    axes = Axis("step", range(0, steps + 1, 5), steps), Axis("mean reward", (0, 0.25, 0.5, 0.75, 1), 1)
    warm = min(step for curve in learned.values() for step, _ in curve["step"]) - 1
    notes = ["thick: 40 held-out tasks, 4 samples each; thin: training tasks", f"steps 1 to {warm}: warm start"]
    words = f"The mean reward of held-out tasks at the start, after the warm start and at the end: {'; '.join(said)}."
    return lines("SmolLM2-135M learns tasks with files", words, drawn, axes, [*notes, *measured(data)], 112)


def chat_turns(data: Data) -> str:
    """Draw what a token-exact turn costs in longer and longer conversations."""
    cases = {
        "palaestra with tools and parser": ("own", "Palaestra"),
        "atroposlib 0.4.0": ("second", "atroposlib"),
        "verifiers 0.4 with tools and parser": ("third", "verifiers"),
    }
    turns = (1, 8, 32, 128)
    axes = Axis("turns of the conversation", turns, 128), Axis("milliseconds of CPU per turn", range(0, 8, 1), 7)
    return lines(*over(data, cases, turns, ", {} turns", "Token-exact turns"), axes, measured(data), 96)


def floor(data: Data) -> str:
    """Draw what a turn costs at 1, 64 and 512 concurrent rollouts."""
    cases = {
        "bare": ("peer", "bare"),
        "palaestra": ("third", "palaestra"),
        "whole": ("own", "whole"),
        "exact": ("second", "exact"),
    }
    rollouts = (1, 64, 512)
    axes = (
        Axis("concurrent rollouts", rollouts, 512),
        Axis("milliseconds of CPU per turn", (0, 0.25, 0.5, 0.75, 1, 1.25), 1.25),
    )
    return lines(*over(data, cases, rollouts, " at {}: CPU", "The agent loop"), axes, measured(data), 84)


def waterfall(data: Data) -> str:
    """Draw what a rollout that runs alone waits for, one after the other."""
    *steps, whole = data["steps"]
    spans = []
    for step in steps:
        if step["at_ms"] or step["name"].startswith("begin"):
            own, server = step["own_ms"], step["server_ms"]
            rest = max(0.0, step["took_ms"] - own - server)
            parts = [("own", min(own, step["took_ms"])), ("second", server), ("peer", rest)]
            spans.append(Span(step["name"], step["at_ms"], parts, f"{step['took_ms']:.1f}"))
    legend = {
        "own": "processor time of the main process",
        "second": "processor time of the slot server",
        "peer": "the kernel, the programs in the slot, and waiting",
    }
    most = whole["took_ms"]
    axis = Axis("milliseconds", range(0, int(most) + 1, 10 if most < 80 else 20), most)
    kinds: dict[str, float] = {}
    for step in steps:
        kind = step["name"].rstrip(" 0123456789")
        kinds[kind] = kinds.get(kind, 0.0) + step["took_ms"]
    largest = sorted(kinds.items(), key=lambda each: -each[1])[:6]
    words = f"A rollout takes {most:.0f} ms: {', '.join(f'{name} {took:.1f}' for name, took in largest)} ms."
    short = next(step for step in steps if not step["at_ms"] and not step["name"].startswith("begin"))
    notes = [f"{short['name']}: {short['took_ms']:.1f} ms in all", *measured(data)]
    return spans_below("One rollout alone", words, spans, axis, legend, notes)


PLOTS = {
    "waterfall.svg": Plot("where.json", waterfall),
    "slots.svg": Plot("slots.json", slots),
    "tokens.svg": Plot("token_exactness.json", tokens),
    "learning.svg": Plot("learn.json", learning),
    "chat_turns.svg": Plot("managed_overhead.json", chat_turns),
    "floor.svg": Plot("rollout_floor.json", floor),
}


def rows(data: Data) -> dict[str, float]:
    """The first value of each name; the table has several rows named "… lowest tenth"."""
    return {row["name"]: row["value"] for row in reversed(data["rows"])}


def measured(data: Data) -> list[str]:
    """When and where the numbers were measured, as the last lines of a plot. If a data file has `runs`, its values are
    medians of this many runs of the command."""
    lines = [f"{data['date']}, {data['machine'].partition(', ')[2]}"]
    return [f"median of {data['runs']} runs", *lines] if "runs" in data else lines


def over(
    data: Data, cases: Mapping[str, tuple[str, str]], places: tuple[int, ...], suffix: str, title: str
) -> tuple[str, str, list[Line]]:
    """Return the title, the description, and a line for each case through its values at the places."""
    value = rows(data)
    drawn = [
        Line([(at, value[name + suffix.format(at)]) for at in places], hue, short)
        for name, (hue, short) in cases.items()
    ]
    words = [
        f"{name} {line.points[0][1]:.2f} to {line.points[-1][1]:.2f}" for name, line in zip(cases, drawn, strict=True)
    ]
    return title, f"Milliseconds of CPU per turn at {places[0]} and at {places[-1]}: {', '.join(words)}.", drawn


def described(groups: Mapping[str, list[Bar]]) -> str:
    """The values of a plot with bars as text."""
    return " ".join(
        f"{heading}: {', '.join(f'{bar.name} {bar.printed}' for bar in group)}.".capitalize()
        for heading, group in groups.items()
    )
