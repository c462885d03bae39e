"""The `memory` tool: notes that later sessions see. Where they are kept is `tools/memory/notes.py`.

Rollouts have none unless their environment says so: the agent loop answers the call itself there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.tools.memory.notes import MAX_CHARS, Notes, written
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

SCHEMA = ToolSchema(
    name="memory",
    description=(
        "Keep notes that later sessions see: on the work (`memory`: facts about this place, what was learnt, what "
        "went wrong before) or on the user (`user`: who they are, what they want). Write what will still matter, in "
        "one or two sentences; not what is done in this session. The reply has all notes of the target; there is room "
        f"for {MAX_CHARS['memory']} and {MAX_CHARS['user']} characters."
    ),
    parameters={
        "action": {
            "type": "string",
            "enum": ["add", "replace", "remove", "read"],
            "description": "What to do with the notes.",
        },
        "target": {"type": "string", "enum": list(MAX_CHARS), "description": "Which notes."},
        "content": {"type": "string", "minLength": 1, "description": "The note, for add and replace."},
        "old_text": {
            "type": "string",
            "minLength": 1,
            "description": "A part of the note that replace and remove are about; it must name exactly one.",
        },
    },
    required=("action", "target"),
)

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "add": ("content",), "replace": ("old_text", "content"), "remove": ("old_text",), "read": ()
}  # fmt: skip


async def run_memory(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Do `action`; the reply has the notes afterwards."""
    action, target = arguments["action"], arguments["target"]
    for name in _NEEDED[action]:
        if not str(arguments.get(name, "")).strip():
            raise ToolMistake(f"{name} is needed for {action}; nothing was changed")
    if "§" in str(arguments.get("content", "")):
        raise ToolMistake("A note cannot contain the sign §, which stands between notes; nothing was changed")
    given = (str(arguments[name]).strip() for name in _NEEDED[action])
    values = [text.replace("\r\n", "\n").replace("\r", "\n") for text in given]  # as they are read again
    notes = run.state(Notes)
    return written(target, await asyncio.to_thread(getattr(notes, action), target, *values))


MEMORY = FunctionTool(schema=SCHEMA, run=run_memory, toolset="memory", touches_world=True, world_session="memory")
