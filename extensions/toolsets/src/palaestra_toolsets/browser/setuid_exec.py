"""Runs Chromium as a given user: `python -I -S setuid_exec.py UID HOME PROGRAM ARGUMENT…`. Standard library only.

If that is a different user, it becomes the owner of the profile directory named in the arguments. The environment, with
any keys in it, is dropped; descriptors stay open, because Playwright uses two of them to control Chromium. Invariant:
the program ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PROFILE = "--user-data-dir="


def main(uid: int, home: str, program: str, arguments: list[str]) -> None:
    parent = os.getppid()
    if uid != os.getuid():
        for argument in arguments:
            if argument.startswith(_PROFILE):
                os.chown(argument.removeprefix(_PROFILE), uid, uid)  # created for this start, and still empty
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # set after the change of user, which clears it
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    environment = {"HOME": home, "TMPDIR": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.chdir(home)
    os.execve(program, [program, *arguments], environment)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
