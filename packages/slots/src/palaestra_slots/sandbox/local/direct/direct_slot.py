"""Serves a slot's commands, shells and small files without the slot server, which saves two process wake-ups per
request.

At the level `full`, the server and its client run as root on the same machine. For each slot, the server sends the
client descriptors of the slot's root, of its init process, and of a second socket to the init, which the code calls the
*line*. The client uses them as the server would, and runs the server's own code (`slotd/exec`, `slotd/files.py`). The
server makes, freezes and ends the slot. It also serves all other requests, file calls that fail here, and commands for
which this process has no free descriptor.

A slot with `SlotSpec.on_demand`, such as the slot of a score, is not made at first: the server sends a mount of the
files with which the slot would start, and the client reads them there. It takes a tenth of the time of a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from palaestra_slots.core.errors import SandboxError, SlotLost, StaleLease
from palaestra_slots.sandbox.local.client import OnData, OnHole, OnLost, Requests, SlotClient, Undo
from palaestra_slots.sandbox.slotd import files, syscalls
from palaestra_slots.sandbox.slotd.event_loop import EpollLoop, Timer
from palaestra_slots.sandbox.slotd.exec import pipes
from palaestra_slots.sandbox.slotd.exec.pipes import Shelf
from palaestra_slots.sandbox.slotd.exec.stateful_shell import ShellProcesses
from palaestra_slots.sandbox.slotd.exec.supervisor import FIRST_CHILD, Supervisor
from palaestra_slots.sandbox.slotd.protocol.frames import (
    CHUNK,
    HANDOVER,
    Fields,
    Frame,
    FrameKind,
    OpenRequest,
    new,
    received,
)
from palaestra_slots.sandbox.slotd.protocol.init_messages import EnvBlock, env_block
from palaestra_slots.sandbox.slotd.rung import SlotPath

_MOMENT_S = 0.01  # most commands end within this time
_FIRST_SHELL = FIRST_CHILD + (1 << 30)  # above the server's numbers, so that a shell's number shows who runs the shell
_IN_A_ROW = 16  # file calls do not wait, so the event loop gets a turn after this many of them
_QUICK_BYTES = 1 << 20  # larger reads are done in a thread
# requests that walk many files; while one of them runs, the server does all writes
_SURVEYS = ("list", "changes", "remove", "checkpoint")
_STOPS = ("freeze", "checkpoint")  # requests that stop the slot's processes; commands wait until they are done

_WITHOUT_LINKS = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_XDEV

_file_calls = itertools.count(1)


class DirectClient(SlotClient):
    """The client of a slot server that sends it the descriptors of each slot. `create` makes a `DirectSlot`, unless
    this process is short of descriptors."""

    def __init__(self, on_lost: OnLost) -> None:
        super().__init__(on_lost)
        self._loop = AsyncioLoop()
        self._handover, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._handover.setblocking(False)
        # By epoch, until it is claimed: the owner of the slot's files, and the descriptors.
        self._received: dict[int, tuple[int, list[int]]] = {}

    def _sockets_for_server(self) -> Sequence[socket.socket]:
        return (self._server_end,)

    async def create(self, fields: Fields) -> tuple[Fields, Requests]:
        env, paths = fields["env"], fields.get("on_demand", ())
        made = await self.make("create", fields, self._undo_create)
        owner, fds = self._claim(made["epoch"])
        if made.get("deferred"):
            return made, OnDemandSlot(self, made, env, paths, fds[0] if fds else -1, owner)
        return made, DirectSlot(self, self._loop, made, owner, fds, env) if fds else self

    async def start_deferred(self, lease: Fields, env: dict[str, str]) -> Requests:
        """Have the server make a deferred slot."""
        made = await self.make("start", {**lease}, self._undo_create)
        owner, fds = self._claim(made["epoch"])
        return DirectSlot(self, self._loop, made, owner, fds, env) if fds else self

    def _undo_create(self, made: Fields) -> tuple[str, Fields]:
        pipes.close(*self._claim(made["epoch"])[1])
        return "destroy", made

    def _claim(self, epoch: int) -> tuple[int, list[int]]:
        """Return the owner and descriptors of a new slot; no descriptors if the server could not send them, or if too
        few are left."""
        with contextlib.suppress(OSError):
            # Messages about other slots may come first, because several are made concurrently.
            while (message := pipes.receive(self._handover, HANDOVER.size, 3))[0]:
                of, owner = HANDOVER.unpack(message[0])
                self._received[of] = owner, message[1]
        owner, fds = self._received.pop(epoch, (0, []))
        if fds and not _is_low(max(fds)):
            pipes.close(*fds)
            fds = []
        return owner, fds

    async def aclose(self) -> None:
        """End the server with every slot. Idempotent."""
        await super().aclose()
        self._loop.end()
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close every descriptor in a forked child."""
        super().close_in_child()
        self._loop.close_in_child()
        self._handover.close()
        self._server_end.close()
        pipes.close(*(fd for _, fds in self._received.values() for fd in fds))
        self._received.clear()


