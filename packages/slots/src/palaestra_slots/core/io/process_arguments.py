"""Hides secrets in the arguments of this process, which other users of the machine can read in `/proc/PID/cmdline`."""

from __future__ import annotations

from palaestra_slots.core.redaction import remember_secret


def hide(secret: str) -> None:
    """Overwrite a secret among the arguments, and `remember` it. Until this call, other users could read the secret.
    Overwrites nothing on systems without `/proc`."""
    remember_secret(secret)
    wanted = secret.encode("utf-8", "surrogateescape")
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    except (OSError, IndexError, ValueError):
        return
    if not wanted or not 0 < start < end:
        return
    import ctypes  # imported here, because most command lines have no secrets

    shown = ctypes.string_at(start, end - start)
    place = shown.find(wanted)
    while place >= 0:
        ctypes.memset(start + place, ord("x"), len(wanted))
        place = shown.find(wanted, place + len(wanted))
