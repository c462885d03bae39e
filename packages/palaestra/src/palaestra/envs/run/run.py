"""Runs an environment. The function `run` assembles the model client, the slots and the journal for every form of
environment.

`command.py` calls `run` for command lines, `library.py` for Python programs. However a run ends, its finished work is
kept, and its output is made from that work.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from palaestra.envs.config.build import (
    make_pool,
    make_prepared,
    make_recorded_tools,
    prices,
    server_settings,
    unshared_because,
)
from palaestra.envs.config.fields import UNSAID, BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.form import Form
from palaestra.envs.run.evaluate import (
    EvaluatedEnvironment,
    Evaluation,
    Gate,
    OnGroup,
    in_short,
    save_evaluation,
    shortened,
)
from palaestra.envs.run.report_metrics import Reporting, asked_for, make_reporting
from palaestra.envs.run.run_folder import RunLine, RunOutput, open_output
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import GroupsPlanned, Subscriber
from palaestra.rollouts.grading.reward import check_strict_labels
from palaestra.rollouts.journal.journal import EventStream
from palaestra.rollouts.limits import INTERRUPTED_BY, RunLimits, RunStopped
from palaestra.rollouts.observe.console import Console, duration, make_console
from palaestra.rollouts.observe.intervals import in_words, interval_of
from palaestra.rollouts.observe.score_versions import REMEDY, mixed
from palaestra.rollouts.observe.status import RunReader, filtered_words
from palaestra.rollouts.observe.status_file import StatusFile
from palaestra.rollouts.observe.verdicts import labels_line, official_words
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.schedule import read_timings
from palaestra.rollouts.spec import Middleware, RecordedTools, RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.core.config import DEFAULT
from palaestra_slots.core.errors import ConfigError, EngineUnavailable
from palaestra_slots.core.exits import DONE, TOO_MANY_FAILURES, plural
from palaestra_slots.core.types import JSON, Blame, Task, numeric_values
from palaestra_slots.sandbox.admission import SlotLimit
from palaestra_slots.sandbox.backends.registry import uses_this_machine
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Rung, SlotSource
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup

if TYPE_CHECKING:
    from palaestra.envs.run.elsewhere import Cluster
    from palaestra.envs.run.feed import Feed
    from palaestra.envs.run.periodic_evaluation import PeriodicEvaluation
    from palaestra.rollouts.counterfactual import Continuation, Counterfactual
    from palaestra.rollouts.observe.tracing.otel import Spans
    from palaestra.rollouts.program_agent import ProgramAgent


logger = logging.getLogger(__name__)

Drive: TypeAlias = Callable[[Runner], Awaitable[Totals]]
ServeNodes: TypeAlias = Callable[[], AbstractAsyncContextManager[Sequence[APIServerConfig]]]

_COUNTS = ("groups", "groups_failed", "rollouts", "rollouts_planned", "scored")


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a run and the paths of its files."""

    exit_code: int
    totals: Totals
    folder: Path
    journal: Path
    groups: Path
    report: Path
    reason: str
    """`done`, `failed`, or why the run stopped."""
    exit_reason: str = ""
    """Why the exit code is not 0."""

    def to_json(self) -> dict[str, JSON]:
        """Return the result as `--json` prints it: how the run ended, its files, and its metrics."""
        from palaestra.rollouts.finished_run import Run  # imported here, because most runs print only their path

        metrics = Run(self.folder).metrics
        return {
            "run": str(self.folder),
            "id": self.folder.name,
            "state": self.reason,
            "exit_code": self.exit_code,
            **({"exit_reason": self.exit_reason} if self.exit_reason else {}),
            **{name: int(metrics.get(name, 0)) for name in _COUNTS},
            "mean_reward": metrics.get("reward/mean"),
            "metrics": metrics,
            "groups_file": str(self.groups) if self.groups.is_file() else None,
            "report": str(self.report) if self.report.is_file() else None,
        }


@dataclass(frozen=True, slots=True)
class Steering:
    """How a Python program steers a run that it starts.

    `subscribers` get the run's events. `gate` is awaited before each task; it may wait, and the run ends if it returns
    False. `drive` decides which tasks the runner rolls out; without it, the runner takes the tasks from the
    environment. `serve_nodes` opens servers by which the nodes of a cluster reach the run's engines; without it, a run
    with engines of this process cannot use a cluster. `resumed_by` is the command that resumes the run; the message
    about an unfinished run appends the run's folder to it.
    """

    subscribers: Sequence[Subscriber] = ()
    gate: Gate | None = None
    drive: Drive | None = None
    serve_nodes: ServeNodes | None = None
    resumed_by: str = "palaestra resume"


