"""Background processes, which this version does not have."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, number, text

PROCESSES = (
    absent(
        "process",
        "terminal",
        "this version has no background processes",
        "Look after commands that run in the background.",
        {
            "action": text("What to do.", "list", "poll", "log", "wait", "kill", "write", "submit"),
            "session_id": text("The process, for everything but list."),
            "data": text("What to write to its input, for write and submit."),
            "timeout": number("How many seconds to wait, for wait.", minimum=1),
            "offset": number("The first line to show, for log."),
            "limit": number("How many lines to show, for log.", minimum=1),
        },
        ("action",),
    ),
)
