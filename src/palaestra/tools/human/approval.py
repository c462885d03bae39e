"""Asking a person before a dangerous command, for interactive use: what is asked about, and how.

Not a security boundary: slots are. The patterns know how people and models usually write what destroys work; a command
that is put together at run time, a script, an interpreter's own calls, keys sent to `tmux` and input for a background
process pass unseen. Who must not trust an agent gives it a slot with nothing in it to lose.

Rollouts have nobody to ask, so nothing is asked: without an `ask`, every command runs. Invariant: a command that was
denied is not run, and a yes holds for what the person was shown: this command, or for the session its kinds of danger.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class Answer(StrEnum):
    """What a person may say."""

    ONCE = "once"
    SESSION = "session"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Request:
    """A command that wants a yes. `dangers` are its kinds of danger, as a person reads them."""

    command: str
    dangers: Sequence[str]
    task_id: str


Ask: TypeAlias = Callable[[Request], Awaitable[Answer]]

_START = r"(?:^|[;&|(`\n]|\$\(|\b(?:sudo|exec|xargs|env|nohup|time|then|do|else)\s)\s{0,20}(?:/[\w./-]{0,100}/)?"
"""Where a program's name stands: at the beginning of a command, perhaps behind another program that starts it."""

_GIT = r"\bgit\s+(?:-\S+\s+(?:[^-\s]\S*\s+)?){0,4}?"
"""`git` with options before its command."""

_DANGERS: Sequence[tuple[str, str]] = (
    ("deletes whole directories", _START + r"rm\s+(?:\S+\s+){0,20}?-(?:[a-zA-Z]*[rR]|-recursive\b)"),
    ("deletes what a search finds", r"\bfind\b[^;|&\n]{0,300}\s-(?:delete\b|exec(?:dir)?\s+(?:\S*/)?rm\b)"),
    ("writes to a device or makes a file system", _START + r"(?:mkfs\S*|wipefs|fdisk|parted)\b|\bof=/dev/(?!null\b)"),
    ("writes to a device or makes a file system", r">\s*/dev/(?:sd|nvme|hd|vd|mmcblk|disk)"),
    ("changes permissions or owners of everything below", _START + r"(?:chmod|chown|chgrp)\s+(?:\S+\s+){0,20}?-\S*R"),
    ("acts as root", _START + r"(?:sudo|doas|su)\b"),
    ("stops the machine or its services", _START + r"(?:shutdown|reboot|halt|poweroff|init\s+[06])\b"),
    ("stops the machine or its services", _START + r"systemctl\s+(?:\S+\s+){0,20}?(?:stop|disable|mask|kill)\b"),
    ("ends processes of others", _START + r"(?:kill\s+(?:-\S+\s+)*-1\b|pkill\b|killall\b)"),
    ("runs what it downloads", r"\b(?:curl|wget)\b[^;&\n|]{0,500}\|\s*(?:sudo\s+)?(?:\S*/)?(?:ba|z|da|k)?sh\b"),
    ("runs what it downloads", r"\b(?:ba|z|da|k)?sh\s+(?:-c\s+)?[\"']?(?:<\(|\$\()\s*(?:curl|wget)\b"),
    ("overwrites system configuration", r"(?:>>?|\btee\s+(?:-a\s+)?)\s*/(?:etc|boot|usr|lib)/"),
    ("throws away work in git", _GIT + r"(?:reset\s+(?:\S+\s+){0,20}?--hard|clean\s+(?:\S+\s+){0,20}?-\S*f)"),
    ("overwrites history of a remote", _GIT + r"push\b[^;|&\n]{0,300}\s(?:--force\S*|-f|\+\S+)(?=\s|$)"),
    ("deletes data of a database", r"\b(?i:drop\s+(?:table|database|schema)|truncate\s+table)\b"),
    ("deletes data of a database", r"\b(?i:delete\s+from\s+[\w.\"`]+)(?!(?s:.{0,500})\b(?i:where)\b)"),
    ("starts processes without end", r":\s*\(\s*\)\s*\{\s*:\s*\|\s*:"),
    ("drops scheduled work", _START + r"crontab\s+(?:\S+\s+){0,20}?-r\b"),
)
"""Kinds of danger, each with how it is usually written. The table in docs/tools.md is made to match."""

_COMPILED = [(danger, re.compile(pattern)) for danger, pattern in _DANGERS]
_MOST_CHARS = 20_000


def dangers(command: str) -> list[str]:
    """The kinds of danger in a command line, each once. Only its first 20,000 characters are looked at."""
    text = command[:_MOST_CHARS].replace("\\\n", " ")
    return list(dict.fromkeys(danger for danger, pattern in _COMPILED if pattern.search(text)))


@dataclass(slots=True)
class Approvals:
    """Who is asked on behalf of one agent, and what has been allowed for the session. One question at a time."""

    ask: Ask | None = None
    allowed: set[str] = field(default_factory=set)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refusal(self, command: str, task_id: str) -> str | None:
        """Why the command must not run, or None when it may."""
        if self.ask is None:
            return None
        async with self._asking:
            found = [danger for danger in dangers(command) if danger not in self.allowed]
            if not found:
                return None
            answer = await self.ask(Request(command, found, task_id))
        if answer is Answer.SESSION:
            self.allowed.update(found)
        if answer in (Answer.ONCE, Answer.SESSION):
            return None
        return f"The user did not allow this command ({'; '.join(found)}); nothing was run. Find another way, or ask."
