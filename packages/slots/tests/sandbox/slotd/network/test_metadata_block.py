"""The addresses that a guarded group does not reach: the kernel takes the programs; who is told where it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from palaestra_slots.sandbox.slotd.namespaced import cgroups
from palaestra_slots.sandbox.slotd.network import metadata_block

ONLINE_TWICE = """
import asyncio
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec

async def main():
    async with LocalBackend(rung=Rung.CONFINED) as backend:
        for _ in range(2):
            await backend.destroy(await backend.create(SlotSpec(network=Network.ON), "online"))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="programs for sockets need root")
def test_the_kernel_takes_the_programs() -> None:
    metadata_block.Guard()


def test_a_hierarchy_without_controllers_is_only_for_slots_with_network(tmp_path: object) -> None:
    group = cgroups.ServerCgroup(
        [cgroups.Hierarchy(1, ("memory", "pids"), f"{tmp_path}/one"), cgroups.Hierarchy(2, (), f"{tmp_path}/two")],
        "server",
    )
    group.create()
    none = dict.fromkeys(("memory_bytes", "cpus", "pids"))
    assert group.add("a", none) == [f"{tmp_path}/one/server/a"]
    assert group.add("b", none, network=True) == [f"{tmp_path}/one/server/b", f"{tmp_path}/two/server/b"]
    assert group.guarded("b") == f"{tmp_path}/two/server/b"
    assert cgroups.remove([f"{tmp_path}/one/server/a", f"{tmp_path}/one/server/b", f"{tmp_path}/two/server/b"])
    assert group.remove()


@pytest.mark.slots
def test_a_shared_network_is_reported_once() -> None:
    done = subprocess.run([sys.executable, "-c", ONLINE_TWICE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.count("share the network of this machine") == 1
    assert "give a list of hosts" in done.stderr
