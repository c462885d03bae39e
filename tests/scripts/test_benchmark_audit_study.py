"""The page about audits of public sets: what it counts, and which witnesses it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_audit.records import Audit, Finding, Kind, Step, TaskAudit, Trial, Untried, Verdict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_counts_tasks_and_shows_different_witnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from audit_study import PublicSet, page

    paid = Verdict(reward=1.0)
    nothing = [
        Finding(
            kind=Kind.PAYS_FOR_NOTHING, what="doing nothing scores 1", id=f"{name}/p/1", trial=Trial(), verdict=paid
        )
        for name in "ab"
    ]
    long = Trial(steps=[Step(say=f"line {number}") for number in range(100)])
    weak = Finding(kind=Kind.WEAK, what="half of it", id="b/weak/1", wanted="< 1", trial=long, verdict=paid)
    leak = Finding(kind=Kind.LEAKS, what="it stands there", id="a/leaks/1", places=["/app/secret"])
    noted = Finding(kind=Kind.WEAK, what="perhaps", id="c/weak/1", note=True, trial=long, verdict=paid)
    why = [Untried(Kind.LEAKS, "no files\nand more")]
    tasks = [
        TaskAudit(id="a", digest="", trials=5, findings=[nothing[0], leak]),
        TaskAudit(id="b", digest="", trials=5, findings=[nothing[1], weak], complete=False),
        TaskAudit(id="c", digest="", trials=5, findings=[noted], untried=why),
        TaskAudit(id="d", digest="", trials=5),
        TaskAudit(id="not played", digest=""),
    ]
    text = page([(PublicSet("Some set", "somewhere", "x", []), Audit(environment="e", reference="r", tasks=tasks))])
    assert "played 4 tasks of 1 public sets" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| Some set |"))
    cells = [each.strip() for each in row.split("|")[1:-1]]
    kinds = [kind for kind in Kind if kind is not Kind.COSTLY]
    assert cells[:4] == ["Some set", "4", "3", "1"]
    assert {kind: cell for kind, cell in zip(kinds, cells[4:], strict=True) if cell} == {
        Kind.PAYS_FOR_NOTHING: "2",
        Kind.WEAK: "1 (1)",
        Kind.LEAKS: "1",
    }
    assert text.count("doing nothing scores 1") == 1
    assert "(so in 2 tasks)" in text
    assert "/app/secret" in text
    assert "... (60 lines)" in text
    assert "perhaps" not in text
    assert "leaks, as no files (1 tasks)" in text
