"""`RunReader`: the status of a running or finished run, read from its folder by any process. Scores that `palaestra
grade` gave replace the recorded ones.

Finished work is in the journal; the stages of rollouts in flight are in `status.json` (see `status_file`). The reader
takes no lock and writes nothing. Each later read processes only the lines added since the previous one.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from palaestra.rollouts.journal.journal import check_schema
from palaestra.rollouts.journal.views import GroupView, RolloutView
from palaestra.rollouts.observe.intervals import Cluster, mean_interval, share_interval
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import quantile, stage_seconds
from palaestra.rollouts.observe.score_versions import version
from palaestra.rollouts.observe.status_file import Idle, is_alive, read_stages
from palaestra.rollouts.observe.usage import RunUsage, UsageLine
from palaestra.rollouts.observe.verdicts import OFFICIAL
from palaestra.rollouts.records import CUT_OFF
from palaestra.rollouts.regraded import Grade, read_grades
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of
from palaestra_slots.core.types import JSON, Blame, Outcome

RUNNING, KILLED, ELSEWHERE = "running", "killed", "elsewhere"


@dataclass(frozen=True, slots=True)
class Rate:
    """A count, its share of the total, and the 95% interval of the share."""

    count: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, tasks: Sequence[Sequence[bool]]) -> Rate:
        """Return the count and the share of True among the values, which are given by task. At least one value is
        required."""
        clusters = [Cluster(sum(each), len(each)) for each in tasks]
        count, interval = sum(map(sum, tasks)), share_interval(clusters)
        assert interval is not None
        return cls(count, count / sum(map(len, tasks)), *interval)


@dataclass(frozen=True, slots=True)
class Latency:
    """The time that `count` rollouts spent in a stage: total, median and 95% quantile, in seconds."""

    count: int
    total_s: float
    p50_s: float
    p95_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        return cls(len(seconds), math.fsum(seconds), quantile(seconds, 0.5), quantile(seconds, 0.95))


@dataclass(slots=True)
class NodeStatus:
    """A node of a cluster: its slots, the groups that are there, the rollouts that have begun and those that ended
    there. `lost` is the reason why it no longer belongs to the run; it may come back. `losses` counts how often it was
    lost."""

    node: str
    host: str
    level: str = ""
    slots: int = 0
    groups: int = 0
    in_flight: int = 0
    rollouts: int = 0
    lost: str = ""
    losses: int = 0


@dataclass(slots=True)
class RunStatus:
    """The status of a run at one moment.

    `kind` is run, eval, feed or batch. `state` is running, killed, elsewhere (on another host, where it cannot be
    checked), or the reason why the run ended. `in_flight` counts work by stage. `prepared` counts the groups with a
    prepared workspace, `from_store` those whose workspace was already prepared on the machine.

    `blame` counts finished rollouts by failure attribution. `mean_reward` is over the scored rollouts; in
    `mean_with_unscored`, unscored rollouts count as 0; `full` is the share of scored rollouts with a reward of 1 or
    more. `graded` counts the rollouts whose score `palaestra grade` gave; if there are any, `recorded_mean` is the mean
    of the rewards in the journal. `score_versions` counts the scored rollouts by version of the score
    (`score_versions.py`). `official` is the mean of the official verdicts, in place of the rewards of rollouts
    that have one; None if no rollout has one. `labels` counts rollouts by label, and `metrics` are the means of the
    environment's own metrics of rollouts. `…_interval` is the 95% interval of a mean, or None if there are no rewards,
    or if some are outside 0 to 1 and no interval can be computed. `planned` counts the rollouts of the groups that
    began and, once an evaluation has ended, those of the tasks that the environment refused. `unscored` counts those
    that `mean_with_unscored` takes as 0.

    Tokens and `cost` are those of `usage.py`: they include discarded attempts and rollouts in flight; `stages` include
    discarded attempts. `cost` is None if no prices are known; it leaves out the `unpriced_tokens` of parts of the run
    without prices. `uncounted` counts the turns for which the model server reported no tokens, and `tokens_unknown` is
    set if it reported none at all. `asked_again` counts the rollouts of which an earlier attempt failed at the model
    server or was ended by its content filter. `taken_up` counts the rollouts that were cut off and continued;
    `begun_anew` counts those that started again, by reason. `paused_s` are the seconds between the parts of a run.
    `nodes` are the nodes of a cluster, those of the latest part of the run.
    """

    run_id: str = ""
    env: str = ""
    model: str = ""
    state: str = RUNNING
    kind: str = "run"
    started_at: float = 0.0
    last_at: float = 0.0
    paused_s: float = 0.0
    groups_begun: int = 0
    groups_ended: int = 0
    groups_failed: int = 0
    prepared: int = 0
    from_store: int = 0
    rollouts: int = 0
    scored: int = 0
    planned: int = 0
    unscored: int = 0
    discarded: int = 0
    asked_again: int = 0
    taken_up: int = 0
    begun_anew: dict[str, int] = field(default_factory=dict)
    mean_reward: float | None = None
    mean_interval: tuple[float, float] | None = None
    mean_with_unscored: float | None = None
    mean_with_unscored_interval: tuple[float, float] | None = None
    graded: int = 0
    recorded_mean: float | None = None
    score_versions: dict[str, int] = field(default_factory=dict)
    full: Rate | None = None
    official: float | None = None
    official_interval: tuple[float, float] | None = None
    official_name: str = OFFICIAL
    labels: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stages: dict[str, Latency] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    blame: dict[str, Rate] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    oldest: list[Idle] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    unpriced_tokens: int = 0
    tokens_unknown: bool = False
    uncounted: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    nodes: list[NodeStatus] = field(default_factory=list)

    @property
    def filtered(self) -> int:
        """The number of rollouts that a content filter ended, which have no score."""
        return self.blame[Blame.FILTER].count if Blame.FILTER in self.blame else 0

    @property
    def seconds(self) -> float:
        """The time of the run up to its last line, without the pauses between its parts."""
        return max(0.0, self.last_at - self.started_at - self.paused_s)

    @property
    def usage_metrics(self) -> dict[str, float]:
        """The metrics of the run about tokens, cost and time."""
        found = {"tokens/prompt": self.prompt_tokens, "tokens/completion": self.completion_tokens}
        return found | ({} if self.cost is None else {"cost": self.cost}) | {"seconds": self.seconds}

    @property
    def resumed(self) -> str:
        """A sentence about the rollouts that were cut off and resumed; empty if there are none."""
        if not self.taken_up and not self.begun_anew:
            return ""
        text = f"{plural(self.taken_up, 'rollout')} continued after being cut off"
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.begun_anew.items())
        return f"{text}, {sum(self.begun_anew.values())} started again ({reasons})" if reasons else text

    def to_dict(self) -> dict[str, JSON]:
        """Return the status as JSON data."""
        plain: dict[str, JSON] = asdict(self) | {"oldest": msgspec.to_builtins(self.oldest)}
        if self.official is None:
            for name in ("official", "official_interval", "official_name"):
                del plain[name]
        del plain["paused_s"], plain["unscored"]  # for the lines and the table; the format of the file stays
        if not self.graded:
            del plain["graded"], plain["recorded_mean"]
        if len(self.score_versions) < 2:
            del plain["score_versions"]
        for name in ("labels", "metrics", "nodes", "tokens_unknown", "uncounted", "asked_again"):
            if not plain[name]:
                del plain[name]
        return plain


def filtered_words(count: int, run: Path | str) -> str:
    """Return what happens to the rollouts that a content filter ended."""
    return (
        f"{plural(count, 'rollout')} ended by a content filter, which palaestra resume does not ask again; a new run "
        f"with --failed-of {run} does"
    )


BATCH = "batch"
_KINDS = {"evaluate": "eval", "serve": "feed"}


def score_name(kind: str) -> str:
    """Return the name of a rollout's score in a run of this kind. A batch keeps samples and does not grade them."""
    return "kept" if kind == BATCH else "reward"


