"""Logs the work of a run for `-v`: groups, turns with their calls, rewards, and the ends of attempts."""

from __future__ import annotations

import logging

from palaestra.rollouts.events import (
    AttemptDiscarded,
    Graded,
    GroupBegun,
    GroupStarted,
    Handlers,
    RolloutEnded,
    TurnTaken,
)
from palaestra_slots.core.printable import one_line

logger = logging.getLogger(__name__)

_LONGEST = 100


class EventLog:
    """Subscribes to a run's events and logs them."""

    def handlers(self) -> Handlers:
        return {
            GroupBegun: lambda event: logger.debug("%s begins", event.group.group_id),
            GroupStarted: self._on_group_started,
            TurnTaken: self._on_turn,
            Graded: lambda event: logger.debug("%s: reward %g", event.rollout_id, event.reward),
            AttemptDiscarded: self._on_end,
            RolloutEnded: self._on_end,
        }

    def _on_group_started(self, event: GroupStarted) -> None:
        names = ", ".join(each["function"]["name"] for each in event.group.tools)
        logger.debug("%s: prepared in %.3f s, tools: %s", event.group.group_id, event.group.prepare_s, names or "none")

    def _on_turn(self, event: TurnTaken) -> None:
        calls = [
            f"{call['function']['name']}({one_line(str(call['function']['arguments']), _LONGEST)})"
            for message in event.messages
            for call in message.get("tool_calls") or ()
        ]
        read, written = event.tokens
        model_s, tools_s = event.seconds
        logger.debug(
            "%s: turn %d: %d tokens read, %d written in %.2f s, tools %.2f s%s",
            *(event.rollout_id, event.turn, read, written, model_s, tools_s),
            f": {', '.join(calls)}" if calls else "",
        )

    def _on_end(self, event: RolloutEnded | AttemptDiscarded) -> None:
        each = event.trajectory
        error = f": {one_line(each.error, _LONGEST)}" if each.error else ""
        what = "ended" if isinstance(event, RolloutEnded) else "is tried again"
        logger.debug("%s %s: %s after %.2f s%s", each.rollout_id, what, each.outcome, each.beside.duration_s, error)
