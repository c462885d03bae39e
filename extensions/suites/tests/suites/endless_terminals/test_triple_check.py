"""The triple check: every family passes it in real slots, and tasks that do not hold are named with the reason."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from palaestra_slots.core.errors import TaskError
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_suites.endless_terminals.build_terminal import build
from palaestra_suites.endless_terminals.checks.file_checks import Absent, Exists, Lines
from palaestra_suites.endless_terminals.compose_tasks import FAMILIES, TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import GeneratedTask
from palaestra_suites.endless_terminals.triple_check import prove

pytestmark = pytest.mark.slots

SAMPLE = ("git-restore", "process-daemon", "script-mend-median", "mode-open")

GOOD = GeneratedTask(
    id="sum",
    level=1,
    families=["own"],
    prompt="Write the sum of the lines of a.txt to b.txt",
    files={"a.txt": "1\n2\n"},
    setup="",
    solution="awk '{s += $1} END {print s}' a.txt > b.txt",
    initial=[Exists("a.txt"), Absent("b.txt")],
    final=[Lines("b.txt", ["3"])],
)


def proved(in_pool, *tasks: GeneratedTask) -> dict[str, str]:
    """What is wrong with each task."""
    found: dict[str, str] = {}

    async def scenario(pool: SlotPool) -> None:
        async def one(task: GeneratedTask) -> None:
            try:
                await prove(task, pool, SlotSpec())
            except TaskError as error:
                found[task.id] = str(error)

        width = asyncio.Semaphore(4)
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(_limited(width, one(task)))
        assert pool.acquired_slots == 0

    in_pool(scenario)
    return found


async def _limited(width: asyncio.Semaphore, work) -> None:
    async with width:
        await work


def test_some_families_pass(in_pool) -> None:
    assert proved(in_pool, *generate(TaskSelection(1, levels=(1,), families=SAMPLE), len(SAMPLE))) == {}


def test_a_chain_passes(in_pool) -> None:
    assert proved(in_pool, *generate(TaskSelection(2, levels=(5,), areas=("tables", "text")), 1)) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_family_passes(in_pool) -> None:
    assert proved(in_pool, *generate(TaskSelection(1, levels=(1,)), len(FAMILIES))) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chains_pass(in_pool) -> None:
    assert proved(in_pool, *generate(TaskSelection(3, levels=(3, 4, 5)), 40)) == {}


REFUSED = {
    "initial state is wrong: c.txt does not exist": {"initial": [Exists("c.txt")]},
    "initial state is wrong: b.txt exists": {"setup": "echo 3 > b.txt"},
    "set-up fails: Exit code: 4\nwhy": {"setup": "echo why; exit 4"},
    "it is solved by doing nothing": {"initial": [], "setup": "echo 3 > b.txt"},
    "it is solved by empty files": {"final": [Exists("b.txt")]},
    "it is solved by copies of a.txt": {"final": [Lines("b.txt", ["1", "2"])]},
    "its solution fails: Exit code: 3": {"solution": "exit 3"},
    "its solution does not pass: b.txt has other content": {"solution": "echo 4 > b.txt"},
    "its solution does not pass: b.txt cannot be read": {"solution": "echo 3 > /tmp/b.txt; ln -s /tmp/b.txt b.txt"},
}


def test_a_task_that_does_not_hold_is_refused_with_the_reason(in_pool) -> None:
    tasks = [msgspec.structs.replace(GOOD, id=reason, **change) for reason, change in REFUSED.items()]
    found = proved(in_pool, GOOD, *tasks)
    assert "sum" not in found
    assert all(reason in found[reason].removeprefix(reason) for reason in REFUSED), found


def test_a_task_whose_program_is_missing_is_left_out_and_the_others_keep_their_order(in_pool) -> None:
    lines: list[str] = []

    async def scenario(pool: SlotPool) -> None:
        choice = TaskSelection(4, levels=(1,), families=("git-authors", "text-clean", "mode-rules"))
        whole = await build(choice, 3, pool, parallel=4)
        assert [task.id[:17] for task in whole.tasks] == [f"terminal-4-{number:06}" for number in range(3)]
        assert whole.problems == ()
        hidden = _WithoutGit(pool)
        part = await build(choice, 3, hidden, parallel=4, progress=lines.append)  # type: ignore[arg-type]
        assert part.tasks == tuple(task for task in whole.tasks if not task.needs)
        assert len(part.problems) == 1

    in_pool(scenario)
    assert all("it needs git" in line for line in lines)
    assert len(lines) == 1


class _WithoutGit:
    """A pool whose slots have lost git before anybody gets them."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)

    async def acquire(self, trajectory_id: str, **how: object):
        slot = await self._pool.acquire(trajectory_id, **how)  # type: ignore[arg-type]
        await slot.execute("rm -f $(which -a git)", cwd="/")
        return slot
