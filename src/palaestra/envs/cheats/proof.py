"""Checks an environment: the oracle must get the full score; doing nothing and every cheat may get at most the floor
(invariant R3). Each policy plays the same tasks through the real loop, tools, slots and grading. If one of these tasks
has no solution, the environment is checked without the oracle and reported as unproven."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError, InfraError, TaskError
from palaestra.core.types import JSON, Message, Task, ToolStep, number
from palaestra.envs.cheats.cheat import Cheat
from palaestra.envs.cheats.forged_results import FORGERIES
from palaestra.envs.cheats.hijacked_code import SHADOWS, SOURCES
from palaestra.envs.cheats.leaks import LEAKS
from palaestra.envs.cheats.tampered_tests import PLANTS, VERDICTS
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import UNSAID, CommandLine, Parsed, set_fields
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.config.layers import exported, read_dotenv, shell_variables
from palaestra.envs.discovery import load_environment
from palaestra.envs.form import Form
from palaestra.envs.run.run import opened
from palaestra.envs.run.run_folder import RunLine
from palaestra.inference.chat_server import SessionContext
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engines.scripted import Act, NoopPolicy, OraclePolicy, Policy, ScriptedEngine
from palaestra.inference.server_group import ServerGroup
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.grader import LIVE
from palaestra.rollouts.group import GroupRun
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.spec import RunContext
from palaestra.rollouts.workspaces import Workspaces
from palaestra.sandbox.pool import SlotPool
from palaestra.sandbox.slot import Rung

CLASSES: Mapping[str, tuple[Cheat, ...]] = {
    "files that a test run loads": PLANTS,
    "programs, libraries, settings": SHADOWS,
    "changed tests, answers, verdicts": VERDICTS,
    "code that attacks its tests": (*SOURCES, *FORGERIES),
    "leaked answers, surviving processes": LEAKS,
}
"""All cheats by class of attack. The classes follow public reports on agents and audits of benchmarks."""

BANK: tuple[Cheat, ...] = tuple(cheat for cheats in CLASSES.values() for cheat in cheats)

_EVERY = 20
"""The number of policies after which a check reports its progress."""

FULL = 1.0
"""The least reward that the oracle must get."""


class CheatPolicy(Policy):
    """Runs one cheat in the terminal, then reports that the work is done."""

    def __init__(self, cheat: Cheat) -> None:
        self._cheat = cheat

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        if any(message.get("role") == "assistant" for message in messages):
            return "Done."
        asked = "\n".join(str(message.get("content")) for message in messages if message.get("role") == "user")
        known = f"export TASK={shlex.quote(asked)}\n" if "$TASK" in self._cheat.script else ""
        return [ToolStep("terminal", {"command": known + self._cheat.script, "timeout": 60})]


class PolicyRuns:
    """Plays policies on tasks of an open environment. Each policy plays each task as a separate group."""

    def __init__(self, environment: Environment, workspaces: Workspaces, events: EventStream) -> None:
        self._environment = environment
        self._workspaces = workspaces
        self._events = events

    async def play(self, policy: Policy, task: Task, number: int = 0) -> Group:
        """Play one group and return it; `number` is the group's position in the run."""
        engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="noop"), policy)
        context = RunContext(engine, self._workspaces, self._events)
        return await GroupRun(self._environment, context, number, task).run()


