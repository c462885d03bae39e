"""What an evaluation of terminal tasks comes to: pass@k with intervals, overall and per category. Does no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from palaestra.core.types import JSON, Outcome
from palaestra.envs.estimates import pass_at_k
from palaestra.envs.terminal_bench.tasks import TerminalTask
from palaestra.rollouts.intervals import rate_interval
from palaestra.rollouts.trajectory import Trajectory

PASSED = 1.0


def evaluation(
    tasks: Sequence[TerminalTask], done: Sequence[Trajectory], attempts: int
) -> tuple[dict[str, JSON], list[dict[str, JSON]]]:
    """Metrics, and one sample per attempt. Unscored attempts are counted and count as neither passed nor failed."""
    categories = {task.name: task.category for task in tasks}
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in done:
        by_task[trajectory.task_id].append(trajectory)
    metrics: dict[str, JSON] = {
        "tasks": len(tasks),
        "attempts": len(done),
        "unscored": sum(not trajectory.scored for trajectory in done),
        "tasks_not_run": len(tasks) - len(by_task),
        **_passes(by_task.values(), attempts),
    }
    blames = Counter(trajectory.blame.value for trajectory in done if trajectory.blame and not trajectory.scored)
    metrics |= {f"unscored/{blame}": count for blame, count in sorted(blames.items())}
    for category in sorted({categories[name] for name in by_task}):
        chosen = [found for name, found in by_task.items() if categories[name] == category]
        own = {"tasks": len(chosen), **_passes(chosen, attempts)}
        metrics |= {f"category/{category}/{name}": value for name, value in own.items()}
    return metrics, [_sample(trajectory, categories) for trajectory in done]


def _passes(groups: Iterable[Sequence[Trajectory]], attempts: int) -> dict[str, JSON]:
    """`pass_rate`, `pass@k` for k of 1, 2, 4 … up to the attempts, each with its 95 % interval."""
    counts = []
    rewards: list[float] = []
    for group in groups:
        scored = [trajectory.reward for trajectory in group if trajectory.reward is not None]
        rewards += scored
        counts.append((len(scored), sum(reward >= PASSED for reward in scored)))
    found: dict[str, JSON] = {}
    if rewards:
        found["pass_rate"] = sum(reward >= PASSED for reward in rewards) / len(rewards)
        found["mean_reward"] = sum(rewards) / len(rewards)
    for k in sorted({attempts, *(1 << power for power in range(attempts.bit_length()) if 1 << power <= attempts)}):
        rates = [pass_at_k(n, passed, k) for n, passed in counts if n >= k]
        if rates:
            rate = sum(rates) / len(rates)
            low, high = rate_interval(sum(rates), len(rates))
            found |= {f"pass@{k}": rate, f"pass@{k}/low": low, f"pass@{k}/high": high, f"pass@{k}/tasks": len(rates)}
    return found


def _sample(trajectory: Trajectory, categories: Mapping[str, str]) -> dict[str, JSON]:
    """One attempt, by the names that existing readers of this environment's samples use."""
    return {
        "task_name": trajectory.task_id,
        "category": categories.get(trajectory.task_id, ""),
        "attempt": trajectory.index,
        "passed": None if trajectory.reward is None else trajectory.reward >= PASSED,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome.value,
        "turns_used": len(trajectory.turns),
        "finished_naturally": trajectory.outcome is Outcome.NATURAL,
        "error": trajectory.error,
        "messages": trajectory.messages,
    }
