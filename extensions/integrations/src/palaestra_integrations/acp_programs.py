"""Lets agents that speak the Agent Client Protocol play our rollouts: `palaestra run ENV --agent "acp:COMMAND"`.

The command is started in the slot with the model's variables, and this process is its client. The command's first word
may name a known program, which is then installed and configured as usual: `acp:opencode acp`. The environment's tools
are an MCP server of the session. The agent reads, writes and acts in the slot: no path that it names is one of this
machine.

An agent that breaks the protocol, ends early or prints something else has failed; its work is graded.

Needs the package `agent-client-protocol`. Source: version 1 of the protocol, and `Connection` of the SDK 0.12.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from acp import PROTOCOL_VERSION, ReadTextFileRequest, RequestError, WriteTextFileRequest
from acp.connection import Connection
from pydantic import ValidationError

from palaestra import JSON, AgentAssignment, ConfigError, HostedAgent, InfraError, Slot, program_named
from palaestra import __version__ as version
from palaestra_slots import Mount

START_S = 120.0
"""How long an agent may take to answer `initialize`."""

CANCEL_S = 1.5
"""How long an agent may take to end its turn, and to end itself, once it is told to."""

MESSAGE_BYTES = 16 << 20
"""The longest message that is read from an agent, and the largest file that is read for it."""

_REQUESTS = 4  # of the agent that are answered at the same time
_SHOWN = 500  # characters of a line of the log
_SERVER = "environment"


class AcpError(Exception):
    """The agent broke the protocol or ended early."""


def acp_program(command: str) -> AcpProgram:
    """Return the agent with this command, which the slot's shell runs in the workspace. Raises `ConfigError`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the agent acp:{command} is not a valid command line: {error}") from None
    if not words:
        raise ConfigError("acp: needs the command that starts the agent, as in --agent 'acp:opencode acp'")
    return AcpProgram(command, words)


class AcpProgram(HostedAgent):
    """An agent in the slot that is spoken to over its standard input and output."""

    def __init__(self, command: str, words: Sequence[str]) -> None:
        self._command, self._arguments = command, words[1:]
        program = program_named(shlex.quote(words[0]))
        if isinstance(program, HostedAgent):
            raise ConfigError(f"acp: needs the command that starts the agent; {words[0]} is no program")
        self._program = program

    @property
    def name(self) -> str:
        return f"acp:{self._program.name}"

    async def install(self) -> Sequence[Mount]:
        """Install a known program. Raises `ConfigError`."""
        return await self._program.install()

    async def work(
        self, slot: Slot, here: AgentAssignment, in_slot: AgentAssignment, log: Callable[[bytes], None]
    ) -> None:
        """Start the agent in the slot and let it play one turn. Raises `AcpError` if it fails, and `ConfigError` if it
        cannot call the environment's tools."""
        launch = self._program.launch(replace(in_slot, tools_url=""))  # the session has the tools
        known = None if isinstance(launch.command, str) else [launch.command[0], *self._arguments]
        prompt_file = launch.env["PALAESTRA_PROMPT_FILE"]
        for path, text in {prompt_file: in_slot.prompt, **launch.files}.items():
            await slot.write_text(path, text)
        process = await slot.spawn(known or self._command, env=launch.env, stderr=True, hold=True)
        client = _Client(slot, _Pipe(process), _Lines(log))
        told = asyncio.create_task(_followed(process, log))
        try:
            await client.turn(in_slot)
            with contextlib.suppress(BrokenPipeError, ProcessLookupError):
                await process.close_input()
            await process.wait(CANCEL_S)
        finally:
            with contextlib.suppress(InfraError, OSError):
                await process.kill()
                await asyncio.wait([told], timeout=CANCEL_S)
            told.cancel()


async def _followed(process: Any, log: Callable[[bytes], None]) -> None:
    with contextlib.suppress(InfraError, OSError):
        async for piece in process.output(stderr=True):
            log(piece.data)


