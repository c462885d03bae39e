"""One command of one environment (process, evaluate or serve) from its first group to its last line.

Not for assembling what it needs (`running`). Invariant: however it ends, what was finished is kept and the output is
made from it; SIGTERM and the stops of `rollouts/limits.py` end it between groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from palaestra.core.config import DEFAULT
from palaestra.core.errors import ConfigError
from palaestra.envs.adapters.class_adapter import ClassEnvironment, numbers
from palaestra.envs.config.build import prices
from palaestra.envs.config.command_line import Parsed
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.evaluate import Evaluation, in_short, save_evaluation
from palaestra.envs.run.feed_trainer import Gate, OnGroup, Serving, serve_limit
from palaestra.envs.run.metrics_endpoint import serving_metrics
from palaestra.envs.run.report_metrics import Reporting
from palaestra.envs.run.run_folder import Output
from palaestra.inference.config import APIServerConfig
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.group import Services
from palaestra.rollouts.limits import INTERRUPTED_BY, RunStopped, Stops
from palaestra.rollouts.observe.console import Observer, Several, make_progress
from palaestra.rollouts.observe.in_flight import InFlight
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.observe.tracing.spans import NO_TRACING, Tracing
from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.schedule import read_timings
from palaestra.rollouts.shared_setup import Foundations
from palaestra.sandbox.pool import SlotPool
from palaestra.sandbox.snapshots.cache import Prepared

RunLine = Parsed[BaseEnvConfig, APIServerConfig]


def make_stops(config: BaseEnvConfig, output: Output, resumed: bool) -> Stops:
    """The stops of a run. What an earlier part of it cost counts; how its rollouts ended does not."""
    spent, paid = 0.0, set()
    if resumed:
        reader = RunReader(output.folder.journal)
        reader.read()
        spent, paid = reader.settled.spent(prices(config)), reader.paid  # what is in flight is told when it is taken up
    return Stops(
        max_infra_rate=config.max_infra_rate,
        max_cost=config.max_cost,
        prices=prices(config),
        group_size=config.group_size,
        spent=spent,
        paid=paid,
    )


async def recorded(batch: Batch, stream: TextIO) -> Totals:
    """Run the batch with its progress on `stream`, and finish the output however it ends."""
    reason, stops = "failed", batch.stops
    try:
        with make_progress(stream) as progress:
            totals = await batch.run(progress)
        reason = stops.reason or "done"
        return totals
    except asyncio.CancelledError:
        reason = INTERRUPTED_BY
        raise
    finally:
        figures: dict[str, float] = {}
        try:
            figures = batch.output.close(reason)
        finally:
            if figures:
                _say_where(batch.output, figures, reason, stream)
            if reason != "done" or not figures:
                why = f"{stops.reason}: {stops.message}" if stops.reason else "the run is not at its end"
                stream.write(f"{why}; go on with --resume {batch.output.folder.path}\n")
            batch.reporting.tell(say_on(stream))
            await batch.reporting.finish(batch.environment, figures)


def say_on(stream: TextIO) -> Callable[[str], None]:
    """Say a line where no progress is shown."""

    def say(text: str) -> None:
        stream.write(f"{text}\n")

    return say


@dataclass(slots=True)
class Batch:
    """One command of one environment."""

    environment: Environment
    parsed: RunLine
    engine: ServerGroup
    pool: SlotPool
    output: Output
    stops: Stops
    world: RunWorld
    reporting: Reporting
    tracing: Tracing = NO_TRACING
    prepared: Prepared | None = None
    begun: bool = False
    """Whether a group may be in flight."""

    async def run(self, progress: Observer) -> Totals:
        """Run the command's groups, for as long as the stops let it. Cancelling it cancels what is in flight."""
        inflight = InFlight()
        self.stops.tell(progress.note)
        self.reporting.tell(progress.note)
        async with self._watched(inflight, progress):
            observer = Several(progress, inflight, self.stops, self.reporting)
            running = asyncio.create_task(self._run(observer), name="run")
            with self._draining(running), self.reporting.going_on(self.environment):
                try:
                    return await running
                except (asyncio.CancelledError, RunStopped):
                    current = asyncio.current_task()
                    if not self.stops.reason or (current is not None and current.cancelling()):
                        raise
                    return Totals()

    @asynccontextmanager
    async def _watched(self, inflight: InFlight, progress: Observer) -> AsyncIterator[None]:
        """Let other processes see how the run stands."""
        config = self.parsed.env_config
        async with inflight.written(self.output.folder.path):
            if config.metrics_port is None:
                yield
                return
            reader = RunReader(self.output.folder.journal)
            async with serving_metrics(reader, inflight, config.metrics_host, config.metrics_port) as url:
                progress.note(f"metrics at {url}")
                yield

    @contextmanager
    def _draining(self, running: asyncio.Task[Totals]) -> Iterator[None]:
        """SIGTERM lets what is in flight finish, for a while; a second one does not, nor one before anything is."""
        loop, patience = asyncio.get_running_loop(), self.parsed.env_config.drain_s

        def drain() -> None:
            if self.stops.reason == INTERRUPTED_BY:
                running.cancel()
            else:
                self.stops.drain()
                loop.call_later(patience if self.begun else 0.0, running.cancel)

        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # only a main thread has signals
            loop.add_signal_handler(signal.SIGTERM, drain)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGTERM)

    async def _run(self, observer: Observer) -> Totals:
        with self.tracing.run():
            return await self._traced(observer)

    async def _traced(self, observer: Observer) -> Totals:
        config, environment, command = self.parsed.env_config, self.environment, self.parsed.command
        limit = config.total_steps if config.total_steps >= 0 else None
        if command == "serve":
            limit = serve_limit(config.total_steps, self.parsed.sources.get("env.total_steps", DEFAULT))
        elif command == "evaluate" and isinstance(environment, ClassEnvironment):
            limit = None  # the class says how much there is
        observer.run_started(limit, config.group_size)
        services = self._services(observer)
        workers = concurrency(config)
        try:
            if command == "evaluate":
                totals = await self._evaluate(services, workers, limit, observer)
            else:
                finished = self.output.finished
                ended = finished.ended if finished is not None else {}

                async def roll_out(on_group: OnGroup, gate: Gate | None = None) -> Totals:
                    self.begun = True

                    async def both() -> bool:
                        return await self.stops.gate() and (gate is None or await self.stops.unless_stopped(gate()))

                    return await Runner(
                        environment,
                        services,
                        concurrency=workers,
                        limit=limit,
                        on_group=on_group,
                        ended=ended,
                        gate=both,
                    ).run()

                if command == "serve":
                    totals = await Serving(config, self.output, observer.note).run(roll_out, self._keep)
                else:
                    totals = await roll_out(self._keep)
            self.output.own.update(await self.reporting.own(environment))
            return totals
        finally:
            observer.run_finished()
            await services.foundations.aclose()

    async def _evaluate(self, services: Services, workers: int, limit: int | None, observer: Observer) -> Totals:
        """Evaluate, and save what was logged: where the settings say, else in the run's own folder."""
        self.begun = True
        evaluation = Evaluation(self.environment, services, workers, self._keep, self.stops.gate, limit)
        totals = await evaluation.run()
        if evaluation.logged:
            asked = self.parsed.env_config.data_dir_to_save_evals
            folder = Path(asked) if asked else self.output.folder.path / "evaluation"
            save_evaluation(evaluation.logged, folder, self.parsed.server_configs[0].model_name)
            found = numbers(evaluation.logged["metrics"])
            self.output.own.update({f"eval/{name.removeprefix('eval/')}": value for name, value in found.items()})
            observer.note(f"evaluation in {folder}: {in_short(evaluation.logged['metrics'])}".removesuffix(": "))
        else:
            observer.note(f"{self.environment.name} logged no figures: its evaluate called no evaluate_log")
        return totals

    def _services(self, observer: Observer) -> Services:
        config = self.parsed.env_config
        slots = AdmittedSlots(self.pool, self.pool.total_slots)
        if self.prepared is not None:
            self.prepared.trouble = _once(observer)
        return Services(
            engine=self.engine,
            slots=slots,
            foundations=Foundations(slots),
            prepared=self.prepared,
            journal=self.output.journal,
            observer=observer,
            seed=config.seed,
            group_size=config.group_size,
            infra_retries=config.infra_retries,
            idle_limits=config.idle_limits,
            whole_groups=config.short_groups == "whole",
            world=self.world,
            tracing=self.tracing,
            timings=self._timings(),
            stops=self.stops,
            finished=self.output.finished.rollouts if self.output.finished is not None else {},
            cut_off=self.output.finished.cut_off if self.output.finished is not None else {},
            asked=self.output.finished.asked if self.output.finished is not None else {},
            tasks=self.output.finished.tasks if self.output.finished is not None else {},
        )

    def _timings(self) -> Mapping[str, float]:
        """How long tasks took: in the run that was named, else in the parts of this one that are over."""
        named = self.parsed.env_config.timings_from
        if named is not None:
            return read_timings(Path(named))
        return {} if self.output.finished is None else read_timings(self.output.folder.journal)

    def _keep(self, group: Group) -> None:
        if self.parsed.env_config.ensure_scores_are_not_same and group.same_scores:
            self.output.groups.skip(group.number)
        else:
            self.output.groups.add(group)


