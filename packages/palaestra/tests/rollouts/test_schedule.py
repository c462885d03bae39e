"""Slow tasks first: the order follows from tasks and timings alone, and nothing but the order changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import Sums, changed, services, sum_task

from palaestra.rollouts.events import AttemptDiscarded, GroupEnded, GroupStarted, RolloutEnded, RunStarted
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra.rollouts.resume.state import read_finished
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.schedule import Numbered, counted, numbered, read_timings, slowest_first
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.types import Outcome, Task


class Source:
    """Tasks, and how many have been drawn."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.drawn = 0

    async def tasks(self) -> AsyncIterator[Task]:
        for number in range(self.count):
            self.drawn += 1
            yield sum_task(number)


def order(count: int, seconds: Mapping[str, float], *, limit: int | None = None, window: int = 1024) -> list[int]:
    async def main() -> list[int]:
        tasks = numbered(Source(count).tasks(), 0, limit)
        return [number async for number, _ in slowest_first(tasks, seconds, window)]

    return asyncio.run(main())


def test_slow_tasks_come_first_and_unknown_ones_in_the_middle() -> None:
    assert order(4, {"sum-0": 1.0, "sum-2": 9.0, "sum-3": 4.0}) == [2, 1, 3, 0]
    assert order(4, {}) == [0, 1, 2, 3]
    assert order(4, {"other": 5.0}) == [0, 1, 2, 3]


@pytest.mark.parametrize("window", [2, 1024])
async def test_tasks_read_before_a_failure_are_rolled_out_before_it_is_raised(window: int) -> None:
    async def broken() -> AsyncIterator[Numbered]:
        for number in range(3):
            yield number, sum_task(number)
        raise ConfigError("the source broke")

    tasks = slowest_first(broken(), {"sum-1": 9.0}, window)
    assert sorted([(await anext(tasks))[0] for _ in range(3)]) == [0, 1, 2]
    with pytest.raises(ConfigError):
        await anext(tasks)


def test_only_the_first_tasks_are_taken_and_only_a_window_is_read_ahead() -> None:
    seconds = {f"sum-{number}": float(number) for number in range(9)}
    assert order(9, seconds, limit=4) == [3, 2, 1, 0]
    assert order(9, seconds, window=4) == [3, 2, 1, 0, 7, 6, 5, 4, 8]

    async def drawn(seconds: Mapping[str, float]) -> int:
        source = Source(9)
        await anext(slowest_first(numbered(source.tasks(), 0, None), seconds, 4))
        return source.drawn

    assert (asyncio.run(drawn({})), asyncio.run(drawn(seconds))) == (1, 4)


@given(st.dictionaries(st.integers(0, 20), st.floats(0, 10), max_size=21), st.integers(1, 8), st.integers(0, 21))
def test_every_task_is_taken_once_whatever_the_timings(timed: dict[int, float], window: int, limit: int) -> None:
    seconds = {f"sum-{number}": value for number, value in timed.items()}
    assert sorted(order(21, seconds, limit=limit, window=window)) == list(range(limit))


def test_the_records_of_a_run_do_not_depend_on_the_order(tmp_path: Path) -> None:
    async def rolled_out(folder: Path, timings: Mapping[str, float]) -> tuple[list[str], list[Group]]:
        shared, begun = services(folder), []

        class Noting(Sums):
            async def resolve(self, task: Task) -> Task:
                begun.append(task.id)
                return task

        await Runner(Noting(4), shared, timings=timings).run()
        shared.events.journal.close()
        groups = list(Recording(shared.events.journal.path))
        for trajectory in (each for group in groups for each in group.trajectories):
            trajectory.beside = Beside()
        return begun, groups

    plain, in_order = asyncio.run(rolled_out(tmp_path / "a", {}))
    sorted_, again = asyncio.run(rolled_out(tmp_path / "b", {"sum-3": 5.0, "sum-0": 1.0}))
    assert plain == ["sum-0", "sum-1", "sum-2", "sum-3"]
    assert sorted_ == ["sum-3", "sum-1", "sum-2", "sum-0"]
    assert [group.trajectories for group in in_order] == [group.trajectories for group in again]


def ended(group_id: str, task_id: str, seconds: float) -> Trajectory:
    return Trajectory(
        rollout_id=f"{group_id}/0",
        group_id=group_id,
        task_id=task_id,
        index=0,
        messages=[],
        outcome=Outcome.NATURAL,
        reward=1.0,
        beside=Beside(duration_s=seconds),
    )


def test_timings_are_read_from_a_run_that_may_have_been_killed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(RunStarted(run_id="r", env="e", model="m", seed=0))
    journal.append(GroupStarted(group=Group(group_id="0-a", number=0, task_id="a", prepare_s=2.0)))
    journal.append(RolloutEnded(trajectory=ended("0-a", "a", 3.0)))
    journal.append(AttemptDiscarded(trajectory=ended("0-a", "a", 7.0)))
    journal.append(RolloutEnded(trajectory=ended("0-a", "a", 1.0)))
    journal.append(GroupEnded(group_id="0-a", number=0))
    journal.append(GroupStarted(group=Group(group_id="1-b", number=1, task_id="b")))
    journal.append(RolloutEnded(trajectory=ended("1-b", "b", 4.0)))
    journal.close()
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"event":"rollout","traj')
    assert read_timings(tmp_path) == {"a": 9.0, "b": 4.0}
    with pytest.raises(ConfigError, match="no run folder"):
        read_timings(tmp_path / "nothing")


def test_what_an_earlier_part_finished_is_handed_on_before_anything_is_rolled_out(tmp_path: Path) -> None:
    """So a run that is gone on with, and killed, leaves no smaller data set than it had."""
    first = services(tmp_path / "first")
    asyncio.run(Runner(Sums(3), first).run())
    work = read_finished(first.events.journal.path)
    handed: list[int] = []

    class Killed(Sums):
        async def resolve(self, task: Task) -> Task:
            assert handed == [0, 1, 2], task.id
            return task

    second = changed(services(tmp_path / "second"), ended=work.ended, rollouts=work.rollouts)
    timings = {"sum-0": 1.0, "sum-3": 9.0, "sum-4": 8.0}
    runner = Runner(Killed(5), second, timings=timings, on_group=lambda group: handed.append(group.number))
    assert asyncio.run(runner.run()).groups == 5
    assert handed == [0, 1, 2, 3, 4]


async def test_tasks_that_come_quickly_are_counted_before_the_first_runs() -> None:
    found: list[int] = []
    tasks = counted(numbered(Source(3).tasks(), 0, None), found.append, seconds=60)
    assert [number async for number, _ in tasks] == [0, 1, 2]
    assert found == [3]
    tasks = counted(numbered(Source(3).tasks(), 0, None), found.append, window=2, seconds=60)
    assert [number async for number, _ in tasks] == [0, 1, 2]
    assert found == [3], "more tasks than are read ahead"


async def test_a_source_that_waits_or_fails_holds_up_no_task_before() -> None:
    more = asyncio.Event()

    async def waiting() -> AsyncIterator[Numbered]:
        yield 0, Task(id="t0", prompt="")
        await more.wait()
        yield 1, Task(id="t1", prompt="")
        raise TaskError("no third")

    found: list[int] = []
    tasks = counted(waiting(), found.append, seconds=0.05)
    assert (await anext(tasks))[0] == 0
    more.set()
    assert (await anext(tasks))[0] == 1
    with pytest.raises(TaskError, match="no third"):
        await anext(tasks)
    assert found == []
