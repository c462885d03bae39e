"""The driver's side of a run on a cluster: it hands groups to the workers of nodes, writes what they return to the
journal, and lets the groups of a lost node continue elsewhere.

Order: a batch of a node is written first, then committed if a rollout or a group ended in it, and then announced. While
the disk or a subscriber is slow, no further batch of the node is taken, so its worker waits.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import Alive, GroupPlaced, JournalEvent, MemoryEvent, NodeChanged
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.limits import RunLimits
from palaestra.rollouts.resume.state import EarlierWork
from palaestra.rollouts.rollout import CLEAN_UP_S
from palaestra.rollouts.schedule import Places
from palaestra.rollouts.spec import RunContext
from palaestra_cloud.cluster.group import COMMITTED, JOURNALLED, MOST_NODES, Playing, RemoteGroup, earlier_by_group
from palaestra_cloud.cluster.launcher import Launcher, NodeAddress, NodeLost
from palaestra_cloud.cluster.messages import (
    FAILED,
    FINISHED,
    KINDS,
    Cancel,
    Happened,
    NodeRefused,
    Packer,
    PlayGroup,
    Stop,
    framed,
)
from palaestra_cloud.cluster.nodes import Node, Terms, agree_on_level, greet, table, weaker
from palaestra_cloud.cluster.placement import Placement, Room
from palaestra_slots.core.errors import ConfigError, InfraError, IsolationUnavailable, TaskError
from palaestra_slots.core.types import Blame, Task
from palaestra_slots.core.user_code import told
from palaestra_slots.sandbox.slot import Rung

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 10.0
"""Seconds between two looks for nodes that have joined the cluster."""

RARE_COLLECTIONS = (50_000, 20, 20)
"""The thresholds of Python's cyclic garbage collection in the driver. Records of rollouts have no cycles, and with the
usual thresholds the collections cost a fifth of the driver's CPU, more with more rollouts in flight."""

WITHOUT_NODES_S = 300.0
"""How long a run waits for a node once it has none; then it ends, and can be resumed."""


class ClusterLost(InfraError):
    """Every node of a run has gone."""

    blame = Blame.RUN


class _Worker:
    """A node that plays groups: what is to be sent to it, and the plays that it has."""

    def __init__(self, node: Node, room: Room) -> None:
        self.node = node
        self.room = room
        self.plays: dict[int, Playing] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._outgoing: list[bytes] = []
        self._some = asyncio.Event()

    def send(self, message: PlayGroup | Cancel | Stop) -> None:
        """Send a message soon. What is sent meanwhile goes with it."""
        self._outgoing.append(framed(message))
        self._some.set()

    async def sending(self) -> None:
        """Send messages until the node is lost, which raises `NodeLost`."""
        assert self.node.link is not None
        while True:
            await self._some.wait()
            self._some.clear()
            frames, self._outgoing = b"".join(self._outgoing), []
            await self.node.link.send(frames)


