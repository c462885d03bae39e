"""Records of the calls that programs make inside tool calls. No I/O.

The model sees only a program's output. The rollout adds the calls to its record after each turn
(`InnerCalls.taken`). Invariant: recorded texts are bounded, with a mark where they are cut.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from palaestra_slots.core.types import JSON

KEPT_CHARS = 20_000
"""The maximum number of characters that are kept of one call's arguments, and of one reply."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """One call that a program made in turn number `turn`. `arguments` (JSON) and `reply` are texts; a long one is cut
    in the middle."""

    tool: str
    arguments: str
    reply: str
    turn: int = 0


@dataclass(slots=True)
class InnerCalls:
    """The calls of one rollout since the last `taken`."""

    calls: list[InnerCall] = field(default_factory=list)

    def called(self, tool: str, arguments: JSON, reply: str) -> None:
        """Keep one call and the text of its reply."""
        self.calls.append(InnerCall(tool, _kept(json.dumps(arguments, ensure_ascii=False)), _kept(reply)))

    def taken(self, turn: int) -> list[InnerCall]:
        """Remove and return the calls so far, marked with the turn that made them."""
        calls, self.calls = self.calls, []
        return [replace(call, turn=turn) for call in calls]


def _kept(text: str) -> str:
    """Return the text to record: encodable as UTF-8, and cut in the middle if it is too long."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= KEPT_CHARS:
        return text
    return f"{text[: KEPT_CHARS // 2]}… {len(text) - KEPT_CHARS} characters left out …{text[-KEPT_CHARS // 2 :]}"
