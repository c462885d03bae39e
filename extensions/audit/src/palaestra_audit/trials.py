"""Plays trials: what an agent does on a task, and the machine on which it does it."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from palaestra.envs.config.build import make_pool
from palaestra.envs.form import Form
from palaestra.envs.policy_runs import PolicyRuns, policy_runs
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.records import Group, Trajectory
from palaestra_audit.cheats.command_tool import TERMINAL, CommandTool, find_command_tool
from palaestra_audit.cheats.derived_plays import steps_of
from palaestra_audit.cheats.left_files import LeftFiles, ReadWorkspaces, play_and_read
from palaestra_audit.cheats.proof import writing
from palaestra_audit.cheats.replies import actions
from palaestra_audit.cheats.state_changes import TurnRecorder
from palaestra_audit.code_digests import code_files
from palaestra_audit.host_clock import host_clock, own_code_reads
from palaestra_audit.opening import opened_environment
from palaestra_audit.records import Step, Trial, Verdict, World
from palaestra_slots.core.config import cache_folder
from palaestra_slots.core.errors import InfraError, SandboxError, TaskError
from palaestra_slots.core.io.host_process import check_process
from palaestra_slots.core.types import Blame, Limits, Message, Network, Say, Task, ToolStep
from palaestra_slots.core.user_code import own_folders
from palaestra_slots.images.build_once import build_once
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import (
    Mount,
    Rung,
    Slot,
    SlotSpec,
    Snapshot,
)
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import Act, Policy, solution_steps, turns_taken

_WORLD: ContextVar[World | None] = ContextVar("world", default=None)
"""The machine of the trial that is played; a context variable, because trials are played concurrently."""

CLOCKS = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
)
"""Where distributions install the library that changes the clock of programs."""
_CLOCK_AT = "/opt/palaestra/faketime"

_CLOCK_TEST = "@2031-06-15 12:00:00"
_WAIT_S = 60.0

LOCALE = "en_US.UTF-8"
"""A locale that sorts as dictionaries do."""
_LOCALE_AT = "/opt/palaestra/locales"

_ENDING = "Done."
_MOST_FRESH = 200
_MOST_SHOWN = 500
"""The number of characters of a reply that are printed."""
_OURS = (Blame.SANDBOX, Blame.ENGINE, Blame.FILTER, Blame.RUN)
_TOO_LONG = "the reference solution leaves the agent no turn for more"


def clock_library() -> str | None:
    """Return the library that changes the clock of programs; None if this machine has none."""
    return next((path for path in CLOCKS if Path(path).is_file()), None)


async def locale_folder() -> Path | None:
    """Return a folder with the locale that sorts as dictionaries do, made once; None if this machine cannot make it."""

    async def make(fresh: Path) -> None:
        line = ["localedef", "-i", "en_US", "-f", "UTF-8", "--no-archive", f"{fresh}/{LOCALE}"]
        await check_process(line, f"making the locale {LOCALE} failed", timeout_s=_WAIT_S)

    try:
        return await build_once(cache_folder("locales"), make, timeout_s=_WAIT_S)
    except (OSError, InfraError):
        return None


class WorldPool(SlotPool):
    """A pool whose slots are on the machine of the trial."""

    async def make(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        return await super().make(await _in_world(spec, self.rung), trajectory_id, snapshot)

    async def add(
        self, slot: Slot, number: int | None, spec: SlotSpec, name: str, snapshot: Snapshot | None = None
    ) -> Slot:
        return await super().add(slot, number, await _in_world(spec, self.rung), name, snapshot)


@contextmanager
def _on(world: World) -> Iterator[None]:
    """Make slots on this machine within the block."""
    token = _WORLD.set(None if world == World() else world)
    try:
        with host_clock(world.clock, world.env.get("TZ", "")):
            yield
    finally:
        _WORLD.reset(token)


async def _in_world(spec: SlotSpec, rung: Rung) -> SlotSpec:
    world = _WORLD.get()
    if world is None:
        return spec
    env, mounts = {**dict(spec.env), **world.env}, spec.mounts
    library = clock_library()
    if world.clock and library is not None:
        folder = str(Path(library).parent)
        # Lower levels show directories only at their own paths.
        at = _CLOCK_AT if rung >= Rung.USERNS else folder
        mounts = (*mounts, Mount(folder, at))
        env |= {"LD_PRELOAD": f"{at}/{Path(library).name}", "FAKETIME": world.clock, "FAKETIME_DONT_RESET": "1"}
        if not world.fast:  # otherwise, waits for a given time could end too early or never
            env |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    if world.env.get("LC_ALL") == LOCALE and (locales := await locale_folder()) is not None:
        place = _LOCALE_AT if rung >= Rung.USERNS else str(locales)
        mounts, env = (*mounts, Mount(str(locales), place)), env | {"LOCPATH": place}
    limits: Limits = spec.limits if world.cpus is None else replace(spec.limits, cpus=world.cpus)
    network = Network.OFF if world.offline else spec.network
    workspace = spec.workspace or world.workspace
    return replace(spec, env=tuple(env.items()), mounts=mounts, limits=limits, network=network, workspace=workspace)


class TrialPolicy(Policy):
    """Plays the steps of a trial."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Return the next step. Raises `TaskError` for a step that plays a missing solution."""
        assert context.task is not None
        acts = trial_acts(self._trial, context.task)
        turn = turns_taken(context, messages)
        return acts[turn] if turn < len(acts) else _ENDING

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        assert context.task is not None
        return turns_taken(context, messages) >= len(trial_acts(self._trial, context.task))


