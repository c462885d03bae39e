"""Collects what a run's summary and report say about official verdicts: the labels, the causes of differences from the
reward, and the paths that checks of worthless work did not see. Memory does not grow with the number of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.rollouts.grading.reward import how_to_see, parts
from palaestra.rollouts.grading.tampering import intended
from palaestra.rollouts.records import Group
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON

OFFICIAL = "official"
"""The name of an official verdict whose benchmark has no name for it."""

_SHOWN = 3
"""The number of pieces of evidence, and of paths, that a line shows."""
_SHOWN_CAUSES = 5
_SHOWN_CHARS = 200
_KEPT = 100
"""The number of differing paths or causes that are kept."""


def official_words(name: str) -> str:
    """Return how to call the official verdict: `official`, with the benchmark's own name for it if it has one."""
    return OFFICIAL if name in ("", OFFICIAL) else f"{OFFICIAL} ({name})"


def official_name(config: Mapping[str, JSON]) -> str:
    """Return the benchmark's name for its verdict from a run's recorded settings."""
    return str(config.get("official_name") or OFFICIAL)


def labels_line(labels: Mapping[str, int]) -> str:
    """Return the number of rollouts with each label as text, the most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(labels).most_common())


@dataclass(slots=True)
class _Cause:
    rollouts: int = 0
    evidence: list[str] = field(default_factory=list)


class VerdictCounts:
    """The verdicts of the groups that were added so far."""

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str], _Cause] = {}
        self._more = 0
        self._blind = 0
        self._unseen: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """Count a group that has ended."""
        for each in group.trajectories:
            self.take(each.difference, each.reward, each.official, each.unseen)

    def take(self, difference: str, reward: float | None, official: float | None, unseen: Sequence[str]) -> None:
        """Count one rollout: the reason why its reward differs, its verdicts, and the paths that its check did not
        see."""
        if difference:
            self._differs(difference)
        elif reward is not None and reward <= 0 and official is None:
            self._take_unseen(unseen)

    def _differs(self, difference: str) -> None:
        head, evidence, remedy = parts(difference)
        if len(self._causes) >= _KEPT and (head, remedy) not in self._causes:
            self._more += 1
            return
        cause = self._causes.setdefault((head, remedy), _Cause())
        cause.rollouts += 1
        if evidence not in cause.evidence and len(cause.evidence) <= _SHOWN:
            cause.evidence.append(evidence)

    def _take_unseen(self, unseen: Sequence[str]) -> None:
        found = list(intended(unseen))
        self._blind += bool(found)
        self._unseen.update(path for path in found if path in self._unseen or len(self._unseen) < _KEPT)

    def lines(self) -> Iterator[str]:
        """Yield a line for each cause for which official verdicts and rewards differ, the most frequent first, and one
        about the work that the checks did not see."""
        causes = sorted(self._causes.items(), key=lambda each: -each[1].rollouts)
        for (head, remedy), cause in causes[:_SHOWN_CAUSES]:
            evidence = _listed([_short_line(each) for each in cause.evidence], " … ")
            yield f"{plural(cause.rollouts, 'rollout')}: {head}: {evidence}; {remedy}"
        if rest := self._more + sum(cause.rollouts for _, cause in causes[_SHOWN_CAUSES:]):
            yield f"{plural(rest, 'further rollout')} with a reward other than the official verdict"
        if self._blind:
            paths = [path for path, _ in self._unseen.most_common()]
            yield (
                f"{plural(self._blind, 'rollout')} scored 0 and changed paths that the check did not see: "
                f"{_listed([_short_line(path) for path in paths], ' and more')}; {how_to_see(paths[:_SHOWN])}"
            )


def _listed(texts: list[str], more: str) -> str:
    return ", ".join(texts[:_SHOWN]) + (more.rstrip() if len(texts) > _SHOWN else "")


def _short_line(text: str) -> str:
    line = " ".join(printable(text[: 2 * _SHOWN_CHARS]).split())
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"
