"""Checks an environment: the oracle and every further solution must get the full score; doing nothing and every cheat
may get at most the floor (invariant R3). Each policy plays the same tasks through the real loop, tools, slots and
grading. If one of these tasks has no solution, the environment is checked without the oracle and reported as unproven.

A cheat that attacks the tests of its work is played over hollow work (`hollow_work.py`) of each task, because a score
may refuse unsolved work for other reasons, whatever the cheat does to the tests. If a task has no hollow work, such a
cheat is played over unsolved work; a score of 0 then decides nothing. A cheat for which no task has hollow work is
reported as not tested.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from palaestra.envs.api.function_env import FunctionEnvironment
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.dotenv import exported, read_keys
from palaestra.envs.form import Form
from palaestra.envs.policy_runs import FULL, PolicyRuns, first_tasks, policy_runs
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.grader import LIVE, WAYS, Way, enough_time
from palaestra.rollouts.grading.tampering import is_below
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.spec import Phase
from palaestra_audit.cheats.cheat import Cheat
from palaestra_audit.cheats.command_tool import TERMINAL, CommandTool, find_command_tool
from palaestra_audit.cheats.derived_plays import (
    DERIVED,
    MOST_SISTERS,
    WANTED,
    WORDS,
    Judged,
    Steps,
    StepsPolicy,
    judged_plays,
    leak,
    leak_to_idle,
    shown_step,
    steps_of,
)
from palaestra_audit.cheats.forged_results import FORGERIES
from palaestra_audit.cheats.hijacked_code import MODULES, SHADOWS, SOURCES
from palaestra_audit.cheats.hollow_work import Hollow, hollows, is_code
from palaestra_audit.cheats.leaks import CHANGED, COPIED, LEAKS, SURVIVORS
from palaestra_audit.cheats.left_files import LeftFiles, ReadWorkspaces, play_and_read
from palaestra_audit.cheats.replies import (
    ECHO,
    EVERY_NUMBER,
    REPLIES,
    EchoPolicy,
    FurtherCallsPolicy,
    WordlessPolicy,
    actions,
    further_calls,
)
from palaestra_audit.cheats.state_changes import Play, TurnRecorder, named_files
from palaestra_audit.cheats.tampered_tests import ANSWERS, PLANTS, VERDICTS
from palaestra_audit.opening import load, opened_environment
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError, TaskError
from palaestra_slots.core.types import JSON, Message, Say, Task
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import WORKSPACE, SlotSpec
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import (
    Act,
    NoopPolicy,
    OraclePolicy,
    Policy,
    solution_steps,
    turns_taken,
)

CLASSES: Mapping[str, tuple[Cheat, ...]] = {
    "files that a test run loads": PLANTS,
    "programs, libraries, settings": SHADOWS,
    "changed tests, verdicts": VERDICTS,
    "code that attacks its tests": (*SOURCES, *FORGERIES),
    "surviving processes": SURVIVORS,
    "guessed answers": ANSWERS,
    "leaked answers": LEAKS,
    "answers in words": REPLIES,
    "parts of the solution": DERIVED,
}
"""All cheats by class of attack. The classes follow public reports on agents and audits of benchmarks."""

BANK: tuple[Cheat, ...] = tuple(cheat for cheats in CLASSES.values() for cheat in cheats)

_CODE = frozenset(cheat.name for cheat in (*SOURCES, *FORGERIES))
"""The cheats that need Python code of the work."""

_WHOLE = frozenset(cheat.name for cheat in (*ANSWERS, *LEAKS, ECHO))
"""The cheats that could give the whole solution, so they are played over unsolved work, and a score of 0 decides."""

WRONG_WORK = "a wrong solution"
_ALL = 100_000
"""More tasks than anybody checks."""

CONVERSATIONS = 4
"""Tasks that are played by default if solutions call function tools: each takes milliseconds, and one task says little
about a score that compares states."""

_EVERY = 20
"""The number of policies after which a check reports its progress."""

_TOLERANCE = 1e-9
_LEAST_HOLLOW_S = 30.0
"""The time limit of hollow work that is used, if the reference solution takes no time."""
_LEAST_S = 15.0
"""The time limit of work that nobody expects to be right, if the reference solution takes no time."""
_PIECE = 90_000
"""The length of the pieces of base64 in which files are written; less than a command may have."""


class State(StrEnum):
    """What the plays of a cheat, or of a class of cheats, prove."""

    OPEN = "open"
    """It earned a reward, or one part of a score."""
    LABELLED = "labelled"
    """The official verdict accepts it, and the reward does not."""
    UNKNOWN = "unknown"
    """It could not be played."""
    NOT_TESTED = "not tested"
    """It earned nothing, but it could not have earned anything either."""
    CLOSED = "closed"
    """It earned nothing where only its attack was missing."""
    NOT_APPLICABLE = "does not apply"
    """It was not played, because it could do nothing in this environment."""


class CheatPolicy(Policy):
    """Runs one cheat with the agent's tool, then reports that the work is done."""

    def __init__(self, cheat: Cheat, tool: CommandTool = TERMINAL, changed: Sequence[str] = ()) -> None:
        self._cheat, self._tool, self._changed = cheat, tool, "\n".join(changed)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        if any(message.get("role") == "assistant" for message in messages):
            return "Done."
        known = f"export {CHANGED}={shlex.quote(self._changed)}\n" if CHANGED in self._cheat.script else ""
        return self._tool.calls([known + _attack(self._cheat, messages)])