def trial_acts(trial: Trial, task: Task) -> list[Act]:
    """Return the turns of a trial. Raises `TaskError` for a step that plays a missing solution."""
    acts: list[Act] = []
    ending: list[Act] = []
    for step in trial.steps:
        if step.reference is not None:
            if task.solution is None and not step.reference:
                raise TaskError(f"task {task.id} has no reference solution")
            solution = solution_steps(task, step.reference)
            count = actions(task) if not step.reference else len(solution)
            for each in solution[:count]:
                acts.append(each.text if isinstance(each, Say) else [_as_tool_step(each)])
            ending += [each.text for each in solution[count:] if isinstance(each, Say)]
        elif step.say is not None:
            acts.append(step.say)
        else:
            acts.append([ToolStep(step.tool, step.arguments)])
    return acts + ending


def _as_tool_step(step: ToolStep | str | Say) -> ToolStep:
    assert not isinstance(step, Say)
    return ToolStep("terminal", {"command": step}) if isinstance(step, str) else step


REFERENCE = Step(reference=0)


def write_steps(tool: CommandTool, files: Mapping[str, bytes | None], then: str = "") -> list[Step]:
    """Return calls that write these files, or remove those that are None, and then run a command."""
    return run_steps(tool, [*writing(files), *([f"{then}\n"] if then else [])])


def run_steps(tool: CommandTool, commands: Sequence[str]) -> list[Step]:
    """Return calls that run these commands."""
    return [Step(tool=each.name, arguments=dict(each.arguments)) for each in tool.calls(commands)]


def step_text(step: Step) -> str:
    """Return a step as a person reads it: files that it writes appear as text."""
    if step.reference is not None:
        return "the reference solution" if not step.reference else f"solutions[{step.reference - 1}]"
    if step.say is not None:
        return f"say {step.say!r}"
    texts = [value for value in step.arguments.values() if isinstance(value, str)]
    others = ", ".join(f"{name} {value}" for name, value in step.arguments.items() if not isinstance(value, str))
    text = _decoded_writes("\n".join(texts))
    return f"{step.tool} ({others}): {text}" if others else f"{step.tool}: {text}"


def shown_steps(steps: Sequence[Step], played: Trajectory | None) -> Iterator[str]:
    """Yield what an agent did in a trial, and what it was told: calls with their replies, its texts, and the answers of
    a user. Without a rollout, yield the steps of the trial."""
    if played is None:
        yield from map(step_text, steps)
        return
    began = False
    for message in played.messages:
        role, text = message.get("role"), message.get("content")
        began = began or role == "assistant"
        if role == "assistant":
            if text:
                yield step_text(Step(say=str(text)))
            for call in message.get("tool_calls") or ():
                function = call["function"]
                yield step_text(Step(tool=function["name"], arguments=json.loads(function["arguments"])))
        elif began:
            yield f"  {'user: ' if role == 'user' else ''}{text!s:.{_MOST_SHOWN}}"


_PIECES = re.compile(r"printf %s ([\w+/=]+) \| base64 -d >>? (\S+)")


def _decoded_writes(text: str) -> str:
    parts = text.split("base64 -d <<'END' > ")
    for number, part in enumerate(parts[1:], start=1):
        path, _, rest = part.partition("\n")
        data, _, after = rest.partition("\nEND\n")
        if written := _write_text(path, data):
            parts[number] = f"{written}\n{after}"
    return _PIECES.sub(lambda found: _write_text(found[2], found[1]) or found[0], "".join(parts))


def _write_text(path: str, data: str) -> str:
    """Return how a file is written, with its carriage returns, which may be the fault; empty if `data` is no text."""
    try:
        return f"write {path}\n{base64.b64decode(data).decode()}".replace("\r", r"\r")
    except (binascii.Error, UnicodeDecodeError):
        return ""


