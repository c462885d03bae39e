"""The same tasks with the same replies, here and in other packages: python benchmarks/peers.py [--peers PYTHON]

Thirty tasks, each with a file of its own, five commands that a scripted model server asks for, and a command whose
output is checked. `--peers` is an interpreter with the peers: scripts/peers_env makes .venv-peers/bin/python. Peers
that use containers need root, dockerd (Inspect: 24 or newer) and `docker compose` (2.22 or newer); the script starts a
daemon of its own, and the image is an empty root with this machine's programs mounted read-only. All peers alternate,
each in a process of its own with its own TMPDIR and HOME, and medians are reported. Measured of each:

- `seconds`: from the start of its process to the end, and from the first task to the last score.
- `CPU s`: of all its processes, of those in containers, and of what the docker daemon does for them.
- `memory`: the highest rise of the proportional set size of all these processes, measured in a run of its own.
- `left over`: processes, containers, networks of docker, and entries of TMPDIR and HOME that are there 3 s later.

A peer that cannot be measured is in the table, with the reason. `--rounds 0` measures time and memory in one run, and
`--page FILE` writes the page of the documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import _measure as measure
import _process_tree as tree
from _instant_server import chat_reply, serve
from _peer_plays import COMMANDS, numbered_tasks

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parents[1] / "packages/slots/tests"))

TASKS, WIDTH, ROUNDS = 30, 5, 3
QUICK_TASKS, QUICK_WIDTH = 4, 2
LEFT_OVER_S, LIMIT_S = 3.0, 600
BRIDGE = "10.213.77.1/24"
FROM_START, TASKS_ONLY, CPU, MEMORY = "seconds", "of them tasks", "CPU s", "memory MB"
LEFT = ("processes", "containers", "networks", "files")


class Absent(Exception):
    """A peer cannot be measured on this machine; the message gives the reason."""


@dataclass(frozen=True)
class Peer:
    """One row: `play` is its name in `_peer_plays`, or an isolation level of ours. The other fields say what it does
    not do, and `source` where that was read."""

    play: str
    isolation: str
    sealing: str
    tokens: str
    source: str
    docker: bool = False
    ours: bool = False


NONE = "**none**"
PEERS = {
    "Palaestra": Peer(
        "best", "namespaces of this machine, all limits", "yes: scored in a new sandbox",
        "yes, with a server that continues token ids", "sandboxes.md, security/grading.md", ours=True,
    ),
    "Palaestra, level none": Peer(
        "none", NONE, "**no**: same user and file system",
        "yes, with a server that continues token ids", "sandboxes.md", ours=True,
    ),
    "atroposlib": Peer(
        "atroposlib", NONE, "**no**: the environment's own code scores", "yes, `ManagedServer`",
        "`atroposlib/envs/base.py`, `atroposlib/envs/server_handling/managed_server.py`",
    ),
    "verifiers": Peer(
        "verifiers", f"{NONE}; `SandboxEnv` rents remote ones", "**no**: the rubric reads the same folder",
        "yes, client `openai_chat_completions_token`", "`envs/AGENTS.md`, `verifiers/envs/sandbox_env.py`, `clients/`",
    ),
    "Inspect, local": Peer(
        "inspect", NONE, "by default **no**: scorers use the agent's sandbox", "**no**",
        "`inspect_ai/util/_sandbox/local.py`, `model/`",
    ),
    "Inspect, docker": Peer(
        "inspect", "a container for each sample", "by default **no**: scorers use the agent's sandbox", "**no**",
        "`util/_sandbox/docker/`, `model/`", docker=True,
    ),
    "Harbor, docker": Peer(
        "harbor", "a container for each trial", "by default **no**: `environment_mode` is `shared`",
        "some agents, in `rollout_details`", "`harbor/models/task/`, `harbor/models/agent/`", docker=True,
    ),
    "SWE-ReX, local": Peer(
        "swe-rex", NONE, "**no**: has no score", "**no**: calls no model", "`swerex/runtime/local.py`"
    ),
    "SWE-ReX, docker": Peer(
        "swe-rex", "a container for each task", "**no**: has no score", "**no**: calls no model",
        "`swerex/deployment/docker.py`", docker=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What all samples share. `without` are the processes that are not part of a peer."""

    url: str
    interpreter: str | None
    without: frozenset[int]
    docker: str | None
    image: str
    tasks: int
    width: int


