"""The conformance suite of backends on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from cluster.on_loop import on_loop
from cluster.ray_nodes import SMALL, processes_with, ray_cluster
from palaestra.cluster.ray_slots import RayBackend
from palaestra.core.errors import ConfigError
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.sandbox.backends.registry import make_backend
from palaestra.sandbox.slot import Backend, Slot, SlotSpec
from palaestra.testing.backend_conformance import BackendConformance

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("ray")]


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(180)
class TestRay(BackendConformance):
    cluster: ClassVar[Any]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _cluster(cls) -> Iterator[None]:
        with ray_cluster() as cls.cluster:
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _cluster: None) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return RayBackend(cls.cluster.address, slots_per_node=10)

    async def end_place(self, slot: Slot) -> None:
        (pid,) = processes_with(b"/palaestra-slotd-")
        os.kill(pid, signal.SIGKILL)

    def test_slots_go_to_nodes_that_join_and_are_lost_with_their_node(self) -> None:
        node = self.cluster.add_node(**SMALL)

        async def main() -> None:
            options = {"address": self.cluster.address, "slots_per_node": 4}
            async with make_backend("ray", HermesAgentEnvConfig(backend_options=options)) as backend:
                slots = [await backend.create(SlotSpec(), f"t{number}") for number in range(6)]
                stats = backend.stats()
                assert (stats["containers"], stats["slots"]) == (2, 6)
                self.cluster.remove_node(node, allow_graceful=False)
                kinds: list[str] = []
                async with asyncio.timeout(60):
                    while "SlotLost" not in kinds:  # the actor ends a moment after its node
                        said = (each.execute("echo here") for each in slots)
                        kinds = sorted(
                            type(each).__name__ for each in await asyncio.gather(*said, return_exceptions=True)
                        )
                assert kinds == ["ExecutionResult"] * 3 + ["SlotLost"] * 3
                fresh = await backend.create(SlotSpec(), "another")
                assert (await fresh.execute("echo here")).output.strip() == "here"
                slots.append(fresh)
                for slot in slots:
                    await backend.destroy(slot)

        asyncio.run(main())


@on_loop
async def test_without_ray_or_a_cluster_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each == "ray" or each.startswith(("ray.", "palaestra.cluster.ray_l"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--backend ray needs the extra `ray`: pip install .*\[ray\]"):
        await make_backend("ray", HermesAgentEnvConfig()).start()


def test_options_that_it_does_not_have_are_refused() -> None:
    for options, says in (({"addres": "x"}, "no option addres"), ({"slots_per_node": 0}, "slots_per_node must be")):
        with pytest.raises(ConfigError, match=says):
            make_backend("ray", HermesAgentEnvConfig(backend_options=options))
