"""What a cheat is. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cheat:
    """One exploit: a shell script that an agent could run in its workspace instead of doing the task.

    The script knows nothing of the task but what was asked, in `$TASK`. It may fail where its target is not there: what
    counts is the reward.
    """

    name: str
    what: str
    script: str
