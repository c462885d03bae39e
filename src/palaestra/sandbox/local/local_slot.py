"""Text files of a slot, over its bytes: the same for every kind of slot.

Reading replaces what is no UTF-8 and writing takes any text that a model may write: neither raises for its content.

A leased slot of the local backend: the `Slot` that everything above this layer works with.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import overload

from palaestra.core.errors import InfraError, TaskError
from palaestra.core.types import JSON, AllowList
from palaestra.sandbox.local.client import SlotServer
from palaestra.sandbox.local.direct.commands import Line, NoRoom
from palaestra.sandbox.local.direct.files import AskServer, Reach
from palaestra.sandbox.local.lease import MAX_OUTPUT_BYTES, Lease, limit, program, require
from palaestra.sandbox.local.process import LocalProcess
from palaestra.sandbox.local.requests import CommandNotStarted, Reply
from palaestra.sandbox.local.shell import LocalShell
from palaestra.sandbox.slot import (
    DEFAULT_OUTPUT_BYTES,
    MAX_FILE_BYTES,
    WORKSPACE,
    Change,
    ExecutionResult,
    FileInfo,
    Rung,
    Slot,
    SlotSpec,
    TerminalSize,
)
from palaestra.sandbox.slotd.network.allowlist import PROXY_PORT


class TextFiles(ABC):
    """`read_text` and `write_text` of a slot that has `read_bytes` and `write_bytes`."""

    __slots__ = ()

    @abstractmethod
    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes: ...

    @abstractmethod
    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None: ...

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced; `missing`, if given, where there is no file to be read."""
        try:
            return (await self.read_bytes(path)).decode(errors="replace")
        except OSError as error:
            if missing is None or isinstance(error, InfraError):
                raise
            return missing

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None:
        """Write as UTF-8; surrogates, which have no place in it, are written as the bytes they stand for."""
        try:
            data = text.encode(errors="surrogateescape")
        except UnicodeEncodeError:  # lone surrogates, as models write them in JSON
            data = text.encode(errors="surrogatepass")
        await self.write_bytes(path, data, mode=mode)


SHELL_FILES = 107
"""What a shell takes to start: descriptors up to 99, and one beside each of its seven (`slotd/shells.py`)."""

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def environment(spec: SlotSpec, bin_dir: str) -> dict[str, JSON]:
    """What the commands of a slot have besides what a call adds; `bin_dir` comes first in PATH where it is given."""
    path = f"{bin_dir}:{_SYSTEM_PATH}" if bin_dir and bin_dir not in _SYSTEM_PATH.split(":") else _SYSTEM_PATH
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **_proxies(spec), **dict(spec.env)}


def _proxies(spec: SlotSpec) -> dict[str, str]:
    """How programs learn of the one way out of a slot with a list of hosts."""
    if not isinstance(spec.network, AllowList):
        return {}
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    own = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    return {**dict.fromkeys(names, f"http://127.0.0.1:{PROXY_PORT}"), **own}


Forking = Callable[["LocalSlot"], AbstractAsyncContextManager[Slot]]
"""How the backend forks a slot of its own."""