class Trials:
    """Plays trials on the tasks of an open environment. The workspace of a task is prepared once, and each trial starts
    from a fork of it."""

    def __init__(self, environment: Environment, pool: SlotPool, runs: PolicyRuns, turns: TurnRecorder) -> None:
        self.environment = environment
        self.pool = pool
        self.prepared = runs.prepared if runs.prepared is not None else {}
        self.turns = turns
        self.fresh: dict[str, float | None] = {}
        """What doing nothing scored before anything else was played, by task id."""
        self._runs = runs

    async def play(
        self, task: Task, trial: Trial, number: int = 0, reads: LeftFiles | None = None
    ) -> tuple[Verdict, Trajectory | None, Group]:
        """Play a trial. Return its verdict, its rollout (None if the group has none) and its group. `reads` is filled
        with the files that it leaves. Raises `SandboxError` if this machine is to blame for the lack of a score."""
        with _on(trial.world):
            group = await play_and_read(self._runs, TrialPolicy(trial), task, number, reads)
        played = group.trajectories[0] if group.trajectories else None
        if (played.blame if played is not None else group.blame) in _OURS:
            raise SandboxError(played.error if played is not None else group.error)
        if played is None:
            error = group.error or "there was no rollout"
            return Verdict(reward=None, error=error, blame=group.blame), None, group
        labels = [label.name for label in played.labels]
        verdict = Verdict(
            reward=played.reward, official=played.official, labels=labels, error=played.error, blame=played.blame
        )
        return verdict, played, group

    async def play_fresh(self, tasks: Mapping[int, Task]) -> None:
        """Do nothing on the first of these tasks, by their numbers, whose solutions call function tools, because data
        that one rollout leaves may change what all later ones find. Raises `SandboxError`."""
        for number, task in tasks.items():
            if len(self.fresh) == _MOST_FRESH:
                return
            if steps_of(task) is not None:
                verdict, _, _ = await self.play(task, Trial(), number)
                self.fresh[task.id] = verdict.reward
                await self.forget(task.id)

    async def command_tool(self, task: Task, nothing: Group, number: int, spec: SlotSpec) -> CommandTool | None:
        """Return the tool of the agent that runs commands, where `nothing` is the group of doing nothing."""
        return TERMINAL if nothing.error else await find_command_tool(self._runs, task, number, nothing.tools, spec)

    async def forget(self, task_id: str) -> None:
        """Drop the prepared workspace of a task."""
        if (snapshot := self.prepared.pop(task_id, None)) is not None:
            await self.pool.snapshots.forget(snapshot)

    async def follows_clock(self, spec: SlotSpec) -> bool:
        """Return whether programs in a slot see another clock. Those of an image may have another C library, or none.
        Raises `InfraError`."""
        return await self._output_in_world(spec, World(clock=_CLOCK_TEST), "date +%Y") == _CLOCK_TEST[1:5]

    async def sorts_like_dictionaries(self, spec: SlotSpec) -> bool:
        """Return whether programs in a slot sort as dictionaries do in the locale for it. Raises `InfraError`."""
        world = World(env={"LC_ALL": LOCALE})
        return await self._output_in_world(spec, world, r"printf 'B\na\n' | sort | head -1") == "a"

    async def _output_in_world(self, spec: SlotSpec, world: World, command: str) -> str:
        with _on(world):
            slot = await self.pool.acquire("world", spec=spec, timeout_s=_WAIT_S)
        try:
            return (await slot.execute(command, cwd="/", timeout_s=_WAIT_S)).output.strip()
        finally:
            await self.pool.release(slot)

    def has_turns(self, task: Task, trial: Trial) -> str:
        """Return why the agent has too few turns for a trial; nothing if it has enough."""
        return _TOO_LONG if len(trial_acts(trial, task)) + 1 > self.environment.agent.max_turns else ""


@asynccontextmanager
async def open_trials(reference: str, form: Form, parsed: RunLine) -> AsyncIterator[Trials]:
    """Yield `Trials` for an environment, which is opened on slots of this machine. `reference` names it."""
    made = make_pool(parsed.env_config, local=True)
    async with opened_environment(form, parsed, WorldPool(made.config, made.backend)) as (environment, pool):
        own = {path for path in code_files(reference, form) if not any(map(path.is_relative_to, own_folders()))}
        workspaces = ReadWorkspaces(pool)
        workspaces.read_live(pool.rung)
        turns = TurnRecorder()
        async with policy_runs(environment, pool, workspaces, turns, prepare_once=True) as runs:
            with own_code_reads(own):
                yield Trials(environment, pool, runs, turns)
