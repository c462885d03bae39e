"""Asks a person before a dangerous command, and before a call of a tool that acts outside the sandbox, for interactive
use.

For commands, this is not a security boundary; slots are. The patterns match the usual forms of destructive commands.
They miss commands assembled at run time, scripts, an interpreter's own calls, keys sent to `tmux`, and input of
background processes. If you do not trust an agent, give it a slot with nothing to lose.

A tool asks if it has a `Permit` (`Tool.asks`). `run_tool` enforces it, so that programs and sub-agents ask as well.

If there is no `ask` function, as in rollouts, every command and call runs. Invariant: a denied command or call is not
run. An approval covers only this command or call, or for the session its kinds of danger or this tool.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from palaestra_slots.core.types import JSON


class ApprovalAnswer(StrEnum):
    """The answers of a person."""

    ONCE = "once"
    SESSION = "session"
    ALWAYS = "always"
    """Like `SESSION`, but the `ask` function also keeps the approval for later sessions."""
    SERVER = "server"
    """Like `ALWAYS`, but for all tools of the tool's server."""
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Permit:
    """What a person is asked before each call of a tool. `what` names the tool and its server. `key` identifies the
    tool in approvals that last, and `server` its server, if it has one. `why` is the reason for the question."""

    what: str
    key: str
    server: str = ""
    why: str = "may change things outside the sandbox"


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A command or a call to approve. `dangers` lists its kinds of danger, for a person to read.

    For a call, `tool` names the tool and its server, `arguments` are the call's arguments, and `command` is their full
    text. All texts may contain control characters. `key` identifies the tool of a call, and `server` its server.
    """

    command: str
    dangers: Sequence[str]
    task_id: str
    tool: str = ""
    arguments: Mapping[str, JSON] | None = None
    key: str = ""
    server: str = ""

    def covers(self, answer: ApprovalAnswer) -> Sequence[str]:
        """What an answer for the session, or for always, allows: the kinds of danger of a command, or the tool of a
        call, or all tools of its server."""
        if answer is ApprovalAnswer.SERVER and self.server:
            return [self.server]
        return [self.key] if self.key else self.dangers

    def asked(self, question: str, text: str) -> str:
        """Return a question with the text to approve. After a long text, the question is repeated: a text of many pages
        must not push it out of sight."""
        again = f"\n{question}" if len(text) > _LONG_TEXT or text.count("\n") > _LONG_LINES else ""
        return f"{question}:\n{text}{again}"

    @property
    def question(self) -> str:
        """What the person decides on, without the text of the command or the arguments."""
        if self.tool:
            return f"The agent calls {self.tool}, which {', '.join(self.dangers)}"
        return f"This command {', '.join(self.dangers)}"


Ask: TypeAlias = Callable[[ApprovalRequest], Awaitable[ApprovalAnswer]]

# Repetitions have bounds here, because the model chooses the text and the search blocks the event loop.
_PREFIX = (
    r"(?:(?:[A-Za-z_]\w{0,50}=(?:\"[^\"]{0,200}\"|'[^']{0,200}'|\S{0,200})"
    r"|(?:sudo|doas|exec|xargs|env|nohup|time|timeout|nice|ionice|command|builtin|setsid|stdbuf|busybox)"
    r"(?:\s{1,20}(?:-\S{0,100}(?:\s{1,20}[\w{}:.]{1,50})??|\d[\w.]{0,20}|\{\}|--)){0,4})\s{1,20}){0,4}"
    r"\\?(?:/[\w./-]{0,100}/)?"
)
"""What may stand before a program's name: variables, programs that start it with their options, and its folder."""

_START = r"(?:^|[;&|()`\n]|\$\(|[{!]\s|\b(?:if|then|elif|else|while|until|do)\s)\s{0,20}" + _PREFIX
"""The position of a program's name: at the start of a command."""

_GIT = r"\bgit\s+(?:-\S+\s+(?:[^-\s]\S*\s+)?){0,4}?"
"""`git` with options before its command."""

