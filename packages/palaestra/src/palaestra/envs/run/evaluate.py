"""`evaluate`: rolls out the tasks of an evaluation and writes the result files.

A class of the contract chooses the tasks in its own method; `HeldOutEnvironment` rolls out the held-out tasks, or all
tasks if none are held out, `group_size` times each. An evaluation that is stopped has no metrics.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from palaestra.envs.config.build import agent_settings, kit, mcp_servers, network_policy
from palaestra.envs.config.fields import LIMITS, BaseEnvConfig, HeldOutConfig, limit_value
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.observe.intervals import in_words
from palaestra.rollouts.observe.verdicts import OFFICIAL
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.schedule import count, numbered
from palaestra.rollouts.spec import AgentSettings, RunContext
from palaestra.tools.registry.registry import Kit
from palaestra.tools.tool import Tool
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.types import JSON, Outcome, Task, numeric_values

Logged = Mapping[str, JSON]
OnGroup = Callable[[Group], None]
Gate = Callable[[], Awaitable[bool]]
"""A function that is awaited before each task. It may wait. If it returns False, the run ends."""


class EvaluatedEnvironment(Environment):
    """An environment with tasks to evaluate."""

    score_name = "reward"
    """The name under which the score of a rollout is shown."""

    @property
    def official_name(self) -> str:
        """The benchmark's own name for its verdict, such as `resolved`."""
        return OFFICIAL

    @property
    def collects_rollouts(self) -> bool:
        """Whether the environment's own code makes the rollouts. A replay of an agent's turns cannot reproduce them."""
        return False

    chooses_evaluation = False
    """Whether only the environment knows how many tasks it evaluates."""

    def has_evaluation(self, config: BaseEnvConfig) -> bool:
        """Return whether the environment can be evaluated while it trains, on tasks that training does not use."""
        return bool(getattr(config, "held_out", self.chooses_evaluation))

    @property
    def has_nothing_to_evaluate(self) -> bool:
        """Whether an evaluation would do nothing, because the environment does not define one."""
        return False

    async def set_up(self) -> None:
        """Do what the environment postpones until it is asked for its first task. Idempotent."""

    def trainer_takes(self, most_tokens: int | None) -> None:
        """Receive the maximum number of tokens per rollout that the trainer's server accepts; None means no maximum."""

    async def managed(self, command: str, roll_out: Callable[[], Awaitable[Totals]]) -> Totals:
        """Roll out for a command, `process` or `serve`. An environment may run its own code around the rollouts."""
        return await roll_out()

    async def evaluated_tasks(self) -> AsyncIterator[Task] | None:
        """Return the tasks of an evaluation; None if only the environment's own `evaluate` knows them."""
        return None

    async def tasks_total(self) -> int | None:
        """Return the number of all tasks, also of those that were not chosen or that only training uses; None if it
        cannot be known quickly."""
        return None

    def write_files(self, folder: Path) -> Sequence[str]:
        """Write further files, made from the journal, into the folder of a run that has ended or stopped. Returns lines
        for the run's summary. Raises `DiskError`."""
        return ()

    @abstractmethod
    async def evaluate(self, evaluation: Evaluation) -> Logged:
        """Roll out the tasks with `evaluation.roll_out`, and return the task's name, the metrics and the samples.
        Raises `RunStopped` and `ConfigError`."""


