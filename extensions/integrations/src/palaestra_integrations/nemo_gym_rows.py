"""Runs rows of NeMo Gym as an environment: `palaestra run nemo-gym:ROWS.jsonl --env.resources URL`.

Each row becomes a task: the input of its `responses_create_params` is the prompt, and the functions there are tools.
The agent of Palaestra plays in the place of an agent server. Its tool calls go to the resources server at `resources`,
which keeps the state of each rollout under a cookie from `/seed_session`, and the server's `/verify` gives the reward.

The server is a process of yours, for example one that `ng_run` starts; rows only choose among its tools, by checked
names. What else a row asks of the model (a temperature, a forced tool, another form of output) is refused or named in a
warning, because a run has these settings itself.

Needs no package. Source: `SimpleAgent` and `SimpleResourcesServer` of NeMo Gym 0.4; `mask_sample` is that of 0.7.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from palaestra import (
    JSON,
    ConfigError,
    InfraError,
    Message,
    Score,
    Task,
    TaskError,
    Tool,
    ToolResult,
    ToolRun,
    ToolSchema,
    environment,
)
from palaestra_integrations.turns import prompt_length, response_items

_log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=20)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp"})
"""Paths of a resources server that are no tools."""

_CARRIED = frozenset({"input", "instructions", "tools", "tool_choice", "text"})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MOST_REPLY_BYTES = 64 << 20


def nemo_gym_form(name: str) -> Any:
    """Return the form of a file with rows. Its setting `resources` is the address of the resources server. Raises
    `ConfigError` if the file cannot be read."""
    file = Path(name).absolute()
    rows = _Rows(file)

    def tasks(resources: str) -> Iterator[Task]:
        rows.server = resources.rstrip("/")
        return rows.tasks()

    tasks.__name__ = re.sub(r"\W", "_", file.stem)
    tasks.__doc__ = f"The rows of {file.name}, with a resources server of NeMo Gym."
    form = environment(toolsets=())(tasks)
    form.reference = f"nemo-gym:{file}"
    form.tools.extend(rows.tools())

    @form.score
    async def nemo_gym_score(task: Task, rollout: Any) -> Score:
        return await rows.score(task, rollout.rollout_id, rollout.messages)

    return form


class _Rows:
    """The rows of one file, and the sessions of their rollouts at the resources server."""

    def __init__(self, file: Path) -> None:
        self.server = ""
        self._file = file
        self._sessions: dict[str, _Session] = {}
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the rows {file} cannot be read: {error}") from None
        self._rows = [self._parse_row(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _parse_row(self, number: int, line: str) -> dict[str, JSON]:
        try:
            row = json.loads(line)
            asked = row["responses_create_params"]
            if not isinstance(asked["input"], str | list) or not isinstance(asked.get("tools") or [], list):
                raise TypeError("its input or its tools have another type")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"line {number} of {self._file} is not a row of NeMo Gym with responses_create_params: {error!r:.200}"
            ) from None
        return dict(row)

    def tasks(self) -> Iterator[Task]:
        ignored: set[str] = set()
        for number, row in enumerate(self._rows):
            asked = row["responses_create_params"]
            if asked.get("tool_choice") not in (None, "auto"):
                raise TaskError(f"row {number} forces a tool (tool_choice), which cannot be carried over")
            if asked.get("text"):
                raise TaskError(f"row {number} asks for a form of output (text), which cannot be carried over")
            ignored |= {name for name, value in asked.items() if name not in _CARRIED and value is not None}
            yield Task(id=str(number), prompt=_input_messages(number, asked))
        if ignored:
            _log.warning("the rows set %s, which the settings of the run replace", ", ".join(sorted(ignored)))

    def tools(self) -> list[_ResourceTool]:
        """Return the tools of all rows, each different definition once. Raises `ConfigError` for one that is not a
        function of the server."""
        found: dict[str, _ResourceTool] = {}
        for number, row in enumerate(self._rows):
            for each in row["responses_create_params"].get("tools") or ():
                key = json.dumps(each, sort_keys=True)
                if key not in found:
                    found[key] = _ResourceTool(self, _schema(number, each))
                found[key].rows.add(str(number))
        return list(found.values())

    async def session(self, rollout_id: str, row: str) -> _Session:
        """Return the session of a rollout; the first call opens it."""
        session = self._sessions.setdefault(rollout_id, _Session(self.server))
        async with session.opening:
            if not session.opened:
                await session.post("seed_session", self._rows[int(row)])
                session.opened = True
        return session

    async def score(self, task: Task, rollout_id: str, messages: list[Message]) -> Score:
        """Return the reward that the server gives. Raises `InfraError` if the server masks the rollout or fails."""
        session = await self.session(rollout_id, task.id)
        self._sessions.pop(rollout_id, None)
        row = self._rows[int(task.id)]
        played = messages[prompt_length(task, messages) :]
        answer = await session.verified(row, _response(row, rollout_id, played))
        if answer.get("mask_sample"):
            why = answer.get("failure_reason") or answer.get("failure_kind") or "no reason"
            raise InfraError(f"the resources server masks this rollout: {why!s:.500}")
        reward = answer.get("reward")
        if not isinstance(reward, int | float):
            raise InfraError(f"the resources server at {self.server} gave no reward, but {reward!r:.100}")
        figures = {
            name: float(value)
            for name, value in answer.items()
            if isinstance(value, int | float) and name not in row and name != "reward"
        }
        return Score(float(reward), metrics=figures)


class _Session:
    """One rollout at the resources server, which knows it by its cookies."""

    def __init__(self, server: str) -> None:
        self.opening = asyncio.Lock()
        self.opened = False
        self._server = server
        self._cookies: dict[str, str] = {}

    async def post(self, path: str, body: JSON) -> tuple[int, str]:
        """Return the status and the text of the answer. Raises `InfraError` if the server cannot be reached, or fails
        at anything but a tool."""
        try:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as client,
                client.post(f"{self._server}/{path}", json=body, cookies=self._cookies, allow_redirects=False) as reply,
            ):
                data = bytearray()
                async for piece in reply.content.iter_chunked(1 << 16):
                    data += piece
                    if len(data) > _MOST_REPLY_BYTES:
                        raise ValueError(f"its answer is larger than {_MOST_REPLY_BYTES >> 20} MiB")
                text = data.decode("utf-8", "replace")
                self._cookies |= {name: morsel.value for name, morsel in reply.cookies.items()}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InfraError(
                f"the resources server does not answer at {self._server}/{path}: {error!r:.200}. Start it, and set "
                "--env.resources to its address"
            ) from error
        if path in _RESERVED and reply.status != 200:
            raise InfraError(f"{self._server}/{path} answered with HTTP {reply.status}: {text:.500}")
        return reply.status, text

    async def verified(self, row: Mapping[str, JSON], response: JSON) -> dict[str, JSON]:
        """Return the answer of `/verify`. Raises `InfraError`."""
        _, text = await self.post("verify", {**row, "response": response})
        try:
            found = json.loads(text)
            if isinstance(found, dict):
                return found
        except (ValueError, RecursionError):
            pass
        raise InfraError(f"{self._server}/verify answered with {text:.200!r}, which is not a JSON object")


class _ResourceTool(Tool):
    """A function of the resources server, for the rows that offer it."""

    def __init__(self, rows: _Rows, schema: ToolSchema) -> None:
        self._rows, self._schema = rows, schema
        self._row = ""
        self.rows: set[str] = set()

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    def for_task(self, task: Task) -> _ResourceTool | None:
        if task.id not in self.rows:
            return None
        own = _ResourceTool(self._rows, self._schema)
        own._row = task.id
        return own

    async def execute(self, **arguments: JSON) -> ToolResult:
        raise ConfigError(f"the tool {self.name} works only in a rollout")

    async def run(self, arguments: Mapping[str, JSON], run: ToolRun, /) -> str:
        """Return the body of the server's answer, whatever its status is, as the agent of NeMo Gym does."""
        session = await self._rows.session(run.task_id, self._row)
        _, text = await session.post(self.name, dict(arguments))
        return text


