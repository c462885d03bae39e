"""How calls that touch the world are named, so that a recorded reply can be found again. No I/O.

`World` is what a rollout's tools ask instead of running such a call themselves, `Worlds` where the trajectories of an
executor or a tool session have theirs from; `rollouts/world` implements both over a file. Not for tools that work in
the slot: what those find is made again by running them.

Invariant: equal calls have equal keys, however their arguments were written down.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

from palaestra.core.types import JSON
from palaestra.tools.tool import Tool, ToolReply, ToolRun

Ask: TypeAlias = Callable[[], Awaitable[ToolReply]]
"""Runs the call itself. Its reply is what the model reads; the tool's mistakes and failures are replies too."""


class World(Protocol):
    """The world as one rollout sees it: really there, or as it was recorded."""

    @property
    def replayed(self) -> bool:
        """Whether nobody is ever asked: then a tool that touches the world can be called whatever it lacks here."""
        ...

    async def call(self, tool: Tool, arguments: Mapping[str, JSON], run: ToolRun, ask: Ask) -> ToolReply:
        """The reply to a call of a tool that touches the world. Raises `InfraError`."""
        ...

    def beside(self, name: str) -> World:
        """The same world for another conversation of the rollout, such as a sub-agent's: its calls count apart."""
        ...


class Worlds(Protocol):
    """The world for many rollouts, and what is kept of it. `open_world` makes one."""

    def rollout(self, rollout_id: str, /) -> World:
        """The world as this rollout sees it, from its beginning."""
        ...

    def close(self) -> None:
        """Flush what is kept, and close. Idempotent."""
        ...


def call_key(tool: str, what: JSON, after: str = "") -> str:
    """The name of a call: a hash (hex) of the tool, what decides its reply, and the calls of its session before it."""
    text = json.dumps([tool, _plain(what), after], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_defaults(arguments: Mapping[str, JSON], parameters: Mapping[str, JSON]) -> dict[str, JSON]:
    """The arguments with the schema's defaults for those left out: `{}` and `{"limit": 5}` may be the same call."""
    defaults = {
        name: each["default"] for name, each in parameters.items() if isinstance(each, dict) and "default" in each
    }
    return {**defaults, **arguments}


def failed(reply: ToolReply) -> bool:
    """Whether a reply says that the call could not be done."""
    return isinstance(reply, Mapping) and bool(reply.get("error"))


def _plain(value: JSON) -> JSON:
    """Whole numbers are the same number however they are written: JSON schemas take 5.0 for an integer."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
