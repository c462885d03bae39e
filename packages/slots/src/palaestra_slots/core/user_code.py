"""Loads and awaits user code, such as environment files, hooks and tools. Callers decide how an error in user code is
reported, and which part is to blame."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib.util
import inspect
import logging
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn, TypeVar, overload

from palaestra_slots.core.errors import ConfigError, GraderError, InfraError, PalaestraError
from palaestra_slots.core.io.plugins import OWN_PACKAGES
from palaestra_slots.core.io.threads import in_own_thread
from palaestra_slots.core.types import JSON, Label, Score, number

logger = logging.getLogger(__name__)

T = TypeVar("T")

HIGHEST_REWARD = 1e100
"""Rewards with a larger absolute value are refused, so that sums of their squares cannot overflow."""

_MODULE = "palaestra_environment_"


@functools.cache
def own_folders() -> tuple[Path, ...]:
    """Return the folders of our packages that are installed. Most runs need none: looking for a package takes time."""
    return tuple(
        Path(folder)
        for package in map(importlib.util.find_spec, OWN_PACKAGES)
        for folder in (package and package.submodule_search_locations) or ()
    )


@functools.cache
def _not_the_authors() -> tuple[str, ...]:
    """Return the folders of our packages, of Python itself and of installed packages, with a separator at the end."""
    python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple(f"{folder}{os.sep}" for folder in (*own_folders(), *python))


class ForeignError(Exception):
    """User code failed. The text describes the error, which is the `__cause__`."""


PATIENCE_S, AGAIN_S = 30.0, 1.0
"""Seconds until cancelled code that has not ended is cancelled again, and seconds between further cancellations. A bare
`except` around a retry swallows the first cancellation."""


async def foreign(
    work: Awaitable[T], *, expected: tuple[type[Exception], ...] = (), patience_s: float = PATIENCE_S
) -> T:
    """Await user code and return its result. Raises `ForeignError` for errors that its author did not expect,
    `sys.exit` included.

    `expected` errors and every `PalaestraError` are raised unchanged. If the code raises a group of errors, the first
    infrastructure failure in the group is raised or, if there is none, its first `PalaestraError`. A cancellation of
    this task is raised even if the code swallows it; a cancellation by another task is a failure.

    The code runs in a task of its own, because before Python 3.13 a failed task group leaves its task marked as
    cancelled, which looks like a real cancellation.
    """
    loop = asyncio.get_running_loop()
    own: asyncio.Task[T | _Raised] = loop.create_task(_ended(work))
    over: asyncio.Future[None] = loop.create_future()

    def tell(_: object) -> None:
        if not over.done():
            over.set_result(None)

    own.add_done_callback(tell)
    try:
        await over  # awaiting `own` itself would cancel it together with this task, and its code could continue
    except asyncio.CancelledError:
        await _cancelled(own, patience_s)
        raise
    finally:
        if own.done() and asyncio.iscoroutine(work):
            work.close()  # needed only if the work was cancelled before it began
    try:
        ended = own.result()
    except asyncio.CancelledError as cancellation:
        raise ForeignError("CancelledError: an awaited operation was cancelled") from cancellation
    if isinstance(ended, _Raised):
        error = ended.error
        if isinstance(error, (PalaestraError, *expected)):
            raise error
        known = [leaf for leaf in leaves(error) if isinstance(leaf, PalaestraError)]
        # Raises the first of them. Infrastructure failures come first, because they decide whether the rollout is
        # retried.
        for leaf in sorted(known, key=lambda leaf: not isinstance(leaf, InfraError)):
            raise leaf from error
        raise ForeignError(told(error)) from error
    return ended


async def run_hook(kind: type[PalaestraError], hook: Awaitable[T], doing: str) -> T:
    """Await an environment's hook and return its result. Errors that its author did not expect become `kind`, with the
    original as their cause. A `PalaestraError` is raised unchanged, with one exception: `doing` is put in front of a
    plain `ConfigError`'s message, unless `kind` is `ConfigError`."""
    try:
        return await foreign(hook)
    except (ConfigError, ForeignError) as error:
        _raise_as(kind, error, doing)


