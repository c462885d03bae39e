"""Permission modes: what an agent may do without a question.

plan   only tools that read: nothing changes, neither in the sandbox nor outside
ask    a person is asked before each call that changes something
auto   the sandbox may be changed; a person is asked before dangerous commands and before calls that act outside

A rule ("always") covers a tool, the commands of a program, or the tools of an MCP server. Rules are kept in the user's
state folder, for one folder each: nothing in a project's folder can add one.
"""

from __future__ import annotations

import re
from enum import StrEnum

from palaestra.tools.human.approval import Approvals, Permit, dangers
from palaestra.tools.runtime.runtime import CheckedCall, Next
from palaestra.tools.tool import Tool, ToolOutcome
from palaestra_chat.history import ChatHistory


class Mode(StrEnum):
    """The modes, from the strictest to the freest."""

    PLAN = "plan"
    ASK = "ask"
    AUTO = "auto"


ABOUT = {
    Mode.PLAN: "only tools that read",
    Mode.ASK: "asks before each call that changes something",
    Mode.AUTO: "asks before dangerous commands and calls that act outside the sandbox",
}

PLAN_NOTE = (
    "Plan mode is on: only tools that read are allowed. Look at what there is, then answer with a plan. The user "
    "switches the mode before you carry it out."
)
PLAN_ENDED = "Plan mode is off: you may change things again."
REFUSED_IN_PLAN = (
    "Plan mode is on. This tool may change something, so it was not run. Use tools that read, or answer with a plan."
)
CHANGES = "may change files in the sandbox"

READING = frozenset({
    "read_file", "search_files", "todo", "clarify", "session_search", "skills_list", "skill_view", "web_search",
    "web_extract", "vision_analyze", "delegate_task",
})  # fmt: skip
"""The built-in tools that change nothing. The calls of a sub-agent are checked one by one."""

_SIMPLE = re.compile(r"[\w./-]+(?:[ \t][^;&|<>$`(){}\n\\]*)?")
"""A command line that runs one program: it has no operator, substitution or second line."""


class Permissions:
    """The mode of one conversation, and the rules in `approvals`. The mode is `first` unless the conversation has
    another one in its `history`."""

    def __init__(self, approvals: Approvals, history: ChatHistory, first: Mode = Mode.AUTO) -> None:
        self.approvals = approvals
        self.mode = Mode(str(history.record.settings.get("mode") or first))
        self._history = history
        if self.mode is Mode.PLAN:
            history.note(PLAN_NOTE)

    def switch(self, mode: Mode) -> None:
        """Switch the mode, from the next tool call on. The model gets a note about plan mode with the next message."""
        before, self.mode = self.mode, mode
        self._history.change_settings(mode=mode.value)
        if Mode.PLAN in (before, mode) and before is not mode:
            self._history.note(PLAN_NOTE if mode is Mode.PLAN else PLAN_ENDED)

    async def call(self, call: CheckedCall, then: Next, task_id: str) -> ToolOutcome:
        """Answer a tool call with `then` if the mode or the person allows it."""
        refusal = await self._refusal(call, task_id)
        return await then(call) if refusal is None else ToolOutcome.refused(refusal, status="blocked")

    async def _refusal(self, call: CheckedCall, task_id: str) -> str | None:
        if self.mode is Mode.AUTO or _reads(call.tool):
            return None
        if self.mode is Mode.PLAN:
            return REFUSED_IN_PLAN
        if call.tool.asks is not None or self._asks_anyway(call):
            return None
        permit = Permit(f"the tool {call.name!r}", rule_of(call), why=CHANGES)
        return await self.approvals.refusal_of_call(permit, call.arguments, task_id)

    def _asks_anyway(self, call: CheckedCall) -> bool:
        """Return whether the tool itself asks about the command, because it is dangerous."""
        return any(danger not in self.approvals.allowed for danger in dangers(_command(call)))


def rule_of(call: CheckedCall) -> str:
    """Return the rule that would allow this call: its program if it is a simple command, otherwise its tool."""
    command = _command(call)
    if _SIMPLE.fullmatch(command.strip()):
        return f"command {command.split()[0]}"
    return f"tool {call.name}"


def _command(call: CheckedCall) -> str:
    command = call.arguments.get("command")
    return command if isinstance(command, str) else ""


def _reads(tool: Tool) -> bool:
    """Return whether a tool only reads. Of the tools of an MCP server, these are those that need no question."""
    return tool.name in READING or (tool.name.startswith("mcp_") and tool.touches_world and tool.asks is None)
