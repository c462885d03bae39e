"""`evaluate`: rolls out what is to be evaluated, and writes the result files.

A class environment's own method decides what that is; of a function environment it is the held-out tasks, or all if
none are held out, each as often as a group is large. An evaluation that was stopped has no metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.io.append_file import writing
from palaestra.core.types import JSON, Outcome
from palaestra.core.user_code import run_hook, settled
from palaestra.envs.adapters.class_adapter import ClassEnvironment
from palaestra.envs.api.base_env import Item
from palaestra.envs.api.function_env import FunctionEnvironment
from palaestra.envs.run import pass_at_k
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.spec import RunContext

Logged = Mapping[str, JSON]


class Evaluation:
    """One evaluation of an environment. `limit` is how many tasks of a function environment are taken, at most."""

    def __init__(
        self,
        environment: Environment,
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
        """What `evaluate_log` was given: task, metrics, samples."""
        self._rolled_out = 0

    async def run(self) -> Totals:
        """Roll out what is to be evaluated; `logged` then has the result. Raises `RunStopped`, `ConfigError`."""
        environment = self.environment
        if isinstance(environment, ClassEnvironment):
            environment.inner._run_items = self.run_items
            await run_hook(ConfigError, self._asked(environment), f"{environment.name} is not evaluated: evaluate")
            self.logged = environment.inner._evaluation
        else:
            assert isinstance(environment, FunctionEnvironment)
            self.logged = await self._tasks_of(environment)
        return self.totals

    async def _asked(self, environment: ClassEnvironment) -> None:
        await settled(environment.inner.evaluate())

    async def run_items(self, items: Sequence[Item], samples: int) -> list[Trajectory]:
        """Roll every item out `samples` times; trajectories are in item order. Several calls may run concurrently."""
        assert isinstance(self.environment, ClassEnvironment)
        first = self._rolled_out
        self._rolled_out += len(items)
        done = await self._roll_out(self.environment.over(items, first), samples, first)
        trajectories = [trajectory for group in done for trajectory in group.trajectories]
        if len(done) < len(items) or any(each.outcome is Outcome.CANCELLED for each in trajectories):
            raise RunStopped("the evaluation was stopped: its metrics would be those of a part")
        return trajectories

    async def _tasks_of(self, environment: FunctionEnvironment) -> Logged:
        attempts = self.run_context.settings.group_size
        done = await self._roll_out(environment.evaluating(), attempts, limit=self.limit)
        if self.gate is not None and not await self.gate():
            raise RunStopped("the evaluation was stopped: its metrics would be those of a part")
        if not done:
            raise ConfigError(
                f"{environment.name} has no task to evaluate; held_out is {environment.config.held_out:g}"
            )
        trajectories = [trajectory for group in done for trajectory in group.trajectories]
        metrics = pass_at_k.figures(trajectories, attempts, tasks=len(done))
        return {"task": environment.name, "metrics": metrics, "samples": list(map(pass_at_k.sample, trajectories))}

    async def _roll_out(
        self, environment: Environment, samples: int, first: int = 0, limit: int | None = None
    ) -> list[Group]:
        """The groups of an environment's tasks, in order."""
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
            limit=limit,
            first=first,
            on_group=keep,
            gate=self.gate,
        )
        await runner.run()
        return sorted(done, key=lambda group: group.number)


def save_evaluation(logged: Logged, folder: Path, model: str) -> None:
    """Write what was logged: `metrics.json` and `samples.jsonl`. Raises `DiskError`."""
    results = {f"atropos|{logged['task']}|0": logged["metrics"], "all": logged["metrics"]}
    document = {"config_general": {"model_name": model, **logged.get("general", {})}, "results": results}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_bytes(msgspec.json.format(encoded(document), indent=2) + b"\n")
        with (folder / "samples.jsonl").open("wb") as lines:
            lines.writelines(encoded(sample) + b"\n" for sample in logged["samples"])


def in_short(metrics: Mapping[str, JSON]) -> str:
    """The pass@k metrics in one line; empty if the evaluation has none."""
    names = [name for name in metrics if name.startswith("pass@") and f"{name}/low" in metrics]
    parts = [
        f"{name} {metrics[name]:.3f} ({metrics[f'{name}/low']:.3f} to {metrics[f'{name}/high']:.3f})" for name in names
    ]
    return f"{', '.join(parts)} over {metrics['tasks']} tasks" if parts else ""