def call_hook(kind: type[PalaestraError], hook: Callable[[], T], doing: str) -> T:
    """Call a hook that is a plain function, and return its result. Errors are converted as in `run_hook`. Such a hook
    cannot wait, so it needs no task."""
    try:
        return hook()
    except ConfigError as error:
        _raise_as(kind, error, doing)
    except (PalaestraError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() included
        failed = ForeignError(told(error))
        failed.__cause__ = error
        _raise_as(kind, failed, doing)


def _raise_as(kind: type[PalaestraError], error: ConfigError | ForeignError, doing: str) -> NoReturn:
    if isinstance(error, ConfigError):
        if type(error) is not ConfigError or kind is ConfigError:
            raise error
        raise ConfigError(f"{doing}: {error}") from error
    logger.debug("%s failed", doing, exc_info=error)
    cause = error.__cause__
    raise kind(f"{doing} failed with {error}{place(cause) if cause is not None else ''}") from cause


async def _cancelled(own: asyncio.Future[T], patience_s: float) -> None:
    """Cancel the task, repeatedly if necessary, until it has ended."""
    own.cancel()
    await asyncio.wait((own,), timeout=patience_s)
    while not own.done():
        own.cancel()
        await asyncio.wait((own,), timeout=AGAIN_S)


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


async def _ended(work: Awaitable[T]) -> T | _Raised:
    """Return the result or the error. `SystemExit` out of a task would end the loop, so errors are returned as
    values."""
    try:
        return await work
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # such as pytest.fail, which is not an Exception
        return _Raised(error)


@overload
async def settled(answer: Awaitable[T]) -> T: ...
@overload
async def settled(answer: object) -> JSON: ...
async def settled(answer: object) -> JSON:
    """Return a hook's answer, after awaiting it if the hook is async."""
    return await answer if inspect.isawaitable(answer) else answer


async def called(hook: Callable[..., object], *args: object) -> JSON:
    """Call a hook and await its answer, so that an error in either step is raised here."""
    return await settled(hook(*args))


async def called_off_loop(hook: Callable[..., object], *args: object, **named: object) -> JSON:
    """Call a hook and await its answer. A plain function runs in a thread of its own: on the loop's thread, one that
    computes for long would stop everything else, and one that waits for calls of its own threads would deadlock."""
    call = partial(hook, *args, **named)
    return await settled(call() if inspect.iscoroutinefunction(hook) else await in_own_thread(call))


def place(error: BaseException) -> str:
    """Return the innermost line of the author's code in the error's traceback, as ` (my_env.py, line 12)`; empty if the
    traceback contains none of the author's code."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_not_the_authors())):
            found = f" ({os.path.basename(path)}, line {line})"
    return found


def told(error: BaseException) -> str:
    """Return the type, text and notes of the error, or of each error in a group, without characters that UTF-8 cannot
    encode."""
    each = ("; ".join((f"{type(leaf).__name__}: {leaf}", *getattr(leaf, "__notes__", ()))) for leaf in leaves(error))
    return "; ".join(each).encode(errors="replace").decode()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group of errors, at any depth; the error itself if it is not a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def is_loaded(module_name: str) -> bool:
    """Return whether `load_file` loaded the module of this name; False for a script that Python runs directly."""
    return module_name.startswith(_MODULE)


class _FreshLoader(SourceFileLoader):
    """Always compiles the file. Python's byte-code cache cannot tell two versions apart that were written in the same
    second with the same size."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


_RELATIVE = re.compile(rb"^[ \t]*from[ \t]+\.", re.MULTILINE)


def _package_of(path: Path) -> list[str]:
    """Return the names of the package that a file with relative imports belongs to, outermost first; empty for any
    other file."""
    names: list[str] = []
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names if names and _RELATIVE.search(path.read_bytes()) else []


def load_file(path: Path) -> ModuleType:
    """Import a Python file, which can import modules next to it. In a package, it can use relative imports, as with
    `python -m`. Raises `ConfigError`."""
    if path.is_dir():
        found = path.glob("*/*/task.*")
        below = sorted({each.parent.parent for each in found if each.suffix in (".toml", ".yaml", ".json")})
        hint = f". Did you mean {' or '.join(map(str, below[:3]))}?" if below else ""
        raise ConfigError(
            f"{path} is a folder without tasks (a folder each, with task.toml, task.yaml or task.json), and no Python "
            f"file with an environment{hint}"
        )
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f". Did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"there is no file {path}{hint}")
    if path.suffix not in (".py", ""):
        raise ConfigError(f"{path} is not a Python file with an environment")
    module_name = f"{_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_FreshLoader(module_name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs, because dataclasses look up their module while they are being made.
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as when Python runs the file as a script
    if package := _package_of(path):
        module.__package__, module.__spec__ = ".".join(package), None  # the spec's name is not in the package
        sys.path.insert(0, str(path.resolve().parents[len(package)]))
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a script that parses its own command line raises SystemExit
        raise ConfigError(f"{path} cannot be loaded: {told(error)}{place(error)}") from error
    return module


def score_of(answer: JSON, said: str) -> Score:
    """Return the result of a score hook as a `Score`. Raises `GraderError` if it is not a score; `said` names the hook
    in the message."""
    match answer:
        case Score():
            return answer
        case (value, (Mapping() | None) as metrics) if (reward := number(value)) is not None:
            return Score(reward, metrics or {})
        case value if (reward := number(value)) is not None:
            return Score(reward)
    raise GraderError(
        f"{said} returned {type(answer).__name__} ({answer!r:.100}); it must return a number, a bool, a Score or "
        f"(number, metrics)"
    )


def checked_score(score: object, doing: str) -> Score:
    """Return the score with plain numbers. Metrics that are not finite numbers are moved into the detail, because they
    cannot be averaged.

    Raises `GraderError` if the value is not a score, or has no usable reward, official verdict or labels.
    """
    if not isinstance(score, Score) or not isinstance(score.metrics, Mapping) or not isinstance(score.detail, Mapping):
        raise GraderError(f"{doing} returned {score!r:.100}, not a Score")
    reward = _checked_number(score.reward, "a reward", doing)
    # The reward and the verdict must be numbers, because a rollout is paid by them. Metrics only describe it, so a bad
    # one is left out.
    official = None if score.official is None else _checked_number(score.official, "an official verdict", doing)
    if not isinstance(score.labels, Sequence) or not all(map(_is_label, score.labels)):
        raise GraderError(
            f"{doing} returned the labels {score.labels!r:.200}: return a list of Label(name, evidence), whose names "
            "consist of letters, digits, _, - and ., and whose evidence is text"
        )
    score = replace(score, reward=reward, official=official, labels=tuple(score.labels))
    found = {str(name): number(value) for name, value in score.metrics.items()}
    metrics = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    left_out = {str(name): f"{value!s:.100}" for name, value in score.metrics.items() if str(name) not in metrics}
    if not left_out:
        return replace(score, metrics=metrics)
    logger.warning("%s returned metrics that are not finite numbers, which are left out: %s", doing, left_out)
    return replace(score, metrics=metrics, detail={**score.detail, "metrics_left_out": left_out})


def _checked_number(value: object, what: str, doing: str) -> float:
    found = number(value)
    if found is None or not abs(found) <= HIGHEST_REWARD:  # the comparison is also false for NaN
        raise GraderError(
            f"{doing} returned {_value_text(value)}, which is not {what}: {what} is a finite number of at most "
            f"{HIGHEST_REWARD:g} in absolute value"
        )
    return found


def _is_label(label: object) -> bool:
    return (
        isinstance(label, Label)
        and isinstance(label.name, str)
        and re.fullmatch(r"[\w.-]+", label.name) is not None
        and isinstance(label.evidence, str)
    )


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.100}"