def concurrency(config: BaseEnvConfig) -> int:
    """Groups in flight: as asked, or enough to keep this machine's cores busy."""
    if config.max_num_workers > 0:
        return config.max_num_workers
    return max(2, 2 * (os.cpu_count() or 1))


def _once(observer: Observer) -> Callable[[ConfigError], None]:
    """Say what keeps workspaces from being kept, the first time."""
    said: list[ConfigError] = []

    def say(trouble: ConfigError) -> None:
        if not said:
            observer.note(f"a prepared workspace is not kept for other runs: {trouble}")
        said.append(trouble)

    return say


def _say_where(output: Output, figures: dict[str, float], reason: str, stream: TextIO) -> None:
    names = ("groups", "groups_failed", "rollouts", "scored")
    groups, failed, rollouts, scored = (int(figures.get(name, 0)) for name in names)
    mean = figures.get("reward/mean")
    reward = "no reward" if mean is None else f"mean reward {mean:.3f}"
    if mean is not None:
        reward += _within(figures, "reward/mean")
    if mean is not None and scored < rollouts:
        name = "reward/mean_with_unscored"
        reward += f", {figures[name]:.3f}{_within(figures, name)} with the unscored as 0"
    resumed = f"  resumed {output.resumed}\n" if output.resumed else ""
    found, prepared = (int(figures.get(name, 0)) for name in ("groups_from_store", "groups_prepared"))
    store = f"  {found} of {prepared} workspaces were prepared already on this machine\n" if found else ""
    stream.write(
        f"{reason}: {groups} groups ({failed} failed), {rollouts} rollouts ({rollouts - scored} unscored), {reward}\n"
        f"{resumed}{store}  groups  {output.groups.path}\n  report  {output.report}\n  run     {output.folder.path}\n"
    )


def _within(figures: dict[str, float], name: str) -> str:
    """The interval of a figure, where it has one."""
    return f" ({figures[f'{name}/low']:.3f} to {figures[f'{name}/high']:.3f})" if f"{name}/low" in figures else ""
