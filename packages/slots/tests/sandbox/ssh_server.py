"""An ssh server of our own for tests, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[tuple[list[str], int]]:
    """A server of our own; yields what `ssh` needs to reach it, and its pid. Skips the test without OpenSSH."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if os.geteuid() != 0 or not os.path.exists(server):
        pytest.skip("needs root and sshd (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n"
    )
    process = subprocess.Popen([server, "-D", "-f", str(folder / "conf"), "-E", str(folder / "log")])
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        yield ["-F", "none", "-p", str(port), "-i", str(folder / "user"), "-l", "root", *known], process.pid
    finally:
        process.terminate()
        process.wait(20)
