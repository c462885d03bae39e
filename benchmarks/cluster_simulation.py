"""A run on a simulated cluster: the real driver, placement and runner, with nodes and a clock that are simulated.

    python benchmarks/cluster_simulation.py --quick
    python benchmarks/cluster_simulation.py --nodes 1000 --slots 64 --json simulation.json

- `slots busy`: the share of the slots of living nodes that have a rollout, after the first `WARM_UP_S` seconds and
  until the last task begins.
- `image affinity`: the share of groups on a node that had their image, among the groups whose image some node had.
- `longest wait`: the longest time that a group waited for a node.
- `rollouts ended twice`: none may.

Sources of the delays and failures: pulling an image takes minutes and dominates sweeps (kubernetes-sigs/agent-sandbox);
preemption of nodes hits 5 to 15 % of the episodes (allenai/open-instruct #1887), here about 5 % of rollouts of five
minutes; a worker needs about 15 seconds until it is ready (docs/scaling.md).
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _measure as measure
import msgspec

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import GroupEnded, GroupStarted, RolloutEnded
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_cloud.cluster.driver import Driver
from palaestra_cloud.cluster.launcher import NodeAddress, NodeLost
from palaestra_cloud.cluster.messages import (
    FINISHED,
    KINDS,
    GroupEntry,
    Happened,
    PlayGroup,
    Ready,
    WorkerSetup,
    framed,
    this_process,
    to_worker,
    unpacked,
)  # fmt: skip
from palaestra_cloud.cluster.nodes import Terms
from palaestra_cloud.cluster.opened import flush_seconds
from palaestra_cloud.cluster.placement import PATIENCE_S
from palaestra_slots.core.types import Outcome, Score, Task

GROUP = 8
ROLLOUT_S, SPREAD = 300.0, 0.6
"""The median of a rollout's seconds, and the spread of their logarithm."""
PULL_S = 90.0
"""The mean seconds in which a node pulls an image that it lacks."""
START_S, BACK_S = 15.0, 180.0
"""The seconds that a worker needs to be ready, and that pass until a lost node is replaced."""
LIFE_S = 6000.0
"""The mean seconds until a node is lost."""
NODES_PER_IMAGE = 2
"""With 1,000 nodes, the run has 500 images, as SWE-bench Verified."""
WARM_UP_S = 900.0
BUSY_TARGET, AFFINITY_TARGET = 0.95, 0.95

_GROUP_STARTED, _ROLLOUT_ENDED, _GROUP_ENDED = map(KINDS.index, (GroupStarted, RolloutEnded, GroupEnded))
_encoder = msgspec.json.Encoder()


