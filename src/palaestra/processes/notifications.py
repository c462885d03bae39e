"""What sessions have to tell code that cannot await a queue: `Told`, in the contract's shape.

Not the only way to hear of a session: its notices come with the next reply of the `process` tool all the same.
Invariant: it is bounded, and never waits for whoever reads it; where nobody does, the oldest gives way.
"""

from __future__ import annotations

import contextlib
import queue

from palaestra.processes.actions import Reply
from palaestra.processes.session import EventKind, ProcessEvent, ProcessSession

MAX_TOLD = 256

_TYPES = {EventKind.EXITED: "completion", EventKind.MATCH: "watch_match"}


class Told:
    """For any thread. `completion_queue` has an object for each event of a watched session, `pending_watchers` one for
    each session whose output is to be reported so often: whoever reports it takes it out.

    An event has `type` (completion, watch_match, progress, lost), `session_id`, `task_id`, `session_key`, `command`,
    `output` and `exit_code`; a watcher `session_id`, `check_interval` (seconds), `session_key`, `notify_on_complete`.
    Both have what the session's watch says of its address, such as `platform` and `chat_id`.
    """

    def __init__(self) -> None:
        self.completion_queue: queue.Queue[Reply] = queue.Queue(MAX_TOLD)
        self.pending_watchers: list[Reply] = []

    def event(self, session: ProcessSession, event: ProcessEvent) -> None:
        """One thing that a watched session told."""
        item: Reply = {"type": _TYPES.get(event.kind, str(event.kind)), "session_id": session.id}
        item |= {"task_id": session.task_id, "session_key": session.session_key, "command": session.command}
        item |= {"output": event.text, "exit_code": event.exit_code, **event.address}
        while True:
            try:
                return self.completion_queue.put_nowait(item)
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # somebody has made room meanwhile
                    self.completion_queue.get_nowait()

    def watched(self, session: ProcessSession) -> None:
        """A session that runs, new or found again: to be watched where its watch has an interval."""
        watch = session.watch
        if watch.interval_s is None:
            return
        item: Reply = {"session_id": session.id, "check_interval": watch.interval_s}
        item |= {"session_key": session.session_key, "notify_on_complete": watch.on_exit, **watch.address}
        self.pending_watchers.append(item)
        del self.pending_watchers[:-MAX_TOLD]