class _Pipe:
    """The messages to and from a process of the slot, as the SDK's connection wants them. After `receive` has returned
    None, `problem` says why, or `lost` is the failure of the slot."""

    def __init__(self, process: Any) -> None:
        self.problem = ""
        self.lost: InfraError | None = None
        self._process = process
        self._output = process.output()
        self._rest = bytearray()
        self._writing = asyncio.Lock()
        self._places = asyncio.Semaphore(_REQUESTS)

    async def send(self, message: dict[str, Any]) -> None:
        """Write one message. A question raises ConnectionError if the agent has ended; an answer is then lost."""
        answer = "method" not in message
        try:
            async with self._writing:
                await self._process.write(json.dumps(message).encode() + b"\n")
        except InfraError as error:
            self.lost = error
            if not answer:
                raise
        except OSError:
            if not answer:
                raise
        finally:
            if answer:
                self._places.release()

    async def receive(self) -> dict[str, Any] | None:
        """Return the agent's next message; None at its end, or if it sends something else."""
        try:
            while (line := await self._read_line()) is not None:
                if not line.strip():
                    continue
                message = _parse_message(line)
                if "method" in message and "id" in message:
                    await self._places.acquire()  # an agent that asks faster than it is answered waits
                return message
            code = (await self._process.wait()).exit_code
            self.problem = f"the agent ended with exit status {code} before the end of its turn"
        except InfraError as error:
            self.lost = error
        except AcpError as error:
            self.problem = str(error)
        return None

    async def _read_line(self) -> bytes | None:
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            if searched > MESSAGE_BYTES:
                raise AcpError(f"the agent sent a message of more than {MESSAGE_BYTES >> 20} MiB")
            piece = await anext(self._output, None)
            if piece is None:
                return None
            self._rest += piece.data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    async def close(self) -> None:
        """The owner of the process ends it."""


def _takes_http(agent: dict[str, Any]) -> bool:
    capabilities = agent.get("agentCapabilities")
    servers = capabilities.get("mcpCapabilities") if isinstance(capabilities, dict) else None
    return isinstance(servers, dict) and servers.get("http") is True


