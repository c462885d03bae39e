"""Runs on a Ray cluster of several nodes on this machine, beside runs in one process.

    python benchmarks/ray_cluster.py --quick
    python benchmarks/ray_cluster.py --rollouts 500 --kills 20 --driver-kills 20 --json cluster.json

- `same`: the journal has the same rollouts as that of one process: ids, messages with observations, rewards, and the
  numbers that the check drew.
- `nodes killed`, `drivers killed`: so are the journals of runs in which a node or the driver was killed at a random
  moment, and no worker is left.
- `driver`: the CPU of the driver per rollout, with workers that answer at once, as a multiple of the CPU that writing
  the same events to a journal takes, with as many commits.
- `throughput`: rollouts per second on two nodes, beside one process on the same cores.
- `rollouts with 500 live`: rollouts with a new slot and one command each, per second, on a cluster of one node, while
  500 other rollouts run a command there, beside the same in one process.

Needs the extra `ray`, except with `--processes`. Each Ray node takes about 0.3 GB of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import _measure as measure

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import (
    GroupEnded,
    GroupStarted,
    ReplyReceived,
    RolloutBegun,
    TokensSpent,
    TurnTaken,
)  # fmt: skip
from palaestra.rollouts.journal.journal import EventStream, Journal, read_journal
from palaestra.rollouts.resume.state import read_finished
from palaestra_cloud.cluster.launcher import ProcessLauncher
from palaestra_cloud.cluster.messages import (
    FINISHED,
    KINDS,
    PlayGroup,
    Ready,
    StreamEnded,
    WorkerSetup,
    framed,
    read_frame,
    this_process,
    to_worker,
    unpacked,
)  # fmt: skip
from palaestra_slots.core.types import Score, Task

GROUP = 4
LINES = 5
"""The lines of a journal for each rollout, at least."""
MARK = "PALAESTRA_CLUSTER_BENCHMARK"
"""The variable that tells this benchmark's processes from those of others on the machine."""
SHARED = ("palaestra-gates-", "ray")
"""The folders that all runs of a user share, and that of the Ray cluster, which outlives its runs."""
RECORDED = "000000-lines-0"
DRIVER_TARGET, THROUGHPUT_TARGET = 3.0, 0.9

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def lines(n: int = 4):
    for i in range(n):
        steps = ["wc -l < a.txt > answer.txt", "cat answer.txt; seq 20", "echo $((6 * 7))"]
        yield Task(id=f"lines-{i}", prompt=f"Count the lines of a.txt ({i})", files={"a.txt": "x\\n" * (i % 50)},
                   solution=steps, answer=str(i % 50))

@lines.score
async def correct(task, sandbox, rng):
    right = (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
    return float(right), {"drawn": rng.random()}
"""


HOLDING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def holding(held: int = 500, n: int = 1000, hold_s: int = 60):
    for i in range(held + n):
        kind, step = ("live", f"sleep {hold_s}") if i < held else ("short", "true")
        yield Task(id=f"{kind}-{i}", prompt="Go on.", solution=[step])

@holding.score
def done():
    return 1.0
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "palaestra", *words]


def finished(folder: Path, *words: str) -> Path:
    """Run `palaestra` there to its end, and return the folder of the run."""
    done = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.strip().splitlines()[-1]


def content(run: Path) -> dict[str, Any]:
    """What must be the same however a run ran; each rollout and group must have ended once."""
    found: dict[str, Any] = {}
    work = read_finished(run / "journal.jsonl")
    for group in map(work.whole, work.ended):
        assert not group.error, group.error
        for each in group.trajectories:
            assert each.rollout_id not in found
            found[each.rollout_id] = (each.task_id, each.messages, each.outcome, each.reward, each.blame, each.metrics)
    return found


def seconds(run: Path) -> float:
    """The time from the first group of a run to the end of its last one."""
    times = [each.at for each in read_journal(run / "journal.jsonl") if isinstance(each, GroupStarted | GroupEnded)]
    return max(times) - min(times)


def workers() -> list[int]:
    """Return the ids of the workers of this benchmark's runs."""
    found, mine = [], f"{MARK}={os.environ[MARK]}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                b"palaestra_cloud.cluster.worker" in path.read_bytes()
                and mine in (path.parent / "environ").read_bytes()
            ):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def none_left(folder: Path) -> bool:
    """Whether no worker is left, and nothing in the folder for temporary files, ten seconds after they should have
    ended."""

    def left() -> list[int | Path]:
        return [*workers(), *(each for each in folder.iterdir() if not each.name.startswith(SHARED))]

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    if found := left():
        print(f"left behind: {found[:5]}", file=sys.stderr)
    return not found


