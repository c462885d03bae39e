"""Measures what a sandbox uses. A command in the sandbox reads the kernel's numbers of its own processes."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

from palaestra.core.types import JSON, Limits
from palaestra.doors.e2b.sandboxes import HostedSandbox, SandboxState
from palaestra.doors.e2b.wire_errors import ApiError

_SCRIPT = r"""pages=0
for f in /proc/[0-9]*/statm; do read -r _ rss _ < "$f" 2>/dev/null && pages=$((pages + rss)); done
echo "$pages"; cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^.*) //' | {
ticks=0; while read -r _ _ _ _ _ _ _ _ _ _ _ user system _; do ticks=$((ticks + user + system)); done; echo "$ticks"; }
df -kP / | tail -n 1"""


class Metrics:
    """The metrics of all sandboxes. The share of the processors is that since the last question about a sandbox."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    async def of(self, sandbox: HostedSandbox, limits: Limits) -> dict[str, JSON]:
        """Return the metrics of a sandbox; a paused one uses no processor and is not asked. Raises `ApiError`."""
        pages = ticks = used = 0
        if sandbox.state is SandboxState.RUNNING:
            done = await sandbox.running_slot.execute(["/bin/sh", "-c", _SCRIPT], cwd="/", timeout_s=10.0)
            try:
                first, second, third = done.output.strip().splitlines()[-3:]
                pages, ticks, used = int(first), int(second), int(third.split()[2])
            except (ValueError, IndexError):
                raise ApiError(500, "the sandbox's image lacks the programs that its metrics need") from None
        now, spent = time.time(), ticks / os.sysconf("SC_CLK_TCK")
        before, since = self._last.get(sandbox.sandbox_id, (0.0, sandbox.started_at))
        self._last = {sandbox.sandbox_id: (spent, now), **dict(list(self._last.items())[:1000])}
        cpus = limits.cpus or os.cpu_count() or 1
        return {
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"), "timestampUnix": int(now),
            "cpuCount": max(1, round(cpus)),
            "cpuUsedPct": round(max(0.0, spent - before) / max(now - since, 0.001) * 100, 2),
            "memUsed": pages * os.sysconf("SC_PAGE_SIZE"), "memTotal": limits.memory_bytes or 0, "memCache": 0,
            "diskUsed": used << 10, "diskTotal": limits.disk_bytes or 0,
        }  # fmt: skip
