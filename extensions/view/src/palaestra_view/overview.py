"""What a run's first page reports beyond its figures: scores by category, causes of failures, and what differs from the
official verdicts."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping

from palaestra.rollouts.observe.failures import Cause, Failures
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import BY_OFFICIAL, group_size, pass_metrics
from palaestra.rollouts.observe.verdicts import VerdictCounts
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON
from palaestra_view.run_index import COMMAND, RESUMED, RolloutEvidence, RunIndex, evidence

_IN_TABLE = re.compile(r"/(pass@\d+|mean_reward|pass_rate|scored|planned|tasks|attempts|unscored|tasks_not_run)(/|$)")
_MOST_CATEGORIES = 200


def overview(index: RunIndex, own: Mapping[str, float] | None = None) -> dict[str, JSON]:
    """Return, as JSON data, the scores of all tasks and of each category (`scores`), lines about failures (`causes`)
    with the rollout that each line names (`first_failures`, empty for a group), lines about official verdicts
    (`verdicts`), the environment's own metrics that are not in the table (`own`), and a
    sentence about resumed rollouts (`resumed`). `own` has the metrics of a run that is just ending."""
    scores, groups = _Scores(index), index.all_groups()
    imported = index.config().get("command") == COMMAND  # a log may have no rewards, which is not a failure
    failures, crashes, verdicts = Failures(), Failures(), VerdictCounts()
    for one in evidence(index):
        scores.add(one)
        if one.reward is None and (one.blame or one.error or not imported):
            failures.cause(one.blame, one.error, one.id, one.group).rollouts += 1
        if one.breaks:
            crashes.cause("model", one.breaks, one.id, one.group).rollouts += 1
        verdicts.take(one.difference, one.reward, one.official, json.loads(one.unseen))
    if any(error for *_, error, _ in groups):
        for group in index.groups(limit=10**9)[1]:
            if group["error"]:
                failures.cause(group["blame"], group["error"], group["group_id"], group["group_id"]).groups += 1
    if own is None:
        metrics = last_metrics(index.folder / "metrics.jsonl") if index.folder.is_dir() else {}
        own = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    causes, crashed = failures.causes(), crashes.causes()
    return {
        "scores": scores.table(),
        "causes": [*(cause.line() for cause in causes), *map(_crash_line, crashed)],
        "first_failures": [cause.first if cause.rollouts else "" for cause in (*causes, *crashed)],
        "verdicts": list(verdicts.lines()),
        "own": {name: value for name, value in own.items() if not _IN_TABLE.search(name)}
        if "eval/planned" in own
        else own,
        "resumed": _resumed(index.facts()),
    }


def _crash_line(cause: Cause) -> str:
    return f"the check fails over the work of {plural(cause.rollouts, 'rollout')}, first {cause.first}: {cause.error}"


class _Scores:
    """The table of scores: of all tasks, by the official verdict if there is one, and of each category."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._counts: Counter[str] = Counter()
        self._rewards: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._officials: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._categories: dict[str, str] = {}
        self._judged = False

    def add(self, one: RolloutEvidence) -> None:
        """Count one rollout."""
        self._counts[one.group] += 1
        self._judged = self._judged or one.official is not None
        if one.category:
            self._categories[one.task] = one.category
        if one.reward is not None:
            self._rewards[one.task].append(one.reward)
            self._officials[one.task].append(one.reward if one.official is None else one.official)

    def table(self) -> list[JSON]:
        """Return the rows, each with its `name`, `tasks`, `planned` and the metrics of `pass_metrics`."""
        size = group_size(self._index.config())
        planned: Counter[str] = Counter()
        for group, task, _, error, ended in self._index.all_groups():
            planned[task] += max(self._counts[group], size if error or not ended else 0)
        attempts = size or max(map(len, self._rewards.values()), default=1)
        by_category: defaultdict[str, list[str]] = defaultdict(list)
        for task, category in self._categories.items():
            by_category[category].append(task)
        chosen = [("", list(planned), self._rewards)]
        chosen += [(BY_OFFICIAL, list(planned), self._officials)] if self._judged else []
        chosen += [(name, tasks, self._rewards) for name, tasks in sorted(by_category.items())[:_MOST_CATEGORIES]]
        return [
            {
                "name": name,
                "tasks": len(tasks),
                "planned": sum(planned[task] for task in tasks),
                **pass_metrics([rewards.get(task, array("d")) for task in tasks], attempts),
            }
            for name, tasks, rewards in chosen
        ]


def _resumed(facts: Mapping[str, str]) -> str:
    """Return a sentence about the rollouts that were cut off and resumed; empty if there are none."""
    counts = {name.removeprefix(RESUMED): int(count) for name, count in facts.items() if name.startswith(RESUMED)}
    if not counts:
        return ""
    text = f"{plural(counts.pop('', 0), 'rollout')} continued after being cut off"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
    return f"{text}, {sum(counts.values())} started again ({reasons})" if reasons else text
