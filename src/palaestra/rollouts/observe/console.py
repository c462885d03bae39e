"""A run's running count, for whoever shows its progress, and the words in which to show it.

Not the metrics of a run: those are computed from its records. It keeps: an update costs the same however long the run
is, and what it reads out holds no text that could upset a terminal.

What a run shows while it goes: `Observer`, what the runner tells, and three who listen.

`make_progress` picks: a live view on a terminal, plain lines in a log, nothing when asked for. Not a record: whatever
is shown here may be lost. It keeps: an observer does not wait, writes only to the stream it was given, and does not
bring a run down because that stream has gone or because of what a task or a model wrote.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.printable import printable
from palaestra.rollouts.records import Group, Trajectory

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


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


STATUS_EVERY_S = 10.0
"""How often a log gets a status line at most; short enough to see that a run is alive."""

REFRESH_PER_S = 4.0
"""How often the live view is drawn: smooth enough to the eye, and a fraction of a percent of one core."""


class Observer(Protocol):
    """Told by the runner, on its event loop, as things happen. Every method returns at once."""

    def run_started(self, total_groups: int | None, group_size: int) -> None: ...

    def group_started(self, number: int, task_id: str) -> None: ...

    def stage(self, rollout_id: str, stage: str) -> None:
        """A rollout, or a group by its own id, has come to this stage, has shown that it lives there, or is at none
        (the empty string)."""
        ...

    def turn(self, rollout_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """A rollout has taken a turn, which cost so many tokens."""
        ...

    def attempt_discarded(self, trajectory: Trajectory) -> None:
        """The world broke a rollout, and it is tried again."""
        ...

    def rollout_finished(self, trajectory: Trajectory) -> None: ...

    def group_finished(self, group: Group) -> None: ...

    def note(self, text: str) -> None:
        """Something that a person at the screen should read now."""
        ...

    def run_finished(self) -> None: ...


class Progress(Observer, AbstractContextManager["Progress"], Protocol):
    """An observer with a display that is put away on exit, whatever ended the run."""


class Several:
    """Tells several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def run_started(self, total_groups: int | None, group_size: int) -> None:
        for each in self._observers:
            each.run_started(total_groups, group_size)

    def group_started(self, number: int, task_id: str) -> None:
        for each in self._observers:
            each.group_started(number, task_id)

    def stage(self, rollout_id: str, stage: str) -> None:
        for each in self._observers:
            each.stage(rollout_id, stage)

    def turn(self, rollout_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        for each in self._observers:
            each.turn(rollout_id, prompt_tokens, completion_tokens)

    def attempt_discarded(self, trajectory: Trajectory) -> None:
        for each in self._observers:
            each.attempt_discarded(trajectory)

    def rollout_finished(self, trajectory: Trajectory) -> None:
        for each in self._observers:
            each.rollout_finished(trajectory)

    def group_finished(self, group: Group) -> None:
        for each in self._observers:
            each.group_finished(group)

    def note(self, text: str) -> None:
        for each in self._observers:
            each.note(text)

    def run_finished(self) -> None:
        for each in self._observers:
            each.run_finished()


class NullObserver(AbstractContextManager["NullObserver"]):
    """Shows nothing."""

    def run_started(self, total_groups: int | None, group_size: int) -> None: ...

    def group_started(self, number: int, task_id: str) -> None: ...

    def stage(self, rollout_id: str, stage: str) -> None: ...

    def turn(self, rollout_id: str, prompt_tokens: int, completion_tokens: int) -> None: ...

    def attempt_discarded(self, trajectory: Trajectory) -> None: ...

    def rollout_finished(self, trajectory: Trajectory) -> None: ...

    def group_finished(self, group: Group) -> None: ...

    def note(self, text: str) -> None: ...

    def run_finished(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class PlainProgress(Tally, AbstractContextManager["PlainProgress"]):
    """Lines for logs: one per finished group, and a status line when something moves after a quiet while."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__(clock)
        self._stream = stream
        self._said_at = clock.monotonic()

    def __exit__(self, *exc: object) -> None: ...

    def group_started(self, number: int, task_id: str) -> None:
        self._status()

    def stage(self, rollout_id: str, stage: str) -> None:
        super().stage(rollout_id, stage)
        self._status()

    def rollout_finished(self, trajectory: Trajectory) -> None:
        super().rollout_finished(trajectory)
        self._status()

    def group_finished(self, group: Group) -> None:
        super().group_finished(group)
        total = "" if self.groups_total is None else f"/{self.groups_total}"
        self._say(f"[{self.groups_done}{total}] {describe(group)}")

    def note(self, text: str) -> None:
        self._say(printable(text))

    def run_finished(self) -> None:
        self._say(_joined(f"done: {self.counts()} in {duration(self.elapsed_s)}", self.results()))

    def _status(self) -> None:
        if self._clock.monotonic() - self._said_at < STATUS_EVERY_S:
            return
        running = ", ".join(f"{count} {stage}" for stage, count in self.running())
        eta = "" if self.eta_s is None else f"ETA {duration(self.eta_s)}"
        self._say(_joined(self.counts(), f"running {running}" if running else "", self.results(), eta))

    def _say(self, line: str) -> None:
        self._said_at = self._clock.monotonic()
        with contextlib.suppress(OSError):  # nobody reads the log any more; the run itself is fine
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveProgress(Tally, AbstractContextManager["LiveProgress"]):
    """Three lines at the bottom of the terminal that follow the run; notes and groups with trouble scroll by above."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(clock)
        self._console = Console(file=stream, force_terminal=True)
        self._live: Live = Live(
            console=self._console,
            get_renderable=self._view,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=False,  # standard output is data and may well be a file
            redirect_stderr=stream is sys.stderr,
        )

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def run_started(self, total_groups: int | None, group_size: int) -> None:
        super().run_started(total_groups, group_size)
        self._live.start()

    def group_started(self, number: int, task_id: str) -> None: ...

    def group_finished(self, group: Group) -> None:
        super().group_finished(group)
        if len(group.scored) < len(group.trajectories) or not group.trajectories:
            self.note(describe(group))

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def run_finished(self) -> None:
        self._live.stop()

    def _view(self) -> RenderableType:
        from rich.console import Group as Lines
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        eta = "" if self.eta_s is None else f"ETA {duration(self.eta_s)}"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=self.rollouts_total, completed=self.rollouts_done, width=24),
            Text(self.counts()),
            Text(_joined(duration(self.elapsed_s), eta), "dim"),
        )
        running = "  ".join(f"{stage} {count}" for stage, count in self.running())
        return Lines(bar, Text(f"running  {running or '–'}"), Text(f"results  {self.results() or '–'}"))


def make_progress(stream: TextIO | None = None, enabled: bool | None = None, *, clock: Clock | None = None) -> Progress:
    """Who shows this run on `stream` (standard error unless given).

    `enabled` None picks the live view on a terminal and plain lines otherwise; True insists on the live view; False
    shows nothing. Rich is imported for the live view alone.
    """
    stream = stream or sys.stderr
    clock = clock or SystemClock()
    if enabled is False:
        return NullObserver()
    if enabled or stream.isatty():
        return LiveProgress(stream, clock)
    return PlainProgress(stream, clock)


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
