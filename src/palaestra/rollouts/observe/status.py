"""How a run stands, read from its folder by any process, while it goes on or afterwards: `RunReader`.

The journal says what has happened, `status.json` at which stages the rest is (see `inflight`). Not for the texts of a
run: an export gives those. Invariants: nothing is locked or written; reading again reads what has been added since.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Prices
from palaestra.rollouts.journal.journal import check_schema
from palaestra.rollouts.observe.intervals import mean_interval, rate_interval
from palaestra.rollouts.observe.metrics import quantile, stage_seconds
from palaestra.rollouts.observe.status_file import Idle, is_alive, read_stages
from palaestra.rollouts.resume.state import CUT_OFF

RUNNING, KILLED, ELSEWHERE = "running", "killed", "elsewhere"


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of all, the share, and its 95 % interval."""

    count: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, trials: int) -> Rate:
        return cls(count, count / trials, *rate_interval(count, trials))


@dataclass(frozen=True, slots=True)
class Latency:
    """How long rollouts were at a stage, over `count` of them: seconds in all, the median and the 95 % quantile."""

    count: int
    total_s: float
    p50_s: float
    p95_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        return cls(len(seconds), math.fsum(seconds), quantile(seconds, 0.5), quantile(seconds, 0.95))


@dataclass(slots=True)
class RunStatus:
    """A run at a moment. `state` is running, killed, the reason with which it ended, or elsewhere (another host has
    it, and this one cannot tell). `in_flight` is by stage; of a run that was killed, what was. `prepared` workspaces
    were made ready for groups, `from_store` of them were found prepared on the machine.

    `blame` is over the rollouts that ended. `mean_reward` is over the scored ones, `mean_with_unscored` counts those
    without a reward as 0, `full` is the share of scored rollouts with a reward of 1 or more, and `…_interval` the 95 %
    interval of a mean, where there are groups enough for one. Tokens and `cost` count discarded attempts and what is in
    flight too, up to its last turn (and, in a turn that gives work to sub-agents, its last reply); `stages` count
    discarded attempts. `cost` is None where no prices were given; `unpriced_tokens` were used
    in parts of the run that had none, and are not in it. `taken_up` rollouts went on where a kill had cut them
    off; those `begun_anew` could not, by reason.
    """

    run_id: str = ""
    env: str = ""
    model: str = ""
    state: str = RUNNING
    started_at: float = 0.0
    last_at: float = 0.0
    groups_begun: int = 0
    groups_ended: int = 0
    groups_failed: int = 0
    prepared: int = 0
    from_store: int = 0
    rollouts: int = 0
    scored: int = 0
    discarded: int = 0
    taken_up: int = 0
    begun_anew: dict[str, int] = field(default_factory=dict)
    mean_reward: float | None = None
    mean_interval: tuple[float, float] | None = None
    mean_with_unscored: float | None = None
    mean_with_unscored_interval: tuple[float, float] | None = None
    full: Rate | None = None
    stages: dict[str, Latency] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    blame: dict[str, Rate] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    oldest: list[Idle] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    unpriced_tokens: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = 0

    @property
    def resumed(self) -> str:
        """What became of the rollouts that had been cut off, in words; the empty string where there were none."""
        if not self.taken_up and not self.begun_anew:
            return ""
        text = f"{self.taken_up} rollouts went on where they had been cut off"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.begun_anew.items())
        return f"{text}, {sum(self.begun_anew.values())} began anew ({reasons})" if reasons else text

    def to_dict(self) -> dict[str, JSON]:
        """For machines."""
        plain: dict[str, JSON] = asdict(self) | {"oldest": msgspec.to_builtins(self.oldest)}
        return plain


class _Beside(msgspec.Struct):
    started_at: float = 0.0
    duration_s: float = 0.0
    stages: dict[str, float] = {}
    turn_s: list[tuple[float, float]] = []


class _Rollout(msgspec.Struct):
    """What is counted of a rollout. The rest of its line is passed over."""

    rollout_id: str
    group_id: str
    outcome: str
    reward: float | None
    blame: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    beside: _Beside = msgspec.field(default_factory=_Beside)


class _Group(msgspec.Struct):
    group_id: str
    prepare_s: float = 0.0
    from_store: bool = False


class _Ended(NamedTuple):
    """What is kept of a rollout."""

    outcome: str
    reward: float | None
    blame: str | None


