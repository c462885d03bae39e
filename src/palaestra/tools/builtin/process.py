"""The `process` tool: looking at, waiting for, talking to and ending what `terminal` started with `background=true`.

Not for processes that an agent started in a shell (`cmd &`): those it looks at with commands.

Invariant: an agent reaches the sessions of its own task and no others. Replies are those of `ProcessSession`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from palaestra.core.types import JSON
from palaestra.processes.registry import ProcessRegistry
from palaestra.processes.session import MAX_OUTPUT_CHARS
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

LOG_LINES = 200

SCHEMA = ToolSchema(
    name="process",
    description=(
        "Work with background processes that terminal started with background=true, by their session_id. "
        "list: all of them. poll: status, exit code and the end of the output; with since, exactly what was written "
        "after that cursor. log: lines of the output. wait: until it has ended or the timeout is over. kill: end it "
        "and everything it has started. write: data to its input as it is. submit: data and Enter."
    ),
    parameters={
        "action": {
            "type": "string",
            "enum": ["list", "poll", "log", "wait", "kill", "write", "submit"],
            "description": "What to do.",
        },
        "session_id": {"type": "string", "description": "Which process; needed for everything but list."},
        "data": {"type": "string", "description": "For write and submit: the text to send."},
        "eof": {
            "type": "boolean",
            "description": "For write and submit: end its input after the data.",
            "default": False,
        },
        "timeout": {
            "type": "integer",
            "minimum": 0,
            "description": "For wait: how many seconds at most. Left out: the usual limit, which is also the longest.",
        },
        "since": {
            "type": "integer",
            "minimum": 0,
            "description": "For poll: the cursor of an earlier reply, or 0 for the beginning.",
        },
        "offset": {
            "type": "integer",
            "minimum": 0,
            "description": "For log: how many lines to skip. 0 means the last lines.",
            "default": 0,
        },
        "limit": {
            "type": "integer",
            "minimum": 1,
            "description": f"For log: how many lines. The last {MAX_OUTPUT_CHARS} bytes of the output are kept.",
            "default": LOG_LINES,
        },
    },
    required=("action",),
)

_Action = Callable[[str, Mapping[str, JSON], ToolRun], Awaitable[ToolReply]]


async def run_process(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Do `action` with `session_id`."""
    action = arguments["action"]
    if action == "list":
        return {"processes": await run.state(ProcessRegistry).list_sessions(run.task_id)}
    session_id = arguments.get("session_id")
    if not session_id:
        raise ToolMistake(f"session_id is needed for {action}; list shows those there are")
    return await _ACTIONS[action](session_id, arguments, run)


async def _poll(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    return await run.state(ProcessRegistry).poll(session_id, arguments.get("since"), task_id=run.task_id)


async def _log(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    offset, limit = arguments.get("offset", 0), arguments.get("limit", LOG_LINES)
    return await run.state(ProcessRegistry).read_log(session_id, offset, limit, task_id=run.task_id)


async def _wait(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    timeout_s = arguments.get("timeout")
    return await run.state(ProcessRegistry).wait(session_id, timeout_s, limit_s=run.timeout_s, task_id=run.task_id)


async def _kill(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    return await run.state(ProcessRegistry).kill_process(session_id, task_id=run.task_id)


async def _write(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    data, end = _data(arguments), bool(arguments.get("eof"))
    return await run.state(ProcessRegistry).write_stdin(session_id, data, end=end, task_id=run.task_id)


async def _submit(session_id: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    data, end = arguments.get("data", ""), bool(arguments.get("eof"))
    return await run.state(ProcessRegistry).submit_stdin(session_id, data, end=end, task_id=run.task_id)


def _data(arguments: Mapping[str, JSON]) -> str:
    if "data" not in arguments and not arguments.get("eof"):
        raise ToolMistake("data is needed for write: the text to send")
    return str(arguments.get("data", ""))


_ACTIONS: Mapping[str, _Action] = {
    "poll": _poll, "log": _log, "wait": _wait, "kill": _kill, "write": _write, "submit": _submit
}  # fmt: skip

PROCESS = FunctionTool(schema=SCHEMA, run=run_process, toolset="terminal")