class _EnvSettings(msgspec.Struct):
    group_size: int = 0


class _Provenance(msgspec.Struct):
    environment_sha256: str = ""


class _Settings(msgspec.Struct):
    """The settings of a run that the status needs."""

    env: _EnvSettings = msgspec.field(default_factory=_EnvSettings)
    command: str = ""
    environment: str = ""
    official_name: str = OFFICIAL
    provenance: _Provenance = msgspec.field(default_factory=_Provenance)

    @property
    def kind(self) -> str:
        return BATCH if self.environment == BATCH else _KINDS.get(self.command, "run")


class _Ended(NamedTuple):
    """The result of a finished rollout."""

    outcome: str
    reward: float | None
    blame: str | None
    official: float | None = None
    labels: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = {}
    code: str = ""
    """The hash of the environment's file."""

    def graded(self, grade: Grade | None) -> _Ended:
        if grade is None or grade.reward is None:
            return self
        labels = frozenset(label.name for label in grade.labels)
        return self._replace(reward=grade.reward, official=grade.official, labels=labels, metrics=grade.metrics)


class _Line(UsageLine):
    config: _Settings = msgspec.field(default_factory=_Settings)


_LINES = msgspec.json.Decoder(_Line)


class RunReader:
    """Reads the status of one run. Each call of `read` returns the current status. `own` are the run's own metrics, if
    its file of metrics does not have them yet."""

    def __init__(self, journal: Path, own: Mapping[str, float] | None = None) -> None:
        self.folder = journal.parent
        self.journal = journal
        self._own = own
        self._offset = 0
        self._status = RunStatus()
        self._ended = ""
        self._groups: dict[str, dict[str, _Ended]] = {}
        self._seconds: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._group_ends: dict[str, bool] = {}
        self._nodes: dict[str, NodeStatus] = {}
        self._placed: dict[str, NodeStatus] = {}
        self._group_size = 0
        self._code = ""
        self._task_ids: dict[str, str] = {}
        self._signs: dict[str, float] = {}
        self.usage = RunUsage()
        self._asked_before: set[str] = set()
        self.paid: set[tuple[str, float]] = set()
        """The rollout id and start time of every attempt that ended."""

    def read(self) -> RunStatus:
        """Return the current status, from the lines added since the last call. Raises `ConfigError` for a damaged
        journal."""
        with self.journal.open("rb") as file:
            file.seek(self._offset)
            for line in lines_of(file):
                if not line.endswith(b"\n"):
                    break  # being written, or torn by a kill
                try:
                    self._take_line(_LINES.decode(line))
                except UNREADABLE as error:
                    raise ConfigError(f"{self.journal}: the line at byte {self._offset} is damaged: {error}") from None
                self._offset += len(line)
        return self._standing()

    def _take_line(self, line: _Line) -> None:
        status = self._status
        last_at, status.last_at = status.last_at, max(status.last_at, line.at)
        match line.event:
            case "run" if not status.run_id:
                check_schema(line.schema, self.journal)
                status.run_id, status.env, status.model, status.started_at = line.run_id, line.env, line.model, line.at
                self._group_size, status.kind = line.config.env.group_size, line.config.kind
                status.official_name = line.config.official_name
                self._code = line.config.provenance.environment_sha256
            case "resume":
                status.paused_s += max(0.0, line.at - last_at)
                self._group_size = line.config.env.group_size or self._group_size
                self._code = line.config.provenance.environment_sha256 or self._code
                # What was in flight or on a node when the earlier part ended is not there any more.
                self._ended = ""
                self._signs.clear()
                self._nodes.clear()
                self._placed.clear()
            case "group" if line.group is not None:
                self._group_begun(line.group)
            case "taken_up" if line.turns or line.replies:
                self._taken_up(line)
            case "messages" | "reply":
                # Moved to the end, so that the rollout which has been idle longest comes first.
                self._signs.pop(line.rollout_id, None)
                self._signs[line.rollout_id] = line.at
                self.usage.take(line)
            case "rollout" | "discarded" if line.trajectory is not None:
                self._rollout(line, line.trajectory, kept=line.event == "rollout")
            case "node":
                node = self._nodes.setdefault(line.node, NodeStatus(line.node, line.host))
                node.level, node.slots, node.lost = line.level, line.slots, line.lost
                node.losses += bool(line.lost)
            case "placed" if line.node in self._nodes:
                self._placed[line.group_id] = self._nodes[line.node]
            case "group_end":
                self._group_ends[line.group_id] = bool(line.error)
                self._placed.pop(line.group_id, None)
            case "end":
                self._ended = line.reason

    def _group_begun(self, group: GroupView) -> None:
        self._task_ids[group.group_id] = sys.intern(group.task_id)
        rollouts = self._groups.setdefault(group.group_id, {})
        # A resumed run plays rollouts again that were cut off.
        for rollout_id in [name for name, each in rollouts.items() if each.blame in CUT_OFF]:
            if rollouts.pop(rollout_id).outcome == Outcome.API_ERROR:
                self._asked_before.add(rollout_id)
        if group.prepare_s:
            self._status.prepared += 1
            self._status.from_store += group.from_store
            self._seconds["prepare"].append(group.prepare_s)
        self._group_ends.pop(group.group_id, None)

    def _rollout(self, line: _Line, rollout: RolloutView, *, kept: bool) -> None:
        status = self._status
        if not kept and rollout.outcome == Outcome.API_ERROR:
            self._asked_before.add(rollout.rollout_id)
        self._signs.pop(rollout.rollout_id, None)
        key = rollout.rollout_id, rollout.beside.started_at
        if key not in self.paid:  # an attempt counts once, even if the journal has its record twice
            self.paid.add(key)
            status.discarded += not kept
            self.usage.take(line)
            for stage, seconds in stage_seconds(rollout.beside):
                self._seconds[stage].append(seconds)
        if kept:
            if (node := self._placed.get(rollout.group_id)) is not None:
                node.rollouts += 1
            # A long run has very many rollouts and only a few different texts, so these are interned.
            ended = _Ended(
                sys.intern(rollout.outcome),
                rollout.reward,
                rollout.blame and sys.intern(rollout.blame),
                rollout.official,
                frozenset(sys.intern(label.name) for label in rollout.labels),
                {sys.intern(name): value for name, value in rollout.metrics.items()},
                self._code,
            )
            self._groups.setdefault(rollout.group_id, {})[rollout.rollout_id] = ended

    def _taken_up(self, line: _Line) -> None:
        status = self._status
        self.usage.take(line)
        if line.anew:
            status.begun_anew[line.anew] = status.begun_anew.get(line.anew, 0) + 1
        else:
            status.taken_up += 1

    def _standing(self) -> RunStatus:
        status = self._status
        by_task, grades = self._by_task(), read_grades(self.folder)
        recorded = [[item for name in groups for item in self._groups[name].items()] for groups in by_task.values()]
        tasks = [[each.graded(grades.get(name)) for name, each in task] for task in recorded]
        status.groups_begun, status.groups_ended = len(self._groups), len(self._group_ends)
        status.groups_failed = sum(self._group_ends.values())
        # A group that is being played will have all its rollouts; one that ended well may have had fewer.
        status.planned = sum(
            max(len(group), self._group_size if self._group_ends.get(name, True) else 0)
            for name, group in self._groups.items()
        )
        refused = self._refused_counts()
        status.planned += sum(refused)
        lacking = [*(self._lacking(groups) for groups in by_task.values()), *refused]
        self._average(status, [*tasks, *([] for _ in refused)], lacking)
        self._count_graded(status, itertools.chain.from_iterable(recorded), grades)
        self._judge(status, tasks)
        status.stages = {stage: Latency.of(self._seconds[stage]) for stage in sorted(self._seconds)}
        self._count_ends(status, tasks)
        status.disk_bytes = sum(_size(path) for path in self.folder.rglob("*"))
        # f_bavail and not f_bfree, part of which only root may use.
        disk = os.statvfs(self.folder)
        status.disk_free_bytes = disk.f_bavail * disk.f_frsize
        self._count_tokens(status)
        self._in_flight(status)
        self._place(status)
        return status

    def _count_ends(self, status: RunStatus, tasks: Sequence[Sequence[_Ended]]) -> None:
        rollouts = list(itertools.chain.from_iterable(tasks))
        status.rollouts = len(rollouts)
        status.asked_again = sum(name in self._asked_before for group in self._groups.values() for name in group)
        status.outcomes = dict(Counter(each.outcome for each in rollouts).most_common())
        blamed = Counter(each.blame for each in rollouts if each.blame)
        status.blame = {
            name: Rate.of([[each.blame == name for each in task] for task in tasks]) for name, _ in blamed.most_common()
        }

    @staticmethod
    def _count_graded(status: RunStatus, recorded: Iterable[tuple[str, _Ended]], grades: Mapping[str, Grade]) -> None:
        """Count the rollouts with a new score, and average the recorded rewards if there are any."""
        # Grades of rollouts that were discarded since do not count.
        ended = dict(recorded)
        before = [each.reward for each in ended.values() if each.reward is not None]
        status.score_versions = dict(
            Counter(
                version(each.code, grades.get(name))
                for name, each in ended.items()
                if each.graded(grades.get(name)).reward is not None
            )
        )
        status.graded = sum(name in ended and grade.reward is not None for name, grade in grades.items())
        status.recorded_mean = math.fsum(before) / len(before) if before and status.graded else None

    @staticmethod
    def _average(status: RunStatus, tasks: Sequence[Sequence[_Ended]], lacking: Sequence[int]) -> None:
        """Average the rewards: those that there are, and with 0 for rollouts that have none, or that are `lacking`
        because their group failed."""
        scored = [[each.reward for each in task if each.reward is not None] for task in tasks]
        rewards = [reward for task in scored for reward in task]
        status.scored = len(rewards)
        status.mean_reward = sum(rewards) / len(rewards) if rewards else None
        status.mean_interval = mean_interval(scored)
        # Both averages are shown, because leaving rollouts out makes a run look better than it is.
        everyone = [
            [*(each.reward or 0.0 for each in task), *[0.0] * more] for task, more in zip(tasks, lacking, strict=True)
        ]
        status.unscored = sum(map(len, everyone)) - len(rewards)
        status.mean_with_unscored = sum(rewards) / sum(map(len, everyone)) if any(everyone) else None
        status.mean_with_unscored_interval = mean_interval(everyone)
        status.full = Rate.of([[reward >= 1 for reward in task] for task in scored]) if rewards else None

    def _place(self, status: RunStatus) -> None:
        """Count what is on each node of a cluster."""
        status.nodes = list(self._nodes.values())
        for node in status.nodes:
            node.groups = node.in_flight = 0
        if self._ended:
            return
        for node in self._placed.values():
            node.groups += not node.lost
        for name in self._signs:
            place = self._placed.get(name.rpartition("/")[0])
            if place is not None and not place.lost:
                place.in_flight += 1

    @staticmethod
    def _judge(status: RunStatus, tasks: Sequence[Sequence[_Ended]]) -> None:
        """Average the official verdicts and the environment's metrics, and count the labels."""
        rollouts = [each for task in tasks for each in task]
        # Only scored rollouts count, as in the mean reward, so that the two can be compared.
        if any(each.official is not None for each in rollouts):
            verdicts = [
                [each.reward if each.official is None else each.official for each in task if each.reward is not None]
                for task in tasks
            ]
            status.official = math.fsum(verdict for task in verdicts for verdict in task) / status.scored
            status.official_interval = mean_interval(verdicts)
        status.labels = dict(Counter(name for each in rollouts for name in sorted(each.labels)).most_common())
        values: defaultdict[str, list[float]] = defaultdict(list)
        for each in rollouts:
            for name, value in each.metrics.items():
                values[name].append(value)
        # fsum, because plain sums depend on the order in which rollouts ended.
        status.metrics = {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}

    def _by_task(self) -> dict[str, list[str]]:
        """Return the groups of each task."""
        tasks: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._groups:
            tasks[self._task_ids.get(name) or name].append(name)
        return tasks

    def _refused_counts(self) -> list[int]:
        """Return the number of rollouts of each task that the environment of an evaluation refused, which the metrics
        of an ended run have."""
        if not self._ended or self._status.kind != "eval":
            return []
        return [self._group_size] * int(self._own_metrics().get("tasks_left_out", 0))

    def _own_metrics(self) -> Mapping[str, float]:
        return last_metrics(self.folder / "metrics.jsonl") if self._own is None else self._own

    def _lacking(self, groups: Sequence[str]) -> int:
        """Return the number of rollouts that are missing from these groups because the groups failed."""
        return sum(
            max(0, self._group_size - len(self._groups[name])) for name in groups if self._group_ends.get(name, False)
        )

    def _left_in_flight(self, status: RunStatus) -> None:
        """Leave out of what a killed run had in flight the rollouts that have ended in the journal."""
        ended = {name for name, _ in self.paid} - self._signs.keys()
        gone = [each for each in status.oldest if each.name in ended]
        left = Counter(status.in_flight)
        left.subtract(each.stage for each in gone)
        status.in_flight = {stage: count for stage, count in left.items() if count > 0}
        status.oldest = [each for each in status.oldest if each.name not in ended]

    def _count_tokens(self, status: RunStatus) -> None:
        usage, total = self.usage, self.usage.total()
        status.prompt_tokens, status.completion_tokens = total.prompt_tokens, total.completion_tokens
        status.cost = usage.cost(self._own_metrics())
        status.unpriced_tokens = sum(total.unpriced)
        status.tokens_unknown, status.uncounted = usage.is_unknown, usage.uncounted

    def _in_flight(self, status: RunStatus) -> None:
        """Read the stages from `status.json`. Without it, only the rollouts' names are known, from the journal."""
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
            if status.state == KILLED:  # the file is older than the journal, in which some of them have ended
                self._left_in_flight(status)


def _size(path: Path) -> int:
    """Return the disk space that a file uses, in bytes; 0 if it is gone."""
    try:
        return path.stat().st_blocks * 512 if path.is_file() else 0
    except OSError:
        return 0
