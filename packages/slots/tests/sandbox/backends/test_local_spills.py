"""Output that is too long for a result: in a file that the slot's own commands can read, with bounds."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS, Rung.CONFINED], ids=lambda rung: str(rung.label))
async def test_what_was_left_out_is_there_for_commands_and_for_the_holder(rung: Rung) -> None:
    backend = LocalBackend(rung=rung)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        slot = await backend.create(SlotSpec(), "test")
        result = await slot.execute("seq 100000", max_output_bytes=100)
        path = result.metadata["full_output_path"]
        assert result.metadata["full_output_bytes"] == 588_895
        assert "588795 of 588895 bytes" in result.output
        assert path in result.output
        assert (await slot.execute(f"md5sum < {path}; seq 100000 | md5sum; : >> {path}")).output.count(" -\n") == 2
        assert (await slot.read_text(path)).endswith("\n100000\n")
        assert await slot.changes() == [] or rung is Rung.CONFINED


def test_nothing_is_spilled_that_fits_or_is_not_wanted(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        fits = await slot.execute("seq 10", max_output_bytes=21)
        unwanted = await slot.execute("seq 100", max_output_bytes=21, spill=False)
        assert not any("full_output_path" in result.metadata for result in (fits, unwanted))
        assert await slot.stat("/tmp/full-output") is None

    with_slot(body)


def test_a_file_is_bounded_and_says_so(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("head -c 10000000 /dev/zero", max_output_bytes=10)
        assert (result.metadata["full_output_bytes"], result.metadata["output_total_bytes"]) == (4 << 20, 10_000_000)
        assert "its beginning is in" in result.output

    with_slot(body)


def test_a_slot_keeps_the_newest_few(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        results = [await slot.execute(f"seq {number} 100", max_output_bytes=10) for number in range(1, 11)]
        kept = {entry.path for entry in await slot.list_dir("/tmp/full-output")}
        assert kept == {result.metadata["full_output_path"] for result in results[-8:]}

    with_slot(body)


@pytest.mark.parametrize("plant", ["ln -s /etc/passwd", "touch", "mkdir -m 0", "ln -s /"])
def test_what_the_slot_puts_in_the_way_harms_only_itself(with_slot: WithSlot, plant: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(f"{plant} /tmp/full-output")).success
        result = await slot.execute("seq 1000", max_output_bytes=10)
        assert (result.success, result.metadata["output_total_bytes"]) == (True, 3893)
        assert (await slot.execute("echo alive; head -c 5 /etc/passwd")).output == "alive\nroot:"

    with_slot(body)


def test_a_full_disk_ends_the_file_and_not_the_command(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        small = await backend.create(SlotSpec(limits=Limits(disk_bytes=1 << 20)), "small")
        result = await small.execute("head -c 3000000 /dev/zero", max_output_bytes=10)
        assert result.success
        assert result.metadata["output_total_bytes"] == 3_000_000
        assert result.metadata["full_output_bytes"] < 3_000_000

    with_slot(body)
