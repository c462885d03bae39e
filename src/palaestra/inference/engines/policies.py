"""Scripted policies: the next action, decided without a model.

`oracle` plays a task's reference solution, `noop` answers without acting, `patch:FILE` applies a given diff, `replay`
plays a recording. They prove that an environment's checks decide (R3), and they make runs that repeat exactly (D2). A
policy only replaces the model; the loop, the validation, the tools and the grading are the real ones. Invariant: a
policy keeps no state between turns. Its step is the number of assistant messages so far, so a resumed or repeated call
gives the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from palaestra.core.errors import ConfigError, EngineUnavailable, TaskError
from palaestra.core.types import JSON, Message, Say, Task, ToolStep
from palaestra.inference.chat_server import SessionContext
from palaestra.inference.engine import AssistantMessage, ChatChoice, ChatCompletion, CompletionUsage


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A recorded assistant message, with its turn's finish reason and token counts, if known."""

    message: AssistantMessage
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def completion(self) -> ChatCompletion:
        """The reply as a server returns it."""
        finish_reason = self.finish_reason or ("tool_calls" if self.message.tool_calls else "stop")
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        return ChatCompletion(choices=[ChatChoice(message=self.message, finish_reason=finish_reason)], usage=usage)


COMMANDS = "terminal"
"""The tool that runs the commands of a solution."""

PATCH_PATH = "/tmp/palaestra.patch"  # noqa: S108  inside the slot, outside the workspace that is graded

_APPLY = f"git apply --whitespace=nowarn {PATCH_PATH} || patch -p1 --forward --batch < {PATCH_PATH}"
"""`git apply` refuses outside a repository, and changes nothing if it fails."""


Act: TypeAlias = str | Sequence[ToolStep] | RecordedReply
"""A policy's turn: a plain answer, tool calls, or a recorded message."""


class Policy(Protocol):
    """Decides the assistant's next turn."""

    async def start(self) -> None:
        """Read the policy's files. Raises `ConfigError`."""
        ...

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The next turn, from the rollout's context and the conversation so far alone."""
        ...


def turns_taken(context: SessionContext, messages: Sequence[Message]) -> int:
    """How many turns the assistant has had in this rollout, without examples in the prompt."""
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


class _WithoutFiles:
    async def start(self) -> None:
        """There is nothing to read."""


class NoopPolicy(_WithoutFiles):
    """Answers and does nothing."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The answer."""
        return "I have done nothing."


class OraclePolicy(_WithoutFiles):
    """Plays `task.solution`, one step per turn, then reports that it is done."""

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
    """The steps of the solution. Raises `TaskError` for anything else, as a column of a data set may be."""
    steps: JSON = [task.solution] if isinstance(task.solution, str) else task.solution
    fine = isinstance(steps, Sequence) and all(isinstance(step, str | ToolStep | Say) for step in steps)
    if not fine:
        raise TaskError(
            f"Task '{task.id}': its solution is {task.solution!r:.100}, not a shell script or a list of commands, "
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
        self._diff = await asyncio.to_thread(_read_file, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Write the diff into the slot, apply it, report it."""
        turn = turns_taken(context, messages)
        if turn == 0:
            return [ToolStep("write_file", {"path": PATCH_PATH, "content": self._diff})]
        if turn == 1:
            return [ToolStep("terminal", {"command": _APPLY})]
        return "The patch has been applied."


class ReplayPolicy:
    """Plays the assistant's side of recorded trajectories, picked by task id and index.

    A recording is JSON lines: trajectories with `task_id`, `index` and `messages`, or the journal of a run, whose lines
    hold them under `trajectory`. Other lines and a torn last line are ignored. A trajectory's `turns` give the
    `finish_reason` and the token counts. Of two trajectories with one task id and index, the later counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turns: Mapping[tuple[str, int], list[RecordedReply]] = {}

    async def start(self) -> None:
        """Read the recording. Raises `ConfigError`."""
        self._turns = await asyncio.to_thread(_read_recording, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """The next recorded message.

        Raises `TaskError` if nothing was recorded for this task and index, and `EngineUnavailable` if the recording
        ends before the conversation, as when the recorded run lost its server.
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


class RecordedTurn(Protocol):
    """Any record of a turn's finish reason and token counts."""

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def prompt_tokens(self) -> int | None: ...

    @property
    def completion_tokens(self) -> int | None: ...


class _Turn(msgspec.Struct):
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Role(msgspec.Struct):
    role: str = ""


class _Trajectory(msgspec.Struct):
    task_id: str
    index: int
    messages: list[msgspec.Raw]
    turns: list[_Turn] = []


class _Line(msgspec.Struct):
    """A trajectory, or a line that holds one."""

    task_id: str | None = None
    trajectory: _Trajectory | None = None


_LINE = msgspec.json.Decoder(_Line)
_TRAJECTORY = msgspec.json.Decoder(_Trajectory)
_ROLE = msgspec.json.Decoder(_Role)
_MESSAGE = msgspec.json.Decoder(AssistantMessage)


def _read_recording(path: Path) -> dict[tuple[str, int], list[RecordedReply]]:
    """The assistant's messages of every trajectory, by task id and index. Raises `ConfigError`."""
    found = {(one.task_id, one.index): _assistant_side(one, path) for one in _trajectories(path)}
    if not found:
        raise ConfigError(f"{path} holds no recorded trajectory: a line needs task_id, index and messages.")
    return found


def _read_file(path: Path) -> str:
    """The content of a policy's file. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the policy's file {path}: {error}.") from error


def _trajectories(path: Path) -> Iterator[_Trajectory]:
    lines = _read_file(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            kind = _LINE.decode(line)
            if kind.trajectory is not None:
                yield kind.trajectory
            elif kind.task_id is not None:
                yield _TRAJECTORY.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines) and not isinstance(error, msgspec.ValidationError):
                return  # torn: the writer was killed
            raise ConfigError(f"{path}, line {number}, is not a recorded trajectory: {error}.") from None


def _assistant_side(trajectory: _Trajectory, path: Path) -> list[RecordedReply]:
    try:
        said = [_MESSAGE.decode(raw) for raw in trajectory.messages if _ROLE.decode(raw).role == "assistant"]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, task '{trajectory.task_id}': a message cannot be played: {error}.") from None
    return recorded_turns(said, trajectory.turns)


def recorded_turns(said: Sequence[AssistantMessage], turns: Sequence[RecordedTurn]) -> list[RecordedReply]:
    """The assistant's messages with their turns; messages of the prompt come first and have none."""
    examples = len(said) - len(turns)
    known: list[RecordedTurn] = [_Turn()] * examples + list(turns) if examples >= 0 else [_Turn()] * len(said)
    return [
        RecordedReply(message, turn.finish_reason, turn.prompt_tokens, turn.completion_tokens)
        for message, turn in zip(said, known, strict=True)
    ]
