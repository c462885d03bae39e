"""The commands that people write in a chat, such as `/stop`. Other messages that begin with a slash go to the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMANDS = {  # each entry: arguments, two spaces, description
    "help": "show this list",
    "stop": "[processes]  stop the running turn of this chat, or end its background processes",
    "new": "begin a new session (also /reset)",
    "retry": "answer the last message again",
    "undo": "forget the last message and its answer",
    "compact": "replace this session's history with a summary (also automatic, before the context window is full)",
    "model": "[NAME]  list the models, or use one of them from the next message on",
    "toolsets": "[+NAME -NAME …]  list the agent's toolsets, or turn some on and off",
    "status": "show the running turn, waiting messages, background processes and jobs of this chat",
    "approve": "CODE [session, always]  allow the command that the question with that code shows, or all of its kind",
    "deny": "reject the command that waits for approval",
    "answer": "CODE TEXT  answer the question with that code, if an earlier question was not answered in time",
}
ALIASES = {"reset": "new", "start": "help"}
AT_ONCE = frozenset({"help", "stop", "status", "approve", "deny", "answer"})
"""Commands that run immediately, without waiting for the running turn."""
WITH_WORDS = frozenset({"help", "stop", "approve", "deny", "answer", "model", "toolsets"})
"""Commands that accept arguments. `help` is among them because some programs add arguments to the `/start` that they
send automatically."""

_COMMAND = re.compile(r"/([a-z]+)(?:@\w+)?(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    name: str
    argument: str = ""

    @property
    def at_once(self) -> bool:
        return self.name in AT_ONCE


def parse(text: str) -> ChatCommand | None:
    """Return the command in a message, or None for a message to the model."""
    found = _COMMAND.fullmatch(text.strip()) if len(text) < 1000 else None
    if found is None:
        return None
    name = ALIASES.get(found[1], found[1])
    return ChatCommand(name, (found[2] or "").strip()) if name in COMMANDS else None


def misused(command: ChatCommand) -> str:
    """Return the reply that rejects a command with wrong arguments, or an empty string if the command is valid."""
    if command.argument and command.name not in WITH_WORDS:
        return f"/{command.name} takes no argument; nothing was done."
    if command.name == "stop" and command.argument not in ("", "processes"):
        return "Nothing was stopped. Use /stop or /stop processes."
    return ""


def help_text() -> str:
    lines = []
    for name, what in COMMANDS.items():
        words, _, effect = what.rpartition("  ")
        lines.append(f"/{name} {words}: {effect}" if words else f"/{name}: {effect}")
    return "\n".join(lines)