def _schema(number: int, definition: JSON) -> ToolSchema:
    try:
        kind, name = definition["type"], definition["name"]
        if kind != "function":
            raise ConfigError(f"row {number} offers a tool of type {kind!r:.50}, which cannot be carried over")
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(f"row {number} offers a tool {name!r:.100}, which is not the name of a function")
        return ToolSchema.from_dict({"function": definition})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"row {number} offers a tool that cannot be read: {error!r:.200}") from None


def _input_messages(number: int, asked: Mapping[str, JSON]) -> list[Message]:
    """Return the input of a request in OpenAI's chat format. Raises `TaskError` for anything but text."""
    given = [{"role": "user", "content": asked["input"]}] if isinstance(asked["input"], str) else asked["input"]
    found: list[Message] = []
    if asked.get("instructions"):
        found.append({"role": "system", "content": asked["instructions"]})
    for each in given:
        role = _ROLES.get(each.get("role", "")) if isinstance(each, dict) else None
        parts = each.get("content") if role is not None else None
        if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
            parts = "".join(str(part["text"]) for part in parts)
        if role is None or not isinstance(parts, str):
            raise TaskError(f"the input of row {number} is more than messages with text, which cannot be carried over")
        found.append({"role": role, "content": parts})
    return found


def _response(row: Mapping[str, JSON], name: str, messages: list[Message]) -> JSON:
    """Return what the agent did as an object of the Responses API."""
    numbers = count()
    played = [message for message in messages if message["role"] in ("assistant", "tool")]
    return {
        "id": f"resp_{name}",
        "created_at": time.time(),
        "model": "palaestra",
        "object": "response",
        "output": [item for message in played for item in response_items(message, f"{name}_{next(numbers)}")],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": row["responses_create_params"].get("tools") or [],
    }
