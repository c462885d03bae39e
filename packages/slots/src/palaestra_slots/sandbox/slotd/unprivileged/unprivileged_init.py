"""The init of a slot without namespaces: restricts itself, then starts commands as the slot's user.

If slots have users of their own, the init stays root, so that no command can signal or trace it. Every command inherits
the init's restrictions (Landlock, system calls and capabilities); `_start_as_user` switches to the slot's user and sets
the slot's limits. Without such users, the init sets the limits itself, and a command can end its init, and with it the
slot, but nothing outside the slot. For `none`, the only restriction is that signals stay in the slot, where the kernel
allows that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import glob
import os
import posixpath
import resource
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from .. import syscalls
from ..exec import pipes, process_tree
from ..namespaced import host, privileges
from ..protocol import init_messages
from ..protocol.init_messages import InitReport, Order, ReportKind
from . import copy_workspace, landlock, server_directory, users

CONTROL = 3  # the descriptor of the control socket
# Paths that clients use, and the directories of the slot that they stand for.
DIRECTORIES = {"/workspace": "workspace", "/root": "home", "/tmp": "tmp"}  # noqa: S108
READ_ONLY = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/proc")
# The files of /etc that programs read; none names accounts, keys, hosts or services of this machine.
_SETTINGS = (*host.PUBLIC_SETTINGS, "bash.bashrc", "inputrc", "nsswitch.conf", "profile", "profile.d")
_SETTINGS_WITH_NETWORK = ("hosts", "resolv.conf")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts")
_CHECK_MS, _STOP_PATIENCE_S = 50, 2.0
_BECOME_USERS = 1 << 5 | 1 << 6 | 1 << 7  # KILL, SETGID, SETUID


# Starts a command with the descriptors of its order; returns its pid.
Start = Callable[[init_messages.Spawn, list[int]], int]
# The signals that get their default action in every command, even if this process or its caller ignores them.
SPAWN_SIGNALS = tuple(number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP))


class NoDirectory(OSError):
    """The directory in which a command is to start cannot be entered."""


@dataclass(frozen=True, slots=True)
class UnprivilegedPlan:
    """The settings of one slot. `user` 0 means the caller's own user; `template` is the layer from which the slot
    starts."""

    home: str
    user: int
    confined: bool
    network: bool
    shown: tuple[tuple[str, bool], ...]  # readable paths, each with whether its files are shown or only their names
    template: str | None
    # The limits of each process; the number of processes is limited per user. None leaves a limit unchanged.
    limits: tuple[tuple[int, int | None], ...]


def run(plan: UnprivilegedPlan, control: socket.socket) -> NoReturn:
    """Run the init of a slot, in the child of a fork. Never returns."""
    status = 1
    try:
        # A collection writes to every object, which would copy the memory that this fork shares with the server.
        gc.disable()
        os.dup2(fcntl.fcntl(control.fileno(), fcntl.F_DUPFD_CLOEXEC, 64), CONTROL, inheritable=False)
        syscalls.close_from(CONTROL + 1)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=CONTROL)
        try:
            root = os.open("/", os.O_PATH | os.O_DIRECTORY)
            _prepare(plan)
            if plan.confined:
                _confine(plan)
            else:
                landlock.keep_signals_in()
        except BaseException as error:
            send(channel, InitReport(ReportKind.FAILED, value=getattr(error, "errno", None) or 0, text=str(error)))
            raise
        socket.send_fds(channel, [init_messages.encode_report(InitReport(ReportKind.READY))], [root])
        os.close(root)
        Init(channel, lambda spawn, fds: _start_as_user(plan, spawn, fds), _kill_slot(plan)).serve()
        status = 0
    finally:
        os._exit(status)


def _prepare(plan: UnprivilegedPlan) -> None:
    """Make and fill the slot's directories. The copy is made in this process, so that the server does not wait for
    it."""
    os.setsid()
    syscalls.set_name("slot-init")
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    owner = plan.user or -1
    for name in DIRECTORIES.values():
        os.mkdir(f"{plan.home}/{name}", 0o700)
        if plan.template is not None and name != "tmp":
            copy_workspace.copy_for(owner, f"{plan.template}/{name}", f"{plan.home}/{name}")
            os.chmod(f"{plan.home}/{name}", 0o700)  # an agent may have removed the permissions
        os.chown(f"{plan.home}/{name}", owner, owner)
    os.chown(plan.home, -1, owner)
    os.dup2(
        os.open(f"{plan.home}/workspace", os.O_PATH | os.O_DIRECTORY), server_directory.WORKSPACE_FD, inheritable=True
    )


def _confine(plan: UnprivilegedPlan) -> None:
    """Drop everything that the slot must not have. If commands have a user of their own, the init itself has no
    limits."""
    for limit, value in () if plan.user else plan.limits:
        _limit(limit, value)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        privileges.drop_capabilities(_BECOME_USERS if plan.user else 0, bounding=0)
    landlock.restrict(_rights(plan), tcp=plan.network)
    privileges.install(inet=plan.network, ipc=False, unix=False, own_user=bool(plan.user))
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


@functools.cache
def settings(network: bool) -> list[str]:
    """Return the files of /etc that commands may read, as far as file permissions allow it."""
    patterns = (*_SETTINGS, *(_SETTINGS_WITH_NETWORK if network else ()))
    found = [path for pattern in patterns for path in glob.glob(f"/etc/{pattern}")]
    return [path for path in found if not host.is_private(path)]


def _rights(plan: UnprivilegedPlan) -> list[tuple[str, int]]:
    rights = [(path, landlock.READ if whole else landlock.LIST) for path, whole in plan.shown]
    rights += [(f"/dev/{name}", landlock.DEVICE | landlock.LIST) for name in _DEVICES]
    own = [(f"{plan.home}/{name}", landlock.WRITE) for name in DIRECTORIES.values()]
    return [*rights, ("/dev/shm", landlock.DROP), *own]  # noqa: S108


def _limit(limit: int, value: int | None) -> None:
    if value is not None:
        _, hard = resource.getrlimit(limit)
        ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (ceiling, ceiling))


def _kill_slot(plan: UnprivilegedPlan) -> process_tree.KillSlot:
    """Return the function that kills all processes of the slot. If the slot has a user of its own, these are the
    processes of that user. Otherwise, these are all processes that this process may signal (isolation level
    `confined`), or this process's descendants (level `none`)."""
    if plan.user:
        return lambda: users.kill(plan.user)
    return process_tree.kill_everything if plan.confined else _kill_descendants


