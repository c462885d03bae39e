"""Scripted policies, and the engine that plays them in the shape of chat completions.

`oracle` plays a task's reference solution, `noop` answers without acting, `patch:FILE` applies a diff, and
`replay:FILE` plays a recording. A policy replaces only the model and keeps no state between turns: its reply, ids
included, depends only on its file, the rollout's context and the messages, so a repeated call gives the same answer.
Unless a recording has token counts, they are estimated as UTF-8 bytes divided by four, rounded up.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from palaestra_slots.core.config import local_path, nearest
from palaestra_slots.core.errors import ConfigError, EngineUnavailable, TaskError
from palaestra_slots.core.types import JSON, Message, Say, Task, ToolStep
from palaestra_tokens.chat_server import ChatServer, ServerEngine, SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    ToolCallMessage,
    assistant_message,
)


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A recorded assistant message, with its turn's finish reason and token counts, if known."""

    message: AssistantMessage
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def completion(self) -> ChatCompletion:
        finish_reason = self.finish_reason or ("tool_calls" if self.message.tool_calls else "stop")
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        return ChatCompletion(choices=[ChatChoice(message=self.message, finish_reason=finish_reason)], usage=usage)


COMMANDS = "terminal"
"""The tool that runs a solution's commands."""

PATCH_PATH = "/tmp/palaestra.patch"  # noqa: S108  inside the slot, outside the workspace that is graded

_APPLY = f"git apply --whitespace=nowarn {PATCH_PATH} || patch -p1 --forward --batch < {PATCH_PATH}"
"""`git apply` may fail outside a repository. It then changes nothing, so `patch` can try."""


CARRIED_OUT = "The reference solution has been carried out."
APPLIED = "The patch has been applied."
DID_NOTHING = "I have done nothing."
_CLOSINGS = frozenset({CARRIED_OUT, APPLIED, DID_NOTHING})
"""The sentences with which policies end a rollout. They are not work, so no model should learn them."""


