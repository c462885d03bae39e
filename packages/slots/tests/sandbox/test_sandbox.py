"""`Sandbox`: commands, files, forks and snapshots, awaited and blocking."""

from __future__ import annotations

import asyncio

import pytest

from golden_messages import raises
from palaestra_slots import ConfigError, Limits, Sandbox, SandboxError, SlotPool
from palaestra_slots.sandbox.sandbox import size_in_bytes


async def test_commands_and_files() -> None:
    async with Sandbox(network="off", env={"NAME": "Ada"}) as box:
        await box.write_text("a/b.txt", "one")
        done = await box.execute('cat a/b.txt; echo " $NAME"; exit 3')
        assert (done.output.strip(), done.exit_code) == ("one Ada", 3)
        assert await box.read_text("missing", missing="none") == "none"
        assert [entry.path for entry in await box.list_dir("a")] == ["/workspace/a/b.txt"]
        assert box.isolation in ("full", "userns", "confined")
    with pytest.raises(SandboxError, match="not open"):
        await box.execute("true")


def test_too_little_memory_is_refused_with_a_size_that_works() -> None:
    for memory in (1, "1KB"):
        with pytest.raises(ConfigError, match="512MB"):
            Sandbox(memory=memory)
    with Sandbox(memory="8MB") as box:
        assert box.execute("true").success


def test_a_fork_and_a_snapshot_have_their_own_files() -> None:
    async def go() -> None:
        async with Sandbox() as box:
            await box.write_text("a", "1")
            async with box.fork() as fork:
                await fork.write_text("a", "2")
                assert await fork.read_text("a") == "2"
            snapshot = await box.snapshot()
            await box.write_text("a", "3")
            async with Sandbox(snapshot=snapshot) as other:
                assert await other.read_text("a") == "1"
            assert await box.read_text("a") == "3"

    asyncio.run(go())


def test_blocking_sandboxes_start_from_a_blocking_snapshot() -> None:
    with Sandbox() as box:
        box.write_text("a", "1")
        with box.fork() as fork:
            fork.write_text("a", "2")
            snapshots = (box.snapshot(), fork.snapshot())
        for snapshot, text in zip(snapshots, "12", strict=True):
            with Sandbox(snapshot=snapshot) as other:
                assert other.read_text("a") == text


def test_a_snapshot_is_refused_after_its_sandbox_and_on_another_loop() -> None:
    with Sandbox() as box:
        blocking = box.snapshot()

        async def elsewhere() -> None:
            async with Sandbox(snapshot=blocking):
                pass

        with pytest.raises(SandboxError, match="another event loop"):
            asyncio.run(elsewhere())
    with pytest.raises(SandboxError, match="ended with the sandbox"), Sandbox(snapshot=blocking):
        pass

    async def go() -> None:
        async with Sandbox() as one:
            snapshot = await one.snapshot()
            with pytest.raises(SandboxError, match="another event loop"), Sandbox(snapshot=snapshot):
                pass
        with pytest.raises(SandboxError, match="ended with the sandbox"):
            async with Sandbox(snapshot=snapshot):
                pass

    asyncio.run(go())


async def test_sandboxes_of_a_pool_with_its_defaults() -> None:
    async with SlotPool() as pool, Sandbox(pool=pool) as one, Sandbox(pool=pool) as two:
        assert pool.acquired_slots == 2
        assert (await one.execute("echo hi")).output == (await two.execute("echo hi")).output == "hi\n"


def test_a_blocking_sandbox_works_also_inside_a_running_loop() -> None:
    def program() -> str:
        with Sandbox() as box:
            box.write_text("a", "1")
            with box.fork() as fork:
                fork.execute("echo 2 > a")
                return box.read_text("a") + fork.read_text("a")

    async def cell() -> str:
        return program()

    assert program() == asyncio.run(cell()) == "12\n"


def test_memory_is_limited_as_asked() -> None:
    with Sandbox(memory="64MB") as box:
        done = box.execute("python3 -c 'x = bytearray(200_000_000)'")
    assert not done.success


@pytest.mark.parametrize(
    ("size", "count"), [(7, 7), ("512MB", 512 << 20), ("1.5 GiB", 3 << 29), ("10k", 10240), ("3", 3)]
)
def test_sizes(size: str | int, count: int) -> None:
    assert size_in_bytes(size) == count


def test_unusable_arguments() -> None:
    with raises(ConfigError, "much"):
        Sandbox(memory="much")
    with pytest.raises(ConfigError, match="'sometimes'"):
        Sandbox(network="sometimes")
    with pytest.raises(ConfigError, match="env"):
        Sandbox(env=["A=1"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown isolation 'best-ever'"):
        Sandbox(isolation="best-ever", pool=SlotPool())
    assert Sandbox(limits=Limits(pids=5))._spec.limits.pids == 5
