"""A small environment for tests of the runner: arithmetic with an in-process tool, no slot needed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import JournalEvent, MemoryEvent, RunStarted, Subscriber
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolRun, ToolSchema
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.types import JSON, Score, Task, ToolStep
from palaestra_slots.sandbox.slot import Change, Slot, SlotSource, SlotSpec, Snapshot, View
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup


async def add(arguments: Mapping[str, JSON], run: ToolRun) -> Mapping[str, JSON]:
    return {"result": arguments["a"] + arguments["b"]}


ADD = FunctionTool(
    ToolSchema("add", "Add two integers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ("a", "b")),
    add,
    toolset="arithmetic",
    parallel_safe=True,
)


class NoSlots:
    """A slot source of a machine that has none: every lease fails as a broken sandbox would."""

    def __init__(self) -> None:
        self.asked = 0

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot:
        self.asked += 1
        raise SandboxError(f"no slot for {trajectory_id}: this machine has none")

    async def release(self, slot: Slot) -> None:
        raise AssertionError("nothing was leased")

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        raise AssertionError("nothing was leased")

    async def checkpoint(self, slot: Slot, *, continued: bool = False) -> Snapshot:
        raise AssertionError("nothing was leased")

    @property
    def snapshots(self) -> NoSlots:
        return self

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        raise AssertionError("nothing was sealed")

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        raise AssertionError("nothing was sealed")

    async def holds(self, snapshot: Snapshot) -> bool:
        raise AssertionError("nothing was sealed")

    async def forget(self, snapshot: Snapshot) -> None:
        raise AssertionError("nothing was sealed")


def sum_task(number: int) -> Task:
    """Add two numbers; the oracle knows how."""
    return Task(
        id=f"sum-{number}",
        prompt=f"What is {number} + 1?",
        solution=[ToolStep("add", {"a": number, "b": 1})],
        answer=number + 1,
    )


ScoreHook = Callable[[Rollout], Awaitable[float]]


async def by_last_tool_result(rollout: Rollout) -> float:
    """1.0 when the right sum came back from the tool."""
    wanted = f'{{"result": {rollout.task.answer}}}'
    return float(any(message.get("content") == wanted for message in rollout.messages if message["role"] == "tool"))


class Sums(Environment):
    """Yields `tasks`; hooks can be swapped for ones that misbehave."""

    def __init__(self, tasks: int = 3, score: ScoreHook = by_last_tool_result) -> None:
        self._tasks = tasks
        self._score = score

    @property
    def name(self) -> str:
        return "sums"

    async def tasks(self) -> AsyncIterator[Task]:
        for number in range(self._tasks):
            yield sum_task(number)

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(ToolRegistry([ADD]), ("arithmetic",))

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return Score(await self._score(rollout))


def started(path: Path) -> Journal:
    """A journal that has its first line."""
    journal = Journal(path)
    if not path.stat().st_size:
        journal.append(RunStarted(run_id="r", env="e", model="m", seed=0))
    return journal


def services(folder: Path, *, policy: str = "oracle", group_size: int = 2, infra_retries: int = 0) -> RunContext:
    """What the groups of a run share, with a scripted policy and no slots. The caller closes the journal."""
    return RunContext(
        engine=ServerGroup([APIServerConfig(server_type="scripted", model_name=policy)]),
        workspaces=Workspaces(NoSlots()),
        events=EventStream(started(folder / "journal.jsonl")),
        settings=RunSettings(group_size=group_size, infra_retries=infra_retries),
    )


def changed(run: RunContext, *subscribers: Subscriber, pool: SlotSource | None = None, **changes: Any) -> RunContext:
    """The run with other fields, settings or earlier work, by their names, and with these subscribers."""
    for subscriber in subscribers:
        run.events.subscribe(subscriber)
    if pool is not None:
        changes["workspaces"] = Workspaces(pool)
    for name, inner in (("settings", run.settings), ("earlier", run.earlier)):
        own = {key: changes.pop(key) for key in list(changes) if key in {each.name for each in fields(inner)}}
        if own:
            changes[name] = replace(inner, **own)
    return replace(run, **changes)


def tell(subscriber: Subscriber, *events: MemoryEvent | JournalEvent) -> None:
    """Hand events to one subscriber."""
    for event in events:
        if (handler := subscriber.handlers().get(type(event))) is not None:
            handler(event)


async def until_cancelled(entered: asyncio.Event) -> float:
    """A score that never comes."""
    entered.set()
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
