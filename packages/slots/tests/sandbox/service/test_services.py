"""Slots that outlive their client: found again, under new leases; gone when the service is ended, or killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SlotLost, StaleLease
from palaestra_slots.core.types import AllowList, Limits
from palaestra_slots.sandbox import slot
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.service import service_client as services
from palaestra_slots.sandbox.slot import Mount, Rung, SlotSpec, Snapshot
from sandbox.processes import descendants, table
from sandbox.somebody import as_somebody, interpreter

pytestmark = pytest.mark.slots


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for services; what is left in it is ended."""
    folder = tmp_path / "services"
    folder.mkdir(mode=0o700)
    yield folder
    for path in folder.glob("*.sock"):
        with contextlib.suppress(Exception):
            asyncio.run(services.end(path))


def backend(place: Path, rung: Rung = Rung.USERNS) -> LocalBackend:
    return LocalBackend(rung=rung, service="test", service_directory=place)


def running(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await body()
        except IsolationUnavailable as error:
            pytest.skip(str(error))

    asyncio.run(main())


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
def test_slots_stay_and_are_found_again(place: Path, rung: Rung) -> None:
    spec = SlotSpec(limits=Limits(pids=64), env=(("A", "1"),))

    async def body() -> None:
        async with backend(place, rung) as first:
            slot = await first.create(spec, "t-1")
            await slot.execute("echo kept > f; setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid")
            gone = await first.create(SlotSpec(), "t-2")
            await first.destroy(gone)
        async with backend(place, rung) as second:
            (found,) = second.leases()
            assert isinstance(found, LocalSlot)
            assert (found.slot_id, found.trajectory_id, found.spec) == (slot.slot_id, "t-1", spec)
            assert found.epoch > slot.epoch
            assert (await found.execute("cat f; kill -0 $(cat pid) && echo $A")).output == "kept\n1\n"
            sealed = await second.seal(found)
            fork = await second.create(SlotSpec(), "fork", sealed)
            assert await fork.read_text("f") == "kept\n"
            await second.end()
        assert await services.service_state(services.socket_path("test", place)) is None

    running(body)


_ONE_PLACE = """
import asyncio, pathlib, tempfile
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec

async def main():
    with tempfile.TemporaryDirectory() as folder:
        def backend():
            return LocalBackend(rung=Rung.CONFINED, service="one", service_directory=pathlib.Path(folder))
        async with backend() as first:
            await (await first.create(SlotSpec(), "t")).execute("echo kept > f")
        second = backend()
        try:
            await second.start()
            print(await second.leases()[0].read_text("f"), end="")
        finally:
            await second.end()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else")
def test_a_slot_is_found_again_where_there_is_place_for_one() -> None:
    """As on the rung confined without root, where no second one can be made to prove the rung."""
    python = interpreter()
    if python is None:
        pytest.skip("no Python that another user can run")
    ran = as_somebody(python, "-c", _ONE_PLACE)
    if "Landlock" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert ran.stdout == "kept\n", ran.stderr[-2000:]


def test_a_former_holder_is_refused_after_somebody_else_attached(place: Path) -> None:
    async def body() -> None:
        async with backend(place) as first:
            slot = await first.create(SlotSpec(), "t")
        async with backend(place) as second:
            (found,) = second.leases()
            assert isinstance(slot, LocalSlot)
            assert isinstance(found, LocalSlot)
            former = {"slot": slot.slot_id, "epoch": slot.epoch}
            with pytest.raises(StaleLease, match=f"epoch {slot.epoch}"):
                await found.requests.call("exec", {**former, "command": "true"})
            await second.end()

    running(body)


def test_snapshots_go_with_the_client_that_knows_them(place: Path) -> None:
    async def layers(of: LocalBackend) -> int:
        slot = of.leases()[0]
        assert isinstance(slot, LocalSlot)
        return int((await slot.requests.call("stats", {})).fields["layers"])

    async def body() -> None:
        async with backend(place) as first:
            base = await first.seal(await first.create(SlotSpec(), "base"))
            slot = await first.create(SlotSpec(), "t", base)
            await slot.write_text("f", "kept")
            await first.checkpoint(slot)
            await first.forget(await first.checkpoint(slot))
        async with backend(place) as second:
            assert await layers(second) == 0
            (found,) = second.leases()
            sealing = asyncio.ensure_future(second.checkpoint(found))
            await asyncio.sleep(0)  # sent, and not answered
        await asyncio.gather(sealing, return_exceptions=True)
        async with backend(place) as third:
            (found,) = third.leases()
            async with found.fork() as fork:
                assert await fork.read_text("f") == "kept"
                assert await layers(third) == 1
            assert await layers(third) == 0
            await third.end()

    running(body)


async def _sealed(of: LocalBackend, folder: Path) -> Snapshot | None:
    return await of.seal(await of.create(SlotSpec(), "t"))


async def _checkpoint(of: LocalBackend, folder: Path) -> Snapshot | None:
    slot = await of.create(SlotSpec(), "t")
    await slot.write_text("f", "kept")
    return await of.checkpoint(slot)


async def _view(of: LocalBackend, folder: Path) -> Snapshot | None:
    sealed = await _sealed(of, folder)
    assert sealed is not None
    return await of.view(sealed, slot.View(only=("/workspace",)))


async def _composed(of: LocalBackend, folder: Path) -> Snapshot | None:
    return await of.compose(SlotSpec(), {"/workspace/f": b"kept"})


async def _loaded(of: LocalBackend, folder: Path) -> Snapshot | None:
    sealed = await _sealed(of, folder)
    assert sealed is not None
    await of.save(sealed, str(folder))
    return await of.load(str(folder), SlotSpec())


@pytest.mark.parametrize("make", [_sealed, _checkpoint, _view, _composed, _loaded])
def test_every_kind_of_snapshot_goes_with_its_client(
    place: Path, tmp_path: Path, make: Callable[[LocalBackend, Path], Awaitable[Snapshot | None]]
) -> None:
    async def body() -> None:
        async with backend(place) as first:
            (tmp_path / "saved").mkdir()
            assert await make(first, tmp_path / "saved") is not None
        async with backend(place) as second:
            holder = await second.create(SlotSpec(), "stats")
            assert isinstance(holder, LocalSlot)
            assert (await holder.requests.call("stats", {})).fields["layers"] == 0
            await second.end()

    running(body)


CLIENT = """
import asyncio, sys
from pathlib import Path
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
async def main():
    backend = LocalBackend(rung=Rung.USERNS, service="test", service_directory=Path(sys.argv[1]))
    await backend.start()
    slot = await backend.create(SlotSpec(), "t")
    await slot.write_text("f", "kept")
    print(backend.server_pid, flush=True)
    await slot.execute("touch started; sleep 1000", timeout_s=1000)
asyncio.run(main())
"""


def test_a_killed_client_leaves_its_slots_but_not_its_commands(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(place)], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        if not client.stdout.readline():
            pytest.skip("no user namespaces here")
        client.kill()

    async def body() -> None:
        async with backend(place) as next_one:
            (found,) = next_one.leases()
            assert await found.read_text("f") == "kept"
            for _ in range(200):
                if (await found.execute("pgrep -c sleep")).output == "0\n":
                    break
            assert (await found.execute("pgrep -c sleep")).output == "0\n"
            await next_one.end()

    running(body)


def test_one_client_at_a_time(place: Path) -> None:
    async def body() -> None:
        async with backend(place) as first:
            with pytest.raises(IsolationUnavailable, match="another process is attached"):
                await backend(place).start()
            seen = await services.service_state(services.socket_path("test", place))
            assert seen is not None
            assert (seen.attached, seen.leases, seen.rung) == (True, (), "userns")
            await first.end()

    running(body)


def test_a_killed_service_leaves_no_process_and_the_next_start_no_socket(place: Path) -> None:
    async def body() -> None:
        async with backend(place) as first:
            slot = await first.create(SlotSpec(), "t")
            pid = first.server_pid
            ours = {process.pid for process in descendants(pid)} | {pid}
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(SlotLost):
                await slot.execute("sleep 1000", timeout_s=1000)
        deadline = time.monotonic() + 2
        while {p.pid for p in table()} & ours and time.monotonic() < deadline:
            os.sched_yield()
        assert not {p.pid for p in table()} & ours
        assert [path.name for path in place.glob("*.sock")] == ["test.sock"]
        assert await services.sweep(place) == ["test"]
        assert list(place.glob("*.sock")) == []
        async with backend(place) as again:
            assert again.leases() == []
            await again.end()

    running(body)


def test_the_socket_is_the_users_alone(place: Path) -> None:
    async def body() -> None:
        async with backend(place) as first:
            path = services.socket_path("test", place)
            assert path.stat().st_mode & 0o777 == 0o600
            slot = await first.create(SlotSpec(), "t")
            assert not (await slot.execute(f"ls {place}")).success
            await first.end()
            assert not path.exists()

    running(body)
    place.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        services.socket_path("test", place)
    with pytest.raises(ConfigError, match="name"):
        services.socket_path("../x", place)


def test_what_a_slot_was_made_from_comes_back() -> None:
    for spec in (
        SlotSpec(),
        SlotSpec(
            "/image",
            AllowList(("example.org", "10.0.0.0/8:5432")),
            Limits(cpus=0.5),
            (Mount("/a", "/b"),),
            (("A", "b"),),
        ),
    ):
        assert slot.decode_lease(slot.encode_lease("t", spec)) == ("t", spec)
