"""What a run keeps in memory for each of its rollouts, in bytes that Python allocated."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from palaestra import Task, ToolStep, environment
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.discovery import form_of
from palaestra.envs.run.run import Steering, run
from palaestra.rollouts.events import GroupEnded, GroupFinished, GroupStarted, Handlers, RolloutEnded, RunStarted
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.observe.metrics import Figures, summarise
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra_chat.batch.batch_files import write_batch_files
from palaestra_slots.core.types import Outcome
from palaestra_tokens.config import APIServerConfig

N = 60
MANY = 500
STAGES = {"setup": 0.1, "agent": 0.2, "grade": 0.3}


@environment(toolsets=[])
def sums(n: int = 1) -> Iterator[Task]:
    """One addition per task."""
    for number in range(n):
        yield Task(id=f"sum-{number}", prompt=f"{number} + 1?", solution=[ToolStep("add", {"a": number, "b": 1})])


@sums.tool
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@sums.score
async def asked(rollout) -> float:  # type: ignore[no-untyped-def]
    return float(rollout.messages[-1]["role"] == "assistant")


class Traced:
    """The traced memory after some groups of a run."""

    def __init__(self, *after: int) -> None:
        self.kept: dict[int, int] = dict.fromkeys(after, 0)
        self._seen = 0

    def handlers(self) -> Handlers:
        return {GroupFinished: self._on_group}

    def _on_group(self, event: GroupFinished) -> None:
        self._seen += 1
        if self._seen + 1 in self.kept:  # the event loop drops cancelled timers only when there are many
            for _ in range(200):
                asyncio.get_running_loop().call_later(60, print).cancel()
        if self._seen in self.kept:
            gc.collect()
            self.kept[self._seen] = tracemalloc.get_traced_memory()[0]


def test_a_run_keeps_only_figures_of_each_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    form, traced = form_of(sums), Traced(N, 4 * N)
    line = CommandLine(prog="sums", env_type=form.config_type(), server_type=APIServerConfig)
    flags = ["--policy", "oracle", "--env.n", str(4 * N), "--group", "1", "--env.max_num_workers", "1"]
    parsed = line.parse(["process", *flags, "--env.ensure_scores_are_not_same", "false"], {})
    assert isinstance(parsed, Parsed)
    tracemalloc.start()
    try:
        with open(os.devnull, "w") as log:  # a StringIO would count the log's lines
            report = asyncio.run(run(form, parsed, stream=log, steering=Steering([traced])))
    finally:
        tracemalloc.stop()
    assert report.totals.scored == 4 * N
    assert (traced.kept[4 * N] - traced.kept[N]) / (3 * N) < 240, "bytes per rollout"


def groups(count: int) -> Iterator[Group]:
    for number in range(count):
        name = f"{number:06d}-task"
        one = Trajectory(
            rollout_id=f"{name}/0",
            group_id=name,
            task_id=f"{number}-task",
            index=0,
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
            outcome=Outcome.NATURAL,
            reward=float(number % 2),
            beside=Beside(started_at=1.0, duration_s=1.0, stages=STAGES),
        )
        yield Group(group_id=name, number=number, task_id=one.task_id, trajectories=[one])


def write_journal(path: Path, finished: Iterable[Group]) -> None:
    journal = Journal(path)
    journal.append(RunStarted(run_id="run-1", env="batch", model="m", seed=0, config={"env": {"batch_size": 100}}))
    for group in finished:
        journal.append(GroupStarted(group=replace(group, trajectories=[])))
        for trajectory in group.trajectories:
            journal.append(RolloutEnded(trajectory=trajectory))
        journal.append(GroupEnded(group_id=group.group_id, number=group.number))
    journal.close()


def peak_bytes(work: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del kept


def per_group(work: Callable[[int], object]) -> float:
    """How many more bytes the work takes at its peak, for each further group. Other threads of the test run allocate
    too, now and then; they only add, so the lowest peak of several counts."""
    work(10)  # what is loaded or cached once is not counted

    def peak(count: int) -> int:
        return min(peak_bytes(lambda: work(count)) for _ in range(3))

    return (peak(4 * MANY) - peak(MANY)) / (3 * MANY)


def test_figures_keep_numbers_alone() -> None:
    def added(count: int) -> Figures:
        figures = Figures()
        for group in groups(count):
            figures.add(group)
        return figures

    assert per_group(added) < 120
    assert per_group(lambda count: summarise(groups(count))) < 320


def test_the_index_of_a_journal_and_the_files_of_a_batch_take_little(tmp_path: Path) -> None:
    for count in (10, MANY, 4 * MANY):
        (tmp_path / str(count)).mkdir()
        write_journal(tmp_path / str(count) / "journal.jsonl", groups(count))
    assert per_group(lambda count: Recording(tmp_path / str(count) / "journal.jsonl")) < 200
    assert per_group(lambda count: write_batch_files(tmp_path / str(count))) < 300
