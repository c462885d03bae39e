"""Slot servers that give each other the bridges of groups; descriptors of files stand for the bridges."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palaestra_slots.sandbox.slotd.event_loop import EpollLoop
from palaestra_slots.sandbox.slotd.network.bridge_exchange import BridgeExchange


class Server:
    """An exchange, with the loop in which its server answers when it does not wait itself."""

    def __init__(self, folder: Path, longest_s: float = 10.0) -> None:
        self.loop = EpollLoop()
        self.exchange = BridgeExchange(self.loop, str(folder), longest_s)
        self.bridges: dict[str, int] = {}

    def offer(self, group: str, text: str) -> None:
        """Offer a file with this text."""
        with tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            self.bridges[group] = os.dup(file.fileno())
        self.exchange.offer_bridge(group, self.bridges[group])

    def end(self) -> None:
        for group, fd in self.bridges.items():
            self.exchange.withdraw(group)
            os.close(fd)
        self.loop.end()

    def content(self, group: str) -> str | None:
        """What is in the file that another server offers."""
        fd = self.exchange.ask(group)
        if fd is None:
            return None
        try:
            assert not os.get_inheritable(fd)
            return os.pread(fd, 99, 0).decode()
        finally:
            os.close(fd)

    def serve(self, until: threading.Event) -> None:
        while not until.is_set():
            self.loop.turn(0.01)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    made = [Server(tmp_path) for _ in range(3)]
    yield made
    for server in made:
        server.end()


def test_a_bridge_is_offered_from_its_first_server_to_its_end(tmp_path: Path, servers: list[Server]) -> None:
    first, second, _ = servers
    assert second.content("a") is None
    first.offer("a", "of a")
    first.offer("b/../c", "of b")
    ended = threading.Event()
    with ThreadPoolExecutor() as threads:
        serving = threads.submit(first.serve, ended)
        try:
            assert [second.content(each) for each in ("b/../c", "a", "b", "a")] == ["of b", "of a", None, "of a"]
        finally:
            ended.set()
        serving.result(10)
    first.exchange.withdraw("a")
    first.exchange.withdraw("a")
    assert second.content("a") is None
    assert len(list(tmp_path.iterdir())) == 1, "the other offer"


def test_servers_that_wait_for_each_other_answer(servers: list[Server]) -> None:
    for number, server in enumerate(servers):
        server.offer(f"{number}", f"of {number}")
    done, ready = [threading.Event() for _ in servers], threading.Barrier(len(servers))

    def ask(number: int) -> set[str | None]:
        """Each asks the next one. Its loop runs only after its last answer, so the waiting servers must answer."""
        server, other = servers[number], f"{(number + 1) % len(servers)}"
        ready.wait(10)
        try:
            found = {server.content(other) for _ in range(50)}
        finally:
            done[number].set()
        for each in done:
            server.serve(each)
        return found

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(ask, range(len(servers)))) == [{"of 1"}, {"of 2"}, {"of 0"}]


def test_a_server_that_hangs_or_has_died(tmp_path: Path, servers: list[Server]) -> None:
    first, second, _ = servers
    first.offer("a", "of the first")
    hasty = BridgeExchange(second.loop, str(tmp_path), longest_s=0.05)
    with pytest.raises(TimeoutError, match="does not answer"):
        hasty.ask("a")
    with pytest.raises(OSError, match="in use"):
        hasty.offer_bridge("a", 0)
    first.exchange._offers["a"][0].close()  # as the kernel does
    with pytest.raises(OSError, match="has ended"):
        hasty.ask("a")


def test_without_a_folder_there_are_no_others(servers: list[Server]) -> None:
    alone = BridgeExchange(servers[0].loop)
    alone.offer_bridge("a", 0)
    assert alone.ask("a") is None
    alone.withdraw("a")
