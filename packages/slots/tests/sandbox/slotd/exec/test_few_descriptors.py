"""A server without free descriptors fails the request that needs one, leaks none, and goes on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from palaestra_slots.sandbox.slotd.event_loop import EpollLoop
from palaestra_slots.sandbox.slotd.exec import pipes, process_tree
from palaestra_slots.sandbox.slotd.exec.background import BackgroundProcesses
from palaestra_slots.sandbox.slotd.exec.pipes import Shelf
from palaestra_slots.sandbox.slotd.exec.supervisor import Supervisor
from palaestra_slots.sandbox.slotd.protocol.frames import Fields, Frame, FrameKind
from palaestra_slots.sandbox.slotd.protocol.init_messages import EnvBlock, InitReport, ReportKind, encode_report
from palaestra_slots.sandbox.slotd.rung import NetworkScope, NewSlot
from palaestra_slots.sandbox.slotd.server_slot import LifeStage, ServerSlot

_ENV = EnvBlock(0, b"")


@contextlib.contextmanager
def _free(count: int) -> Iterator[None]:
    """Leave this number of free descriptors to this process."""
    limits, fillers = resource.getrlimit(resource.RLIMIT_NOFILE), []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        pipes.close(*[fillers.pop() for _ in range(count)])
        yield
    finally:
        pipes.close(*fillers)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class _Owner:
    """Implements `SlotOwner`."""

    name, loss, pid = "slot-1", "lost", os.getpid()

    def __init__(self) -> None:
        self.root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)

    def end_hung(self) -> None:
        raise AssertionError("the slot was ended")

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        then(False)


class _World:
    """One supervisor, whose init is this test."""

    def __init__(self) -> None:
        pipes.nothing()
        process_tree.note()
        self.loop, self.owner = EpollLoop(), _Owner()
        ours, self.init = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.answers: list[tuple[FrameKind, Fields]] = []
        self.supervisor = Supervisor(
            self.owner, ours, self.loop, self._send, {}, _ENV, Shelf(lambda _: pytest.fail("nothing is spilled"))
        )
        self.supervisor.listen()

    def _send(self, kind: FrameKind, request: int, fields: Fields | None = None, data: bytes = b"") -> None:
        self.answers.append((kind, fields or {}))

    def close(self) -> None:
        self.supervisor.close_descriptors()
        self.loop.end()
        self.init.close()
        os.close(self.owner.root)


@pytest.fixture
def world() -> Iterator[_World]:
    made = _World()
    yield made
    made.close()


@pytest.mark.parametrize("free", range(7))
@pytest.mark.parametrize(
    ("terminal", "stdin", "apart"),
    [([24, 80], True, False), (None, False, False), (None, True, False), (None, False, True), (None, True, True)],
)
def test_a_process_that_cannot_be_started_leaves_no_descriptor(
    world: _World, free: int, terminal: list[int] | None, stdin: bool, apart: bool
) -> None:
    fields: Fields = {"op": "spawn", "argv": ["true"], "cwd": "/", "env": {}, "terminal": terminal, "stdin": stdin}
    frame = Frame(FrameKind.REQUEST, 1, {**fields, "apart": apart}, b"")
    processes, before = BackgroundProcesses(world.supervisor, itertools.count(1 << 31)), os.listdir("/proc/self/fd")
    failed = False
    with _free(free):
        try:
            processes.serve(frame)
        except OSError:
            failed = True
    assert failed or free >= 2
    if failed:
        assert os.listdir("/proc/self/fd") == before


def test_a_command_that_cannot_start_with_sh_either_fails_alone(world: _World) -> None:
    frame = Frame(FrameKind.REQUEST, 7, {"op": "exec", "command": "true", "timeout_s": 5.0}, b"")
    world.supervisor.exec(frame)
    world.init.send(encode_report(InitReport(ReportKind.NOT_STARTED, 7, errno.ENOENT)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # also none of those that the first try gave back
    try:
        world.loop.turn(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    [(kind, fields)] = world.answers
    assert (kind, fields["error"], fields["errno"]) == (FrameKind.ERROR, "os", errno.EMFILE)
    assert world.supervisor.open_requests == {}


def test_whether_a_process_is_exiting_is_not_known_without_a_descriptor() -> None:
    with _free(0):
        assert not process_tree.is_exiting(os.getpid())


class _Init:
    """An init that reports that it is ready, without its root. It cannot be found out at first whether it is gone."""

    exposed, network, takes_lines, shares_memory = False, NetworkScope.NONE, False, True

    def __init__(self) -> None:
        self.asked = 0

    def fork(self, control: socket.socket) -> int:
        child = os.fork()
        if child == 0:
            control.send(encode_report(InitReport(ReportKind.READY)))
            time.sleep(60)
            os._exit(0)
        return child

    def gone(self) -> bool:
        self.asked += 1
        if self.asked < 3:
            raise OSError(errno.EAGAIN, "no process is left")
        return True

    def end_soon(self, pid: int) -> None: ...


class _Files:
    def release(self) -> None: ...


def test_a_slot_whose_root_did_not_arrive_fails_alone() -> None:
    loop, init = EpollLoop(), _Init()
    ended: list[ServerSlot] = []
    new: Any = NewSlot(_Files(), (), init)
    slot = ServerSlot("slot-1", 1, new, loop, lambda _: pytest.fail("it is not ready"), ended.append)
    slot.start(_ENV, Shelf(lambda _: pytest.fail("nothing is spilled")), lambda *_: None, {}, itertools.count(1 << 31))
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        loop.turn(0.1)
    loop.end()
    assert (ended, init.asked, slot.state) == ([slot], 3, LifeStage.DEAD)
    assert "no descriptor left" in slot.failure
