"""`terminal` with `background=true`: a command that goes on while the agent does other things.

What becomes of it is the `process` tool's to tell. Nothing of the command is waited for, so the reply says only that it
was started, never that it works.
"""

from __future__ import annotations

from collections.abc import Mapping

from palaestra.core.errors import InfraError
from palaestra.core.types import JSON
from palaestra.processes.registry import ProcessRegistry
from palaestra.processes.session import Watch
from palaestra.sandbox.slot import WORKSPACE
from palaestra.tools.builtin.text_files import in_full, reason
from palaestra.tools.tool import ToolReply, ToolRun

MIN_CHECK_INTERVAL_S = 30.0

PARAMETERS: Mapping[str, JSON] = {
    "background": {
        "type": "boolean",
        "description": (
            "Start the command and return at once with a session_id for the process tool: for servers, watchers and "
            "long jobs. It runs until it ends, is killed or the task is over; timeout does not apply."
        ),
        "default": False,
    },
    "pty": {
        "type": "boolean",
        "description": "With background: give it a terminal of 30x120, for programs that want one.",
        "default": False,
    },
    "check_interval": {
        "type": "integer",
        "minimum": 1,
        "description": "With background: report new output so often, in seconds, 30 at least.",
    },
    "notify_on_complete": {"type": "boolean", "description": "With background: report its end.", "default": False},
    "watch_patterns": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "maxItems": 16,
        "description": "With background: report output lines that contain one of these texts. For rare signals.",
    },
}
"""The parameters of `terminal` that have to do with this. Reports come with the next reply of the process tool."""

ONLY_WITH_BACKGROUND = ("pty", "check_interval", "notify_on_complete", "watch_patterns")


async def start(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Start `command` as a session of the run's task; `session_id`, or why it was not started."""
    slot = await run.slot()
    workdir = await in_full(slot, arguments.get("workdir") or WORKSPACE)
    interval_s = arguments.get("check_interval")
    watch = Watch(
        patterns=tuple(arguments.get("watch_patterns", ())),
        interval_s=None if interval_s is None else max(float(interval_s), MIN_CHECK_INTERVAL_S),
        on_exit=bool(arguments.get("notify_on_complete")),
    )
    try:
        session = await run.state(ProcessRegistry).spawn(
            slot,
            arguments["command"],
            task_id=run.task_id,
            cwd=workdir,
            use_pty=bool(arguments.get("pty")),
            watch=watch,
        )
    except InfraError:
        raise
    except BlockingIOError as error:
        return _reply(-1, f"Nothing was started: {error.strerror}.")
    except (FileNotFoundError, NotADirectoryError):
        return _reply(1, f"workdir {workdir} is not a directory; nothing was started. Name one that is, such as /")
    except OSError as error:
        return _reply(1, f"Nothing was started in {workdir}: {reason(error)}")
    extra: dict[str, JSON] = {"session_id": session.id, "pid": session.status.pid}
    if interval_s is not None and interval_s < MIN_CHECK_INTERVAL_S:
        extra["check_interval_note"] = f"check_interval was raised to {MIN_CHECK_INTERVAL_S:g}s."
    return {**_reply(0, None, "Background process started"), **extra}


def _reply(exit_code: int, error: str | None, output: str = "") -> dict[str, JSON]:
    return {"output": output, "exit_code": exit_code, "error": error}
