"""Reads recorded trajectories for the `replay` policy.

A recording is JSON lines: trajectories with `task_id`, `index` and `messages`, or the journal of a run, whose lines
hold them under `trajectory`. Lines of other kinds are passed over, and so is a torn last line. Where a trajectory has
`turns`, their `finish_reason` and token counts are read too. Of two with one task id and index, the later counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.inference.engine import AssistantMessage


@dataclass(frozen=True, slots=True)
class Recorded:
    """An assistant message as it was recorded, with how its turn ended and what it cost, where that is known."""

    message: AssistantMessage
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class RecordedTurn(Protocol):
    """How a turn ended and what it cost, as any record of it says."""

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
    """Either a trajectory itself or something that holds one."""

    task_id: str | None = None
    trajectory: _Trajectory | None = None


_LINE = msgspec.json.Decoder(_Line)
_TRAJECTORY = msgspec.json.Decoder(_Trajectory)
_ROLE = msgspec.json.Decoder(_Role)
_MESSAGE = msgspec.json.Decoder(AssistantMessage)


def read_recording(path: Path) -> dict[tuple[str, int], list[Recorded]]:
    """The assistant's messages of every trajectory, by task id and index. Raises `ConfigError`."""
    found = {(one.task_id, one.index): _assistant_side(one, path) for one in _trajectories(path)}
    if not found:
        raise ConfigError(f"{path} holds no recorded trajectory: a line needs task_id, index and messages.")
    return found


def read_policy_file(path: Path) -> str:
    """A file named by a policy. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the policy's file {path}: {error}.") from error


def _trajectories(path: Path) -> Iterator[_Trajectory]:
    lines = read_policy_file(path).split("\n")
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


def _assistant_side(trajectory: _Trajectory, path: Path) -> list[Recorded]:
    try:
        said = [_MESSAGE.decode(raw) for raw in trajectory.messages if _ROLE.decode(raw).role == "assistant"]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, task '{trajectory.task_id}': a message cannot be played: {error}.") from None
    return recorded_turns(said, trajectory.turns)


def recorded_turns(said: Sequence[AssistantMessage], turns: Sequence[RecordedTurn]) -> list[Recorded]:
    """The assistant's messages with their turns; those of the prompt come first and had none."""
    examples = len(said) - len(turns)
    known: list[RecordedTurn] = [_Turn()] * examples + list(turns) if examples >= 0 else [_Turn()] * len(said)
    return [
        Recorded(message, turn.finish_reason, turn.prompt_tokens, turn.completion_tokens)
        for message, turn in zip(said, known, strict=True)
    ]