class Processes:
    """Workers that are processes of the run: `--on processes:N`."""

    address = ""

    def __init__(self, nodes: int) -> None:
        self.on = ("--on", f"processes:{nodes}")

    def kill(self) -> None:
        """Kill one worker."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(min(workers()), signal.SIGKILL)

    def add(self) -> None:
        """Do nothing: the driver starts the worker again."""

    def close(self) -> None: ...


class RayNodes:
    """A Ray cluster of some nodes with one CPU each, on this machine."""

    def __init__(self, nodes: int) -> None:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine needs more than Ray's 30
        from ray.cluster_utils import Cluster as RayCluster

        self._small = {"num_cpus": 1, "object_store_memory": 100 << 20}
        self._cluster = RayCluster(initialize_head=True, head_node_args={**self._small, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(**self._small) for _ in range(nodes - 1)]
        self.on = ("--on", f"ray:{self._cluster.address}")
        self.address: str = self._cluster.address

    def kill(self) -> None:
        """Kill one node, not the head."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def add(self) -> None:
        self._nodes.append(self._cluster.add_node(**self._small))

    def close(self) -> None:
        self._cluster.shutdown()


def killed(folder: Path, words: list[str], after: int, kill: Any) -> Path:
    """Start a run, call `kill` with its process once its journal has so many lines, and return its folder."""
    known = set(folder.glob("runs/*/*"))
    with subprocess.Popen(command(*words), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while running.poll() is None:
            fresh = set(folder.glob("runs/*/*/journal.jsonl"))
            lines = sum(path.read_bytes().count(b"\n") for path in fresh if path.parent not in known)
            if lines >= after:
                kill(running)
                break
            time.sleep(0.01)
        running.wait(900)
    (run,) = set(folder.glob("runs/*/*")) - known
    return run


async def instant(recorded: Path, slots: int) -> None:
    """Be a worker that plays each group at once, with the events of the recorded one."""
    from palaestra_cloud.cluster.event_outbox import EventOutbox
    from palaestra_cloud.cluster.group import JOURNALLED
    from palaestra_cloud.cluster.worker import streams

    reader, writer = await streams()
    events = [line.split(b"\t", 2) for line in recorded.read_bytes().splitlines()]

    async def send(message: Any) -> None:
        writer.write(framed(message))
        await writer.drain()

    await send(this_process())
    setup = to_worker(await read_frame(reader))
    assert isinstance(setup, WorkerSetup)
    outbox = EventOutbox(send, setup.flush_s)
    await send(Ready(3, slots))
    sending = asyncio.create_task(outbox.run())
    try:
        while True:
            message = to_worker(await read_frame(reader))
            if isinstance(message, PlayGroup):
                work = unpacked(message.work)
                name = f"{work.number:06d}-{work.task.id}".encode()
                for kind, index, line in events:
                    if int(kind) in message.unheard and int(kind) not in JOURNALLED:
                        continue
                    outbox.put(message.key, int(kind), int(index), line.replace(RECORDED.encode(), name))
                outbox.put(message.key, FINISHED, -1, b"")
                await outbox.room()
                await asyncio.sleep(0)  # as a rollout waits: the batches are sent meanwhile
    except StreamEnded:
        sending.cancel()


class Counted(Journal):
    """A journal that counts how often it is committed."""

    commits = 0

    async def commit(self) -> None:
        self.commits += 1
        await super().commit()


class Instant(Environment):
    """An environment whose groups are played elsewhere."""

    name = "instant"

    def __init__(self, groups: int) -> None:
        self._groups = groups

    async def tasks(self) -> AsyncIterator[Task]:
        for number in range(self._groups):
            yield Task(id=f"lines-{number}", prompt="Count the lines of a.txt")

    def kit(self, task: Task, rng: random.Random) -> Any:
        raise NotImplementedError

    async def score(self, rollout: Any, grading: Any) -> Score:
        raise NotImplementedError


def launcher_of(address: str, nodes: int, command: tuple[str, ...]) -> Any:
    """Return what starts instant workers: on the Ray cluster at the address, or as processes without one."""
    if not address:
        return ProcessLauncher(nodes, command)
    from palaestra_cloud.cluster.ray_launcher import RayLauncher

    return RayLauncher(address, command)


async def driver(address: str, recorded: Path, groups: int, in_flight: int, nodes: int) -> measure.Sample:
    """Measure the driver's CPU per rollout, and that of its journal alone."""
    from palaestra.rollouts.runner import Runner
    from palaestra.rollouts.spec import RunContext, RunSettings
    from palaestra.rollouts.workspaces import Workspaces
    from palaestra_cloud.cluster.driver import Driver
    from palaestra_cloud.cluster.nodes import Terms

    slots = -(-in_flight // nodes)
    launcher = launcher_of(address, nodes, (str(Path(__file__).resolve()), "--instant", str(recorded), str(slots)))
    cluster = Driver(launcher, Terms(WorkerSetup(reference="", script=None, folder="/", settings=b"", flush_s=0.1)))
    await cluster.open()
    with tempfile.TemporaryDirectory() as folder:
        journal = Counted(Path(folder, "journal.jsonl"))
        nothing: Any = None
        context = RunContext(
            engine=nothing, workspaces=Workspaces(nothing), events=EventStream(journal),
            settings=RunSettings(group_size=GROUP), elsewhere=cluster,
        )  # fmt: skip
        began, cpu = time.perf_counter(), time.process_time()
        totals = await Runner(Instant(groups), context, concurrency=-(-in_flight // GROUP)).run()
        took, used = time.perf_counter() - began, time.process_time() - cpu
        assert totals.rollouts == totals.scored == groups * GROUP
        peak_kb = measure.peak_kb()  # before the journal is read back
        journal.close()
        events = list(read_journal(Path(folder, "journal.jsonl")))
        alone = Journal(Path(folder, "alone.jsonl"))
        each = max(1, len(events) // journal.commits)
        cpu = time.process_time()
        for number, event in enumerate(events):
            alone.append(event)
            if number % each == 0:
                await alone.commit()
        journal_cpu = time.process_time() - cpu
        alone.close()
    await cluster.aclose()
    await launcher.aclose()
    rollouts = groups * GROUP
    return {
        "driver_us": used / rollouts * 1e6, "journal_us": journal_cpu / rollouts * 1e6,
        "rollouts_per_s": rollouts / took, "peak_kb": peak_kb,
    }  # fmt: skip


def recorded_group(run: Path, path: Path) -> None:
    """Write the entries of a run's first group: kind, index and line, with the signs that a worker sends beside."""
    lines = []
    places = {kind: place for place, kind in enumerate(KINDS)}
    written = (run / "journal.jsonl").read_bytes().splitlines()
    for line, event in zip(written, read_journal(run / "journal.jsonl"), strict=True):
        if RECORDED.encode() not in line or type(event) not in places:
            continue
        trajectory = getattr(event, "trajectory", None)
        name = getattr(event, "rollout_id", "") or (trajectory.rollout_id if trajectory is not None else "")
        index = int(name.rpartition("/")[2]) if name else -1
        if isinstance(event, TurnTaken) and event.turn == 0:
            lines.append((places[RolloutBegun], index, json.dumps({"rollout_id": name}).encode()))
        lines.append((places[type(event)], index, line))
        if isinstance(event, TurnTaken | ReplyReceived):
            spent = {"rollout_id": name, "prompt_tokens": 10, "completion_tokens": 10}
            lines.append((places[TokensSpent], index, json.dumps(spent).encode()))
    path.write_bytes(b"\n".join(b"%d\t%d\t%s" % each for each in lines))


def compared(
    folder: Path, words: list[str], cluster: Processes | RayNodes, alone: Path, expected: dict[str, Any]
) -> Iterator[measure.Row]:
    """Run on the cluster, and yield the rows that compare this run with the one in one process."""
    measure.progress(f"one process: {len(expected)} rollouts in {seconds(alone):.1f} s")
    there = finished(folder, *words, *cluster.on)
    measure.progress(f"cluster: {seconds(there):.1f} s")
    found = content(there)
    same = sum(found.get(name) == each for name, each in expected.items())
    yield measure.with_floor(measure.Row("same rollouts", same / len(expected), "share"), 1.0)
    ratio = seconds(alone) / seconds(there)
    rate = measure.Row("throughput", len(expected) / seconds(there), "rollouts/s", ratio)
    yield measure.judged(rate, THROUGHPUT_TARGET, ratio >= THROUGHPUT_TARGET)


def kill_rows(
    folder: Path, words: list[str], cluster: Processes | RayNodes, expected: dict[str, Any], what: str, count: int
) -> Iterator[measure.Row]:
    """Kill a node or the driver of so many runs at random moments, and yield how many of them ended well."""
    rng, good, clean = random.Random(what), 0, 0
    for number in range(count):
        lines = rng.randrange(2, len(expected) * LINES)
        if what == "node":
            run = killed(folder, [*words, *cluster.on], lines, lambda _: cluster.kill())
        else:
            run = killed(folder, [*words, *cluster.on], lines, lambda running: running.kill())
        clean += none_left(folder / "tmp")
        if what == "node":
            cluster.add()
        else:
            finished(folder, "resume", str(run))
        good += content(run) == expected
        shutil.rmtree(run)
        print(f"{what} kill {number + 1} at line {lines}: {good} the same, {clean} left nothing", file=sys.stderr)
    yield measure.with_floor(measure.Row(f"{what} kills with the same journal", good, f"of {count}"), count)
    yield measure.with_floor(measure.Row(f"{what} kills that left nothing", clean, f"of {count}"), count)


def driver_rows(recorded: Path, cluster: Processes | RayNodes, nodes: int, rollouts: int) -> Iterator[measure.Row]:
    """Yield the driver's CPU, memory and rate with workers that answer at once."""
    for in_flight in (100, 1000, min(10_000, rollouts)):
        arguments = (cluster.address, str(recorded), str(rollouts // GROUP), str(in_flight))
        found = measure.fresh_process(__file__, "--driver", *arguments, str(nodes))
        ratio = found["driver_us"] / found["journal_us"]
        row = measure.Row(f"driver, {in_flight} in flight", found["driver_us"], "µs/rollout", ratio)
        yield measure.judged(row, DRIVER_TARGET, ratio <= DRIVER_TARGET)
        yield measure.Row(f"driver's memory, {in_flight} in flight", found["peak_kb"] / 1024, "MB")
        yield measure.Row(f"driver, {in_flight} in flight", found["rollouts_per_s"], "rollouts/s")


def held_rate(run: Path) -> float:
    """Return the short rollouts per second of a run of `HOLDING`, all of which ended while all others lived."""
    ends = {each.group_id: each.at for each in read_journal(run / "journal.jsonl") if isinstance(each, GroupEnded)}
    short = sorted(at for name, at in ends.items() if "-short-" in name)
    assert short[-1] < min(at for name, at in ends.items() if "-live-" in name), "the live rollouts ended too early"
    return (len(short) - 1) / (short[-1] - short[0])


def slot_rows(live: int, rounds: int) -> Iterator[measure.Row]:
    """Yield the rates of rollouts with a new slot each, on a cluster of one node."""
    cluster = RayNodes(1)
    words = ["run", "holding_env.py", "--policy", "oracle", "--group", "1", "--slots", str(live + 64)]
    words += ["--concurrency", str(live + 16), "--env.held", str(live), "--env.n", str(2 * live)]
    rates: dict[str, list[float]] = {"one process": [], "one Ray node": []}
    try:
        with tempfile.TemporaryDirectory() as place:
            Path(place, "holding_env.py").write_text(HOLDING)
            for _ in range(max(1, rounds // 3)):
                rates["one process"].append(held_rate(finished(Path(place), *words)))
                rates["one Ray node"].append(held_rate(finished(Path(place), *words, *cluster.on)))
    finally:
        cluster.close()
    alone, there = map(statistics.median, rates.values())
    yield measure.Row(f"rollouts with {live} live, one process", alone, "rollouts/s", 1.0)
    row = measure.Row(f"rollouts with {live} live, one Ray node", there, "rollouts/s", there / alone)
    yield measure.judged(row, THROUGHPUT_TARGET, there / alone >= THROUGHPUT_TARGET)


def main() -> int:
    """Measure and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=None, help="rollouts of each run (default 500, --quick 40)")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the cluster (default 3)")
    parser.add_argument("--processes", action="store_true", help="workers as processes, without Ray")
    parser.add_argument("--kills", type=int, default=None, help="runs in which a node is killed (20, --quick 1)")
    parser.add_argument("--driver-kills", type=int, default=None, help="runs with a killed driver (20, --quick 1)")
    parser.add_argument("--instant-rollouts", type=int, default=None, help="rollouts for the driver (20000, 2000)")
    parser.add_argument("--slots-only", action="store_true", help="measure only rollouts with new slots")
    options = parser.parse_args()
    quick = options.quick
    rollouts = options.rollouts or (40 if quick else 500)
    kills = options.kills if options.kills is not None else (1 if quick else 20)
    driver_kills = options.driver_kills if options.driver_kills is not None else (1 if quick else 20)
    many = options.instant_rollouts or (2000 if quick else 20000)
    os.environ[MARK] = str(os.getpid())
    rows = [] if options.processes else list(slot_rows(50 if quick else 500, 3 if quick else 9))
    if options.slots_only:
        return measure.report("Rollouts with new slots on a Ray node", rows, options.json)
    words = ["run", "lines_env.py", "--policy", "oracle", "--group", str(GROUP), "--slots", "16"]
    words += ["--env.n", str(rollouts // GROUP)]
    with tempfile.TemporaryDirectory() as place:
        folder, scratch = Path(place), Path(place, "tmp")
        scratch.mkdir()
        os.environ["TMPDIR"] = str(scratch)  # of the runs and their workers
        cluster = Processes(options.nodes) if options.processes else RayNodes(options.nodes)
        try:
            (folder / "lines_env.py").write_text(ENVIRONMENT)
            alone = finished(folder, *words)
            expected = content(alone)
            rows += compared(folder, words, cluster, alone, expected)
            for what, many_kills in (("node", kills), ("driver", driver_kills)):
                rows += kill_rows(folder, words, cluster, expected, what, many_kills)
            recorded_group(alone, folder / "recorded")
            rows += driver_rows(folder / "recorded", cluster, options.nodes, many)
        finally:
            cluster.close()
    where = "processes" if options.processes else "Ray nodes"
    return measure.report(f"{options.nodes} {where}, runs of {rollouts} rollouts", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--instant"]:
        asyncio.run(instant(Path(sys.argv[2]), int(sys.argv[3])))
    elif sys.argv[1:2] == ["--driver"]:
        _, _, where, file, *counts = sys.argv
        groups_, in_flight_, nodes_ = map(int, counts)
        print(json.dumps(asyncio.run(driver(where, Path(file), groups_, in_flight_, nodes_))))
    else:
        sys.exit(main())
