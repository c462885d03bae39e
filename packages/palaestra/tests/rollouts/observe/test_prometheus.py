"""The Prometheus text of a run: parsed as Prometheus would, line by line."""

from __future__ import annotations

import re
from pathlib import Path

from recorded import broken, sky, write_run

from palaestra.rollouts.observe.prometheus import exposition
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.observe.status_file import Idle

SAMPLE = re.compile(r'(palaestra_\w+)(\{(?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (-?[\d.e+]+)')


def test_every_line_is_of_the_format_and_says_what_the_journal_says(tmp_path: Path) -> None:
    status = RunReader(write_run(tmp_path, sky(), broken()) / "journal.jsonl").read()
    status.model = 'a "quoted"\\name\nover two lines'
    status.in_flight = {"tool": 2}
    status.oldest = [Idle("r", "tool", 90.0)]
    typed, values = set(), {}
    for line in exposition(status, 100.0).splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert name not in typed
            assert (kind == "counter") == name.endswith("_total")
            typed.add(name)
        elif not line.startswith("# HELP"):
            found = SAMPLE.fullmatch(line)
            assert found is not None, line
            assert found.group(1) in typed
            values[found.group(1) + (found.group(2) or "")] = float(found.group(3))
    assert values['palaestra_rollouts_total{outcome="natural"}'] == 2
    assert values['palaestra_blamed_rollouts_total{blame="sandbox"}'] == 1
    assert values['palaestra_blame_ratio{blame="sandbox"}'] == 0.25
    assert values["palaestra_oldest_idle_seconds"] == 10
    assert values['palaestra_in_flight{stage="tool"}'] == 2
    assert not any(name.startswith("palaestra_cost") for name in values), "no prices, no cost"
