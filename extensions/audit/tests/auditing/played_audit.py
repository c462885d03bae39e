"""Plays the command in the current folder."""

from __future__ import annotations

from pathlib import Path

from palaestra.cli.main import main
from palaestra_audit.records import Audit, read_audit


def audit(*argv: str) -> Audit:
    """Return what `palaestra audit` writes down with these words."""
    main(["audit", *argv, "--out", "found"])
    return read_audit(Path("found/audit.json"))