@dataclass(slots=True)
class _Paid:
    """Tokens read and written, and their cost, where that is known; `unpriced` are those of which it is not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    unpriced: tuple[int, int] = (0, 0)

    @classmethod
    def by(cls, rollout: _Rollout) -> _Paid:
        return cls.used(rollout.prompt_tokens, rollout.completion_tokens, rollout.cost)

    @classmethod
    def used(cls, prompt_tokens: int, completion_tokens: int, cost: float | None) -> _Paid:
        unpriced = (prompt_tokens, completion_tokens) if cost is None else (0, 0)
        return cls(prompt_tokens, completion_tokens, cost, unpriced)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def spent(self, prices: Prices | None) -> float:
        """The cost; what was used where nobody said a price counts by these."""
        return (self.cost or 0.0) + (prices.cost(*self.unpriced) if prices is not None else 0.0)

    def add(self, other: _Paid, times: int = 1) -> None:
        self.prompt_tokens += times * other.prompt_tokens
        self.completion_tokens += times * other.completion_tokens
        read, written = other.unpriced
        self.unpriced = self.unpriced[0] + times * read, self.unpriced[1] + times * written
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + times * other.cost


@dataclass(slots=True)
class _Flying(_Paid):
    """What a rollout in flight has come to. `own` is its reply in a turn that has not ended."""

    own: _Paid | None = None

    def take(self, line: _Line) -> None:
        """Count a turn, or a reply in one."""
        paid = _Paid.used(*line.tokens, line.cost)
        if line.event == "reply" and not line.branch:
            self.own = paid
            return
        if line.recalled:  # it stood there as a reply
            paid = self.own or _Paid()
        if line.event == "messages":
            self.own = None
        self.add(paid)


class _Line(msgspec.Struct):
    event: str
    at: float = 0.0
    run_id: str = ""
    env: str = ""
    model: str = ""
    group: _Group | None = None
    trajectory: _Rollout | None = None
    group_id: str = ""
    error: str = ""
    reason: str = ""
    rollout_id: str = ""
    schema: str = ""
    turns: int = 0
    replies: int = 0
    anew: str = ""
    tokens: tuple[int, int] = (0, 0)
    cost: float | None = None
    recalled: bool = False
    branch: int = 0


_LINES = msgspec.json.Decoder(_Line)


class RunReader:
    """Reads the run of one journal, as often as one likes."""

    def __init__(self, journal: Path) -> None:
        self.folder = journal.parent
        self.journal = journal
        self._offset = 0
        self._status = RunStatus()
        self._ended = ""
        self._groups: dict[str, dict[str, _Ended]] = {}
        self._seconds: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._group_ends: dict[str, bool] = {}
        self._signs: dict[str, float] = {}
        self._cut_off: dict[str, list[_Paid]] = {}
        self._flying: defaultdict[str, _Flying] = defaultdict(_Flying)
        self.settled = _Paid()
        """What the attempts that have a record used."""
        self.paid: set[tuple[str, float]] = set()
        """Every attempt that ended, by its rollout's id and its start."""

    def read(self) -> RunStatus:
        """How the run stands now. Raises `ConfigError` for a damaged journal."""
        with self.journal.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or torn by a kill
                try:
                    self._take(_LINES.decode(line))
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{self.journal}: the line at byte {self._offset} is damaged: {error}") from None
                self._offset += len(line)
        return self._standing()

    def _take(self, line: _Line) -> None:
        status = self._status
        status.last_at = max(status.last_at, line.at)
        match line.event:
            case "run" if not status.run_id:
                check_schema(line.schema, self.journal)
                status.run_id, status.env, status.model, status.started_at = line.run_id, line.env, line.model, line.at
            case "resume":
                self._ended = ""
                self._signs.clear()
            case "group" if line.group is not None:
                rollouts = self._groups.setdefault(line.group.group_id, {})
                for rollout_id in [name for name, each in rollouts.items() if each.blame in CUT_OFF]:
                    del rollouts[rollout_id]
                if line.group.prepare_s:
                    status.prepared += 1
                    status.from_store += line.group.from_store
                    self._seconds["prepare"].append(line.group.prepare_s)
                self._group_ends.pop(line.group.group_id, None)
            case "taken_up" if line.turns or line.replies:
                self._taken_up(line)
            case "messages" | "reply":
                self._signs.pop(line.rollout_id, None)
                self._signs[line.rollout_id] = line.at
                self._flying[line.rollout_id].take(line)
            case "rollout" | "discarded" if line.trajectory is not None:
                self._rollout(line.trajectory, kept=line.event == "rollout")
            case "group_end":
                self._group_ends[line.group_id] = bool(line.error)
            case "end":
                self._ended = line.reason

    def _rollout(self, rollout: _Rollout, *, kept: bool) -> None:
        status = self._status
        self._signs.pop(rollout.rollout_id, None)
        key = rollout.rollout_id, rollout.beside.started_at
        if key not in self.paid:  # a resumed run writes down again what it keeps
            self.paid.add(key)
            status.discarded += not kept
            paid, flown = _Paid.by(rollout), self._flying.pop(rollout.rollout_id, _Flying())
            if flown.tokens > paid.tokens:  # replies that could not be used after a kill were paid all the same
                paid = flown
            self.settled.add(paid)
            if kept and rollout.blame in CUT_OFF:
                self._cut_off.setdefault(rollout.rollout_id, []).append(paid)
            for stage, seconds in stage_seconds(rollout.beside):
                self._seconds[stage].append(seconds)
        if kept:
            ended = _Ended(sys.intern(rollout.outcome), rollout.reward, rollout.blame and sys.intern(rollout.blame))
            self._groups.setdefault(rollout.group_id, {})[rollout.rollout_id] = ended

    def _taken_up(self, line: _Line) -> None:
        """What a rollout that goes on had cost is in its record when it ends, not in that of the part before."""
        status = self._status
        before = self._cut_off.pop(line.rollout_id, [])
        if line.anew:
            status.begun_anew[line.anew] = status.begun_anew.get(line.anew, 0) + 1
            return
        status.taken_up += 1
        for part in before:
            self.settled.add(part, -1)
            self._flying[line.rollout_id].add(part)

    def _standing(self) -> RunStatus:
        status = self._status
        groups = [list(group.values()) for group in self._groups.values()]
        rollouts = [each for group in groups for each in group]
        scored = [[each.reward for each in group if each.reward is not None] for group in groups]
        rewards = [reward for group in scored for reward in group]
        status.groups_begun, status.groups_ended = len(self._groups), len(self._group_ends)
        status.groups_failed = sum(self._group_ends.values())
        status.rollouts, status.scored = len(rollouts), len(rewards)
        status.mean_reward = sum(rewards) / len(rewards) if rewards else None
        status.mean_interval = mean_interval(scored)
        status.mean_with_unscored = sum(rewards) / len(rollouts) if rollouts else None
        status.mean_with_unscored_interval = mean_interval([[each.reward or 0.0 for each in group] for group in groups])
        status.full = Rate.of(sum(reward >= 1 for reward in rewards), len(rewards)) if rewards else None
        status.stages = {stage: Latency.of(self._seconds[stage]) for stage in sorted(self._seconds)}
        status.outcomes = dict(Counter(each.outcome for each in rollouts).most_common())
        blamed = Counter(each.blame for each in rollouts if each.blame)
        status.blame = {name: Rate.of(count, len(rollouts)) for name, count in blamed.most_common()}
        status.disk_bytes = sum(_size(path) for path in self.folder.rglob("*"))
        disk = os.statvfs(self.folder)
        status.disk_free_bytes = disk.f_bavail * disk.f_frsize
        self._count(status)
        self._in_flight(status)
        return status

    def _count(self, status: RunStatus) -> None:
        """What was used, by what has a record and by what has none yet."""
        paid = _Paid()
        for each in (self.settled, *self._flying.values()):
            paid.add(each)
            if isinstance(each, _Flying) and each.own is not None:
                paid.add(each.own)
        status.prompt_tokens, status.completion_tokens = paid.prompt_tokens, paid.completion_tokens
        status.cost, status.unpriced_tokens = paid.cost, sum(paid.unpriced)

    def _in_flight(self, status: RunStatus) -> None:
        """What is in flight, from who wrote last; from the journal alone where nobody says."""
        found = read_stages(self.folder)
        if self._ended:
            status.state, status.in_flight, status.oldest = self._ended, {}, []
        elif found is None:
            status.state = KILLED
            status.in_flight = {"unknown": len(self._signs)} if self._signs else {}
            status.oldest = [Idle(name, "unknown", at) for name, at in self._signs.items()]
        else:
            status.state = {True: RUNNING, False: KILLED, None: ELSEWHERE}[is_alive(found)]
            status.in_flight, status.oldest = found.stages, found.idle


def _size(path: Path) -> int:
    """What a file takes on the disk; nothing for one that is gone by now."""
    try:
        return path.stat().st_blocks * 512 if path.is_file() else 0
    except OSError:
        return 0
