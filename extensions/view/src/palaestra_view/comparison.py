"""Compares runs of the same tasks, from their indexes: paired differences with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from palaestra.rollouts.observe.compare_runs import RunComparison, RunScores, TaskScores, compare
from palaestra.rollouts.observe.metrics import group_size
from palaestra_slots.core.types import JSON
from palaestra_view.run_index import RunIndex


def compared(runs: Mapping[str, RunIndex], base: str, by: str = "reward") -> dict[str, JSON]:
    """Return, for each run, its paired comparison with the run `base` on the tasks that both have: difference, interval
    and counts, or the reason (`problem`) why there is none. `undecided` is the reason why no winner is named.
    `with_unscored` is the same difference with unscored rollouts as 0; None if they change nothing. `counterfactual`
    is whether the run, or `base`, continues a rollout of another run. `by` is `reward` or `official`."""
    scores = {name: _scores(index, name) for name, index in runs.items()}
    if by == "official":
        scores = {name: each.by_official() for name, each in scores.items()}
    found: dict[str, JSON] = {}
    for name, each in scores.items():
        if name == base:
            continue
        try:
            result, whole = compare(each, scores[base]), compare(each, scores[base], unscored=0.0)
        except ValueError as error:
            found[name] = {"problem": str(error)}
            continue
        counts = {"tasks": len(result.pairs), "better": result.better, "worse": result.worse}
        found[name] = {
            **counts,
            **_difference(result),
            "winner": result.winner,
            "undecided": result.undecided,
            "with_unscored": None if whole.pairs == result.pairs else {**_difference(whole), "tasks": len(whole.pairs)},
            "counterfactual": any(bool(runs[each].config().get("fork")) for each in (name, base)),
        }
    return found


def _difference(found: RunComparison) -> dict[str, JSON]:
    return {"difference": found.difference, "interval": None if found.low is None else [found.low, found.high]}


def _scores(index: RunIndex, name: str) -> RunScores:
    facts, size = index.facts(), group_size(index.config())
    tasks: dict[str, TaskScores] = {}
    counts = Counter[str]()
    judged = False
    for group, task, reward, official, *_ in index.scores():
        counts[group] += 1
        entry = tasks.setdefault(task, TaskScores())
        judged = judged or official is not None
        if reward is None:
            entry.lost += 1
        else:
            entry.rewards.append(reward)
            entry.officials.append(reward if official is None else official)
    unfinished = 0
    for group, task, asked, error, ended in index.all_groups():
        entry = tasks.setdefault(task, TaskScores())
        entry.asked |= {asked} - {""}
        if error:
            entry.lost += max(0, size - counts[group])
        unfinished += 0 if ended else max(0, size - counts[group])
    made = RunScores(name, facts.get("env", ""), facts.get("model", ""), index.config(), tasks, unfinished)
    made.judged = judged
    made.versions = index.score_versions()
    return made
