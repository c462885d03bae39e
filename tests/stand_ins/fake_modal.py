"""A server with the part of Modal's API that sandboxes use. It runs the sandboxes' commands on this machine.

The real `modal` client talks to it. To point the client at the server, set the variables in `FakeModal.variables`, or
run `PYTHONPATH=tests python -m stand_ins.fake_modal`, which prints them. It listens on 127.0.0.1 and needs the extra
`modal`.

It covers apps, environments, images by name, secrets, and sandboxes of both protocol versions: create, exec, streams,
poll, wait, tags, list, terminate, and the lifetime and idle limits. Other calls are answered as unimplemented.
If root runs the server, each sandbox has its own process namespace, so no process outlives its sandbox. Sandboxes do
not protect this machine from their commands.

Sources: the message and service classes of the installed client (`modal_proto`).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from palaestra_slots.core.types import JSON

Router = task_command_router_pb2
T = TypeVar("T")

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PIECE = 128 << 10
_AHEAD_BYTES = 4 << 20  # of unread output
_BEHIND_BYTES = 16 << 20  # of output that may be read again after a broken connection
_TOKEN_S = 3600.0
_WATCH_S = 0.1
_BUILDER = "2025.06"

_PRIVATE = "/opt/palaestra"
"""This library keeps its tools in this directory. Sandboxes that root runs in this machine's root directory each get a
separate one."""

_INIT = f"""
[ -z "$1" ] || {{ mkdir -p {_PRIVATE} && mount -t tmpfs -o mode=755 palaestra {_PRIVATE}; }}
shift; echo ready; exec "$@" >/dev/null
"""

_FAILED = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
_SUCCEEDED = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
_TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
_TIMED_OUT = api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT


@dataclass
class Fault:
    """A fault in the next `times` calls of an RPC: a delay, followed by an error if there is a `status`.

    `retry_after_s` is the time that the server asks the client to wait; the client then retries by itself.
    """

    status: Status | None = None
    message: str = "injected"
    times: int = 1
    delay_s: float = 0.0
    retry_after_s: float | None = None


class _Listener(Server):
    """A server whose connections can be broken."""

    def __init__(self, services: Sequence[JSON]) -> None:
        super().__init__(services)
        self._protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        self._protocols.append(super()._protocol_factory())
        return self._protocols[-1]

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        listening = self._server  # the only way to learn the port that the kernel chose
        assert isinstance(listening, asyncio.Server)
        return int(listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close every connection, whatever is in progress."""
        self.close()
        for protocol in self._protocols:
            if hasattr(protocol, "connection"):  # only used connections have this attribute
                protocol.connection.close()
        await self.wait_closed()


