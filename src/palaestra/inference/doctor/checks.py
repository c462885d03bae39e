"""What an examination finds: one line per question, each with the way out where the answer is no. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.core.errors import EngineError


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer. `way_out` says what to do about a failed one, and what one that is not applicable
    would need.
    """

    name: str
    state: State
    found: str
    way_out: str = ""


def passed(name: str, found: str) -> Check:
    """The answer is yes."""
    return Check(name, State.OK, found)


def failed(name: str, found: str, way_out: str) -> Check:
    """The answer is no."""
    return Check(name, State.FAILED, found, way_out)


def not_applicable(name: str, found: str, way_out: str = "") -> Check:
    """The question cannot be asked here."""
    return Check(name, State.NOT_APPLICABLE, found, way_out)


@dataclass(slots=True)
class Diagnosis:
    """All checks, in the order in which they build on each other.

    `server` is what was found at the other end. `refusal` is set when it could not be reached or refused: then the rest
    was not asked.
    """

    target: str
    server: str = ""
    model: str = ""
    checks: list[Check] = field(default_factory=list)
    refusal: EngineError | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.state is not State.FAILED for check in self.checks)

    def skip(self, names: Sequence[str], why: str, way_out: str = "") -> None:
        """Note questions that cannot be asked."""
        self.checks += [not_applicable(name, why, way_out) for name in names]