class HeldOutEnvironment(EvaluatedEnvironment):
    """An environment that evaluates its held-out tasks, or all tasks if none are held out."""

    def __init__(self, config: HeldOutConfig) -> None:
        self.config = config
        self._settings = agent_settings(config)
        self._policy = network_policy(config.allow_network)
        self._mcp = mcp_servers(config)
        self._evaluating = False
        self._of_others: dict[str, str] = {}
        """The tasks of other commands that were seen, with the reason."""

    @property
    def agent(self) -> AgentSettings:
        return self._settings

    def agent_of(self, task: Task) -> AgentSettings:
        asked = {LIMITS[name]: each["value"] for name, each in self.limits_of(task).items() if each["from"] == "task"}
        return agent_settings(self.config.model_copy(update=asked)) if asked else self._settings

    def limits_of(self, task: Task) -> Mapping[str, JSON]:
        found: dict[str, JSON] = {}
        for name, setting in LIMITS.items():
            asked = getattr(task, name)
            if asked is not None:
                said = setting in self.config.model_fields_set  # by the user of the run, who decides
                value = getattr(self.config, setting) if said else _limit_of(task, self.config, name)
                found[name] = {"value": value, "from": "settings" if said else "task"}
        return found

    async def open(self) -> None:
        if self._mcp is not None:
            await self._mcp.open()

    async def aclose(self) -> None:
        if self._mcp is not None:
            await self._mcp.aclose()

    def _kit(self, toolsets: Sequence[str] | None, own: Iterable[Tool], rng: random.Random) -> Kit:
        return kit(self.config, toolsets, rng, own, self._mcp, self.shared)

    def evaluating(self) -> Self:
        """Return the environment with the tasks of an evaluation in place of those of a run."""
        other = copy(self)
        other._evaluating, other._of_others = True, {}
        return other

    def _serves(self, task_id: str) -> bool:
        """Return whether this command has the task, and remember a task that only others have."""
        if self.config.serves(task_id, evaluating=self._evaluating):
            return True
        self._of_others[task_id] = (
            "it is not held out, so no evaluation plays it" if self._evaluating else "it is held out for evaluations"
        )
        return False

    def chosen_tasks(self) -> AsyncIterator[Task]:
        return self.tasks() if self.choice is None else self.choice.of(self.tasks(), self.name, self._of_others)

    async def evaluated_tasks(self) -> AsyncIterator[Task]:
        return self.evaluating().chosen_tasks()

    async def tasks_total(self) -> int | None:
        found = [await count(each) for each in self._all_tasks()] if self.evaluating().counts_tasks else [None]
        return None if None in found else sum(filter(None, found))

    def _all_tasks(self) -> Iterator[AsyncIterator[Task]]:
        yield self.evaluating().tasks()
        if self.config.held_out:
            yield self.tasks()

    async def evaluate(self, evaluation: Evaluation) -> Logged:
        attempts = evaluation.run_context.settings.group_size
        done = await evaluation.roll_out(self.evaluating(), attempts, limit=evaluation.limit)
        trajectories = [trajectory for group in done for trajectory in group.trajectories]
        stopped = evaluation.gate is not None and not await evaluation.gate()
        if stopped or any(each.outcome is Outcome.CANCELLED for each in trajectories):
            raise RunStopped("the evaluation was stopped, so its metrics would cover only part of it")
        if not done:
            raise ConfigError(f"{self.name} has no task to evaluate; held_out is {self.config.held_out:g}")
        metrics = self.metrics(trajectories, attempts, len(done))
        return {"task": self.name, "metrics": metrics, "samples": list(map(self.sample, trajectories))}

    def metrics(self, done: Sequence[Trajectory], attempts: int, tasks: int) -> Mapping[str, JSON]:
        """Return the metrics of an evaluation of so many tasks."""
        from palaestra.envs.run.pass_at_k import figures  # imported here, because most runs are no evaluations

        return figures(done, attempts, tasks=tasks)

    def sample(self, trajectory: Trajectory) -> Mapping[str, JSON]:
        """Return the sample of one rollout."""
        from palaestra.envs.run import pass_at_k  # imported here, as above

        return pass_at_k.sample(trajectory)


def _limit_of(task: Task, config: BaseEnvConfig, name: str) -> JSON:
    try:
        return limit_value(config, name, getattr(task, name))
    except ConfigError as error:
        raise TaskError(f"task {task.id}: {error}") from None