def _parse_message(line: bytes) -> dict[str, Any]:
    """Return the message on a line. Raises `AcpError`."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("method", ""), str)
        or not isinstance(message.get("id"), int | str | None)
        or not isinstance(message.get("error") or {}, dict)
    ):
        shown = line[:200].decode(errors="replace")
        raise AcpError(f"the agent printed something that is no message of the protocol: {shown!r}")
    return message


class _Lines:
    """The lines of the log: what the agent says and does."""

    def __init__(self, log: Callable[[bytes], None]) -> None:
        self._log = log
        self._kind = ""

    def add(self, kind: str, text: str) -> None:
        """Log a line. The pieces of one message continue its line."""
        text = text[:_SHOWN]
        if kind != self._kind or kind not in ("says", "thinks"):
            text = f"\n[{kind}] {text}"
        self._kind = kind
        self._log(text.encode(errors="replace"))

    def update(self, update: JSON) -> None:
        """Log what the agent reports; kinds of reports that say nothing about its work are left out."""
        if not isinstance(update, dict):
            return
        kind, content = update.get("sessionUpdate"), update.get("content")
        if kind in ("agent_message_chunk", "agent_thought_chunk") and isinstance(content, dict):
            self.add(
                "says" if kind == "agent_message_chunk" else "thinks", str(content.get("text", content.get("type")))
            )
        elif kind in ("tool_call", "tool_call_update"):
            told = (update.get(each) for each in ("toolCallId", "title", "status"))
            self.add("tool", " ".join(str(each) for each in told if each))


class _Client:
    """Our side of one session."""

    def __init__(self, slot: Slot, pipe: _Pipe, lines: _Lines) -> None:
        self._slot, self._pipe, self._lines = slot, pipe, lines
        self._connection = Connection(self._answered, pipe)
        self._cancelled = False

    async def turn(self, assignment: AgentAssignment) -> None:
        """Open a session and let the agent work until the end of its turn. A cancelled turn is cancelled in the session
        first. Raises `AcpError`, `ConfigError`, or the failure of the slot."""
        try:
            session = await self._start_session(assignment)
            text = {"type": "text", "text": assignment.prompt}
            prompt = asyncio.create_task(self._send_request("session/prompt", {"sessionId": session, "prompt": [text]}))
            try:
                done = await asyncio.shield(prompt)
            except asyncio.CancelledError:
                await self._cancel(session, prompt)
                raise
            finally:
                prompt.cancel()
            self._lines.add("end of turn", f"{done.get('stopReason')}\n")
        finally:
            await self._connection.close()

    async def _start_session(self, assignment: AgentAssignment) -> str:
        about = {
            "protocolVersion": PROTOCOL_VERSION,
            "clientCapabilities": {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": False},
            "clientInfo": {"name": "palaestra", "version": version},
        }
        try:
            async with asyncio.timeout(START_S):
                agent = await self._send_request("initialize", about)
        except TimeoutError:
            raise AcpError(f"the agent did not answer `initialize` within {START_S:g} s") from None
        if agent.get("protocolVersion") != PROTOCOL_VERSION:
            raise AcpError(
                f"the agent speaks version {agent.get('protocolVersion')!r:.50} of the protocol, not {PROTOCOL_VERSION}"
            )
        servers: list[JSON] = []
        if assignment.tools_url:
            if not _takes_http(agent):
                raise ConfigError(
                    "the environment has tools, but the agent does not take MCP servers over HTTP (the capability "
                    "mcpCapabilities.http): use another agent, or an environment without tools of its own"
                )
            headers = [{"name": name, "value": value} for name, value in assignment.headers.items()]
            servers = [{"type": "http", "name": _SERVER, "url": assignment.tools_url, "headers": headers}]
        opened = await self._send_request("session/new", {"cwd": self._slot.workspace_dir, "mcpServers": servers})
        session = opened.get("sessionId")
        if not isinstance(session, str):
            raise AcpError("the agent's answer to `session/new` names no session")
        return session

    async def _send_request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the agent's answer. Raises `AcpError`, or the failure of the slot."""
        try:
            answer = await self._connection.send_request(method, params)
        except RequestError as error:
            detail = f" ({json.dumps(error.data)[:_SHOWN]})" if error.data else ""
            raise AcpError(f"the agent refused `{method}`: {str(error)[:_SHOWN]}{detail}") from None
        except ConnectionError as error:
            if isinstance(error, InfraError):
                raise
            if self._pipe.lost is not None:
                raise self._pipe.lost from None
            raise AcpError(
                self._pipe.problem or f"the agent closed its input before the answer to `{method}`"
            ) from None
        if not isinstance(answer, dict):
            raise AcpError(f"the agent's answer to `{method}` is not an object")
        return answer

    async def _cancel(self, session: str, prompt: asyncio.Task[Any]) -> None:
        self._cancelled = True
        with contextlib.suppress(InfraError, OSError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._connection.send_notification("session/cancel", {"sessionId": session})
        await asyncio.wait([prompt], timeout=CANCEL_S)
        if prompt.done() and not prompt.cancelled():
            prompt.exception()  # it is retrieved: the rollout's limit is the reason of the end

    async def _answered(self, method: str, params: Any, notification: bool) -> Any:
        """Answer the agent. A failure of the slot ends the turn."""
        params = params if isinstance(params, dict) else {}
        if notification:
            if method == "session/update":
                self._lines.update(params.get("update"))
            return None
        try:
            match method:
                case "session/request_permission":
                    return {"outcome": self._permission(params)}
                case "fs/read_text_file":
                    return {"content": await self._read_text_file(ReadTextFileRequest.model_validate(params))}
                case "fs/write_text_file":
                    return await self._write_text_file(WriteTextFileRequest.model_validate(params))
        except InfraError as error:
            self._pipe.lost = error
            raise RequestError.internal_error() from None
        except ValidationError as error:
            raise RequestError.invalid_params({"details": str(error)[:_SHOWN]}) from None
        except FileNotFoundError:
            raise RequestError.resource_not_found(str(params.get("path"))[:_SHOWN]) from None
        except (OSError, ValueError) as error:
            raise RequestError.invalid_params({"details": str(error)[:_SHOWN]}) from None
        raise RequestError.method_not_found(method[:_SHOWN])

    def _permission(self, params: dict[str, Any]) -> dict[str, str]:
        """Allow it, because the slot is the wall; once, where the agent offers that."""
        offered = params.get("options")
        options = [each for each in offered if isinstance(each, dict)] if isinstance(offered, list) else []
        for kind in () if self._cancelled else ("allow_once", "allow_always"):
            for option in options:
                if option.get("kind") == kind and isinstance(option.get("optionId"), str):
                    call = params.get("toolCall")
                    title = call.get("title") or call.get("toolCallId") if isinstance(call, dict) else ""
                    self._lines.add("permission", f"{title}: {kind}")
                    return {"outcome": "selected", "optionId": option["optionId"]}
        return {"outcome": "cancelled"}

    async def _read_text_file(self, request: ReadTextFileRequest) -> str:
        self._lines.add("reads", request.path)
        text = (await self._slot.read_bytes(request.path, max_bytes=MESSAGE_BYTES)).decode(errors="replace")
        if request.line is None and request.limit is None:
            return text
        first = max((request.line or 1) - 1, 0)
        lines = text.splitlines(keepends=True)[first:]
        return "".join(lines if request.limit is None else lines[: request.limit])

    async def _write_text_file(self, request: WriteTextFileRequest) -> dict[str, JSON]:
        self._lines.add("writes", request.path)
        await self._slot.write_text(request.path, request.content)
        return {}