class DirectSlot(Requests):
    """Requests about one slot. Implements `SlotOwner` for the commands that it starts itself."""

    def __init__(
        self, server: DirectClient, loop: AsyncioLoop, made: Fields, owner: int, fds: list[int], env: dict[str, str]
    ) -> None:
        super().__init__()
        self._server, self._owner = server, owner
        self._lease = {"slot": made["slot"], "epoch": made["epoch"]}
        self.name, self.pid, self.root = str(made["slot"]), 0, fds[0]
        self.loss = "lost"
        self._frozen, self._surveys = False, 0
        self._stops: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, OpenRequest] = {}
        self._supervisor: Supervisor | None = None
        self._commands: dict[str, Callable[[Frame], None]] = {}
        if len(fds) < 3 or not _makes_readable_files():
            pipes.close(*fds[1:])
            return
        line, self.pid = socket.socket(fileno=fds[1]), _pid_behind(fds[2])
        line.setblocking(False)
        shelf = Shelf(lambda path: SlotPath(self.root, path, owner))
        supervisor = Supervisor(self, line, loop, self._on_result, self._open, _variables(tuple(env.items())), shelf)
        self._supervisor = supervisor
        self._commands = {
            "exec": supervisor.exec,
            "shell": lambda frame: self._shells.open(frame),
            "run": lambda frame: self._shells.run(frame),
            "close_shell": lambda frame: self._shells.close(frame),
        }
        supervisor.listen()

    @functools.cached_property
    def _shells(self) -> ShellProcesses:
        assert self._supervisor is not None
        return ShellProcesses(self._supervisor, itertools.count(_FIRST_SHELL))

    async def call(
        self, op: str, fields: Fields, data: bytes = b"", on_data: OnData | None = None, on_hole: OnHole | None = None
    ) -> Frame:
        """Serve a request in this process, or have the server do it; see `Requests.call`."""
        command = self._commands.get(op)
        if command is not None and (self._stops or self._frozen) and self._serves(op, fields):
            await self._until_resumed()  # the slot may end meanwhile, so the next line asks again
        if command is not None and self._serves(op, fields):
            pending = self._new_request(on_data, on_hole)
            try:
                try:
                    command(received(FrameKind.REQUEST, pending.number, fields, data))
                except OSError as error:
                    # This process is out of file descriptors. The server is a process of its own and may still have
                    # some.
                    if op != "exec" or error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                else:
                    return await pending.outcome()
            except SlotLost:
                with contextlib.suppress(StaleLease):  # the lease has ended with the slot
                    await self._server.call(
                        "stat", {**self._lease, "path": "/"}
                    )  # raises the reason for the slot's end
                raise
            except asyncio.CancelledError:
                await self._abandon(pending)
                raise
            finally:
                del self._pending[pending.number]
        elif op == "stat" and self._has_file(fields):
            with contextlib.suppress(OSError):
                entry = files.describe(self.root, fields["path"], self._owner)
                if next(_file_calls) % _IN_A_ROW == 0:
                    await asyncio.sleep(0)
                return Frame(FrameKind.RESULT, 0, {"entry": entry}, b"")
        with self._during(op):
            return await self._server.call(op, fields, data, on_data, on_hole)

    def _serves(self, op: str, fields: Fields) -> bool:
        """Return whether this process, and not the server, serves a request to run a command or to use a shell. It
        serves a new shell only if it has descriptors left. Later requests about a shell go to the process that started
        the shell."""
        if self.root < 0 or op == "exec":
            return self.root >= 0
        if op != "shell":
            return bool(fields["shell"] >= _FIRST_SHELL)
        with contextlib.suppress(OSError):
            os.close(fd := os.dup(self.root))
            return _is_low(fd)
        return False

    async def read(self, op: str, fields: Fields) -> bytes:
        """Read a file in this process if possible; otherwise request it from the server, as `Requests.read` does."""
        if op == "read" and self._has_file(fields):
            with contextlib.suppress(OSError):
                return await _read_file(self.root, fields)
        return await super().read(op, fields)

    async def upload(self, fields: Fields, data: bytes) -> None:
        """Write a small file to an existing directory in this process if possible; otherwise upload it, as
        `Requests.upload` does."""
        if isinstance(data, bytes) and len(data) <= CHUNK and not self._surveys and self._has_file(fields):
            try:
                path = files.absolute(fields["path"])
                writing = files.Writing(self.root, path, fields.get("mode"), self._owner, make_folders=False)
                try:
                    writing.add(data)
                except BaseException:
                    writing.discard()
                    raise
                writing.finish()
                writing.close()
                if next(_file_calls) % _IN_A_ROW == 0:
                    await asyncio.sleep(0)
                return
            # The server tries again: it can make missing directories, and its error is the one that the caller gets.
            except OSError:
                pass
        await super().upload(fields, data)

    async def make(self, op: str, fields: Fields, undo: Undo, data: bytes = b"") -> Fields:
        with self._during(op):
            return await self._server.make(op, fields, undo, data)

    async def send_file(self, fields: Fields, pieces: AsyncIterator[bytes]) -> None:
        await self._server.send_file(fields, pieces)

    def slot_ended(self) -> None:
        """Answer pending commands with `lost`; close the line and the root. Idempotent."""
        if self._supervisor is not None and self._supervisor.live:
            self._supervisor.slot_died()
        self.close_in_child()

    def close_in_child(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close_descriptors()
        pipes.close(self.root)
        self.root = -1

    def _has_file(self, fields: Fields) -> bool:
        """Return whether a file call may be served here. A call in a frozen slot is served by the server, which first
        lets the slot continue."""
        frozen, self._frozen = self._frozen, False
        return not frozen and self.root >= 0 and type(fields["path"]) is str

    @contextlib.contextmanager
    def _during(self, op: str) -> Iterator[None]:
        """Record a survey or a stop for as long as the server serves the request."""
        end = asyncio.get_running_loop().create_future()
        self._frozen |= op == "freeze"
        self._surveys += op in _SURVEYS
        if op in _STOPS:
            self._stops.add(end)
        try:
            yield
        finally:
            self._frozen |= op == "freeze"  # set again, because a file call may have cleared it during the freeze
            self._surveys -= op in _SURVEYS
            self._stops.discard(end)
            end.set_result(None)

    async def _until_resumed(self) -> None:
        """Wait until no request stops the slot's processes, and have the server let a frozen slot continue."""
        while self._stops:
            await asyncio.wait(self._stops)
        if self._frozen:
            self._frozen = False
            await self._server.call("stat", {**self._lease, "path": "/"})

    def _on_result(self, kind: FrameKind, request: int, fields: Fields | None = None, data: bytes = b"") -> None:
        self._on_frame(new(Frame, (kind, request, fields or {}, data)))

    def _send(self, kind: FrameKind, number: int, fields: Fields, data: bytes = b"") -> None:
        if number in self._open:
            self._open[number].on_frame(received(kind, number, fields, data))

    def end_hung(self) -> None:
        """Have the server end the slot, because a command cannot be killed or the init does not respond."""
        self._ask_server("hung", lambda _: None)

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """Ask the server whether the kernel has killed a process of the slot for lack of memory."""
        self._ask_server("oom", lambda fields: then(bool(fields.get("oom"))))

    def _ask_server(self, op: str, then: Callable[[Fields], None]) -> None:
        async def ask() -> None:
            fields: Fields = {}
            with contextlib.suppress(Exception):  # if the slot has ended, that is reported elsewhere
                fields = (await self._server.call(op, {**self._lease})).fields
            then(fields)

        task = asyncio.ensure_future(ask())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class OnDemandSlot(Requests):
    """Requests about a leased slot that the server has not made yet.

    `root` is a read-only mount of the files with which the slot would start. A file below `paths` is read from it, if
    no link is on the way. The first other request has the server make the slot.
    """

    def __init__(
        self, client: DirectClient, made: Fields, env: dict[str, str], paths: Sequence[str], root: int, owner: int
    ) -> None:
        super().__init__()
        self._client, self._env, self._paths, self._root, self._owner = client, env, paths, root, owner
        self._lease = {"slot": made["slot"], "epoch": made["epoch"]}
        self._ended = False
        self._making: asyncio.Task[Requests] | None = None
        self._slot: Requests | None = None

    async def call(
        self, op: str, fields: Fields, data: bytes = b"", on_data: OnData | None = None, on_hole: OnHole | None = None
    ) -> Frame:
        if op == "stat" and self._shows(fields):
            entry = files.describe(self._root, fields["path"], self._owner)
            return Frame(FrameKind.RESULT, 0, {"entry": entry}, b"")
        if op == "destroy":
            if self._making is None:
                return await self._client.call(op, fields)
            try:
                await self._made_slot()
            except SandboxError:  # it could not be made, so there is nothing to end
                return Frame(FrameKind.RESULT, 0, {}, b"")
        return await (await self._made_slot()).call(op, fields, data, on_data, on_hole)

    async def read(self, op: str, fields: Fields) -> bytes:
        """Read a file, without the slot if possible; see `Requests.read`."""
        if op == "read" and self._shows(fields):
            return await _read_file(self._root, fields)
        return await (await self._made_slot()).read(op, fields)

    async def make(self, op: str, fields: Fields, undo: Undo, data: bytes = b"") -> Fields:
        return await (await self._made_slot()).make(op, fields, undo, data)

    async def upload(self, fields: Fields, data: bytes) -> None:
        await (await self._made_slot()).upload(fields, data)

    async def send_file(self, fields: Fields, pieces: AsyncIterator[bytes]) -> None:
        await (await self._made_slot()).send_file(fields, pieces)

    def _shows(self, fields: Fields) -> bool:
        """Return whether the mount shows the path of a request exactly as the slot would."""
        path = fields["path"]
        if self._making is not None or self._root < 0 or type(path) is not str:
            return False
        try:
            path = files.absolute(path)
            if path != "/" and not any(path == place or path.startswith(f"{place}/") for place in self._paths):
                return False
            if ".." in path.split("/"):
                return False
            os.close(syscalls.openat2(self._root, path.lstrip("/") or ".", os.O_PATH, _WITHOUT_LINKS))
        except OSError as error:
            # What is missing here is missing in the slot, too; a link or another mount could lead elsewhere there.
            return error.errno not in (errno.ELOOP, errno.EXDEV, errno.EMFILE, errno.ENFILE)
        return True

    async def _made_slot(self) -> Requests:
        """Return the slot, once the server has made it. A caller that is cancelled leaves the making to the next."""
        if self._making is None:
            self._making = asyncio.ensure_future(self._make_slot())
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._making)

    async def _make_slot(self) -> Requests:
        self._slot = await self._client.start_deferred(self._lease, self._env)
        self._close_root()
        if self._ended:
            self._slot.slot_ended()
        return self._slot

    def slot_ended(self) -> None:
        self._ended = True
        self._close_root()
        if self._slot is not None:
            self._slot.slot_ended()

    def close_in_child(self) -> None:
        pipes.close(self._root)
        self._root = -1

    def _close_root(self) -> None:
        """Close the mount in a thread, because the kernel then unmounts it, which can take milliseconds."""
        root, self._root = self._root, -1
        if root >= 0:
            try:
                asyncio.get_running_loop().run_in_executor(None, os.close, root)
            except RuntimeError:  # no loop runs, or it is about to end
                os.close(root)

    def _send(self, kind: FrameKind, number: int, fields: Fields, data: bytes = b"") -> None:
        raise AssertionError("an unmade slot has no requests of its own")


