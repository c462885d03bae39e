"""Reports of an audit, from its records alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra_audit.records import Audit, Finding, Kind, TaskAudit
from palaestra_audit.report import as_sarif, compared
from palaestra_slots.core.errors import ConfigError


def audit_of(kinds: list[Kind], *tasks: TaskAudit, reference: str = "a.py") -> Audit:
    return Audit(environment="a", reference=reference, kinds=kinds, tasks=list(tasks))


def task(name: str, *kinds: Kind, complete: bool = True) -> TaskAudit:
    findings = [Finding(kind=kind, what="it is wrong", id=f"{name}/{kind}/1") for kind in kinds]
    return TaskAudit(id=name, digest="", findings=findings, complete=complete)


def test_only_what_both_audits_looked_for_is_compared() -> None:
    old = audit_of([Kind.WEAK, Kind.LEAKS], task("a", Kind.WEAK, Kind.LEAKS), task("b", Kind.WEAK), task("c"))
    new = audit_of([Kind.WEAK], task("a", Kind.WEAK), task("b", complete=False))
    found = compared(old, new)
    assert (found["tasks"], found["incomplete"], found["only_old"]) == (1, 1, 1)
    assert (found["mended"], found["new"], found["same"]) == ([], [], ["a: weak: it is wrong"])


def test_audits_without_a_common_task_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="no task in common"):
        compared(audit_of([Kind.WEAK], task("a")), audit_of([Kind.WEAK], task("b")))


def test_the_address_in_sarif_is_quoted() -> None:
    log = as_sarif(audit_of([Kind.WEAK], task("a", Kind.WEAK), reference="my tasks/ä.py"), Path("audit.json"))
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20tasks/%C3%A4.py"
