"""Lists that a slot makes long, and messages that are too long: nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec
from palaestra_slots.sandbox.slotd.protocol.frames import MAX_FRAME
from palaestra_slots.sandbox.slotd.streams import MAX_LIST_BYTES
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

ODD = r"""
import os
os.mkdir('d'); os.chdir('d')
for n in range(46000): os.close(os.open(b'%05d' % n + b'\xff' * 250, os.O_CREAT))
"""
DEEP = """
import os
for _ in range({depth}): os.mkdir('n' * 250); os.chdir('n' * 250)
for n in range({files}): os.close(os.open(str(n), os.O_CREAT))
"""


async def is_well(backend: LocalBackend) -> None:
    other = await backend.create(SlotSpec(), "other")
    assert (await other.execute("echo well")).output == "well\n"
    await backend.destroy(other)


def test_a_directory_whose_list_is_longer_than_a_message(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(["python3", "-c", ODD])
        listing = asyncio.ensure_future(slot.list_dir("d"))
        await is_well(backend)
        found = await listing
        assert [entry.path[-255:-250] for entry in found[:2]] == ["00000", "00001"]
        assert len(found) == 46000
        assert sum(len(entry.path.encode("ascii", "backslashreplace")) for entry in found) > MAX_FRAME
        await is_well(backend)

    with_slot(body)


def test_changes_longer_than_a_message(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(["python3", "-c", DEEP.format(depth=15, files=18000)])
        found = await slot.changes()
        assert len(found) == 18015
        assert sum(len(change.path) for change in found) > MAX_FRAME
        assert [change.path for change in found] == sorted(change.path for change in found)
        assert await backend.changes(await backend.seal(slot)) == found

    with_slot(body)


def test_changes_that_would_fill_the_memory_are_refused(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(["python3", "-c", DEEP.format(depth=390, files=6000)])
        with pytest.raises(OSError, match=f"{MAX_LIST_BYTES} bytes"):
            await slot.changes()
        await is_well(backend)

    with_slot(body)


def test_a_call_that_no_message_holds_is_its_callers_mistake(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        for call in (slot.execute(": " + "x" * MAX_FRAME), shell.run("x" * MAX_FRAME), slot.make_dir("x" * MAX_FRAME)):
            with pytest.raises(ValueError, match=f"{MAX_FRAME} of one message"):
                await call
        assert (await shell.run("echo on")).output == "on\n"
        await is_well(backend)

    with_slot(body)
