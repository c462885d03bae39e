"""The nodes of a run: how a worker is greeted, which nodes are used and why others are not, and the table of them.

A node is not used if its palaestra differs from the driver's, if its worker could not start, or if its isolation level
is below that of another node: levels never mix in a run. A setting of the level (`--env.isolation confined`) lets
weaker nodes in, and then holds for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from palaestra_cloud.cluster.launcher import Launcher, Link, NodeAddress, NodeLost
from palaestra_cloud.cluster.messages import (
    FromWorker,
    Hello,
    NodeRefused,
    Ready,
    StreamEnded,
    WorkerSetup,
    framed,
    from_worker,
    this_process,
)
from palaestra_slots.core.printable import without_middle
from palaestra_slots.sandbox.slot import Rung
from palaestra_tokens.config import APIServerConfig

HELLO_S = 120.0
"""How long a worker may take to start."""

READY_S = 900.0
"""How long a worker may take to open its environment and its slots."""

_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104 - compared with, not bound
_LONGEST_REASON = 300


@dataclass(slots=True)
class Node:
    """A node with its worker. `reason` says why it is not used; empty if it is."""

    address: NodeAddress
    link: Link | None = None
    messages: AsyncIterator[bytes] | None = None
    hello: Hello | None = None
    ready: Ready | None = None
    reason: str = ""

    @property
    def rung(self) -> Rung:
        """The isolation level of a node that is ready."""
        assert self.ready is not None
        return Rung(self.ready.rung)

    async def next_message(self) -> FromWorker:
        """Return the worker's next message. Raises `NodeLost`."""
        assert self.messages is not None
        try:
            return from_worker(await anext(self.messages))
        except (StopAsyncIteration, StreamEnded) as error:
            raise NodeLost(str(error) or "the worker has ended") from error

    async def refuse(self, reason: str) -> None:
        """Do not use this node, and end its worker."""
        self.reason, link, self.link = reason, self.link, None
        if link is not None:
            await link.aclose()


@dataclass(frozen=True, slots=True)
class Terms:
    """What every node of a run must meet: the driver's version, and the setup, which must work there."""

    setup: WorkerSetup
    servers: Sequence[APIServerConfig] = ()
    own: Hello = field(default_factory=this_process)

    def problem(self, hello: Hello) -> str:
        """Return why this worker cannot belong to the run; empty if it can."""
        if hello.version != self.own.version:
            return f"has palaestra {hello.version}, and the driver has {self.own.version}: install the same version"
        if hello.build != self.own.build:
            return (
                f"has other files of palaestra {hello.version} (build {hello.build}) than the driver "
                f"({self.own.build}): install the same build"
            )
        if hello.host != self.own.host:
            for server in self.servers:
                if (urlsplit(server.base_url or "").hostname or "").startswith(_LOOPBACK):
                    return (
                        f"cannot reach the model server {server.base_url}, an address of the driver's machine only: "
                        "let the server listen on an address that every node reaches, and give that one"
                    )
        return ""


async def greet(launcher: Launcher, address: NodeAddress, terms: Terms) -> Node:
    """Start a worker on a node and set it up. If this fails, the node has the reason."""
    node = Node(address)
    try:
        async with asyncio.timeout(HELLO_S):
            node.link = await launcher.start(address)
            node.messages = node.link.receive()
            hello = await node.next_message()
        if not isinstance(hello, Hello):
            raise NodeLost(f"the worker began with {type(hello).__name__}")
        node.hello = hello
        if problem := terms.problem(hello):
            await node.refuse(problem)
            return node
        await node.link.send(framed(terms.setup))
        async with asyncio.timeout(READY_S):
            answer = await node.next_message()
        if isinstance(answer, Ready):
            node.ready = answer
        else:
            await node.refuse(answer.reason if isinstance(answer, NodeRefused) else f"answered {type(answer).__name__}")
    except TimeoutError:
        limit = READY_S if node.hello is not None else HELLO_S
        await node.refuse(f"its worker did not answer within {limit:.0f} seconds")
    except NodeLost as error:
        await node.refuse(f"its worker could not start: {error}")
    except BaseException:
        await node.refuse("the run ended")
        raise
    return node


async def agree_on_level(nodes: Iterable[Node]) -> Rung | None:
    """Refuse ready nodes whose isolation level is below that of another one. Returns the level; None without a node."""
    ready = [node for node in nodes if node.ready is not None and not node.reason]
    level = max((node.rung for node in ready), default=None)
    for node in ready:
        if level is not None and node.rung < level:
            await node.refuse(weaker(node.rung, level))
    return level


def weaker(has: Rung, level: Rung) -> str:
    """Return why a node with a weaker level is not used."""
    return (
        f"isolation {has.label}, and others have {level.label}: `palaestra doctor` on the node says what it lacks; "
        f"--env.isolation {has.label} uses that level on every node"
    )


def table(name: str, nodes: Iterable[Node]) -> str:
    """Return the table of nodes, one line each, with the reason for each node that is not used."""
    rows = [("node", "level", "slots", "palaestra")]
    reasons = [""]
    for node in sorted(nodes, key=lambda node: (bool(node.reason), node.address.host, node.address.id)):
        hello, ready = node.hello, node.ready
        rows.append((
            f"{node.address.host} ({node.address.id[:8]})",
            node.rung.label if ready is not None else "-",
            str(ready.slots) if ready is not None else "-",
            hello.version if hello is not None else "-",
        ))  # fmt: skip
        reasons.append(f"  not used: {without_middle(node.reason, _LONGEST_REASON)}" if node.reason else "")
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + reason
        for row, reason in zip(rows, reasons, strict=True)
    ]
    used = sum(not reason for reason in reasons) - 1
    return "\n".join([f"cluster {name}: {used} of {len(rows) - 1} nodes", *(line.rstrip() for line in lines)]) + "\n"
