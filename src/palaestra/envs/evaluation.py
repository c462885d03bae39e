"""`evaluate` of a class environment: its own method decides what to roll out, the one runner does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from palaestra.envs.base_env import BaseEnv, Item
from palaestra.envs.class_environment import ClassEnvironment
from palaestra.rollouts.group import Services
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.stops import RunStopped
from palaestra.rollouts.trajectory import Group, Trajectory


class Evaluation:
    """One call of a class environment's `evaluate`."""

    def __init__(
        self,
        environment: ClassEnvironment,
        services: Services,
        concurrency: int,
        on_group: Callable[[Group], None],
        gate: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.environment = environment
        self.services = services
        self.concurrency = concurrency
        self.on_group = on_group
        self.gate = gate
        self.totals = Totals()
        self._rolled_out = 0

    async def run(self) -> Totals:
        """Call it, with `evaluate_items` at its disposal, and save what it logged."""
        inner = self.environment.inner
        inner._run_items = self.run_items
        await inner.evaluate()
        save_evaluation(inner)
        return self.totals

    async def run_items(self, items: Sequence[Item], samples: int) -> list[Trajectory]:
        """Roll every item out `samples` times; the trajectories come in item order."""
        done: list[Group] = []

        def keep(group: Group) -> None:
            done.append(group)
            self.totals.add(group)
            self.on_group(group)

        runner = Runner(
            self.environment.over(items, self._rolled_out),
            replace(self.services, group_size=samples),
            concurrency=self.concurrency,
            first=self._rolled_out,
            on_group=keep,
            gate=self.gate,
        )
        self._rolled_out += len(items)
        await runner.run()
        if len(done) < len(items):
            raise RunStopped("the evaluation was stopped: its figures would be those of a part")
        done.sort(key=lambda group: group.number)
        return [trajectory for group in done for trajectory in group.trajectories]


def save_evaluation(inner: BaseEnv) -> None:
    """Write what `evaluate_log` was given: `metrics.json` and `samples.jsonl` in `data_dir_to_save_evals`."""
    logged, folder = inner._evaluation, inner.config.data_dir_to_save_evals
    if not logged or folder is None:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    results = {f"atropos|{logged['task']}|0": logged["metrics"], "all": logged["metrics"]}
    document = {"config_general": {"model_name": inner.server_configs[0].model_name}, "results": results}
    (path / "metrics.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    with (path / "samples.jsonl").open("wb") as lines:
        for sample in logged["samples"]:
            lines.write(msgspec.json.encode(sample) + b"\n")
