"""The metrics of an evaluation: rates, pass@k and their intervals, overall and by label. Unscored rollouts are counted,
but neither as passed nor as failed. The intervals are those of `observe/intervals.py`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.rollouts.observe.intervals import Cluster, mean_interval, pass_interval, share_interval, with_interval
from palaestra.rollouts.records import Trajectory

PASSED = 1.0


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, if `passed` of `n >= k` did: the unbiased estimate of Chen
    et al. 2021 (arXiv:2107.03374), eq. 1."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {passed} of {n}")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def figures(
    done: Sequence[Trajectory], attempts: int, *, tasks: int, labels: Mapping[str, Collection[str]] | None = None
) -> dict[str, JSON]:
    """The metrics of an evaluation with `attempts` at each of `tasks` tasks: `planned` rollouts, of which `attempts`
    were run and `scored` have a reward. pass@k is over the tasks with k scored rollouts, `pass@k/tasks`. `labels` are
    those of each task, by its id; metrics of the tasks with a label are below `LABEL/`."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in done:
        by_task[trajectory.task_id].append(trajectory)
    found: dict[str, JSON] = {
        "tasks": tasks,
        "planned": tasks * attempts,
        "attempts": len(done),
        "unscored": sum(not trajectory.scored for trajectory in done),
        "tasks_not_run": tasks - len(by_task),
        **_passes(list(by_task.values()), attempts),
    }
    blames = Counter(trajectory.blame.value for trajectory in done if trajectory.blame and not trajectory.scored)
    found |= {f"unscored/{blame}": count for blame, count in sorted(blames.items())}
    known = labels or {}
    for label in sorted({label for name in by_task for label in known.get(name, ())}):
        chosen = [group for name, group in by_task.items() if label in known.get(name, ())]
        own = {"tasks": len(chosen), **_passes(chosen, attempts)}
        found |= {f"{label}/{name}": value for name, value in own.items()}
    return found


def _passes(groups: Sequence[Sequence[Trajectory]], attempts: int) -> dict[str, JSON]:
    """`pass_rate`, `mean_reward`, and `pass@k` for k of 1, 2, 4 … up to the attempts."""
    rewards = [[each.reward for each in group if each.reward is not None] for group in groups]
    counts = [(len(scored), sum(reward >= PASSED for reward in scored)) for scored in rewards]
    total, passed = sum(n for n, _ in counts), sum(each for _, each in counts)
    found: dict[str, JSON] = {"scored": total}
    if total:
        shares = share_interval([Cluster(each, n) for n, each in counts])
        found |= with_interval("pass_rate", passed / total, shares)
        found |= with_interval("mean_reward", sum(map(sum, rewards)) / total, mean_interval(rewards))
    for k in sorted({attempts, *(1 << power for power in range(attempts.bit_length()) if 1 << power <= attempts)}):
        tried = [(n, each) for n, each in counts if n >= k]
        if tried:
            rates = [pass_at_k(n, each, k) for n, each in tried]
            interval = pass_interval(rates, sum(n for n, _ in tried) / k)
            found |= with_interval(f"pass@{k}", sum(rates) / len(rates), interval)
            found[f"pass@{k}/tasks"] = len(rates)
    return found


def sample(trajectory: Trajectory) -> dict[str, JSON]:
    return {
        "task_id": trajectory.task_id,
        "index": trajectory.index,
        "passed": None if trajectory.reward is None else trajectory.reward >= PASSED,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome.value,
        "turns": len(trajectory.turns),
        "error": trajectory.error,
        "messages": trajectory.messages,
    }
