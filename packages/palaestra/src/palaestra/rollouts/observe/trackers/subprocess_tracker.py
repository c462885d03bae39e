"""Runs the client of a tracking service in a child process: `start_tracker` and `ChildTracker`.

Such clients take seconds to import, capture the terminal, print, block on networks and input, and install exit hooks.
The client therefore runs in a child process, which reads lines from a pipe and ends with the run. Invariant: only
`aclose` waits for the child, for `GRACE_S` at most; lines that do not fit into the pipe are dropped, with one warning.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from palaestra.rollouts.observe.trackers.tracker import RunLabel, Shown
from palaestra_slots.core.io.durable_files import private
from palaestra_slots.core.types import JSON

GRACE_S = 30.0
"""The maximum time that the end of a run waits for a tracker."""

WORKER = "palaestra.rollouts.observe.trackers.worker"

MOST_WAITING = 4_000_000
"""The maximum number of bytes queued for a child that does not read. Further lines are dropped."""

Note = Callable[[str], None]


class ChildTracker:
    """The tracker in the process `child`, which reads JSON lines and writes its output to the file `log`."""

    def __init__(
        self, name: str, child: asyncio.subprocess.Process, log: Path, note: Note, *, grace_s: float = GRACE_S
    ) -> None:
        assert child.stdin is not None
        self.name = name
        self._child = child
        self._pipe = child.stdin
        self._log = log
        self._note = note
        self._grace_s = grace_s
        self._told = False
        self._closed = False

    def log(self, step: int, numbers: Mapping[str, float | str]) -> None:
        """Send metrics to the child."""
        self._send_line({"step": step, "numbers": dict(numbers)})

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        """Send rollouts to the child."""
        self._send_line({"step": step, "table": name, "rows": [list(row) for row in rollouts]})

    def _send_line(self, line: dict[str, JSON]) -> None:
        if self._closed:
            return
        if self._child.returncode is not None or self._pipe.transport.is_closing():
            self._trouble(f"has ended: {_last_line(self._log)}")
        elif self._pipe.transport.get_write_buffer_size() > MOST_WAITING:
            self._trouble("does not keep up, so metrics are left out")
        else:
            self._pipe.write(json.dumps(line).encode() + b"\n")

    async def aclose(self) -> None:
        """Close the child's input, wait for its end, and kill it if that takes too long. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pipe.close()
        try:
            async with asyncio.timeout(self._grace_s):
                if await self._child.wait() != 0:
                    self._trouble(f"has failed: {_last_line(self._log)}")
        except TimeoutError:
            self._trouble(f"had not finished {self._grace_s:g} s after the run and was stopped")
        finally:
            # Also if the wait was cancelled: the child has a session of its own, which Ctrl-C does not reach.
            if self._child.returncode is None:
                self._child.kill()
                await self._child.wait()

    def _trouble(self, what: str) -> None:
        """Report a problem, the first time only."""
        if not self._told:
            self._told = True
            self._note(f"WARNING: {self.name} {what}; the run continues, and metrics.jsonl has all metrics")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"{lines[-1]} ({log})" if lines else f"it printed nothing ({log})"


async def start_tracker(service: str, label: RunLabel, note: Note) -> ChildTracker | None:
    """Start the tracker of a service. Returns None, with a warning, if the service's library is missing or the child
    process cannot be started."""
    found = importlib.util.find_spec(service)
    if found is None or found.origin is None:  # without an origin, it is only a folder that the service created
        from palaestra_slots.core.extras import install_command  # a slow import, for this message only

        note(f"WARNING: {service} was requested but is not installed ({install_command(service)})")
        return None
    log = label.folder / f"{service}.log"
    try:
        child = await _start_worker(service, log)
    except OSError as error:
        note(f"WARNING: {service} cannot be started ({error}); the run continues without it")
        return None
    assert child.stdin is not None
    child.stdin.write(json.dumps(label.to_json()).encode() + b"\n")
    return ChildTracker(service, child, log, note)


async def _start_worker(service: str, log: Path) -> asyncio.subprocess.Process:
    """Start the worker in its own session, so that Ctrl-C in the run's terminal reaches only the run. The client's
    files are readable only by their owner."""
    with open(log, "ab", opener=private) as output:  # noqa: ASYNC230 - a file of a few lines
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # do not import from the working directory
            "-m",
            WORKER,
            service,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=0o077,
        )
