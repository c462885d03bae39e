"""Compares the rewards, or the official verdicts, of runs of the same tasks, with 95% intervals.

Rewards are paired by task, because tasks differ more from each other than two models do on one task. Only tasks with a
reward in both runs count, each with the mean reward of its rollouts. The interval comes from `intervals.py`. No winner
is named if there is no interval or the interval contains 0. The same holds if a task has different prompts in the two
runs. It also holds if the runs do not cover the same tasks and the same share of their rollouts, since the missing
rollouts may be the hard ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from palaestra.rollouts.observe.intervals import Cluster, Interval, clustered_interval, in_words, mean_interval
from palaestra.rollouts.observe.metrics import group_size
from palaestra.rollouts.observe.score_versions import REMEDY, code_of, differ, mixed, version
from palaestra.rollouts.observe.score_versions import in_words as versions_in_words
from palaestra.rollouts.observe.verdicts import official_name, official_words
from palaestra.rollouts.records import Group
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON

_HERE = frozenset({"data_path_to_save_groups", "data_dir_to_save_evals", "wandb_name", "timings_from", "metrics_port"})
"""Settings that only give the paths, names or ports of one run, so a difference does not matter."""


@dataclass(slots=True)
class TaskScores:
    """The scores of a task in one run, over all of its groups. `officials` has the official verdict of each rollout
    with a reward, or the reward if there is no verdict. `lost` counts rollouts without a reward."""

    rewards: list[float] = field(default_factory=list)
    officials: list[float] = field(default_factory=list)
    lost: int = 0
    asked: set[str] = field(default_factory=set)

    def mean(self, unscored: float | None) -> float | None:
        """Return the mean reward, or None if there are no rewards. A rollout without a reward counts as `unscored`, or
        is left out if `unscored` is None."""
        rewards = self.rewards if unscored is None else [*self.rewards, *[unscored] * self.lost]
        return statistics.fmean(rewards) if rewards else None

    def asks_otherwise(self, other: TaskScores) -> bool:
        """Return whether the task's prompts differ in the two runs; False if one of the runs did not record them, as in
        earlier versions."""
        return bool(self.asked and other.asked) and self.asked.isdisjoint(other.asked)


@dataclass(slots=True)
class RunScores:
    """The scores of one run. A group with an error counts as at least `group_size` rollouts."""

    name: str
    env: str = ""
    model: str = ""
    config: Mapping[str, JSON] = field(default_factory=dict)
    tasks: dict[str, TaskScores] = field(default_factory=dict)
    unfinished: int = 0
    """Rollouts of groups that began and have not ended."""
    judged: bool = False
    """Whether some rollouts have an official verdict."""
    scores: str = "reward"
    """The name of what `tasks` has as rewards."""
    filtered: int = 0
    """Rollouts that a content filter ended."""
    asked_again: int = 0
    """Rollouts of which an earlier attempt failed at the model server or its filter."""
    graded: int = 0
    """Rollouts whose score is from `palaestra grade`."""
    versions: dict[str, int] = field(default_factory=dict)
    """The number of scored rollouts by version of the score."""

    @classmethod
    def of(
        cls,
        groups: Iterable[Group],
        name: str = "",
        env: str = "",
        model: str = "",
        config: Mapping[str, JSON] = {},
        unfinished: int = 0,
    ) -> RunScores:
        """Return the scores of the finished groups; `unfinished` is the number of groups that began and did not
        finish."""
        size = group_size(config)
        scores = cls(name, env, model, config, unfinished=unfinished * size)
        for group in groups:
            rewards = [each.reward for each in group.trajectories if each.reward is not None]
            task = scores.tasks.setdefault(group.task_id, TaskScores())
            task.rewards += rewards
            task.officials += [each.official_reward or 0.0 for each in group.scored]
            scores.judged = scores.judged or any(each.official is not None for each in group.trajectories)
            task.lost += max(len(group.trajectories), size if group.error else 0) - len(rewards)
            task.asked |= {group.asked} - {""}
        scores.versions = {version(code_of(config)): scores.scored}
        return scores

    def by_official(self) -> RunScores:
        """Return the same run with the official verdicts in place of the rewards."""
        tasks = {name: replace(task, rewards=task.officials) for name, task in self.tasks.items()}
        return replace(self, tasks=tasks, scores=official_words(official_name(self.config)))

    @property
    def scored(self) -> int:
        return sum(len(task.rewards) for task in self.tasks.values())

    @property
    def planned(self) -> int:
        return self.scored + self.unfinished + sum(task.lost for task in self.tasks.values())

    @property
    def interval(self) -> Interval | None:
        return mean_interval([task.rewards for task in self.tasks.values()])

    @property
    def rewards(self) -> list[float]:
        return [reward for task in self.tasks.values() for reward in task.rewards]

    @property
    def mean(self) -> float | None:
        """The mean reward of the scored rollouts; None if there are none."""
        return statistics.fmean(self.rewards) if self.scored else None

    def means(self, unscored: float | None) -> dict[str, float]:
        """Return the mean of each task that has one, by its id. A rollout without a reward counts as `unscored`, or is
        left out if `unscored` is None."""
        found = {name: task.mean(unscored) for name, task in self.tasks.items()}
        return {name: mean for name, mean in found.items() if mean is not None}

    def line(self) -> str:
        """Return a one-line summary of the run: its model, its mean reward, and the numbers of rollouts and tasks."""
        mean = "no reward" if self.mean is None else f"mean {self.scores} {self.mean:.3f}{in_words(self.interval)}"
        covered = f"{self.scored} of {plural(self.planned, 'rollout')} scored, {plural(len(self.tasks), 'task')}"
        graded = f", {self.graded} graded again" if self.graded else ""
        counts = {"ended by a content filter": self.filtered, "asked again": self.asked_again}
        graded += "".join(f", {count} {what}" for what, count in counts.items() if count)
        return f"{self.name}: {self.env} with {self.model}: {mean}, {covered}{graded}"

    def to_json(self) -> dict[str, JSON]:
        """Return the scores as JSON data."""
        low, high = self.interval or (None, None)
        facts = {"path": self.name, "env": self.env, "model": self.model, "mean": self.mean, "low": low, "high": high}
        return facts | {"scored": self.scored, "planned": self.planned, "tasks": len(self.tasks)}


@dataclass(frozen=True, slots=True)
class Pair:
    """One task, with its mean reward in the first run and in the other."""

    task: str
    first: float
    other: float

    @property
    def difference(self) -> float:
        """The first run's reward minus the other's."""
        return self.first - self.other


@dataclass(frozen=True, slots=True)
class RunComparison:
    """`difference` is the mean over `pairs` of the first run's reward minus the other's; `low` and `high` are its 95%
    interval, or None if rewards are not all from 0 to 1 and the differences do not vary.

    `only_first` and `only_other` are the tasks that have a reward only in the first run and only in the other run.
    `asked_otherwise` are paired tasks with different prompts in the two runs. `winner` is 1 for the first run, -1 for
    the other, and 0 if no winner can be named; `undecided` gives the reasons.
    """

    pairs: tuple[Pair, ...]
    only_first: tuple[str, ...]
    only_other: tuple[str, ...]
    difference: float
    low: float | None
    high: float | None
    asked_otherwise: tuple[str, ...] = ()
    winner: int = 0
    undecided: str = ""

    @property
    def interval(self) -> str:
        """The interval in words, or the empty string."""
        return "" if self.low is None or self.high is None else in_words((self.low, self.high), "+.3f")

    @property
    def better(self) -> int:
        """The number of tasks on which the first run did better."""
        return sum(pair.difference > 0 for pair in self.pairs)

    @property
    def worse(self) -> int:
        """The number of tasks on which the other run did better."""
        return sum(pair.difference < 0 for pair in self.pairs)

    def to_json(self) -> dict[str, JSON]:
        """Return the comparison as JSON data."""
        counts = {"tasks": len(self.pairs), "better": self.better, "worse": self.worse}
        return counts | asdict(self)


def compare(first: RunScores, other: RunScores, *, unscored: float | None = None) -> RunComparison:
    """Compare two runs by task id. A rollout without a reward counts as `unscored`, or is left out if `unscored` is
    None.

    Raises `ValueError` if no task has a reward in both runs.
    """
    known = [first.means(unscored), other.means(unscored)]
    pairs = tuple(Pair(task, mean, known[1][task]) for task, mean in known[0].items() if task in known[1])
    if not pairs:
        counts = f"{len(known[0])} have one in the first run, {len(known[1])} in the other"
        raise ValueError(f"no task has a reward in both runs: {counts}")
    bounds = (-1.0, 1.0) if all(0 <= reward <= 1 for reward in (*first.rewards, *other.rewards)) else None
    differences = [pair.difference for pair in pairs]
    # One cluster per task: the rollouts of a task are not independent of each other.
    low, high = clustered_interval([Cluster(each, 1) for each in differences], 0.0, bounds) or (None, None)
    asked = tuple(each.task for each in pairs if first.tasks[each.task].asks_otherwise(other.tasks[each.task]))
    lacking = tuple(tuple(task for task in a if task not in b) for a, b in (known, known[::-1]))
    undecided = _undecided(first, other, low, high, [*lacking[0], *lacking[1]], asked)
    winner = 0 if undecided else 1 if statistics.fmean(differences) > 0 else -1
    return RunComparison(
        pairs, lacking[0], lacking[1], statistics.fmean(differences), low, high, asked, winner, undecided
    )


def _undecided(
    first: RunScores,
    other: RunScores,
    low: float | None,
    high: float | None,
    unpaired: Sequence[str],
    asked_otherwise: Sequence[str],
) -> str:
    """Return all reasons why no winner can be named; empty if one can."""
    reasons = list[str]()
    if unpaired:
        reasons.append(f"{plural(len(unpaired), 'task')} with a reward in only one of the runs")
    # Products, because quotients of equal shares may differ in the last bit.
    if first.scored * other.planned != other.scored * first.planned:
        shares = f"{first.scored} of {first.planned} against {other.scored} of {other.planned}"
        reasons.append(f"the runs differ in the share of scored rollouts, {shares}")
    if asked_otherwise:
        reasons.append(f"{plural(len(asked_otherwise), 'task')} with different prompts in the two runs")
    if other_scores := _scored_otherwise(first, other):
        reasons.append(other_scores)
    if low is None or high is None:
        reasons.append("no interval is known")
    elif low <= 0 <= high:
        reasons.append("the interval contains 0")
    return "; ".join(reasons)


def _scored_otherwise(first: RunScores, other: RunScores) -> str:
    """Return why different versions of the score function may have judged the two runs; empty if they have not."""
    for run in (first, other):
        if warning := mixed(run.versions):
            return f"in {run.name}, {warning}; {REMEDY}"
    if not differ({**first.versions, **other.versions}, same_file=first.env == other.env):
        return ""
    own, others = versions_in_words(first.versions), versions_in_words(other.versions)
    return f"different versions of the score judged the runs, {own} against {others}; {REMEDY}"


def differing_settings(runs: Sequence[RunScores]) -> dict[str, list[JSON]]:
    """Return the settings and versions (with the environment file's hash) that differ between the runs, each with the
    value in every run."""
    values = [_flat_settings(run.config) for run in runs]
    names = dict.fromkeys(name for each in values for name in each)
    rows = {name: [each.get(name) for each in values] for name in names}
    said = set().union(*map(_set_settings, runs))

    def is_shown(name: str) -> bool:
        # Some records have the defaults of all settings, others only of those that the run could use.
        told = not name.startswith("env.") or name in said or all(name in each for each in values)
        return told and any(value != rows[name][0] for value in rows[name])

    return {name: row for name, row in rows.items() if is_shown(name)}


def _set_settings(run: RunScores) -> set[str]:
    """Return the names of the settings that do not have their defaults."""
    return {name for name, source in (run.config.get("sources") or {}).items() if source != DEFAULT}


def _flat_settings(config: Mapping[str, JSON]) -> dict[str, JSON]:
    env = {f"env.{name}": value for name, value in (config.get("env") or {}).items() if name not in _HERE}
    servers = config.get("openai") or []
    openai = {
        f"openai{'' if len(servers) == 1 else number}.{name}": value
        for number, server in enumerate(servers)
        for name, value in server.items()
    }
    # Another version of Palaestra or of the environment can change scores as much as a setting.
    facts = config.get("provenance") or {}
    made = {name: facts.get(name) for name in ("palaestra", "environment_sha256", "git_commit")}
    return {"environment": config.get("environment"), **env, **openai, **made}
