"""Run a test script and give the verdict descriptor only to the pytest launcher.

Everything else that the script starts may be code of the work. The launcher connects to the abstract socket that
`PALAESTRA_VERDICT` names, and gets the descriptor if it is the same interpreter with the same options, runs the file of
the launcher, loads no further library, is not traced, and made its connection itself. A library that the slot makes
every program load, such as another clock, is none of the work if it lies on a mount that nobody in the slot can write.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra_suites.grading.in_slot.verdict_channel import DESCRIPTOR, VARIABLE, hide
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from verdict_channel import DESCRIPTOR, VARIABLE, hide

_HERE = os.path.dirname(os.path.abspath(__file__))
_LOADING = (b"LD_PRELOAD=", b"LD_AUDIT=")
_OWN_LIBRARIES: list[bytes] = []
"""What the loader's variables of this process say, before the script starts."""


def _read_proc(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_launcher(pid: int) -> bool:
    """Return whether a process is the launcher and nothing else."""
    own = _read_proc("/proc/self/cmdline").split(b"\0")
    words = _read_proc(f"/proc/{pid}/cmdline").split(b"\0")
    options = own.index(os.fsencode(__file__))
    same = os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe") and words[:options] == own[:options]
    launched = words[options] == os.fsencode(os.path.join(_HERE, "pytest_launcher.py"))
    loaded = _loader_variables(pid)
    trusted = loaded == _OWN_LIBRARIES and all(map(_is_read_only, loaded))
    return same and launched and trusted and b"TracerPid:\t0\n" in _read_proc(f"/proc/{pid}/status")


def _loader_variables(pid: int | str) -> list[bytes]:
    """Return what the variables of the loader make a process load."""
    return [each for each in _read_proc(f"/proc/{pid}/environ").split(b"\0") if each.startswith(_LOADING)]


def _is_read_only(variable: bytes) -> bool:
    """Return whether a variable of the loader names one file, on a mount that cannot be written."""
    path = variable.partition(b"=")[2]
    return os.path.isabs(path) and os.statvfs(path).f_flag & os.ST_RDONLY != 0


def _made_socket(pid: int, name: object) -> bool:
    """Return whether a process made the socket of this name after it started its program. A socket from before, which
    a child may share, is missing in the process or is not close-on-exec. Other names than those of the launcher are
    refused, because a name with a line break would forge rows of the table."""
    if not isinstance(name, bytes) or not re.fullmatch(rb"\0[0-9a-f]{32}", name):
        return False
    found = re.findall(rb" (\d+) @" + name[1:] + rb"$", _read_proc("/proc/net/unix"), re.MULTILINE)
    for each in os.listdir(f"/proc/{pid}/fd"):
        link = os.readlink(f"/proc/{pid}/fd/{each}")
        if [link] == [f"socket:[{os.fsdecode(inode)}]" for inode in found]:
            flags = re.search(rb"^flags:\s*([0-7]+)$", _read_proc(f"/proc/{pid}/fdinfo/{each}"), re.MULTILINE)
            return flags is not None and int(flags[1], 8) & os.O_CLOEXEC != 0
    return False


def _answer_launcher(server: socket.socket, descriptor: int) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        client, name = server.accept()
        with client:
            pid = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
            if _is_launcher(pid) and _made_socket(pid, name):
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                client.sendmsg([b"1"], [rights])


def main() -> int:
    descriptor = os.dup(DESCRIPTOR)
    os.close(DESCRIPTOR)
    # Read before `hide`: the files of a hidden process in /proc belong to root, and `environ` is readable only by its
    # owner.
    _OWN_LIBRARIES.extend(_loader_variables("self"))
    given = dict(each.split(b"=", 1) for each in _read_proc("/proc/self/environ").split(b"\0") if b"=" in each)
    given.pop(b"LD_LIBRARY_PATH", None)  # this interpreter's
    library_path = json.loads(_read_proc(os.path.join(_HERE, "plan.json")))["library_path"]
    if library_path is not None:
        given[b"LD_LIBRARY_PATH"] = os.fsencode(library_path)
    hide()
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0" + os.environ[VARIABLE])
    server.listen(8)
    server.settimeout(0.1)
    script = subprocess.Popen(sys.argv[1:], env=given)
    while script.poll() is None:
        _answer_launcher(server, descriptor)
    if script.returncode < 0:  # killed by a signal, which the result must show
        os.kill(os.getpid(), -script.returncode)
    return script.returncode if script.returncode >= 0 else 128 - script.returncode


if __name__ == "__main__":
    sys.exit(main())
