"""Attacks of a sandbox's own programs, sent through the port: each meets its limit, and the neighbour keeps working."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from palaestra_e2b.api_keys import ApiKey
from palaestra_slots.core.types import Limits

from .conftest import FIRST, a_server
from .http_client import Api, Box

pytestmark = pytest.mark.slots

MEMORY, DISK, PROCESSES = 256 << 20, 64 << 20, 64


@pytest.fixture(scope="module")
def small() -> Iterator[Api]:
    """A server whose sandboxes have small limits."""
    limits = Limits(memory_bytes=MEMORY, disk_bytes=DISK, pids=PROCESSES)
    with a_server(ApiKey("k", FIRST), limits=limits) as running:
        api = Api(running.url, FIRST)
        yield api
        api.close()


@pytest.fixture(scope="module")
def neighbour(small: Api) -> Box:
    box = small.create()
    box.write("mine", b"untouched")
    box.start("exec sleep 600")
    return box


@pytest.fixture
def attacker(small: Api, neighbour: Box) -> Iterator[Box]:
    box = small.create()
    yield box
    box.kill()
    assert neighbour.read("mine").body == b"untouched"
    assert neighbour.run("pgrep -c sleep || ps x | grep -c '[s]leep 600'").out.strip() == b"1"


def python(box: Box, program: str) -> dict[str, object]:
    """What a program prints as JSON."""
    ran = box.run(f"python3 - <<'END'\nimport json\n{program}\nEND")
    found: dict[str, object] = json.loads(ran.out.decode() or "{}")
    return found


def test_processes_are_counted(attacker: Box) -> None:
    found = python(
        attacker,
        """
import os, signal
children, error = [], 0
try:
    for _ in range(500):
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except OSError as failed:
    error = failed.errno
for child in children:
    os.kill(child, 9)
print(json.dumps({"made": len(children), "error": error}))
""",
    )
    assert found["error"] == 11  # EAGAIN
    assert isinstance(found["made"], int)
    assert 0 < found["made"] < PROCESSES


def test_memory_is_limited(attacker: Box) -> None:
    ran = attacker.run("python3 -c 'a = bytearray(1 << 30); print(len(a))'")
    assert b"1073741824" not in ran.out
    assert ran.code != 0
    assert attacker.run("echo alive").out == b"alive\n"


def test_the_disk_is_limited_for_commands_and_uploads(attacker: Box) -> None:
    assert attacker.run("head -c 1G /dev/zero > big").code != 0
    attacker.run("rm -f big")
    assert attacker.write("upload", bytes(2 * DISK)).status >= 400
    attacker.run("rm -f upload")
    assert attacker.write("small", b"fits").status == 200


def test_the_network_reaches_no_host(attacker: Box) -> None:
    own = int(attacker.api.url.rpartition(":")[2])
    with socket.create_server(("0.0.0.0", 0)) as listener:
        ports = [own, listener.getsockname()[1]]
        found = python(
            attacker,
            f"""
import socket
reached = []
for host in ("127.0.0.1", "::1", {socket.gethostname()!r}, "169.254.169.254", "10.0.0.1", "1.1.1.1"):
    for port in {ports}:
        try:
            socket.create_connection((host, port), timeout=1).close()
            reached.append([host, port])
        except OSError:
            pass
print(json.dumps({{"reached": reached}}))
""",
        )
    assert found == {"reached": []}


def test_signals_stay_inside(attacker: Box) -> None:
    attacker.run("kill -9 -1")
    assert attacker.run("echo alive").out == b"alive\n"


def test_links_lead_the_file_api_to_no_neighbour(attacker: Box, neighbour: Box) -> None:
    attacker.run(
        "ln -s / root; mkdir loop; ln -s ../loop loop/self; mkfifo pipe; ln -s /proc/self/fd fd; ln -s /dev dev"
    )
    assert attacker.files("ListDir", {"path": "loop", "depth": 100}).status < 500
    assert attacker.files("Move", {"source": "root", "destination": "moved"}).status == 200
    assert attacker.files("Remove", {"path": "moved"}).status == 200
    assert attacker.run("test -e /etc/passwd").code == 0, "the link is removed, not what it leads to"
    assert attacker.read("pipe").status >= 400, "no read waits for a writer"
    assert attacker.read("dev/zero").status >= 400, "no read without an end"
    assert attacker.read(f"/proc/1/root/../{neighbour.id}/mine").status == 404


def test_an_archive_unpacks_inside(attacker: Box) -> None:
    ran = attacker.run(
        """python3 - <<'END'
import io, tarfile
with tarfile.open("evil.tar", "w") as tar:
    for name in ("../../../../../../tmp/up", "/tmp/absolute"):
        entry = tarfile.TarInfo(name)
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"evil"))
END
tar -xPf evil.tar && cat /tmp/absolute"""
    )
    assert ran.out == b"evil", "it wrote to its own /tmp"
    with pytest.raises(FileNotFoundError):
        open("/tmp/absolute")  # noqa: SIM115
