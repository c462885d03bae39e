"""Secrets among the arguments of a process are not seen after `hide`."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from palaestra_slots.core.io.process_arguments import hide
for secret in ('sk-grün-1', 'other', ''): hide(secret)
print(open('/proc/self/cmdline', 'rb').read().split(b'\\0')[3:], sys.argv[1:])
"""


def test_a_secret_is_overwritten_everywhere_and_nothing_else_is() -> None:
    arguments = ["--openai.api_key", "sk-grün-1", "--key=sk-grün-1", "task"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=True, timeout=60, encoding="utf-8"
    )
    hidden = b"x" * len("sk-grün-1".encode())
    assert done.stdout == f"{[b'--openai.api_key', hidden, b'--key=' + hidden, b'task', b'']} {arguments}\n"
