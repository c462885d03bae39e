"""Serves slots behind a network port, over HTTP with a token, for platforms that offer no stream to a process in a
sandbox.

    POST /stream?rung=LEVEL    with `Upgrade: palaestra-slots`: 101, then the frames of `slotd/protocol/frames.py`
    PUT  /server               200; the files are already here
    GET  /health               the number of numbered slots, and the number of open streams
    GET  /slots                the state of each numbered slot
    POST /execute /batch /reset /artifacts/read|list|archive      calls in the numbered slots `slot_0`, `slot_1`, …

Each stream has its own slot server, which ends with the stream. Streams therefore share no slots, and no stream's slot
server runs after the last stream has ended. The routes for numbered slots serve clients that were written for Atropos
and Hermes. A numbered slot is made by its first call, with the network that this call allows, and ends with `/reset`. A
later call that forbids the network is refused if the slot has the network on.

Every request needs `Authorization: Bearer TOKEN`, which is checked before the body is read. A connection made by a user
of a slot is closed whatever it sends, because slots with the network on share this host's network. The module uses only
the standard library and our own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import JSON, Network
from palaestra_slots.sandbox import artifact_files
from palaestra_slots.sandbox.local.client import SlotClient
from palaestra_slots.sandbox.server_backend import ServerBackend, allowed_hosts, environment
from palaestra_slots.sandbox.slot import ExecutionResult, Rung, Shell, Slot, SlotSpec
from palaestra_slots.sandbox.slot_tools import run_slot_tool, tool_result
from palaestra_slots.sandbox.slotd import syscalls
from palaestra_slots.sandbox.terminal.pane import Pane

UPGRADE = "palaestra-slots"
MAX_HEAD, MAX_BODY = 64 << 10, 64 << 20
HEAD_S, BODY_S, MAX_UNKNOWN = 60.0, 60.0, 256
"""`HEAD_S`: the seconds in which the head of a connection's next request must arrive. `BODY_S`: the seconds in which a
request's body must arrive. `MAX_UNKNOWN`: the maximum number of connections that have not sent the token; if there are
more, the oldest of them is closed."""
MAX_OUTPUT_BYTES = 50_000
"""The maximum number of bytes of output that one call in a numbered slot returns."""
FIRST_SLOT_UID = 65536
"""The lowest uid of the users of slots; callers have lower uids."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
_SILENT_MS = 40_000

_SLOTD = Path(syscalls.__file__).parent


class Refused(Exception):
    """A request cannot be served; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request. The body is read only after the token has been checked."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    def json(self) -> JSON:
        """Return the decoded JSON body. Raises `Refused` if the body is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None


