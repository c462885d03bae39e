"""Hooks that ask for what they need by name: `async def score(task, sandbox)`.

A hook may be a plain or an async function. The names it may ask for are fixed; anything else is refused when the hook
is declared, not when the first rollout reaches it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from palaestra.core.config import nearest
from palaestra.core.errors import ConfigError, GraderError
from palaestra.core.literals import number
from palaestra.core.types import JSON, Score
from palaestra.core.user_code import settled
from palaestra.envs.api.awaited_slot import AwaitedSlot
from palaestra.sandbox.slot import Slot

HookFunction: TypeAlias = Callable[..., object]
Source: TypeAlias = Callable[[], Awaitable[object]]
"""Makes one thing a hook asked for, and only if it asked."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A user's function and the names it asks for."""

    function: HookFunction
    wants: tuple[str, ...]

    @property
    def name(self) -> str:
        """How metrics and messages call it."""
        return getattr(self.function, "__name__", "hook")

    async def __call__(self, sources: Mapping[str, Source]) -> JSON:
        """Call the function with what it asked for. Raises `NotAwaited` where it called the sandbox for nothing."""
        arguments = {name: await sources[name]() for name in self.wants}
        slot = arguments.get("sandbox")
        if slot is None:
            return await settled(self.function(**arguments))
        with AwaitedSlot(cast("Slot", slot)) as arguments["sandbox"]:
            return await settled(self.function(**arguments))


def declare(function: HookFunction, kind: str, known: tuple[str, ...]) -> Hook:
    """Take a function as a hook. Raises `ConfigError` for a parameter that no rollout can provide."""
    if not callable(function):
        raise ConfigError(f"a {kind} hook must be a function, not {function!r:.100}")
    wants = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in known:
            wants.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            where = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"the {kind} hook {where} asks for {parameter.name!r}, which it cannot have: "
                f"it may ask for {', '.join(known)}.{nearest(parameter.name, known)}"
            )
    return Hook(function, tuple(wants))


def score_of(answer: JSON, said: str) -> Score:
    """What a score hook answered, as a `Score`. Raises `GraderError` that begins with `said`."""
    match answer:
        case Score():
            return answer
        case (value, (Mapping() | None) as metrics) if (reward := number(value)) is not None:
            return Score(reward, metrics or {})
        case value if (reward := number(value)) is not None:
            return Score(reward)
    raise GraderError(
        f"{said} gave {type(answer).__name__} ({answer!r:.100}); it must give a number, a bool, a Score or "
        f"(number, metrics)"
    )