def _kill_descendants() -> None:
    for process in process_tree.processes():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def real_path(home: str, path: str) -> str:
    """Return the path on this machine for a path that a client uses."""
    plain = posixpath.normpath(f"/{path.lstrip('/')}")
    for prefix, name in DIRECTORIES.items():
        if plain == prefix or plain.startswith(f"{prefix}/"):
            return f"{home}/{name}{plain[len(prefix) :]}"
    return path


def _start_as_user(plan: UnprivilegedPlan, spawn: init_messages.Spawn, fds: list[int]) -> int:
    """Start a process as the slot's user and return its pid. Raises OSError if its program could not be run. To become
    another user, this whole process is forked, which takes twice as long as starting a program directly."""
    env = init_messages.env_block(_environment(plan, spawn.env.variables()))
    spawn = spawn._replace(cwd=real_path(plan.home, spawn.cwd), env=env)
    if not plan.user:
        return start_command(spawn, fds)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(plan, spawn, fds, writer)
    os.close(writer)
    with open(reader, "rb") as file:
        _await_start(pid, reader)
        report = file.read()
    # The program's execution closes the pipe, so the end without a report means success.
    if not report:
        return pid
    os.waitpid(pid, 0)
    number, in_directory = struct.unpack("=i?", report)
    raise (NoDirectory if in_directory else OSError)(number, os.strerror(number))