def without_closing(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation up to the last reply that is work if it ends with a policy's own sentence, otherwise the
    whole conversation."""
    if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("content") not in _CLOSINGS:
        return messages
    replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[: replies[-2] + 1] if len(replies) > 1 else messages[:-1]


Act: TypeAlias = str | Sequence[ToolStep] | RecordedReply
"""A policy's turn: a plain answer, tool calls, or a recorded message."""


class Policy(ABC):
    """Decides the assistant's next turn."""

    async def start(self) -> None:
        """Read the policy's files. Raises `ConfigError`."""

    @abstractmethod
    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Return the next turn, computed only from the rollout's context and the conversation so far."""

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        """Return whether the policy has nothing to do after its last reply, so that no user is asked to answer it."""
        return True


def turns_taken(context: SessionContext, messages: Sequence[Message]) -> int:
    """Return the number of the assistant's turns in this rollout, not counting examples in the prompt."""
    prompt = context.task.prompt if context.task is not None else ""
    examples = 0 if isinstance(prompt, str) else _assistant_messages(prompt)
    return max(0, _assistant_messages(messages) - examples)


def _assistant_messages(messages: Sequence[Message]) -> int:
    return sum(message.get("role") == "assistant" for message in messages)


def _task_of_rollout(context: SessionContext, policy: str) -> Task:
    if context.task is None:
        raise TaskError(
            f"Policy '{policy}' plays the task of a rollout, but this model call does not belong to a rollout. "
            "Use a model server, or collect the item with super().collect_trajectory(item)."
        )
    return context.task


class NoopPolicy(Policy):
    """Answers and does nothing."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        return DID_NOTHING


class OraclePolicy(Policy):
    """Plays a reference solution, one step per turn, then reports that it is done. `number` 0 is `task.solution`, and
    the numbers from 1 are `task.solutions`. With `wrong`, it plays one of `task.wrong_solutions`, counted from 0."""

    def __init__(self, number: int = 0, *, wrong: bool = False) -> None:
        self.number = number
        self.wrong = wrong

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Return the next step. Raises `TaskError` for a task without a solution."""
        task = _task_of_rollout(context, "oracle")
        if task.solution is None and not self.number and not self.wrong:
            raise TaskError(
                f"Task '{task.id}' has no reference solution for the oracle to play. "
                "Give the task a solution=, or use another policy (noop, patch:FILE, replay:FILE)."
            )
        steps = solution_steps(task, self.number, wrong=self.wrong)
        turn = turns_taken(context, messages)
        if turn >= len(steps):
            return CARRIED_OUT
        step = steps[turn]
        if isinstance(step, Say):
            return step.text
        return [ToolStep(COMMANDS, {"command": step}) if isinstance(step, str) else step]

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        steps = solution_steps(_task_of_rollout(context, "oracle"), self.number, wrong=self.wrong)
        return turns_taken(context, messages) >= len(steps)


def solution_steps(task: Task, number: int = 0, *, wrong: bool = False) -> Sequence[ToolStep | Say | str]:
    """Return the steps of the solution, of the further solution with this number, counted from 1, or of a wrong one,
    counted from 0. Raises `TaskError` for other values, which a data set's column may hold."""
    right = task.solution if number == 0 or wrong else task.solutions[number - 1]
    chosen = task.wrong_solutions[number] if wrong else right
    steps: JSON = [chosen] if isinstance(chosen, str) else chosen
    fine = isinstance(steps, Sequence) and all(isinstance(step, str | ToolStep | Say) for step in steps)
    if not fine:
        raise TaskError(
            f"The solution of task '{task.id}' is {chosen!r:.100}, but it must be a shell script or a list of "
            "commands, ToolStep and Say."
        )
    return tuple(steps)


class PatchPolicy(Policy):
    """Applies one unified diff to the workspace. Raises `TaskError` if the diff does not apply."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._diff = ""

    async def start(self) -> None:
        self._diff = await asyncio.to_thread(_read_file, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        turn = turns_taken(context, messages)
        if turn == 0:
            return [ToolStep("write_file", {"path": PATCH_PATH, "content": self._diff})]
        if turn == 1:
            return [ToolStep("terminal", {"command": _APPLY})]
        results = (message for message in reversed(messages) if message.get("role") == "tool")
        reply = json.loads(str(next(results)["content"]))
        if reply.get("exit_code") != 0:
            problem = reply.get("output") or reply.get("error")
            raise TaskError(f"{self._path} does not apply to task '{_task_of_rollout(context, 'patch').id}': {problem}")
        return APPLIED


class ReplayPolicy(Policy):
    """Plays the assistant's side of recorded trajectories, selected by task id and index.

    A recording is a JSON Lines file: trajectories with `task_id`, `index` and `messages`, or the journal of a run. The
    path of the run's folder, its groups file or an export in that folder also selects the journal. Other lines and a
    torn last line are ignored. If two trajectories have the same task id and index, the later one is used.
    """

    def __init__(self, path: Path) -> None:
        folder = path.parent if path.name == "groups.jsonl" else path.parent.parent if _is_export(path) else path
        self._path = journal if (journal := folder / "journal.jsonl").is_file() else path
        self._turns: Mapping[tuple[str, int], list[RecordedReply]] = {}

    async def start(self) -> None:
        self._turns = await asyncio.to_thread(_read_recording, self._path)

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        """Return the next recorded message. Raises `TaskError` if there is no recording of this task and index, and
        `EngineUnavailable` if the recording ends before the conversation, as when the recorded run lost its server."""
        task = _task_of_rollout(context, "replay")
        turns = self._turns.get((task.id, context.index))
        if turns is None:
            raise TaskError(
                f"{self._path} has no trajectory of task '{task.id}' with index {context.index}. "
                "Replay the same tasks, with at most the group size of the recorded run."
            )
        # Not `turns_taken`: a recording begins with the prompt's example messages as well.
        turn = _assistant_messages(messages)
        if turn >= len(turns):
            raise EngineUnavailable(
                f"The recording of task '{task.id}', index {context.index}, ends after {turn} turns."
            )
        return turns[turn]

    def is_over(self, context: SessionContext, messages: Sequence[Message]) -> bool:
        return _assistant_messages(messages) >= len(
            self._turns.get((_task_of_rollout(context, "replay").id, context.index), ())
        )


def _is_export(path: Path) -> bool:
    return path.is_file() and path.parent.name == "exports"


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


def _read_recording(path: Path) -> dict[tuple[str, int], list[RecordedReply]]:
    """Return the assistant's messages of every trajectory, by task id and index. Raises `ConfigError`."""
    found = {(one.task_id, one.index): _assistant_side(one, path) for one in _trajectories(path)}
    if not found:
        raise ConfigError(f"{path} holds no recorded trajectory, which is a line with task_id, index and messages.")
    return found


def _read_file(path: Path) -> str:
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
                return  # torn, because the writer was killed
            raise ConfigError(
                f"{path}, line {number}, is not a recorded trajectory: {error}. Specify a run's folder instead."
            ) from None


def _assistant_side(trajectory: _Trajectory, path: Path) -> list[RecordedReply]:
    try:
        said = [
            assistant_message(msgspec.json.decode(raw))
            for raw in trajectory.messages
            if _ROLE.decode(raw).role == "assistant"
        ]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, task '{trajectory.task_id}': a message cannot be played: {error}.") from None
    return recorded_turns(said, trajectory.turns)


def recorded_turns(said: Sequence[AssistantMessage], turns: Sequence[JSON]) -> list[RecordedReply]:
    """Return the assistant's messages with the finish reasons and token counts of `turns`. The prompt's
    example messages have neither."""
    examples = len(said) - len(turns)
    known = [_Turn()] * examples + list(turns) if examples >= 0 else [_Turn()] * len(said)
    return [
        RecordedReply(message, turn.finish_reason, turn.prompt_tokens, turn.completion_tokens)
        for message, turn in zip(said, known, strict=True)
    ]


BYTES_PER_TOKEN = 4

_NEEDS_FILE: Mapping[str, Callable[[Path], Policy]] = {"patch": PatchPolicy, "replay": ReplayPolicy}


class ScriptedEngine(ServerEngine):
    """Plays `policy` or, if that is None, the policy that the config's `model_name` names."""

    def __init__(self, config: APIServerConfig, policy: Policy | None = None) -> None:
        self.config = config
        self._policy = policy or policy_named(config.model_name, config.replay_file)

    async def start(self) -> None:
        await self._policy.start()

    async def aclose(self) -> None:
        """Do nothing: no resource is open."""

    def session(self, context: SessionContext) -> ChatServer:
        return ScriptedSession(self.name, self._policy, context)

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        """Play one reply outside any rollout. Policies that need a task raise `TaskError`."""
        return await self.session(SessionContext()).chat_completion(messages=messages, **request)


class ScriptedSession(ChatServer):
    """Plays a policy in one rollout."""

    def __init__(self, name: str, policy: Policy, context: SessionContext) -> None:
        self._name = name
        self._policy = policy
        self._context = context

    def child(self, number: int = 0) -> ScriptedSession:
        return ScriptedSession(self._name, self._policy, replace(self._context, branch=number, tools=None))

    def is_over(self, messages: Sequence[Message]) -> bool:
        return self._policy.is_over(self._context, messages)

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        extra_body: Mapping[str, JSON] | None = None,
        **sampling: JSON,
    ) -> ChatCompletion:
        """Return the policy's next turn. Sampling settings have no effect."""
        act = self._policy.act(self._context, messages)
        if isinstance(self._policy, OraclePolicy):
            # A reference that calls a tool which the agent lacks is a mistake of the environment, and must not look
            # like failed work.
            self._check_act(act, self._context.tools if tools is None else [tool["function"]["name"] for tool in tools])
        turn = 1 + sum(message.get("role") == "assistant" for message in messages)
        message, finish_reason = _scripted_reply(act, turn)
        prompt_tokens, completion_tokens = _tokens(messages), _tokens([msgspec.to_builtins(message)])
        if isinstance(act, RecordedReply):
            # A replay has the cost of the recorded run, not of its scripted stand-in.
            prompt_tokens = prompt_tokens if act.prompt_tokens is None else act.prompt_tokens
            completion_tokens = completion_tokens if act.completion_tokens is None else act.completion_tokens
        return ChatCompletion(
            id=f"{self._context.rollout_id}/{turn}",
            model=self._name,
            choices=[ChatChoice(index=i, message=message, finish_reason=finish_reason) for i in range(n)],
            usage=CompletionUsage(
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                total_tokens=prompt_tokens + completion_tokens,
            ),
        )

    def _check_act(self, act: Act, had: Collection[str] | None) -> None:
        """Raise `TaskError` for a shell command of a solution if the agent has no `terminal`: otherwise the call would
        be answered like a model's mistake, and the solution scored as wrong without having run."""
        if had is None or isinstance(act, str | RecordedReply) or COMMANDS in had:
            return
        if all(step.name != COMMANDS for step in act):
            return
        name = self._context.task.id if self._context.task is not None else ""
        has = f"only {', '.join(sorted(had))}" if had else "no tool"
        raise TaskError(
            f"The solution of task '{name}' has commands for the tool {COMMANDS}, but the agent has {has}. "
            f"Add its toolset, or write the steps as ToolStep with other tools."
        )


