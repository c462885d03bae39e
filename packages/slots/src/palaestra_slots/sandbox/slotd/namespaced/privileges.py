"""Limits the privileges of a slot's root user: which capabilities it has, and which system calls no command may make.

The capabilities are those that ordinary programs need on their own files and processes. They hold in the slot's user
namespace only. None of them allows a process to mount file systems, trace across namespaces, load kernel modules,
configure the kernel or create devices.

The filter is a classic BPF program for x86-64 and aarch64, with a deny list. It blocks parts of the kernel that
ordinary programs do not use and that namespaces do not contain (io_uring, bpf, keyrings, AIO, vsock sockets, foreign
ABIs, the state of the page cache). It also blocks everything that would make new namespaces or mounts. It is the second
line of defence; the first is that the slot has no privilege over anything outside.

`clone3` answers ENOSYS, since a filter cannot read its flags in memory; C libraries then use `clone`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from .. import syscalls

_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _NET_BIND_SERVICE = 0, 1, 3, 4, 5, 6, 7, 10

KEPT = sum(
    1 << capability
    for capability in (_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _NET_BIND_SERVICE)
)


def drop_capabilities(kept: int = KEPT, bounding: int = KEPT) -> None:
    """Permanently drop all capabilities except `kept`. An exec restores only capabilities in `bounding`."""
    for capability in range(64):
        if not bounding >> capability & 1:
            try:
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
            except OSError as error:
                if error.errno == 22:  # beyond the last capability that this kernel knows
                    break
                raise
    # Ambient capabilities would survive the execution of a program; 4 clears all of them.
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, 4)
    syscalls.capset(kept)


_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _ALWAYS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x05, 0x06
_ALLOW, _KILL_PROCESS, _EPERM, _ENOSYS, _NO_FAMILY = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061
_EINVAL, _ENOMEM, _EOPNOTSUPP, _NO_PROTOCOL, _NO_TYPE = 0x50016, 0x5000C, 0x5005F, 0x5005D, 0x5005E
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2, _ARGUMENT_3, _ARGUMENT_5 = 0, 4, 16, 24, 32, 40, 56

_NAMESPACE_FLAGS = 0x7E020000
# unix, inet, inet6, netlink. Other families (vsock, packet, alg, …) cross network namespaces or are not needed.
_FAMILIES = (1, 2, 10, 16)
_UNIX, _INET, _NETLINK = 1, (2, 10), 16
_SOCKET_TYPE, _STREAM, _SEQPACKET = 0xF, 1, 5  # the mask of a type without its flags, and two types
# These two report interfaces, addresses and routes, and the sockets of the network namespace. The other protocols carry
# messages between processes, configure the kernel, or report events of the whole machine.
_NETLINK_ROUTE, _NETLINK_SOCK_DIAG = 0, 4
# The default protocol of the socket type, ICMP, TCP, UDP, ICMPv6. For other protocols, the kernel may load a module.
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# The page cache of files that slots share outlives the slots. Through calls that report or change which pages it holds
# (mincore, fadvise64, readahead, cachestat, process_madvise), slots could pass information to each other.
_ABSENT = {
    "x86_64": {
        "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "mincore": 27, "fadvise64": 221, "readahead": 187,
        "io_setup": 206,
    },
    "aarch64": {
        "bpf": 280, "userfaultfd": 282, "perf_event_open": 241, "mincore": 232, "fadvise64": 223, "readahead": 213,
        "io_setup": 0,
    },
}  # fmt: skip
# io_uring, clone3, process_madvise, memfd_secret (memory that no limit counts), cachestat
_ABSENT_EVERYWHERE = (425, 426, 427, 435, 440, 447, 451)

_DENIED = {
    "x86_64": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308, "unshare": 272,
        "add_key": 248, "request_key": 249, "keyctl": 250, "open_by_handle_at": 304, "name_to_handle_at": 303,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
        "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103, "vhangup": 153,
        "clock_settime": 227, "settimeofday": 164, "adjtimex": 159, "clock_adjtime": 305, "iopl": 172, "ioperm": 173,
        "process_vm_writev": 311, "lookup_dcookie": 212, "nfsservctl": 180, "sysfs": 139, "uselib": 134, "ustat": 136,
        "fanotify_init": 300, "move_pages": 279, "migrate_pages": 256, "kcmp": 312,
    },
    "aarch64": {
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "setns": 268, "unshare": 97,
        "add_key": 217, "request_key": 218, "keyctl": 219, "open_by_handle_at": 265, "name_to_handle_at": 264,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
        "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116, "vhangup": 58,
        "clock_settime": 112, "settimeofday": 170, "adjtimex": 171, "clock_adjtime": 266,
        "process_vm_writev": 271, "lookup_dcookie": 18, "nfsservctl": 42,
        "fanotify_init": 262, "move_pages": 239, "migrate_pages": 238, "kcmp": 272,
    },
}  # fmt: skip
_DENIED_EVERYWHERE = (428, 429, 430, 431, 432, 433, 442, 443, 467)  # the newer mount calls, quotactl_fd

_IPC = {
    "x86_64": {"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240},
    "aarch64": {"shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180},
}

# Calls that change the limits, priority or processors of a process, with the position of the argument that is 0 for the
# caller: prlimit64, setpriority, ioprio_set, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr.
_ON_OTHERS = {
    "x86_64": {302: _ARGUMENT_0, 141: _ARGUMENT_1, 251: _ARGUMENT_1, 142: _ARGUMENT_0, 144: _ARGUMENT_0,
               203: _ARGUMENT_0, 314: _ARGUMENT_0},
    "aarch64": {261: _ARGUMENT_0, 140: _ARGUMENT_1, 30: _ARGUMENT_1, 118: _ARGUMENT_0, 119: _ARGUMENT_0,
                122: _ARGUMENT_0, 274: _ARGUMENT_0},
}  # fmt: skip

_CALLS = {
    "x86_64": {
        "clone": 56, "ioctl": 16, "socket": 41, "socketpair": 53, "fcntl": 72, "madvise": 28, "preadv2": 327,
        "mmap": 9, "memfd_create": 319, "shmget": 29, "setsockopt": 54,
    },
    "aarch64": {
        "clone": 220, "ioctl": 29, "socket": 198, "socketpair": 199, "fcntl": 25, "madvise": 233, "preadv2": 286,
        "mmap": 222, "memfd_create": 279, "shmget": 194, "setsockopt": 208,
    },
}  # fmt: skip
_MADV_COLD, _MADV_PAGEOUT, _RWF_NOWAIT = 20, 21, 8
# Huge pages come from a pool of the whole machine, and no memory limit counts them.
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
# A larger pipe is charged to the user who made it, who may be outside the slot.
_F_SETPIPE_SZ = 1031
# The memory of compiled filters has one limit for the whole machine: SO_ATTACH_FILTER, SO_ATTACH_BPF and the two
# SO_ATTACH_REUSEPORT options.
_SOL_SOCKET, _SOCKET_FILTERS = 1, (26, 50, 51, 52)
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def supported() -> bool:
    """Return whether there is a table of system calls for this architecture. Without a table, no slot is made."""
    return syscalls.MACHINE in _AUDIT


@functools.cache
def program(
    machine: str = syscalls.MACHINE, *, inet: bool = True, ipc: bool = True, unix: bool = True, own_user: bool = True
) -> bytes:
    """Return the filter for one architecture, as packed `struct sock_filter`s. The other arguments are for slots
    without namespaces. `inet=False` blocks internet sockets. `ipc=False` blocks System V objects and message queues,
    which would outlive the slot. `unix=False` blocks unix sockets except connected pairs, because services of the host
    listen on unix sockets. `own_user=False` keeps each process from changing the limits and priorities of other
    processes, which may belong to the user and not to the slot. Otherwise, this is refused only for pid 1, the slot's
    init, which a command could end with a limit."""
    # The same number is another call in another ABI, such as that of 32 bits, so a process with another ABI is killed.
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        # The x32 ABI has the architecture of x86-64, and this bit in its numbers.
        lines += _when((_AT_LEAST, _X32), _ENOSYS)
    # The answer is that of a kernel without these calls, for which programs are prepared.
    answers = dict.fromkeys((*_ABSENT[machine].values(), *_ABSENT_EVERYWHERE), _ENOSYS)
    answers |= dict.fromkeys((*_DENIED[machine].values(), *_DENIED_EVERYWHERE), _EPERM)
    answers |= {} if ipc else dict.fromkeys(_IPC[machine].values(), _ENOSYS)
    for number, answer in answers.items():
        lines += _when((_EQUAL, number), answer)
    calls = _CALLS[machine]
    lines += _clause(calls["clone"], _ARGUMENT_0, _when((_ANY_BIT, _NAMESPACE_FLAGS), _EPERM))
    # Both put text into a terminal's input as if its user had typed it.
    terminal = [*_when((_EQUAL, _TIOCSTI), _EPERM), *_when((_EQUAL, _TIOCLINUX), _EPERM)]
    lines += _clause(calls["ioctl"], _ARGUMENT_1, terminal)
    lines += _clause(calls["fcntl"], _ARGUMENT_1, _when((_EQUAL, _F_SETPIPE_SZ), _EPERM))
    hints = [*_when((_EQUAL, _MADV_COLD), _EINVAL), *_when((_EQUAL, _MADV_PAGEOUT), _EINVAL)]
    lines += _clause(calls["madvise"], _ARGUMENT_2, hints)
    lines += _clause(calls["preadv2"], _ARGUMENT_5, _when((_ANY_BIT, _RWF_NOWAIT), _EOPNOTSUPP))
    lines += _clause(calls["mmap"], _ARGUMENT_3, _when((_ANY_BIT, _MAP_HUGETLB), _ENOMEM))
    lines += _clause(calls["memfd_create"], _ARGUMENT_1, _when((_ANY_BIT, _MFD_HUGETLB), _ENOMEM))
    lines += _clause(calls["shmget"], _ARGUMENT_2, _when((_ANY_BIT, _SHM_HUGETLB), _ENOMEM))
    filters = [line for option in _SOCKET_FILTERS for line in _when((_EQUAL, option), _EPERM)]
    of_sockets = [*_unless((_SOL_SOCKET,), _ALLOW), (_LOAD, 0, 0, _ARGUMENT_2), *filters]
    lines += _clause(calls["setsockopt"], _ARGUMENT_1, of_sockets)
    families = [family for family in _FAMILIES if inet or family not in _INET]
    listening, netlink, pair_types = families, [_NETLINK_ROUTE, _NETLINK_SOCK_DIAG], list[Instruction]()
    if not unix:
        listening, netlink = [family for family in families if family != _UNIX], [_NETLINK_ROUTE]
        # Even if it is one of a pair, a datagram socket can send to any path (and type 3, raw, makes one, too).
        pair_types = [(_LOAD, 0, 0, _ARGUMENT_1), (_AND, 0, 0, _SOCKET_TYPE), *_unless((_STREAM, _SEQPACKET), _NO_TYPE)]
    # Before the clause for families, which allows every socket that it does not refuse.
    lines += _protocols(calls["socket"], (_NETLINK,), netlink)
    lines += _protocols(calls["socket"], _INET, _INET_PROTOCOLS)
    for number, argument in _ON_OTHERS[machine].items():
        lines += _clause(number, argument, _when((_EQUAL, 1), _EPERM) if own_user else _unless((0,), _EPERM))
    lines += _clause(calls["socket"], _ARGUMENT_0, _unless(listening, _NO_FAMILY))
    lines += _clause(calls["socketpair"], _ARGUMENT_0, [*_unless(families, _NO_FAMILY), *pair_types])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def install(*, inet: bool = True, ipc: bool = True, unix: bool = True, own_user: bool = True) -> None:
    """Apply the filter to this process and every process that it starts. Requires that `no_new_privs` is set."""
    syscalls.install_filter(program(inet=inet, ipc=ipc, unix=unix, own_user=own_user))


def _protocols(socket: int, families: Sequence[int], allowed: Sequence[int]) -> list[Instruction]:
    """Return the clause that refuses sockets of these families unless their protocol is one of `allowed`, and otherwise
    continues with the next rule."""
    refuse = [(_LOAD, 0, 0, _ARGUMENT_2), *_unless(allowed, _NO_PROTOCOL)]
    count = len(families)
    others = [(_EQUAL, count - index, 0, family) for index, family in enumerate(families)]
    inner = [(_LOAD, 0, 0, _ARGUMENT_0), *others, (_ALWAYS, 0, 0, len(refuse)), *refuse]
    return [(_EQUAL, 0, len(inner), socket), *inner, (_LOAD, 0, 0, _NUMBER)]


def _when(test: tuple[int, int], verdict: int) -> list[Instruction]:
    return [(test[0], 0, 1, test[1]), (_RETURN, 0, 0, verdict)]


def _unless(values: Sequence[int], verdict: int) -> list[Instruction]:
    count = len(values)
    tests = [(_EQUAL, count - index, 0, value) for index, value in enumerate(values)]
    return [*tests, (_RETURN, 0, 0, verdict)]


def _clause(call: int, argument: int, body: list[Instruction]) -> list[Instruction]:
    """Return the clause for one call: test the low half of an argument, and allow the call unless the body refuses
    it."""
    inner = [(_LOAD, 0, 0, argument), *body, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inner), call), *inner]