async def run(
    form: Form,
    parsed: RunLine,
    *,
    root: Path = Path("runs"),
    folder: Path | None = None,
    stream: TextIO | None = None,
    engines: Sequence[ServerEngine] = (),
    begins: Counterfactual | None = None,
    steering: Steering | None = None,
) -> RunReport:
    """Run an environment to the end, and return the result and the paths of its files. Nothing is written before the
    model server, the slots and the environment work. The run is stored in `folder` if that is given, otherwise in a new
    folder below `root`. A resumed run keeps its folder. `engines` replace those of the configured servers. With
    `begins`, the run is counterfactual: all its rollouts continue a recorded rollout."""
    parsed.env_config.check_runnable(parsed.sources)
    parsed.env_config.check_command(parsed.command, parsed.sources)
    if not parsed.env_config.read_by_code and not asked_for(parsed.env_config, parsed.sources):
        parsed.env_config.refuse_given(
            ("tracker_project", "wandb_mode"), "without a tracker: set use_wandb, or leave it out", parsed.sources
        )
    steering = steering or Steering()
    async with AsyncExitStack() as stack:
        stream = stream or sys.stderr
        assembly = Assembly(form, parsed, stream, make_console(stream), stack)
        engine = await assembly.connect_engine(engines)
        pool, prepared, unshared = make_pool(parsed.env_config), None, ""
        # On a cluster, the nodes have the slots, so this process starts none and cannot check how well they isolate.
        if parsed.env_config.on_cluster:
            from palaestra.envs.run.elsewhere import check_elsewhere

            in_process = bool(engines) and steering.serve_nodes is None
            check_elsewhere(parsed.env_config, in_process=in_process, begins=begins)
        else:
            await stack.enter_async_context(pool)
            _check_isolation(parsed.env_config, pool)
            prepared = make_prepared(parsed.env_config, pool.backend, _unkept(assembly.console))
            unshared = unshared_because(parsed.env_config, pool.backend)
        environment = await assembly.environment(engine)
        capacity = await assembly.find_capacity(pool, steering.serve_nodes)
        begins = None if begins is None else begins.for_model(engine.name)
        recorded_tools = make_recorded_tools(parsed.env_config)
        stack.callback(recorded_tools.close)
        output = assembly.output(engine, environment, folder or root, named=folder is not None, begins=begins)
        if parsed.resume is not None:
            recorded_tools.remember(output.folder.world)
            from palaestra.rollouts.counterfactual import resumed_fork

            # The copy in the folder of this run, because the run that it continues may have been removed since.
            begins = resumed_fork(output.folder.path, output.settings)
        if parsed.env_config.world != "live":
            recorded_tools.keep(output.folder.world)
        environment.use_recordings(recorded_tools)
        assembly.print_beginning(output, engine, capacity)
        keeps = parsed.env_config.save_workspaces
        can_keep = pool.snapshots.can_save and capacity.rung >= Rung.USERNS
        unscored = output.folder.workspaces if can_keep else None
        continued: Continuation | None = None
        if begins is not None:
            from palaestra.rollouts.counterfactual import Continuation  # imported here, because most runs are no forks

            continued = Continuation(begins)
        command = await assembly.command(
            environment,
            output,
            engine,
            Workspaces(pool, prepared, output.folder.workspaces if keeps else None, unscored, unshared),
            recorded_tools,
            continued,
            capacity,
            steering,
        )
        gc.freeze()  # modules and settings live as long as the run: exclude them from garbage collection
        try:
            return await command.run()
        finally:
            gc.unfreeze()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Where the groups of a run are rolled out: how many slots there are and at which isolation level, and the maximum
    number of groups in flight. `cluster` is None if this process rolls them out."""

    slots: SlotLimit
    rung: Rung
    groups: int
    cluster: Cluster | None = None


@dataclass(frozen=True, slots=True)
class Assembly:
    """Makes the parts of a run. What needs closing is closed with `stack`."""

    form: Form
    parsed: RunLine
    stream: TextIO
    console: Console
    stack: AsyncExitStack

    @property
    def _servers(self) -> Sequence[APIServerConfig]:
        return server_settings(self.parsed.env_config, self.parsed.server_configs)

    async def connect_engine(self, engines: Sequence[ServerEngine]) -> ServerGroup:
        """Return the connected client of the model servers, or of `engines`."""
        engine = ServerGroup(engines or self._servers)
        # Before the start, which may fail when a part of the servers is connected.
        self.stack.push_async_callback(engine.aclose)
        await engine.start()
        return engine

    async def environment(self, engine: ServerGroup) -> EvaluatedEnvironment:
        """Return the environment, opened, after the model server has accepted its tools."""
        environment = self.form.build(self.parsed.env_config, self._servers, engine)
        await self.stack.enter_async_context(opened(environment, self.parsed.env_config.only_tasks))
        task_limit(self.parsed, environment)  # reports an unusable limit before the run begins
        await engine.probe(offered_tools(environment, self.parsed.env_config.seed))
        return environment

    def output(
        self,
        engine: ServerGroup,
        environment: EvaluatedEnvironment,
        place: Path,
        *,
        named: bool,
        begins: Counterfactual | None,
    ) -> RunOutput:
        """Return the run's folder with its open files: `place` if it is `named`, otherwise a new folder below it."""
        output = open_output(
            self.form.name,
            self.parsed,
            engine.name,
            place,
            self.form.reference,
            named=named,
            official_name=environment.official_name,
            begins=begins,
        )
        self.stack.callback(output.discard_unless_begun)
        return output

    async def find_capacity(self, pool: SlotPool, serve_nodes: ServeNodes | None) -> Capacity:
        """Return the capacity of the pool or, if the settings name a cluster, that of its nodes, which are opened."""
        config, cluster, limit = self.parsed.env_config, None, pool.limit
        if config.on_cluster:
            from palaestra.envs.run.elsewhere import ClusterRequest, open_cluster  # most runs have no cluster

            servers = self._servers
            if serve_nodes is not None:
                servers = server_settings(config, await self.stack.enter_async_context(serve_nodes()))
            request = ClusterRequest(self.form, config, servers, self.stream)
            cluster = await self.stack.enter_async_context(open_cluster(request))
            limit = SlotLimit(cluster.slots, "the slots of all nodes")
        slots = limit.slots if are_elsewhere(config, pool) else None
        groups = concurrency(config, len(self.parsed.server_configs), slots)
        return Capacity(limit, pool.rung if cluster is None else cluster.rung, groups, cluster)

    def print_beginning(self, output: RunOutput, engine: ServerGroup, capacity: Capacity) -> None:
        """Print the run's folder, its slots and how many groups run at a time."""
        config, write = self.parsed.env_config, self.stream.write
        write(f"run {output.folder.path}: {self.form.name} with {engine.name}, isolation {capacity.rung.label}\n")
        write(f"slots: {capacity.slots}{'' if config.slots else ' (set it with --slots N)'}\n")
        groups = capacity.groups
        if self.parsed.command == "evaluate":
            groups = config.evaluation_workers(groups)
        if groups * config.group_size < capacity.slots.slots:
            set_it = "" if config.max_num_workers > 0 else " (set it with --concurrency N)"
            write(f"groups: at most {groups} at a time, of {plural(config.group_size, 'rollout')} each{set_it}\n")
        if capacity.rung < Rung.USERNS:
            from palaestra_slots.sandbox.isolation.isolation_probe import WARNINGS  # imports the probe of all levels

            write(f"WARNING: isolation {capacity.rung.label}: {WARNINGS[capacity.rung]}\n")

    async def command(
        self,
        environment: EvaluatedEnvironment,
        output: RunOutput,
        engine: ServerGroup,
        workspaces: Workspaces,
        recorded_tools: RecordedTools,
        counterfactual: Continuation | None,
        capacity: Capacity,
        steering: Steering,
    ) -> CommandRun:
        """Return the command of the run: its limits, its events with everything that follows them, and its context."""
        limits = make_limits(self.parsed.env_config, output)
        reporting = await make_reporting(self.parsed, output, _writing_on(self.stream))
        spans = await self._spans(output, engine, reporting)
        events = EventStream(output.journal, output, limits)
        self.console.follow(events.in_flight, environment.score_name, environment.official_name)
        for each in (self.console, reporting, *(() if spans is None else (spans,)), *steering.subscribers):
            events.subscribe(each)
        if logger.isEnabledFor(logging.DEBUG):
            from palaestra.rollouts.observe.event_log import EventLog  # imported here, because most runs log nothing

            events.subscribe(EventLog())
        agent = self.parsed.env_config.agent
        context = RunContext(
            engine=engine,
            workspaces=workspaces,
            events=events,
            settings=run_settings(self.parsed.env_config),
            limits=limits,
            recorded_tools=recorded_tools,
            middleware=Middleware((spans.chat,), (spans.tool,)) if spans is not None else Middleware(),
            earlier=output.earlier,
            counterfactual=counterfactual,
            elsewhere=capacity.cluster,
            program=None if agent is None else await self.stack.enter_async_context(_program(agent, engine, output)),
        )
        status = StatusFile(events.in_flight)
        events.subscribe(status)
        return CommandRun(
            environment,
            self.parsed,
            context,
            output,
            reporting,
            status,
            self.console,
            self.stream,
            steering,
            capacity.groups,
        )

    async def _spans(self, output: RunOutput, engine: ServerGroup, reporting: Reporting) -> Spans | None:
        """Return the run's spans, if they are sent anywhere."""
        config = self.parsed.env_config
        if config.otel_endpoint is None:
            return None
        from palaestra.rollouts.observe.tracing.span_export import traced  # imported here, as most runs send no spans

        traces = traced(
            config.otel_endpoint,
            reporting.warn,
            env=self.form.name,
            model=engine.name,
            provider=self._servers[0].server_type,
            run_id=output.folder.run_id,
            content=config.otel_content,
        )
        return await self.stack.enter_async_context(traces)


