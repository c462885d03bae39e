"""Decides which tasks are played, how many rollouts run at a time, and the order in which tasks start: the data set's
order, or slow tasks first if earlier timings are known.

If the longest task starts last, the run waits for it while everything else is idle. Whatever the order, a task keeps
its number, and so its ids, its random choices and its place in every file. The order depends only on the tasks and the
timings.

Source of the rule: R. L. Graham (1969), longest processing time first.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from copy import copy
from pathlib import Path

from palaestra.rollouts.journal.reader import journal_of
from palaestra.rollouts.journal.views import line_heads
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import Task

WINDOW = 1024
"""The number of tasks that are read ahead and ordered. It is bounded because all these tasks are in memory, and because
the output of a later task waits for the output of every earlier task."""

COUNT_S = 0.3
"""The maximum time that a run waits for the number of its tasks before it begins."""

Numbered = tuple[int, Task]

_MOST_READ = 100_000
"""How many tasks are read to find chosen ones, because an environment may have tasks without end."""
_REPEATS = 1000
"""How many known tasks in a row (ten times the number of known tasks, if that is more) mean that there are no others,
because an environment may give the same tasks again and again."""
_NAMED = 5


def escaped(task_id: str) -> str:
    """Return a word for `TaskChoice` that matches only this id."""
    return re.sub(r"([*?[])", r"[\1]", task_id)


_ESCAPED = re.compile(r"\[([*?[])\]")


class TaskChoice:
    """The tasks that a user chose, each by its id or by a pattern of ids, such as `fix-*`. A word that is the id of a
    task is no pattern, and neither is an `escaped` id."""

    def __init__(self, words: Iterable[str]) -> None:
        found, self._patterns = list[str](), dict[str, re.Pattern[str]]()
        for word in words:
            if {"*", "?", "["}.isdisjoint(_ESCAPED.sub("", word)):
                found.append(_ESCAPED.sub(r"\1", word))
            else:
                found.append(word)
                self._patterns[word] = re.compile(fnmatch.translate(word))
        self.words = tuple(dict.fromkeys(found))
        self._ids = frozenset(self.words)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._ids or any(each.match(task_id) for each in self._patterns.values())

    def among(self, known: Collection[str]) -> TaskChoice:
        """Return the choice among tasks with these ids: words that are ids are no patterns."""
        other = copy(self)
        other._patterns = {word: each for word, each in self._patterns.items() if word not in known}
        return other

    def check(self, known: Collection[str], environment: str, refused: Mapping[str, str] = {}) -> None:
        """Raise `ConfigError` if a word matches none of the known ids. `refused` maps the ids of unusable tasks to the
        reasons."""
        matched = {word for word, each in self._patterns.items() if any(map(each.match, known))}
        if not (missing := [word for word in self.words if word not in known and word not in matched]):
            return
        from palaestra_slots.core.config import nearest  # imported here, because only this message needs it

        if missing[0] in refused:
            raise ConfigError(f"{environment}: the task {missing[0]!r} cannot be used: {refused[missing[0]]}")
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        shown = f"{', '.join([*known][:_NAMED])}{', …' if len(known) > _NAMED else ''}"
        has = f"it has {plural(len(known), 'task')}: {shown}" if known else "it has no tasks"
        raise ConfigError(
            f"{environment} has no task {missing[0]!r}{others}.{nearest(missing[0], known)} For this command, {has}"
        )

    async def of(
        self, tasks: AsyncIterator[Task], environment: str, refused: Mapping[str, str] = {}
    ) -> AsyncIterator[Task]:
        """Yield the chosen tasks once each, in their order. Before the first, tasks are read until every word has
        matched one, so that an id that matches nothing is reported before anything is played. With a word such as
        `test[a]`, which may be an id or a pattern, tasks are read until the id is found. Raises `ConfigError`."""
        choice, missing, found, seen = self, set(self.words), list[Task](), dict[str, None]()
        async for task in _distinct(tasks, seen):
            if task.id not in choice:
                continue
            found.append(task)
            missing -= {task.id, *(word for word, each in choice._patterns.items() if each.match(task.id))}
            if task.id in choice._patterns:
                choice = choice.among([task.id])
                found = [each for each in found if each.id in choice]
            # A pattern with only `*` matches an id that is written like it, so it need not wait for this id.
            if not missing and all({"?", "["}.isdisjoint(word) for word in choice._patterns):
                for each in found:
                    yield each
                found.clear()
                if not choice._patterns:
                    return
        if missing:
            self.check(seen, environment, refused)
        for each in found:
            yield each


async def _distinct(tasks: AsyncIterator[Task], seen: dict[str, None]) -> AsyncIterator[Task]:
    """Yield each task once and add its id to `seen`, until the environment seems to have no further ones: a source of
    tasks may begin again from the start and never end."""
    repeats = 0
    async for task in tasks:
        repeats = repeats + 1 if task.id in seen else 0
        if len(seen) >= _MOST_READ or repeats > max(_REPEATS, 10 * len(seen)):
            return
        if not repeats:
            seen[task.id] = None
            yield task


def groups_ahead(concurrency: int) -> int:
    """Return the number of groups that are prepared before there are places for their rollouts; 0 if groups run one by
    one."""
    return 0 if concurrency == 1 else -(-concurrency // 8)


class Places:
    """Lets at most `limit` rollouts run at a time. A group may begin only if the groups that have begun, this one
    included, then have at most `limit + ahead` unfinished rollouts together.

    Rollouts get places in the order in which they ask, so a group that has begun soon gets all of its places.
    Environments may therefore let the rollouts of a group wait for each other.
    """

    def __init__(self, limit: int, ahead: int) -> None:
        self._running = asyncio.Semaphore(limit)
        self._most = limit + ahead
        self._open = 0
        self._freed = asyncio.Event()

    async def reserve(self, rollouts: int) -> None:
        """Wait until a group with this number of rollouts may begin."""
        while self._open + rollouts > self._most:
            # No other task runs between the look at `_open` and the wait, so no release is missed.
            self._freed.clear()
            await self._freed.wait()
        self._open += rollouts

    def free(self, rollouts: int) -> None:
        """Free the reservations of this number of rollouts, which have ended, so that another group may begin."""
        self._open -= rollouts
        self._freed.set()

    async def acquire(self) -> None:
        """Wait for a place for one rollout of a group that has begun."""
        await self._running.acquire()

    def release(self) -> None:
        """Free the place of a rollout that has ended."""
        self._running.release()


async def numbered(tasks: AsyncIterator[Task], first: int, limit: int | None) -> AsyncIterator[Numbered]:
    """Yield the first `limit` tasks (all if it is None) with their numbers, which count from `first`."""
    number = first
    while limit is None or number < first + limit:
        try:
            task = await anext(tasks)
        except StopAsyncIteration:
            return
        yield number, task
        number += 1


async def counted(
    tasks: AsyncIterator[Numbered], found: Callable[[int], None], window: int = WINDOW, seconds: float = COUNT_S
) -> AsyncGenerator[Numbered, None]:
    """Yield the same tasks. Tasks that arrive within `seconds`, at most `window`, are read ahead. If these are all the
    tasks, `found` gets their number before the first is yielded. If `tasks` raises an error, the tasks before it are
    yielded first."""
    ahead: list[Numbered] = []
    following = asyncio.ensure_future(anext(tasks))
    deadline = time.monotonic() + seconds
    try:
        while len(ahead) < window:
            # `wait` leaves the request for the next task running. `wait_for` would cancel it at the deadline and lose
            # the task.
            await asyncio.wait({following}, timeout=max(0.0, deadline - time.monotonic()))
            if not following.done() or following.cancelled() or following.exception() is not None:
                break
            ahead.append(following.result())
            following = asyncio.ensure_future(anext(tasks))
        if following.done() and isinstance(following.exception(), StopAsyncIteration):
            found(len(ahead))
        for each in ahead:
            yield each
        while True:
            try:
                yield await following
            except StopAsyncIteration:
                return
            following = asyncio.ensure_future(anext(tasks))
    finally:
        following.cancel()


async def count(tasks: AsyncIterator[Task]) -> int | None:
    """Return the number of tasks, within the limits of `counted`; None if there may be more."""
    found: list[int] = []
    async with aclosing(counted(numbered(tasks, 0, None), found.append)) as ahead:
        async for _ in ahead:
            break
    return found[0] if found else None


async def slowest_first(
    tasks: AsyncIterator[Numbered], seconds: Mapping[str, float], window: int = WINDOW
) -> AsyncIterator[Numbered]:
    """Yield the same tasks, ordered within each window by the `seconds` that they took earlier, longest first.

    A task without a timing gets the median; ties keep their order. Without timings, no task is read ahead.
    """
    if not seconds:
        async for each in tasks:
            yield each
        return
    unknown = statistics.median(seconds.values())

    def slowness(each: Numbered) -> float:
        return -seconds.get(each[1].id, unknown)

    ahead: list[Numbered] = []
    failure: Exception | None = None
    try:
        async for each in tasks:
            ahead.append(each)
            if len(ahead) == window:
                for one in sorted(ahead, key=slowness):
                    yield one
                ahead.clear()
    except Exception as error:  # what was read before is still to be rolled out
        failure = error
    for one in sorted(ahead, key=slowness):
        yield one
    if failure is not None:
        raise failure


def read_timings(run: Path) -> dict[str, float]:
    """Return the seconds that each task took, by id, from a run's folder or journal: preparation plus slowest rollout,
    in the slowest group.

    Discarded attempts count; unreadable lines do not. Raises `ConfigError` if there is no such run.
    """
    prepared: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for line in line_heads(journal_of(run)):
        if line.group is not None:
            prepared[line.group.group_id] = line.group.prepare_s
        if (rollout := line.trajectory) is not None:
            took = prepared.get(rollout.group_id, 0.0) + rollout.beside.duration_s
            seconds[rollout.task_id] = max(seconds.get(rollout.task_id, 0.0), took)
    return seconds
