"""Stores as their users see them, through the backend: limits that a sealed layer no longer has, files that stay."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec, View
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def mounts_of(server: str) -> int:
    """Mounts of the server that the host does not have: those of other programs can appear there at any time."""
    read = (Path(f"/proc/{process}/mountinfo").read_text().splitlines() for process in ("self", server))
    here, there = ({line.split()[4] for line in lines} for lines in read)
    return len(there - here)


def test_a_full_store_can_be_cut_and_a_fork_of_it_has_a_limit_of_its_own(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        spec = SlotSpec(limits=Limits(disk_bytes=1 << 20))
        full = await backend.create(spec, "full")
        filled = await full.execute("mkdir d; head -c 900000 /dev/zero > d/a; head -c 900000 /dev/zero > d/b")
        assert "No space left" in filled.output
        sealed = await backend.seal(full)
        part = await backend.view(sealed, View(without=("/workspace/d/b",)))
        fork = await backend.create(spec, "fork", part)
        assert (await fork.execute("ls d; head -c 900000 /dev/zero > c && echo there is room")).output == (
            "a\nthere is room\n"
        )
        await backend.forget(sealed)
        await backend.forget(part)
        assert (await fork.execute("wc -c < d/a")).output == "900000\n"

    on_each_rung(body)


@pytest.mark.skipif(_kernel() < (6, 15), reason="overlays over detached mounts came with Linux 6.15")
def test_the_servers_mounts_do_not_grow_with_the_number_of_slots(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        (server,) = Path(f"/proc/{backend.server_pid}/task/{backend.server_pid}/children").read_text().split()
        before = mounts_of(server)
        others = [await backend.create(SlotSpec(), "other") for _ in range(3)]
        await backend.seal(others[0])
        assert mounts_of(server) == before

    with_slot(body)
