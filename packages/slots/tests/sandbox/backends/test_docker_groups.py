"""Slots in several docker containers that are joined by networks of their own: who reaches whom, and what is left."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, SandboxError, SlotLost
from palaestra_slots.core.types import AllowList
from palaestra_slots.sandbox.backends.docker import LABEL, ContainerOptions, DockerBackend
from palaestra_slots.sandbox.slot import GroupAddress, Rung, Slot, SlotSpec
from programs import killed_after, until
from sandbox.containers import Docker, docker, own_bridge
from sandbox.python_image import make_python_root
from sandbox.slotd.network.test_group_network import SERVE, ask, serve

pytestmark = [pytest.mark.slots, pytest.mark.docker, pytest.mark.slow, pytest.mark.xdist_group("docker")]

IMAGE, HOST, NEIGHBOUR = "python:here", "172.31.251.1", "172.31.251.2"
KILLED = """
import asyncio, sys
from palaestra_slots.sandbox.backends.docker import ContainerOptions, DockerBackend
from palaestra_slots.sandbox.slot import GroupAddress, SlotSpec

async def main(address, root):
    async with DockerBackend("python:here", hosts=[address], options=ContainerOptions(privileged=True)) as backend:
        for number, image in ((2, root), (3, None)):
            await backend.create(SlotSpec(image, group=GroupAddress("a", number, 2)), "killed")
        print(backend._group_folder(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_python_root(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="module")
def daemon(root: str) -> Iterator[Docker]:
    """A daemon whose containers have a network."""
    with own_bridge(f"{HOST}/24") as bridge, docker(f"--bridge={bridge}") as client:
        client.load(Path(root), IMAGE)
        yield client


def backend(daemon: Docker, **changed: object) -> DockerBackend:
    options = ContainerOptions(privileged=True)
    return DockerBackend(IMAGE, **{"hosts": [daemon.address], "containers": 3, "options": options} | changed)  # type: ignore[arg-type]


def member(group: str, number: int, image: str | None, members: int = 3) -> SlotSpec:
    return SlotSpec(image, group=GroupAddress(group, number, members))


def containers_of(slots: list[Slot]) -> int:
    return len({slot.epoch >> 32 for slot in slots})


def test_members_in_several_containers_reach_each_other_and_nobody_else(daemon: Docker, root: str) -> None:
    """One of the containers has a network, because a slot in it has a list of hosts."""

    async def main() -> None:
        async with backend(daemon) as slots:
            online = SlotSpec(root, AllowList(("palaestra.invalid",)), group=GroupAddress("a", 4, 3))
            ours = [await slots.create(spec, "a") for spec in (member("a", 2, root), member("a", 3, None), online)]
            theirs = [
                await slots.create(member("b", 2 + number, each), "b") for number, each in enumerate((None, root))
            ]
            assert containers_of(ours) == 3
            assert containers_of(theirs) == 2
            assert {slot.rung for slot in ours} == {Rung.FULL, Rung.USERNS}
            for slot in (ours[1], theirs[0]):
                await serve(slot)
            with socket.create_server(("0.0.0.0", 0)) as host:
                port = str(host.getsockname()[1])
                for number in (0, 2):
                    assert await ask(ours[number], "198.19.0.3", "80") == ["hello"]
                    outside = ("198.19.0.2", "80", HOST, port, NEIGHBOUR, "80", "127.0.0.1", port, "8.8.8.8", "53")
                    reached = await ask(ours[number], *outside)
                    assert len(reached) == 5
                    assert not {"hello", "silence"} & set(reached), reached
            assert await ask(theirs[1], "198.19.0.2", "80", "198.19.0.3", "80") == ["hello", "ConnectionRefusedError"]
            for slot in ours:
                found = await slot.execute("ls -d /palaestra-groups /host; cat /proc/net/if_inet6")
                assert "\n/" not in f"\n{found.output}", "no slot has the folder with the sockets"
                assert "eth0" not in found.output, "the device has no IPv6"

    command = [*daemon.command.split(), "run", "--rm", "--detach", IMAGE, "python3", "-c", SERVE]
    neighbour = subprocess.check_output(command, text=True).strip()
    try:
        until(lambda: reaches(NEIGHBOUR), "the other container serves")
        asyncio.run(main())
    finally:
        subprocess.run([*daemon.command.split(), "kill", neighbour], check=True, capture_output=True)


def reaches(address: str) -> bool:
    try:
        with socket.create_connection((address, 80), timeout=1) as asked:
            return asked.recv(9) == b"hello"
    except OSError:
        return False


async def test_many_groups_begin_at_the_same_time_in_both_containers(daemon: Docker, root: str) -> None:
    async def main() -> None:
        async with backend(daemon, slots_per_container=40) as slots:
            images = (root, None)
            await asyncio.gather(
                *(play(slots, f"{number}", images[number % 2], images[1 - number % 2]) for number in range(12))
            )
            assert slots.stats()["slots"] == 0
            assert not list(slots._group_folder().iterdir())

    async def play(slots: DockerBackend, group: str, first: str | None, second: str | None) -> None:
        lead = await slots.create(member(group, 2, first), "lead")
        others = await asyncio.gather(*(slots.create(member(group, each, second), "other") for each in (3, 4)))
        assert containers_of([lead, *others]) == 2
        await serve(others[0])
        assert await ask(lead, "198.19.0.3", "80") == ["hello"]
        await slots.destroy(lead)
        assert await ask(others[1], "198.19.0.3", "80") == ["hello"], "the others stay joined"
        for slot in others:
            await slots.destroy(slot)

    await main()


def kill_newest(daemon: Docker) -> None:
    command = daemon.command.split()
    newest = subprocess.check_output([*command, "ps", "--quiet", "--latest"], text=True).strip()
    subprocess.run([*command, "kill", newest], check=True, capture_output=True)


async def test_a_group_whose_first_container_is_killed_gets_no_second_network(daemon: Docker, root: str) -> None:
    async with backend(daemon) as slots:
        others = [await slots.create(member("b", number, None), "other") for number in (2, 3)]
        lead = await slots.create(member("a", 2, root), "lead")
        await asyncio.to_thread(kill_newest, daemon)
        with pytest.raises(SlotLost):
            await lead.execute("true")
        with pytest.raises(SandboxError, match="the slot server that made the group's network has ended"):
            await slots.create(member("a", 3, None), "late")
        await serve(others[0])
        assert await ask(others[1], "198.19.0.2", "80") == ["hello"]


async def test_without_rights_slots_are_not_joined(daemon: Docker, root: str) -> None:
    async with backend(daemon, options=ContainerOptions()) as slots:
        with pytest.raises(ConfigError, match="at confined: set docker_privileged"):
            await slots.create(member("a", 2, None), "a")
        with pytest.raises(ConfigError, match="docker_privileged"):
            await slots.create(member("a", 2, root), "a")


def test_a_process_that_is_killed_leaves_no_container_and_no_network(daemon: Docker, root: str) -> None:
    listing = [*daemon.command.split(), "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
    networks = subprocess.check_output([*daemon.command.split(), "network", "ls", "--quiet"])
    with killed_after([sys.executable, "-c", KILLED, daemon.address, root], stdout=subprocess.PIPE, text=True) as run:
        folder = Path(run.stdout.readline().strip())
        assert len(subprocess.check_output(listing, text=True).split()) == 2
        assert folder.parent == Path(tempfile.gettempdir())
        assert len(list(folder.iterdir())) == 1
    until(lambda: not subprocess.check_output(listing), "the containers are gone")
    assert subprocess.check_output([*daemon.command.split(), "network", "ls", "--quiet"]) == networks

    async def main() -> None:
        async with backend(daemon) as slots:
            own = slots._group_folder()
            assert own.exists()
            assert not folder.exists(), "the next run removes the folder"
        assert not own.exists()

    asyncio.run(main())
