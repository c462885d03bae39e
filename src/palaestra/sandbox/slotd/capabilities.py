"""Which capabilities the root of a slot keeps: those that ordinary programs need on their own files and processes.

None of them reaches outside: they hold in the slot's user namespace only, and none lets a process mount, trace across
namespaces, load, configure or create devices.
"""

from __future__ import annotations

from . import syscalls

_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _NET_BIND_SERVICE = 0, 1, 3, 4, 5, 6, 7, 10

KEPT = sum(
    1 << capability
    for capability in (_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _NET_BIND_SERVICE)
)


def drop(kept: int = KEPT, bounding: int = KEPT) -> None:
    """Give up all capabilities but `kept`, for good: an exec brings back none that is not in `bounding`."""
    for capability in range(64):
        if not bounding >> capability & 1:
            try:
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
            except OSError as error:
                if error.errno == 22:  # beyond the last one this kernel knows
                    break
                raise
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, 4)
    syscalls.capset(kept)