async def _read_file(root: int, fields: Fields) -> bytes:
    """Read a file below a root. Raises OSError as the server would."""
    path = files.absolute(fields["path"])
    fd, size = files.open_for_reading(root, path, fields["offset"], fields["max_bytes"])
    if size > _QUICK_BYTES:
        # A caller that is cancelled does not cancel the read, which closes the file.
        return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(_read_and_close, fd, size)))
    data = _read_and_close(fd, size)
    if next(_file_calls) % _IN_A_ROW == 0:
        await asyncio.sleep(0)
    return data


def _read_and_close(fd: int, size: int) -> bytes:
    """Read `size` bytes of a file, or fewer if it has shrunk, and close the file."""
    try:
        data = os.read(fd, size)
        while len(data) < size and (more := os.read(fd, size - len(data))):  # one call reads at most 2 GiB
            data += more
        return data
    finally:
        os.close(fd)


def _is_low(fd: int) -> bool:
    """Return whether the number of a descriptor that was just opened shows that enough descriptors are left."""
    return fd < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _makes_readable_files() -> bool:
    """Return whether this process's umask leaves files that it makes in a slot readable to the slot's users."""
    status = _proc_file("/proc/self/status")
    return int(status.partition(b"\nUmask:")[2].split(None, 1)[0], 8) & ~0o022 == 0


