"""The `process` tool: inspect, wait for, write to and end commands that `terminal` started with `background=true`.

Processes that an agent started in a shell (`cmd &`) are not listed. The replies come from `ProcessSession`.
Invariant: an agent reaches only the sessions of its own task.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.reply_size import MAX_OUTPUT_CHARS
from palaestra_slots.core.types import JSON

LOG_LINES = 200

SCHEMA = ToolSchema(
    name="process",
    description=(
        "Manage background processes that terminal started with background=true, by session_id. list: show all "
        "processes. poll: status, exit code and recent output; with since, exactly the output after that "
        "cursor. log: output lines. wait: wait until the process exits or the timeout expires. kill: terminate "
        "the process and its children. write: send data to stdin unchanged. submit: send data followed by "
        "Enter."
    ),
    parameters={
        "action": parameters.choice(
            "The action to perform.", ["list", "poll", "log", "wait", "kill", "write", "submit"]
        ),
        "session_id": parameters.text("The process ID returned by terminal. Required for all actions except list."),
        "data": parameters.text("For write and submit: the text to send."),
        "eof": parameters.flag("For write and submit: close stdin after the data."),
        "timeout": parameters.integer(
            "For wait: maximum seconds to wait. Omit for the default, which is also the maximum.", {"minimum": 0}
        ),
        "since": parameters.integer(
            "For poll: the cursor from an earlier reply, or 0 for the beginning.", {"minimum": 0}
        ),
        "offset": parameters.integer(
            "For log: number of lines to skip. 0 returns the last lines.", {"minimum": 0}, default=0
        ),
        "limit": parameters.integer(
            f"For log: maximum number of lines. The last {MAX_OUTPUT_CHARS} bytes of output are kept.",
            {"minimum": 1},
            default=LOG_LINES,
        ),
    },
    required=("action",),
)


async def run_process(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Perform `action` on the process `session_id`."""
    from palaestra_slots.processes.registry import ProcessRegistry  # imported here, because few agents call this tool

    action, registry, task_id = arguments["action"], run.state(ProcessRegistry), run.process_task
    if action == "list":
        return {"processes": await registry.list_sessions(task_id)}
    session_id = arguments.get("session_id")
    if not session_id:
        raise ToolMistake(f"session_id is needed for {action}; list shows all of them")
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
    # An empty text may be meant, for example to only end the input, so a missing one is a mistake.
    if "data" not in arguments and not end:
        raise ToolMistake("data is needed for write: the text to send")
    return await registry.write_stdin(session_id, data, end=end, task_id=task_id)


PROCESS = FunctionTool(schema=SCHEMA, run=run_process, toolset="terminal")
