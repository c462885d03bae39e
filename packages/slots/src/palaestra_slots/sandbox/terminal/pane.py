"""Serves the `tmux` calls of Atropos and Hermes in one slot: types into a shell's terminal and reads its screen.

`palaestra_contract.tools.tmux` is the tool for models. This module answers existing clients of a slot server's port,
and works even where no terminal emulator is installed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import ExecutionResult, Slot, TerminalSize
from palaestra_slots.sandbox.slot_tools import tool_result
from palaestra_slots.sandbox.terminal.interactive_terminal import PROMPTED, Terminal

_QUIET_S, _PATIENCE_S, _MOST_PATIENCE_S = 0.1, 10.0, 600.0
_STREAM_BYTES, _KEPT_BYTES = 20_000, 50_000


class Pane:
    """The terminal of one slot. Calls run one after the other."""

    def __init__(self) -> None:
        self._terminal: Terminal | None = None
        self._cursor = 0

    async def run(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        """Perform `args["action"]`. Invalid arguments are reported in the result."""
        actions: dict[str, Callable[[Slot, Mapping[str, JSON]], Awaitable[ExecutionResult]]] = {
            "start": self._start,
            "send_keys": self._send_keys,
            "capture": self._capture,
            "stream": self._stream,
            "stop": self._stop,
        }
        action = actions.get(str(args.get("action")))
        if action is None:
            return tool_result(error=f"Unknown action: {args.get('action')}. Use {', '.join(actions)}")
        try:
            return await action(slot, args)
        except (TypeError, ValueError) as error:
            return tool_result(error=f"{type(error).__name__}: {error}")

    def _started_terminal(self) -> Terminal:
        if self._terminal is None:
            raise ValueError("no terminal is open: use start")
        return self._terminal

    async def _start(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        if self._terminal is not None and not args.get("reset"):
            raise ValueError("a terminal is already open: use it, or start with reset")
        rows = _number_between(args.get("pane_height"), 40, 10, 200)
        columns = _number_between(args.get("pane_width"), 160, 20, 500)
        await self._stop(slot, args)
        self._terminal = await Terminal.open(slot, size=TerminalSize(int(rows), int(columns)), env=PROMPTED)
        # The first prompt shows that the shell reads keys.
        await self._terminal.command_ended(0, _PATIENCE_S)
        return await self._read_screen(_QUIET_S, _PATIENCE_S)

    async def _send_keys(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        terminal, keys = self._started_terminal(), args.get("keys")
        if not isinstance(keys, str | list) or not keys:
            raise ValueError("keys must be a string or a list of strings")
        quiet_s = _number_between(args.get("min_wait_s"), _QUIET_S, 0.0, _MOST_PATIENCE_S)
        patience_s = _number_between(args.get("max_wait_s"), _PATIENCE_S, 0.0, _MOST_PATIENCE_S)
        # Taken before the keys are sent: only a prompt after it can be that of their command.
        before = (await terminal.process.status()).output_total_bytes
        try:
            await terminal.send_keys(*([keys] if isinstance(keys, str) else map(str, keys)))
        except BrokenPipeError:
            raise ValueError("the program in the terminal has ended: start with reset") from None
        if args.get("block"):
            await terminal.command_ended(before, patience_s)
            patience_s = 1.0
        return await self._read_screen(max(quiet_s, _QUIET_S), patience_s)

    async def _capture(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        if not args.get("capture_entire"):
            return await self._read_screen(_QUIET_S, 1.0)
        terminal = self._started_terminal()
        total = (await terminal.process.status()).output_total_bytes
        piece = await terminal.process.read(max(0, total - _KEPT_BYTES), max_bytes=_KEPT_BYTES)
        return tool_result(piece.data.decode(errors="replace"))

    async def _stream(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        most = int(_number_between(args.get("max_bytes"), _STREAM_BYTES, 1, _KEPT_BYTES))
        start = 0 if args.get("reset") else self._cursor
        piece = await self._started_terminal().process.read(start, max_bytes=most)
        self._cursor = piece.end
        return tool_result(piece.data.decode(errors="replace"))

    async def _stop(self, slot: Slot, args: Mapping[str, JSON]) -> ExecutionResult:
        terminal, self._terminal, self._cursor = self._terminal, None, 0
        if terminal is not None:
            await terminal.aclose()
        return tool_result()

    async def _read_screen(self, quiet_s: float, patience_s: float) -> ExecutionResult:
        shot = await self._started_terminal().capture(quiet_s=quiet_s, timeout_s=patience_s)
        facts = {"cursor": list(shot.cursor), "running": shot.running, "emulated": shot.emulated}
        result = tool_result(shot.text)
        return replace(result, metadata={**result.metadata, **facts})


def _number_between(value: JSON, usual: float, least: float, most: float) -> float:
    number = usual if value is None else float(value)
    if not least <= number <= most:
        raise ValueError(f"{number:g} is not between {least:g} and {most:g}")
    return number