POLICIES = ("oracle", "noop", *_NEEDS_FILE)


def policy_named(model_name: str, replay_file: str | None = None) -> Policy:
    """Return the policy `oracle`, `noop`, `patch:FILE` or `replay:FILE`, or `replay` with a separate file. Raises
    `ConfigError`."""
    name, _, file = model_name.partition(":")
    if model_name == "oracle":
        return OraclePolicy()
    if model_name == "noop":
        return NoopPolicy()
    if name in _NEEDS_FILE:
        file = file or (replay_file if name == "replay" else None) or ""
        if not file:
            raise ConfigError(f"Policy '{name}' needs a file: use {name}:FILE.")
        return _NEEDS_FILE[name](local_path(file))
    hint = nearest(name, POLICIES)
    raise ConfigError(
        f"There is no scripted policy '{model_name}'.{hint} Available: oracle, noop, patch:FILE, replay:FILE."
    )


def _scripted_reply(act: str | Sequence[ToolStep] | RecordedReply, turn: int) -> tuple[AssistantMessage, str]:
    if isinstance(act, RecordedReply):
        return act.message, act.finish_reason or ("tool_calls" if act.message.tool_calls else "stop")
    if isinstance(act, str):
        return AssistantMessage(content=act), "stop"
    calls = [_tool_call(step, f"call_{turn}_{index}") for index, step in enumerate(act)]
    return AssistantMessage(tool_calls=calls), "tool_calls"


def _tool_call(step: ToolStep, call_id: str) -> ToolCallMessage:
    arguments = msgspec.json.encode(dict(step.arguments)).decode()
    return ToolCallMessage(id=call_id, function=FunctionCall(name=step.name, arguments=arguments))


def _tokens(messages: Iterable[Message]) -> int:
    return -(-sum(_text_bytes(message) for message in messages) // BYTES_PER_TOKEN)


def _text_bytes(message: Message) -> int:
    texts = [message.get("content"), message.get("reasoning_content")]
    for call in message.get("tool_calls") or ():
        texts += [call["function"]["name"], call["function"]["arguments"]]
    return sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))
