"""The runner over an environment without slots: order, limits, failures, cancellation."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from toy import ADD, NoSlots, Sums, add, by_last_tool_result, changed, services, sum_task, until_cancelled

from golden_messages import check_message, raises
from palaestra.agent.budget import Budget
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.console import describe
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.resume.state import read_finished
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.spec import AgentSettings, RunContext
from palaestra.tools.registry.registry import Kit, ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolRun
from palaestra_slots.core.errors import ConfigError, EngineUnavailable, GraderError, ImageError
from palaestra_slots.core.types import JSON, Blame, Outcome, Score, Task
from palaestra_slots.sandbox.slot import Slot


def run(env: Sums, shared: RunContext, *, concurrency: int = 2, limit: int | None = None) -> tuple[Totals, list[Group]]:
    """Run to the end; the groups come back from the journal, which is the truth."""

    async def main() -> Totals:
        try:
            return await Runner(env, shared, concurrency=concurrency, limit=limit).run()
        finally:
            shared.events.journal.close()

    return asyncio.run(main()), list(Recording(shared.events.journal.path))


def test_oracle_scores_full_and_noop_nothing(tmp_path: Path) -> None:
    totals, groups = run(Sums(3), services(tmp_path, policy="oracle"))
    assert (totals.groups, totals.rollouts, totals.scored, totals.mean_reward) == (3, 6, 6, 1.0)
    assert [group.number for group in groups] == [0, 1, 2]
    assert [t.index for t in groups[0].trajectories] == [0, 1]
    first = groups[0].trajectories[0]
    assert [message["role"] for message in first.messages] == ["user", "assistant", "tool", "assistant"]
    assert first.outcome is Outcome.NATURAL
    assert first.blame is None

    totals, _ = run(Sums(3), services(tmp_path / "noop", policy="noop"))
    assert totals.mean_reward == 0.0


def test_limit_takes_that_many_tasks(tmp_path: Path) -> None:
    totals, groups = run(Sums(5), services(tmp_path, group_size=1), limit=2)
    assert totals.groups == 2
    assert {group.task_id for group in groups} == {"sum-0", "sum-1"}


def test_two_runs_of_one_seed_tell_the_same_story(tmp_path: Path) -> None:
    stories = []
    for name in ("a", "b"):
        _, groups = run(Sums(4), services(tmp_path / name), concurrency=4)
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.beside = type(trajectory.beside)()
        stories.append([group.trajectories for group in groups])
    assert stories[0] == stories[1]


def test_a_score_that_raises_is_the_graders_fault_and_no_zero(tmp_path: Path) -> None:
    async def broken(rollout: Rollout) -> float:
        raise KeyError("missing column")

    totals, groups = run(Sums(1, score=broken), services(tmp_path))
    trajectory = groups[0].trajectories[0]
    assert totals.scored == 0
    assert trajectory.reward is None
    assert (trajectory.outcome, trajectory.blame) == (Outcome.INFRA_ERROR, Blame.GRADER)
    assert "KeyError: 'missing column'" in trajectory.error
    assert len(trajectory.messages) == 4


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_not_one(tmp_path: Path, reward: float) -> None:
    async def odd(rollout: Rollout) -> float:
        return reward

    _, groups = run(Sums(1, score=odd), services(tmp_path))
    assert groups[0].trajectories[0].reward is None
    assert groups[0].trajectories[0].blame is Blame.GRADER


def test_a_grader_failure_is_tried_again_and_the_discarded_attempt_is_kept(tmp_path: Path) -> None:
    attempts = 0

    async def flaky(rollout: Rollout) -> float:
        nonlocal attempts
        attempts += 1
        if attempts <= 2:  # the first attempt, and the replay of the reference
            raise GraderError("the tests did not start")
        return 1.0

    shared = services(tmp_path, group_size=1, infra_retries=1)
    totals, groups = run(Sums(1, score=flaky), shared)
    assert (totals.rollouts, totals.scored) == (1, 1)
    assert groups[0].trajectories[0].reward == 1.0
    events = [each for each in read_journal(shared.events.journal.path) if hasattr(each, "trajectory")]
    failed, scored = (each.trajectory.error for each in events)
    check_message(failed, "GraderError")
    assert scored == ""


def test_a_preparation_that_fails_ends_its_group_alone(tmp_path: Path) -> None:
    class Prepared(Sums):
        def prepares(self, task: Task) -> bool:
            return task.id == "sum-1"

    totals, groups = run(Prepared(3), services(tmp_path))
    assert (totals.groups, totals.failed_groups, totals.scored) == (3, 1, 4)
    assert "no slot for" in groups[1].error
    assert groups[1].trajectories == []


def test_a_lost_slot_is_unscored_and_blamed_on_the_sandbox(tmp_path: Path) -> None:
    class NeedsSlot(Sums):
        async def begin(self, rollout: Rollout) -> None:
            slot: Slot = await rollout.sandbox()
            raise AssertionError(slot)

    _, groups = run(NeedsSlot(1), services(tmp_path, infra_retries=1))
    trajectory = groups[0].trajectories[0]
    assert trajectory.reward is None
    assert trajectory.blame is Blame.SANDBOX


def test_a_task_without_solution_is_the_tasks_fault(tmp_path: Path) -> None:
    class Unsolved(Sums):
        async def resolve(self, task: Task) -> Task:
            return Task(id=task.id, prompt="?", answer=0)

    _, groups = run(Unsolved(1), services(tmp_path))
    assert groups[0].trajectories[0].blame is Blame.TASK
    assert "solution" in groups[0].trajectories[0].error


async def interrupted(runner: Runner, entered: asyncio.Event) -> None:
    """Run until something has been entered, then cancel the run."""
    running = asyncio.create_task(runner.run())
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_cancelling_keeps_what_was_finished_and_records_the_rest(tmp_path: Path) -> None:
    shared = services(tmp_path, group_size=1)
    entered = asyncio.Event()

    async def first_only(rollout: Rollout) -> float:
        return 1.0 if rollout.task.id == "sum-0" else await until_cancelled(entered)

    await interrupted(Runner(Sums(3, score=first_only), shared, concurrency=1), entered)
    shared.events.journal.close()
    groups = list(Recording(shared.events.journal.path))
    assert [group.task_id for group in groups] == ["sum-0"]
    ended = [event.trajectory for event in read_journal(shared.events.journal.path) if hasattr(event, "trajectory")]
    assert [(t.task_id, t.outcome, t.reward) for t in ended] == [
        ("sum-0", Outcome.NATURAL, 1.0),
        ("sum-1", Outcome.CANCELLED, None),
    ]


async def test_a_model_server_that_is_gone_stops_the_run(tmp_path: Path, unused_tcp_port: int) -> None:
    shared = services(tmp_path, group_size=1)
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.server_group import ServerGroup

    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    server = ServerGroup([APIServerConfig(base_url=url, model_name="m", timeout=1, health_check=False)])

    async def main() -> None:

        try:
            await Runner(Sums(50), changed(shared, engine=server), concurrency=2).run()
        finally:
            await server.aclose()
            shared.events.journal.close()

    with pytest.raises(EngineUnavailable, match="groups in a row"):
        await main()
    finished = list(Recording(shared.events.journal.path))
    assert 3 <= len(finished) < 50
    assert all(t.reward is None and t.blame is Blame.ENGINE for group in finished for t in group.trajectories)


def test_a_finished_rollout_leaves_no_cycle_behind(tmp_path: Path) -> None:
    """Its messages would stay until the garbage collector comes by, which makes memory grow with the run."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run(Sums(4), services(tmp_path))
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left & {"Rollout", "GroupRun", "Trajectory", "ToolRuntime", "AgentResult"}


