"""Slots spread over several backends and hosts, an overflow, drained hosts, and the limit on starts."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from golden_messages import raises
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.backends.remote import Place, PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.backends.spread import SpreadBackend, parse_names
from palaestra_slots.sandbox.creation_gate import CreationGate
from palaestra_slots.sandbox.slot import Backend, GroupAddress, Rung, SlotSpec
from palaestra_slots.sandbox.slot_usage import slot_usage
from palaestra_slots.testing.backend_conformance import BackendConformance
from palaestra_tokens.config import APIServerConfig

pytestmark = [pytest.mark.slots, pytest.mark.xdist_group("backends")]


class Here(RemoteBackend):
    """Places are processes of this machine; hosts are names, and those in `broken` start nothing."""

    name = "here"

    def __init__(self, *hosts: str, slots: int = 2) -> None:
        super().__init__(hosts=hosts or ("",), places=len(hosts) or 1, slots_per_place=slots)
        self.broken: set[str] = set()
        self.started: list[str] = []

    async def check(self, host: str) -> None:
        if host in self.broken:
            raise ConfigError(f"{host} is broken")

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        self.started.append(place.host)
        return ["false"] if place.host in self.broken else call

    def taken(self) -> Counter[str]:
        """How many slots each host has."""
        return Counter({place.spec.host: len(place.slots) for place in self._places.by_number.values() if place.slots})

    def kill(self, host: str) -> None:
        self.broken.add(host)
        for place in self._places.by_number.values():
            if place.spec.host == host:
                kill(place)


def kill(place: Place) -> None:
    assert place._server is not None
    os.killpg(place._server.pid, signal.SIGKILL)


class TestSpread(BackendConformance):
    @classmethod
    def make_backend(cls) -> Backend:
        return SpreadBackend([Here("a", slots=4)], overflow=[Here("b", slots=4)])


async def test_hosts_fill_evenly() -> None:
    backend = Here("a", "b", "c", slots=64)
    try:
        slots = [await backend.create(SlotSpec(), f"task-{number}") for number in range(7)]
        assert sorted(backend.taken().values()) == [2, 2, 3]
        for slot in slots[:5]:
            await backend.destroy(slot)
        slots += [await backend.create(SlotSpec(), f"later-{number}") for number in range(4)]
        assert backend.taken() == {"a": 2, "b": 2, "c": 2}
    finally:
        await backend.aclose()


async def test_slots_go_where_there_is_most_room_and_over_the_rest_last() -> None:
    own, small, over = Here("a", "b", slots=2), Here("c", slots=1), Here("d", slots=4)
    async with SpreadBackend([own, small], [over]) as backend:
        assert backend.capacity == 9
        slots = [await backend.create(SlotSpec(), f"t{n}") for n in range(5)]
        assert (own.taken(), small.taken(), over.taken()) == ({"a": 2, "b": 2}, {"c": 1}, {})
        assert over.started == []
        slots += [await backend.create(SlotSpec(), "more")]
        assert over.taken() == {"d": 1}
        assert len({slot.epoch for slot in slots}) == 6
        await backend.destroy(slots[0])
        await backend.create(SlotSpec(), "again")
        assert over.taken() == {"d": 1}
        assert backend.stats()["slots"] == 6


async def test_a_backend_or_host_that_fails_is_left_out() -> None:
    one, two = Here("a", "b"), Here("c", slots=4)
    async with SpreadBackend([one, two]) as backend:
        first = await backend.create(SlotSpec(), "t")
        one.kill("a")
        one.kill("b")
        for number in range(3):
            slot = await backend.create(SlotSpec(), f"t{number}")
            assert (await slot.execute("true")).exit_code == 0
        assert two.taken()["c"] >= 3
        await backend.destroy(first)


async def test_a_group_is_on_one_backend() -> None:
    def member(number: int) -> SlotSpec:
        return SlotSpec(group=GroupAddress("a", number, 5))

    async def main() -> None:
        async with SpreadBackend([LocalBackend(), LocalBackend()]) as backend:
            lead = await backend.create(member(2), "lead")
            if lead.rung < Rung.USERNS:
                pytest.skip("needs namespaces")
            single = await backend.create(SlotSpec(), "single")
            assert backend._holder(single) is not backend._holder(lead)
            for number in (3, 4):
                second = await backend.create(member(number), "second")
                assert backend._holder(second) is backend._holder(lead)
                await backend.destroy(second)
            elsewhere = await backend.seal(single)
            with raises(ConfigError, "second", "local"):
                await backend.create(member(5), "second", elsewhere)
            await backend.destroy(lead)
            await backend.destroy(await backend.create(member(5), "the first of a new group", elsewhere))

    await main()


async def test_without_any_backend_the_start_fails() -> None:
    one, two = Here("a"), Here("b")
    one.broken, two.broken = {"a"}, {"b"}
    with pytest.raises(ConfigError, match="a is broken"):
        await SpreadBackend([one, two]).start()
    async with SpreadBackend([one, Here("c")]) as backend:
        await backend.create(SlotSpec(), "t")
    with pytest.raises(ConfigError, match="b is broken"):
        await SpreadBackend([Here("c")], [two]).start()


async def test_a_drained_host_gets_no_new_slots_and_ends_when_it_is_idle(tmp_path: Path) -> None:
    backend = Here("a", "b")
    backend.hosts.drain_file = tmp_path / "drained"
    async with backend:
        slots = [await backend.create(SlotSpec(), f"t{n}") for n in range(4)]
        assert backend.taken() == {"a": 2, "b": 2}
        backend.hosts.drain_file.write_text("a\n")
        for slot in slots:
            assert (await slot.execute("true")).exit_code == 0
            await backend.destroy(slot)
        assert {place.spec.host for place in backend._places.by_number.values()} == {"b"}
        again = [await backend.create(SlotSpec(), f"t{n}") for n in range(2)]
        assert backend.taken() == {"b": 2}
        backend.hosts.drain_file.write_text("a b")
        with pytest.raises(SandboxError, match="drained"):
            await backend.create(SlotSpec(), "none left")
        assert len(again) == 2


def test_slots_that_share_a_place_without_isolation_are_refused() -> None:
    class Bare(Here):
        def __init__(self, slots: int) -> None:
            RemoteBackend.__init__(self, slots_per_place=slots, rung=Rung.NONE)

    assert Bare(1).capacity == 1
    with pytest.raises(ConfigError, match="isolation"):
        Bare(2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("docker", [("docker", (), False)]),
        ("docker=a,b modal=overflow", [("docker", ("a", "b"), False), ("modal", (), True)]),
        ("ssh=a,overflow local", [("ssh", ("a",), True), ("local", (), False)]),
    ],
)
def test_names_of_backends(text: str, shown: Any) -> None:
    assert [(each.name, each.hosts, each.overflow) for each in parse_names(text)] == shown


def test_the_flag_may_be_repeated() -> None:
    line = CommandLine("x", HermesAgentEnvConfig, APIServerConfig, command="process")
    words = "--backend docker=unix:///a,unix:///b --backend ssh=me@c,overflow --env.docker_image i:1 --policy oracle"
    parsed = line.parse(words.split(), {})
    assert isinstance(parsed, Parsed)
    config = parsed.env_config
    backend = make_backend(config.slot_backend, config)
    assert isinstance(backend, SpreadBackend)
    assert [(part.backend.name, part.overflow) for part in backend._parts] == [("docker", False), ("ssh", True)]
    config.check_runnable()
    for wrong in ("modal=overflow", "nomad=a local", "docker nothing"):
        with pytest.raises(ConfigError):
            make_backend(wrong, config)


# The gate


def enter(folder: str, times: Any, per_s: float | None, most: int | None, hold_s: float) -> None:
    async def main() -> None:
        gate = CreationGate("g", per_s=per_s, most=most, folder=Path(folder))
        for _ in range(3):
            async with gate.entered():
                begun = time.monotonic()
                await asyncio.sleep(hold_s)
                times.append((begun, time.monotonic()))

    asyncio.run(main())


def entered(folder: Path, per_s: float | None = None, most: int | None = None, hold_s: float = 0.0) -> list[Any]:
    """When three processes were in the gate, three times each."""
    with multiprocessing.Manager() as manager:
        times = manager.list()
        workers = [
            multiprocessing.Process(target=enter, args=(str(folder), times, per_s, most, hold_s)) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sorted(times)


def test_starts_a_second_are_counted_over_all_processes(tmp_path: Path) -> None:
    begun = [begin for begin, _ in entered(tmp_path, per_s=10)]
    assert len(begun) == 9
    assert begun[-1] - begun[0] >= 0.75


def test_starts_at_a_time_are_counted_over_all_processes(tmp_path: Path) -> None:
    times = entered(tmp_path, most=2, hold_s=0.1)
    assert len(times) == 9
    assert all(sum(other[0] <= begin < other[1] for other in times) <= 2 for begin, _ in times)


async def test_a_provider_that_says_too_many_slows_all_starts_until_they_succeed(tmp_path: Path) -> None:
    one, two = (CreationGate("g", folder=tmp_path) for _ in range(2))
    async with two.entered():
        pass
    assert await one.throttled(0.5) == 1.0
    begun = time.monotonic()
    async with two.entered():
        assert 0.9 < time.monotonic() - begun < 5
    begun = time.monotonic()
    async with two.entered():
        pass
    async with two.entered():
        assert time.monotonic() - begun < 4
    assert await one.throttled() >= 1.0


async def test_what_containers_were_used_and_their_price_is_counted() -> None:
    one, two = Here("a", slots=1), Here("b", slots=1)
    two.name = "there"
    async with SpreadBackend([one, two]) as backend:
        slots = [await backend.create(SlotSpec(), f"t{n}") for n in range(2)]
        one.kill("a")
        for slot in slots:
            await backend.destroy(slot)
        used = slot_usage(backend.stats(), {"here": 3600.0})
    assert (used["slots/here/begun"], used["slots/there/begun"]) == (1, 1)
    assert used["slots/cost"] == used["slots/here/cost"] > 0
    assert 0 < used["slots/there/hours"] < 0.1
    assert "slots/there/cost" not in used
    ended = slot_usage(backend.stats(), {})
    assert ended["slots/here/hours"] >= used["slots/here/hours"]
    assert slot_usage({"backend": "local", "slots": 3}, {"local": 1.0}) == {}


@pytest.mark.parametrize("made_as", ["open", "link"])
async def test_a_folder_that_another_user_could_write_is_refused(tmp_path: Path, made_as: str) -> None:
    folder = tmp_path / "gates"
    if made_as == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.symlink_to(tmp_path)
    gate = CreationGate("cloud", per_s=1.0, folder=folder)
    with pytest.raises(ConfigError, match="gates"):
        async with gate.entered():
            pass
    assert not list(tmp_path.glob("cloud*"))
