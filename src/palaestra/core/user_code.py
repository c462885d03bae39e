"""Code that is not ours, awaited: hooks of an environment's author, tools of anybody's. One rule for what it may raise.

Not for deciding whose fault that is or who reads of it: callers do (`rollouts/attempt.py`,
`tools/runtime/bound_tools.py`). Invariant: whatever such code does ends neither the run nor, unnoticed, the task that
awaits it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

from palaestra.core.errors import InfraError, PalaestraError
from palaestra.core.types import JSON

T = TypeVar("T")

_NOT_THE_AUTHORS = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Where this package, Python's own and installed ones lie."""


class ForeignError(Exception):
    """Code that is not ours failed. Its text says how, and `__cause__` is what it raised."""


PATIENCE_S, AGAIN_S = 30.0, 1.0
"""How long cancelled code may take to end, and how often it is cancelled after that: a bare `except` around a retry
swallows the first."""


async def foreign(
    work: Awaitable[T], *, expected: tuple[type[Exception], ...] = (), patience_s: float = PATIENCE_S
) -> T:
    """Await it. Raises `ForeignError` for what its author did not foresee, `sys.exit` included.

    What is `expected` passes, and so do errors that say whose fault they are, also out of a group of errors, the
    world's before others. So does the cancellation of this task, also where the code has swallowed it or made another
    error of it; to be ended by another's is a failure.

    The code runs in a task of its own: a task group of its, in which something failed, leaves its task marked as
    cancelled (before Python 3.13), which nobody could tell from being cancelled.
    """
    loop = asyncio.get_running_loop()
    own: asyncio.Task[T | _Raised] = loop.create_task(_ended(work))
    over: asyncio.Future[None] = loop.create_future()

    def tell(_: object) -> None:
        if not over.done():
            over.set_result(None)

    own.add_done_callback(tell)
    try:
        await over  # not the task itself: that would be cancelled with this one, and could go on
    except asyncio.CancelledError:
        await _cancelled(own, patience_s)
        raise
    finally:
        if own.done() and asyncio.iscoroutine(work):
            work.close()  # of use only where it was cancelled before it began
    try:
        ended = own.result()
    except asyncio.CancelledError as cancellation:
        raise ForeignError("CancelledError: something that it waited for was cancelled") from cancellation
    if isinstance(ended, _Raised):
        error = ended.error
        if isinstance(error, (PalaestraError, *expected)):
            raise error
        known = [leaf for leaf in leaves(error) if isinstance(leaf, PalaestraError)]
        for leaf in sorted(known, key=lambda leaf: not isinstance(leaf, InfraError)):
            raise leaf from error
        raise ForeignError(told(error)) from error
    return ended


async def _cancelled(own: asyncio.Future[T], patience_s: float) -> None:
    """Cancel it until it has ended."""
    own.cancel()
    await asyncio.wait((own,), timeout=patience_s)
    while not own.done():
        own.cancel()
        await asyncio.wait((own,), timeout=AGAIN_S)


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def _ended(work: Awaitable[T]) -> T | _Raised:
    """What it returns or raises. `SystemExit` out of a task would end the loop, so errors are handed over as values."""
    try:
        return await work
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # such as pytest.fail, which is no Exception
        return _Raised(error)


@overload
async def settled(answer: Awaitable[T]) -> T: ...
@overload
async def settled(answer: object) -> JSON: ...
async def settled(answer: object) -> JSON:
    """What a hook answered: a plain function may stand in an async one's place."""
    return await answer if inspect.isawaitable(answer) else answer


def place(error: BaseException) -> str:
    """Where in its author's code an error arose, as ` (my_env.py, line 12)`; empty where that did not take part."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_NOT_THE_AUTHORS)):
            found = f" ({os.path.basename(path)}, line {line})"
    return found


def told(error: BaseException) -> str:
    """An error in the record's words: its type and text, of a group those of its errors, in letters that UTF-8 can
    hold."""
    each = (f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
    return "; ".join(each).encode(errors="replace").decode()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group of errors, at any depth; of another, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