def test_waiting_for_a_slot_is_not_the_agents_time(tmp_path: Path) -> None:
    class Late(NoSlots):
        """Has a slot, but not soon; of this one nobody asks anything."""

        async def acquire(self, *args: JSON, admitted: Callable[[], None], **kwargs: JSON) -> Slot:
            async with one_at_a_time:
                await asyncio.sleep(0.6)
            admitted()
            return cast("Slot", SimpleNamespace(rung=None))

        async def release(self, slot: Slot) -> None:
            pass

    class Slotted(Sums):
        @property
        def agent(self) -> AgentSettings:
            return AgentSettings(budget=Budget(wall_s=0.5))

        def kit(self, task: Task, rng: Random) -> Kit:
            async def added(arguments: Mapping[str, JSON], run: ToolRun) -> Mapping[str, JSON]:
                await run.slot()
                return await add(arguments, run)

            return Kit(ToolRegistry([FunctionTool(ADD.schema, added, toolset="arithmetic")]))

        async def score(self, rollout: Rollout, grading: Grading) -> Score:
            return Score(await by_last_tool_result(rollout))

    one_at_a_time = asyncio.Lock()
    _, (group,) = run(Slotted(1), changed(services(tmp_path), pool=Late()))
    assert [(each.outcome, each.reward) for each in group.trajectories] == [(Outcome.NATURAL, 1.0)] * 2
    assert all(sum(tool_s for _, tool_s in each.beside.turn_s) < 0.5 for each in group.trajectories)