def _attack(cheat: Cheat, messages: Sequence[Message], files: Sequence[str] = ()) -> str:
    """Return the command that runs a cheat, over hollow work whose hollowed files have these paths."""
    asked = "\n".join(str(message.get("content")) for message in messages if message.get("role") == "user")
    known = f"export TASK={shlex.quote(asked)}\n" if "$TASK" in cheat.script else ""
    if modules := "\n".join(path for path in files if is_code(path)):
        known += f"export {MODULES}={shlex.quote(modules)}\n"
    if files and not any(is_below(path, [WORKSPACE]) for path in files):
        shared = posixpath.commonpath([posixpath.dirname(path) for path in files])
        known += f"cd {shlex.quote(shared)}\n" if shared != "/" else ""  # a cheat would search the whole root
    return known + cheat.script


class HollowPolicy(OraclePolicy):
    """Plays the reference solution, then writes these files over it, then runs a cheat, if one is given. Text with
    which the solution ends comes last."""

    def __init__(self, files: Mapping[str, bytes], tool: CommandTool, cheat: Cheat | None = None) -> None:
        super().__init__()
        self._files, self._tool, self._cheat = files, tool, cheat

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        assert context.task is not None
        acts, turn = actions(context.task), turns_taken(context, messages)
        if turn < acts:
            return super().act(context, messages)
        if turn == acts:
            attack = [] if self._cheat is None else [_attack(self._cheat, messages, [*self._files])]
            return self._tool.calls([*writing(self._files), *attack])
        rest = [step.text for step in solution_steps(context.task)[acts:] if isinstance(step, Say)]
        return (*rest, "Done.")[min(turn - acts - 1, len(rest))]

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        assert context.task is not None
        acts, steps = actions(context.task), solution_steps(context.task)
        return turns_taken(context, messages) > acts + max(1, len(steps) - acts)


def writing(files: Mapping[str, bytes | None]) -> Iterator[str]:
    """Yield commands that write the files, which keep their modes, or remove those that are None."""
    for path, data in files.items():
        if data is None:
            yield f"rm -rf -- {shlex.quote(path)}\n"
            continue
        text = base64.b64encode(data).decode()
        # The length of a piece is a multiple of 4, so each can be decoded alone.
        for start in range(0, max(len(text), 1), _PIECE):
            to = f"{'>>' if start else '>'} {shlex.quote(path)}"
            yield f"base64 -d <<'END' {to}\n{text[start : start + _PIECE]}\nEND\n"


