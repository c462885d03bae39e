"""The process in the host's network that connects slots to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_SERVER = """
import os, signal, socket
from palaestra_slots.sandbox.slotd.network import proxy
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
child = os.fork()
if child == 0:
    proxy.run(theirs)
print(child, flush=True)
signal.pause()
"""


def test_a_stopped_proxy_ends_with_its_server() -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        proxy = int(server.stdout.readline())
        ended = os.pidfd_open(proxy)
        try:
            deadline = time.monotonic() + 20
            while "NoNewPrivs:\t1" not in Path(f"/proc/{proxy}/status").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(proxy, signal.SIGSTOP)  # it cannot notice that its socket is at its end
            server.kill()
            assert select.select([ended], [], [], 10)[0] == [ended]
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(ended, signal.SIGKILL)
            os.close(ended)
