"""What happened inside a tool call: the calls that a program made. Records, no I/O.

The model sees of them only what the program printed. What a rollout did is more than that, so whoever runs the rollout
takes them from here after each turn (`Inside.taken`) and puts them into its record.

Invariant: a text that is kept here is bounded, and says what was left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from palaestra.core.types import JSON

KEPT_CHARS = 20_000
"""How much of one call's arguments, and of one reply, is kept."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """One call that a program made, in the turn of that number. `arguments` and `reply` are JSON texts, as kept."""

    tool: str
    arguments: str
    reply: str
    turn: int = 0


@dataclass(slots=True)
class Inside:
    """What has happened inside the calls of one rollout since somebody took it."""

    calls: list[InnerCall] = field(default_factory=list)

    def called(self, tool: str, arguments: JSON, reply: str) -> None:
        """Keep one call and the text of its reply."""
        self.calls.append(InnerCall(tool, kept(json.dumps(arguments, ensure_ascii=False)), kept(reply)))

    def taken(self, turn: int) -> list[InnerCall]:
        """The calls so far, which were made in that turn and are not kept here any longer."""
        calls, self.calls = self.calls, []
        return [replace(call, turn=turn) for call in calls]


def kept(text: str) -> str:
    """A text as it is recorded: encodable, and cut in its middle where it is too long."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= KEPT_CHARS:
        return text
    return f"{text[: KEPT_CHARS // 2]}… {len(text) - KEPT_CHARS} characters left out …{text[-KEPT_CHARS // 2 :]}"
