"""How a slot is built and confined in namespaces: what its init does, from the server's fork to the first command."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from . import capabilities, init, namespaces, roots, seccomp, steps, syscalls
from .descriptors import memory_file
from .steps import Do, Step

USERS, LIST, _FREE = init.CONTROL + 1, init.CONTROL + 2, init.CONTROL + 3
"""Descriptors of an init that is being built: the user namespace to enter, the encoded steps, and what is free."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that makes one slot different from another."""

    root: roots.RootPlan
    hostname: str
    network: bool
    groups: tuple[str, ...]
    user_namespace: int | None
    """The namespace to enter; None makes one of its own in which only uid 0 exists."""
    open_files: int | None
    processes: int | None
    """A limit per user, where there is no control group to count."""
    data_bytes: int | None
    """A limit per process, where there is no control group to sum up."""
    stores: tuple[int, ...] = ()
    """Descriptors, from `stores.FIRST_STORE` on, that the root's paths name."""
    native: int | None = None
    """The program that is pid 1; None is a fork of the server."""


def fork(plan: Plan, control: socket.socket) -> int:
    """Start the init, pid 1 of a process namespace of its own, with its end of `control`; its pid."""
    work = [*_enter(plan), *_confine(plan)]
    fds = {init.CONTROL: control.fileno(), **dict(zip(plan.stores, plan.stores, strict=True))}
    if plan.user_namespace is not None:
        fds[USERS] = plan.user_namespace
    if plan.native is not None:
        return _spawn(plan.native, work, fds)
    with namespaces.new_pid_namespace():
        pid = os.fork()
        if pid == 0:
            init.run(work, fds, own_network=not plan.network)
    return pid


def _spawn(program: int, work: list[Step], fds: dict[int, int]) -> int:
    """The native init: the steps come in a memory file, since it shares no memory with the server."""
    listed = memory_file(steps.encode(work))
    moved: list[int] = []
    try:
        actions = []
        for place, fd in {**fds, LIST: listed}.items():
            source = fd
            if fd != place and fd < _FREE:  # where another one is about to be put
                source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE)
                moved.append(source)
            actions.append((os.POSIX_SPAWN_DUP2, source, place))
        with namespaces.new_pid_namespace():
            return os.posix_spawn(f"/proc/self/fd/{program}", ["slot-init", "--build"], {}, file_actions=actions)
    finally:
        for fd in (listed, *moved):
            os.close(fd)


def _enter(plan: Plan) -> Iterator[Step]:
    """Into the slot's groups, namespaces and root, still with the server's privileges."""
    yield from (Step(Do.JOIN, (directory,)) for directory in plan.groups)
    flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
    yield Step(Do.UNSHARE, (), flags | (0 if plan.network else syscalls.CLONE_NEWNET))
    if not plan.network:
        yield Step(Do.LOOPBACK)
        for name, value in namespaces.OPEN_PORTS:
            yield Step(Do.WRITE, (f"/proc/sys/net/ipv4/{name}", value), 1)  # only a convenience
    yield Step(Do.HOST_NAME, (plan.hostname,))
    yield Step(Do.UMASK, (), 0)
    yield from roots.build(plan.root, _FREE)
    yield Step(Do.UMASK, (), 0o022)


def _confine(plan: Plan) -> Iterator[Step]:
    """Give up everything that the slot must not have. Nothing of the slot has run before this."""
    yield Step(Do.SESSION)
    if plan.user_namespace is None:
        yield from _single_user_namespace()
    else:
        yield Step(Do.ENTER, (), USERS, syscalls.CLONE_NEWUSER)
        yield Step(Do.BE_ROOT)
        if plan.processes is not None:  # they are counted per user and namespace, so the slot needs its own
            # The change of user has closed the process's own /proc entries to it.
            yield Step(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 1)
            yield from _single_user_namespace()
    yield Step(Do.LIMIT, (), resource.RLIMIT_CORE, 0)
    for limit, value in (
        (resource.RLIMIT_NOFILE, plan.open_files),
        (resource.RLIMIT_NPROC, plan.processes),
        (resource.RLIMIT_DATA, plan.data_bytes),
    ):
        if value is not None:
            yield Step(Do.LIMIT, (), limit, value)
    yield Step(Do.PRCTL, (), syscalls.PR_SET_NO_NEW_PRIVS, 1)
    yield Step(Do.KEEP_CAPABILITIES, (), capabilities.KEPT)
    yield Step(Do.FILTER, program=seccomp.program())
    yield Step(Do.PRCTL, (), syscalls.PR_SET_DUMPABLE, 0)


def _single_user_namespace() -> Iterator[Step]:
    """A new one, in which the process is root and nobody else exists."""
    yield Step(Do.UNSHARE, (), syscalls.CLONE_NEWUSER)
    yield Step(Do.WRITE, ("/proc/self/setgroups", "deny"), 1)  # it is denied in the namespace around this one already
    yield Step(Do.WRITE, ("/proc/self/uid_map", "0 0 1"))
    yield Step(Do.WRITE, ("/proc/self/gid_map", "0 0 1"))