class Evaluation:
    """One evaluation of an environment. `limit` is the maximum number of tasks."""

    def __init__(
        self,
        environment: EvaluatedEnvironment,
        run: RunContext,
        concurrency: int,
        on_group: Callable[[Group], None],
        gate: Callable[[], Awaitable[bool]] | None = None,
        limit: int | None = None,
    ) -> None:
        self.environment = environment
        self.run_context = run
        self.concurrency = concurrency
        self.on_group = on_group
        self.gate = gate
        self.limit = limit
        self.totals = Totals()
        self.logged: Logged = {}
        """The result: the task's name, the metrics and the samples; empty if the environment logged none."""

    async def run(self) -> Totals:
        """Roll out the tasks; `logged` then has the result. Raises `RunStopped` and `ConfigError`."""
        self.logged = await self.environment.evaluate(self)
        return self.totals

    async def roll_out(
        self, environment: Environment, samples: int, first: int = 0, limit: int | None = None
    ) -> list[Group]:
        done: list[Group] = []

        def keep(group: Group) -> None:
            done.append(group)
            self.totals.add(group)
            self.on_group(group)

        settings = replace(self.run_context.settings, group_size=samples)
        runner = Runner(
            environment,
            replace(self.run_context, settings=settings),
            concurrency=self.concurrency,
            on_group=keep,
            gate=self.gate,
            source=numbered(environment.chosen_tasks(), first, limit),
        )
        await runner.run()
        return sorted(done, key=lambda group: group.number)


def save_evaluation(logged: Logged, folder: Path, model: str) -> None:
    results = {f"atropos|{logged['task']}|0": logged["metrics"], "all": logged["metrics"]}
    document = {"config_general": {"model_name": model, **logged.get("general", {})}, "results": results}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / "samples.jsonl") as lines:
            lines.writelines(encoded(sample) + b"\n" for sample in logged["samples"])
        with replaced(folder / "metrics.json") as file:  # last, because it says that the evaluation is complete
            file.write(msgspec.json.format(encoded(document), indent=2) + b"\n")


def in_short(metrics: Mapping[str, JSON]) -> str:
    """Return one line with the pass@k metrics, each with the tasks that it covers, or, for an evaluation without
    pass@k, with the first `_SHOWN` of its own metrics. A second line warns of a pass@k that leaves out tasks which the
    other metrics cover."""
    metrics = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    names = [name for name in metrics if name.startswith("pass@") and f"{name}/low" in metrics]
    if not names:
        return shortened(numeric_values(metrics))
    from palaestra.envs.run.pass_at_k import TASKS_CHOSEN, TASKS_TOTAL, chosen_of  # imported here, as above

    official = [f"{_OFFICIAL}{name}" for name in names if f"{_OFFICIAL}{name}/low" in metrics]
    # The number of tasks here is the whole set, so that a reader sees a denominator that is smaller.
    refused, tasks = int(metrics.get("tasks_left_out", 0)), int(metrics["tasks"])
    tried = int(metrics.get(f"{names[0]}/tasks", tasks))
    parts, partial = list[str](), list[str]()
    for name in (*names, *official):
        shown, covered = name.replace("/", " "), int(metrics.get(f"{name}/tasks", tried))
        text = f"{shown} {metrics[name]:.3f}{in_words((metrics[f'{name}/low'], metrics[f'{name}/high']))}"
        if covered < tried:
            text += f" over only {covered} of {plural(tasks + refused, 'task')}"
            partial.append(f"{shown} leaves out {plural(tried - covered, 'task')}")
        parts.append(text)
    why = [f"{count} {what}" for count, what in ((refused, "refused"), (tasks - tried, "without a score")) if count]
    count = plural(tried, "task")
    if why:
        count = f"{tried} of {plural(tasks + refused, 'task')} ({', '.join(why)})"
    rollouts = (
        f", {metrics['scored']:.0f} of {plural(round(metrics['planned']), 'rollout')} scored"
        if "planned" in metrics
        else ""
    )
    count += chosen_of(bool(metrics.get(TASKS_CHOSEN)), metrics.get(TASKS_TOTAL), tasks + refused)
    line = f"{', '.join(parts)}{', the others' if partial else ''} over {count}{rollouts}"
    if partial:
        line += f"\n  WARNING: {', '.join(partial)} with too few scored rollouts, and may be far too high or too low"
    return line


def shortened(metrics: Mapping[str, float]) -> str:
    """Return the first `_SHOWN` metrics as text."""
    own = [f"{name} {value:.4g}" for name, value in metrics.items()]
    return ", ".join(own[:_SHOWN]) + (f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else "")


_SHOWN = 10
"""The maximum number of metrics in one line."""

_OFFICIAL = f"{OFFICIAL}/"
"""The beginning of the names of metrics in which the official verdict counts in place of the reward."""
