"""Asks a person before a dangerous command, for interactive use.

This is not a security boundary; slots are. The patterns match the usual forms of destructive commands. They miss
commands assembled at run time, scripts, an interpreter's own calls, keys sent to `tmux`, and input of background
processes. If you do not trust an agent, give it a slot with nothing to lose.

If there is no `ask` function, as in rollouts, every command runs. Invariant: a denied command is not run, and an
approval covers only this command, or its kinds of danger for the session.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class ApprovalAnswer(StrEnum):
    """The answers of a person."""

    ONCE = "once"
    SESSION = "session"
    ALWAYS = "always"
    """Like `SESSION`, but the `ask` function also keeps the approval for later sessions."""
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A command to approve. `dangers` lists the command's kinds of danger, for a person to read."""

    command: str
    dangers: Sequence[str]
    task_id: str


Ask: TypeAlias = Callable[[ApprovalRequest], Awaitable[ApprovalAnswer]]

_START = r"(?:^|[;&|(`\n]|\$\(|\b(?:sudo|exec|xargs|env|nohup|time|then|do|else)\s)\s{0,20}(?:/[\w./-]{0,100}/)?"
"""The position of a program's name: at the start of a command, or after another program that starts it."""

_GIT = r"\bgit\s+(?:-\S+\s+(?:[^-\s]\S*\s+)?){0,4}?"
"""`git` with options before its command."""

_DANGERS: Sequence[tuple[str, str]] = (
    ("deletes whole directories", _START + r"rm\s+(?:\S+\s+){0,20}?-(?:[a-zA-Z]*[rR]|-recursive\b)"),
    ("deletes what a search finds", r"\bfind\b[^;|&\n]{0,300}\s-(?:delete\b|exec(?:dir)?\s+(?:\S*/)?rm\b)"),
    ("writes to a device or makes a file system", _START + r"(?:mkfs\S*|wipefs|fdisk|parted)\b|\bof=/dev/(?!null\b)"),
    ("writes to a device or makes a file system", r">\s*/dev/(?:sd|nvme|hd|vd|mmcblk|disk)"),
    ("changes permissions or owners recursively", _START + r"(?:chmod|chown|chgrp)\s+(?:\S+\s+){0,20}?-\S*R"),
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
"""Kinds of danger, each with a pattern of its usual form. If you change an entry, also change the table in
docs/tools.md."""

_COMPILED = [(danger, re.compile(pattern)) for danger, pattern in _DANGERS]
_MOST_CHARS = 20_000


def dangers(command: str) -> list[str]:
    """Return the kinds of danger in the first 20,000 characters of a command line, each once."""
    text = command[:_MOST_CHARS].replace("\\\n", " ")
    return list(dict.fromkeys(danger for danger, pattern in _COMPILED if pattern.search(text)))


@dataclass(slots=True)
class Approvals:
    """Asks the user to approve dangerous commands of one agent; `allowed` has the kinds of danger that are
    allowed for the session."""

    ask: Ask | None = None
    allowed: set[str] = field(default_factory=set)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refusal(self, command: str, task_id: str) -> str | None:
        """If the command is dangerous, ask the user. Return the reason why it must not run, or None if it may."""
        if self.ask is None:
            return None
        async with self._asking:
            found = [danger for danger in dangers(command) if danger not in self.allowed]
            if not found:
                return None
            answer = await self.ask(ApprovalRequest(command, found, task_id))
        if answer in (ApprovalAnswer.SESSION, ApprovalAnswer.ALWAYS):
            self.allowed.update(found)
        if answer is not ApprovalAnswer.DENY:
            return None
        return f"The user did not allow this command ({'; '.join(found)}); nothing was run. Find another way, or ask."
