"""The record of one cheat. Does no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cheat:
    """A shell script that an agent could run instead of doing the task. The script gets only the prompt, in `$TASK`. It
    may fail, because only the reward counts."""

    name: str
    what: str
    script: str
