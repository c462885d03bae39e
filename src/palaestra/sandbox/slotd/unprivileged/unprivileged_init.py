"""The init of a slot without namespaces: restricts itself, then starts commands as the slot's user.

Where slots have users of their own the init stays root, so that no command can signal or trace it; what is restricted
here (Landlock, system calls, capabilities, limits) every command inherits, and `_start` adds the user. Where they have
not, a command can end its init, and with it the slot, but nothing outside the slot from Landlock version 6 on.

The rung `none` runs the same init with no restriction but one that costs nobody anything: signals stay in the slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import posixpath
import resource
import signal
import socket
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from .. import syscalls
from ..exec import kill
from ..namespaced import init, privileges
from ..protocol import init_messages
from ..protocol.init_messages import Kind, Report
from . import copy_workspace, landlock, server_directory, users

DIRECTORIES = {"/workspace": "workspace", "/root": "home", "/tmp": "tmp"}  # noqa: S108
"""Where in the slot's directory the paths lie that the slot's holder knows."""

READ_ONLY = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/proc")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_BECOME_USERS = 1 << 5 | 1 << 6 | 1 << 7  # KILL, SETGID, SETUID


@dataclass(frozen=True, slots=True)
class Plan:
    """What makes one slot different from another. `user` 0 is the caller's own; `template` is what it starts from."""

    home: str
    user: int
    confined: bool
    network: bool
    readable: tuple[str, ...]
    template: str | None
    limits: tuple[tuple[int, int | None], ...]
    """Of each process (of each user, for their number); None leaves one as it is."""


def run(plan: Plan, control: socket.socket) -> NoReturn:
    """The life of a slot, in the child of a fork. Never returns."""
    status = 1
    try:
        gc.disable()
        os.dup2(fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, 64), init.CONTROL, inheritable=False)
        syscalls.close_from(init.CONTROL + 1)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=init.CONTROL)
        try:
            places = init.open_places(own_network=False)
            _prepare(plan)
            if plan.confined:
                _confine(plan)
            else:
                landlock.keep_signals_in()
        except BaseException as error:
            init.send(channel, Report(Kind.FAILED, value=getattr(error, "errno", None) or 0, text=str(error)))
            raise
        init.report_ready(channel, places)
        init.Init(channel, lambda spawn, fds: _start(plan, spawn, fds), _kill_slot(plan)).serve()
        status = 0
    finally:
        os._exit(status)


def _prepare(plan: Plan) -> None:
    """Fill the workspace; copying is done here, so that the server does not wait for it."""
    os.setsid()
    syscalls.set_name("slot-init")
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    owner = plan.user or -1
    for name in DIRECTORIES.values():
        os.mkdir(f"{plan.home}/{name}", 0o700)
        if plan.template is not None and name != "tmp":
            copy_workspace.copy_for(owner, f"{plan.template}/{name}", f"{plan.home}/{name}")
            os.chmod(f"{plan.home}/{name}", 0o700)  # an agent may have closed it, and commands begin in it
        os.chown(f"{plan.home}/{name}", owner, owner)
    os.chown(plan.home, -1, owner)
    os.dup2(
        os.open(f"{plan.home}/workspace", os.O_PATH | os.O_DIRECTORY), server_directory.WORKSPACE_FD, inheritable=True
    )


def _confine(plan: Plan) -> None:
    """Give up everything that the slot must not have. Limits are those of commands: the init of others has none."""
    for limit, value in () if plan.user else plan.limits:
        _limit(limit, value)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        privileges.drop(_BECOME_USERS if plan.user else 0, bounding=0)
    landlock.restrict(_rights(plan), tcp=plan.network)
    privileges.install(inet=plan.network, ipc=False)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _rights(plan: Plan) -> list[tuple[str, int]]:
    rights = [(path, landlock.READ) for path in (*READ_ONLY, *plan.readable)]
    rights += [(f"/dev/{name}", landlock.DEVICE | landlock.LIST) for name in _DEVICES]
    own = [(f"{plan.home}/{name}", landlock.WRITE) for name in DIRECTORIES.values()]
    return [*rights, ("/dev/shm", landlock.DROP), *own]  # noqa: S108


def _limit(limit: int, value: int | None) -> None:
    if value is not None:
        _, hard = resource.getrlimit(limit)
        ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (ceiling, ceiling))


def _kill_slot(plan: Plan) -> kill.KillSlot:
    """The last resort: everything of the slot's user; without one, whatever this process may signal, which is less."""
    if plan.user:
        return lambda: users.kill(plan.user)
    return kill.kill_everything if plan.confined else _kill_descendants


def _kill_descendants() -> None:
    for process in kill.processes():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def real_path(home: str, path: str) -> str:
    """Where a path of the slot's holder is on this machine."""
    plain = posixpath.normpath(f"/{path.lstrip('/')}")
    for prefix, name in DIRECTORIES.items():
        if plain == prefix or plain.startswith(f"{prefix}/"):
            return f"{home}/{name}{plain[len(prefix) :]}"
    return path


def _start(plan: Plan, spawn: init_messages.Spawn, fds: list[int]) -> int:
    """The pid of a new process of the slot's user. Raises OSError with what failed in it before its program ran.

    Becoming a user takes a fork of this whole process, which is twice as slow as starting a program as it is.
    """
    env = init_messages.environment(_environment(plan, spawn.env.variables()))
    spawn = spawn._replace(cwd=real_path(plan.home, spawn.cwd), env=env)
    if not plan.user:
        return init.start_command(spawn, fds)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(plan, spawn, fds, writer)
    os.close(writer)
    with open(reader, "rb") as file:
        report = file.read()
    if not report:
        return pid
    os.waitpid(pid, 0)
    number, in_directory = struct.unpack("=i?", report)
    raise (init.NoDirectory if in_directory else OSError)(number, os.strerror(number))


def _become(plan: Plan, spawn: init_messages.Spawn, fds: list[int], writer: int) -> NoReturn:
    """In the child: the command. Reports an error, and whether it was the directory, over `writer`."""
    in_directory = False
    try:
        os.setsid()
        os.setgroups([])
        os.setresgid(plan.user, plan.user, plan.user)
        os.setresuid(plan.user, plan.user, plan.user)
        in_directory = True
        os.chdir(spawn.cwd)
        in_directory = False
        env = spawn.env.variables()
        path = init.find(spawn.argv[0], env)
        *high, writer = init.above(server_directory.WORKSPACE_FD, [*fds, writer])
        for index, target in spawn.places:
            os.dup2(high[index], target, inheritable=True)
        if spawn.terminal:
            fcntl.ioctl(spawn.places[0][1], termios.TIOCSCTTY, 0)
        for limit, value in plan.limits:
            _limit(limit, value)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in init.SPAWN_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execve(path, spawn.argv, env)  # noqa: S606
    except BaseException as error:
        os.write(writer, struct.pack("=i?", getattr(error, "errno", None) or 22, in_directory))
    finally:
        os._exit(127)


def _environment(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """With the places of this slot, unless the caller has named others."""
    home = real_path(plan.home, env.get("HOME", "/root"))
    return {"TMPDIR": f"{plan.home}/{DIRECTORIES['/tmp']}", **env, "HOME": home}  # noqa: S108
