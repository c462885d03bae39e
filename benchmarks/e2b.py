"""`palaestra serve e2b` over HTTP next to `docker run`, `docker exec` and `docker rm`: python benchmarks/e2b.py

The server runs in a process of its own, and the calls are those of the E2B SDK, over one connection that stays open.
Sandboxes and containers have no network, and a command is `bash -c true` (with `-l` in the sandbox, as the SDK sends
it). The cases alternate, with five commands in each sandbox and container. Then 200 idle sandboxes are weighed (the
proportional set size of all the server's processes, without kernel memory), and 1,000 are created and killed. The rows
of docker need root and dockerd; without them, the ratios are left out.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import _measure as measure
import _slot_peers as peers

CREATE, EXEC = 0.06, 0.12
"""The largest ratios of `create` to `docker run` and of a command to `docker exec`."""
IDLE_BYTES, IDLE, CYCLES, FORKS, EXECS = 5_000_000, 200, 1000, 16, 5
KEY = "e2b_benchmark"


class Client:
    """What the SDK sends, over one connection."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"X-API-Key": KEY, "Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status < 300, text
        return json.loads(text) if text else None

    def create(self, network: bool = False) -> Any:
        body = {"templateID": "base", "timeout": 3600, "allow_internet_access": network}
        return self.call("POST", "/v2/sandboxes", body)

    def kill(self, sandbox: Any) -> None:
        self.call("DELETE", f"/sandboxes/{sandbox['sandboxID']}")

    def run(self, sandbox: Any) -> None:
        """Run a command, and read the stream to its end."""
        message = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}, "stdin": False}
        data = json.dumps(message).encode()
        headers = {
            "Content-Type": "application/connect+json", "E2b-Sandbox-Id": sandbox["sandboxID"],
            "X-Access-Token": sandbox["envdAccessToken"],
        }  # fmt: skip
        self._connection.request("POST", "/process.Process/Start", struct.pack("!BI", 0, len(data)) + data, headers)
        text = self._connection.getresponse().read()
        assert b'"exited":true' in text, text


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, str]]:
    """Run the server, and yield its pid and URL."""
    (folder / "keys").write_text(f"bench {KEY} sandboxes=500\n")
    command = [sys.executable, "-m", "palaestra", "serve", "e2b", "--port", "0", "--json", "--state", str(folder)]
    with subprocess.Popen([*command, "--keys", f"{folder}/keys"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(30)


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(each.parent.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += parents.get(found[-1], [])
    return found


def weight(pid: int) -> int:
    """Return the proportional set size of a process and all its descendants, in bytes."""
    total = 0
    for each in tree(pid):
        try:
            rows = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))
    return total


def mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def timed(call: Callable[[], Any], into: list[float]) -> Any:
    started = time.perf_counter()
    result = call()
    into.append((time.perf_counter() - started) * 1000)
    return result


def latencies(client: Client, docker: tuple[str, dict[str, str]] | None, rounds: int) -> list[measure.Row]:
    """Measure the milliseconds of each operation, ours and docker's in turns."""
    found: dict[str, list[float]] = {}

    def once(name: str, call: Callable[[], Any]) -> Any:
        return timed(call, found.setdefault(name, []))

    def command(*arguments: str) -> str:
        assert docker is not None
        done = subprocess.run([docker[0], *arguments], env=docker[1], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    client.kill(client.create())  # prepares the template
    for number in range(rounds):
        measure.progress(f"round {number + 1} of {rounds}")
        box = once("create", client.create)
        for _ in range(EXECS):
            once("exec", lambda box=box: client.run(box))
        fork = f"/sandboxes/{box['sandboxID']}/fork"
        forks = once(f"fork({FORKS})", lambda fork=fork: client.call("POST", fork, {"count": FORKS, "timeout": 600}))
        for each in forks:
            once("kill", lambda each=each: client.kill(each["sandbox"]))
        client.kill(box)
        client.kill(once("create with a network", lambda: client.create(True)))
        if docker is not None:
            run = ("run", "-d", "--network", "none", peers.IMAGE, "/bin/sleep", "100000")
            container = once("docker run", lambda run=run: command(*run))
            for _ in range(EXECS):
                once("docker exec", lambda container=container: command("exec", container, *peers.TRUE))
            once("docker rm -f", lambda container=container: command("rm", "-f", container))
    median = {name: statistics.median(each) for name, each in found.items()}
    rows = []
    targets = {"create": ("docker run", CREATE), "exec": ("docker exec", EXEC), "kill": ("docker rm -f", None),
               "create with a network": ("docker run", None), f"fork({FORKS})": ("docker run", None)}  # fmt: skip
    for name, value in median.items():
        peer, target = targets.get(name, ("", None))
        times = FORKS if name.startswith("fork") else 1
        ratio = value / median[peer] / times if peer in median else None
        row = measure.Row(name, value, "ms", ratio)
        rows.append(row if target is None or ratio is None else measure.judged(row, target, ratio <= target))
    return rows


def idle(client: Client, pid: int, count: int) -> measure.Row:
    """Weigh idle sandboxes."""
    before = weight(pid)
    boxes = [client.create() for _ in range(count)]
    each = (weight(pid) - before) / count
    for box in boxes:
        client.kill(box)
    return measure.with_ceiling(
        measure.Row(f"memory of each of {count} idle sandboxes", each / 1e6, "MB"), IDLE_BYTES / 1e6
    )


def cycles(url: str, pid: int, count: int) -> list[measure.Row]:
    """Create and kill sandboxes, two at a time, and count what is left."""
    before = len(tree(pid)), mounts()
    started = time.perf_counter()

    def work(_: int) -> None:
        client = Client(url)
        for _ in range(count // 2):
            box = client.create()
            client.run(box)
            client.kill(box)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    seconds = time.perf_counter() - started
    time.sleep(1)
    left = len(Client(url).call("GET", "/v2/sandboxes"))
    left += max(0, len(tree(pid)) - before[0]) + max(0, mounts() - before[1])
    return [
        measure.Row(f"{count} sandboxes created, used and killed", seconds, "s"),
        measure.with_ceiling(measure.Row("sandboxes, processes and mounts left", left, ""), 0),
    ]


def main() -> int:
    """Measure and print the table."""
    options = measure.parse_options(__doc__, rounds=20)
    idle_count, cycle_count = (20, 20) if options.quick else (IDLE, CYCLES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pid, url = stack.enter_context(server(folder))
        client = Client(url)
        with ExitStack() as daemon:
            try:
                docker = daemon.enter_context(peers.docker())
            except peers.Absent as reason:
                print(f"docker is not measured: {reason}", file=sys.stderr)
                docker = None
            rows = latencies(client, docker, options.rounds)
        rows.append(idle(client, pid, idle_count))
        rows += cycles(url, pid, cycle_count)
    return measure.report("The E2B API over slots, next to docker", rows, options.json)


if __name__ == "__main__":
    os.environ.pop("E2B_API_KEY", None)
    sys.exit(main())
