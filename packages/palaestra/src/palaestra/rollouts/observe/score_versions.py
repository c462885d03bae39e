"""By which version of the score function the rollouts of a run were judged: the one rule for tables, summaries and
comparisons.

A version is named by the beginning of the hash of the environment's file or, if `palaestra grade` gave the score with
settings of its own, of both. Scores of different versions are not compared: no winner is named, and `palaestra grade`
brings them to one version. Scores that were recorded without a file are taken for the same as any others; those that
were `graded` without one are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from palaestra.rollouts.regraded import Grade
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON

GRADED, UNKNOWN = "graded", "recorded"

Versions = Mapping[str, int]
"""The number of scored rollouts by version."""

REMEDY = "palaestra grade gives all of them the scores of the present code"


def code_of(config: Mapping[str, JSON]) -> str:
    """Return the hash of the environment's file in the settings of a run or of a part of it; empty if unknown."""
    return str((config.get("provenance") or {}).get("environment_sha256") or "")


def version(code: str, grade: Grade | None = None) -> str:
    """Return the version of a score. `code` is the hash of the environment's file when the rollout was scored, and
    `grade` the new score of the rollout, if it has one."""
    if grade is None or grade.reward is None:
        return code[:8] or UNKNOWN
    return grade.version[:8] or GRADED


def differ(versions: Iterable[str], *, same_file: bool = True) -> bool:
    """Return whether scores of these versions cannot be compared. Without `same_file`, they are of environments in
    different files, whose hashes say nothing."""
    found = set(versions)
    return (GRADED in found and len(found) > 1) or (same_file and len(found - {UNKNOWN}) > 1)


def in_words(versions: Versions) -> str:
    """Return the versions of a run's scores, with the number of rollouts if there are several."""
    if len(versions) < 2:
        return "".join(versions)
    return ", ".join(f"{name} ({count})" for name, count in versions.items())


def mixed(versions: Versions) -> str:
    """Return a warning about a run whose rollouts were judged by different versions; empty for others."""
    if not differ(versions):
        return ""
    return f"different versions of the score judged {plural(sum(versions.values()), 'rollout')}: {in_words(versions)}"