def _await_start(pid: int, reader: int) -> None:
    """Wait until the child reports, executes its program, or ends. Another process of the slot may stop the child
    before that. The child is then continued, and killed if it is stopped again and again."""
    poll, deadline = select.poll(), time.monotonic() + _STOP_PATIENCE_S
    poll.register(reader, select.POLLIN)
    while not poll.poll(_CHECK_MS):
        if process_tree.is_stopped(pid):
            os.kill(pid, signal.SIGCONT if time.monotonic() < deadline else signal.SIGKILL)


def _become(plan: UnprivilegedPlan, spawn: init_messages.Spawn, fds: list[int], writer: int) -> NoReturn:
    """Become the command, in the child. If that fails, report the error, and whether the directory caused it, over
    `writer`."""
    in_directory = False
    try:
        os.setsid()
        os.setgroups([])
        os.setresgid(plan.user, plan.user, plan.user)
        os.setresuid(plan.user, plan.user, plan.user)
        # Entered as the slot's user, so that a directory that this user may not enter is refused.
        in_directory = True
        os.chdir(spawn.cwd)
        in_directory = False
        env = spawn.env.variables()
        path = find(spawn.argv[0], env)
        *high, writer = above(server_directory.WORKSPACE_FD, [*fds, writer])
        for index, target in spawn.places:
            os.dup2(high[index], target, inheritable=True)
        if spawn.terminal:
            fcntl.ioctl(spawn.places[0][1], termios.TIOCSCTTY, 0)
        for limit, value in plan.limits:
            _limit(limit, value)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # A program inherits ignored signals, and the init ignores most of them.
        for number in SPAWN_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execve(path, spawn.argv, env)  # noqa: S606
    except BaseException as error:
        os.write(writer, struct.pack("=i?", getattr(error, "errno", None) or 22, in_directory))
    finally:
        os._exit(127)