class Driver:
    """Plays the groups of a run on the nodes of a cluster; see `GroupPlayer`."""

    def __init__(self, launcher: Launcher, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.rung = Rung.NONE
        """The isolation level of all nodes."""
        self.placement = Placement(clock)
        self.packer = Packer()
        self._launcher = launcher
        self._terms = terms
        self._workers: dict[str, _Worker] = {}
        self._started: Counter[str] = Counter()
        self._keys = itertools.count(1)
        self._earlier: tuple[EarlierWork, dict[str, EarlierWork]] | None = None
        self._run: RunContext | None = None
        """The run whose groups are played, once the first one is."""
        self._watching: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._collections = gc.get_threshold()

    @property
    def slots(self) -> int:
        """The number of slots of all nodes."""
        return sum(room.slots for room in self.placement.rooms.values())

    async def open(self, addresses: Sequence[NodeAddress] | None = None) -> str:
        """Start a worker on every node, and return the table of nodes. `addresses` are the nodes, if they have been
        listed already. Raises `ConfigError` if the cluster has no node, and `IsolationUnavailable` or `ConfigError` if
        none can be used."""
        self._collections = gc.get_threshold()
        gc.set_threshold(*RARE_COLLECTIONS)
        addresses = await self._launcher.nodes() if addresses is None else addresses
        if not addresses:
            raise ConfigError(f"the cluster {self._launcher.name} has no node with a CPU to run a worker on")
        nodes = await self._greet(addresses)
        level = await agree_on_level(nodes)
        shown = table(self._launcher.name, nodes)
        if level is None:
            isolated = all("isolation" in node.reason.lower() for node in nodes)
            raise (IsolationUnavailable if isolated else ConfigError)(f"no node can be used.\n{shown.rstrip()}")
        self.rung = level
        for node in nodes:
            if not node.reason:
                self._add(node)
        self._watching.append(asyncio.create_task(self._watch(), name="nodes"))
        return shown

    async def aclose(self) -> None:
        """End all workers, whose groups have ended. Whoever made the launcher closes it."""
        gc.set_threshold(*self._collections)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            for task in worker.tasks:
                task.cancel()
        await asyncio.gather(*(self._close_link(worker) for worker in workers), return_exceptions=True)

    def group(self, env: Environment, run: RunContext, number: int, task: Task, places: Places | None) -> RemoteGroup:
        """Return what plays the group on a node."""
        if self._run is None:
            self._run = run
            for worker in self._workers.values():
                self._record_node(worker.node)
            self._watching.append(asyncio.create_task(self._tell_stop(run.limits), name="stop"))
        return RemoteGroup(self, env, run, number, task, places)

    def earlier_of(self, run: RunContext, group_id: str) -> EarlierWork:
        """Return the earlier work of one group."""
        if self._earlier is None or self._earlier[0] is not run.earlier:
            self._earlier = run.earlier, earlier_by_group(run.earlier)
        return self._earlier[1].get(group_id) or EarlierWork(run.earlier.run)

    async def play(self, group: RemoteGroup) -> None:
        """Play a group on a node until it has ended there. Raises `NodeLost` if the node is lost, and the errors that
        end the run."""
        try:
            work = group.work()
        except TaskError as error:
            await group.give_up_on(error)
            return
        wanted = max(1, group.run_context.settings.group_size - len(group.group.trajectories))
        room = await self.placement.place(wanted, group.needs)
        loop = asyncio.get_running_loop()
        key, playing = next(self._keys), Playing(group, room, wanted, loop.create_future())
        group.placed = playing
        try:
            worker = self._workers.get(room.name)
            if worker is None:
                raise NodeLost("the node was lost before it got the group")
            group.run_context.events.emit(
                GroupPlaced(at=time.time(), group_id=group.group.group_id, node=worker.node.address.id)
            )
            worker.plays[key] = playing
            worker.send(PlayGroup(key, work, [place for place in range(len(KINDS)) if place not in group.heard]))
            try:
                await playing.done
            except asyncio.CancelledError:
                if playing.done.cancelled():
                    playing.done = loop.create_future()
                    worker.send(Cancel(key))
                    await asyncio.wait({playing.done}, timeout=2 * CLEAN_UP_S)  # its last records are written
                raise
            finally:
                worker.plays.pop(key, None)
                if playing.done.done() and not playing.done.cancelled():
                    playing.done.exception()  # marks it as seen
        finally:
            group.placed = None
            self.placement.free(room, playing.taken, ended=True)

    def freed(self, group: RemoteGroup) -> None:
        """Free the room of one rollout of a group that goes on."""
        if (playing := group.placed) is not None and playing.taken > 1:
            playing.taken -= 1
            self.placement.free(playing.room, 1, ended=False)

    async def _greet(self, addresses: Iterable[NodeAddress]) -> list[Node]:
        async with asyncio.TaskGroup() as greeting:
            tasks = [greeting.create_task(greet(self._launcher, each, self._terms)) for each in addresses]
        nodes = [task.result() for task in tasks]
        self._started.update(node.address.id for node in nodes)
        return nodes

    def _add(self, node: Node) -> None:
        assert node.ready is not None
        room = Room(node.address.id, node.ready.slots)
        worker = self._workers[node.address.id] = _Worker(node, room)
        for work in (self._reading(worker), worker.sending()):
            worker.tasks.append(asyncio.create_task(self._until_lost(worker, work), name=f"node-{room.name[:8]}"))
        if self._run is not None and self._run.limits.reason:
            worker.send(_stop_order(self._run.limits))
        self._record_node(node)
        self.placement.add(room)

    def _note(self, text: str) -> None:
        if self._run is None:
            logger.warning("%s", text)
        else:
            self._run.events.note(text)

    def _record_node(self, node: Node, lost: str = "") -> None:
        """Write into the journal that a node belongs to the run, or is lost."""
        if self._run is not None and node.ready is not None:
            address, level, slots = node.address, node.rung.label, node.ready.slots
            self._run.events.emit(
                NodeChanged(at=time.time(), node=address.id, host=address.host, level=level, slots=slots, lost=lost)
            )

    async def _until_lost(self, worker: _Worker, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except NodeLost as error:
            self._lose(worker, str(error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a full disk, or a bug: no node can go on
            self._fail(error)

    async def _reading(self, worker: _Worker) -> None:
        """Take what a node returns until it is lost, which raises `NodeLost`."""
        while True:
            message = await worker.node.next_message()
            if isinstance(message, Happened):
                await self._take(worker, message)
            elif isinstance(message, NodeRefused):
                raise NodeLost(message.reason)

    async def _take(self, worker: _Worker, happened: Happened) -> None:
        announced: list[tuple[RemoteGroup, JournalEvent | MemoryEvent]] = []
        ended: list[tuple[Playing, BaseException | None]] = []
        written: dict[int, tuple[Journal, list[bytes]]] = {}
        committed: set[int] = set()
        plays, key, group = worker.plays, -1, None
        for entry in happened.entries:
            if entry.key != key:
                key, playing = entry.key, plays.get(entry.key)
                group = None if playing is None else playing.group
            if playing is None or group is None:  # the group was given up, or its run has ended
                continue
            kind = entry.kind
            if kind in JOURNALLED:
                journal = group.run_context.events.journal
                if id(journal) not in written:
                    written[id(journal)] = journal, []
                written[id(journal)][1].append(entry.data)
                if kind in COMMITTED:
                    committed.add(id(journal))
            if 0 <= kind < len(KINDS):
                if (event := group.take(entry)) is not None:
                    announced.append((group, event))
            elif kind == FINISHED:
                ended.append((playing, None))
            elif kind == FAILED:
                ended.append((playing, group.failure(entry)))
            else:
                raise NodeLost(f"the worker sent an event of the unknown kind {kind}")
        for key, (journal, lines) in written.items():
            journal.append_line(b"\n".join(lines))  # one write: a system call per line would cost more than the rest
            if key in committed:
                await journal.commit()
        for group, event in announced:
            events = group.run_context.events
            if isinstance(event, Alive):
                events.alive(event)
            else:
                events.announce(event)
        for playing, error in ended:
            if isinstance(error, NodeLost):
                raise error
            if playing.done.done():
                continue
            if error is None:
                playing.done.set_result(None)
            else:
                playing.done.set_exception(error)

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Give up a node: its groups continue elsewhere, and whatever it still sends is not read."""
        node = worker.node
        if self._workers.pop(node.address.id, None) is None:
            return
        self.placement.remove(worker.room.name)
        moved = [playing for playing in worker.plays.values() if not playing.done.done()]
        self._note(
            f"node {node.address.host} ({node.address.id[:8]}) is lost ({reason.rstrip('.')}); "
            f"{len(moved)} of its groups continue elsewhere, {len(self._workers)} nodes are left"
        )
        self._record_node(node, reason or "lost")
        for playing in moved:
            playing.done.set_exception(NodeLost(reason))
        current = asyncio.current_task()
        for task in worker.tasks:
            if task is not current:
                task.cancel()
        self._watching.append(asyncio.create_task(self._close_link(worker)))
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """Let every group fail with an error that ends the run."""
        logger.debug("the driver failed: %s", told(error), exc_info=error)
        for worker in self._workers.values():
            for playing in worker.plays.values():
                if not playing.done.done():
                    playing.done.set_exception(error)
        self.placement.fail(error if isinstance(error, Exception) else RuntimeError(told(error)))

    async def _close_link(self, worker: _Worker) -> None:
        link, worker.node.link = worker.node.link, None
        if link is not None:
            await link.aclose()

    async def _watch(self) -> None:
        """Start workers on nodes that join the cluster, and again on nodes whose worker was lost but that are still
        there. End the run if no node is left for long."""
        loop = asyncio.get_running_loop()
        empty_since: float | None = None
        while True:
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._changed.wait()
                    await asyncio.sleep(1.0)  # a node that is dying is often still listed
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                found = await self._launcher.nodes()
            except Exception as error:
                logger.warning("the nodes of the cluster cannot be listed: %s", told(error))
                found = []
            fresh = [each for each in found if each.id not in self._workers and self._started[each.id] < MOST_NODES]
            for node in await self._greet(fresh):
                if not node.reason and node.rung < self.rung:
                    await node.refuse(weaker(node.rung, self.rung))
                if node.reason:
                    self._started[node.address.id] += MOST_NODES if node.hello is not None else 0
                    self._note(f"node {node.address.host} ({node.address.id[:8]}) is not used: {node.reason}")
                else:
                    self._note(f"node {node.address.host} ({node.address.id[:8]}) joins")
                    self._add(node)
            if self._workers:
                empty_since = None
                continue
            empty_since = loop.time() if empty_since is None else empty_since
            if loop.time() - empty_since > WITHOUT_NODES_S:
                self._fail(ClusterLost("every node is lost, and no other has joined. Resume the run; nothing is lost"))
                return

    async def _tell_stop(self, limits: RunLimits) -> None:
        await limits.stopped()
        for worker in self._workers.values():
            worker.send(_stop_order(limits))


def _stop_order(limits: RunLimits) -> Stop:
    return Stop(limits.reason, limits.message, limits.spent)
