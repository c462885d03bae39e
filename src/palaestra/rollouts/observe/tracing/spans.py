"""Spans over a run: the group, its rollouts, their stages, model calls and tool calls. `Tracing` opens none.

A span lasts as long as the block that it is opened over, and lies in the one that is open around it. Not a record of a
run: the journal is. Invariant: tracing neither raises nor waits, and a run without it pays for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from palaestra.core.types import JSON, Score
from palaestra.inference.engine import ChatServer
from palaestra.rollouts.records import Group, Trajectory
from palaestra.tools.tool import ToolReply


def _ignore(value: object) -> None:
    """Nobody wants to know."""


_NOTHING: AbstractContextManager[None] = nullcontext()
_IGNORED: AbstractContextManager[Callable[[object], None]] = nullcontext(_ignore)


class Tracing:
    """What a run that is not traced has."""

    def run(self) -> AbstractContextManager[None]:
        """Over the whole run."""
        return _NOTHING

    def group(self, group: Group) -> AbstractContextManager[None]:
        """Over a group: preparation and rollouts."""
        return _NOTHING

    def rollout(self, rollout_id: str) -> AbstractContextManager[Callable[[Trajectory], None]]:
        """Over one attempt at a rollout. The block is given whom to tell what came of it."""
        return _IGNORED

    def stage(self, name: str, stage: str) -> AbstractContextManager[None]:
        """Over a stage of the rollout or group `name`, by the names of `stages`."""
        return _NOTHING

    def tool(self, name: str, arguments: Mapping[str, JSON]) -> AbstractContextManager[Callable[[ToolReply], None]]:
        """Over a tool call. The block is given whom to tell the reply."""
        return _IGNORED

    def graded(self, score: Score) -> None:
        """Say the score at the span that is open."""

    def served(self, server: ChatServer, rollout_id: str) -> ChatServer:
        """The server, with a span over each of its calls for this rollout."""
        return server


NO_TRACING = Tracing()
