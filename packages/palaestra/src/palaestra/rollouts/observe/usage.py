"""The tokens and the cost of a run, counted from the lines of its journal: the one rule for every reader of runs.

Attempts that were discarded, replaced or lost in a kill count too, each once. Rollouts in flight count up to their last
turn or sub-agent's reply. The cost of a run includes the models that its environment asked and, once they are known,
its priced slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from palaestra.rollouts.journal.views import LineView, RolloutView
from palaestra.rollouts.records import CUT_OFF, MODEL_COST
from palaestra_slots.core.types import Prices

SLOTS_COST = "slots/cost"
"""The metric of a run with the cost of its slots."""


class UsageLine(LineView):
    """The fields of a line that show what a run has used."""

    turn: int = 0
    turns: int = 0
    replies: int = 0
    cost: float | None = None
    recalled: bool = False
    branch: int = 0
    model_calls: dict[str, float] = msgspec.field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """Tokens read and written, and their cost if it is known; `unpriced` counts the tokens without a known cost.
    `models` is the cost of the models that the environment asked."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    unpriced: tuple[int, int] = (0, 0)
    models: float = 0.0

    @classmethod
    def of(cls, rollout: RolloutView) -> Usage:
        """Return the usage of an attempt that has a record."""
        used = cls.priced(rollout.prompt_tokens, rollout.completion_tokens, rollout.cost)
        used.models = rollout.metrics.get(MODEL_COST, 0.0)
        return used

    @classmethod
    def priced(cls, prompt_tokens: int, completion_tokens: int, cost: float | None) -> Usage:
        unpriced = (prompt_tokens, completion_tokens) if cost is None else (0, 0)
        return cls(prompt_tokens, completion_tokens, cost, unpriced)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def spent(self, prices: Prices | None) -> float:
        """Return the cost. Tokens without a known cost are charged at `prices`, or left out if `prices` is None."""
        return (self.cost or 0.0) + self.models + (prices.cost(*self.unpriced) if prices is not None else 0.0)

    def add(self, other: Usage, times: int = 1) -> None:
        self.prompt_tokens += times * other.prompt_tokens
        self.completion_tokens += times * other.completion_tokens
        read, written = other.unpriced
        self.unpriced = self.unpriced[0] + times * read, self.unpriced[1] + times * written
        self.models += times * other.models
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + times * other.cost


@dataclass(slots=True)
class InFlight(Usage):
    """The usage of a rollout in flight. `own` is the usage of its own reply in a turn that has not ended."""

    own: Usage | None = None

    def take(self, line: UsageLine) -> None:
        """Count a turn or a reply."""
        used = Usage.priced(*line.tokens, line.cost)
        if line.event == "reply" and not line.branch:
            self.own = used
            return
        if line.recalled:  # the turn was counted as a reply
            used = self.own or Usage()
        if line.event == "messages":
            self.own = None
            self.models = line.model_calls.get(MODEL_COST, self.models)  # of all turns so far
        self.add(used)


@dataclass(slots=True)
class RunUsage:
    """The usage of a run. `settled` is that of attempts with a record, `in_flight` that of the others by rollout id,
    and `cut_off` has the attempts of each rollout that may be continued. `uncounted` counts the turns for which the
    model server reported no tokens. It is plain data, so that a reader can keep it between two readings."""

    settled: Usage = field(default_factory=Usage)
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    cut_off: dict[str, list[Usage]] = field(default_factory=dict)
    uncounted: int = 0

    def take(self, line: UsageLine) -> None:
        """Count a line of the journal. The caller gives the record of each attempt only once."""
        match line.event:
            case "messages" | "reply":
                self.in_flight.setdefault(line.rollout_id, InFlight()).take(line)
                self.uncounted += line.turn > 0 and line.tokens == (0, 0) and not line.recalled
            case "taken_up" if line.turns or line.replies:
                self._take_up(line)
            case "rollout" | "discarded" if line.trajectory is not None:
                self._end_rollout(line.trajectory, kept=line.event == "rollout")

    def _end_rollout(self, rollout: RolloutView, *, kept: bool) -> None:
        used, flown = Usage.of(rollout), self.in_flight.pop(rollout.rollout_id, InFlight())
        # Replies that were lost in a kill had a cost too.
        if (flown.tokens, flown.models) > (used.tokens, used.models):
            used = flown
        self.settled.add(used)
        if kept and rollout.blame in CUT_OFF:
            self.cut_off.setdefault(rollout.rollout_id, []).append(used)

    def _take_up(self, line: UsageLine) -> None:
        """Move the usage of a continued rollout from its old record to the rollout in flight, whose new record will
        contain it. A rollout that starts again leaves its old record where it is."""
        before = self.cut_off.pop(line.rollout_id, [])
        for part in [] if line.anew else before:
            self.settled.add(part, -1)
            self.in_flight.setdefault(line.rollout_id, InFlight()).add(part)

    def total(self) -> Usage:
        """Return the usage so far, of finished attempts and of attempts in flight."""
        total = Usage()
        for each in (self.settled, *self.in_flight.values()):
            total.add(each)
            if isinstance(each, InFlight) and each.own is not None:
                total.add(each.own)
        return total

    @property
    def is_unknown(self) -> bool:
        """Whether the model server reports no usage at all."""
        return bool(self.uncounted) and not self.total().tokens

    def cost(self, own: Mapping[str, float]) -> float | None:
        """Return the cost of the run, of which `own` are the metrics of an ended run; None if no prices are known."""
        total = self.total()
        tokens = None if self.is_unknown else total.cost
        parts = [tokens, total.models or None, own.get(SLOTS_COST)]
        known = [each for each in parts if each is not None]
        return sum(known) if known else None