def _pid_behind(descriptor: int) -> int:
    """Return the pid of the process behind a descriptor, and close the descriptor; 0 if the process is gone."""
    info = _proc_file(f"/proc/self/fdinfo/{descriptor}")
    os.close(descriptor)
    return max(0, int(info.partition(b"\nPid:")[2].split(None, 1)[0]))


def _proc_file(path: str) -> bytes:
    """Return a short file of /proc. This runs twice for every slot, and `Path.read_text` takes three times as long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 14)
    finally:
        os.close(fd)


@functools.lru_cache(maxsize=64)
def _variables(env: tuple[tuple[str, str], ...]) -> EnvBlock:
    """Return a slot's variables, encoded. They are cached, because most slots of a run have the same variables."""
    return env_block(dict(env))


class AsyncioLoop(EpollLoop):
    """The slot server's event loop inside asyncio's event loop; one instance serves all slots of a server.

    Adding and removing a descriptor or a timer in asyncio would take a large part of the time of a short command. So
    asyncio watches only the epoll descriptor of this loop and has one timer for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asyncio = asyncio.get_running_loop()
        self._asyncio.add_reader(self.fileno(), self.turn)
        self._soon: dict[int, Callable[[], object]] = {}
        self._waiting = False  # whether `_watch_all` is scheduled
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")

    close_in_child = EpollLoop.end  # asyncio's loop still belongs to the parent process

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        self._soon.pop(fd, None)
        super().watch(fd, call)

    def watch_soon(self, fd: int, call: Callable[[], object]) -> None:
        """Do what `watch` does, but register the descriptor only if it is still open after a moment."""
        if self.watches(fd):
            super().watch(fd, call)
            return
        self._soon[fd] = call
        if not self._waiting:
            self._waiting = True
            self._asyncio.call_later(_MOMENT_S, self._watch_all)

    def unwatch(self, fd: int) -> None:
        self._soon.pop(fd, None)
        super().unwatch(fd)

    def close(self, fd: int) -> None:
        self._soon.pop(fd, None)
        super().close(fd)

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        if not seconds:
            return self._asyncio.call_soon(call)
        if time.monotonic() + seconds < self._alarm_at:
            self._set_alarm(seconds)
        return super().later(seconds, call)

    def end(self) -> None:
        """Stop all callbacks; descriptors can still be closed. Idempotent."""
        # In a second call, the epoll is closed already and has no descriptor.
        if self._alarm_at >= 0:
            self._asyncio.remove_reader(self.fileno())
        self._set_alarm(None)
        self._alarm_at = -1.0  # so that no timer sets another alarm
        self._soon.clear()
        super().end()

    def _watch_all(self) -> None:
        self._waiting = False
        for fd, call in list(self._soon.items()):
            self.watch(fd, call)

    def _set_alarm(self, seconds: float | None) -> None:
        """Run the timers after `seconds` seconds. If `seconds` is None, only cancel the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if seconds is None else self._asyncio.call_later(seconds, self._ring)
        self._alarm_at = float("inf") if seconds is None else time.monotonic() + seconds

    def _ring(self) -> None:
        try:
            self.run_timers()
        finally:  # an error in one timer must not stop the others
            self._set_alarm(self.patience())
