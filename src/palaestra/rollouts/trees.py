"""Tree rollouts: some rollouts of a group continue other rollouts of the group after one of their turns.

The first rollouts of a group, its roots, are rolled out as usual, and their slots are copied after each turn that can
be continued. When all roots have ended, `choose` selects the turns from which the other rollouts, the branches,
continue. A branch starts from a copy of the slot and from the recorded conversation up to that turn. It runs through
the same loop as any rollout: its tools answer from the record until the conversation is new.

Invariants: a turn that several rollouts share is sampled, charged and trained on only once, in the root. A branch is
sealed and graded like any rollout, and its changes are those since the prepared workspace. A turn is not a fork point
if a tool holds state outside the slot, or if a copy of the slot would lack the state of a process, `/tmp` or
`/dev/shm`. If there is no copy, a branch runs the commands of the shared turns again. This happens where the backend or
the isolation level cannot copy a slot, if the copy was lost, and if an earlier part of the run finished the root.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from palaestra.core.clock import uncharged
from palaestra.core.errors import ConfigError, InfraError, SandboxError
from palaestra.core.types import Message
from palaestra.inference.ledger.records import LedgerRecord, unpacked_logprobs
from palaestra.rollouts.events import TurnTaken
from palaestra.rollouts.grading.tampering import SCRATCH
from palaestra.rollouts.records import Fork, Trajectory
from palaestra.rollouts.resume.recorded_turns import RecordedTurns
from palaestra.rollouts.resume.state import CutOff, taken_until
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.slot import Rung, Slot, SlotSource, Snapshot

logger = logging.getLogger(__name__)

UNCERTAIN = "uncertain"


class ForkPoints:
    """The points from which other rollouts can continue one rollout, taken while it runs and dropped by `aclose`."""

    def __init__(self, rollout: Rollout) -> None:
        self.turns: list[TurnTaken] = []
        self.points: dict[int, Snapshot | None] = {}
        """The copy of the slot after each turn that is a fork point; None if the slot was untouched or cannot be copied
        here."""
        self.copied = True
        """Whether slots can be copied here, so that a branch need not run any call again."""
        self._rollout = rollout
        self._pool: SlotSource = rollout.run_context.workspaces.pool
        self._open: bool | None = None
        rollout.log.watch(self)

    def begin(self) -> None:
        """Decide whether to take points. Called when the agent begins or continues its conversation. No points are
        taken in a continued conversation, nor if set-up used the slot, since a branch would repeat that set-up."""
        self._open = self._open is None and self._rollout.seat.slot is None

    async def take(self, turn: int, messages: Sequence[Message]) -> None:
        """Take a point after a turn, which added these messages, if other rollouts can continue from it."""
        rollout = self._rollout
        asked = bool(messages) and messages[-1].get("role") != "assistant"
        if not self._open or not asked or turn >= rollout.settings.max_turns:
            return
        if rollout.seat.has_other_tools or not rollout.calls.repeatable:  # a copy of the slot would lack their state
            return
        ledger = rollout.server.ledger
        if ledger is not None and len(ledger.turns) != turn:
            self._open = False  # sub-agents or the environment made calls too
            return
        with uncharged(), rollout.stages.stage("fork"):
            slot = rollout.seat.slot
            if slot is None:
                self.points[turn] = None
                return
            self.copied = self.copied and slot.rung >= Rung.USERNS  # weaker isolation levels have no layers
            if not self.copied:
                self.points[turn] = None
            elif await _is_all_files(slot):
                await self._copy(turn, slot)

    async def _copy(self, turn: int, slot: Slot) -> None:
        try:
            self.points[turn] = await self._pool.checkpoint(slot, continued=True)
        except (ConfigError, SandboxError) as error:
            logger.info("branches repeat shared commands: %s", error)
            self.copied = False
            self.points[turn] = None

    async def aclose(self) -> None:
        """Drop the copies. Idempotent."""
        while self.points:
            _, snapshot = self.points.popitem()
            if snapshot is not None:
                await self._pool.snapshots.forget(snapshot)


async def _is_all_files(slot: Slot) -> bool:
    """Return whether a copy of the slot's files has all of the slot's state."""
    if await slot.freeze():  # the next call resumes the slot's processes
        return False
    try:
        return not any([await slot.list_dir(place) for place in SCRATCH])
    except InfraError:
        raise
    except OSError:  # the agent may have replaced the directory
        return False


@dataclass(frozen=True, slots=True)
class Branch:
    """The point from which a branch continues. `snapshot` is None if the slot was untouched or there is no copy of it;
    `copied` is False if the calls of the shared turns must be run again."""

    parent: Fork
    turns: list[TurnTaken]
    snapshot: Snapshot | None
    copied: bool

    def recorded(self, tools_hash: str) -> RecordedTurns:
        """Return the shared turns, for one attempt at the branch."""
        cut_off = CutOff(tools_hash, list(self.turns), parent=self.parent)
        return RecordedTurns(cut_off, forked=self.copied, snapshot=self.snapshot)


class RolloutTree:
    """The fork points of one group, whose first `roots` rollouts are roots, and the branches that continue them.
    `known` has the turns of roots that an earlier part of the run finished, by index."""

    def __init__(self, roots: int, known: Mapping[int, list[TurnTaken]], pool: SlotSource) -> None:
        self._roots = roots
        self._pool = pool
        self._known = known
        self._points: dict[int, ForkPoints] = {}
        self._chosen: dict[int, Branch] = {}

    async def watch(self, rollout: Rollout) -> None:
        """Begin to take the fork points of an attempt at a rollout, if the rollout is a root."""
        if rollout.index >= self._roots:
            return
        if (earlier := self._points.pop(rollout.index, None)) is not None:
            await earlier.aclose()
        self._points[rollout.index] = ForkPoints(rollout)

    async def choose(
        self, roots: Sequence[Trajectory], branches: Sequence[int], branch_at: str, rng: random.Random
    ) -> None:
        """Choose a fork point for each branch, and drop the copies of the other points. A branch without a point, or
        whose point is the beginning, is an independent rollout."""
        usable = [each for each in roots if each.scored and (each.index in self._points or each.index in self._known)]
        chosen = choose(usable, len(branches), branch_at, rng)
        for branch, fork in zip(branches, chosen, strict=False):
            if fork.turn == 0:
                continue
            points = self._points.get(fork.index)
            events = self._known[fork.index] if points is None else points.turns
            snapshot = None if points is None else points.points[fork.turn]
            copied = snapshot is not None or (points is not None and points.copied)
            self._chosen[branch] = Branch(fork, taken_until(events, fork.turn), snapshot, copied)
        for index, points in self._points.items():
            kept = {fork.turn for fork in chosen if fork.index == index}
            unused = {turn: points.points.pop(turn) for turn in [*points.points] if turn not in kept}
            for snapshot in filter(None, unused.values()):
                await self._pool.snapshots.forget(snapshot)

    async def branch(self, index: int) -> Branch | None:
        """Return the point from which a branch continues, or None."""
        branch = self._chosen.get(index)
        if branch is None or branch.snapshot is None or await self._pool.snapshots.holds(branch.snapshot):
            return branch
        return replace(branch, snapshot=None, copied=False)  # lost with its backend

    async def aclose(self) -> None:
        """Drop all copies."""
        for points in self._points.values():
            await points.aclose()


def choose(roots: Sequence[Trajectory], branches: int, branch_at: str, rng: random.Random) -> list[Fork]:
    """Choose at most one fork per branch. With `branch_at` set to `uncertain`, the points before the turns with the
    least likely tokens are chosen; with `random`, points are drawn at random. A point is reused only when all have been
    used. The result depends only on the records and `rng`.

    The beginning of each root that has points is a point too, with turn 0: otherwise the first turns would get few
    samples.
    """
    points = [Fork(root.index, turn) for root in roots if root.fork_points for turn in (0, *root.fork_points)]
    if not points:
        return []
    rng.shuffle(points)
    if branch_at == UNCERTAIN:
        surprises = {root.index: surprise(root.ledger) for root in roots if root.ledger is not None}
        points.sort(key=lambda fork: -surprises.get(fork.index, {}).get(fork.turn + 1, 0.0))
    return [points[place % len(points)] for place in range(branches)]


def surprise(ledger: LedgerRecord) -> dict[int, float]:
    """Return the mean negative log-probability of the sampled tokens of each turn, in nats: an estimate of the
    entropy."""
    found: dict[int, list[float]] = {}
    for segment in ledger.segments:
        logprobs = unpacked_logprobs(segment.logprobs)
        for span in segment.spans:
            if span.kind == "sampled":
                found.setdefault(span.turn, []).extend(logprobs[span.start : span.stop])
    return {turn: -statistics.fmean(values) for turn, values in found.items() if values}


def credit(trajectories: Sequence[Trajectory]) -> dict[int, list[tuple[int, float]]]:
    """Return the value of each turn of the scored rollouts that others continue: the mean reward of all rollouts that
    share the turn.

    For each rollout index, the result has pairs of a last turn and a value. The value holds for the turns up to this
    last turn, except those that an earlier pair covers. Rollouts without branches are left out, since the value of each
    of their turns is their own reward. (Credit from the leaves below a step, as in TreeRL, arXiv 2506.11902.)
    """
    tree = _Tree(trajectories)
    return {
        index: [(turn, statistics.fmean(tree.rewards(index, turn))) for turn in tree.last_turns(index)]
        for index in tree.children
    }


def tree_advantages(trajectories: Sequence[Trajectory]) -> dict[int, list[tuple[int, float]]]:
    """Return an advantage for each turn of every scored rollout, in the form of `credit`. Empty if no rollout continues
    another.

    A turn's value V is the mean reward of the rollouts that share it. Its advantage is (V - V of the group) + (V - V
    of the turns before it), divided by the square root of the number of rollouts that share it (TreeRL, arXiv
    2506.11902, equation 5).
    """
    tree = _Tree(trajectories)
    if not tree.children:
        return {}
    mean = statistics.fmean(each.reward or 0.0 for each in tree.scored.values())
    found: dict[int, list[tuple[int, float]]] = {}
    for index in tree.scored:
        before, found[index] = tree.value_before(index, mean), []
        for turn in tree.last_turns(index):
            below = list(tree.rewards(index, turn))
            value = statistics.fmean(below)
            found[index].append((turn, (2 * value - mean - before) / math.sqrt(len(below))))
            before = value
    return found


class _Tree:
    """The scored rollouts of a group, and for each index the (turn, index) of the rollouts that continue it."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.scored = {each.index: each for each in trajectories if each.scored}
        self.children: dict[int, list[tuple[int, int]]] = {}
        for each in self.scored.values():
            if each.parent is not None and each.parent.index in self.scored:
                self.children.setdefault(each.parent.index, []).append((each.parent.turn, each.index))

    def rewards(self, index: int, turn: int) -> Iterator[float]:
        """Yield the rewards of the rollouts that share this turn of a rollout."""
        yield self.scored[index].reward or 0.0
        for at, child in self.children.get(index, ()):
            if at >= turn:
                yield from self.rewards(child, 0)

    def last_turns(self, index: int) -> list[int]:
        """Return the last turn before each fork of a rollout, and its last turn."""
        forks = {turn for turn, _ in self.children.get(index, ())}
        return [*sorted(forks), max(len(self.scored[index].turns), 1 + max(forks, default=0))]

    def value_before(self, index: int, mean: float) -> float:
        """Return the value of the turn that a branch continues; `mean` for a root or a branch from the beginning."""
        parent = self.scored[index].parent
        if parent is None or parent.index not in self.scored or parent.turn == 0:
            return mean
        return statistics.fmean(self.rewards(parent.index, parent.turn))