def _check_isolation(config: BaseEnvConfig, pool: SlotPool) -> None:
    """Raise `ConfigError` if the settings need a backend or a level of isolation that the slots do not have."""
    if config.save_workspaces and not pool.snapshots.can_save:
        raise ConfigError(f"the {pool.backend.name} backend cannot keep workspaces: use the local backend")
    if config.save_workspaces and pool.rung < Rung.USERNS:
        raise ConfigError(f"isolation {pool.rung.label} has no layers, so it cannot keep workspaces: use userns")
    if config.agent and pool.rung is Rung.CONFINED:
        raise ConfigError(f"isolation {pool.rung.label} has no loopback for agent {config.agent!r}: use userns")


def run_settings(config: BaseEnvConfig) -> RunSettings:
    return RunSettings(
        seed=config.seed,
        group_size=config.group_size,
        infra_retries=config.infra_retries,
        whole_groups=config.short_groups == "whole",
        idle_limits=config.idle_limits,
    )


def _program(name: str, engine: ServerGroup, output: RunOutput) -> ProgramAgent:
    """Return the agent program of a run, which runs in the slot."""
    from palaestra.agent.known_programs import program_named  # imported here, because most runs use the agent loop
    from palaestra.rollouts.program_agent import ProgramAgent

    return ProgramAgent(program_named(name), engine, output.folder.path / "agents")


