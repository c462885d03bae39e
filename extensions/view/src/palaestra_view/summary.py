"""The figures of one run, computed from its index: rewards with intervals, verdicts, labels, outcomes, usage.

The figures are those of the run's own summary: rewards are over scored rollouts, intervals are clustered by task.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from palaestra.rollouts.observe.intervals import Interval, mean_interval
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.observe.metrics import group_size, pass_metrics
from palaestra.rollouts.observe.score_versions import mixed
from palaestra.rollouts.observe.status import ELSEWHERE, KILLED, RUNNING
from palaestra.rollouts.observe.status_file import is_alive, read_stages
from palaestra.rollouts.observe.verdicts import official_name, official_words
from palaestra_slots.core.config import is_secret
from palaestra_slots.core.types import JSON
from palaestra_view.run_index import COMMAND, NODE, ROLLOUTS_ON, RunIndex


def run_summary(index: RunIndex, name: str, own: Mapping[str, float] | None = None) -> dict[str, JSON]:
    """Return the figures of a run as JSON data. `name` is the run's name in the viewer. Means without values are None;
    intervals are `[low, high]` or None. `own` has the environment's own metrics of a run that is just ending. The tasks
    and planned rollouts of an ended evaluation include those of tasks that the environment refused."""
    facts, config, totals = index.facts(), index.config(), index.totals()
    read, size = index.progress
    folder, scores, groups = index.folder, index.scores(), index.all_groups()
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    officials: defaultdict[str, list[float]] = defaultdict(list)
    by_group: defaultdict[str, list[float | None]] = defaultdict(list)
    outcomes, blames, labels = Counter[str](), Counter[str](), Counter[str]()
    criteria: defaultdict[str, list[float]] = defaultdict(list)
    judged = differs = 0
    for group, task, reward, official, outcome, blame, marks, metrics in scores:
        by_group[group].append(reward)
        outcomes[outcome] += 1
        if blame:
            blames[blame] += 1
        if marks != "[]":
            labels.update(set(json.loads(marks)))
        for metric, value in json.loads(metrics).items():
            criteria[metric].append(value)
        judged += official is not None
        differs += official is not None and official != reward
        if reward is not None:
            by_task[task].append(reward)
            officials[task].append(reward if official is None else official)
    planned_of = group_size(config)
    planned = sum(
        max(len(by_group[group]), planned_of if error or not ended else 0) for group, _, _, error, ended in groups
    )
    own = last_metrics(folder / "metrics.jsonl") if own is None and folder.is_dir() else own or {}
    usage = index.usage()
    used, cost = usage.total(), usage.cost(own)
    totals |= {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens, "cost": cost}
    versions = index.score_versions()
    refused = int(own.get("tasks_left_out", 0)) if config.get("command") == "evaluate" else 0
    dull = sum(
        bool(scored := [each for each in by_group[group] if each is not None]) and len(set(scored)) == 1
        for group, _, _, _, ended in groups
        if ended
    )
    return {
        "name": name,
        "path": str(folder),
        "env": facts.get("env", ""),
        "model": facts.get("model", ""),
        "seed": facts.get("seed", ""),
        "state": run_state(index),
        "kind": _run_kind(config),
        "started_at": float(facts.get("started_at", "0")),
        "last_at": float(facts.get("last_at", "0")),
        "indexed": [read, size],
        "damaged": int(facts.get("damaged", "0")),
        "groups": {
            "begun": len(groups),
            "ended": sum(ended for *_, ended in groups),
            "failed": sum(bool(error) for *_, error, _ in groups),
            "dull": dull,
        },
        "tasks": len({task for _, task, *_ in groups}) + refused,
        "planned": planned + refused * planned_of,
        "scored": sum(map(len, by_task.values())),
        "reward": _figure(list(by_task.values())),
        "official": _figure(list(officials.values())) if judged else None,
        "official_name": official_words(official_name(config)),
        "differs": differs,
        "pass": _passes(list(by_task.values()), planned_of),
        "criteria": {name: math.fsum(values) / len(values) for name, values in sorted(criteria.items())},
        "labels": dict(labels.most_common()),
        "outcomes": dict(outcomes.most_common()),
        "score_versions": versions,
        "mixed_scores": mixed(versions),
        "asked_again": index.asked_again(),
        "blame": dict(blames.most_common()),
        "totals": totals,
        "trains": (folder / "training").is_dir() and not (folder / "training").is_symlink(),
    }


def run_details(index: RunIndex) -> dict[str, JSON]:
    """Return the settings of a run that were set explicitly, its versions, its training steps and evaluations, and the
    nodes of a cluster."""
    config = index.config()
    sources, chosen = config.get("sources") or {}, dict[str, JSON]()
    parts = {"env": config.get("env") or {}, "openai": (config.get("openai") or [{}])[0]}
    for setting, source in sources.items():
        part, _, key = setting.partition(".")
        if source != "default" and key in parts.get(part, {}) and not is_secret(key):
            chosen[setting] = {"value": parts[part][key], "source": source}
    folder = index.folder
    trained = (folder / "training").is_dir() and not (folder / "training").is_symlink()
    lines: list[dict[str, JSON]] = []
    if trained:
        from palaestra.rollouts.observe.training_steps import read_steps  # imported here, because few runs train

        lines = list(read_steps(folder))
    provenance = config.get("provenance") or {}
    return {"settings": chosen, "provenance": provenance, "training": lines, "nodes": _nodes(index.facts())}


def _nodes(facts: Mapping[str, str]) -> list[dict[str, JSON]]:
    """Return the nodes of a cluster that the run has used, in the order of their hosts."""
    ids = [name.removeprefix(NODE) for name in facts if name.startswith(NODE)]
    found = [
        {"node": node, **json.loads(facts[f"{NODE}{node}"]), "rollouts": int(facts.get(f"{ROLLOUTS_ON}{node}", "0"))}
        for node in ids
    ]
    return sorted(found, key=lambda each: (each["host"], each["node"]))


def _figure(tasks: Sequence[Sequence[float]]) -> dict[str, JSON]:
    values = [value for task in tasks for value in task]
    interval: Interval | None = mean_interval(tasks)
    return {"mean": math.fsum(values) / len(values) if values else None, "interval": interval and list(interval)}


def _passes(tasks: Sequence[Sequence[float]], attempts: int) -> dict[str, JSON]:
    found = pass_metrics(tasks, attempts or max(map(len, tasks), default=0))
    names = [name for name in found if name.startswith("pass@") and f"{name}/low" in found]
    return {
        name: {
            "mean": found[name],
            "interval": [found[f"{name}/low"], found[f"{name}/high"]],
            "tasks": found[f"{name}/tasks"],
        }
        for name in names
    }


def run_state(index: RunIndex) -> str:
    """Return whether a run is running, was killed or runs on another host, or the reason for which it ended. Whether
    its process is alive is checked in each call."""
    if ended := index.facts().get("ended"):
        return ended
    if index.config().get("command") == COMMAND:  # the file is being read
        return RUNNING
    stages = read_stages(index.folder)
    return KILLED if stages is None else {True: RUNNING, False: KILLED, None: ELSEWHERE}[is_alive(stages)]


def _run_kind(config: Mapping[str, JSON]) -> str:
    if config.get("environment") == "batch":
        return "batch"
    if config.get("fork"):
        return "fork"
    return {"evaluate": "eval", "serve": "feed", COMMAND: COMMAND}.get(str(config.get("command")), "run")