class FakeModal:
    """The server, in its own thread. A context manager; `url` is its address.

    `roots` maps image names to root directories; other images use this machine's root directory. `missing` are images
    whose build fails. `secrets` maps the names of secrets to their variables. `quota` is the maximum number of running
    sandboxes. `calls` counts the RPCs. `sandboxes` has all sandboxes by id, including ended ones.
    """

    token = ("ak-palaestra", "as-palaestra")

    def __init__(
        self,
        *,
        roots: Mapping[str, Path] | None = None,
        missing: Sequence[str] = (),
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.roots, self.missing, self.secrets = dict(roots or {}), set(missing), dict(secrets or {})
        self.quota: int | None = None
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.calls: Counter[str] = Counter()
        self.frozen = False
        """While this is true, no call to a sandbox is answered, and no output from a sandbox arrives."""
        self._port = 0
        self._faults: dict[str, Fault] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._server: _Listener
        self._watching: asyncio.Task[None]
        self._handlers = _handlers(self)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which the client reaches the server."""
        token_id, token_secret = self.token
        return {"MODAL_SERVER_URL": self.url, "MODAL_TOKEN_ID": token_id, "MODAL_TOKEN_SECRET": token_secret}

    @property
    def running(self) -> list[FakeSandbox]:
        """The sandboxes that have not ended."""
        return [sandbox for sandbox in self.sandboxes.values() if sandbox.result is None]

    def __enter__(self) -> Self:
        ready = threading.Event()

        def serve() -> None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._listen())
            ready.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

        self._thread = threading.Thread(target=serve, name="fake-modal", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join()

    def fail(self, rpc: str, fault: Fault) -> None:
        """Inject a fault into the next calls of an RPC, for example `SandboxCreateV2`."""
        self._faults[rpc] = fault

    def end(self, sandbox_id: str) -> None:
        """End a sandbox as a crash of its host would."""
        self._run(self.sandboxes[sandbox_id].end(_FAILED, 1))

    def refuse(self) -> None:
        """Close every connection, and accept none until `accept`."""
        self._run(self._stop())

    def accept(self) -> None:
        """Listen again, at the same address."""
        self._run(self._listen())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        services = [_service(ModalClientBase, self), _service(TaskCommandRouterBase, self)]
        self._server = _Listener(services)
        await self._server.start("127.0.0.1", self._port)
        self._port = self._server.port
        self._watching = asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        self._watching.cancel()
        await self._server.stop()

    async def _close(self) -> None:
        await self._stop()
        await asyncio.gather(*(sandbox.end(_TERMINATED) for sandbox in self.sandboxes.values()))

    async def _watch(self) -> None:
        """End sandboxes at their limits."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for sandbox in self.running:
                if sandbox.is_late:
                    await sandbox.end(_TIMED_OUT)
                elif sandbox.is_idle:
                    await sandbox.end(_TERMINATED)

    async def serve(self, rpc: str, stream: Stream[Any, Any]) -> None:
        """Answer one call."""
        request = await stream.recv_message()
        self.calls[rpc] += 1
        self._authenticate(stream)
        await self._inject(rpc)
        handler = self._handlers.get(rpc)
        if handler is None or request is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the stand-in for Modal does not implement {rpc}")
        answer = handler(request)
        if isinstance(answer, AsyncIterator):
            async for piece in answer:
                await stream.send_message(piece)
        else:
            await stream.send_message(await answer)

    def _authenticate(self, stream: Stream[Any, Any]) -> None:
        assert stream.metadata is not None
        metadata = stream.metadata
        if "authorization" in metadata:  # a call to a sandbox, with the token that the client got with the address
            return
        if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != self.token:
            raise GRPCError(Status.UNAUTHENTICATED, "the token is not valid")

    async def _inject(self, rpc: str) -> None:
        fault = self._faults.get(rpc)
        if fault is None or fault.times <= 0:
            return
        fault.times -= 1
        await asyncio.sleep(fault.delay_s)
        if fault.status is not None:
            wait = fault.retry_after_s
            details = None if wait is None else [api_pb2.RPCRetryPolicy(retry_after_secs=wait)]
            raise GRPCError(fault.status, fault.message, details)


class _Workspace:
    """The apps, images and secrets of the account, and their calls. `images` maps the ids of built images to their
    names."""

    def __init__(self, missing: set[str], secrets: Mapping[str, Mapping[str, str]]) -> None:
        self.images: dict[str, str] = {}
        self._missing, self._secrets = missing, secrets
        self._apps: dict[str, str] = {}
        self._ephemeral: dict[str, dict[str, str]] = {}
        self._numbers = itertools.count(1)

    async def hello(self, request: empty_pb2.Empty) -> api_pb2.ClientHelloResponse:
        return api_pb2.ClientHelloResponse(image_builder_version=_BUILDER)

    async def auth_token(self, request: api_pb2.AuthTokenGetRequest) -> api_pb2.AuthTokenGetResponse:
        return api_pb2.AuthTokenGetResponse(token=_token())

    async def environment(
        self, request: api_pb2.EnvironmentGetOrCreateRequest
    ) -> api_pb2.EnvironmentGetOrCreateResponse:
        settings = api_pb2.EnvironmentSettings(image_builder_version=_BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def app(self, request: api_pb2.AppGetOrCreateRequest) -> api_pb2.AppGetOrCreateResponse:
        app_id = self._apps.setdefault(request.app_name, f"ap-{len(self._apps) + 1}")
        return api_pb2.AppGetOrCreateResponse(app_id=app_id)

    async def image(self, request: api_pb2.ImageGetOrCreateRequest) -> api_pb2.ImageGetOrCreateResponse:
        name = next((line[5:] for line in request.image.dockerfile_commands if line.startswith("FROM ")), "")
        image_id = f"im-{len(self.images) + 1}"
        if name in self._missing:
            result = api_pb2.GenericResult(status=_FAILED, exception=f"manifest for {name} not found")
            return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=result)
        self.images[image_id] = name
        metadata = api_pb2.ImageMetadata(image_builder_version=_BUILDER)
        result = api_pb2.GenericResult(status=_SUCCEEDED)
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=result, metadata=metadata)

    async def secret(self, request: api_pb2.SecretGetOrCreateRequest) -> api_pb2.SecretGetOrCreateResponse:
        name = request.deployment_name
        if request.env_dict:
            name = f"ephemeral-{next(self._numbers)}"
            self._ephemeral[name] = dict(request.env_dict)
        elif name not in self._secrets:
            raise GRPCError(Status.NOT_FOUND, f"secret {name!r} not found")
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name}")

    def variables_of(self, sources: Sequence[api_pb2.SecretSource], ids: Sequence[str] = ()) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in [*(api_pb2.SecretSource(secret_id=each) for each in ids), *sources]:
            name = source.secret_id.removeprefix("st-")
            found |= source.env.contents if not name else self._secrets.get(name) or self._ephemeral[name]
        return found


