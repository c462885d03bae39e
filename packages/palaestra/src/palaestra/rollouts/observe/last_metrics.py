"""Reads the metrics of an ended run from the last line of its `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from palaestra_slots.core.io.durable_files import UNREADABLE, read_regular


def last_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of the whole run from the last line of `path`, where names have no prefix; empty before the
    run has ended."""
    try:
        lines = read_regular(path).splitlines()
        last = msgspec.json.decode(lines[-1], type=dict[str, object]) if lines else {}
    except (OSError, *UNREADABLE):
        return {}
    if "rollouts" not in last:
        return {}
    return {name: value for name, value in last.items() if isinstance(value, float | int) and name not in _OF_THE_LINE}


_OF_THE_LINE = ("time", "step")
