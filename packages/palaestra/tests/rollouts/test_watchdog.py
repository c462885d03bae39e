"""Where a rollout is, what counts as a sign of life, and who is blamed when there is none."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from toy import Sums, changed, services

from golden_messages import raises
from palaestra.rollouts.events import Alive
from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import RolloutSpec, Seeded
from palaestra.rollouts.watchdog import WAITING_FOR, Stages
from palaestra_slots.core.errors import EngineUnavailable, InfraError, PrepareError, SandboxError, ToolStuck
from palaestra_slots.core.types import Blame, Outcome

SOON = 0.02


def quiet(event: Alive) -> None: ...


def test_calls_that_run_together_end_in_any_order() -> None:
    told: list[str] = []
    at = Stages("r", lambda event: told.append(event.stage), {})
    with at.stage("agent", shown="model"):
        first, second = at.stage("tool"), at.stage("tool")
        first.__enter__()
        second.__enter__()
        with at.stage("acquire"):
            first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert told == ["model", "tool", "tool", "acquire", "acquire", "tool", "model", ""]
    assert set(at.seconds) == {"agent", "tool", "acquire"}


@pytest.mark.parametrize(
    ("stage", "error", "blame"),
    [
        ("acquire", SandboxError, Blame.SANDBOX),
        ("setup", PrepareError, Blame.TASK),
        ("model", EngineUnavailable, Blame.ENGINE),
        ("tool", ToolStuck, Blame.TOOL),
    ],
)
async def test_who_gives_no_sign_of_life_is_ended_and_named(stage: str, error: type[InfraError], blame: Blame) -> None:
    async def main() -> None:
        at = Stages("r/0", quiet, {stage: SOON})
        async with at.watched():
            with at.stage("outer"), at.stage(stage):
                await asyncio.Event().wait()

    with raises(error, "r/0", stage) as raised:
        await main()
    assert raised.value.blame is blame
    assert WAITING_FOR.keys() == IDLE_LIMITS.keys()


def test_a_sign_of_life_begins_the_wait_anew() -> None:
    async def main(signs: bool) -> None:
        at = Stages("r", quiet, {"model": 0.5})
        async with at.watched():
            with at.stage("model"):
                for _ in range(20):
                    await asyncio.sleep(0.05)
                    if signs:
                        at.sign_of_life()

    asyncio.run(main(signs=True))
    with pytest.raises(EngineUnavailable):
        asyncio.run(main(signs=False))


def test_waiting_for_a_place_has_no_limit_and_the_next_stage_has_its_own() -> None:
    async def main(then: str) -> None:
        at = Stages("r", quiet, {"model": 0.1, "tool": 0.1})
        async with at.watched(), asyncio.timeout(10):
            with at.stage("model"):
                with at.stage("admit"):
                    await asyncio.sleep(0.3)
                with at.stage(then):
                    await asyncio.sleep(0.3)

    asyncio.run(main("admit"))
    with pytest.raises(ToolStuck):
        asyncio.run(main("tool"))


async def test_a_timeout_of_somebody_elses_passes_through() -> None:
    async def main() -> None:
        async with Stages("r", quiet, {"model": 60.0}).watched():
            raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        await main()


async def test_a_score_that_hangs_is_the_graders_fault_and_tried_again(tmp_path: Path) -> None:
    hung = 0

    async def hangs(rollout: Rollout) -> float:
        nonlocal hung
        hung += 1
        if hung == 1:
            await asyncio.Event().wait()
        return 1.0

    shared = changed(services(tmp_path, group_size=1, infra_retries=1), idle_limits={"grade": SOON})
    totals = await Runner(Sums(1, score=hangs), shared).run()
    shared.events.journal.close()
    assert (totals.scored, hung) == (1, 2)


async def test_a_preparation_that_hangs_ends_its_group(tmp_path: Path) -> None:
    class Hanging(Sums):
        async def begin(self, rollout: Rollout) -> None:
            await asyncio.Event().wait()

    shared = changed(services(tmp_path, group_size=1), idle_limits={"setup": SOON})

    async def main() -> Rollout:
        env = Hanging(1)
        task = await anext(env.tasks())
        spec = RolloutSpec("g", 0, task, Seeded("x"), env.kit(task, random.Random(0)), None)
        rollout = Rollout(env, shared, spec)
        await rollout.run()
        shared.events.journal.close()
        return rollout

    ended = (await main()).trajectory()
    assert (ended.outcome, ended.blame, ended.reward) == (Outcome.INFRA_ERROR, Blame.TASK, None)
    assert "idle_limits.setup" in ended.error