def _environment(plan: UnprivilegedPlan, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command. TMPDIR and HOME default to directories of this slot. Git fails if it cannot
    read an existing `/etc/gitconfig`, so it does not look for this file."""
    home = real_path(plan.home, env.get("HOME", "/root"))
    own = {"TMPDIR": f"{plan.home}/{DIRECTORIES['/tmp']}", "GIT_CONFIG_NOSYSTEM": "1"}  # noqa: S108
    return {**own, **env, "HOME": home}


class Init:
    """The control loop: receives orders, starts and kills processes, and reports their ends."""

    def __init__(self, channel: socket.socket, start: Start, kill_slot: process_tree.KillSlot) -> None:
        self._channel, self._start, self._kill_slot = channel, start, kill_slot
        self._commands: dict[int, process_tree.Command] = {}
        self._names: dict[int, int] = {}
        self._at_end: dict[int, process_tree.Moment] = {}

    def serve(self) -> None:
        """Serve until the server closes the channel; the slot ends with this process."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in SPAWN_SIGNALS:  # without a user of their own, commands can send them
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Python continues a poll that a signal interrupts (PEP 475), so a byte in a pipe has to end it.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(CONTROL, select.POLLIN)
        poll.register(reader, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if reader in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 4096)
            self._reap()
            if CONTROL in ready and not self._take_message():
                return

    def _take_message(self) -> bool:
        data, fds = pipes.receive(self._channel, init_messages.MAX_DATAGRAM + 4096, 8)
        if not data:
            return False
        order, command, number = init_messages.decode_order(data)
        if order is Order.LONG:
            with open(fds.pop(0), "rb") as file:
                data = file.read()
            order, command, number = init_messages.decode_order(data)
        if order is Order.SPAWN:
            self._spawn_command(init_messages.decode_spawn(data), fds)
        elif order is Order.KILL:
            self._kill(command, init_messages.decode_moment(data), number)
        else:
            self._signal(command, number)
        return True

    def _spawn_command(self, spawn: init_messages.Spawn, fds: list[int]) -> None:
        said: InitReport | None = None
        try:
            started = time.clock_gettime(time.CLOCK_BOOTTIME)
            pid = self._start(spawn, fds)
            self._commands[pid] = process_tree.Command(pid, process_tree.ticks(started))
            self._names[pid] = spawn.command
            if spawn.announce:
                said = InitReport(ReportKind.STARTED, spawn.command, pid)
        except OSError as error:
            said = InitReport(ReportKind.NOT_STARTED, spawn.command, error.errno or 0, isinstance(error, NoDirectory))
        finally:
            for fd in fds:
                os.close(fd)
        if said is not None:
            send(self._channel, said)

    def _signal(self, name: int, number: int) -> None:
        """Send a signal to the process group that a command leads."""
        for pid, known in self._names.items():
            if known == name:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def _kill(self, name: int, after: process_tree.Moment, flags: int) -> None:
        """Kill a command's tree and report its EXIT, then KILLED. With the flag AT_END, do so only after the command's
        main process has ended."""
        if flags & init_messages.AT_END and name in self._names.values():
            self._at_end[name] = after
            return
        self._at_end.pop(name, None)
        swept, spare = False, bool(flags & init_messages.SPARE)
        for pid, known in list(self._names.items()):
            if known == name:
                others = [command for command in self._commands.values() if command.pid != pid]
                swept = process_tree.kill_tree(
                    self._commands[pid], others, self._reap, after, spare, kill_slot=self._kill_slot
                )
        self._reap()
        send(self._channel, InitReport(ReportKind.KILLED, name, flag=swept))

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._commands:
                command, name = self._commands.pop(pid), self._names.pop(pid)
                code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                send(self._channel, InitReport(ReportKind.EXIT, name, code, False, cpu_s, usage.ru_maxrss << 10))
                if name in self._at_end:
                    self._kill_rest(name, command, self._at_end.pop(name))

    def _kill_rest(self, name: int, ended: process_tree.Command, after: process_tree.Moment) -> None:
        """Kill the rest of a tree after the end of its main process, then report KILLED."""
        others = list(self._commands.values())
        swept = process_tree.kill_tree(ended, others, self._reap, after, spare=True, kill_slot=self._kill_slot)
        send(self._channel, InitReport(ReportKind.KILLED, name, flag=swept))


def start_command(spawn: init_messages.Spawn, fds: list[int]) -> int:
    """Start a command and return its pid. Raises OSError, or `NoDirectory` if the directory is the reason."""
    moved: list[int] = []
    try:
        _change_directory(spawn.cwd)
        env = spawn.env.variables()
        path = find(spawn.argv[0], env)
        highest = max(target for _, target in spawn.places)
        if highest > CONTROL:  # descriptors that are still to be copied may have these numbers
            fds = moved = above(highest, fds)
        actions = _terminal(spawn, fds) + [(os.POSIX_SPAWN_DUP2, fds[i], target) for i, target in spawn.places]
        return os.posix_spawn(
            path, spawn.argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=SPAWN_SIGNALS
        )
    finally:
        for fd in moved:
            os.close(fd)
        with contextlib.suppress(OSError):  # a root that the slot may not enter must not end the init
            os.chdir("/")


def _change_directory(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise NoDirectory(error.errno, error.strerror) from None


def above(highest: int, fds: Sequence[int]) -> list[int]:
    """Duplicate descriptors to numbers above `highest`, and return the duplicates."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest + 1) for fd in fds]


def _terminal(spawn: init_messages.Spawn, fds: list[int]) -> list[tuple[int, int, str, int, int]]:
    """Return the action that opens the terminal, if there is one. `setsid` comes first, so that opening the terminal
    makes it the controlling terminal."""
    if not spawn.terminal:
        return []
    return [(os.POSIX_SPAWN_OPEN, 0, os.ttyname(fds[spawn.places[0][0]]), os.O_RDWR, 0)]


def find(program: str, env: Mapping[str, str]) -> str:
    """Return the path of a program, looked up as a shell would. Raises OSError if none can be run."""
    if "/" in program:
        return program
    denied = False
    for folder in env.get("PATH", "").split(":"):
        path = f"{folder or '.'}/{program}"
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
        # Shells answer 126 for a file that cannot be run and 127 for none, so the two are kept apart.
        denied = denied or os.path.isfile(path)
    raise OSError(errno.EACCES if denied else errno.ENOENT, "cannot run", program)


def send(channel: socket.socket, report: InitReport) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(init_messages.encode_report(report))
