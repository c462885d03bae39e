"""Counterfactual runs in the viewer: how often a rollout succeeds from each of its turns, and where a fork comes from.

`palaestra fork` continues a rollout from one of its turns in a new run. The viewer finds these runs among those that it
shows, by the run's id, the rollout and the turn that their settings name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from palaestra.rollouts.observe.intervals import Cluster, share_interval
from palaestra.rollouts.observe.metrics import PASSED
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_view.run_index import RunIndex
from palaestra_view.runs import OpenRuns


def forks(runs: OpenRuns, name: str, rollout_id: str) -> dict[str, JSON]:
    """Return what the page of a rollout shows about counterfactual runs.

    `turns` has an entry for each turn from which the rollout was continued: the numbers of scored rollouts and of those
    with the full reward (`passed`), their share (`rate`) with its `interval`, and the same numbers for each of the
    `runs`. `origin` is the name of the run that this run continues: None if it continues none, or one that the viewer
    does not show."""
    run_id = runs[name].facts().get("run_id", "")
    turns: defaultdict[int, list[tuple[str, int, list[float]]]] = defaultdict(list)
    for other, index in _every(runs):
        fork = fork_of(index)
        if fork is not None and fork["run_id"] == run_id and fork["rollout_id"] == rollout_id:
            rewards = [reward for _, _, reward, *_ in index.scores()]
            scored = [reward for reward in rewards if reward is not None]
            turns[fork["turn"]].append((other, len(rewards), scored))
    return {
        "turns": [{"turn": turn, **_odds(found)} for turn, found in sorted(turns.items())],
        "origin": origin_of(runs, name),
    }


def fork_of(index: RunIndex) -> dict[str, JSON] | None:
    """Return the run id, the rollout and the turn that a counterfactual run continues; None for another run."""
    found = index.config().get("fork")
    if not isinstance(found, dict):
        return None
    run_id, rollout_id, turn = (found.get(name) for name in ("run_id", "rollout_id", "turn"))
    fits = isinstance(run_id, str) and isinstance(rollout_id, str) and type(turn) is int
    return {"run_id": run_id, "rollout_id": rollout_id, "turn": turn} if fits else None


def origin_of(runs: OpenRuns, name: str) -> str | None:
    """Return the name of the run that a counterfactual run continues, if the viewer shows that run."""
    fork = fork_of(runs[name])
    if fork is None:
        return None
    return next((each for each, index in _every(runs) if index.facts().get("run_id") == fork["run_id"]), None)


def _every(runs: OpenRuns) -> list[tuple[str, RunIndex]]:
    found = []
    for name in runs:
        try:
            found.append((name, runs[name]))
        except ConfigError:  # the run was removed meanwhile
            continue
    return found


def _odds(found: Sequence[tuple[str, int, list[float]]]) -> dict[str, JSON]:
    every = [reward for _, _, scored in found for reward in scored]
    passed = sum(reward >= PASSED for reward in every)
    interval = share_interval(Cluster(reward >= PASSED, 1) for reward in every)
    each = [
        {"name": name, "rollouts": rollouts, "scored": len(scored), "passed": sum(one >= PASSED for one in scored)}
        for name, rollouts, scored in found
    ]
    rate = passed / len(every) if every else None
    return {"scored": len(every), "passed": passed, "rate": rate, "interval": interval and [*interval], "runs": each}