class LocalSlot(TextFiles):
    """One slot of one server, for as long as its lease lasts. Made by `LocalBackend.create`."""

    def __init__(
        self,
        server: SlotServer,
        spec: SlotSpec,
        trajectory_id: str,
        rung: Rung,
        lease: tuple[str, int],
        fork: Forking,
        reach: Reach | None = None,
    ) -> None:
        self.server, self.spec, self._trajectory_id, self._fork = server, spec, trajectory_id, fork
        self.lost = False
        """Whether the server has reported that the slot died."""
        self._lease = Lease(server, *lease, rung)
        self._reach, self._frozen, self._surveys = reach, False, 0
        self._still: set[asyncio.Future[None]] = set()

    @property
    def slot_id(self) -> str:
        return self._lease.slot_id

    @property
    def epoch(self) -> int:
        return self._lease.epoch

    @property
    def trajectory_id(self) -> str:
        return self._trajectory_id

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it can be used on."""
        return self.server.loop

    @property
    def released(self) -> bool:
        """Whether the lease has ended; nothing is asked of the server any more then."""
        return self._lease.released

    @released.setter
    def released(self, value: bool) -> None:
        self._lease.released = value
        self._let_go()

    def lose(self) -> None:
        """The slot has died, or its server."""
        self.lost = True
        self._let_go()

    def _let_go(self) -> None:
        if self._reach is not None:
            self._reach.close()
            self._reach = None

    def _at_hand(self) -> Reach:
        """For a call that may do without the server, which lets a slot that stands still go on at the next one.

        Raises `AskServer` where it may not.
        """
        if self._reach is None or self._frozen:
            self._frozen = False
            raise AskServer
        return self._reach

    @contextlib.contextmanager
    def surveyed(self) -> Iterator[None]:
        """For a request that goes through many files: what is written meanwhile is so by the server, between its steps,
        so that no file is found half made."""
        self._surveys += 1
        try:
            yield
        finally:
            self._surveys -= 1

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """For a request that stops the slot's processes: commands wait meanwhile, so that none begins beside them."""
        end = asyncio.get_running_loop().create_future()
        self._still.add(end)
        try:
            yield
        finally:
            self._still.discard(end)
            end.set_result(None)

    def command(
        self,
        op: str,
        fields: dict[str, JSON],
        data: bytes = b"",
        on_data: Callable[[bytes], None] | None = None,
        line: Line | None = None,
    ) -> Coroutine[None, None, Reply]:
        """A request for commands (`slotd/command_requests.py`), over the line where it is one's own.

        Raises `StaleLease` after release.
        """
        if line is None or self._lease.released:
            return self.server.call(op, {**self._lease.fields(), **fields}, data, on_data)
        if self._still or self._frozen:
            return self._when_it_goes_on(line.request(op, fields, data, on_data))
        return line.request(op, fields, data, on_data)

    async def _when_it_goes_on(self, request: Coroutine[None, None, Reply]) -> Reply:
        """Nothing is started in a slot that stands still."""
        try:
            while self._still:
                await asyncio.wait(self._still)
            await self._entry("/")  # the server lets what stands still go on
        except BaseException:
            request.close()
            raise
        return await request

    @property
    def line(self) -> Line | None:
        """To the slot's init, where there is one."""
        return None if self._reach is None else self._reach.line

    @property
    def rung(self) -> Rung:
        return self._lease.rung

    def __repr__(self) -> str:
        return f"<LocalSlot {self.slot_id} of {self._trajectory_id!r}{' (released)' if self.released else ''}>"

    def lease(self) -> dict[str, JSON]:
        """What names this lease in a request. Raises `StaleLease` after release."""
        return self._lease.fields()

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
        verdict: bool = False,
        spill: bool = True,
    ) -> ExecutionResult:
        """Run a command; see `Slot.execute`. A missing `cwd` raises FileNotFoundError; no such program is exit 127."""
        fields = program(command)
        limit(fields, timeout_s, max_output_bytes, stdin)
        if cwd != WORKSPACE:
            fields["cwd"] = cwd
        if env:
            fields["env"] = dict(env)
        if on_output is not None:
            fields["stream"] = True
        if verdict:
            fields["verdict"] = True
        if not spill:
            fields["no_spill"] = True
        try:
            try:
                line = None if self._reach is None else self._reach.line
                reply = await self.command("exec", fields, stdin, on_output, line)
            except NoRoom:
                reply = await self.command("exec", fields, stdin, on_output)
        except CommandNotStarted as error:
            return self._lease.not_started(command, error)
        return self._lease.result(reply.fields, reply.data, timeout_s)

    async def shell(
        self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b""
    ) -> LocalShell:
        """A stateful shell; see `Slot.shell`. Raises `TaskError` where its limits allow too few open files for one."""
        files = self.spec.limits.open_files
        if files is not None and files < SHELL_FILES:
            raise TaskError(
                f"{self!r} may have {files} open files, and a stateful shell needs {SHELL_FILES} to start: "
                f"set limits.open_files of the task to that or more"
            )
        line = self.line if self.line is not None and self.line.has_room() else None
        return await LocalShell.open(functools.partial(self.command, line=line), self._lease, cwd, env, state)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = True,
        terminal: TerminalSize | None = None,
    ) -> LocalProcess:
        """Start a background process; see `Slot.spawn`."""
        return await LocalProcess.start(self._lease, command, cwd, env, stdin, terminal)

    async def processes(self) -> list[LocalProcess]:
        """The background processes of this slot, oldest first."""
        reply = await self.server.call("processes", self.lease())
        return [LocalProcess(self._lease, fields) for fields in reply.fields["processes"]]

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes:
        """The file from `offset` to its end; OSError (EFBIG) where that is more than `max_bytes`."""
        require(offset >= 0 and max_bytes >= 0, "offset and max_bytes cannot be negative")
        if isinstance(path, str):
            with contextlib.suppress(AskServer):
                return await self._at_hand().read(path, offset, max_bytes)
        fields = {**self._lease.fields(), "path": path, "offset": offset, "max_bytes": max_bytes}
        return await self.server.read("read", fields)

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write atomically, creating parent directories. A link is followed, inside the slot."""
        if isinstance(path, str) and isinstance(data, bytes) and not self._surveys:
            with contextlib.suppress(AskServer):
                await self._at_hand().write(path, data, mode)
                return
        fields = {**self._lease.fields(), "path": path}
        if mode is not None:
            fields["mode"] = mode
        await self.server.upload(fields, data)

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory, sorted by name; their paths are absolute."""
        with self.surveyed():
            found = await self.server.listing("list", {**self.lease(), "path": path})
        return [FileInfo(**entry) for entry in found]

    async def stat(self, path: str) -> FileInfo | None:
        """What is at a path, links not followed; None when there is nothing."""
        entry = await self._entry(path)
        return None if entry is None else FileInfo(**entry)

    async def _entry(self, path: str) -> dict[str, JSON] | None:
        if isinstance(path, str):
            with contextlib.suppress(AskServer):
                return await self._at_hand().describe(path)
        reply = await self.server.call("stat", {**self.lease(), "path": path})
        found: dict[str, JSON] | None = reply.fields["entry"]
        return found

    async def make_dir(self, path: str) -> None:
        await self.server.call("mkdir", {**self.lease(), "path": path})

    async def make_link(self, path: str, target: str) -> None:
        await self.server.call("link", {**self.lease(), "path": path, "target": target})

    async def upload(self, local: Path, path: str) -> int:
        with await asyncio.to_thread(local.open, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            return await self.server.upload_file({**self.lease(), "path": path, "mode": mode}, file)

    async def download(self, path: str, local: Path) -> int:
        part = local.with_name(f".{secrets.token_hex(12)}")  # without the name, which may be as long as names can be
        fields = {**self.lease(), "path": path, "offset": 0, "max_bytes": sys.maxsize}
        try:
            with await asyncio.to_thread(part.open, "xb") as file:
                await self.server.download(fields, file)
                size = file.tell()
            part.rename(local)
        finally:
            part.unlink(missing_ok=True)
        return size

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory. Nothing there is not an error."""
        with self.surveyed():
            await self.server.call("remove", {**self.lease(), "path": path})

    async def freeze(self) -> int:
        """Stop every process of the slot until the next call to it, and say how many: while nobody acts, say."""
        self._frozen = True
        try:
            with self.stopped():
                reply = await self.server.call("freeze", self.lease())
        finally:
            self._frozen = True  # a call meanwhile came before everything stood still
        return int(reply.fields["processes"])

    async def arguments(self, pid: int) -> list[str] | None:
        """The arguments of a process of the slot, as the kernel says; see `Slot.arguments`."""
        reply = await self.server.call("arguments", {**self.lease(), "pid": pid})
        found: list[str] | None = reply.fields["arguments"]
        return found

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        """What a service of the slot answers; see `Slot.ask`."""
        require(0 < port < 1 << 16, "a port is a number from 1 to 65535")
        fields = {**self.lease(), "port": port, "timeout_s": timeout_s, "max_bytes": max_bytes}
        return (await self.server.call("ask", fields, request)).data

    async def changes(self) -> list[Change]:
        """What differs from where this slot started, as seen while looking: commands may be running."""
        with self.surveyed():
            found = await self.server.listing("changes", self.lease())
        return [Change(**change) for change in found]

    def fork(self) -> AbstractAsyncContextManager[Slot]:
        """Another slot from what this one's files are now; see `Slot.fork`."""
        return self._fork(self)


__all__ = ["MAX_OUTPUT_BYTES", "LocalSlot"]