@asynccontextmanager
async def policy_runs(environment: Environment, pool: SlotPool) -> AsyncIterator[PolicyRuns]:
    """Yield a `PolicyRuns` over an open pool, with a temporary journal."""
    workspaces = Workspaces(pool)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder, "journal.jsonl"))
        try:
            yield PolicyRuns(environment, workspaces, EventStream(journal))
        finally:
            await workspaces.aclose()
            journal.close()


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The rewards of one policy. The reward of an unscored rollout is None; `error` then has the reason."""

    policy: str
    what: str
    wanted: str
    rewards: tuple[float | None, ...]
    ok: bool
    error: str = ""
    paid: bool = False
    """Whether a reward exceeded the floor of its task. `ok` may also be False because a task could not be played."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a check. `proven` is False if one of the tasks has no solution to play.

    `classes` maps each class of attack that was played to `open`, `closed`, or `unknown` if no attack scored but some
    could not be played. `warnings` report what a score depends on, and what it does not see.
    """

    environment: str
    tasks: tuple[str, ...]
    lines: tuple[PolicyResult, ...]
    proven: bool
    skipped: int = 0
    """The number of cheats that were not played, because doing nothing or the reference solution already got a wrong
    reward."""
    classes: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(line.ok for line in self.lines)

    def to_json(self) -> dict[str, JSON]:
        return {**asdict(self), "holds": self.holds}


@dataclass(slots=True)
class EnvironmentProof:
    """Checks an open environment on an open pool of slots."""

    environment: Environment
    pool: SlotPool
    cheats: Sequence[Cheat] = BANK
    progress: Callable[[PolicyResult], None] = lambda line: None
    always: bool = False
    """Play the cheats even if doing nothing or the reference solution got a wrong reward."""
    _lines: dict[str, PolicyResult] = field(default_factory=dict)
    _solved: list[tuple[Task, Trajectory]] = field(default_factory=list)

    async def run(self, count: int) -> Proof:
        """Play the first `count` tasks with the oracle, with a policy that does nothing, and with the cheats. Raises
        `ConfigError` if the environment has no tasks."""
        tasks = await first_tasks(self.environment, count)
        resolved = [each for task in tasks if (each := await self._resolved(task)) is not None]
        solved = all(task.solution is not None for task in resolved)
        width = asyncio.Semaphore(os.cpu_count() or 1)

        async def play_all(name: str, policy: Policy, runs: PolicyRuns) -> None:
            async with width:
                groups = [await runs.play(policy, task, n) for n, task in enumerate(tasks)]
            self._lines[name] = self._judge(name, list(zip(tasks, groups, strict=True)))
            if name == "oracle":
                played = zip(tasks, groups, strict=True)
                self._solved = [(task, each) for task, group in played for each in group.trajectories]
            self.progress(self._lines[name])

        async def play_each(policies: Mapping[str, Policy], runs: PolicyRuns) -> None:
            async with asyncio.TaskGroup() as group:
                for name, policy in policies.items():
                    group.create_task(play_all(name, policy, runs))

        plain: dict[str, Policy] = {"oracle": OraclePolicy()} if solved else {}
        plain["noop"] = NoopPolicy()
        cheats = {cheat.name: CheatPolicy(cheat) for cheat in self.cheats}
        async with policy_runs(self.environment, self.pool) as runs:
            await play_each(plain, runs)
            skipped = 0 if self.always or all(line.ok for line in self._lines.values()) else len(cheats)
            if not skipped:
                await play_each(cheats, runs)
        lines = tuple(self._lines[name] for name in (*plain, *cheats) if name in self._lines)
        names, warnings = tuple(task.id for task in tasks), tuple(self._warnings(resolved))
        return Proof(self.environment.name, names, lines, solved, skipped, self._classes(), warnings)

    async def _resolved(self, task: Task) -> Task | None:
        """Return the task as the policies play it; None for an unusable task, whose groups report the reason."""
        try:
            return await self.environment.resolve(task)
        except (TaskError, InfraError):
            return None

    def _classes(self) -> dict[str, str]:
        found = {}
        for kind, cheats in CLASSES.items():
            played = [self._lines[cheat.name] for cheat in cheats if cheat.name in self._lines]
            if any(line.paid for line in played):
                found[kind] = "open"
            elif played:
                found[kind] = "closed" if all(line.ok for line in played) else "unknown"
        if any(each.detail.get("uncontrolled") for _, each in self._solved):
            found["forged results of uncontrolled tests"] = "open"
        return found

    def _warnings(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield warnings to the author about what the scores of these tasks depend on."""
        for task in tasks:
            if task.grading == LIVE:
                yield f"{task.id}: it is graded live, so its score uses programs that the agent may have changed"
            if task.programs:
                yield f"{task.id}: its score may use programs that the agent changed: {', '.join(task.programs)}"
            if "/" in task.paths:
                yield f"{task.id}: its score sees all of the agent's new libraries and packages (paths: /)"
        for task, solved in self._solved:
            left_out = solved.detail.get("left_out")
            if left_out and (solved.reward is None or solved.reward < FULL):
                shown = ", ".join(left_out[:5])
                yield f"{task.id}: the reference solution changes {shown}, hidden from the score; add them to paths"
            if names := solved.detail.get("uncontrolled"):
                yield f"{task.id}: no control covers {len(names)} of its tests, such as {names[0]}"

    def _judge(self, name: str, groups: Sequence[tuple[Task, Group]]) -> PolicyResult:
        played = [(task, trajectory) for task, group in groups for trajectory in group.trajectories]
        rewards = tuple(trajectory.reward for _, trajectory in played)
        reasons = [(task, group.error) for task, group in groups]
        reasons += [(task, trajectory.error) for task, trajectory in played]
        reasons += [(task, str(each.detail.get("tampering") or "")) for task, each in played if name == "oracle"]
        error = next((f"{task.id}: {reason}" for task, reason in reasons if reason), "")
        good = len(played) == len(groups)  # a task without a rollout proves nothing
        if name == "oracle":
            good = good and all(reward is not None and reward >= FULL for reward in rewards)
            return PolicyResult(name, "the reference solution", f"{FULL:g}", rewards, good, error)
        paid = any(each.reward is not None and not each.reward <= task.floor for task, each in played)
        what = next((cheat.what for cheat in self.cheats if cheat.name == name), "doing nothing")
        good = good and not paid and not (name == "noop" and None in rewards)
        return PolicyResult(name, what, f"<= {max(task.floor for task, _ in groups):g}", rewards, good, error, paid)


