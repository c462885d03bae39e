"""Which nodes a run uses, and what it says about the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cluster import counting
from cluster.on_loop import on_loop
from golden_messages import check_message, raises
from palaestra_cloud.cluster.driver import Driver
from palaestra_cloud.cluster.launcher import NodeAddress, ProcessLauncher, ProcessLink
from palaestra_cloud.cluster.messages import (
    FromWorker,
    Hello,
    NodeRefused,
    Ready,
    StreamEnded,
    WorkerSetup,
    framed,
    from_worker,
    read_frame,
    this_process,
)
from palaestra_cloud.cluster.nodes import Terms, table
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable
from palaestra_tokens.config import APIServerConfig

SETUP = WorkerSetup(reference="lines_env.py", script=None, folder="/", settings=b"", flush_s=0.1)
OWN = this_process()


class Said:
    """The streams of a worker that says this, and then nothing more."""

    def __init__(self, *messages: FromWorker) -> None:
        self.messages = messages
        self.closed = False

    async def send(self, frames: bytes) -> None:
        pass

    async def receive(self) -> AsyncIterator[bytes]:
        for message in self.messages:
            yield framed(message)[4:]
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed = True


class Cluster:
    """A cluster whose workers say this, by node."""

    name = "of three"

    def __init__(self, **said: Said) -> None:
        self.said = said

    async def nodes(self) -> list[NodeAddress]:
        return [NodeAddress(name, name) for name in self.said]

    async def start(self, node: NodeAddress) -> Said:
        return self.said[node.id]

    async def aclose(self) -> None:
        pass


@on_loop
async def test_a_node_with_another_palaestra_is_named_and_not_used() -> None:
    older = msgspec.structs.replace(OWN, version="0.0.9")
    edited = msgspec.structs.replace(OWN, build="0123456789ab")
    cluster = Cluster(good=Said(OWN, Ready(3, 8)), old=Said(older), edited=Said(edited))
    driver = Driver(cluster, Terms(SETUP))
    shown = await driver.open()
    assert driver.slots == 8
    assert "of three: 1 of 3 nodes" in shown
    check_message(shown, "0.0.9", OWN.version)
    check_message(shown, "palaestra")
    assert cluster.said["old"].closed
    assert not cluster.said["good"].closed
    await driver.aclose()
    assert cluster.said["good"].closed


@on_loop
async def test_levels_never_mix() -> None:
    cluster = Cluster(weak=Said(OWN, Ready(1, 64)), strong=Said(OWN, Ready(3, 8)))
    driver = Driver(cluster, Terms(SETUP))
    shown = await driver.open()
    assert (driver.rung.label, driver.slots) == ("full", 8)
    check_message(shown, "isolation", "confined", "full")
    assert "--env.isolation confined" in shown
    await driver.aclose()


@on_loop
async def test_a_cluster_without_a_usable_node_says_why() -> None:
    refused = NodeRefused("the isolation level full is not available here", 5)
    with raises(IsolationUnavailable):
        await Driver(Cluster(only=Said(OWN, refused)), Terms(SETUP)).open()
    with raises(ConfigError):
        await Driver(Cluster(), Terms(SETUP)).open()


def test_a_model_server_on_the_drivers_loopback_is_out_of_reach_elsewhere() -> None:
    here = Terms(SETUP, [APIServerConfig(base_url="http://localhost:8000/v1", model_name="m")])
    elsewhere = msgspec.structs.replace(OWN, host="another")
    assert here.problem(OWN) == ""
    assert "http://localhost:8000/v1" in here.problem(elsewhere)
    reachable = replace(here, servers=[APIServerConfig(base_url="http://10.0.0.7:8000/v1", model_name="m")])
    assert reachable.problem(elsewhere) == ""


def test_the_table_has_a_line_per_node() -> None:
    assert table("nowhere", []).startswith("cluster nowhere: 0 of 0 nodes")


@on_loop
async def test_what_is_no_message_of_a_worker_ends_its_stream() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"\xff\xff\xff\xffprinted by something else")
    with raises(StreamEnded):
        await read_frame(stream)
    with pytest.raises(StreamEnded, match="not a message"):
        from_worker(b"\x93\x01")


@pytest.mark.slow
@on_loop
async def test_a_worker_tells_why_it_cannot_begin(tmp_path: Path) -> None:
    path = counting.written(tmp_path)
    broken = replace_setup(f"{path}:nothing", path.read_bytes())
    launcher = ProcessLauncher(1)
    (address,) = await launcher.nodes()
    link = await launcher.start(address)
    assert isinstance(link, ProcessLink)
    assert link.process.stdout is not None
    hello = from_worker(await read_frame(link.process.stdout))
    assert isinstance(hello, Hello)
    assert hello.python == sys.version.split()[0]
    await link.send(framed(broken))
    refused = from_worker(await read_frame(link.process.stdout))
    assert isinstance(refused, NodeRefused)
    assert "has no environment 'nothing'" in refused.reason
    await link.aclose()
    assert link.process.returncode == 0


def replace_setup(reference: str, script: bytes) -> WorkerSetup:
    return msgspec.structs.replace(SETUP, reference=reference, script=script)
