"""Computes the metrics of an evaluation: pass rate, mean reward, pass@k and their intervals, overall and by label.
Unscored rollouts are counted, but neither as passed nor as failed. The intervals come from `observe/intervals.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from palaestra.envs.config.fields import UNSAID
from palaestra.rollouts.observe.metrics import PASSED, pass_metrics
from palaestra.rollouts.observe.verdicts import OFFICIAL
from palaestra.rollouts.records import Trajectory, verdict_fields
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.types import JSON

TASKS_CHOSEN, TASKS_TOTAL = "tasks_chosen", "tasks_total"
"""The metrics of an evaluation of some of the environment's tasks: 1, and the number of all tasks if it is known."""


def figures(
    done: Sequence[Trajectory], attempts: int, *, tasks: int, labels: Mapping[str, Collection[str]] | None = None
) -> dict[str, JSON]:
    """Return the metrics of an evaluation of `tasks` tasks with `attempts` rollouts each. The metric `planned` is the
    number of all these rollouts, `attempts` the number of those that were run, and `scored` the number of those with a
    reward. pass@k covers the tasks with at least k scored rollouts; their number is `pass@k/tasks`. `labels` maps a
    task's id to its labels; the metrics of the tasks with a label begin with `LABEL/`.

    If there are official verdicts, the metrics that begin with `official/` count them in place of the rewards.
    `labels/NAME` counts the rollouts that the check gave a label."""
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in done:
        by_task[trajectory.task_id].append(trajectory)
    found: dict[str, JSON] = {
        "tasks": tasks,
        "planned": tasks * attempts,
        "attempts": len(done),
        "unscored": sum(not trajectory.scored for trajectory in done),
        "tasks_not_run": tasks - len(by_task),
        **pass_metrics(_rewards(by_task.values()), attempts),
    }
    if any(trajectory.official is not None for trajectory in done):
        # `scored` is left out, because a rollout without an official verdict still has the same reward.
        official = pass_metrics(_rewards(by_task.values(), official=True), attempts)
        found |= {f"{OFFICIAL}/{name}": value for name, value in official.items() if name != "scored"}
    # A set per rollout: a check may give the same label twice, with different evidence.
    signs = Counter(name for trajectory in done for name in {label.name for label in trajectory.labels})
    found |= {f"labels/{name}": count for name, count in sorted(signs.items())}
    blames = Counter(trajectory.blame.value for trajectory in done if trajectory.blame and not trajectory.scored)
    found |= {f"unscored/{blame}": count for blame, count in sorted(blames.items())}
    return found | dict(_by_label(by_task, labels or {}, attempts))


def _by_label(
    by_task: Mapping[str, Sequence[Trajectory]], labels: Mapping[str, Collection[str]], attempts: int
) -> Iterator[tuple[str, JSON]]:
    for label in sorted({label for name in by_task for label in labels.get(name, ())}):
        chosen = [group for name, group in by_task.items() if label in labels.get(name, ())]
        tasks = sum(label in each for each in labels.values())  # those that did not run, too
        for name, value in {"tasks": tasks, **pass_metrics(_rewards(chosen), attempts)}.items():
            yield f"{label}/{name}", value


def _rewards(groups: Iterable[Sequence[Trajectory]], *, official: bool = False) -> list[list[float]]:
    rewards = ([each.official_reward if official else each.reward for each in group] for group in groups)
    return [[reward for reward in group if reward is not None] for group in rewards]


def sample(trajectory: Trajectory) -> dict[str, JSON]:
    return {
        "task_id": trajectory.task_id,
        "index": trajectory.index,
        "passed": None if trajectory.reward is None else trajectory.reward >= PASSED,
        "reward": trajectory.reward,
        **verdict_fields(trajectory),
        "outcome": trajectory.outcome.value,
        "turns": len(trajectory.turns),
        "error": trajectory.error,
        "messages": trajectory.messages,
    }


def chooses(settings: Mapping[str, JSON], tasks: int) -> bool:
    """Return whether the `tasks` tasks of a run were chosen by its recorded settings, so that there may be more."""
    env, sources = settings.get("env") or {}, settings.get("sources") or {}
    limited = 0 < (env.get("total_steps") or 0) <= tasks and sources.get("env.total_steps", DEFAULT) not in UNSAID
    return bool(env.get("only_tasks") or env.get("held_out") or limited)


def chosen_of(chosen: bool, total: float | None, tasks: int, unknown: str = "an unknown number") -> str:
    """Return the text ` chosen of N` for a run of `tasks` tasks that were chosen of a `total`, which may be `unknown`
    (None); empty if the run has all of the environment's tasks."""
    if not chosen or (total is not None and total <= tasks):
        return ""
    return f" chosen of {unknown if total is None else int(total)}"
