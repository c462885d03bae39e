"""A small package with a bug, and slots without a pool to test it in."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot, View
from palaestra_suites.toolchain.toolchain import Toolchain

REPO = "/workspace/repo"
FILES = {
    "pkg/__init__.py": "",
    "pkg/calc.py": (
        "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a - -a\n\n\ndef name():\n    return 'ü'\n"
    ),
    "tests/test_calc.py": (
        "import pytest\nfrom pkg import calc\n\n"
        "@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (0, 0, 0)], ids=['one two', '[x]'])\n"
        "def test_add(a, b, c):\n    assert calc.add(a, b) == c\n\n"
        "def test_double():\n    assert calc.double(2) == 4\n\n"
        "class TestName:\n    def test_ü(self):\n        assert calc.name() == 'ü'\n"
    ),
}
F2P = ("tests/test_calc.py::test_add[one two]",)
P2P = (
    "tests/test_calc.py::test_add[[x]]",
    "tests/test_calc.py::test_double",
    "tests/test_calc.py::TestName::test_ü",
)


class Bench:
    """A local backend as a slot source: every slot is new."""

    def __init__(self, backend: LocalBackend, toolchain: Toolchain) -> None:
        self.backend = backend
        self.toolchain = toolchain
        self.spec = SlotSpec(mounts=toolchain.mounts)

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
    ) -> Slot:
        return await self.backend.create(spec or self.spec, trajectory_id, snapshot)

    async def release(self, slot: Slot) -> None:
        await self.backend.destroy(slot)

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        return await self.backend.seal(slot, view)

    @property
    def snapshots(self) -> LocalBackend:
        return self.backend

    @asynccontextmanager
    async def slot(self, snapshot: Snapshot | None = None) -> AsyncIterator[Slot]:
        slot = await self.acquire("test", snapshot=snapshot)
        try:
            yield slot
        finally:
            await self.release(slot)

    async def prepared(self, files: dict[str, str] = FILES) -> Snapshot:
        slot = await self.acquire("prepare")
        for path, text in files.items():
            await slot.write_text(f"{REPO}/{path}", text)
        return await self.seal(slot)


RunBench = Callable[[Callable[[Bench], Awaitable[None]]], None]
