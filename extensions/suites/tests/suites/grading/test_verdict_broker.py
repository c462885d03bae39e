"""The broker gives the verdict's descriptor to the launcher of pytest alone, whoever shares a connection with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra_suites.grading.in_slot

_HARNESS = Path(palaestra_suites.grading.in_slot.__file__).parent
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(int(sys.argv[1]), False)
os.execv(sys.argv[2], sys.argv[2:])
"""
_LAUNCH = "os.execv(sys.executable, [sys.executable, launcher, 'needs', 'a program'])"

# The broker is stopped until this process runs the launcher, so that it finds the launcher behind the first connection.
_ATTACK = f"""
import array, os, signal, socket, sys, time
launcher, attack = sys.argv[1:]
broker, parent = os.getppid(), os.getpid()
os.kill(broker, signal.SIGSTOP)
shared = socket.socket(socket.AF_UNIX)
name = os.urandom(16).hex()
row = "0000000000000000: 00000002 00000000 00000000 0001 01"
if attack == "a name that forges a row":
    shared.bind("\\0" + name[:8] + "\\n" + f"{{row}} {{os.fstat(shared.fileno()).st_ino}} @" + name)
elif attack != "without a name":
    shared.bind("\\0" + name)
shared.connect("\\0" + os.environ["PALAESTRA_VERDICT"])
if attack == "inherited":
    shared.set_inheritable(True)
if attack == "copied":
    os.dup2(shared.fileno(), 40, inheritable=True)
if os.fork():
    {_LAUNCH}
own = forged = None
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    with open(f"/proc/{{parent}}/cmdline", "rb") as file:
        if file.read().split(b"\\0")[1:2] == [launcher.encode()]:
            break
if attack == "a forged row of the launcher's socket":
    while own is None and time.monotonic() < deadline:
        for each in os.listdir(f"/proc/{{parent}}/fd"):
            try:
                link = os.readlink(f"/proc/{{parent}}/fd/{{each}}")
            except FileNotFoundError:
                continue
            own = link[8:-1] if link.startswith("socket:") else own
    forged = socket.socket(socket.AF_UNIX)
    forged.bind("\\0x\\n" + f"{{row}} {{own}} @" + name)
os.kill(broker, signal.SIGCONT)
_, data, _, _ = shared.recvmsg(1, socket.CMSG_SPACE(4))
if data:
    os.write(int.from_bytes(data[0][2], sys.byteorder), b'{{"kind": "forged"}}\\n')
"""


def _records(folder: Path, *script: str) -> list[str]:
    """Return the kinds of the records in the verdict of a script."""
    reader, writer = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", _START, str(writer), sys.executable, str(folder / "verdict_broker.py"), *script],
        env={**os.environ, "PALAESTRA_VERDICT": os.urandom(16).hex()},
        pass_fds=[writer],
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as verdict:
        kinds = [json.loads(line)["kind"] for line in verdict]
    assert done.returncode == 97, done.stderr
    return kinds


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    for name in ("verdict_broker.py", "verdict_channel.py", "pytest_launcher.py", "pytest_reporter.py"):
        shutil.copy(_HARNESS / name, tmp_path)
    (tmp_path / "plan.json").write_text('{"library_path": null}')
    return tmp_path


def test_a_launcher_gets_the_descriptor(harness: Path) -> None:
    assert _records(harness, sys.executable, str(harness / "pytest_launcher.py"), "needs", "a program") == ["unmet"]


@pytest.mark.parametrize(
    "attack",
    [
        "inherited",
        "closed by the start of the launcher",
        "copied",
        "without a name",
        "a name that forges a row",
        "a forged row of the launcher's socket",
    ],
)
def test_a_child_of_the_later_launcher_does_not_get_the_descriptor(harness: Path, attack: str) -> None:
    program = harness / "work.py"
    program.write_text(_ATTACK)
    launcher = str(harness / "pytest_launcher.py")
    assert _records(harness, sys.executable, str(program), launcher, attack) == ["unmet"]
