"""A supervised command: its exit code is the supervisor's, also after a signal."""

from __future__ import annotations

import signal
import subprocess

import pytest

from palaestra_slots.core.io.supervised_command import supervised


@pytest.mark.parametrize(
    ("trap", "code"), [("exit 0", 0), ("exit 3", 3), ("trap - TERM; kill $$", 128 + signal.SIGTERM)]
)
def test_a_command_that_ends_at_a_signal_has_its_own_exit_code(trap: str, code: int) -> None:
    script = f"trap '{trap}' TERM; echo up; while :; do sleep 0.05; done"
    with subprocess.Popen(supervised("sh", "-c", script), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code