def keep_alive(stream: socket.socket) -> None:
    """Let the kernel end a connection whose other side is gone, and send small frames without delay."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)


class Here(ServerBackend):
    """The slot server of the numbered slots."""

    name = "port"

    async def _start_server(self, rung: Rung) -> None:
        settings = {"prefix": "", "first_epoch": self._last_epoch + 1}
        self._server = await SlotClient.start(rung.label, settings, self._on_lost)

    async def _place(self, spec: SlotSpec) -> dict[str, JSON]:
        return {"image": None, "allow": allowed_hosts(spec), "mounts": [], "env": environment(spec)}


@dataclass
class Numbered:
    """A slot that clients address by number."""

    slot_id: str
    slot: Slot | None = None
    network: bool = False
    shell: Shell | None = None
    pane: Pane = field(default_factory=Pane)
    execution_id: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PortServer:
    """Serves one listening socket."""

    def __init__(self, token: str, slots: int) -> None:
        self._token = token.encode()
        self._backend = Here()
        self._slots = {f"slot_{number}": Numbered(f"slot_{number}") for number in range(slots)}
        self._streams = 0
        self._unknown: dict[asyncio.StreamWriter, None] = {}  # connections that have not sent the token, oldest first
        self._left = time.monotonic()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._on_connection, sock=listener, limit=MAX_HEAD)
        async with server:
            await server.serve_forever()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unknown[writer] = None
        if len(self._unknown) > MAX_UNKNOWN:  # clients with the token send it immediately
            next(iter(self._unknown)).transport.abort()
        try:
            if is_of_a_slot(writer.get_extra_info("peername"), writer.get_extra_info("sockname")):
                return
            while (request := await _read_head(reader)) is not None:
                if await self._answer(request, reader, writer):
                    return
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # no valid request has come
        finally:
            self._unknown.pop(writer, None)
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Return True if the connection cannot be used for another request."""
        known = False
        try:
            sent = request.headers.get("authorization", "").encode()
            known = hmac.compare_digest(sent, b"Bearer " + self._token)
            if not known:
                raise Refused(401, "the token is missing or wrong")
            self._unknown.pop(writer, None)
            request = replace(request, body=await _read_body(reader, request))
            if request.path == "/stream":
                await self._stream(request, writer)
                return True
            status, reply = 200, await self._route(request)
        except Refused as refused:
            status, reply = refused.status, {"success": False, "error": str(refused)}
        except InfraError as error:
            status, reply = 503, {"success": False, "error": f"{type(error).__name__}: {error}"}
        body = json.dumps(reply).encode()
        ends = not known or request.headers.get("connection", "").lower() == "close"
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n" if ends else ""
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return ends

    async def _route(self, request: Request) -> JSON:
        match request.method, request.path:
            case "PUT", "/server":
                return {"status": "ok"}
            case "GET", "/health":
                return self._health_status()
            case "GET", "/slots":
                return {"slots": [_slot_fields(each) for each in self._slots.values()]}
            case "POST", "/execute":
                return await self._execute(request.json())
            case "POST", "/batch":
                calls = request.json()
                if not isinstance(calls, list):
                    raise Refused(400, "the body of /batch must be a list of calls")
                return list(await asyncio.gather(*(self._one_of_many(call) for call in calls)))
            case "POST", "/reset":
                return await self._reset(self._numbered(request.json()))
            case "POST", "/artifacts/read":
                return await self._artifact(
                    request.json(), artifact_files.read, "path", "encoding", "max_bytes", "include_sha256"
                )
            case "POST", "/artifacts/list":
                return await self._artifact(request.json(), artifact_files.entries, "path", "recursive", "max_entries")
            case "POST", "/artifacts/archive":
                return await self._artifact(
                    request.json(), artifact_files.archive, "path", "format", "max_bytes", "max_entries"
                )
        raise Refused(404, f"there is no {request.method} {request.path}")

    # Streams

    async def _stream(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Hand the connection to a new slot server."""
        rung = request.query.get("rung", "")
        if rung not in {each.label for each in Rung} or request.headers.get("upgrade") != UPGRADE:
            raise Refused(400, f"/stream needs rung=LEVEL and Upgrade: {UPGRADE}")
        writer.write(f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode())
        await writer.drain()
        stream = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        writer.transport.abort()  # closes asyncio's descriptor of the connection; ours keeps it open
        with stream:
            stream.setblocking(True)
            keep_alive(stream)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SLOTD), str(stream.fileno()), rung),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                env={}, cwd="/", pass_fds=[stream.fileno()], start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._streams += 1
        task = asyncio.create_task(self._watch(process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._streams -= 1
        self._left = time.monotonic()

    # The routes for numbered slots

    def _health_status(self) -> JSON:
        executing = sum(each.lock.locked() for each in self._slots.values())
        return {
            "status": "ok",
            "slots": len(self._slots),
            "available": len(self._slots) - executing,
            "executing": executing,
            "data_dir": "",
            "bwrap_available": False,
            "stateful_dir": "",
            "streams": self._streams,
            "unattended_s": 0.0 if self._streams else round(time.monotonic() - self._left, 1),
        }

    def _numbered(self, body: JSON) -> Numbered:
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        found = self._slots.get(str(body.get("slot_id")))
        if found is None:
            raise Refused(404, f"there is no slot {body.get('slot_id')!r}")
        return found

    async def _one_of_many(self, call: JSON) -> JSON:
        try:
            return await self._execute(call)
        except (Refused, InfraError) as error:  # `_execute` refuses other mistakes in a call
            return _result(call if isinstance(call, dict) else {}, False, "", str(error), {})

    async def _execute(self, call: JSON) -> JSON:
        numbered = self._numbered(call)
        args = call.get("args") or {}
        if not isinstance(args, dict):
            raise Refused(400, "args must be an object")
        limit_s = _seconds(call.get("timeout") or 30.0)
        async with numbered.lock:
            numbered.execution_id = str(call.get("execution_id") or "") or None
            try:
                slot = await self._started_slot(numbered, bool(args.get("allow_network", True)))
                needs = any(args.get(name) for name in ("require_sandbox", "require_stateful_sandbox"))
                if needs and slot.rung < Rung.CONFINED:
                    return _result(call, False, "", "no isolation is available here", {"requires_bwrap": True})
                done = await self._run_tool(numbered, slot, str(call.get("tool")), args, limit_s)
                return _result(call, done.success, done.output.strip(), done.error, dict(done.metadata))
            finally:
                numbered.execution_id = None

    async def _run_tool(
        self, numbered: Numbered, slot: Slot, tool: str, args: Mapping[str, JSON], limit_s: float
    ) -> ExecutionResult:
        if tool != "tmux":
            shell = partial(self._shell, numbered, slot)
            return await run_slot_tool(slot, shell, tool, args, limit_s, max_output_bytes=MAX_OUTPUT_BYTES)
        try:
            async with asyncio.timeout(limit_s):
                return await numbered.pane.run(slot, args)
        except TimeoutError:
            return tool_result(error=f"The call timed out after {limit_s:g}s")

    async def _started_slot(self, numbered: Numbered, network: bool) -> Slot:
        if numbered.slot is None:
            async with self._starting:
                await self._backend.start()
            spec = SlotSpec(network=Network.ON if network else Network.OFF)
            numbered.slot, numbered.network = await self._backend.create(spec, numbered.slot_id), network
        if numbered.network and not network:
            raise Refused(409, f"{numbered.slot_id} has the network on, but the call forbids it: reset the slot first")
        return numbered.slot

    async def _shell(self, numbered: Numbered, slot: Slot) -> Shell:
        if numbered.shell is None:
            numbered.shell = await slot.shell()
        return numbered.shell

    async def _reset(self, numbered: Numbered) -> JSON:
        async with numbered.lock:
            slot, numbered.slot, numbered.shell, numbered.pane = numbered.slot, None, None, Pane()
            if slot is not None:
                await self._backend.destroy(slot)
        return {"success": True, "slot_id": numbered.slot_id}

    async def _artifact(self, body: JSON, work: Callable[..., Awaitable[JSON]], *names: str) -> JSON:
        numbered = self._numbered(body)
        if numbered.slot is None:
            raise Refused(404, f"{numbered.slot_id} has no workspace: no call has run in it yet, or it was reset")
        try:
            return await work(numbered.slot, **{name: body[name] for name in names if body.get(name) is not None})
        except InfraError:
            raise
        except (OSError, ValueError, TypeError) as error:
            known = error if isinstance(error, OSError | ValueError) else ValueError(str(error))
            raise Refused(artifact_files.status_of(known), artifact_files.message(known)) from None


def _die_with_parent() -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 409: "Conflict",
    413: "Content Too Large", 503: "Service Unavailable",
}  # fmt: skip


async def _read_head(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request of a connection, without its body; None at the end of the connection. Raises ValueError
    for an invalid request, and `TimeoutError`."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    url = urllib.parse.urlsplit(target)
    return Request(method, url.path, dict(urllib.parse.parse_qsl(url.query)), headers)


async def _read_body(reader: asyncio.StreamReader, request: Request) -> bytes:
    """Return the body of a request. Raises ValueError if the body's size is invalid or too large, and
    `TimeoutError`."""
    size = int(request.headers.get("content-length", "0"))
    if not 0 <= size <= MAX_BODY:
        raise ValueError("the body is too large")
    async with asyncio.timeout(BODY_S):
        return await reader.readexactly(size)


def _result(call: Mapping[str, JSON], success: bool, output: str, error: str, metadata: dict[str, JSON]) -> JSON:
    execution_id = str(call.get("execution_id") or "")
    return {
        "success": success, "output": output, "error": error, "execution_id": execution_id, "metadata": metadata,
    }  # fmt: skip


def _seconds(value: JSON) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise Refused(400, f"timeout must be a positive number of seconds, not {value!r:.100}")
    return seconds


def _slot_fields(each: Numbered) -> JSON:
    return {
        "slot_id": each.slot_id,
        "state": "executing" if each.lock.locked() else "available",
        "workspace_dir": "" if each.slot is None else each.slot.workspace_dir,
        "current_execution_id": each.execution_id,
    }


def is_of_a_slot(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """Return whether a user of a slot on this host made the connection, according to the kernel's list of sockets. If
    the other side has already closed its socket, the result is True. Source: proc(5), net/tcp."""
    wanted = _hexadecimal(peer), _hexadecimal(here)
    with contextlib.suppress(OSError), open("/proc/net/tcp") as table:
        for line in table:
            words = line.split()
            if (words[1], words[2]) == wanted:  # a closed socket has no inode, and no longer shows its user
                return int(words[7]) >= FIRST_SLOT_UID or words[9] == "0"
    return False  # the connection is not from this host


def _hexadecimal(address: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"


def main(arguments: Sequence[str]) -> int:
    """Run `port_server FOLDER LISTENER TOKEN_FD SLOTS`."""
    folder, listener, token, slots = arguments
    with os.fdopen(int(token)) as source:
        server = PortServer(source.read(), int(slots))
    stream = socket.socket(fileno=int(listener))
    stream.setblocking(False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(server.serve(stream))
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