class _VirtualSelector(selectors.DefaultSelector):
    """Does not wait: the time until the next timer passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is not None and timeout > 0:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is virtual."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class NoJournal(Journal):
    """Counts the bytes of the journal, and writes nothing."""

    def __init__(self) -> None:
        self.path = Path("journal.jsonl")
        self.bytes = 0

    def append_line(self, line: bytes) -> None:
        self.bytes += len(line) + 1

    async def commit(self) -> None: ...


class Simulated(Environment):
    """As many tasks as are wanted, each with one of the images."""

    name = "simulated"

    def __init__(self, groups: int, images: int, rng: random.Random) -> None:
        self._groups, self._images, self._rng = groups, images, rng
        self.begun_all = False

    async def tasks(self) -> AsyncIterator[Task]:
        for number in range(self._groups):
            yield Task(id=f"t{number}", prompt="p", image=f"image-{self._rng.randrange(self._images)}")
        self.begun_all = True

    def kit(self, task: Task, rng: random.Random) -> Any:
        raise NotImplementedError

    async def score(self, rollout: Any, grading: Any) -> Score:
        raise NotImplementedError


@dataclass
class Cluster:
    """A launcher of simulated nodes, and what is measured."""

    nodes_wanted: int
    slots: int
    flush_s: float
    life_s: float
    rng: random.Random
    name: str = "simulation"
    ended: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    hit: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0
    _links: dict[str, SimulatedNode] = field(default_factory=dict)
    _names: list[NodeAddress] = field(default_factory=list)
    _numbers: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.nodes_wanted):
            self._add()

    def _add(self) -> None:
        self._numbers += 1
        self._names.append(NodeAddress(f"{self._numbers:08x}", f"node-{self._numbers}"))

    async def nodes(self) -> list[NodeAddress]:
        return list(self._names)

    async def start(self, node: NodeAddress) -> SimulatedNode:
        link = self._links[node.id] = SimulatedNode(self, node)
        return link

    async def aclose(self) -> None: ...

    def gone(self, node: SimulatedNode) -> None:
        """A node is lost, and another one comes later."""
        self.lost += 1
        self.hit += node.running
        self._links.pop(node.address.id)
        self._names.remove(node.address)
        asyncio.get_running_loop().call_later(BACK_S, self._add)

    async def observe(self, env: Simulated) -> None:
        """Add up busy slots and slots every five seconds, until the last task has begun."""
        await asyncio.sleep(WARM_UP_S)
        while not env.begun_all:
            ready = [each for each in self._links.values() if each.is_ready]
            self.slot_s += sum(self.slots for _ in ready)
            self.busy_s += sum(each.running for each in ready)
            await asyncio.sleep(5.0)


class SimulatedNode:
    """The worker of one node: it pulls an image, starts rollouts in the order of their groups, and sends what happened
    in batches."""

    def __init__(self, cluster: Cluster, address: NodeAddress) -> None:
        self.address, self.is_ready, self.running = address, False, 0
        self._cluster = cluster
        self._images: dict[str, asyncio.Future[None]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._entries: list[GroupEntry] = []
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._some = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._messages.put_nowait(framed(this_process())[4:])

    async def send(self, frames: bytes) -> None:
        while frames:
            size = int.from_bytes(frames[:4], "big")
            message, frames = to_worker(frames[4 : 4 + size]), frames[4 + size :]
            if isinstance(message, WorkerSetup):
                self._spawn(self._start())
            elif isinstance(message, PlayGroup):
                self._spawn(self._play(message))

    async def receive(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            yield message
        raise NodeLost("preempted")

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        await asyncio.sleep(START_S)
        self.is_ready = True
        self._messages.put_nowait(framed(Ready(3, self._cluster.slots))[4:])
        self._spawn(self._flush())
        await asyncio.sleep(self._cluster.rng.expovariate(1 / self._cluster.life_s))
        self._cluster.gone(self)
        self.is_ready = False
        self._messages.put_nowait(None)

    async def _flush(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(self._cluster.flush_s)
            self._some.clear()
            entries, self._entries = self._entries, []
            self._messages.put_nowait(framed(Happened(entries))[4:])

    def _put(self, key: int, kind: int, index: int, event: Any) -> None:
        self._entries.append(GroupEntry(key, kind, index, b"" if event is None else _encoder.encode(event)))
        self._some.set()

    async def _play(self, message: PlayGroup) -> None:
        work, key = unpacked(message.work), message.key
        group_id = f"{work.number:06d}-{work.task.id}"
        await self._pulled(work.task.image or "")
        group = Group(group_id=group_id, number=work.number, task_id=work.task.id)
        self._put(key, _GROUP_STARTED, -1, GroupStarted(group=group))
        done = work.earlier.rollouts.get(group_id, {})
        async with asyncio.TaskGroup() as rollouts:
            for index in (each for each in range(GROUP) if each not in done):
                await self._slot()
                rollouts.create_task(self._roll_out(key, group_id, work.task.id, index))
        self._put(key, _GROUP_ENDED, -1, GroupEnded(group_id=group_id, number=work.number))
        self._put(key, FINISHED, -1, None)

    async def _pulled(self, image: str) -> None:
        if image not in self._images:
            pulling = self._images[image] = asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._cluster.rng.expovariate(1 / PULL_S))
            pulling.set_result(None)
        await asyncio.shield(self._images[image])

    async def _slot(self) -> None:
        if self.running < self._cluster.slots:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _free(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self.running -= 1

    async def _roll_out(self, key: int, group_id: str, task_id: str, index: int) -> None:
        await asyncio.sleep(ROLLOUT_S * self._cluster.rng.lognormvariate(0.0, SPREAD))
        self._free()
        rollout_id = f"{group_id}/{index}"
        trajectory = Trajectory(
            rollout_id=rollout_id, group_id=group_id, task_id=task_id, index=index, messages=[],
            outcome=Outcome.NATURAL, reward=1.0,
        )  # fmt: skip
        self._put(key, _ROLLOUT_ENDED, index, RolloutEnded(trajectory=trajectory))


class Counting:
    """Counts how often each rollout ended."""

    def __init__(self, ended: Counter[str]) -> None:
        self._ended = ended

    def handlers(self) -> Any:
        return {RolloutEnded: self._on_ended}

    def _on_ended(self, event: RolloutEnded) -> None:
        self._ended[event.trajectory.rollout_id] += 1


async def simulated(
    nodes: int, slots: int, generations: float, life_s: float = LIFE_S, in_flight: float = 1.0
) -> dict[str, float]:
    """Simulate a run of so many rollouts per slot, `in_flight` of which have begun or wait for a node at a time, and
    return what was measured."""
    rng, loop = random.Random(0), asyncio.get_running_loop()
    groups = int(nodes * slots * generations / GROUP)
    cluster = Cluster(nodes, slots, flush_seconds(nodes), life_s, rng)
    terms = Terms(WorkerSetup(reference="", script=None, folder="/", settings=b"", flush_s=cluster.flush_s))
    driver = Driver(cluster, terms, clock=loop.time)
    await driver.open()
    env = Simulated(groups, max(1, nodes // NODES_PER_IMAGE), rng)
    nothing: Any = None
    context = RunContext(
        engine=nothing, workspaces=Workspaces(nothing), events=EventStream(NoJournal(), Counting(cluster.ended)),
        settings=RunSettings(group_size=GROUP), elsewhere=driver,
    )  # fmt: skip
    observing = asyncio.create_task(cluster.observe(env))
    totals = await Runner(env, context, concurrency=int(in_flight * nodes * slots // GROUP)).run()
    observing.cancel()
    await driver.aclose()
    place = driver.placement
    return {
        "busy": cluster.busy_s / cluster.slot_s if cluster.slot_s else 0.0,
        "affinity": place.placed_near / max(1, place.placed_again),
        "longest_wait_s": place.longest_wait_s,
        "twice": float(sum(count > 1 for count in cluster.ended.values())),
        "missing": float(groups * GROUP - totals.scored),
        "lost": float(cluster.lost), "hit": cluster.hit / (groups * GROUP), "hours": loop.time() / 3600,
    }  # fmt: skip


def simulate(
    nodes: int, slots: int, generations: float, life_s: float = LIFE_S, in_flight: float = 1.0
) -> dict[str, float]:
    """Run `simulated` with a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(simulated(nodes, slots, generations, life_s, in_flight))