@asynccontextmanager
async def opened(environment: Environment, chosen: Sequence[str] = ()) -> AsyncIterator[None]:
    """Open the environment for the tasks that the user chose; none means all. Close it at the end of the block."""
    if strict := environment.agent.strict_labels:
        check_strict_labels(strict, environment.label_names)
    environment.choose(chosen)
    try:
        await environment.open()
        yield
    finally:
        try:
            await environment.aclose()
        finally:
            await environment.shared.aclose()


def offered_tools(environment: Environment, seed: int) -> Sequence[Mapping[str, JSON]]:
    """Return the definitions of the tools that a task gets by default; empty if the environment cannot choose tools
    without a real task."""
    try:
        return environment.kit(Task(id="", prompt=""), random.Random(seed)).definitions
    except Exception:  # the user's code may expect a real task
        return ()


def make_limits(config: BaseEnvConfig, output: RunOutput) -> RunLimits:
    """Return the limits of a run. The cost of its earlier parts counts; the outcomes of their rollouts do not."""
    spent, counted = 0.0, set()
    if output.resumes:
        output.reader.read()
        # The cost of rollouts in flight counts when they continue.
        spent = output.reader.usage.settled.spent(prices(config))
        counted = set(output.reader.paid)
    return RunLimits(
        max_infra_rate=config.max_infra_rate,
        max_cost=config.max_cost,
        prices=prices(config),
        group_size=config.group_size,
        spent=spent,
        counted=counted,
    )


def serve_limit(total_steps: int, source: str) -> int | None:
    """Return the maximum number of groups that `serve`, or an environment's own evaluation, rolls out; None means no
    maximum. Only a number that the user set counts, because an environment's own limit applies to `process`."""
    return None if source in (DEFAULT, "config_init") or total_steps < 0 else total_steps


def task_limit(parsed: RunLine, environment: EvaluatedEnvironment) -> int | None:
    """Return the maximum number of tasks that a command rolls out; None if there is no maximum. If the environment
    chooses the tasks of its evaluation, only a number that the user set counts. Raises `ConfigError` if `total_steps`
    is 0."""
    total_steps = parsed.env_config.total_steps
    if total_steps == 0:
        raise ConfigError("tasks is 0, so there is nothing to run (total_steps)")
    if parsed.command == "serve" or (parsed.command == "evaluate" and environment.chooses_evaluation):
        return serve_limit(total_steps, parsed.sources.get("env.total_steps", DEFAULT))
    return total_steps if total_steps > 0 else None


