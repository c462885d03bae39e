"""A background process of a local slot: a handle that any number of readers may share."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.sandbox.local.lease import Lease, program, require
from palaestra.sandbox.local.requests import CommandNotStarted, Reply
from palaestra.sandbox.slot import Output, ProcessStatus, TerminalSize

_PIECE_BYTES = 128 << 10
_LONGEST_WAIT_S = 30.0
"""Of one request; who waits longer asks again."""


class LocalProcess:
    """Implements `Process`. Made by `LocalSlot.spawn`."""

    def __init__(self, lease: Lease, fields: Mapping[str, JSON]) -> None:
        self._lease = lease
        self._id, self._pid = int(fields["process"]), int(fields["pid"])

    @classmethod
    async def start(
        cls,
        lease: Lease,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str] | None,
        stdin: bool,
        terminal: TerminalSize | None,
    ) -> LocalProcess:
        """Start a process; see `Slot.spawn`."""
        size = None if terminal is None else [terminal.rows, terminal.columns]
        extra = {} if terminal is None else {"TERM": "xterm-256color"}
        fields = {**lease.fields(), **program(command), "cwd": cwd, "stdin": stdin, "terminal": size}
        try:
            reply = await lease.server.call("spawn", {**fields, "env": {**extra, **(env or {})}})
        except CommandNotStarted as error:
            name = command if isinstance(command, str) else command[0]
            raise OSError(error.errno, str(error), name[:200]) from None
        return cls(lease, reply.fields)

    @property
    def process_id(self) -> int:
        return self._id

    @property
    def pid(self) -> int:
        return self._pid

    def __repr__(self) -> str:
        return f"<LocalProcess {self._id} (pid {self._pid}) of {self._lease.slot_id}>"

    async def status(self) -> ProcessStatus:
        """How it is now."""
        return _status((await self._ask("wait", wait_s=0)).fields)

    async def read(self, cursor: int = 0, *, max_bytes: int = 1 << 16, wait_s: float = 0.0) -> Output:
        """Output from a cursor on; see `Process.read`."""
        require(max_bytes > 0, "max_bytes must be positive")
        return (await self._read(cursor, max_bytes, wait_s))[0]

    async def output(self, cursor: int = 0) -> AsyncIterator[Output]:
        """Follow the output until the process has ended."""
        while True:
            piece, running = await self._read(cursor, _PIECE_BYTES, _LONGEST_WAIT_S)
            if piece.data:
                yield piece
            elif not running:
                return
            cursor = piece.end

    async def write(self, data: bytes) -> None:
        """Write to its input; see `Process.write`. Cancelled, it may have written a part."""
        for start in range(0, len(data), _PIECE_BYTES):
            await self._ask("input", data[start : start + _PIECE_BYTES], close=False)

    async def close_input(self) -> None:
        """End its input. Nothing to close any more is fine."""
        try:
            await self._ask("input", close=True)
        except BrokenPipeError:
            return

    async def signal(self, number: int) -> None:
        """Send a signal to its process group; to one that has ended, nothing."""
        await self._ask("signal", signal=int(signal.Signals(number)))

    async def resize(self, size: TerminalSize) -> None:
        """Another window size."""
        await self._ask("resize", rows=size.rows, columns=size.columns)

    async def wait(self, timeout_s: float | None = None) -> ProcessStatus:
        """Its end, or how it is after `timeout_s`."""
        left = float("inf") if timeout_s is None else timeout_s
        while True:
            step = min(left, _LONGEST_WAIT_S)
            status = _status((await self._ask("wait", wait_s=step)).fields)
            left -= step
            if not status.running or left <= 0:
                return status

    async def kill(self, grace_s: float = 0.0) -> ProcessStatus:
        """End it and all it has started; see `Process.kill`."""
        return _status((await self._ask("kill", grace_s=grace_s)).fields)

    async def forget(self) -> None:
        """Kill it, if it runs, and drop its output."""
        await self._ask("dismiss")

    async def _read(self, cursor: int, max_bytes: int, wait_s: float) -> tuple[Output, bool]:
        reply = await self._ask("output", cursor=cursor, max_bytes=max_bytes, wait_s=wait_s)
        start = int(reply.fields["start"])
        lost = max(0, start - cursor) if cursor >= 0 else 0
        return Output(reply.data, start, lost), bool(reply.fields["running"])

    async def _ask(self, op: str, data: bytes = b"", **fields: JSON) -> Reply:
        return await self._lease.server.call(op, {**self._lease.fields(), "process": self._id, **fields}, data)


def _status(fields: Mapping[str, JSON]) -> ProcessStatus:
    return ProcessStatus(
        process_id=fields["process"],
        pid=fields["pid"],
        running=fields["running"],
        exit_code=fields["exit_code"],
        started_s=fields["started_s"],
        duration_s=fields["duration_s"],
        output_total_bytes=fields["output_total_bytes"],
        terminal=fields["terminal"],
        cpu_s=fields["cpu_s"],
        max_rss_bytes=fields["max_rss_bytes"],
        full_output_path=fields.get("full_output_path"),
        full_output_bytes=fields.get("full_output_bytes", 0),
    )
