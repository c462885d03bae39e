"""The `tmux` tool: the rollout's one terminal, for programs that draw on a screen and wait for keys.

No tmux runs: the slot provides the terminal, and the screen is emulated here.

Invariant: there is one such terminal per rollout. The replies to `start`, `send_keys` and `capture` show the screen
after a moment without output, or at the time limit. With `block`, the reply has `still_running` if the command has not
ended by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from palaestra.tools import parameters
from palaestra.tools.files.text_files import as_mistake
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.reply_size import MAX_OUTPUT_CHARS
from palaestra_slots.core.types import JSON
from palaestra_slots.processes import process_output
from palaestra_slots.sandbox.slot import TerminalSize
from palaestra_slots.sandbox.terminal.interactive_terminal import PROMPTED, ScreenShot, Terminal

ROWS, COLUMNS = 40, 160
DEFAULT_MAX_WAIT_S, MIN_QUIET_S = 10.0, 0.1
MIN_TYPING_S = 1.0
"""The minimum time, in seconds, that a program gets to read typed keys."""
DEFAULT_STREAM_BYTES = 20_000

SCHEMA = ToolSchema(
    name="tmux",
    description=(
        "Control an interactive terminal that runs a bash shell. Use it for editors, debuggers, installers and "
        "other programs that draw on the screen or read keys. start: open the terminal. send_keys: type keys "
        "and return the screen. capture: return the screen. stream: return the output since the last stream. "
        "stop: close the terminal and end its processes."
    ),
    parameters={
        "action": parameters.choice("The action to perform.", ["start", "send_keys", "capture", "stream", "stop"]),
        "keys": {
            "type": ["string", "array"],
            "items": {"type": "string"},
            "description": (
                "For send_keys: text, or a list of text and tmux key names (Enter, C-c, Up, Escape, F5). To "
                'run a command, send ["make", "Enter"].'
            ),
        },
        "block": parameters.flag(
            "For send_keys: wait until the command finishes and the shell prompt returns, at most max_wait_s."
        ),
        "min_wait_s": {
            "type": "number",
            "minimum": 0,
            "description": "For send_keys: return the screen after this many seconds without output. Default 0.1.",
        },
        "max_wait_s": {
            "type": "number",
            "minimum": 0,
            "description": (
                f"For send_keys: return the screen after this many seconds at most. Default {DEFAULT_MAX_WAIT_S:g}."
            ),
        },
        "pane_width": parameters.integer("For start: width in columns.", {"minimum": 20, "maximum": 500}),
        "pane_height": parameters.integer("For start: height in rows.", {"minimum": 10, "maximum": 200}),
        "capture_entire": parameters.flag("For capture: return the scrollback as plain lines instead of the screen."),
        "reset": parameters.flag(
            "For start: close the open terminal and open a new one. For stream: start from the beginning."
        ),
        "max_bytes": parameters.integer(
            f"For stream: maximum bytes to return. Default {DEFAULT_STREAM_BYTES}.",
            {"minimum": 1, "maximum": MAX_OUTPUT_CHARS},
        ),
    },
    required=("action",),
)


class RolloutPane:
    """A rollout's one terminal. Calls run one after the other."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.terminal: Terminal | None = None
        self.cursor = 0

    def open(self) -> Terminal:
        """Return the terminal. Raises `ToolMistake` if none is open."""
        if self.terminal is None:
            raise ToolMistake("No terminal is open; open one with start")
        return self.terminal


_Action = Callable[[RolloutPane, Mapping[str, JSON], ToolRun], Awaitable[ToolReply]]


