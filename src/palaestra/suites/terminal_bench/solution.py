"""A reference solution as tool calls: what the oracle policy plays, through the same terminal as a model.

Its files are put where Harbor puts them, `/solution`, or below `/tmp` where the agent is not root, and its script is
run in the task's directory. One that may take longer than a command may is started in the background and waited for.
Its exit status decides nothing, as in Harbor: the verifier does.
"""

from __future__ import annotations

import base64
import math
import shlex

from palaestra.core.errors import TaskError
from palaestra.core.types import ToolStep
from palaestra.suites.images.as_user import is_root
from palaestra.suites.terminal_bench import task_yaml
from palaestra.suites.terminal_bench.terminal_task import Solution, TerminalTask

LONGEST_COMMAND_S = 600
"""What the terminal tool allows one command."""

_PIECE = 60_000
"""Characters of a file in one command; the kernel takes 128 KiB per argument."""


def solution_steps(
    task: TerminalTask, user: str, seconds: float, *, fresh: bool = False
) -> tuple[ToolStep, ...] | None:
    """The calls that solve a task within so many seconds; None for a task without a solution. Raises `TaskError`.

    `fresh` first removes another solution that was put there before.
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


def _script_name(solution: Solution) -> str:
    return solution.script.replace(".yaml", ".sh")


def _files(solution: Solution) -> dict[str, bytes]:
    try:
        found = {name: (solution.folder / name).read_bytes() for name in (solution.script, *solution.files)}
    except OSError as error:
        raise TaskError(f"its solution cannot be read: {error}") from None
    if solution.script.endswith(".yaml"):
        lines = task_yaml.commands(solution.folder / solution.script)
        found = {_script_name(solution): "".join(f"{line}\n" for line in lines).encode()}
    return found


def _writing(path: str, data: bytes) -> list[str]:
    """Commands that write a file, byte for byte."""
    text, quoted = base64.b64encode(data).decode(), shlex.quote(path)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)] or [""]
    folder = shlex.quote(path.rpartition("/")[0])
    first = f"mkdir -p {folder} && printf %s {pieces[0]} | base64 -d > {quoted}"
    return [first, *(f"printf %s {piece} | base64 -d >> {quoted}" for piece in pieces[1:])]


def _running(command: str, ended: str, seconds: float) -> list[ToolStep]:
    if seconds <= LONGEST_COMMAND_S:
        return [_terminal(command, math.ceil(seconds))]
    # Only what every shell has: the image need not have nohup or setsid.
    started = f"({command}; echo $? > {ended}) > {ended}.log 2>&1 < /dev/null & echo $! > {ended}.pid"
    wait_s = LONGEST_COMMAND_S - 10
    going_on = f"[ ! -f {ended} ] && kill -0 $(cat {ended}.pid) 2> /dev/null"
    waiting = f"for ((i = 0; i < {wait_s}; i++)); do {going_on} || break; sleep 1; done; tail -c 2000 {ended}.log"
    waits = [_terminal(waiting, LONGEST_COMMAND_S)] * math.ceil(seconds / wait_s)
    return [_terminal(started), *waits]


def _terminal(command: str, timeout_s: int = 60) -> ToolStep:
    return ToolStep("terminal", {"command": command, "timeout": timeout_s})