def test_where_no_next_task_can_be_had_what_is_under_way_comes_to_its_end(tmp_path: Path) -> None:
    class Breaking(Sums):
        async def tasks(self) -> AsyncIterator[Task]:
            yield sum_task(0)
            yield sum_task(1)
            raise ConfigError("row 2 of the data set cannot be read")

    shared = services(tmp_path)
    with pytest.raises(ConfigError, match="row 2"):
        run(Breaking(), shared, concurrency=3)
    assert [len(group.scored) for group in Recording(shared.events.journal.path)] == [2, 2]


def test_settings_that_cannot_work_end_the_run_and_name_the_task_that_showed_it(tmp_path: Path) -> None:
    class Unset(Sums):
        async def resolve(self, task: Task) -> Task:
            if task.id == "sum-1":
                raise ConfigError("set SUMS_HOME to where the sums lie")
            return task

    with raises(ConfigError, "sum-1", "SUMS_HOME"):
        run(Unset(3), services(tmp_path), concurrency=1)


def test_a_slot_that_cannot_be_is_the_fault_of_its_task(tmp_path: Path) -> None:
    class NoImage(NoSlots):
        async def acquire(self, *args: JSON, **kwargs: JSON) -> Slot:
            raise ImageError("the image 'nowhere' is not there")

    class Prepared(Sums):
        def prepares(self, task: Task) -> bool:
            return task.id == "sum-0"

    _, (broken, fine) = run(Prepared(2), changed(services(tmp_path), pool=NoImage()))
    assert (broken.blame, broken.trajectories) == (Blame.TASK, [])
    check_message(broken.error, "TaskError", "000000-sum-0", "nowhere")
    assert len(fine.scored) == 2


def gone_on(env: Sums, folder: Path, kept: Mapping[str, Mapping[int, Trajectory]], **more: int) -> list[Group]:
    """The groups that a second part of a run hands on, which has these rollouts already; they must be the journal's."""
    shared, handed = changed(services(folder, **more), rollouts=kept), []

    async def main() -> None:
        await Runner(env, shared, on_group=handed.append).run()
        shared.events.journal.close()

    asyncio.run(main())
    finished = read_finished(shared.events.journal.path)
    assert [[t.index for t in group.trajectories] for group in handed] == [
        [t.index for t in finished.whole(group.number).trajectories] for group in handed
    ]
    return handed


class Unprepared(Sums):
    """Its workspaces cannot be prepared: there is no slot."""

    def prepares(self, task: Task) -> bool:
        return True


def test_what_a_group_has_stays_where_the_rest_of_it_cannot_be_prepared(tmp_path: Path) -> None:
    run(Sums(1), services(tmp_path, group_size=1))
    (half,) = gone_on(Unprepared(1), tmp_path, read_finished(tmp_path / "journal.jsonl").rollouts, group_size=2)
    assert "no slot for" in half.error
    assert [t.reward for t in half.trajectories] == [1.0]
    assert "reward 1 " in describe(half)
    assert "no slot for" in describe(half)


def test_a_group_that_lacks_no_rollout_is_not_prepared_again(tmp_path: Path) -> None:
    run(Sums(1), services(tmp_path, group_size=2))
    kept = read_finished(tmp_path / "journal.jsonl").rollouts
    as_they_ended = {name: dict(sorted(each.items(), reverse=True)) for name, each in kept.items()}
    (whole,) = gone_on(Unprepared(1), tmp_path, as_they_ended, group_size=2)
    assert (whole.error, [(t.index, t.reward) for t in whole.trajectories]) == ("", [(0, 1.0), (1, 1.0)])


