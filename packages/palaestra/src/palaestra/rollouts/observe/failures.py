"""Counts the failures of a run by cause, with the first example of each cause."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palaestra.rollouts.records import Group
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import Blame

_MOST_CAUSES = 100
"""The maximum number of causes. Further causes are counted together, so that an error whose text always changes cannot
fill the memory."""

_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
_LONGEST = 300


@dataclass(slots=True)
class Cause:
    """Rollouts or whole groups that failed in the same way. `first` is the id of the first of them, and `error` is its
    message."""

    blame: str
    error: str
    first: str
    rollouts: int = 0
    groups: int = 0

    def line(self) -> str:
        counts = [plural(self.groups, "group") if self.groups else ""]
        counts += [plural(self.rollouts, "rollout") if self.rollouts else ""]
        error = self.error or "the record has no reason"
        return f"{' and '.join(filter(None, counts))} failed ({self.blame}), first {self.first}: {error}"


class Failures:
    """Collects the rollouts without a reward and the groups that ended with an error."""

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str], Cause] = {}

    def add(self, group: Group) -> dict[str, Cause]:
        """Count the failures of a finished group. Returns each failure's cause by the id of its rollout or group."""
        found = {}
        if group.error:
            found[group.group_id] = self.cause(group.blame, group.error, group.group_id, group.group_id)
            found[group.group_id].groups += 1
        for each in group.trajectories:
            if not each.scored:
                found[each.rollout_id] = self.cause(each.blame, each.error, each.rollout_id, group.group_id)
                found[each.rollout_id].rollouts += 1
        return found

    def cause(self, blame: str | None, error: str, name: str, group_id: str) -> Cause:
        """Return the cause of a failure, which the caller counts. `name` is the id of the rollout or group."""
        whose = str(blame) if blame else "unknown"
        # Without numbers, addresses and ids, in which errors with the same cause differ.
        key = whose, _VARIES.sub("0", error.replace(name, "").replace(group_id, ""))
        if key not in self._causes and len(self._causes) >= _MOST_CAUSES:
            key, error = ("", ""), "further causes"
        if key not in self._causes:
            self._causes[key] = Cause(whose, one_line(error, _LONGEST), name)
        return self._causes[key]

    def blames(self, blame: Blame, *, only: bool = False) -> bool:
        """Return whether any failure has this attribution or, with `only`, whether all failures have it."""
        found = {cause.blame for cause in self._causes.values()}
        return found == {blame.value} if only else blame.value in found

    def causes(self) -> list[Cause]:
        """Return the causes, the most frequent first."""
        return sorted(self._causes.values(), key=lambda cause: -(cause.rollouts + cause.groups))
