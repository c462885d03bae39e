"""Turn a reference solution into terminal calls, which the oracle policy plays.

Its files are written to `/solution`, as in Harbor, or below `/tmp` if the agent is not root. Its script runs in the
task's directory, in the background if it may take longer than one command. As in Harbor, its exit status is ignored.
"""

from __future__ import annotations

import base64
import math
import shlex

from palaestra.core.errors import TaskError
from palaestra.core.types import ToolStep
from palaestra.suites.images.as_user import is_root
from palaestra.suites.terminal_bench import terminal_bench_1
from palaestra.suites.terminal_bench.terminal_task import SolutionScript, TerminalTask

LONGEST_COMMAND_S = 600
"""The time limit of the terminal tool."""

_PIECE = 60_000
"""Characters of a file per command; the kernel allows 128 KiB per argument."""


def solution_steps(
    task: TerminalTask, user: str, seconds: float, *, fresh: bool = False
) -> tuple[ToolStep, ...] | None:
    """The calls that solve a task in at most `seconds`; None for a task without a solution. Raises `TaskError`.

    `fresh`: remove an earlier solution first.
    """
    solution = task.solution
    if solution is None:
        return None
    place = "/solution" if is_root(user) else "/tmp/palaestra-solution"  # noqa: S108  in the slot
    steps = [_terminal(f"rm -rf {place}")] if fresh else []
    steps += [
        _terminal(line)
        for name, data in _files(solution).items()
        for line in _writing(f"{place}/{name}", data)
    ]  # fmt: skip
    variables = [f"{name}={value}" for name, value in solution.env.items()]
    script = f"{place}/{_script_name(solution)}"
    return (*steps, *_running(shlex.join(["env", *variables, "bash", script]), f"{place}/ended", seconds))


def _script_name(solution: SolutionScript) -> str:
    return solution.script.replace(".yaml", ".sh")


def _files(solution: SolutionScript) -> dict[str, bytes]:
    try:
        found = {name: (solution.folder / name).read_bytes() for name in (solution.script, *solution.files)}
    except OSError as error:
        raise TaskError(f"its solution cannot be read: {error}") from None
    if solution.script.endswith(".yaml"):
        lines = terminal_bench_1.commands(solution.folder / solution.script)
        found = {_script_name(solution): "".join(f"{line}\n" for line in lines).encode()}
    return found


def _writing(path: str, data: bytes) -> list[str]:
    """Commands that write a file."""
    text, quoted = base64.b64encode(data).decode(), shlex.quote(path)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)] or [""]
    folder = shlex.quote(path.rpartition("/")[0])
    first = f"mkdir -p {folder} && printf %s {pieces[0]} | base64 -d > {quoted}"
    return [first, *(f"printf %s {piece} | base64 -d >> {quoted}" for piece in pieces[1:])]


def _running(command: str, ended: str, seconds: float) -> list[ToolStep]:
    if seconds <= LONGEST_COMMAND_S:
        return [_terminal(command, math.ceil(seconds))]
    # Only shell builtins: the image may lack nohup and setsid.
    started = f"({command}; echo $? > {ended}) > {ended}.log 2>&1 < /dev/null & echo $! > {ended}.pid"
    wait_s = LONGEST_COMMAND_S - 10
    running = f"[ ! -f {ended} ] && kill -0 $(cat {ended}.pid) 2> /dev/null"
    waiting = f"for ((i = 0; i < {wait_s}; i++)); do {running} || break; sleep 1; done; tail -c 2000 {ended}.log"
    waits = [_terminal(waiting, LONGEST_COMMAND_S)] * math.ceil(seconds / wait_s)
    return [_terminal(started), *waits]


def _terminal(command: str, timeout_s: int = 60) -> ToolStep:
    return ToolStep("terminal", {"command": command, "timeout": timeout_s})
