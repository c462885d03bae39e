"""The `process` tool: inspect, wait for, write to and end what `terminal` started with `background=true`.

Processes that an agent started in a shell (`cmd &`) are not listed. Invariant: an agent reaches the sessions of its own
task and no others. Replies are those of `ProcessSession`.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.types import JSON
from palaestra.processes.registry import ProcessRegistry
from palaestra.processes.session import MAX_OUTPUT_CHARS
from palaestra.tools import parameters
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
        "action": parameters.choice("What to do.", ["list", "poll", "log", "wait", "kill", "write", "submit"]),
        "session_id": parameters.text("Which process; needed for everything but list."),
        "data": parameters.text("For write and submit: the text to send."),
        "eof": parameters.flag("For write and submit: end its input after the data."),
        "timeout": parameters.integer(
            "For wait: how many seconds at most. Left out: the usual limit, which is also the longest.", {"minimum": 0}
        ),
        "since": parameters.integer(
            "For poll: the cursor of an earlier reply, or 0 for the beginning.", {"minimum": 0}
        ),
        "offset": parameters.integer(
            "For log: how many lines to skip. 0 means the last lines.", {"minimum": 0}, default=0
        ),
        "limit": parameters.integer(
            f"For log: how many lines. The last {MAX_OUTPUT_CHARS} bytes of the output are kept.",
            {"minimum": 1},
            default=LOG_LINES,
        ),
    },
    required=("action",),
)


async def run_process(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Do `action` with `session_id`."""
    action, registry, task_id = arguments["action"], run.state(ProcessRegistry), run.task_id
    if action == "list":
        return {"processes": await registry.list_sessions(task_id)}
    session_id = arguments.get("session_id")
    if not session_id:
        raise ToolMistake(f"session_id is needed for {action}; list shows those there are")
    data, end = str(arguments.get("data", "")), bool(arguments.get("eof"))
    match action:
        case "poll":
            return await registry.poll(session_id, arguments.get("since"), task_id=task_id)
        case "log":
            offset, limit = arguments.get("offset", 0), arguments.get("limit", LOG_LINES)
            return await registry.read_log(session_id, offset, limit, task_id=task_id)
        case "wait":
            return await registry.wait(session_id, arguments.get("timeout"), limit_s=run.timeout_s, task_id=task_id)
        case "kill":
            return await registry.kill_process(session_id, task_id=task_id)
        case "submit":
            return await registry.submit_stdin(session_id, data, end=end, task_id=task_id)
    if "data" not in arguments and not end:
        raise ToolMistake("data is needed for write: the text to send")
    return await registry.write_stdin(session_id, data, end=end, task_id=task_id)


PROCESS = FunctionTool(schema=SCHEMA, run=run_process, toolset="terminal")