class _SandboxCalls:
    """The calls that create, list and end sandboxes. Sandboxes of the second version have ids that end with V."""

    def __init__(self, fake: FakeModal, workspace: _Workspace) -> None:
        self._fake, self._workspace = fake, workspace
        self._numbers = itertools.count(1)

    async def create_v2(self, request: api_pb2.SandboxCreateV2Request) -> api_pb2.SandboxCreateV2Response:
        sandbox = await self._create(request.app_id, request.definition, request.tags, request.secret_sources, "V")
        access = api_pb2.CommandRouterAccess(url=self._fake.url, jwt=_token())
        metadata = api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=sandbox.sandbox_id, task_id=sandbox.task_id, command_router_access=access, metadata=metadata
        )

    async def create_v1(self, request: api_pb2.SandboxCreateRequest) -> api_pb2.SandboxCreateResponse:
        sandbox = await self._create(request.app_id, request.definition, request.tags, (), "")
        return api_pb2.SandboxCreateResponse(sandbox_id=sandbox.sandbox_id)

    async def _create(
        self,
        app_id: str,
        definition: api_pb2.Sandbox,
        tags: Sequence[api_pb2.SandboxTag],
        sources: Sequence[api_pb2.SecretSource],
        suffix: str,
    ) -> FakeSandbox:
        if self._fake.quota is not None and len(self._fake.running) >= self._fake.quota:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"the workspace is limited to {self._fake.quota} sandboxes")
        number = f"{next(self._numbers):022d}"[len(suffix) :] + suffix
        # Ids of both versions have similar lengths; the client distinguishes them by their shape.
        name = f"{number}x{suffix}" if suffix else number
        image = self._workspace.images[definition.image_id]
        sandbox = FakeSandbox(
            sandbox_id=f"sb-{name}",
            task_id=f"ta-{name}",
            app_id=app_id,
            image=image,
            definition=definition,
            tags={tag.tag_name: tag.tag_value for tag in tags},
            variables=self._workspace.variables_of(sources, [] if sources else definition.secret_ids),
            root=self._fake.roots.get(image),
        )
        self._fake.sandboxes[sandbox.sandbox_id] = sandbox
        await sandbox.start()
        return sandbox

    def _sandbox(self, sandbox_id: str) -> FakeSandbox:
        if sandbox_id not in self._fake.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"sandbox {sandbox_id} not found")
        return self._fake.sandboxes[sandbox_id]

    async def task_id(self, request: api_pb2.SandboxGetTaskIdRequest) -> api_pb2.SandboxGetTaskIdResponse:
        sandbox = self._sandbox(request.sandbox_id)
        return api_pb2.SandboxGetTaskIdResponse(task_id=sandbox.task_id, task_result=sandbox.result)

    async def access_v2(
        self, request: api_pb2.SandboxGetCommandRouterAccessRequest
    ) -> api_pb2.SandboxGetCommandRouterAccessResponse:
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self._fake.url, jwt=_token())

    async def access_v1(
        self, request: api_pb2.TaskGetCommandRouterAccessRequest
    ) -> api_pb2.TaskGetCommandRouterAccessResponse:
        return api_pb2.TaskGetCommandRouterAccessResponse(url=self._fake.url, jwt=_token())

    async def wait(self, request: api_pb2.SandboxWaitRequest) -> api_pb2.SandboxWaitResponse:
        sandbox = self._sandbox(request.sandbox_id)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sandbox.ended.wait(), request.timeout)
        metadata = api_pb2.SandboxHandleMetadata(app_id=sandbox.app_id)
        return api_pb2.SandboxWaitResponse(result=sandbox.result, metadata=metadata)

    async def terminate(self, request: api_pb2.SandboxTerminateRequest) -> api_pb2.SandboxTerminateResponse:
        sandbox = self._sandbox(request.sandbox_id)
        existing = sandbox.result
        await sandbox.end(_TERMINATED)
        return api_pb2.SandboxTerminateResponse(existing_result=existing)

    async def set_tags(self, request: api_pb2.SandboxTagsSetRequest) -> empty_pb2.Empty:
        self._sandbox(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return empty_pb2.Empty()

    async def tags(self, request: api_pb2.SandboxTagsGetRequest) -> api_pb2.SandboxTagsGetResponse:
        return api_pb2.SandboxTagsGetResponse(tags=self._sandbox(request.sandbox_id).tag_list())

    async def listing(self, request: api_pb2.SandboxListRequest) -> api_pb2.SandboxListResponse:
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        found = [
            sandbox
            for sandbox in self._fake.sandboxes.values()
            if (sandbox.result is None or request.include_finished)
            and (not request.app_id or sandbox.app_id == request.app_id)
            and wanted <= set(sandbox.tags.items())
            and (not request.before_timestamp or sandbox.created_at < request.before_timestamp)
        ]
        return api_pb2.SandboxListResponse(
            sandboxes=[
                api_pb2.SandboxInfo(
                    id=each.sandbox_id, created_at=each.created_at, app_id=each.app_id, tags=each.tag_list(),
                    metadata=api_pb2.SandboxHandleMetadata(app_id=each.app_id),
                )
                for each in sorted(found, key=lambda each: -each.created_at)
            ]
        )  # fmt: skip


class _CommandRouter:
    """The calls that run commands in sandboxes, which Modal's command router answers."""

    def __init__(self, fake: FakeModal, workspace: _Workspace) -> None:
        self._fake, self._workspace = fake, workspace

    async def start(self, request: Router.TaskExecStartRequest) -> Router.TaskExecStartResponse:
        sandbox = await self._by_task(request.task_id)
        if request.exec_id not in sandbox.commands:
            variables = self._workspace.variables_of(request.secret_sources)
            await sandbox.run(
                request.exec_id, request.command_args, request.workdir, variables, request.timeout_secs or None
            )
        return Router.TaskExecStartResponse()

    async def read(self, request: Router.TaskExecStdioReadRequest) -> AsyncIterator[JSON]:
        command = (await self._by_task(request.task_id)).command(request.exec_id)
        is_error = request.file_descriptor == Router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        output = command.stderr if is_error else command.stdout
        async for piece in output.read(request.offset):
            await self._thaw()
            yield Router.TaskExecStdioReadResponse(data=piece)

    async def write(self, request: Router.TaskExecStdinWriteRequest) -> Router.TaskExecStdinWriteResponse:
        sandbox = await self._by_task(request.task_id)
        await sandbox.command(request.exec_id).write(request.offset, request.data, eof=request.eof)
        return Router.TaskExecStdinWriteResponse()

    async def poll(self, request: Router.TaskExecPollRequest) -> Router.TaskExecPollResponse:
        command = (await self._by_task(request.task_id)).command(request.exec_id)
        return Router.TaskExecPollResponse(**command.status())

    async def wait(self, request: Router.TaskExecWaitRequest) -> Router.TaskExecWaitResponse:
        command = (await self._by_task(request.task_id)).command(request.exec_id)
        await command.process.wait()
        return Router.TaskExecWaitResponse(**command.status())

    async def _by_task(self, task_id: str) -> FakeSandbox:
        await self._thaw()
        for sandbox in self._fake.sandboxes.values():
            if sandbox.task_id == task_id and sandbox.result is None:
                return sandbox
        raise GRPCError(Status.NOT_FOUND, f"task {task_id} has finished")

    async def _thaw(self) -> None:
        while self._fake.frozen:  # noqa: ASYNC110 - set by other threads
            await asyncio.sleep(0.05)


@dataclass
class FakeSandbox:
    """One sandbox: its definition and its processes."""

    sandbox_id: str
    task_id: str
    app_id: str
    image: str
    definition: api_pb2.Sandbox
    """The sandbox's `resources`, `timeout_secs`, `idle_timeout_secs` and `network_access`."""
    tags: dict[str, str]
    variables: dict[str, str]
    """The variables that all commands of the sandbox get from its secrets."""
    root: Path | None = None
    result: api_pb2.GenericResult | None = None
    created_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    commands: dict[str, _Command] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _active_at: float = field(default_factory=time.monotonic)
    _home: tempfile.TemporaryDirectory[str] | None = None
    _init: asyncio.subprocess.Process | None = None
    _ending: asyncio.Task[None] | None = None

    @property
    def is_late(self) -> bool:
        """Whether the sandbox's lifetime is over."""
        return time.time() > self.created_at + self.definition.timeout_secs

    @property
    def is_idle(self) -> bool:
        """Whether no command has run in the sandbox for its idle timeout."""
        if any(command.is_running for command in self.commands.values()):
            self._active_at = time.monotonic()
        limit = self.definition.idle_timeout_secs
        return limit > 0 and time.monotonic() > self._active_at + limit

    def tag_list(self) -> list[api_pb2.SandboxTag]:
        """Return the sandbox's tags as messages."""
        return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in self.tags.items()]

    def command(self, exec_id: str) -> _Command:
        """Return the command with an id that the client chose."""
        if exec_id not in self.commands:
            raise GRPCError(Status.NOT_FOUND, f"exec {exec_id} not found")
        return self.commands[exec_id]

    async def start(self) -> None:
        """Start the sandbox's first process, which is its command line if it has one."""
        self._home = tempfile.TemporaryDirectory(prefix="fake-modal-", ignore_cleanup_errors=True)
        main = list(self.definition.entrypoint_args) or ["sleep", "infinity"]
        isolate: list[str] = []
        private = ""
        if os.geteuid() == 0:
            # A shell reports when the namespaces can be entered; nothing else shows it.
            isolate = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
            isolate += [] if self.root is None else ["--root", str(self.root)]
            private = "" if self.root is not None else _PRIVATE
        self._init = await asyncio.create_subprocess_exec(
            *(*isolate, "sh", "-c", _INIT, "sh", private, *main),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment({}),
            cwd="/",
            start_new_session=True,
        )
        assert self._init.stdout is not None
        await self._init.stdout.readline()
        if self.definition.entrypoint_args:
            asyncio.create_task(self._end_with_main())  # noqa: RUF006 - it ends with the process

    async def _end_with_main(self) -> None:
        assert self._init is not None
        code = await self._init.wait()
        await self.end(_SUCCEEDED if code == 0 else _FAILED, code)

    async def run(
        self, exec_id: str, words: Sequence[str], cwd: str, variables: Mapping[str, str], timeout_s: float | None
    ) -> None:
        """Start a command in the sandbox."""
        enter: list[str] = []
        if os.geteuid() == 0:
            assert self._init is not None
            mine = f"/proc/{self._init.pid}/ns"
            enter = ["nsenter", f"--pid={mine}/pid_for_children", f"--mount={mine}/mnt"]
            enter += [] if self.root is None else ["chroot", str(self.root)]
        process = await asyncio.create_subprocess_exec(
            *(*enter, *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(variables),
            cwd=cwd or self.definition.workdir or "/",
            start_new_session=True,
        )
        self.commands[exec_id] = _Command(process, timeout_s)

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        own = {"PATH": _PATH, "HOME": "/root", "MODAL_SANDBOX_ID": self.sandbox_id}
        if self._home is not None and self.root is None:
            own["TMPDIR"] = self._home.name  # so that temporary files are removed with the sandbox
        return {**own, **self.variables, **variables}

    async def end(self, status: api_pb2.GenericResult.GenericStatus.ValueType, code: int = 137) -> None:
        """End the sandbox with all its processes. Idempotent. The sandbox ends even if the caller is cancelled."""
        if self._ending is None:
            self.result, self.ended_at = api_pb2.GenericResult(status=status, exitcode=code), time.time()
            self._ending = asyncio.create_task(self._finish())
        await asyncio.shield(self._ending)

    async def _finish(self) -> None:
        processes = [command.process for command in self.commands.values()]
        if self._init is not None:
            processes.append(self._init)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            await process.wait()
        if self._home is not None:
            self._home.cleanup()
        self.ended.set()


class _Command:
    """A running command and its streams."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float | None) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.stdout, self.stderr = _Output(process.stdout), _Output(process.stderr)
        self._written = 0
        self._writing = asyncio.Lock()
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._kill)

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def status(self) -> dict[str, int]:
        """Return the fields of a reply that report how the command ended, or none while it runs."""
        code = self.process.returncode
        if code is None:
            return {}
        return {"code": code} if code >= 0 else {"signal": -code}

    async def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Write input to the command, except for bytes that have already arrived: a client repeats a call that was not
        answered."""
        stdin = self.process.stdin
        assert stdin is not None
        async with self._writing:
            fresh = data[max(0, self._written - offset) :]
            self._written += len(fresh)
            with contextlib.suppress(ConnectionError):
                stdin.write(fresh)
                await stdin.drain()
                if eof:
                    stdin.close()

    def _kill(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class _Output:
    """A command's output. It is read at most `_AHEAD_BYTES` ahead of the client, and kept for a while so that the
    client can read it again."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._kept = bytearray()
        self._start = self._taken = 0
        self._ended = False
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        while piece := await self._stream.read(_PIECE):
            async with self._changed:
                self._kept += piece
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._start + len(self._kept) - self._taken < _AHEAD_BYTES)
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        """Yield the output from byte `offset` on."""
        while True:
            async with self._changed:
                while not self._ended and self._start + len(self._kept) <= offset:
                    await self._changed.wait()
                piece = bytes(self._kept[offset - self._start : offset - self._start + _PIECE])
                self._taken = max(self._taken, offset + len(piece))
                if self._taken - self._start > _BEHIND_BYTES:
                    del self._kept[: self._taken - self._start]
                    self._start = self._taken
                self._changed.notify_all()
            if not piece:
                return
            offset += len(piece)
            yield piece


Handler = Callable[[JSON], Awaitable[JSON] | AsyncIterator[JSON]]


def _handlers(fake: FakeModal) -> dict[str, Handler]:
    workspace = _Workspace(fake.missing, fake.secrets)
    sandboxes, router = _SandboxCalls(fake, workspace), _CommandRouter(fake, workspace)
    return {
        "ClientHello": workspace.hello,
        "AuthTokenGet": workspace.auth_token,
        "EnvironmentGetOrCreate": workspace.environment,
        "AppGetOrCreate": workspace.app,
        "ImageGetOrCreate": workspace.image,
        "SecretGetOrCreate": workspace.secret,
        "SandboxCreate": sandboxes.create_v1,
        "SandboxCreateV2": sandboxes.create_v2,
        "SandboxGetTaskId": sandboxes.task_id,
        "SandboxGetTaskIdV2": sandboxes.task_id,
        "TaskGetCommandRouterAccess": sandboxes.access_v1,
        "SandboxGetCommandRouterAccess": sandboxes.access_v2,
        "SandboxWait": sandboxes.wait,
        "SandboxWaitV2": sandboxes.wait,
        "SandboxTerminate": sandboxes.terminate,
        "SandboxTerminateV2": sandboxes.terminate,
        "SandboxTagsSet": sandboxes.set_tags,
        "SandboxTagsSetV2": sandboxes.set_tags,
        "SandboxTagsGet": sandboxes.tags,
        "SandboxTagsGetV2": sandboxes.tags,
        "SandboxList": sandboxes.listing,
        "SandboxListV2": sandboxes.listing,
        "TaskExecStart": router.start,
        "TaskExecStdioRead": router.read,
        "TaskExecStdinWrite": router.write,
        "TaskExecPoll": router.poll,
        "TaskExecWait": router.wait,
    }


def _service(base: type[Any], fake: FakeModal) -> JSON:
    """Return an instance of a service class whose methods all call the fake server."""

    def method(rpc: str) -> Callable[[object, Stream[Any, Any]], Awaitable[None]]:
        async def answer(self: object, stream: Stream[Any, Any]) -> None:
            await fake.serve(rpc, stream)

        return answer

    return type(base.__name__, (base,), {rpc: method(rpc) for rpc in base.__abstractmethods__})()


def _token() -> str:
    """Return a token that the client accepts: three parts, the second with its expiry time."""
    content = json.dumps({"exp": time.time() + _TOKEN_S}).encode()
    return f"e30.{base64.urlsafe_b64encode(content).decode().rstrip('=')}.{secrets.token_hex(4)}"


def main() -> None:
    """Serve until interrupted, and print the variables for the client."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    with FakeModal() as fake:
        for name, value in fake.variables.items():
            print(f"export {name}={value}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