def main() -> int:
    """Simulate, and print the table."""
    parser = measure.options_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=None, help="nodes (default 1000, --quick 40)")
    parser.add_argument("--slots", type=int, default=64, help="slots of each node (default 64)")
    parser.add_argument("--generations", type=float, default=None, help="rollouts per slot (default 8, --quick 6)")
    parser.add_argument("--in-flight", type=float, default=1.0, help="rollouts at a time, per slot (default 1)")
    options = parser.parse_args()
    nodes, generations = options.nodes or (40 if options.quick else 1000), options.generations or 8.0
    meter = measure.Meter()
    meter.start()
    found = simulate(nodes, options.slots, generations, in_flight=options.in_flight)
    cpu_s, rollouts = meter.sample()["cpu_s"], nodes * options.slots * generations
    rows = [
        measure.with_floor(measure.Row("slots busy", found["busy"], "share"), BUSY_TARGET),
        measure.with_floor(measure.Row("image affinity", found["affinity"], "share"), AFFINITY_TARGET),
        measure.with_ceiling(
            measure.Row("longest wait", found["longest_wait_s"], "s"), PATIENCE_S + options.in_flight * ROLLOUT_S
        ),
        measure.with_ceiling(measure.Row("rollouts ended twice", found["twice"], "rollouts"), 0),
        measure.with_ceiling(measure.Row("rollouts missing", found["missing"], "rollouts"), 0),
        measure.Row("nodes lost", found["lost"], "nodes"),
        measure.Row("rollouts hit by a loss", found["hit"], "share"),
        measure.Row("simulated time", found["hours"], "hours"),
        measure.Row("CPU, driver and simulation", cpu_s / rollouts * 1e6, "µs/rollout"),
    ]
    return measure.report(f"Simulation, {nodes} nodes of {options.slots} slots", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
