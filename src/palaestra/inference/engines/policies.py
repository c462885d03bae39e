"""Scripted policies: what to do next, decided without a model.

`oracle` plays a task's reference solution, `noop` answers without acting, `patch:FILE` applies a given diff, `replay`
plays a recording. They prove that an environment's checks decide (R3), and they make runs that repeat exactly (D2).

Not a way round anything: a policy only says what a model would have said; the loop, the validation, the tools and the
grading are the real ones. Invariant: a policy keeps no state between turns. Its step is the number of assistant
messages so far, so that a resumed or repeated call gives the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra.core.errors import EngineUnavailable, TaskError
from palaestra.core.types import JSON, Message, Say, Task, ToolStep
from palaestra.inference.engine import SessionContext
from palaestra.inference.engines.recorded_policy import Recorded, read_policy_file, read_recording

COMMANDS = "terminal"
"""The tool that runs the commands of a solution."""

PATCH_PATH = "/tmp/palaestra.patch"  # noqa: S108  inside the slot, outside the workspace that is graded

_APPLY = f"git apply --whitespace=nowarn {PATCH_PATH} || patch -p1 --forward --batch < {PATCH_PATH}"
"""`git apply` refuses outside a repository, and changes nothing when it fails."""


Act: TypeAlias = str | Sequence[ToolStep] | Recorded
"""What a policy does in one turn: a plain answer, tool calls, or a recorded message as it was."""


class Policy(Protocol):
    """Decides what the assistant does next."""

    async def start(self) -> None:
        """Read what is needed. Raises `ConfigError` when it is not there."""
        ...

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The next turn, from the rollout's context and the conversation so far alone."""
        ...


def turns_taken(context: SessionContext, messages: Sequence[Message]) -> int:
    """How many turns the assistant has had in this rollout; examples in the prompt do not count."""
    prompt = context.task.prompt if context.task is not None else ""
    examples = 0 if isinstance(prompt, str) else _assistant_messages(prompt)
    return max(0, _assistant_messages(messages) - examples)


def _assistant_messages(messages: Sequence[Message]) -> int:
    return sum(message.get("role") == "assistant" for message in messages)


def _task(context: SessionContext, policy: str) -> Task:
    if context.task is None:
        raise TaskError(
            f"Policy '{policy}' needs the rollout's task: open a session of the engine with SessionContext(task=…)."
        )
    return context.task


class NoopPolicy:
    """Answers at once and does nothing."""

    async def start(self) -> None:
        """Nothing to read."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The answer."""
        return "I have done nothing."


class OraclePolicy:
    """Plays `task.solution`, one step per turn, then says that it is done."""

    async def start(self) -> None:
        """Nothing to read."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The next step. Raises `TaskError` for a task without a solution."""
        task = _task(context, "oracle")
        if task.solution is None:
            raise TaskError(
                f"Task '{task.id}' has no reference solution for the oracle to play. "
                "Give the task a solution=, or use another policy (noop, patch:FILE, replay:FILE)."
            )
        steps = _steps(task)
        turn = turns_taken(context, messages)
        if turn >= len(steps):
            return "The reference solution has been carried out."
        step = steps[turn]
        if isinstance(step, Say):
            return step.text
        return [ToolStep(COMMANDS, {"command": step}) if isinstance(step, str) else step]


def _steps(task: Task) -> Sequence[ToolStep | Say | str]:
    """The steps of the solution. Raises `TaskError` for what is none, as a column of a data set may be."""
    steps: JSON = [task.solution] if isinstance(task.solution, str) else task.solution
    fine = isinstance(steps, Sequence) and all(isinstance(step, str | ToolStep | Say) for step in steps)
    if not fine:
        raise TaskError(
            f"Task '{task.id}': its solution is {task.solution!r:.100}, neither a shell script nor a list of commands, "
            "ToolStep and Say."
        )
    return tuple(steps)


class PatchPolicy:
    """Applies one unified diff to the workspace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._diff = ""

    async def start(self) -> None:
        """Read the diff. Raises `ConfigError`."""
        self._diff = await asyncio.to_thread(read_policy_file, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Write it into the slot, apply it, say so."""
        turn = turns_taken(context, messages)
        if turn == 0:
            return [ToolStep("write_file", {"path": PATCH_PATH, "content": self._diff})]
        if turn == 1:
            return [ToolStep("terminal", {"command": _APPLY})]
        return "The patch has been applied."


class ReplayPolicy:
    """Plays the assistant's side of recorded trajectories, picked by task id and index (see `recording.py`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turns: Mapping[tuple[str, int], list[Recorded]] = {}

    async def start(self) -> None:
        """Read the recording. Raises `ConfigError`."""
        self._turns = await asyncio.to_thread(read_recording, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The recorded message that comes next.

        Raises `TaskError` when nothing was recorded for this task and index, and `EngineUnavailable` where the
        recording ends but the conversation does not, as when the recorded run lost its server there.
        """
        task = _task(context, "replay")
        turns = self._turns.get((task.id, context.index))
        if turns is None:
            raise TaskError(
                f"{self._path} has no trajectory of task '{task.id}' with index {context.index}. "
                "Replay the same tasks and at most the group size of the recorded run."
            )
        turn = _assistant_messages(messages)
        if turn >= len(turns):
            raise EngineUnavailable(
                f"The recording of task '{task.id}', index {context.index}, ends after {turn} turns."
            )
        return turns[turn]
