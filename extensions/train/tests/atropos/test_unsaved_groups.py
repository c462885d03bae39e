"""What is sent again to a server that keeps nothing, and what never is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from feeds import SETTINGS, Said, fed, marks
from talking import Talk, group, trainer

from palaestra_train.atropos.exchange import Exchange
from palaestra_train.atropos.groups import UnsavedGroups
from palaestra_train.atropos.trajectory_server import TrajectoryServer


def given(memory: UnsavedGroups, *numbers: int, rows: int = 2) -> None:
    for number in numbers:
        memory.begin()
        memory.end(f"run/{number}", group(rows, first=number), taken=True)


def lost(memory: UnsavedGroups, *, alone: bool = True) -> tuple[list[str], list[str]]:
    again, perhaps = memory.lost(4, alone=alone)
    return [each.delivery_id for each in again], [each.delivery_id for each in perhaps]


def test_one_batch_at_a_time() -> None:
    memory = UnsavedGroups(group_size=2)
    assert memory.room(4)
    given(memory, 0)
    assert memory.room(4)
    given(memory, 1)
    assert not memory.room(4)
    memory.heard(0, memory.asking())
    assert memory.room(4)
    given(memory, 2)
    assert not memory.room(3)


def test_a_batch_that_was_seen_waiting_is_sent_again() -> None:
    memory = UnsavedGroups(group_size=2)
    given(memory, 0, 1)
    memory.heard(2, memory.asking())
    assert lost(memory) == (["run/0", "run/1"], [])
    assert lost(memory) == ([], [])


def test_a_full_batch_that_nobody_saw_waiting_is_not() -> None:
    memory = UnsavedGroups(group_size=2)
    given(memory, 0)
    memory.heard(1, memory.asking())
    given(memory, 1)
    assert lost(memory) == ([], ["run/0", "run/1"])


@pytest.mark.parametrize("alone", [True, False])
def test_less_than_a_batch_cannot_have_left_unless_others_filled_it(alone: bool) -> None:
    memory = UnsavedGroups(group_size=2)
    given(memory, 0)
    assert lost(memory, alone=alone) == ((["run/0"], []) if alone else ([], ["run/0"]))


def test_the_oldest_leave_first() -> None:
    memory = UnsavedGroups(group_size=1)
    given(memory, 0, 1, 2, rows=1)
    memory.heard(1, memory.asking())
    assert lost(memory) == (["run/2"], [])


def test_an_answer_says_nothing_of_what_was_given_meanwhile() -> None:
    memory = UnsavedGroups(group_size=2)
    given(memory, 0)
    asked = memory.asking()
    given(memory, 1)
    memory.heard(1, asked)
    assert not any(each.waited for each in memory.given)
    memory.begin()
    asked = memory.asking()
    memory.end("run/2", group(2, first=2), taken=False)
    memory.heard(2, asked)
    assert not any(each.waited for each in memory.given)


def test_after_a_short_group_nothing_is_known_and_nothing_held_back() -> None:
    memory = UnsavedGroups(group_size=2)
    given(memory, 0)
    given(memory, 1, rows=1)
    assert memory.room(4)
    assert lost(memory) == ([], [])
    given(memory, 2)
    assert lost(memory) == (["run/2"], [])


class Nameless(TrajectoryServer):
    """Keeps nothing and does not say who it is, as the original. `told`: it has said more than once that two wait."""

    def __init__(self) -> None:
        super().__init__(Exchange())
        self.told = asyncio.Event()
        self._times = 0

    async def _root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def _status_env(self, request: web.Request) -> web.Response:
        self._times += len(self.exchange.queue) == 2
        if self._times > 2:
            self.told.set()
        return await super()._status_env(request)


@pytest.mark.parametrize(("step", "come"), [(3, [0, 1, 2, 3]), (4, [2, 3])])
async def test_a_trainer_that_says_that_it_took_a_batch_is_believed(step: int, come: list[int], tmp_path: Path) -> None:
    """The server forgets a batch that was seen waiting; the trainer comes back at its old step, or at the next."""

    async def scenario(server: Nameless, url: str) -> list[int]:
        got: list[int] = []
        async with Talk(url) as api:
            await api.both()
            await api.post("/disconnect-env", {"env_id": 0})
            said = Said()
            async with fed(tmp_path, url, said, SETTINGS) as feed:
                for number in range(4):
                    feed.offer(f"run/{number}", group(first=number))
                await server.told.wait()
                await api.get("/reset_data")
                await said.until("registering again")
                await api.post("/register", trainer(starting_step=step))
                while len(got) < len(come):
                    got += marks((await api.get("/batch"))["batch"] or [])
            assert (await api.get("/status"))["queue_size"] == 0
        again = "sending 2 groups again" if step == 3 else "not sending groups again that the trainer may have"
        assert again in " ".join(said.notes)
        return got

    async def served() -> list[int]:
        server = Nameless()
        runner = web.AppRunner(server.app, shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await scenario(server, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    assert sorted(await served()) == come
