"""The pool: first come, first served, a real timeout, and no place lost whatever is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pydantic import ValidationError

from golden_messages import raises
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, IsolationUnavailable, SandboxError, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Slot, SlotSpec, SlotState, View

pytestmark = pytest.mark.slots


def with_pool(max_slots: int, body: Callable[[SlotPool], Awaitable[None]]) -> None:
    async def main() -> None:
        async with SlotPool(SlotPoolConfig(max_slots=max_slots), LocalBackend()) as pool:
            await body(pool)

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_a_wait_that_means_nothing(timeout_s: float) -> None:
    async def body(pool: SlotPool) -> None:
        with pytest.raises(ValueError, match=f"timeout_s.* {timeout_s}"):
            await pool.acquire("t-1", timeout_s=timeout_s)
        assert pool.available_slots == 1

    with_pool(1, body)


def test_a_lease_from_acquire_to_release() -> None:
    async def body(pool: SlotPool) -> None:
        slot = await pool.acquire("t-1")
        assert slot.trajectory_id == "t-1"
        assert pool.rung == slot.rung
        assert (pool.total_slots, pool.available_slots, pool.acquired_slots) == (2, 1, 1)
        holders = pool.get_status()["holders"]
        assert [(holder["slot_id"], holder["trajectory_id"]) for holder in holders] == [(slot.slot_id, "t-1")]
        await pool.release(slot)
        await pool.release(slot)
        assert (pool.available_slots, pool.acquired_slots) == (2, 0)
        with pytest.raises(StaleLease):
            await slot.execute("true")
        stats = pool.get_stats()
        assert (stats["leases"], stats["waiting"], stats["backend"]["slots"]) == (1, 0, 0)
        assert (stats["slots_by_state"], stats["containers"]) == ({"available": 2, "acquired": 0, "executing": 0}, 0)

    with_pool(2, body)


def test_nothing_of_one_lease_is_in_the_next() -> None:
    async def body(pool: SlotPool) -> None:
        first = await pool.acquire("a")
        await first.execute("touch /workspace/x /tmp/x /usr/local/x; sleep 1000 &")
        await pool.release(first)
        second = await pool.acquire("b")
        assert second.epoch > first.epoch
        assert (await second.execute("ls /workspace /usr/local/x; pgrep sleep; ls -A /tmp")).output.count("x") == 1

    with_pool(1, body)


def test_who_comes_first_is_served_first() -> None:
    async def body(pool: SlotPool) -> None:
        held = await pool.acquire("holder")
        order: list[str] = []

        async def use(name: str) -> None:
            slot = await pool.acquire(name, timeout_s=20)
            order.append(name)
            await pool.release(slot)

        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(use(f"t{number}"))
                await asyncio.sleep(0)
            await pool.release(held)
        assert order == [f"t{number}" for number in range(5)]

    with_pool(1, body)


def test_acquire_really_times_out_and_says_who_holds() -> None:
    async def body(pool: SlotPool) -> None:
        held = await pool.acquire("greedy")
        with raises(AcquireTimeout, "modest", "greedy"):
            await pool.acquire("modest", timeout_s=0.05)
        assert pool.get_stats()["timeouts"] == 1
        await pool.release(held)
        await pool.release(await pool.acquire("modest", timeout_s=0.05))

    with_pool(1, body)


def test_a_cancelled_wait_loses_no_place() -> None:
    async def body(pool: SlotPool) -> None:
        held = await pool.acquire("holder")
        waiting = [asyncio.ensure_future(pool.acquire(f"w{number}")) for number in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        releasing = asyncio.ensure_future(pool.release(held))
        slot = await waiting[1]
        await releasing
        waiting[2].cancel()
        await pool.release(slot)
        assert pool.available_slots == 1
        results: list[Slot | BaseException] = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results][::2] == [asyncio.CancelledError] * 2

    with_pool(1, body)


def test_a_place_given_together_with_a_cancellation_goes_on() -> None:
    async def body(pool: SlotPool) -> None:
        held = await pool.acquire("holder")
        first = asyncio.ensure_future(pool.acquire("first"))
        second = asyncio.ensure_future(pool.acquire("second"))
        await asyncio.sleep(0)
        pool.leases.clear()
        pool._queue.give(1)  # what release does last; the waiter has not run yet
        first.cancel()
        slot = await asyncio.wait_for(second, 10)
        await pool.backend.destroy(held)
        await pool.release(slot)
        assert pool.available_slots == 1
        with pytest.raises(asyncio.CancelledError):
            await first

    with_pool(1, body)


def test_a_slot_that_cannot_be_made_gives_its_place_back() -> None:
    async def body(pool: SlotPool) -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="/no/such/image"):
                await pool.acquire("x", spec=SlotSpec(image="/no/such/image"))
        assert pool.available_slots == 1

    with_pool(1, body)


def test_sealing_gives_the_place_back_and_a_snapshot() -> None:
    async def body(pool: SlotPool) -> None:
        slot = await pool.acquire("prepare")
        await slot.execute("mkdir tests; echo 1 > tests/t; echo 2 > f")
        snapshot = await pool.seal(slot)
        assert pool.available_slots == 1
        assert [change.path for change in await pool.changes(snapshot)][-1] == "/workspace/tests/t"
        part = await pool.snapshots.view(snapshot, View(without=("/workspace/tests",)))
        fork = await pool.acquire("fork", snapshot=part)
        assert [entry.path for entry in await fork.list_dir()] == ["/workspace/f"]
        await pool.release(fork)
        await pool.snapshots.forget(part)
        await pool.snapshots.forget(snapshot)

    with_pool(1, body)


async def test_closing_ends_the_waiting() -> None:
    pool = SlotPool(SlotPoolConfig(max_slots=1), LocalBackend())
    with pytest.raises(SandboxError, match="start"):
        await pool.acquire("early")
    await pool.start()
    await pool.acquire("holder")
    waiting = asyncio.ensure_future(pool.acquire("waiter"))
    await asyncio.sleep(0)
    await pool.stop()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    await pool.aclose()


def test_the_configuration_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        SlotPoolConfig(max_slots=0)
    with pytest.raises(ValidationError):
        SlotPoolConfig.model_validate({"acquire_timeout_s": 3})
    assert SlotPoolConfig().max_slots is None


def test_slots_that_were_there_before_count_until_they_are_released() -> None:
    async def body(pool: SlotPool) -> None:
        before = [await pool.backend.create(SlotSpec(), f"before-{number}") for number in range(3)]
        for slot in before:
            pool.leases.take_up(slot)
        waiting = asyncio.ensure_future(pool.acquire("new"))
        for slot in before[:2]:
            await pool.release(slot)
            assert not waiting.done()
            assert pool.available_slots == 0
        await pool.release(before[2])
        await pool.release(await waiting)
        assert (pool.available_slots, pool.acquired_slots) == (1, 0)

    with_pool(1, body)


async def test_the_contracts_calls_run_in_a_slot() -> None:
    async def main() -> None:
        pool = SlotPool(SlotPoolConfig(slots_per_container=2, max_containers=1))
        await pool.start()
        try:
            first, second = await pool.acquire("a"), await pool.acquire("b")
            assert pool.total_slots == 2
            assert (first.workspace_dir, first.state, first.metadata) == ("/workspace", SlotState.ACQUIRED, {})
            await contract_calls(pool, first, second)
            await pool.release(first, reset_workspace=True)
            assert first.state is SlotState.AVAILABLE
        finally:
            await pool.stop(purge_job=True)

    async def contract_calls(pool: SlotPool, first: Slot, second: Slot) -> None:
        assert (await pool.execute(first, "write_file", {"path": "d/f", "content": "x"})).success
        assert (await pool.execute(first, "read_file", {"path": "d/f"})).output == "x"
        failed = await pool.execute(first, "bash", {"command": "echo out; echo err >&2; exit 3"}, timeout=20)
        assert (failed.error, failed.metadata["stderr"]) == ("Exit code: 3", "err\n")
        await pool.execute(first, "bash_stateful", {"command": "cd d"})
        assert (await pool.execute(first, "bash_stateful", {"command": "pwd"})).output == "/workspace/d\n"
        assert "FileNotFoundError" in (await pool.execute(first, "read_file", {"path": "none"})).error
        assert "Unknown tool: nothing" in (await pool.execute(first, "nothing", {})).error
        both = await pool.execute_batch(
            [(first, "bash", {"command": "echo 1"}), (second, "bash", {"command": "sleep 9"})], timeout=1
        )
        assert [(each.output, each.metadata["timeout"]) for each in both] == [("1\n", False), ("", True)]
        read = await pool.read_artifact(first, "d/f", encoding="base64", include_sha256=True)
        assert (read["success"], read["content"], len(read["sha256"])) == (True, "eA==", 64)
        listed = await pool.list_artifacts(first, recursive=True)
        assert [entry["path"] for entry in listed["entries"]] == ["d", "d/f"]
        assert (await pool.archive_artifacts(first, "d"))["entry_count"] == 1
        assert (await pool.read_artifact(second, "../etc/passwd"))["success"] is False

        running = asyncio.ensure_future(pool.execute(second, "bash", {"command": "sleep 0.2"}))
        await asyncio.sleep(0)
        assert second.state is SlotState.EXECUTING
        assert pool.get_stats()["slots_by_state"] == {"available": 0, "acquired": 1, "executing": 1}
        await running

    try:
        await main()
    except IsolationUnavailable as error:
        pytest.skip(str(error))


def test_settings_of_nomad_are_refused_by_other_backends_and_have_the_contracts_defaults() -> None:
    config = SlotPoolConfig(nomad_address="http://nomad:4646", job_id="mine", slots_per_container=5)
    with raises(ConfigError, "nomad_address", "job_id") as refused:
        SlotPool(config, LocalBackend())
    assert "\n" not in str(refused.value)
    assert (config.max_slots, config.max_containers, config.scale_cooldown, config.cpu) == (50, 10, 60.0, 500)
