"""The `session_search` tool: search earlier conversations (`tools/memory/past_conversations.py`).

It shows what was said and does not have a model sum it up: the same question gets the same answer, at no cost. Rollouts
have none unless their environment says so: the agent loop answers the call itself there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

from palaestra.core.types import JSON
from palaestra.tools.memory.past_conversations import Found, Sessions
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

SCHEMA = ToolSchema(
    name="session_search",
    description=(
        "Search earlier conversations for words that were said, best fit first, with the places where they stand. Use "
        "it when the user speaks of something from before, or when you may have done the like already."
    ),
    parameters={
        "query": {"type": "string", "description": "What to look for: words that were said."},
        "role_filter": {
            "type": "string",
            "description": "Only messages of these roles, separated by commas: user, assistant, tool.",
        },
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": 20,
            "default": 3,
            "description": "How many conversations, at most.",
        },
    },
    required=("query",),
)


async def run_session_search(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Search; the reply has the `results` and their `count`."""
    sessions = run.state(Sessions)
    if sessions.folder is None:
        raise ToolMistake("No earlier conversations are kept here: nobody has said where")
    if not arguments["query"].strip():
        raise ToolMistake("query is empty; give words that were said")
    roles = {role.strip() for role in arguments.get("role_filter", "").split(",") if role.strip()}
    found = await asyncio.to_thread(sessions.search, arguments["query"], roles, arguments.get("limit", 3))
    return {"query": arguments["query"], "results": [_shown(each) for each in found], "count": len(found)}


def _shown(found: Found) -> dict[str, JSON]:
    started = datetime.fromtimestamp(found.started_at, UTC).isoformat(timespec="seconds")
    shown: dict[str, JSON] = {"session_id": found.session_id, "started_at": started}
    return shown | ({"title": found.title} if found.title else {}) | {"excerpts": found.excerpts}


SESSION_SEARCH = FunctionTool(schema=SCHEMA, run=run_session_search, toolset="session_search", touches_world=True)
