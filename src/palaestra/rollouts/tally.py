"""A run's running count, for whoever shows its progress, and the words in which to show it.

Not the metrics of a run: those are computed from its records. It keeps: an update costs the same however long the run
is, and what it reads out holds no text that could upset a terminal.
"""

from __future__ import annotations

from collections import Counter

from palaestra.core.clock import Clock
from palaestra.rollouts.export.printable import printable
from palaestra.rollouts.trajectory import Group, Trajectory


class Tally:
    """Counts what the runner tells. `groups_total` is None when nobody knows how many there will be."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at = clock.monotonic()
        self.groups_total: int | None = None
        self.group_size = 1
        self.groups_done = 0
        self.rollouts_done = 0
        self.scored = 0
        self.reward_sum = 0.0
        self.outcomes: Counter[str] = Counter()
        self.stages: dict[str, str] = {}

    def run_started(self, total_groups: int | None, group_size: int) -> None:
        self.groups_total, self.group_size = total_groups, group_size
        self._started_at = self._clock.monotonic()

    def stage(self, rollout_id: str, stage: str) -> None:
        if stage:
            self.stages[rollout_id] = printable(stage)
        else:
            self.stages.pop(rollout_id, None)

    def turn(self, rollout_id: str, prompt_tokens: int, completion_tokens: int) -> None: ...

    def attempt_discarded(self, trajectory: Trajectory) -> None:
        self.stages.pop(trajectory.rollout_id, None)

    def rollout_finished(self, trajectory: Trajectory) -> None:
        self.stages.pop(trajectory.rollout_id, None)
        self.rollouts_done += 1
        self.outcomes[trajectory.outcome.value] += 1
        if trajectory.reward is not None:
            self.scored += 1
            self.reward_sum += trajectory.reward

    def group_finished(self, group: Group) -> None:
        self.stages.pop(group.group_id, None)
        self.groups_done += 1

    @property
    def rollouts_total(self) -> int | None:
        return None if self.groups_total is None else self.groups_total * self.group_size

    @property
    def elapsed_s(self) -> float:
        return self._clock.monotonic() - self._started_at

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last group at the pace so far; None while there is no telling.

        Groups that failed before they had a rollout count as done, so it is the groups that set the pace once there
        are some.
        """
        if self.groups_total is None or not (self.groups_done or self.rollouts_done):
            return None
        done = max(self.groups_done, self.rollouts_done / self.group_size)
        return max(0.0, self.groups_total - done) * self.elapsed_s / done

    def running(self) -> list[tuple[str, int]]:
        """How many are at each stage, most first. Copies first: the live view asks from a thread of its own."""
        return Counter(list(self.stages.values())).most_common()

    def counts(self) -> str:
        """`groups 3/10 · rollouts 12/40`"""
        groups, rollouts = _of(self.groups_done, self.groups_total), _of(self.rollouts_done, self.rollouts_total)
        return f"groups {groups} · rollouts {rollouts}"

    def results(self) -> str:
        """Mean reward, outcomes and pace, as far as there are any."""
        parts = [f"reward {self.reward_sum / self.scored:.3f}"] if self.scored else []
        parts += [f"{name} {count}" for name, count in self.outcomes.most_common()]
        if self.rollouts_done and self.elapsed_s > 0:
            parts.append(_pace(self.rollouts_done / self.elapsed_s))
        return " · ".join(parts)


def describe(group: Group) -> str:
    """One line on a finished group: its task, its rewards, and what went wrong."""
    if not group.trajectories:
        return f"{_one_line(group.task_id)}: not run: {_one_line(group.error)}"
    rewards = " ".join("–" if t.reward is None else f"{t.reward:g}" for t in group.trajectories)
    seconds = max(trajectory.beside.duration_s for trajectory in group.trajectories)
    unscored = [t for t in group.trajectories if not t.scored]
    why = [f"no more of them: {_one_line(group.error)}"] if group.error else []
    why += [f"{t.outcome.value}{f' ({t.blame.value})' if t.blame else ''}: {_one_line(t.error)}" for t in unscored]
    return "; ".join([f"{_one_line(group.task_id)}: reward {rewards} · {duration(seconds)}", *dict.fromkeys(why)])


def duration(seconds: float) -> str:
    """`40ms`, `0.4s`, `12s`, `3m05s`, `2h07m`"""
    if seconds < 0.0995:
        return f"{max(0.0, seconds) * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def _pace(per_s: float) -> str:
    """A rate in the unit in which it is a number one can picture."""
    return f"{per_s:.1f} rollouts/s" if per_s >= 1 else f"{per_s * 60:.1f} rollouts/min"


def _one_line(text: str) -> str:
    line = " ".join(printable(text[:2000]).split())
    return line if len(line) <= 200 else line[:199] + "…"