_DANGERS: Sequence[tuple[str, str]] = (
    ("deletes whole directories", _START + r"rm\s+(?:\S+\s+){0,20}?-(?:[a-zA-Z]*[rR]|-recursive\b)"),
    ("deletes what a search finds", r"\bfind\b[^;|&\n]{0,300}\s-(?:delete\b|exec(?:dir)?\s+(?:\S*/)?rm\b)"),
    ("writes to a device or makes a file system", _START + r"(?:mkfs\S*|wipefs|fdisk|parted)\b|\bof=/dev/(?!null\b)"),
    ("writes to a device or makes a file system", r">\s*/dev/(?:sd|nvme|hd|vd|mmcblk|disk)"),
    (
        "changes permissions or owners recursively",
        _START + r"(?:chmod|chown|chgrp)\s+(?:\S+\s+){0,20}?-(?:\S*R|-recursive\b)",
    ),
    ("acts as root", _START + r"(?:sudo|doas|su)\b"),
    ("stops the machine or its services", _START + r"(?:shutdown|reboot|halt|poweroff|init\s+[06])\b"),
    ("stops the machine or its services", _START + r"systemctl\s+(?:\S+\s+){0,20}?(?:stop|disable|mask|kill)\b"),
    ("ends processes of others", _START + r"(?:kill\s+(?:(?:-\S+|[A-Z]+\d*)\s+){0,10}-1\b|pkill\b|killall\b)"),
    ("runs what it downloads", r"\b(?:curl|wget)\b[^;&\n|]{0,500}\|&?\s*" + _PREFIX + r"(?:ba|z|da|k)?sh\b"),
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
docs/tools/approvals.md."""

_MOST_CHARS = 20_000


@functools.cache
def _patterns() -> Sequence[tuple[str, re.Pattern[str]]]:
    # Compiled on first use, because only interactive agents ask.
    return [(danger, re.compile(pattern)) for danger, pattern in _DANGERS]


def dangers(command: str) -> list[str]:
    """Return the kinds of danger in the first 20,000 characters of a command line, each once."""
    # A shell joins lines that end with a backslash, so a command may be split anywhere.
    text = command[:_MOST_CHARS].replace("\\\n", " ")
    return list(dict.fromkeys(danger for danger, pattern in _patterns() if pattern.search(text)))


_LONG_ARGUMENT = 200
_LONG_TEXT, _LONG_LINES = 1000, 10


def arguments_text(arguments: Mapping[str, JSON]) -> str:
    """Return the arguments of a call as JSON, for a person to read. Long arguments come last, so that they do not push
    a path out of sight."""
    ordered = sorted(arguments.items(), key=lambda each: len(json.dumps(each[1])) > _LONG_ARGUMENT)
    return json.dumps(dict(ordered), ensure_ascii=False, indent=1)


@dataclass(slots=True)
class Approvals:
    """Asks the user to approve dangerous commands, and calls that act outside the sandbox, of one agent; `allowed` has
    the kinds of danger and the keys of the tools that are allowed for the session."""

    ask: Ask | None = None
    allowed: set[str] = field(default_factory=set)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refusal(self, command: str, task_id: str) -> str | None:
        """If the command is dangerous, ask the user. Return the reason why it must not run, or None if it may."""

        def request() -> ApprovalRequest | None:
            found = [danger for danger in dangers(command) if danger not in self.allowed]
            return ApprovalRequest(command, found, task_id) if found else None

        denied = await self._denied(request)
        if denied is None:
            return None
        found = "; ".join(denied.dangers)
        return f"The user did not allow this command ({found}); nothing was run. Find another way, or ask."

    async def refusal_of_call(self, permit: Permit, arguments: Mapping[str, JSON], task_id: str) -> str | None:
        """Ask the user about a call. Return the reason why it must not run, or None if it may."""

        def request() -> ApprovalRequest | None:
            if permit.key in self.allowed or permit.server in self.allowed:
                return None
            text = arguments_text(arguments)
            return ApprovalRequest(text, [permit.why], task_id, permit.what, arguments, permit.key, permit.server)

        denied = await self._denied(request)
        return (
            None if denied is None else "The user did not allow this call; nothing was run. Find another way, or ask."
        )

    async def _denied(self, request: Callable[[], ApprovalRequest | None]) -> ApprovalRequest | None:
        """Ask what `request` returns, if anything, once earlier questions are answered. Return the request if the user
        denies it."""
        if self.ask is None:
            return None
        async with self._asking:
            asked = request()  # here: an earlier answer may cover this request
            if asked is None:
                return None
            answer = await self.ask(asked)
            if answer in (ApprovalAnswer.SESSION, ApprovalAnswer.ALWAYS, ApprovalAnswer.SERVER):
                self.allowed.update(asked.covers(answer))
        return asked if answer is ApprovalAnswer.DENY else None
