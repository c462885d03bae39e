"""Code that is not ours, awaited: hooks of an environment's author, tools of anybody's. One rule for what it may raise.

Not for deciding whose fault that is or who reads of it: callers do (`rollouts/attempt.py`, `tools/binding.py`).
Invariant: whatever such code does ends neither the run nor, unnoticed, the task that awaits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from palaestra.core.errors import InfraError, PalaestraError

T = TypeVar("T")


class ForeignError(Exception):
    """Code that is not ours failed. Its text says how, and `__cause__` is what it raised."""


async def foreign(work: Awaitable[T], *, expected: tuple[type[Exception], ...] = ()) -> T:
    """Await it. Raises `ForeignError` for what its author did not foresee, `sys.exit` included.

    What is `expected` passes, and so do errors that say whose fault they are, also out of a group of errors, the
    world's before others. So does the cancellation of this task, where the code has swallowed it, too; to be ended by
    another's is a failure.
    """
    passing: tuple[type[Exception], ...] = (PalaestraError, *expected)
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    try:
        result = await work
    except passing:
        raise
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        raise ForeignError(f"{type(error).__name__}: something that it waited for was cancelled") from error
    except (Exception, SystemExit) as error:
        known = [leaf for leaf in leaves(error) if isinstance(leaf, PalaestraError)]
        for leaf in sorted(known, key=lambda leaf: not isinstance(leaf, InfraError)):
            raise leaf from error
        raise ForeignError(told(error)) from error
    if task is not None and task.cancelling() > cancelled:
        raise asyncio.CancelledError
    return result


def told(error: BaseException) -> str:
    """An error in the record's words: its type and text, in letters that UTF-8 can hold."""
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group of errors, at any depth; of another, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
