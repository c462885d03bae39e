"""What a play changes: the environment's state after each turn, as the journal has it, and files. Does no I/O.

Changes are the evidence for or against a play that a check derives from a reference solution. A play whose state lacks
what the calls of the reference solution change has not done the work. Changes that prove nothing are left out: values
that differ between two plays of the same reference solution, and what the user's side of the conversation changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.rollouts.events import Handlers, TurnTaken
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON

Leaves = Mapping[str, object]
"""Values by their paths, such as `orders.W1.status`."""

_ABSENT = object()


def leaves(state: JSON) -> dict[str, object]:
    """Return the values of a state by their paths. A list is one value, because its items have no names."""
    found: dict[str, object] = {}

    def add_leaves(path: str, value: JSON) -> None:
        if not isinstance(value, Mapping):
            found[path] = value
            return
        for key, each in value.items():
            add_leaves(f"{path}.{key}" if path else str(key), each)

    add_leaves("", state or {})
    return found


def changed(before: Leaves, after: Leaves) -> set[str]:
    """Return the paths whose values differ."""
    return {path for path in {*before, *after} if before.get(path, _ABSENT) != after.get(path, _ABSENT)}


def named_files(files: Mapping[str, bytes]) -> Leaves:
    """Return the contents of files by names that no path of a state has."""
    return {f"file {path}": data for path, data in files.items()}


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """The tools that a turn called with success, the paths whose values it changed, and what the tools replied."""

    tools: frozenset[str]
    changed: frozenset[str]
    replies: str = ""

    @property
    def text(self) -> str:
        """The replies without the escapes of JSON."""
        return self.replies.replace("\\", "")


@dataclass(frozen=True, slots=True)
class Play:
    """A play of a task: its score, the state before and after it, and each of its turns. Files that the agent left
    belong to the state. `error` is why there is no score."""

    reward: float | None
    error: str = ""
    before: Leaves = field(default_factory=dict)
    after: Leaves = field(default_factory=dict)
    turns: Sequence[PlayedTurn] = ()
    rollout: Trajectory | None = None


class TurnRecorder:
    """Keeps the turns of each rollout, as a subscriber of a run's events."""

    def __init__(self) -> None:
        self._turns: dict[str, list[TurnTaken]] = {}

    def handlers(self) -> Handlers:
        return {TurnTaken: self._take_turn}

    def _take_turn(self, event: TurnTaken) -> None:
        if event.turn == 0:  # a rollout that is played again begins anew
            self._turns[event.rollout_id] = []
        self._turns.setdefault(event.rollout_id, []).append(event)

    def play(self, group: Group, files: Mapping[str, bytes] | None = None) -> Play:
        """Return what the only rollout of a group did, which was the last with its name."""
        if not group.trajectories:
            return Play(None, group.error or "there was no rollout")
        rollout = group.trajectories[0]
        before, after, turns = self.of(rollout.rollout_id)
        return Play(rollout.reward, rollout.error, before, {**after, **named_files(files or {})}, turns, rollout)

    def of(self, rollout_id: str) -> tuple[Leaves, Leaves, list[PlayedTurn]]:
        """Return the state before and after the last rollout with this id, and its turns, which are then forgotten."""
        events = self._turns.pop(rollout_id, [])
        before = after = leaves(events[0].state) if events else {}
        turns: list[PlayedTurn] = []
        for event in events[1:]:
            now = leaves(event.state) if event.state is not None else after
            replies = "\n".join(str(each.get("content")) for each in event.messages if each.get("role") == "tool")
            turns.append(PlayedTurn(frozenset(_called(event)), frozenset(changed(after, now)), replies))
            after = now
        return before, after, turns


def _called(event: TurnTaken) -> Iterator[str]:
    """Yield the names of the tools that a turn called and that did not report an error."""
    failed = {
        message.get("tool_call_id")
        for message in event.messages
        if message.get("role") == "tool" and str(message.get("content")).startswith('{"error"')
    }
    for message in event.messages:
        for call in message.get("tool_calls") or ():
            if call["id"] not in failed:
                yield call["function"]["name"]


class Changes:
    """What the calls of a reference solution change, known from two plays of it. `others` are further plays, whose
    calls show which values every call changes."""

    def __init__(self, solved: Play, again: Play, others: Sequence[Play] = ()) -> None:
        self._solved = solved
        by_user = {path for turn in solved.turns if not turn.tools for path in turn.changed}
        self.paths = changed(solved.before, solved.after) - changed(solved.after, again.after) - by_user
        self._turns = [turn for play in (solved, *others) for turn in play.turns if turn.tools]
        self.works = self.lacking(Play(None, after=solved.before))[1]
        """Whether the calls certainly change something but records."""

    def lacking(self, play: Play) -> tuple[list[str], bool]:
        """Return the paths of the changes that a play lacks, and whether they certainly are the work. What a lookup
        keeps of its reply is left out; a value that every call changes, or that only grows, may be a record of calls.
        """
        lacks = sorted(path for path in self.paths
                       if play.after.get(path, _ABSENT) != self._solved.after.get(path, _ABSENT)
                       and not self._is_kept_reply(path, play))  # fmt: skip
        certain = [path for path in lacks if not self._may_be_record(path, play)]
        return certain or lacks, bool(certain)

    def _may_be_record(self, path: str, play: Play) -> bool:
        if self._knows_tools(path):
            return all(path in turn.changed for turn in self._turns)
        return self._grows(path, play)

    def _knows_tools(self, path: str) -> bool:
        """Return whether calls of several tools were seen, and whether they changed this value."""
        return not path.startswith("file ") and len({name for turn in self._turns for name in turn.tools}) > 1

    def _is_kept_reply(self, path: str, play: Play) -> bool:
        """Return whether only lookups of the solution added this value, or the tool that added it also replied with
        it."""
        if not self._knows_tools(path) or not self._grows(path, play):
            return False
        makers = [turn for turn in self._solved.turns if turn.tools and path in turn.changed]
        if all(_LOOKUP.match(name) for turn in makers for name in turn.tools):
            return True
        values = [*_scalars(self._solved.after.get(path))]
        return path not in self._solved.before and all(value in turn.text for value in values for turn in makers)

    def _grows(self, path: str, play: Play) -> bool:
        """Return whether the solution only adds to what was there, such as an item of a list, and the play does not."""
        before, after = self._solved.before.get(path), self._solved.after.get(path)
        if isinstance(before, list | bytes) and isinstance(after, list | bytes):
            return after[: len(before)] == before
        if type(before) is int and type(after) is int:
            return 0 < after - before <= len(self._turns)
        return before is None and path not in play.after


def _scalars(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a value as the text of a reply has them."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _scalars(each)
    elif isinstance(value, Mapping):
        yield from _scalars([*value.values()])
    elif isinstance(value, str):
        yield value.replace("\\", "")
    elif value is not None and not isinstance(value, bool):
        yield str(value)


_LOOKUP = re.compile(r"(get|find|list|search|look|read|show|view|query|fetch|describe|count|calculate)(_|$|[A-Z]|up)")
"""How the names of tools begin that are lookups by convention. Names prove nothing, so they only turn a fault into a
note."""


def carried_over(first: Play, second: Play) -> list[str]:
    """Return the paths whose values the first play changed, and which the second play found as the first had left
    them."""
    return sorted(path for path in changed(first.before, second.before) & changed(first.before, first.after)
                  if second.before.get(path, _ABSENT) == first.after.get(path, _ABSENT))  # fmt: skip
