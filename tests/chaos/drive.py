"""Kills processes of ours at random while leases are worked through, then looks for anything that is left. A program.

    python drive.py --rung full --leases 300 --kills 60 --seed 7

It is the subreaper of everything it starts: whatever loses its parent becomes its child, so "is anything left?" has an
exact answer however many processes died on the way. Prints one JSON report. The victims are drawn from a seeded
generator by role: client, reaper (the process that watches the server), server, init, command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung
from palaestra_slots.sandbox.slotd.namespaced import cgroups
from sandbox.processes import HostProcess, descendants

ROLES = ("client", "reaper", "server", "init", "command")
GONE_WITHIN_S = 2.0
_WORKER = str(Path(__file__).with_name("worker.py"))
_SET_CHILD_SUBREAPER = 36


@dataclass
class Chaos:
    """One storm: how many leases, how many kills, and what was seen."""

    rung: Rung
    leases: int
    kills: int
    chance: random.Random
    home: str
    said: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    dirty: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Client after client until every lease has been tried."""
        done = 0
        while done < self.leases:
            with self._client(done) as client:
                os.set_blocking(client.stdout.fileno(), False)  # type: ignore[union-attr]
                done += self._storm(client)
                client.kill()

    def _client(self, first: int) -> subprocess.Popen[str]:
        arguments = [sys.executable, _WORKER, self.rung.label, str(first), str(self.leases - first)]
        env = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": self.home, "PATH": os.defpath}
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)

    def _storm(self, client: subprocess.Popen[str]) -> int:
        """Kill while one client lives; how many of its leases ended. A kill comes after every so many of them."""
        told = 0
        calm = self.leases / max(1, self.kills)
        next_kill = self.chance.uniform(0, 2 * calm)
        while True:
            over = client.poll() is not None
            lines = self._lines(client)
            told += len(lines)
            if over and not lines:
                return told
            self.seen |= {process.pid for process in descendants(os.getpid())}
            while told >= next_kill and not over:  # several leases may have ended at once
                next_kill += self.chance.uniform(0, 2 * calm)
                self._kill(client)
            reap(keep=client.pid)
            os.sched_yield()
            time.sleep(0.001)  # the storm leaves the processors to the storm-tossed

    def _lines(self, client: subprocess.Popen[str]) -> list[str]:
        assert client.stdout is not None
        lines = []
        with contextlib.suppress(TypeError, BlockingIOError):
            while line := client.stdout.readline():
                _, _, verdict = line.strip().partition(" ")
                self.said[verdict.partition(":")[0]] += 1
                self.dirty += [line] if verdict.startswith("dirty") else []
                lines.append(line)
        return lines

    def _kill(self, client: subprocess.Popen[str]) -> None:
        roles = by_role(client.pid)
        if present := [role for role in ROLES if roles[role]]:
            role = self.chance.choice(present)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(roles[role]), signal.SIGKILL)
                self.killed[role] += 1


def by_role(client: int) -> dict[str, list[int]]:
    """The pids of everything of ours, by what it does. Those of dead clients are among them."""
    found: dict[str, list[int]] = {role: [] for role in ROLES}
    everything = {process.pid: process for process in descendants(os.getpid())}
    for process in everything.values():
        found[_role(process, everything, client)].append(process.pid)
    return found


def _role(process: HostProcess, everything: dict[int, HostProcess], client: int) -> str:
    if process.pid == client:
        return "client"
    if process.name == "slot-init":
        return "init"
    if process.name == "slotd":
        return "server"
    parent = everything.get(process.parent)
    return "reaper" if parent is None or parent.pid == client else "command"


def reap(keep: int = 0) -> None:
    """Take the zombies that have become ours, but not the client, whose end somebody waits for."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ChildProcessError):
            stat = (folder / "stat").read_text(errors="replace")
            pid, rest = int(folder.name), stat.rpartition(") ")[2].split()
            if rest[0] == "Z" and int(rest[1]) == os.getpid() and pid != keep:
                os.waitpid(pid, os.WNOHANG)


def leftovers(chaos: Chaos) -> list[str]:
    """What there still is: processes, mounts, control groups, files."""
    reap()
    found = [f"process {process}" for process in descendants(os.getpid())]
    for hierarchy in cgroups.find():
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(hierarchy.parent)
            found += [f"group {name}" for name in names if name.partition("-")[0] in {str(pid) for pid in chaos.seen}]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if "/slots/" in line or "/skeleton" in line]
    return found + [f"file {name}" for name in os.listdir(chaos.home)]


def wait_for_nothing(chaos: Chaos) -> list[str]:
    """What is left after two seconds."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := leftovers(chaos)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


async def _next_start(rung: Rung) -> None:
    async with LocalBackend(rung=rung):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=["full", "userns"], default="full")
    parser.add_argument("--leases", type=int, default=300)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        chaos = Chaos(Rung[options.rung.upper()], options.leases, options.kills, random.Random(options.seed), home)
        chaos.run()
        left = wait_for_nothing(chaos)
        groups_wait = left and chaos.killed["reaper"] and all(line.startswith("group ") for line in left)
        if groups_wait:
            asyncio.run(_next_start(chaos.rung))
            left = wait_for_nothing(chaos)
    report = {
        "leases": dict(chaos.said), "killed": dict(chaos.killed), "dirty": chaos.dirty, "left": left,
        "after_next_start": bool(groups_wait), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
