"""An environment without slots for benchmarks of the runner: one tool in this process, and a score that checks whether
the tool was called."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.group import GroupRun
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import RunContext
from palaestra.rollouts.workspaces import Workspaces
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON, Score, Task
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup


class Adding(Environment):
    """An environment in which each rollout is a separate task; its score is 1.0 if the tool was called."""

    name = "adding"

    def __init__(
        self, shared: RunContext, prompt: str, definition: Mapping[str, JSON], reply: Callable[..., str]
    ) -> None:
        self._shared = shared
        self._prompt = prompt
        self._count = 0
        function = definition["function"]

        async def add(arguments: Mapping[str, JSON], run: ToolRun) -> str:
            return reply(**arguments)

        schema = ToolSchema(
            function["name"],
            function["description"],
            function["parameters"]["properties"],
            tuple(function["parameters"]["required"]),
        )
        self._registry = ToolRegistry([FunctionTool(schema, add, toolset="arithmetic")])

    async def roll_out(self) -> int:
        """Run a group of one rollout, and return the number of its turns."""
        self._count += 1
        task = Task(id=f"t{self._count}", prompt=self._prompt)
        group = await GroupRun(self, self._shared, self._count, task).run()
        (trajectory,) = group.trajectories
        assert trajectory.reward == 1.0, trajectory.error
        return len(trajectory.turns)

    def tasks(self) -> AsyncIterator[Task]:
        raise NotImplementedError("the benchmark makes its tasks itself")

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(self._registry)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return Score(float(any(message["role"] == "tool" for message in rollout.messages)))


@asynccontextmanager
async def services(url: str, **kind: JSON) -> AsyncIterator[RunContext]:
    """Create the objects that the rollouts of a run share, with a journal in a temporary folder. The pool is never
    started, because no rollout needs a slot.

    `kind` contains further settings of the model server.
    """
    engine = ServerGroup(APIServerConfig(base_url=url, model_name="m", health_check=False, **kind))
    await engine.start()
    workspaces = Workspaces(SlotPool(SlotPoolConfig(), LocalBackend()))
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder, "journal.jsonl"))
        try:
            gc.freeze()  # as a run does when it starts
            yield RunContext(engine, workspaces, EventStream(journal))
        finally:
            journal.close()
            await engine.aclose()
