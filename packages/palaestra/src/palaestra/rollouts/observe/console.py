"""Shows the progress of a run: a live view on a terminal, plain lines in a log, or nothing.

A console subscribes to a run's events and writes only to the given stream. Neither a closed stream nor the text of a
task or a model can end the run.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from palaestra.rollouts.events import (
    GroupFinished,
    GroupsPlanned,
    GroupStarted,
    Handlers,
    InFlight,
    Note,
    RolloutEnded,
    RolloutKept,
    TurnTaken,
)
from palaestra.rollouts.observe.failures import Cause, Failures
from palaestra.rollouts.observe.verdicts import OFFICIAL, official_words
from palaestra.rollouts.records import Group
from palaestra_slots.core.clock import Clock, SystemClock
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import one_line, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 10.0
"""The shortest time between two status lines in a log; short enough to show that a run is alive."""

SHOWN_CHARS = 300
"""The most characters of an error or of a task's name in a line about a group."""

REFRESH_PER_S = 4.0
"""The live view's redraws per second: smooth to the eye, at a fraction of a percent of one core."""


class Console:
    """Counts the events of a run and shows nothing. A subclass shows the counts until its block ends."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.score_name, self.official_name = "reward", OFFICIAL
        self.in_flight: InFlight = {}
        self._clock = clock or SystemClock()
        self._started_at = self._clock.monotonic()
        self.groups_total: int | None = None
        self.group_size = 1
        self.groups_done = 0
        self.rollouts_done = 0
        self.scored = 0
        self.reward_sum = 0.0
        self._official_sum = 0.0
        self._judged = False
        self.outcomes: Counter[str] = Counter()
        self._failures = Failures()

    def follow(self, in_flight: InFlight, score_name: str = "reward", official_name: str = OFFICIAL) -> None:
        """Show this work in flight (`EventStream.in_flight`), and the scores under these names."""
        self.in_flight, self.score_name, self.official_name = in_flight, score_name, official_name

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def handlers(self) -> Handlers:
        return {
            GroupsPlanned: self.on_plan,
            RolloutEnded: self.on_rollout,
            RolloutKept: self.on_rollout,
            GroupFinished: self.on_group,
            Note: lambda event: self.note(event.text),
        }

    def on_plan(self, event: GroupsPlanned) -> None:
        """Record the number of groups, which is announced again when the tasks have been counted."""
        self.groups_total, self.group_size = event.total, event.group_size
        if not self.groups_done:
            self._started_at = self._clock.monotonic()

    def on_rollout(self, event: RolloutEnded | RolloutKept) -> None:
        trajectory = event.trajectory
        self.rollouts_done += 1
        self.outcomes[trajectory.outcome.value] += 1
        if trajectory.reward is not None:
            self.scored += 1
            self.reward_sum += trajectory.reward
            self._official_sum += trajectory.official_reward or 0.0
            self._judged = self._judged or trajectory.official is not None

    def on_group(self, event: GroupFinished) -> None:
        self.groups_done += 1

    def note(self, text: str) -> None:
        """Show a line to the user immediately."""

    @property
    def rollouts_total(self) -> int | None:
        return None if self.groups_total is None else self.groups_total * self.group_size

    @property
    def elapsed_s(self) -> float:
        return self._clock.monotonic() - self._started_at

    @property
    def eta_s(self) -> float | None:
        """The estimated seconds until the last group ends, at the pace so far; None while it is unknown, or when no
        group is left.

        The pace is that of finished groups or of finished rollouts, whichever is faster, because a group that failed
        before it had a rollout counts as done.
        """
        done = max(self.groups_done, self.rollouts_done / self.group_size)
        if self.groups_total is None or not 0 < done < self.groups_total:
            return None
        return (self.groups_total - done) * self.elapsed_s / done

    def running(self) -> list[tuple[str, int]]:
        """Return the number of rollouts and groups in flight at each stage, highest first. This works on a copy,
        because the live view has its own thread."""
        return Counter(printable(stage) for stage, _ in list(self.in_flight.values())).most_common()

    def counts(self) -> str:
        """Return the counts as text: `groups 3/10 · rollouts 12/40`."""
        groups, rollouts = _of(self.groups_done, self.groups_total), _of(self.rollouts_done, self.rollouts_total)
        return f"groups {groups} · rollouts {rollouts}"

    def results(self) -> str:
        """Return the mean reward and official verdict, the outcomes and the pace as text. Values that are not known yet
        are left out."""
        covered = f"{self.scored} of {self.rollouts_done} scored"
        parts = [f"{self.score_name} {self.reward_sum / self.scored:.3f} ({covered})"] if self.scored else []
        if self._judged:
            parts.append(f"{official_words(self.official_name)} {self._official_sum / self.scored:.3f}")
        parts += [f"{name} {count}" for name, count in self.outcomes.most_common()]
        if self.rollouts_done and self.elapsed_s > 0:
            parts.append(_pace(self.rollouts_done / self.elapsed_s))
        return " · ".join(parts)


class PlainConsole(Console):
    """Writes lines for logs: one per finished group (not for the kept samples of a batch), and a status line at an
    event if the last line was written at least `STATUS_EVERY_S` seconds before."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__(clock)
        self._stream = stream
        self._wrote_at = clock.monotonic()
        self._kept = 0

    def __exit__(self, *exc: object) -> None:
        self._write_kept()

    def handlers(self) -> Handlers:
        return {**super().handlers(), GroupStarted: self._on_progress, TurnTaken: self._on_progress}

    def _on_progress(self, event: object) -> None:
        self._write_status()

    def on_rollout(self, event: RolloutEnded | RolloutKept) -> None:
        super().on_rollout(event)
        self._write_status()

    def on_group(self, event: GroupFinished) -> None:
        super().on_group(event)
        if event.kept:
            self._kept += 1
            return
        self._write_kept()
        group = event.group
        whole = group.trajectories and len(group.scored) == len(group.trajectories)
        if whole and self.score_name != "reward" and not logger.isEnabledFor(logging.DEBUG):
            return  # the samples of a batch: status lines and the summary count them
        total = "" if self.groups_total is None else f"/{self.groups_total}"
        if line := describe(group, self._failures.add(group), self.score_name, self.official_name):
            self._write_line(f"[{self.groups_done}{total}] {line}")

    def _write_kept(self) -> None:
        """Report the groups of earlier parts of the run in one line."""
        if self._kept:
            self._write_line(f"{plural(self._kept, 'group')} kept from earlier parts of the run")
            self._kept = 0

    def note(self, text: str) -> None:
        self._write_line(printable(text))

    def _write_status(self) -> None:
        if self._clock.monotonic() - self._wrote_at < STATUS_EVERY_S:
            return
        running = ", ".join(f"{count} {stage}" for stage, count in self.running())
        eta = "" if self.eta_s is None else f"ETA {duration(self.eta_s)}"
        self._write_line(_joined(self.counts(), f"running {running}" if running else "", self.results(), eta))

    def _write_line(self, line: str) -> None:
        self._wrote_at = self._clock.monotonic()
        # The log's reader is gone, or the stream is closed (ValueError); the run is not affected.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveConsole(Console):
    """Shows three lines about the run at the bottom of the terminal; notes and groups with failures scroll above."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__(clock)
        # The stream of a command escapes control sequences, also those of rich. Texts of others go through `printable`.
        self._console = RichConsole(file=getattr(stream, "raw", stream), force_terminal=True)
        self._live: Live = Live(
            console=self._console,
            get_renderable=self._view,
            refresh_per_second=REFRESH_PER_S,
            redirect_stdout=False,  # standard output is data and may well be a file
            redirect_stderr=stream is sys.stderr,
        )

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def on_plan(self, event: GroupsPlanned) -> None:
        super().on_plan(event)
        self._live.start()

    def on_group(self, event: GroupFinished) -> None:
        super().on_group(event)
        group = event.group
        if event.kept or (group.trajectories and len(group.scored) == len(group.trajectories)):
            return
        if line := describe(group, self._failures.add(group), self.score_name, self.official_name):
            self.note(line)

    def note(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

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


def make_console(stream: TextIO | None = None, enabled: bool | None = None, *, clock: Clock | None = None) -> Console:
    """Return the console of a run on `stream` (default: standard error).

    If `enabled` is None, the console is the live view on a terminal and plain lines elsewhere. If it is True, the
    console is always the live view; if it is False, nothing is shown. Rich is imported only for the live view.
    """
    stream = stream or sys.stderr
    clock = clock or SystemClock()
    if enabled is False:
        return Console(clock)
    if enabled or stream.isatty():
        return LiveConsole(stream, clock)
    return PlainConsole(stream, clock)


def _in_figures(rewards: Iterable[float | None]) -> str:
    return " ".join("–" if reward is None else f"{reward:g}" for reward in rewards)


def describe(
    group: Group,
    causes: Mapping[str, Cause] | None = None,
    score_name: str = "reward",
    official_name: str = OFFICIAL,
) -> str:
    """Return one line about a finished group: its task, its rewards, the official verdicts if they differ, and its
    failures. `causes` has the failures' causes
    by the id of the rollout or group; a repeated cause refers to its first example. The line is empty for a group that
    did not run because of a repeated cause, since all causes are counted at the end."""
    causes = Failures().add(group) if causes is None else causes

    def error(name: str, text: str) -> str:
        first = causes[name].first
        return one_line(text, SHOWN_CHARS) if first in causes else f"same as {first}"

    if not group.trajectories:
        first = causes[group.group_id].first == group.group_id
        return f"{one_line(group.task_id, SHOWN_CHARS)}: not run: {one_line(group.error, SHOWN_CHARS)}" if first else ""
    rewards = _in_figures(t.reward for t in group.trajectories)
    if any(t.official_reward != t.reward for t in group.trajectories):
        official = _in_figures(t.official_reward for t in group.trajectories)
        rewards += f", {official_words(official_name)} {official}"
    seconds = max(trajectory.beside.duration_s for trajectory in group.trajectories)
    unscored = [t for t in group.trajectories if not t.scored]
    why = [f"no further rollouts: {error(group.group_id, group.error)}"] if group.error else []
    # Reversed twice: of rollouts with the same cause, the first one is shown, and in the order of the group.
    kinds = {causes[t.rollout_id].first: t for t in reversed(unscored)}
    why += [
        f"{t.outcome.value}{f' ({t.blame.value})' if t.blame else ''}: {error(t.rollout_id, t.error)}"
        for t in reversed(kinds.values())
    ]
    return "; ".join(
        [f"{one_line(group.task_id, SHOWN_CHARS)}: {score_name} {rewards} · {duration(seconds)}", *dict.fromkeys(why)]
    )


def duration(seconds: float) -> str:
    """Return a duration as text: `40ms`, `0.4s`, `12s`, `3m05s`, `2h07m`."""
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
    """Return a rate as text: in rollouts per second, or per minute if it is below one per second."""
    return f"{per_s:.1f} rollouts/s" if per_s >= 1 else f"{per_s * 60:.1f} rollouts/min"


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
