"""The service `process.Process` of a sandbox: commands and terminals, with their streams, input and signals.

The program, its arguments, variables and directory come from the caller and go to the slot, where they run as they
would from a shell of the sandbox; nothing of them is interpreted on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from palaestra_e2b.connect_protocol import flag_field, number_field, object_field, text_field
from palaestra_e2b.processes import HostedProcess, OutputFollower, ProcessRequest
from palaestra_e2b.sandbox_users import SandboxUser
from palaestra_e2b.sandboxes import HostedSandbox
from palaestra_e2b.templates import absolute
from palaestra_e2b.wire_errors import ApiError, RpcError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot, TerminalSize, is_variable

_MOST_ARGUMENTS, _MOST_ARGUMENT_BYTES = 4096, 1 << 20
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
_SHELLS = {"/bin/bash": "/bin/sh"}  # for images without bash

Message = dict[str, JSON]


async def start(
    sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message, timeout_s: float | None
) -> tuple[HostedProcess, OutputFollower]:
    """Start a process. Raises `RpcError` or OSError."""
    config = object_field(message, "process")
    argv, env = _argv(config), _variables(config)
    cwd = absolute(text_field(config, "cwd"), user.home) if config.get("cwd") else user.start
    tag = text_field(message, "tag") or None
    shown: Message = {"cmd": argv[0], "args": argv[1:], "envs": env} | ({"cwd": cwd} if config.get("cwd") else {})
    variables = {**sandbox.environment(user.name), "HOME": user.home, **env}
    stdin, terminal = flag_field(message, "stdin", True), _size(message)
    wanted = ProcessRequest(user.command(argv), cwd, variables, shown, tag, stdin, terminal, timeout_s)
    try:
        try:
            hosted = await sandbox.processes.start(slot, wanted)
        except FileNotFoundError as error:
            if argv[0] not in _SHELLS or await slot.stat(argv[0]) is not None or error.filename == cwd:
                raise
            command = user.command([_SHELLS[argv[0]], *argv[1:]])
            hosted = await sandbox.processes.start(slot, replace(wanted, argv=command))
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise RpcError("resource_exhausted", str(error.strerror)) from None
        if isinstance(error, FileNotFoundError | NotADirectoryError) and await slot.stat(cwd) is None:
            raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist") from None
        raise
    return hosted, hosted.follow()


def connect(sandbox: HostedSandbox, message: Message) -> tuple[HostedProcess, OutputFollower]:
    """Follow a running process from now on. Raises `RpcError`."""
    hosted = sandbox.processes.find(object_field(message, "process"))
    return hosted, hosted.follow()


async def events(
    hosted: HostedProcess, follower: OutputFollower, keepalive_s: float, is_gone: Callable[[], bool]
) -> AsyncIterator[Message]:
    """Yield the messages of a stream: the start, the output, and the end. Raises the error with which it ends."""
    yield {"event": {"start": {"pid": hosted.pid}}}
    quiet_s = 0.0
    while not is_gone():
        try:
            async with asyncio.timeout(1.0):
                message = await follower.messages.get()
        except TimeoutError:
            quiet_s += 1.0
            if quiet_s >= keepalive_s:
                quiet_s = 0.0
                yield {"event": {"keepalive": {}}}
            continue
        quiet_s = 0.0
        if message is None:
            return
        if isinstance(message, ApiError | RpcError):
            raise message
        yield {"event": message}
        if "end" in message:
            return


async def list_processes(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """List the running processes that callers have started."""
    found = [
        {"config": each.config, "pid": each.pid} | ({"tag": each.tag} if each.tag else {})
        for each in sandbox.processes.all()
    ]
    return {"processes": found}


async def send_input(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Write to a process's input."""
    hosted = sandbox.processes.find(object_field(message, "process"))
    await write_input(hosted, object_field(message, "input"))
    return {}


async def write_input(hosted: HostedProcess, given: Message) -> None:
    """Write the data of one input message. Raises `RpcError`."""
    kind = "pty" if hosted.terminal else "stdin"
    if kind not in given:
        raise RpcError("failed_precondition", f"the process takes its input as {kind!r}")
    try:
        data = base64.b64decode(given[kind], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise RpcError("invalid_argument", f"{kind} is not base64") from None
    try:
        await hosted.process.write(data)
    except BrokenPipeError:
        raise RpcError("failed_precondition", "the process has no open input") from None


async def stream_input(sandbox: HostedSandbox, messages: AsyncIterator[Message]) -> Message:
    """Write a stream of input, whose first message names the process."""
    hosted: HostedProcess | None = None
    async for message in messages:
        if "start" in message:
            hosted = sandbox.processes.find(object_field(object_field(message, "start"), "process"))
        elif "data" in message:
            if hosted is None:
                raise RpcError("invalid_argument", "the first message must name the process")
            await write_input(hosted, object_field(object_field(message, "data"), "input"))
    return {}


async def send_signal(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Send SIGTERM or SIGKILL."""
    hosted = sandbox.processes.find(object_field(message, "process"))
    signal = message.get("signal")
    await sandbox.processes.signal(hosted, _SIGNALS.get(signal, 0) if isinstance(signal, str | int) else 0)
    return {}


async def close_input(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """End the input of a process without a terminal."""
    hosted = sandbox.processes.find(object_field(message, "process"))
    if hosted.terminal:
        raise RpcError("failed_precondition", "the input of a terminal ends with the character 0x04; send that")
    await hosted.process.close_input()
    return {}


async def update(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Resize a terminal."""
    hosted = sandbox.processes.find(object_field(message, "process"))
    size = _size(message)
    if size is not None:
        if not hosted.terminal:
            raise RpcError("failed_precondition", "the process has no terminal")
        await hosted.process.resize(size)
    return {}


UNARY: dict[str, Callable[[HostedSandbox, Slot, SandboxUser, Message], Awaitable[Message]]] = {
    "List": list_processes, "SendInput": send_input, "SendSignal": send_signal, "CloseStdin": close_input,
    "Update": update,
}  # fmt: skip
"""Maps the names of the unary calls to their functions."""


def _argv(config: Message) -> list[str]:
    program, arguments = text_field(config, "cmd", required=True), config.get("args") or []
    if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
        raise RpcError("invalid_argument", "args must be a list of strings")
    argv = [program, *arguments]
    if len(argv) > _MOST_ARGUMENTS or sum(map(len, argv)) > _MOST_ARGUMENT_BYTES:
        raise RpcError("invalid_argument", f"the arguments are longer than {_MOST_ARGUMENT_BYTES} characters")
    for each in argv:
        _check_text(each, "an argument")
    return argv


def _variables(config: Message) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in object_field(config, "envs").items():
        if not isinstance(value, str) or not is_variable(name, value):
            raise RpcError("invalid_argument", f"{name[:100]!r} cannot be an environment variable")
        _check_text(name + value, "a variable")
        found[name] = value
    return found


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RpcError("invalid_argument", f"{what} is not valid Unicode") from None
    if "\0" in text:
        raise RpcError("invalid_argument", f"{what} holds a null character")


def _size(message: Message) -> TerminalSize | None:
    if message.get("pty") is None:
        return None
    size = object_field(object_field(message, "pty"), "size")
    rows, columns = number_field(size, "rows") or 24, number_field(size, "cols") or 80
    if rows > 1000 or columns > 1000:
        raise RpcError("invalid_argument", "a terminal can have 1 to 1000 rows and columns")
    return TerminalSize(rows, columns)