def concurrency(config: BaseEnvConfig, servers: int = 1, slots: int | None = None) -> int:
    """Return the maximum number of groups in flight: `max_num_workers` if that is set, otherwise
    `max_num_workers_per_node` per model server if that is set.

    Otherwise, it is the number of groups that the `slots` on other machines hold. On this machine (`slots` is None), it
    is twice the number of cores.
    """
    if config.max_num_workers > 0:
        return config.max_num_workers
    if "max_num_workers_per_node" in config.model_fields_set:
        return config.max_num_workers_per_node * max(1, servers)
    if slots is not None:
        return max(2, -(-slots // max(1, config.group_size)))
    return max(2, 2 * (os.cpu_count() or 1))


def are_elsewhere(config: BaseEnvConfig, pool: SlotSource) -> bool:
    """Return whether all slots of a run are on other machines."""
    if not isinstance(config, HermesAgentEnvConfig) or not isinstance(pool, SlotPool):
        return False
    return not uses_this_machine(config.slot_backend, config)


def _writing_on(stream: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        stream.write(f"{text}\n")

    return write


@dataclass(slots=True)
class CommandRun:
    """One command (process, evaluate or serve) of one environment."""

    environment: EvaluatedEnvironment
    parsed: RunLine
    context: RunContext
    output: RunOutput
    reporting: Reporting
    status: StatusFile
    console: Console
    stream: TextIO
    steering: Steering
    concurrency: int
    """The maximum number of groups in flight."""
    evaluations: PeriodicEvaluation | None = None
    begun: bool = False
    """Whether the first group may have begun."""
    exit_code: int = DONE
    exit_reason: str = ""
    """Why the exit code is not 0, if the run ended by itself."""
    resumable: bool = True
    """Whether the run, if unfinished, can be resumed."""
    reason: str = "failed"
    """How the run ended: done, failed, or why it stopped."""

    async def run(self) -> RunReport:
        """Run the command, and return the result. However the run ends, its output is finished."""
        limits, output, totals = self.context.limits, self.output, None
        try:
            with self.console:
                limits.report_to(self.console.note)
                self.reporting.report_to(self.console.note)
                async with self._watched():
                    totals = await self._until_stopped()
            self._settle(totals)
        except asyncio.CancelledError:
            self.reason = INTERRUPTED_BY
            raise
        except ConfigError:
            self.resumable = False
            raise
        finally:
            await self._finish_run(totals or Totals())
        return RunReport(
            exit_code=limits.exit_code if limits.reason else self.exit_code,
            totals=totals,
            folder=output.folder.path,
            journal=output.folder.journal,
            groups=output.groups.path,
            report=output.folder.report,
            reason=self.reason,
            exit_reason=limits.message if limits.reason else self.exit_reason,
        )

    async def _finish_run(self, totals: Totals) -> None:
        """Close the run's files, and print how it ended unless it never began."""
        output, figures = self.output, dict[str, float]()
        try:
            # If the files cannot be closed, because the disk is full, the summary still says what was kept.
            figures = output.close(self.reason)
        finally:
            if self.reason == "done" and self.steering.drive is None:
                output.begin()
            if output.begun:
                _print_verdict(
                    output, figures, self.reason, self.console, totals, self._unfinished(figures), self.stream
                )
                if self.exit_code and not self.context.limits.reason:
                    self.stream.write(f"  exit code {self.exit_code}: {self.exit_reason}\n")
                self.stream.writelines(f"  {line}\n" for line in self.environment.write_files(output.folder.path))
            self.reporting.report_to(_writing_on(self.stream))
            await self.reporting.finish(self.environment, figures)

    def _unfinished(self, figures: Mapping[str, float]) -> str:
        """Return why the run is not finished and how to continue it; empty for a finished run."""
        limits, why = self.context.limits, "the run is not finished"
        if limits.reason:
            why = f"{limits.reason}: {limits.message}"
        elif self.output.failures.blames(Blame.ENGINE):
            why = "some rollouts failed at the model server, and a resumed run repeats them"
        elif (self.reason == "done" and figures) or not self.resumable:
            return ""
        return f"{why}; continue with {self.steering.resumed_by} {self.output.folder.path}"

    def _settle(self, totals: Totals) -> None:
        """Set the reason and the exit code of a run that has ended."""
        config, limits = self.parsed.env_config, self.context.limits
        self.reason = limits.reason or "done"
        evaluates = self.parsed.command == "evaluate"
        refused = len(self.environment.refused) if evaluates else 0  # the metrics would cover a part of the set only
        lost = totals.failed + (totals.failed_groups + refused) * config.group_size
        if lost > config.max_failures:
            only_server = self.output.failures.blames(Blame.ENGINE, only=True) and not refused
            of_tasks = f", those of {plural(refused, 'refused task')} included" if refused else ""
            self.exit_reason = f"{plural(lost, 'rollout')} without a score{of_tasks}, and --env.max_failures allows "
            self.exit_reason += f"{config.max_failures}"
            self.exit_code = EngineUnavailable.exit_code if only_server else TOO_MANY_FAILURES
            if only_server and not totals.scored:
                self.reason = limits.reason or "failed"

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        config = self.parsed.env_config
        async with self.status.written(self.output.folder.path):
            if config.metrics_port is None:
                yield
                return
            reader = RunReader(self.output.folder.journal)
            host, port, token = config.metrics_host, config.metrics_port, config.metrics_token
            from palaestra.rollouts.observe.prometheus import serving_metrics  # most runs have no port

            async with serving_metrics(reader, self.status, host, port, token) as url:
                self.console.note(f"metrics at {url}")
                yield

    async def _until_stopped(self) -> Totals:
        """Run the command's groups until all have ended or the limits stop the run. Cancelling this cancels the
        rollouts in flight."""
        running = asyncio.create_task(self._roll_out(), name="run")
        with self._draining(running), self.reporting.running(self.environment):
            try:
                return await running
            except (asyncio.CancelledError, RunStopped):
                current = asyncio.current_task()
                # The limits cancel only the rollouts. If this task itself was cancelled, its cancellation must go on.
                if not self.context.limits.reason or (current is not None and current.cancelling()):
                    raise
                return Totals()

    @contextmanager
    def _draining(self, running: asyncio.Task[Totals]) -> Iterator[None]:
        """While the block runs, SIGTERM drains the run: rollouts in flight get `drain_s` seconds to finish. A second
        SIGTERM, or one before any group has begun, stops the run immediately. If the calling program handles SIGTERM
        itself, nothing changes."""
        loop, patience, limits = asyncio.get_running_loop(), self.parsed.env_config.drain_s, self.context.limits

        def end_on_signal() -> None:
            if limits.reason == INTERRUPTED_BY:
                running.cancel()
            else:
                limits.drain()
                # Never called off: to cancel a task that has ended does nothing.
                loop.call_later(patience if self.begun else 0.0, running.cancel)

        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the calling program handles SIGTERM itself
            yield
            return
        with contextlib.suppress(
            NotImplementedError, RuntimeError, ValueError
        ):  # signal handlers can be set only in the main thread
            loop.add_signal_handler(signal.SIGTERM, end_on_signal)
        try:
            yield
        finally:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGTERM)

    async def _roll_out(self) -> Totals:
        config, environment, command, context = (
            self.parsed.env_config,
            self.environment,
            self.parsed.command,
            self.context,
        )
        # A counterfactual run plays one task, that of the rollout which it continues.
        limit = task_limit(self.parsed, environment) if context.counterfactual is None else 1
        context.events.announce(GroupsPlanned(limit, config.group_size))
        context.limits.count_slots(lambda: self._slot_usage().get("slots/cost", 0.0))
        try:
            if command == "evaluate":
                totals = await self._evaluate(limit)
            else:
                feed, roll_out = None, partial(self._run_groups, limit, self._keep_or_skip)
                if command == "serve":
                    from palaestra.envs.run.feed import make_feed  # most runs feed no trainer

                    feed = make_feed(config, self.output, context.events.note, environment.trainer_takes)
                    roll_out = partial(feed.run, partial(self._run_groups, limit), self._keep_or_skip)
                if (evaluations := self._make_evaluations(feed)) is not None:
                    self.evaluations, roll_out = evaluations, partial(evaluations.during, roll_out)
                totals = await environment.managed(command, roll_out)
                # A run that was stopped, or that a caller drives, may have no group and is no mistake.
                if command == "process" and not (totals.groups or context.limits.reason or self.steering.drive):
                    raise ConfigError(f"{environment.name} has no task to roll out")
            self.output.own.update(numeric_values(await self.reporting.own(environment)))
            return totals
        finally:
            self.output.own.update(self._slot_usage())
            if environment.refused:
                self.output.own["tasks_left_out"] = float(len(environment.refused))
            await context.workspaces.aclose()

    def _slot_usage(self) -> dict[str, float]:
        """Return the metrics of the slots' containers and sandboxes, with those of earlier parts of the run; none for
        slots on this machine."""
        pool, config, before = self.context.workspaces.pool, self.parsed.env_config, self.output.slots_before
        if not isinstance(pool, SlotPool) or pool.backend.name == "local":
            return before
        from palaestra_slots.sandbox.slot_usage import slot_usage  # local runs do not need it

        prices = config.slot_prices if isinstance(config, HermesAgentEnvConfig) else {}
        now = slot_usage(pool.backend.stats(), prices)
        return {name: before.get(name, 0.0) + now.get(name, 0.0) for name in {**before, **now}}

    async def _run_groups(self, limit: int | None, on_group: OnGroup, gate: Gate | None = None) -> Totals:
        self.begun = True
        limits, context = self.context.limits, self.context

        async def open_gate() -> bool:
            evaluated = None if self.evaluations is None else self.evaluations.gate
            asked = [each for each in (evaluated, gate, self.steering.gate) if each is not None]
            # A list, because `all` cannot iterate over an asynchronous generator.
            return await limits.gate() and all([await limits.unless_stopped(each()) for each in asked])

        begins, source = context.counterfactual, None
        if begins is not None:
            from palaestra.envs.run.fork import forked_task  # imported here, because only `palaestra fork` needs it

            source = forked_task(self.environment, begins.point)
        runner = Runner(
            self.environment,
            self.context,
            concurrency=self.concurrency,
            limit=limit,
            on_group=on_group,
            gate=open_gate,
            timings=self._timings(),
            source=source,
        )
        return await (runner.run() if self.steering.drive is None else self.steering.drive(runner))

    def _make_evaluations(self, feed: Feed | None) -> PeriodicEvaluation | None:
        """Return the evaluations during the run, or None. `serve` evaluates as configured; `process` evaluates only if
        a user set `steps_per_eval`."""
        config, user_set = self.parsed.env_config, self.parsed.sources.get("env.steps_per_eval", DEFAULT) not in UNSAID
        if config.steps_per_eval == 0 or (feed is None and not user_set):
            return None
        if not self.environment.has_evaluation(config):
            if user_set:
                self.context.events.note("steps_per_eval: no task is held out to evaluate (set --env.held_out)")
            return None
        from palaestra.envs.run.periodic_evaluation import PeriodicEvaluation  # most runs have none

        return PeriodicEvaluation(
            self.environment,
            self.context,
            config,
            self.output.folder.path,
            self.concurrency,
            self.reporting.log,
            recorded_tools=partial(make_recorded_tools, config),
            step=None if feed is None else feed.step,
        )

    async def _evaluate(self, limit: int | None) -> Totals:
        """Evaluate, and save the result in the run's folder and, if one is set, in `data_dir_to_save_evals`."""
        if self.environment.has_nothing_to_evaluate:
            raise ConfigError(
                f"{self.environment.name} defines no evaluation: write its method evaluate, or roll out its tasks with "
                "palaestra run"
            )
        self.begun = True
        context = replace(self.context, earlier=replace(self.context.earlier, ended={}))
        config = self.parsed.env_config
        workers = config.evaluation_workers(self.concurrency)
        evaluation = Evaluation(self.environment, context, workers, self._keep_or_skip, context.limits.gate, limit)
        totals = await evaluation.run()
        note = context.events.note
        if evaluation.logged:
            metrics = {**evaluation.logged["metrics"], **await self._choice_metrics(totals.groups)}
            evaluation.logged = {**evaluation.logged, "metrics": metrics}
            folder, copy = self.output.folder.path / "evaluation", self.parsed.env_config.data_dir_to_save_evals
            for each in (folder, *([Path(copy)] if copy else [])):
                save_evaluation(evaluation.logged, each, self.context.engine.name)
            found = numeric_values(metrics)
            self.output.own.update({f"eval/{name.removeprefix('eval/')}": value for name, value in found.items()})
            note(f"evaluation in {folder}")
        else:
            note(f"{self.environment.name} logged no metrics: its evaluate did not call evaluate_log")
        return totals

    async def _choice_metrics(self, tasks: int) -> Mapping[str, JSON]:
        """Return the metrics of an evaluation of some of the environment's tasks; none if it has all of them."""
        from palaestra.envs.run.pass_at_k import TASKS_CHOSEN, TASKS_TOTAL, chooses

        if not chooses(self.output.settings, tasks):
            return {}
        total = await self.environment.tasks_total()
        return {TASKS_CHOSEN: 1} | ({} if total is None else {TASKS_TOTAL: total})

    def _timings(self) -> Mapping[str, float]:
        """Return the seconds that tasks took, by task id, in the run that `timings_from` names, or otherwise in the
        earlier parts of this run; empty if there are none."""
        named = self.parsed.env_config.timings_from
        if named is not None:
            return read_timings(Path(named))
        return read_timings(self.output.folder.journal) if self.output.resumes else {}

    def _keep_or_skip(self, group: Group) -> None:
        if self.parsed.env_config.ensure_scores_are_not_same and group.same_scores:
            self.output.skip(group)
        else:
            self.output.keep(group)


def _unkept(console: Console) -> Callable[[ConfigError], None]:
    """Return a function that reports the first reason why prepared workspaces are not kept for other runs."""
    told: list[ConfigError] = []

    def note_once(error: ConfigError) -> None:
        if not told:
            told.append(error)
            console.note(f"a prepared workspace is not kept for other runs: {error}")

    return note_once


_SHOWN_CAUSES = 5
"""The number of failure causes that the summary of a run shows."""


def _print_verdict(
    output: RunOutput,
    figures: dict[str, float],
    reason: str,
    console: Console,
    totals: Totals,
    unfinished: str,
    stream: TextIO,
) -> None:
    """Print how the run ended: its score and coverage, its failures by cause, and its files."""
    groups, failed, rollouts, planned, scored = (int(figures.get(name, 0)) for name in _COUNTS)
    outcomes = ", ".join(f"{name} {count}" for name, count in output.outcomes.most_common())
    counts = f"{plural(groups, 'group')} ({failed} failed), {plural(rollouts, 'rollout')}"
    counts += f" ({outcomes})" if outcomes else ""
    # The time of the whole run, as `status` and the table show it.
    lines = [f"{reason} after {duration(output.status.seconds or console.elapsed_s)}: {counts}"]
    if rollouts and console.score_name == "reward":  # runs with another kind of score report their own results
        lines.append(_mean_reward(figures, scored, planned))
        lines += _verdict_details(output, figures, console.official_name)
    evaluated = {name: value for name, value in output.own.items() if name.startswith("eval/")}
    lines += [in_short(evaluated), *_causes(output)]
    if output.status.filtered:
        lines.append(filtered_words(output.status.filtered, output.folder.path))
    lines += _suspects(totals)
    if output.status.resumed:
        lines.append(f"resumed {output.status.resumed}")
    if warning := mixed(output.status.score_versions):
        lines.append(f"WARNING: {warning}; {REMEDY}")
    found, prepared = (int(figures.get(name, 0)) for name in ("groups_from_store", "groups_prepared"))
    if found:
        lines.append(f"already prepared on this machine: {found} of {plural(prepared, 'workspace')}")
    first, *others = [line for line in (*lines, *_slots(figures), *_file_lines(output), unfinished) if line]
    stream.write("\n  ".join((first, *others)) + "\n")


def _causes(output: RunOutput) -> Iterator[str]:
    """Yield the most frequent causes of failures."""
    causes = output.failures.causes()
    yield from (cause.line() for cause in causes[:_SHOWN_CAUSES])
    if len(causes) > _SHOWN_CAUSES:
        yield f"and {plural(len(causes) - _SHOWN_CAUSES, 'further cause')}"


def _verdict_details(output: RunOutput, figures: dict[str, float], official_name: str) -> Iterator[str]:
    """Yield what the mean reward is made of: official verdicts, labels and metrics."""
    if "official/mean" in figures:
        official = f"{figures['official/mean']:.3f}{_interval(figures, 'official/mean')}"
        yield f"{official_words(official_name)} {official}"
    if output.labels:
        yield f"labels: {labels_line(output.labels)}"
    yield from output.verdict_lines
    if criteria := shortened(output.criteria):
        yield f"metrics: {criteria}"


def _mean_reward(figures: dict[str, float], scored: int, planned: int) -> str:
    """Return the mean reward of a run and its coverage."""
    mean, covered = figures.get("reward/mean"), f"{scored} of {plural(planned, 'rollout')} scored"
    if mean is None:
        return f"no reward, {covered}"
    text, name = f"mean reward {mean:.3f}{_interval(figures, 'reward/mean')}, {covered}", "reward/mean_with_unscored"
    more = f"; {figures[name]:.3f}{_interval(figures, name)} with unscored rollouts as 0" if scored < planned else ""
    return text + more


def _slots(figures: dict[str, float]) -> Iterator[str]:
    """Yield the resource usage of the slots, for each backend with containers."""
    for backend in [name.split("/")[1] for name in figures if name.startswith("slots/") and name.endswith("/hours")]:
        hours, begun = figures[f"slots/{backend}/hours"], int(figures[f"slots/{backend}/begun"])
        cost = figures.get(f"slots/{backend}/cost")
        price = "" if cost is None else f", cost {cost:.4f}"
        yield f"slots in {backend}: {plural(begun, 'container')} for {_hours(hours)} in total{price}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _file_lines(output: RunOutput) -> list[str]:
    """Return one line of text for each file of a run."""
    places = {"groups": output.groups.path, "report": output.folder.report}
    if output.copy is not None:
        places["copy"] = output.copy.path
    lines = [f"{name:<7} {path}" for name, path in places.items() if path.is_file()]
    return [*lines, f"run     {output.folder.path}"]


def _suspects(totals: Totals) -> Iterator[str]:
    """Yield lines that name the rollouts that may need live grading, the tasks whose tests have no control, and what
    checks that scored 0 lacked."""
    for what, names in (
        (
            'rollouts still had processes when they ended and were scored 0; does the task need grading="live"?',
            totals.cut_off,
        ),
        ("tasks have tests without a control, so forged results could earn a reward", totals.uncontrolled),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{len(names)} {what}: {', '.join(names[:5])}{more}"
    for cause, count in totals.missing.most_common(_SHOWN_CAUSES):
        yield f"{plural(count, 'rollout')} scored 0 after a command of the check failed: {cause}"


def _interval(figures: dict[str, float], name: str) -> str:
    return in_words(interval_of(figures, name))
