"""Finds the agent's tool that runs commands, by calling its tools.

Names prove nothing: an argument `code` may be the code of a booking. So each tool that can be called with one text gets
a shell script and a Python program, and it runs commands if the result of the script appears in a reply or in a file.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from palaestra.envs.policy_runs import PolicyRuns
from palaestra.tools.builtin.terminal import MAX_COMMAND_BYTES
from palaestra.tools.builtin.terminal import SCHEMA as TERMINAL_SCHEMA
from palaestra.tools.tool import logger
from palaestra_audit.cheats.left_files import LeftFiles, play_and_read
from palaestra_slots.core.types import JSON, Message, Task, ToolStep
from palaestra_slots.sandbox.slot import WORKSPACE, SlotSpec
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import COMMANDS, Act, Policy, turns_taken

_IN_PYTHON = "import subprocess\nprint(subprocess.run(['sh', '-c', {!r}], timeout=60).returncode)"
_ROUNDS, _FACTOR, _MODULUS = 8, 48_271, 2_147_483_647
_PROBE = (
    f"x={{start}}; for i in {' '.join(map(str, range(_ROUNDS)))}; do x=$(( (x * {_FACTOR}) % {_MODULUS} )); done; "
    "echo $x; echo $x > {path}\n"
)
"""A script whose result no other tool works out: neither one that repeats its input nor a model that reads it."""


@dataclass(frozen=True, slots=True)
class CommandTool:
    """The agent's tool that runs commands, and how to call it. `argument` is its argument for a command, or for Python
    code if `python`; `limited` tools also take the argument `timeout`."""

    name: str
    argument: str
    python: bool = False
    limited: bool = False

    def calls(self, commands: Sequence[str]) -> list[ToolStep]:
        """Return calls that run the commands, in one call if it is not too long."""
        whole = "".join(commands)
        limit = {"timeout": 60} if self.limited else {}
        texts = [whole] if len(whole.encode()) <= MAX_COMMAND_BYTES else commands
        return [ToolStep(self.name, {self.argument: _IN_PYTHON.format(text) if self.python else text, **limit})
                for text in texts]  # fmt: skip


TERMINAL = CommandTool(COMMANDS, "command", limited=True)
"""The tool of the toolset `terminal`."""


async def find_command_tool(
    runs: PolicyRuns, task: Task, number: int, tools: Sequence[Mapping[str, JSON]], spec: SlotSpec | None
) -> CommandTool | None:
    """Return the first of the agent's tools that runs commands, or else Python code; None if no tool does. Plays a
    rollout of the task, unless the agent has the tool of the toolset `terminal`. `spec` is the slot in which the files
    of that rollout are read; None reads only replies."""
    functions = [tool.get("function") or {} for tool in tools]
    if any(each.get("name") == COMMANDS and each.get("description") == TERMINAL_SCHEMA.description
           for each in functions):  # fmt: skip
        return TERMINAL
    candidates = sorted((each for function in functions for each in _candidates(function)), key=lambda own: own.python)
    if not candidates:
        return None
    results, calls, paths = list[int](), list[ToolStep](), list[str]()
    for place, candidate in enumerate(candidates):
        x = start = random.SystemRandom().randrange(1, _MODULUS)
        for _ in range(_ROUNDS):
            x = x * _FACTOR % _MODULUS
        results.append(x)
        paths.append(f"{WORKSPACE}/.palaestra-probe-{place}")
        calls += candidate.calls([_PROBE.format(start=start, path=paths[-1])])
    reads = None if spec is None else LeftFiles(spec, tuple(paths))
    logger.addFilter(_says_nothing)  # a tool that fails on a script is no news to its author
    try:
        group = await play_and_read(runs, _Calls(calls), task, number, reads)
    finally:
        logger.removeFilter(_says_nothing)
    seen = "\n".join(str(message.get("content")) for rollout in group.trajectories for message in rollout.messages
                     if message.get("role") == "tool")  # fmt: skip
    for candidate, result, path in zip(candidates, results, paths, strict=True):
        left = b"" if reads is None else reads.files.get(path, b"")
        if str(result) in seen or str(result).encode() in left:
            return candidate
    return None


def _says_nothing(record: logging.LogRecord) -> bool:
    return False


class _Calls(Policy):
    """Makes these calls in one turn."""

    def __init__(self, calls: Sequence[ToolStep]) -> None:
        self._calls = calls

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        return "Done." if context.branch or turns_taken(context, messages) else self._calls


def _candidates(function: Mapping[str, JSON]) -> Iterator[CommandTool]:
    """Yield the ways in which a function might run commands: those of its arguments that alone suffice for a call."""
    schema = function.get("parameters") or {}
    taken: Mapping[str, JSON] = schema.get("properties") or {}
    for argument, about in taken.items():
        if '"string"' in json.dumps(about) and {*schema.get("required", ())} <= {argument}:
            for python in (False, True):
                yield CommandTool(function["name"], argument, python, argument != "timeout" and "timeout" in taken)