async def first_tasks(environment: Environment, count: int) -> list[Task]:
    """Return the first `count` tasks of an open environment. Raises `ConfigError` if there are no tasks, or if a task's
    floor is not a number."""
    tasks: list[Task] = []
    async for task in environment.tasks():
        if number(task.floor) is None:
            raise ConfigError(f"task {task.id}: its floor {task.floor!r:.100} is not a number")
        tasks.append(task)
        if len(tasks) == count:
            break
    if not tasks:
        raise ConfigError(f"environment {environment.name} has no tasks to check")
    return tasks


def check_environment(
    reference: str, settings: Sequence[str], *, tasks: int, only: Sequence[str] = (), quiet: bool = False
) -> Proof:
    """Check the environment that `reference` names. Raises `ConfigError` if it cannot be loaded, and for an unknown
    cheat or setting."""
    with exported(read_dotenv(Path.cwd())):
        return _check_environment(reference, settings, tasks, only, quiet)


def _check_environment(reference: str, settings: Sequence[str], tasks: int, only: Sequence[str], quiet: bool) -> Proof:
    form = load_environment(reference, Path.cwd())
    parsed = _parse(form, reference, settings, {})
    if not any(parsed.sources[f"env.{name}"] not in UNSAID for name in form.check_values()):
        parsed = _parse(form, reference, settings, form.check_values())
    return asyncio.run(_check(form, parsed, tasks, only, quiet))


def _parse(form: Form, reference: str, settings: Sequence[str], own: Mapping[str, JSON]) -> RunLine:
    config, _ = form.defaults()
    values = {**(set_fields(config) if config is not None else {}), **own}
    return parse_settings(f"palaestra env check {reference}", settings, env_type=form.config_type(), env_values=values)


def parse_settings(
    prog: str,
    settings: Sequence[str],
    *,
    env_type: type[BaseEnvConfig],
    env_values: Mapping[str, JSON] | None = None,
) -> RunLine:
    """Parse the settings of an environment, for a command that does not start a run. Raises `ConfigError`."""
    dotenv = read_dotenv(Path.cwd())
    parsed = CommandLine(
        prog=prog,
        env_type=env_type,
        server_type=APIServerConfig,
        env_values=env_values or {},
        command="process",
    ).parse(["process", "--policy", "noop", *settings], shell_variables(dotenv), dotenv)
    if not isinstance(parsed, Parsed) or parsed.dry_run:
        raise ConfigError("only settings are accepted here; use --help, --show-config and --dry-run with palaestra run")
    if isinstance(parsed.env_config, HermesAgentEnvConfig):
        parsed.env_config.take_variables({**dotenv, **os.environ})
    return parsed


def cheats_named(only: Sequence[str]) -> tuple[Cheat, ...]:
    """Return the cheats with these names, or all cheats if `only` is empty. Raises `ConfigError` for an unknown
    name."""
    known = {cheat.name: cheat for cheat in BANK}
    for name in only:
        if name not in known:
            raise ConfigError(f"unknown cheat {name!r}.{nearest(name, known)} Available: {', '.join(known)}")
    return tuple(known[name] for name in only) or BANK


async def _check(form: Form, parsed: RunLine, tasks: int, only: Sequence[str], quiet: bool) -> Proof:
    config, cheats, played = parsed.env_config, cheats_named(only), 0
    if config.isolation == Rung.NONE.label:
        raise ConfigError(
            "env check plays attacks, and isolation level none gives no protection; use a different level"
        )

    def progress(line: PolicyResult) -> None:
        nonlocal played
        played += 1
        if not line.ok and not quiet:
            sys.stderr.write(f"{line.policy}: FAILED {line.error[:200]}\n")
        elif played % _EVERY == 0 and not quiet:
            sys.stderr.write(f"{played} of at most {len(cheats) + 2} policies played\n")

    engine = ServerGroup(parsed.server_configs)
    async with contextlib.aclosing(engine), make_pool(config, local=True) as pool:
        await engine.start()
        environment = form.build(config, parsed.server_configs, engine)
        async with opened(environment):
            return await EnvironmentProof(environment, pool, cheats, progress, always=bool(only)).run(tasks)