async def run_tmux(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Perform `action` on the rollout's terminal."""
    pane = run.state(RolloutPane)
    async with pane.turn:
        return await _ACTIONS[arguments["action"]](pane, arguments, run)


async def _start(pane: RolloutPane, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    if pane.terminal is not None and not arguments.get("reset"):
        raise ToolMistake("A terminal is already open; use it, or start with reset")
    slot = await run.slot()
    await _stop(pane, arguments, run)
    size = TerminalSize(arguments.get("pane_height", ROWS), arguments.get("pane_width", COLUMNS))
    with as_mistake("No terminal can be opened"):
        pane.terminal, pane.cursor = await Terminal.open(slot, size=size, env=PROMPTED), 0
    # The shell's first prompt ends the wait, so the reply shows it.
    await pane.terminal.command_ended(0, DEFAULT_MAX_WAIT_S)
    return _screen_reply(await pane.terminal.capture(quiet_s=MIN_QUIET_S, timeout_s=DEFAULT_MAX_WAIT_S))


async def _send_keys(pane: RolloutPane, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    terminal, keys = pane.open(), arguments.get("keys")
    if not keys:
        raise ToolMistake("keys is needed for send_keys")
    quiet_s = max(float(arguments.get("min_wait_s", 0)), MIN_QUIET_S)
    patience_s = float(min(arguments.get("max_wait_s", DEFAULT_MAX_WAIT_S), run.timeout_s))
    # Measured before the keys are sent: only a prompt after this place means that the command has ended.
    before, typing_s = (await terminal.process.status()).output_total_bytes, max(patience_s, MIN_TYPING_S)
    try:
        async with asyncio.timeout(typing_s):
            await terminal.send_keys(*([keys] if isinstance(keys, str) else keys))
    except TimeoutError:
        raise ToolMistake(
            f"The program in the terminal did not read all keys within {typing_s:g}s; some may have arrived. "
            "Check its screen with capture, or end it with stop"
        ) from None
    except BrokenPipeError:
        raise ToolMistake("The program in the terminal has ended; open a new terminal with start and reset") from None
    if not arguments.get("block"):
        return _screen_reply(await terminal.capture(quiet_s=quiet_s, timeout_s=patience_s))
    code = await terminal.command_ended(before, patience_s)
    shot = await terminal.capture(quiet_s=quiet_s, timeout_s=1.0)
    if code is not None:
        return {**_screen_reply(shot), "command_exit_code": code}
    late = {"still_running": f"The command has not ended within {patience_s:g}s."} if shot.running else {}
    return {**_screen_reply(shot), **late}


async def _capture(pane: RolloutPane, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    terminal = pane.open()
    shot = await terminal.capture(quiet_s=MIN_QUIET_S, timeout_s=1.0)
    if not arguments.get("capture_entire"):
        return _screen_reply(shot)
    kept = await process_output.tail(terminal.process, MAX_OUTPUT_CHARS, running=shot.running)
    return {**_screen_reply(shot), "output": kept.text, "dropped_bytes": kept.start}


async def _stream(pane: RolloutPane, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    terminal, most = pane.open(), arguments.get("max_bytes", DEFAULT_STREAM_BYTES)
    status = await terminal.process.status()
    start = 0 if arguments.get("reset") else pane.cursor
    new = await process_output.read_output_text(terminal.process, start, max_bytes=most, running=status.running)
    pane.cursor = new.end
    reply: dict[str, JSON] = {"output": new.text, "error": None, "more_bytes": status.output_total_bytes - new.end}
    return {**reply, "lost_bytes": new.lost} if new.lost else reply


async def _stop(pane: RolloutPane, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    terminal, pane.terminal = pane.terminal, None
    if terminal is not None:
        await terminal.aclose()
    return {"output": "", "error": None}


def _screen_reply(shot: ScreenShot) -> dict[str, JSON]:
    reply: dict[str, JSON] = {"output": shot.text, "error": None, "cursor": list(shot.cursor), "running": shot.running}
    if not shot.running:
        reply["shell_exit_code"] = shot.exit_code
    if not shot.emulated:
        reply["note"] = "No screen is emulated here: these are the last lines that were written."
    return reply


_ACTIONS: Mapping[str, _Action] = {
    "start": _start, "send_keys": _send_keys, "capture": _capture, "stream": _stream, "stop": _stop
}  # fmt: skip

TMUX = FunctionTool(schema=SCHEMA, run=run_tmux, toolset="tmux")
