"""The view of a check: one slot however it is asked for, and no score where the world took it away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from faults.injected import kill_slot
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import Alive, Handlers
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import Kit
from palaestra_slots.core.types import Blame, Score, Task
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Slot
from programs import nap
from rollouts.toy import changed, services

pytestmark = pytest.mark.slots

PAUSE = nap()


class Checked(Environment):
    """One task, which its solution solves. What the check sees of it is up to the subclass."""

    @property
    def name(self) -> str:
        return "checked"

    async def tasks(self) -> AsyncIterator[Task]:
        yield Task(id="one", prompt="?", solution=["echo yes > done"])

    def kit(self, task: Task, rng: random.Random) -> Kit:
        return Kit(build_tool_registry(enabled_toolsets=["terminal"]))

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return Score(float(await self.holds(rollout, grading)))

    async def holds(self, rollout: Rollout, grading: Grading) -> bool:
        raise NotImplementedError


class SeveralAtOnce(Checked):
    async def holds(self, rollout: Rollout, grading: Grading) -> bool:
        async def seen() -> str:
            slot = await grading.slot()
            return f"{slot.slot_id} {await slot.read_text('done', missing='')}"

        found = {await first for first in asyncio.as_completed([seen() for _ in range(4)])}
        return len(found) == 1 and found.pop().endswith("yes\n")


class Careless(Checked):
    """Catches whatever goes wrong, and says 0 for it, as ported reward functions do."""

    async def holds(self, rollout: Rollout, grading: Grading) -> bool:
        for _ in range(2):
            with contextlib.suppress(Exception):
                await self.kill(rollout, grading)
                return "yes" in await (await grading.slot()).read_text("done", missing="")
        return False

    async def kill(self, rollout: Rollout, grading: Grading) -> None:
        await _die(await grading.slot())


class AgentsSlotDies(Careless):
    killed = False

    async def kill(self, rollout: Rollout, grading: Grading) -> None:
        if not self.killed:
            self.killed = True
            with contextlib.suppress(ConnectionError):
                await _die(await rollout.sandbox())


class OutOfTime(Checked):
    """Gives its first look no time, and looks again."""

    def __init__(self) -> None:
        self.sealing = asyncio.Event()

    async def holds(self, rollout: Rollout, grading: Grading) -> bool:
        self.sealing.clear()
        first = asyncio.create_task(grading.slot())
        await self.sealing.wait()
        first.cancel()
        with contextlib.suppress(Exception):
            return "yes" in await (await grading.slot()).read_text("done", missing="")
        return False


class Watching:
    def __init__(self, env: OutOfTime) -> None:
        self.env = env

    def handlers(self) -> Handlers:
        return {Alive: self._on_alive}

    def _on_alive(self, event: Alive) -> None:
        if event.entered == "seal":
            self.env.sealing.set()


async def _die(slot: Slot) -> None:
    killing = asyncio.create_task(kill_slot(PAUSE))
    try:
        await slot.execute(PAUSE, timeout_s=60)
    finally:
        killing.cancel()


def played(env: Environment, folder: Path) -> Trajectory:
    async def main() -> Trajectory:
        async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation("best")) as pool:
            watching = (Watching(env),) if isinstance(env, OutOfTime) else ()
            shared = changed(services(folder, group_size=1), *watching, pool=pool)
            groups: list[Trajectory] = []
            await Runner(env, shared, on_group=lambda group: groups.extend(group.trajectories)).run()
            shared.events.journal.close()
            assert pool.acquired_slots == 0
            return groups[0]

    return asyncio.run(main())


def test_a_check_that_looks_at_several_things_at_once_has_one_slot_with_the_agents_work(tmp_path: Path) -> None:
    done = played(SeveralAtOnce(), tmp_path)
    assert (done.reward, done.error) == (1.0, "")


@pytest.mark.parametrize("env", [Careless(), AgentsSlotDies()], ids=["the check's slot", "the agent's slot"])
def test_a_slot_that_dies_is_no_score_whatever_the_check_makes_of_it(env: Environment, tmp_path: Path) -> None:
    done = played(env, tmp_path)
    assert (done.reward, done.blame) == (None, Blame.SANDBOX)
    assert "SlotLost" in done.error


def test_a_seal_that_the_check_itself_cuts_off_is_no_score(tmp_path: Path) -> None:
    """What it would see afterwards is the workspace as it was before the agent came."""
    done = played(OutOfTime(), tmp_path)
    assert (done.reward, done.blame) == (None, Blame.SANDBOX)
    assert "was interrupted" in done.error
