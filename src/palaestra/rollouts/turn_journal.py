"""The turns of one group's rollouts on their way into the journal, and back out of it where the run was cut off.

Not for giving the turns back to a rollout (`recall`) or for reading a journal (`resume`). Invariant: a turn stands in
the journal once for each attempt that took it, so it can be gone on with as often as the run is cut off.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass

from palaestra.core.types import Prices
from palaestra.rollouts.branches import BranchReply
from palaestra.rollouts.journal.journal import AttemptDiscarded, Journal, Messages, Replied, RolloutTakenUp
from palaestra.rollouts.observe.console import Observer
from palaestra.rollouts.records import Group
from palaestra.rollouts.resume.recorded_chat import Anew, Recall
from palaestra.rollouts.resume.state import CutOff
from palaestra.rollouts.rollout import Rollout, TakenTurn


@dataclass(frozen=True, slots=True)
class Turns:
    """Of one group. `cut_off` are the rollouts of an earlier part of the run that nobody has taken up yet."""

    journal: Journal
    observer: Observer
    cut_off: MutableMapping[str, CutOff]
    group: Group
    prices: Prices | None

    def recall(self, index: int) -> Recall | None:
        """What is left of a rollout that was under way; None where there is nothing to go on with."""
        rollout_id = f"{self.group.group_id}/{index}"
        cut_off = self.cut_off.pop(rollout_id, None)
        if cut_off is None:
            return None
        for tokens in cut_off.paid() if cut_off.ended is None else ():  # what has a record counts already
            self.observer.turn(rollout_id, *tokens)
        recall = Recall(cut_off)
        if cut_off.tools_hash == self.group.tools_hash:
            return recall
        recall.fail(Anew.TOOLS)
        self.begin_anew(index, recall)
        return None

    def begin_anew(self, index: int, recall: Recall) -> None:
        """A rollout cannot go on where it was cut off: write down why, and what it had cost."""
        rollout_id, reason = f"{self.group.group_id}/{index}", str(recall.failed)
        if recall.cut_off.ended is None:
            lost = recall.cut_off.record(rollout_id, self.group, index, self.prices)
            self.journal.append(AttemptDiscarded(at=time.time(), trajectory=lost))
        self._taken_up(rollout_id, recall, reason)
        if recall.turns or recall.replies:
            said = f"{reason}: {recall.evidence}" if recall.evidence else reason
            self.observer.note(f"{rollout_id} begins anew after {recall.turns} turns: {said}")

    def keep(self, rollout: Rollout, taken: TakenTurn) -> None:
        """A rollout has taken a turn."""
        turn, recall = taken.turn, rollout.recall
        if not taken.known or (recall is not None and not recall.journalled):
            event = Messages(
                at=time.time(),
                rollout_id=rollout.rollout_id,
                turn=turn.number,
                messages=taken.messages,
                finish_reason=turn.finish_reason,
                tokens=(turn.prompt_tokens, turn.completion_tokens),
                seconds=(round(turn.model_s, 6), round(turn.tool_s, 6)),
                sampled=taken.sampled,
                cost=self._cost(turn.prompt_tokens, turn.completion_tokens),
                recalled=taken.recalled,
            )
            self.journal.append(event)
        if not taken.known and not taken.recalled:
            self.observer.turn(rollout.rollout_id, turn.prompt_tokens, turn.completion_tokens)
        elif taken.known and recall is not None and recall.caught_up and (recall.turns or recall.replies):
            self._taken_up(rollout.rollout_id, recall)

    def keep_reply(self, rollout: Rollout, said: BranchReply) -> None:
        """The model has replied in a turn that gives work away. The rollout's own reply counts when its turn ends."""
        recall, tokens = rollout.recall, (said.reply.prompt_tokens, said.reply.completion_tokens)
        if not said.known or (recall is not None and not recall.journalled):
            event = Replied(
                at=time.time(),
                rollout_id=rollout.rollout_id,
                branch=said.branch,
                asked=said.asked,
                message={} if said.sampled else said.reply.message(),
                finish_reason=said.reply.finish_reason,
                tokens=tokens,
                cost=self._cost(*tokens),
                sampled=said.sampled,
            )
            self.journal.append(event)
        if said.branch and not said.known:
            self.observer.turn(rollout.rollout_id, *tokens)

    def _taken_up(self, rollout_id: str, recall: Recall, anew: str = "") -> None:
        event = RolloutTakenUp(
            at=time.time(), rollout_id=rollout_id, turns=recall.turns, replies=recall.replies, anew=anew
        )
        self.journal.append(event)

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        spent = prompt_tokens or completion_tokens
        return self.prices.cost(prompt_tokens, completion_tokens) if self.prices and spent else None