def command(peer: Peer, place: Place, out: str) -> list[str]:
    """Return the command line that plays the tasks."""
    sizes = [str(place.width), str(place.tasks)]
    if peer.ours:
        return [sys.executable, __file__, "--sample", peer.play, place.url, *sizes]
    if place.interpreter is None:
        raise Absent("give --peers PYTHON (scripts/peers_env)")
    if peer.docker and place.docker is None:
        raise Absent("needs root, docker and dockerd (apt-get install docker.io)")
    # resolved, because a mount does not follow the links of an environment to its interpreter
    prefix = subprocess.run(
        [place.interpreter, "-c", "import sys; print(sys.prefix, sys.base_prefix)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    mounts = [path for path in dict.fromkeys(["/usr", *prefix]) if path == "/usr" or not path.startswith("/usr/")]
    script = str(Path(__file__).with_name("_peer_plays.py"))
    container = [place.image, *mounts] if peer.docker else []
    return [place.interpreter, script, peer.play, place.url, out, *sizes, *container]


@contextmanager
def clean(place: Place, found: dict[str, object]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a folder and the variables of a peer's process. Afterwards note in `found` what is left over, and remove
    it."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        for name in ("out", "tmp", "home"):
            Path(folder, name).mkdir()
        config = os.environ.get("DOCKER_CONFIG", os.path.expanduser("~/.docker"))
        variables = {**os.environ, "TMPDIR": f"{folder}/tmp", "HOME": f"{folder}/home", "DOCKER_CONFIG": config}
        variables |= {"HARBOR_TELEMETRY": "off", "PYTHONPYCACHEPREFIX": str(ROOT / ".pycache")}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        if place.docker:
            variables["DOCKER_HOST"] = place.docker
        before = set(tree.alive(place.without))
        try:
            yield f"{folder}/out", variables
        finally:
            deadline = time.monotonic() + LEFT_OVER_S
            while left := {pid: line for pid, line in tree.alive(place.without).items() if pid not in before}:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            containers = docker_left(place, "ps", "-a")
            networks = docker_left(place, "network", "ls", "-f", "type=custom")
            files = [str(path.relative_to(folder)) for name in ("tmp", "home") for path in Path(folder, name).iterdir()]
            found |= dict(zip(LEFT, (list(left.values()), containers, networks, files), strict=True))
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for kind, each in (("container", containers), ("network", networks)):
                if each:
                    run_docker(place, kind, "rm", "-f", *each)


def run_docker(place: Place, *arguments: str) -> str:
    """Return the output of the docker client."""
    done = subprocess.run(["docker", "-H", str(place.docker), *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def docker_left(place: Place, *listing: str) -> list[str]:
    """Return the ids that the docker client lists; none without a daemon."""
    return run_docker(place, *listing, "-q").split() if place.docker else []


def play(peer: Peer, place: Place, notes: dict[str, object], *, memory: bool) -> measure.Sample:
    """Play the tasks once, and return the numbers; `notes` gets the version and what is left over."""
    with clean(place, notes) as (out, variables), ExitStack() as stack:
        line = command(peer, place, out)
        grown = stack.enter_context(tree.peak_memory(place.without)) if memory else [0]
        cpu_s, started = tree.cpu_s(place.without), time.perf_counter()
        try:
            done = subprocess.run(
                line, env=variables, cwd=out, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise Absent(f"has not ended after {LIMIT_S} s") from None
        took, used_s = time.perf_counter() - started, tree.cpu_s(place.without) - cpu_s
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        raise Absent((done.stderr.strip().splitlines() or ["no output"])[-1][-200:])
    said = json.loads(done.stdout.splitlines()[-1])
    notes["version"] = said["version"]
    return {FROM_START: took, TASKS_ONLY: said["seconds"], CPU: used_s, MEMORY: grown[0] / 1024}


def measured(place: Place, rounds: int, names: Sequence[str]) -> tuple[dict[str, measure.Sample], dict[str, JSON]]:
    """Return the medians of each peer's numbers, and its version, what it leaves over, or why it is absent."""
    notes: dict[str, JSON] = {name: {} for name in names}

    def case(name: str, memory: bool) -> Callable[[], measure.Sample]:
        def once() -> measure.Sample:
            if "absent" not in notes[name]:
                try:
                    return play(PEERS[name], place, notes[name], memory=memory)
                except Absent as absent:
                    notes[name]["absent"] = str(absent)
            return dict.fromkeys((FROM_START, TASKS_ONLY, CPU, MEMORY), 0.0)

        return once

    weighed = measure.interleaved({name: case(name, True) for name in names}, 1)
    if rounds:
        timed = measure.interleaved({name: case(name, False) for name in names}, rounds)
        weighed = {name: {**timed[name], MEMORY: weighed[name][MEMORY]} for name in names}
    return {name: sample for name, sample in weighed.items() if "absent" not in notes[name]}, notes


JSON = dict[str, object]


def left_over(note: Mapping[str, object]) -> str:
    """Describe what a peer left over."""
    counts = {kind: len(found) for kind in LEFT if isinstance(found := note.get(kind), list) and found}
    return ", ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items()) or "nothing"


def table(found: Mapping[str, measure.Sample], notes: Mapping[str, JSON]) -> str:
    """Return both tables: what was measured, and what each does not do."""
    heads = (FROM_START, TASKS_ONLY, CPU, MEMORY)
    lines = [f"| | version | {' | '.join(heads)} | left over |", f"|---|---|{'---:|' * len(heads)}---|"]
    for name, note in notes.items():
        if name in found:
            numbers = " | ".join(f"{found[name][head]:.{0 if head == MEMORY else 1}f}" for head in heads)
            lines.append(f"| {name} | {note['version']} | {numbers} | {left_over(note)} |")
        else:
            lines.append(f"| {name} | | {' | ' * (len(heads) - 1)} | not measured: {note['absent']} |")
    lines += ["", "| | isolation | tests sealed from the agent | exact tokens | read in |", "|---|---|---|---|---|"]
    for name in notes:
        peer = PEERS[name]
        lines.append(f"| {name} | {peer.isolation} | {peer.sealing} | {peer.tokens} | {peer.source} |")
    return "\n".join(lines)


PAGE = """# Measured next to other packages

<!-- written by benchmarks/peers.py --page -->

{tasks} tasks with the same scripted replies, {width} at a time: each has a file of its own, five commands and a
check. The model server answers immediately, on the same machine. All packages take turns, and the figures are
medians of {runs} runs. Measured on {date} with:

    python benchmarks/peers.py --peers .venv-peers/bin/python --tasks {tasks} --rounds {rounds}

{machine}. {docker}

`seconds` is the time of the whole process, `of them tasks` that from the first task to the last score. `CPU s` and
`memory MB` count all processes, also those in containers and what the docker daemon does for them; memory is the peak
of the proportional set size, in a run of its own, and does not include files in memory. `left over` is what is still
there 3 s after the process has ended. Atropos, verifiers and Inspect's `local` run the commands as plain processes of
this machine, and SWE-ReX has neither an agent loop nor a score: the script adds a short one.

{table}

To repeat it, run `scripts/peers_env` and the command above as root on Linux with dockerd and `docker compose`.
"""


async def model_server() -> None:
    """Serve the commands as tool calls, and then a text."""
    calls = [chat_reply(None, [("terminal", {"command": each})], turn) for turn, each in enumerate(COMMANDS)]
    await serve([*calls, chat_reply("All done.")])


def sample_ours(isolation: str, url: str, width: str, tasks: str) -> None:
    """Play the tasks here, and print the same JSON as a peer."""
    from importlib.metadata import version

    from throughput import palaestra

    took = asyncio.run(palaestra(url, int(width), numbered_tasks(int(tasks)), isolation=isolation))
    print(json.dumps({"seconds": took, "version": version("palaestra")}))


@contextmanager
def daemon() -> Iterator[tuple[str | None, str, str]]:
    """Run a docker daemon where that is possible; yield its address, the image and the versions."""
    import pytest

    from sandbox import containers

    with ExitStack() as stack:
        if os.geteuid() or not shutil.which("dockerd"):
            yield None, "", "No docker daemon."
            return
        try:
            client = stack.enter_context(containers.docker("-b", stack.enter_context(containers.own_bridge(BRIDGE))))
        except pytest.skip.Exception as reason:
            yield None, "", f"No docker daemon: {reason}."
            return
        versions = []
        for arguments in (["version", "--format", "{{.Server.Version}}"], ["compose", "version", "--short"]):
            done = subprocess.run(["docker", "-H", client.address, *arguments], capture_output=True, text=True)
            versions.append(done.stdout.strip() if done.returncode == 0 else "absent")
        yield client.address, containers.IMAGE, "docker {}, docker compose {}.".format(*versions)


def main() -> int:
    """Measure all peers in turns, and print the tables."""
    parser = measure.options_parser(__doc__, ROUNDS)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has the peers")
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"how many tasks (default {TASKS})")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help="rows to measure")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page of the documentation to FILE")
    options = parser.parse_args()
    rounds = options.rounds if options.rounds is not None else 0 if options.quick else ROUNDS
    tasks, width = (QUICK_TASKS, QUICK_WIDTH) if options.quick else (options.tasks, WIDTH)
    if tasks % width:
        parser.error(f"--tasks must be a multiple of {width}")
    tree.adopt()
    with measure.serving(__file__, "--serve") as url:
        without = frozenset(tree.below())
        with daemon() as (address, image, docker):
            interpreter = options.peers and os.path.abspath(options.peers)  # not resolved: the link finds the packages
            place = Place(url, interpreter, without, address, image, tasks, width)
            found, notes = measured(place, rounds, options.only)
    title = f"{tasks} tasks, {width} at a time, instant server, median of {max(rounds, 1)}"
    print(f"{title}\n{measure.machine()}; {docker}\n\n{table(found, notes)}")
    if options.json is not None:
        units = {FROM_START: "s", TASKS_ONLY: "s", CPU: "s", MEMORY: "MB"}
        rows = [
            measure.Row(f"{name}: {key}", sample[key], unit)
            for name, sample in found.items()
            for key, unit in units.items()
        ]
        measure.write_json(title, rows, options.json, notes=notes, docker=docker)
    if options.page is not None:
        sizes = {"tasks": tasks, "width": width, "rounds": rounds, "runs": max(rounds, 1)}
        where = {"date": date.today().isoformat(), "machine": measure.machine(), "docker": docker}
        options.page.write_text(PAGE.format(**sizes, **where, table=table(found, notes)))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(model_server())
    elif sys.argv[1:2] == ["--sample"]:
        sample_ours(*sys.argv[2:])
    else:
        sys.exit(main())