def test_groups_that_were_to_grow_are_handed_on_where_the_run_ends_before_them(tmp_path: Path) -> None:
    """Else the file of groups, which is written anew, would lack what it had."""
    run(Sums(3), services(tmp_path, group_size=1))
    work = read_finished(tmp_path / "journal.jsonl")
    handed: list[int] = []

    async def main() -> None:
        entered = asyncio.Event()

        class Stuck(Sums):
            async def resolve(self, task: Task) -> Task:
                await until_cancelled(entered)
                return task

        shared = services(tmp_path, group_size=2)
        runner = Runner(
            Stuck(3),
            changed(
                shared,
                rollouts=work.rollouts,
                ended=work.ended,
            ),
            on_group=lambda group: handed.append(group.number),
        )
        await interrupted(runner, entered)
        shared.events.journal.close()

    asyncio.run(main())
    assert handed == [0, 1, 2]


def test_groups_that_had_ended_are_all_handed_on_where_the_run_is_interrupted_at_once(tmp_path: Path) -> None:
    run(Sums(3), services(tmp_path, group_size=1))
    work = read_finished(tmp_path / "journal.jsonl")
    handed: list[int] = []

    async def main() -> None:
        def hand_on(group: Group) -> None:
            handed.append(group.number)
            running.cancel()

        shared = changed(services(tmp_path / "again", group_size=1), ended=work.ended, rollouts=work.rollouts)
        runner = Runner(Sums(3), shared, on_group=hand_on)
        running = asyncio.create_task(runner.run())
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        shared.events.journal.close()

    asyncio.run(main())
    assert handed == [0, 1, 2]


def test_finished_rollouts_are_read_from_the_journal_when_they_are_asked_for(tmp_path: Path) -> None:
    """They would fill the memory of the second part of a long run."""
    _, groups = run(Sums(2), services(tmp_path, group_size=2))
    path = tmp_path / "journal.jsonl"
    work = read_finished(path)
    assert [group.trajectories for group in work.ended.values()] == [[], []]
    assert [work.whole(number) for number in sorted(work.ended)] == groups
    elsewhere = pickle.loads(pickle.dumps(work.rollouts[groups[0].group_id]))
    path.write_bytes(path.read_bytes().replace(b'"rollout"', b'"group!!"'))
    assert [elsewhere[index] for index in elsewhere] == groups[0].trajectories
    with raises(ConfigError):
        work.whole(0)


def test_groups_begin_while_the_slowest_rollout_of_each_earlier_one_still_runs(tmp_path: Path) -> None:
    released, running, most, ended = asyncio.Event(), 0, 0, 0

    async def first_of_each_group_last(rollout: Rollout) -> float:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        if rollout.index == 0:
            await released.wait()
        running -= 1
        ended += 1
        if ended == 15:  # the three groups that begin at once have nine rollouts that do not wait
            released.set()
        return 1.0

    totals, groups = run(
        Sums(12, score=first_of_each_group_last), services(tmp_path, group_size=4), concurrency=3, limit=12
    )
    assert (totals.scored, len(groups)) == (48, 12)
    assert most == 12


def test_with_one_group_at_a_time_the_next_begins_after_the_last_rollout(tmp_path: Path) -> None:
    seen: list[str] = []

    async def noted(rollout: Rollout) -> float:
        seen.append(rollout.group_id)
        await asyncio.sleep(0.001 * rollout.index)
        return 1.0

    run(Sums(4, score=noted), services(tmp_path, group_size=3), concurrency=1)
    assert seen == sorted(seen)


def test_rollouts_of_a_group_may_wait_for_each_other(tmp_path: Path) -> None:
    """With places for two groups, the places that rollouts of several groups free go to one group before the next."""
    meeting: dict[str, asyncio.Barrier] = {}

    async def together(rollout: Rollout) -> float:
        await meeting.setdefault(rollout.group_id, asyncio.Barrier(3)).wait()
        await asyncio.sleep(0.001 * rollout.index)
        return 1.0

    totals, _ = run(Sums(20, score=together), services(tmp_path, group_size=3), concurrency=2)
    assert totals.scored == 60