@dataclass(frozen=True, slots=True)
class Witness:
    """What an agent did to earn a reward on a task, one step per text."""

    task: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The rewards of one policy. The reward of an unscored rollout is None; `error` then has the reason."""

    policy: str
    what: str
    wanted: str
    rewards: tuple[float | None, ...]
    ok: bool
    error: str = ""
    state: State | None = None
    """What the plays of a cheat prove; None for the solutions and for doing nothing."""
    reason: str = ""
    """Why the cheat is not tested, or does not apply."""
    parts: tuple[str, ...] = ()
    """The parts of the score that the cheat earned in full."""
    officials: tuple[float | None, ...] = ()
    """The official verdicts."""
    labels: tuple[str, ...] = ()
    """The names of the labels that the cheat got."""
    witness: Witness | None = None
    """The steps of a play that is derived from the reference solution, if it earned what it should not."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a check. `solved` is False if one of the tasks has no solution to play.

    `classes` maps each class of attack to its state, and `parts` each part of a score that has several. A part is
    `free` if doing nothing earns it in full. `hollow` describes the work on which attacks on tests were played; it is
    empty if there was none. `ways` maps the ways in which the scores judged the plain plays (`Way`) to an example of a
    command or function each. `warnings` report what a score depends on, and what it does not see.
    """

    environment: str
    tasks: tuple[str, ...]
    lines: tuple[PolicyResult, ...]
    solved: bool
    skipped: int = 0
    """The number of cheats that were not played, because doing nothing or a solution already got a wrong reward."""
    classes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    hollow: str = ""
    warnings: tuple[str, ...] = ()
    ways: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(line.ok for line in self.lines)

    @property
    def proven(self) -> bool:
        """Whether the solutions could be played, and every cheat that could do something here."""
        return self.solved and not self.untried

    @property
    def not_tested(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the cheats that are not tested, by reason."""
        return self._by_reason(State.NOT_TESTED)

    @property
    def not_applicable(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the cheats that could do nothing in this environment, by reason."""
        return self._by_reason(State.NOT_APPLICABLE)

    def _by_reason(self, state: State) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for line in self.lines:
            if line.state is state:
                found[line.reason] = (*found.get(line.reason, ()), line.policy)
        return found

    @property
    def untried(self) -> tuple[str, ...]:
        """The names of the cheats that could not be tried, because no tool of the agent ran commands."""
        return self.not_tested.get(_NO_COMMANDS, ())

    @property
    def tests_nothing(self) -> bool:
        """Whether no cheat and no wrong solution could be tried, so that the check only shows what solutions score."""
        idle = (None, State.NOT_TESTED, State.NOT_APPLICABLE)
        tried = any(line.policy.startswith(_WRONG) or line.state not in idle for line in self.lines)
        return bool(self.untried or self.not_applicable) and not tried

    def to_json(self) -> dict[str, JSON]:
        reasons: dict[str, JSON] = {"not_tested": self.not_tested, "does_not_apply": self.not_applicable}
        return {**asdict(self), **reasons, "proven": self.proven, "holds": self.holds}


@dataclass(frozen=True, slots=True)
class _Base:
    """Hollow work of one task on which cheats are played, and what it earns without them."""

    task: Task
    hollow: Hollow
    earned: Trajectory

    @property
    def reward(self) -> float:
        return self.earned.reward or 0.0


@dataclass(slots=True)
class EnvironmentProof:
    """Checks an open environment on an open pool of slots."""

    environment: Environment
    pool: SlotPool
    cheats: Sequence[Cheat] = BANK
    progress: Callable[[PolicyResult], None] = lambda line: None
    always: bool = False
    """Play the cheats even if doing nothing or a solution got a wrong reward."""
    attacks: dict[str, list[Group]] = field(default_factory=dict)
    """The plays of each cheat, one for each task."""
    _lines: dict[str, PolicyResult] = field(default_factory=dict)
    _played: dict[str, list[tuple[Task, Group]]] = field(default_factory=dict)
    """The plays of the solutions and of doing nothing."""
    _left: dict[str, LeftFiles] = field(default_factory=dict)
    """What the solutions of tasks left, by task id."""
    _before: dict[str, LeftFiles] = field(default_factory=dict)
    """The same files where nothing was done."""
    _done: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """The rewards of the cheats that did all that the solution of a task does, by task id and name."""
    _bases: dict[str, _Base] = field(default_factory=dict)
    """Hollow work by task id."""
    _wordless: dict[str, _Base] = field(default_factory=dict)
    """The calls of the reference solution without its words, by task id."""
    _fresh: dict[str, float | None] = field(default_factory=dict)
    """What doing nothing earned before anything else was played, for tasks whose solutions call function tools."""
    _solved: dict[str, tuple[Play, Play]] = field(default_factory=dict)
    """Two plays of the reference solutions of these tasks, if they got the full score."""
    _leak: str = ""
    """What a rollout left for the next one."""
    _judged: dict[str, list[Judged]] = field(default_factory=dict)
    """The plays that are derived from the reference solutions, by task id."""
    _turns: TurnRecorder = field(default_factory=TurnRecorder)
    _no_base: str = ""
    """Why there is no hollow work."""
    _no_code: str = ""
    """Why there is no hollow work of Python code."""
    _unnoticed: list[str] = field(default_factory=list)
    _copy: str = ""
    """The other copy of a file of the solution that an attack found without earning anything."""
    _ways: dict[Way, str] = field(default_factory=dict)
    _tool: CommandTool | None = None
    """The tool with which the attacks are played."""

    async def run(self, count: int | None) -> Proof:
        """Play the first `count` tasks (None: one, or `CONVERSATIONS`) with the solutions, with a policy that does
        nothing, and with the cheats. Raises `ConfigError` if the environment has no tasks."""
        tasks = await first_tasks(self.environment, count or 1)
        if count is None and any(map(steps_of, tasks)):
            tasks = await first_tasks(self.environment, CONVERSATIONS)
        return await self.run_tasks(tasks, await self._further_tasks(tasks))

    async def _further_tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Return some tasks of the environment that are not played, because their solutions are played on the others.
        There are none if reading them could wait or fail."""
        environment, found = self.environment, list[Task]()
        if not isinstance(environment, FunctionEnvironment) or not environment.counts_tasks:
            return []
        if not any(steps_of(task) for task in tasks):
            return []
        played = {task.id for task in tasks}
        with contextlib.suppress(PalaestraError):
            async for task in environment.tasks():
                if task.id not in played:
                    found.append(task)
                if len(found) == MOST_SISTERS:
                    break
        return found

    async def run_tasks(self, tasks: Sequence[Task], further: Sequence[Task] = ()) -> Proof:
        """Play these tasks. The solutions of `further` tasks are only played on them."""
        resolved = {task.id: each for task in tasks if (each := await self._resolved(task)) is not None}
        solved = all(task.solution is not None for task in resolved.values())
        workspaces = ReadWorkspaces(self.pool)
        async with policy_runs(self.environment, self.pool, workspaces, self._turns, prepare_once=True) as runs:
            workspaces.read_live(self.pool.rung)
            await self._play_plain(tasks, resolved, solved, runs)
            goes_on = not self._leak and (self.always or all(line.ok for line in self._lines.values()))
            skipped = 0 if goes_on else len(self.cheats)
            if not skipped:
                await self._play_derived([*tasks, *further], resolved, runs)
                if not any(left.is_bare for left in self._left.values()):
                    workspaces.read_nothing()
                await self._find_bases(tasks, resolved, runs)
                await self._play_words(resolved, runs)
                await self._play_cheats(tasks, runs)
        names, warnings = tuple(task.id for task in tasks), tuple(self._warnings(list(resolved.values())))
        hollow = "; ".join(f"{name}: {base.hollow.what}" for name, base in self._bases.items())
        lines = tuple(self._lines.values())
        classes, parts, ways = self._classes(), self._part_states(), self._ways_used()
        return Proof(self.environment.name, names, lines, solved, skipped, classes, parts, hollow, warnings, ways)

    async def _resolved(self, task: Task) -> Task | None:
        """Return the task as the policies play it; None for an unusable task, whose groups report the reason."""
        try:
            return await self.environment.resolve(task)
        except (TaskError, InfraError):
            return None

    async def _play_plain(
        self, tasks: Sequence[Task], resolved: Mapping[str, Task], solved: bool, runs: PolicyRuns
    ) -> None:
        """Play the solutions, and then doing nothing. Read what the solutions left, and what was there before. If a
        rollout leaves something for the next one, the other policies would prove nothing, so they are not played."""
        specs: dict[str, SlotSpec] = {}
        for task in tasks:
            with contextlib.suppress(PalaestraError, ValueError):  # the groups of an unusable task report the reason
                if task.id in resolved:
                    specs[task.id] = self.environment.slot_spec(resolved[task.id], Phase.GRADE)

        async def play(name: str, policy: Policy, some: Sequence[Task], reads: Mapping[str, LeftFiles]) -> None:
            numbered = {task.id: n for n, task in enumerate(tasks)}
            watching = WAYS.set(self._ways)
            try:
                groups = [
                    await play_and_read(runs, policy, task, numbered[task.id], reads.get(task.id)) for task in some
                ]
            finally:
                WAYS.reset(watching)
            self._played[name] = list(zip(some, groups, strict=True))
            self._report_result(self._judge_plain(name))

        if solved:
            self._left = {name: LeftFiles(spec) for name, spec in specs.items()}
            await self._play_idle(tasks, resolved, runs)
            await play("oracle", OraclePolicy(), tasks, self._left)
            if await self._play_again(tasks, runs):
                return
        for n in range(max((len(task.solutions) for task in resolved.values()), default=0)):
            some = [task for task in tasks if task.id in resolved and len(resolved[task.id].solutions) > n]
            await play(f"solutions[{n}]", OraclePolicy(n + 1), some, {})
        for n in range(max((len(task.wrong_solutions) for task in resolved.values()), default=0)):
            some = [task for task in tasks if task.id in resolved and len(resolved[task.id].wrong_solutions) > n]
            await play(f"{_WRONG}[{n}]", OraclePolicy(n, wrong=True), some, {})
        # Only now it is known which files the solutions leave; the same ones are read where nothing was done.
        self._before = {
            name: LeftFiles(spec, tuple(self._left[name].files) if name in self._left else ())
            for name, spec in specs.items()
        }
        await play("noop", NoopPolicy(), tasks, self._before)
        if self._leak:
            return
        self._tool = await self._find_tool(specs, runs)

    @property
    def _derives(self) -> bool:
        """Whether to play what can be derived from the reference solutions."""
        return any(cheat in DERIVED for cheat in self.cheats)

    async def _play_idle(self, tasks: Sequence[Task], resolved: Mapping[str, Task], runs: PolicyRuns) -> None:
        """Do nothing on the tasks whose solutions call function tools, before anything else is played."""
        for n, task in enumerate(tasks if self._derives else ()):
            if task.id in resolved and steps_of(resolved[task.id]) is not None:
                group = await runs.play(NoopPolicy(), task, n)
                self._fresh[task.id] = next((each.reward for each in group.trajectories), None)

    async def _play_again(self, tasks: Sequence[Task], runs: PolicyRuns) -> bool:
        """Play the reference solutions of these tasks again. Return whether the first play left something."""
        rewards, error = list[float | None](), ""
        for n, (task, group) in enumerate(self._played["oracle"]):
            if task.id not in self._fresh:
                continue
            first = self._turns.play(group, self._left[task.id].files)
            if first.reward is None or first.reward < FULL:
                continue
            reads = self._reads(task)
            group = await play_and_read(runs, OraclePolicy(), task, n, reads)
            self._solved[task.id] = first, self._turns.play(group, reads.files if reads else None)
            rewards.append(self._solved[task.id][1].reward)
            if found := leak(*self._solved[task.id]):
                error = error or f"{task.id}: {found}"
        self._leak = error
        if rewards:
            what = "the reference solution, played again"
            self._report_result(PolicyResult(_AGAIN, what, "the same", tuple(rewards), not error, error))
        return bool(error)

    def _reads(self, task: Task) -> LeftFiles | None:
        """Return what reads the files that the reference solution left; None if it left none."""
        left = self._left[task.id]
        return LeftFiles(left.spec, tuple(left.files)) if left.files else None

    async def _play_derived(self, every: Sequence[Task], resolved: Mapping[str, Task], runs: PolicyRuns) -> None:
        """Play what can be derived from the reference solutions, and the solutions of other tasks."""
        for n, task in enumerate(every):
            if task.id not in self._solved:
                continue

            async def play(steps: Steps, task: Task = task, n: int = n) -> Play:
                reads = self._reads(task)
                group = await play_and_read(runs, StepsPolicy(steps), task, n, reads)
                return self._turns.play(group, reads.files if reads else None)

            solved, again = self._solved[task.id]
            there = self._before[task.id].files if task.id in self._before else {}
            solved = replace(solved, before={**solved.before, **named_files(there)})
            sisters = [each for each in every if each.id != task.id]
            self._judged[task.id] = await judged_plays(resolved[task.id], sisters, solved, again, play)

    def _judge_derived(self, cheat: Cheat) -> PolicyResult:
        """Judge the plays that one of the cheats derives from the reference solutions."""
        plays = [(name, each) for name, every in self._judged.items() for each in every if each.play.cheat is cheat]
        paid = next(((name, each) for name, each in plays if each.what and not each.note), None)
        self._unnoticed += [f"{name}: {each.what}" for name, each in plays if each.what and each.note]
        rewards, wanted = tuple(each.reward for _, each in plays), WANTED.get(cheat, WANTED[WORDS])
        if not plays:
            none = "" if self._solved else self._no_function_tools
            state = State.NOT_TESTED if none == _NO_REFERENCE else State.NOT_APPLICABLE
            return PolicyResult(cheat.name, cheat.what, wanted, (), True, "", state, none or _NO_PART)
        if paid is None:
            return PolicyResult(cheat.name, cheat.what, wanted, rewards, True, "", State.CLOSED)
        name, each = paid
        witness = Witness(name, tuple(map(shown_step, each.play.steps)))
        error = f"{name}: {each.what}; {_SEE_STATE}"
        return PolicyResult(cheat.name, cheat.what, wanted, rewards, False, error, State.OPEN, witness=witness)

    @property
    def _no_function_tools(self) -> str:
        """Why nothing can be derived from a reference solution."""
        return _NO_CALLS if "oracle" in self._played else _NO_REFERENCE

    async def _play_cheats(self, tasks: Sequence[Task], runs: PolicyRuns) -> None:
        """Play the cheats concurrently, as many at a time as there are processors."""
        width = asyncio.Semaphore(os.cpu_count() or 1)
        results: dict[str, PolicyResult] = {}

        async def play(cheat: Cheat) -> None:
            reason = self._why_not_tested(cheat)
            played: list[tuple[Task, Group]] = []
            if self._can_act(cheat):
                async with width:
                    for n, task in enumerate(tasks):
                        try:
                            first = self._trajectory("oracle", task) or self._trajectory("noop", task)
                            async with asyncio.timeout(longest_s(first)):
                                played.append((task, await self._attack(cheat, task, n, runs)))
                        except TimeoutError:
                            reason = _TOO_LONG
            judged = self._judge_derived(cheat) if cheat in DERIVED else self._judge_cheat(cheat, played, reason)
            results[cheat.name] = judged
            self.attacks[cheat.name] = [group for _, group in played]
            self.progress(results[cheat.name])

        async with asyncio.TaskGroup() as group:
            for cheat in self.cheats:
                group.create_task(play(cheat))
        self._lines |= {cheat.name: results[cheat.name] for cheat in self.cheats}

    async def _attack(self, cheat: Cheat, task: Task, n: int, runs: PolicyRuns) -> Group:
        """Play a cheat on a task. Note whether it did all that the solution does, if that only removes files or makes
        directories or empty files: removing the whole workspace also removes one file, for example."""
        left = self._left.get(task.id)
        if left is None or not left.is_bare or self._hollow_for(cheat, task) is not None:
            return await runs.play(self._policy(cheat, task), task, n)
        reads = LeftFiles(left.spec, (), others=dict(left.others))
        group = await play_and_read(runs, self._policy(cheat, task), task, n, reads)
        if reads.includes(left):
            reward = next((each.reward for each in group.trajectories), None)
            self._done.setdefault(task.id, {})[cheat.name] = reward
        return group

    def _report_result(self, line: PolicyResult) -> None:
        self._lines[line.policy] = line
        self.progress(line)

    @property
    def _remedy(self) -> str:
        """What an author can do about a score that a cheat earns."""
        if Way.OUTSIDE in self._ways or not self._ways:
            return "check more of the result, so that work without it earns nothing"
        return (
            "judge outside of the sandbox what the work returns or leaves (sandbox.call, sandbox.read_text), or run "
            "tests with palaestra.grading.run_tests"
        )

    def _hollow_for(self, cheat: Cheat, task: Task) -> _Base | None:
        """Return the hollow work over which the cheat is played on this task; None for unsolved work."""
        base = self._wordless.get(task.id) if cheat is EVERY_NUMBER else self._bases.get(task.id)
        if base is None or cheat.name in _WHOLE or cheat is EVERY_NUMBER:
            return base if cheat is EVERY_NUMBER else None
        return base if base.hollow.twin or cheat.name not in _CODE else None

    def _policy(self, cheat: Cheat, task: Task) -> Policy:
        if cheat in REPLIES:
            return EchoPolicy() if cheat is ECHO else WordlessPolicy(numbers=True)
        tool = self._tool
        assert tool is not None  # or the cheat could not act
        base = self._hollow_for(cheat, task)
        left = self._left[task.id].files if task.id in self._left else ()
        return CheatPolicy(cheat, tool, [*left]) if base is None else HollowPolicy(base.hollow.files, tool, cheat)

    def _why_not_tested(self, cheat: Cheat) -> str:
        """Return why a score of 0 would not prove that the cheat earns nothing; nothing if it would."""
        if cheat is EVERY_NUMBER and self._wordless and not any(map(self._needs_words, self._wordless.values())):
            return _NO_WORDS
        if self._tool is None and cheat not in REPLIES:
            return _NO_COMMANDS if self.environment.scores_read_sandbox else _NO_WAY
        if cheat.name in _WHOLE or cheat is EVERY_NUMBER:
            return ""
        if cheat.name in _CODE:
            return "" if self._has_code else self._no_code
        return "" if self._bases else self._no_base

    def _needs_words(self, wordless: _Base) -> bool:
        """Return whether the reference solution earns more with its words than without."""
        solved = self._trajectory("oracle", wordless.task)
        return solved is None or wordless.reward < min(FULL, solved.reward or 0.0)

    def _can_act(self, cheat: Cheat) -> bool:
        """Return whether there is a tool that runs commands and Python code, if the cheat needs them."""
        if cheat in REPLIES:
            return True
        if cheat in DERIVED or self._tool is None:
            return False
        read = [each.python for each in self._before.values()]
        lacks_code = bool(read) and not self._has_code and all(each is False for each in read)
        return not (cheat.name in _CODE and lacks_code)

    @property
    def _has_code(self) -> bool:
        """Whether there is hollow work of Python code."""
        return any(base.hollow.twin for base in self._bases.values())

    async def _find_bases(self, tasks: Sequence[Task], resolved: Mapping[str, Task], runs: PolicyRuns) -> None:
        """Find hollow work of each task for the cheats, preferably of Python code."""
        for n, task in enumerate(tasks):
            why = {True: _NO_PYTHON, False: _NO_TEXT}
            if obstacle := self._obstacle(task, resolved.get(task.id)):
                why = dict.fromkeys(why, obstacle)
            unnoticed: dict[bool, str] = {}
            left = {} if obstacle else self._left[task.id].files
            for hollow in hollows({} if obstacle else self._before[task.id].files, left):
                code = bool(hollow.twin)
                earned, why[code] = await self._hollowed(hollow, task, n, runs)
                if earned is not None:
                    self._bases[task.id] = _Base(task, hollow, earned)
                    break
                if why[code] == _UNNOTICED:
                    unnoticed.setdefault(code, hollow.what)
            base = self._bases.get(task.id)
            self._no_base = self._no_base or ("" if base else why[False])
            self._no_code = self._no_code or ("" if base and base.hollow.twin else why[True])
            self._unnoticed += [
                f"{task.id}: its score does not depend on what the reference solution leaves: it is full with {what}"
                for code, what in unnoticed.items()
                if why[code] == _UNNOTICED
            ]

    def _obstacle(self, task: Task, resolved: Task | None) -> str:
        """Return why there can be no hollow work of a task; nothing if there can be."""
        solved, left = self._trajectory("oracle", task), self._left.get(task.id)
        if resolved is None or resolved.solution is None:
            return _NO_REFERENCE
        if solved is None or solved.reward is None or solved.reward < FULL:
            return "the reference solution does not get the full score"
        if self._tool is None:
            return _NO_COMMANDS
        if actions(resolved) + 2 > self.environment.agent_of(resolved).max_turns:
            return "the reference solution leaves the agent no turn for an attack"
        if left is None or not left.files:
            return "the score sees no files that the reference solution leaves"
        return ""

    async def _play_words(self, resolved: Mapping[str, Task], runs: PolicyRuns) -> None:
        """Play the calls of the reference solutions without their words, and with further calls."""
        for n, (task, solution) in enumerate(self._played.get("oracle", ())):
            solved = self._trajectory("oracle", task)
            if solved is None or solved.reward is None:
                continue
            group = await runs.play(WordlessPolicy(numbers=False), task, n)
            if group.trajectories:
                self._wordless[task.id] = _Base(task, Hollow("its calls without words", {}), group.trajectories[0])
            calls = [*further_calls(resolved[task.id], solution.tools)] if solved.state is not None else []
            if not calls or solved.reward < FULL:
                continue
            group = await runs.play(FurtherCallsPolicy(calls), task, n)
            for each in group.trajectories:
                if each.reward is not None and each.reward >= FULL and each.state != solved.state:
                    names = ", ".join(call.name for call in calls)
                    found = f"{task.id}: its score is full, although further calls changed its state: {names}"
                    self._unnoticed.append(found)

    async def _hollowed(self, hollow: Hollow, task: Task, n: int, runs: PolicyRuns) -> tuple[Trajectory | None, str]:
        """Play hollow work. Return its rollout, or None and the reason why attacks on it would decide nothing."""
        solved = self._trajectory("oracle", task)
        earned = await self._play_hollow(hollow.files, task, n, runs)
        if earned is None or earned.reward is None or solved is None:
            return None, "the solution with wrong results could not be scored"
        if earned.reward >= FULL:
            return None, _UNNOTICED
        if earned.beside.duration_s > enough_time(solved.beside.duration_s, _LEAST_HOLLOW_S):
            return None, "the check takes too long over wrong results"
        if hollow.twin:
            twin = await self._play_hollow(hollow.twin, task, n, runs)
            if twin is None or twin.reward is None or twin.reward < FULL:
                return None, "a change that keeps the results of the code also lowers the score"
        return earned, ""

    async def _play_hollow(self, files: Mapping[str, bytes], task: Task, n: int, runs: PolicyRuns) -> Trajectory | None:
        assert self._tool is not None  # or there would be an obstacle
        group = await runs.play(HollowPolicy(files, self._tool), task, n)
        return group.trajectories[0] if group.trajectories else None

    async def _find_tool(self, specs: Mapping[str, SlotSpec], runs: PolicyRuns) -> CommandTool | None:
        """Return the tool with which the attacks are played: that of the first task that could be played."""
        for number, (task, group) in enumerate(self._played["noop"]):
            if not group.error:
                return await find_command_tool(runs, task, number, group.tools, specs.get(task.id))
        return TERMINAL

    def _trajectory(self, policy: str, task: Task) -> Trajectory | None:
        """Return the rollout of a solution or of doing nothing on a task, if there is one."""
        return next((each for own, group in self._played.get(policy, ()) if own.id == task.id
                     for each in group.trajectories), None)  # fmt: skip

    def _classes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for kind, cheats in CLASSES.items():
            states = {line.state for cheat in cheats if (line := self._lines.get(cheat.name)) is not None}
            worst = next((state for state in State if state in states), None)
            if worst is not None:
                found[kind] = worst.value
        solved = [each for name, plays in self._played.items() if name != "noop" for _, group in plays
                  for each in group.trajectories]  # fmt: skip
        if any(each.detail.get("uncontrolled") for each in solved):
            found["forged results of uncontrolled tests"] = State.OPEN.value
        return found

    @property
    def _weights(self) -> Mapping[str, float]:
        """The share of each part in a score that has several."""
        scores = self.environment.form.scores if isinstance(self.environment, FunctionEnvironment) else []
        total = sum(each.weight for each in scores)
        return {each.hook.name: each.weight / total for each in scores} if len(scores) > 1 and total else {}

    def _lacks(self, part: str, task: Task, earned: Trajectory | None) -> bool:
        """Return whether a rollout earned less of a part than the reference solution."""
        solved = self._trajectory("oracle", task)
        if earned is None or solved is None or part not in solved.metrics or part not in earned.metrics:
            return False
        return earned.metrics[part] < solved.metrics[part] - _TOLERANCE

    def _parts_earned(self, task: Task, base: _Base | None, played: Trajectory) -> list[str]:
        """Return the parts that a cheat earned in full and that the work without the cheat does not earn. Parts that
        the task's floor covers are left out, and all parts of work whose label is certain, because it is not paid."""
        if any(label.certain for label in played.labels):
            return []
        noop = self._trajectory("noop", task)
        found = {
            part: weight
            for part, weight in self._weights.items()
            if self._lacks(part, task, noop)
            and (base is None or self._lacks(part, task, base.earned))
            and part in played.metrics
            and not self._lacks(part, task, played)
        }
        covered = max(0.0, task.floor - ((noop.reward if noop else None) or 0.0))
        return list(found) if sum(found.values()) > covered + _TOLERANCE else []

    def _part_states(self) -> dict[str, str]:
        """Return the state of each part of a score that has several; `free` if doing nothing earns the part."""
        attacked = [line for line in self._lines.values() if line.state is not None]
        found: dict[str, str] = {}
        for part in self._weights if attacked else ():
            if any(part in line.parts for line in attacked):
                found[part] = State.OPEN.value
            elif not any(self._lacks(part, task, self._trajectory("noop", task)) for task, _ in self._played["noop"]):
                found[part] = "free" if "oracle" in self._played else State.NOT_TESTED.value
            else:
                tested = any(self._lacks(part, base.task, base.earned) for base in self._bases.values())
                found[part] = (State.CLOSED if tested else State.NOT_TESTED).value
        return found

    def _ways_used(self) -> dict[str, str]:
        """Return the ways in which the scores judged the work. A score that only reads files compares outside."""
        scored = any(each.reward is not None for plays in self._played.values() for _, group in plays
                     for each in group.trajectories)  # fmt: skip
        found = {way.value: self._ways[way] for way in Way if way in self._ways}
        return found or ({Way.OUTSIDE.value: ""} if scored else {})

    def _warnings(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield warnings to the author about what the scores of these tasks depend on."""
        for task in tasks:
            if task.grading == LIVE:
                yield f"{task.id}: it is graded live, so its score uses programs that the agent may have changed"
            if task.programs:
                yield f"{task.id}: its score may use programs that the agent changed: {', '.join(task.programs)}"
            if "/" in task.paths:
                yield f"{task.id}: its score sees all of the agent's new libraries and packages (paths: /)"
        for task, group in self._played.get("oracle", ()):
            for solved in group.trajectories:
                left_out = solved.detail.get("left_out")
                if left_out and (solved.reward is None or solved.reward < FULL):
                    shown = ", ".join(left_out[:5])
                    yield f"{task.id}: the reference solution changes {shown}, hidden from the score; add them to paths"
                if names := solved.detail.get("uncontrolled"):
                    yield f"{task.id}: no control covers {len(names)} of its tests, such as {names[0]}"
        yield from self._unnoticed
        for name, rewards in self._done.items():
            if paid := [cheat for cheat, reward in rewards.items() if reward is not None and reward >= FULL]:
                yield f"{name}: {_TOO_MUCH}: {', '.join(paid)}"
        if self._copy:
            yield f"{self._copy}; the first copies that were tried earned nothing"
        if Way.EXIT_CODE in self._ways:
            yield _ADVICE.format(self._ways[Way.EXIT_CODE])

    def _judge_plain(self, name: str) -> PolicyResult:
        """Judge the plays of a solution or of doing nothing."""
        groups = self._played[name]
        played = [(task, each) for task, group in groups for each in group.trajectories]
        rewards = tuple(each.reward for _, each in played)
        error = _first_error(groups)
        good = len(played) == len(groups) and None not in rewards  # a task without a rollout proves nothing
        if name == "noop" or name.startswith(_WRONG):
            high = [(task, each) for task, each in played if not (each.reward or 0.0) <= task.floor]
            good = good and not high
            said = _IDLE if name == "noop" else _PAID
            if name == "noop":
                for task, each in high:
                    if found := leak_to_idle(self._fresh.get(task.id), each.reward, task.floor):
                        self._leak = self._leak or f"{task.id}: {found}"
            error = error or self._leak
            error = error or next((said.format(task.id, each.reward, task.floor) for task, each in high), "")
            what = "doing nothing" if name == "noop" else WRONG_WORK
            return PolicyResult(name, what, _at_most(groups), rewards, good, error)
        low = [(task, each) for task, each in played if each.reward is None or each.reward < FULL]
        why = next((f"{task.id}: {found}" for task, each in low if (found := self._why_low(task, each))), "")
        what = "the reference solution" if name == "oracle" else "a further correct solution"
        return PolicyResult(name, what, f"{FULL:g}", rewards, good and not low, error or why)

    def _why_low(self, task: Task, solved: Trajectory) -> str:
        """Return what the record says about a solution that did not get the full score."""
        for name in ("work_breaks_check", "difference"):
            if found := solved.detail.get(name):
                return str(found)
        if left_out := solved.detail.get("left_out"):
            return f"the score does not see {', '.join(left_out[:5])}"
        low = [part for part in self._weights if self._lacks(part, task, solved)]
        scored = "it is not scored" if solved.reward is None else f"it scores {solved.reward:g}"
        return f"{scored} and lacks {', '.join(low)}" if low else scored

    def _judge_cheat(self, cheat: Cheat, groups: Sequence[tuple[Task, Group]], reason: str) -> PolicyResult:
        played = [(task, self._hollow_for(cheat, task), each) for task, group in groups for each in group.trajectories]
        labelled, earned = False, ""
        parts: dict[str, None] = {}
        done = [task.id for task, _, _ in played if cheat.name in self._done.get(task.id, ())]
        for task, base, each in played:
            if task.id in done:
                continue
            most = max(task.floor, base.reward if base else 0.0) + _TOLERANCE
            # Not `>`, which would be false for a reward of nan.
            if each.reward is not None and not each.reward <= most and not earned:
                earned = f"{task.id}: it earns {each.reward:g}; {self._remedy}"
            official = each.official_reward
            before = (base.earned.official_reward or 0.0) if base else 0.0
            labelled = labelled or (official is not None and not official <= max(most, before + _TOLERANCE))
            if own := self._parts_earned(task, base, each):
                parts |= dict.fromkeys(own)
                earned = earned or f"{task.id}: it earns {', '.join(own)}; {self._remedy}"
        refused, copy = _first_refusal(groups), _first_copy(groups)
        if earned:
            state = State.OPEN
        elif labelled:
            state = State.LABELLED
        elif len(played) != len(groups) or refused:
            state = State.UNKNOWN
        elif reason in (_NO_WAY, _NO_WORDS):
            state = State.NOT_APPLICABLE
        elif done and len(done) == len(played):
            state, reason = State.NOT_TESTED, _DOES_WORK
        else:
            state = State.NOT_TESTED if reason else State.CLOSED
        if state is not State.OPEN and is_code(copy):  # other files often have common names
            self._copy = self._copy or copy
        return PolicyResult(
            cheat.name,
            cheat.what,
            _at_most(groups, *(base.reward for _, base, _ in played if base)) if groups else "-",
            tuple(each.reward for *_, each in played),
            state not in (State.OPEN, State.UNKNOWN),
            _first_error(groups) or refused or (copy or earned if state is State.OPEN else ""),
            state,
            reason if state in (State.NOT_TESTED, State.NOT_APPLICABLE) else "",
            tuple(parts),
            tuple(each.official_reward for *_, each in played),
            tuple(dict.fromkeys(label.name for *_, each in played for label in each.labels)),
        )


_IDLE = (
    "{0}: doing nothing earns {1:g}, and its floor is {2:g}. If that is right for this task, give it "
    "Task(floor={1:g}); otherwise, let the score ask for something that was not there before"
)
_ADVICE = (
    "the score uses the exit status or output of commands such as {!r}; if they run the agent's code, which can end or "
    "print anything, use sandbox.call or palaestra.grading.run_tests instead"
)
_TOO_LONG = "its play was stopped, because it took several times as long as the solution or doing nothing"
_DOES_WORK = "the attack also does what the reference solution does"
_TOO_MUCH = "attacks that also do what the reference solution does get the full score; let it ask for what must stay"
_NO_COMMANDS = "no tool of the agent ran the commands that were tried"
_NO_WAY = "the agent has no tool that runs commands, and the score reads no files"
_NO_REFERENCE = "there is no reference solution to attack"
_NO_CALLS = "the reference solution calls no function tools"
_NO_PART = "the solution has no such part, or there is no other task"
_AGAIN = "oracle again"
_SEE_STATE = "let the score ask for what the calls change"
_NO_WORDS = "the score does not depend on what the agent says"
_WRONG = "wrong_solutions"
_PAID = "{0}: this wrong solution earns {1:g}, and the floor of the task is {2:g}: let the score notice what is wrong"
_NO_PYTHON = "the reference solution leaves no Python code"
_NO_TEXT = "the reference solution leaves no text files"
_UNNOTICED = "the score does not depend on what the reference solution leaves"


def _first_error(groups: Sequence[tuple[Task, Group]]) -> str:
    reasons = [(task, group.error) for task, group in groups]
    reasons += [(task, each.error) for task, group in groups for each in group.trajectories]
    return next((f"{task.id}: {reason}" for task, reason in reasons if reason), "")


def _first_refusal(groups: Sequence[tuple[Task, Group]]) -> str:
    """Return why the first call that its tool did not accept was refused; nothing if all were accepted."""
    played = [(task, each) for task, group in groups for each in group.trajectories]
    refused = [(task, each) for task, each in played if each.tool_calls_schema_valid < each.tool_calls_attempted]
    return next((f"{task.id}: the agent's tool did not accept the attack: {each.tool_errors[-1].error}"
                 for task, each in refused if each.tool_errors), "")  # fmt: skip


def _first_copy(groups: Sequence[tuple[Task, Group]]) -> str:
    """Return the path of the first other copy of a file that an attack used; nothing if it used none."""
    texts = [(task, str(message.get("content"))) for task, group in groups for each in group.trajectories
             for message in each.messages if message.get("role") == "tool"]  # fmt: skip
    return next((f"{task.id}: the agent's sandbox has another copy of what the solution changes: {found[1]}"
                 for task, text in texts if (found := re.search(f"{COPIED}([^\\\\\n\"]+)", text))), "")  # fmt: skip


def _at_most(groups: Sequence[tuple[Task, Group]], *further: float) -> str:
    return f"<= {max([*further, *(task.floor for task, _ in groups)]):g}"


def longest_s(first: Trajectory | None) -> float | None:
    """Return the time limit of work that nobody expects to be right: several times what the reference solution took, or
    doing nothing without one, because work that stops the tests would otherwise take all their time. None if nothing is
    known."""
    return None if first is None else enough_time(first.beside.duration_s, _LEAST_S)


def check_environment(
    reference: str, settings: Sequence[str], *, tasks: int | None, only: Sequence[str] = (), quiet: bool = False
) -> Proof:
    """Check the environment that `reference` names, on its first `tasks` tasks; None means the tasks that the settings
    choose, or the first if they choose none. Raises `ConfigError` if it cannot be loaded, and for an unknown
    cheat or setting."""
    with exported(read_keys(Path.cwd())):
        form, parsed = load("env check", reference, settings)
        return asyncio.run(_run_checks(form, parsed, tasks, only, quiet))


def cheats_named(only: Sequence[str]) -> tuple[Cheat, ...]:
    """Return the cheats with these names, or all cheats if `only` is empty. Raises `ConfigError` for an unknown
    name."""
    known = {cheat.name: cheat for cheat in BANK}
    for name in only:
        if name not in known:
            raise ConfigError(f"unknown cheat {name!r}.{nearest(name, known)} Available: {', '.join(known)}")
    return tuple(known[name] for name in only) or BANK


async def _run_checks(form: Form, parsed: RunLine, tasks: int | None, only: Sequence[str], quiet: bool) -> Proof:
    config, cheats, played = parsed.env_config, cheats_named(only), 0

    def progress(line: PolicyResult) -> None:
        nonlocal played
        played += 1
        if not line.ok and not quiet:
            sys.stderr.write(f"{line.policy}: FAILED {line.error[:200]}\n")
        elif played % _EVERY == 0 and not quiet:
            sys.stderr.write(f"{played} of at most {len(cheats) + 2} policies played\n")

    async with opened_environment(form, parsed, make_pool(config, local=True)) as (environment, pool):
        return await EnvironmentProof(environment, pool, cheats, progress, always=bool(only)).run(
            tasks or (_ALL if config.only_tasks else None)
        )
