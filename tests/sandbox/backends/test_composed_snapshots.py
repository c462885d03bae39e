"""Snapshots made of files alone are the snapshots that a slot with the same files would leave."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping

import pytest

from envs.scripts import need_level
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Rung, SlotSpec, Snapshot

FILES = {
    "task.txt": b"five steps\n",
    "a/b/c.bin": bytes(range(256)) * 300,
    "/workspace/a/empty": b"",
    "a/b/d d\n\u00e9": b"odd name",
    ".hidden/x": b"1",
}
LOOK = "find . -printf '%y %m %U %G %n %l %p\\n' | sort; find . -type f | sort | tr '\\n' '\\0' | xargs -0 md5sum"
LOOK += "; stat -c '%a %u %g' . / /usr; mkdir -p a/b/new && echo more >> task.txt && rm a/empty && ls -A . a"


async def made_by_a_slot(backend: LocalBackend, files: Mapping[str, bytes]) -> Snapshot:
    slot = await backend.create(SlotSpec(), "writes")
    for path, data in files.items():
        await slot.write_bytes(path, data)
    return await backend.seal(slot)


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns"])
def test_a_composed_snapshot_is_what_a_slot_leaves(level: str) -> None:
    need_level(level)

    async def main() -> None:
        async with LocalBackend.from_isolation(level) as backend:
            composed = await backend.compose(SlotSpec(), FILES)
            assert composed is not None
            seen = []
            for snapshot in (composed, await made_by_a_slot(backend, FILES)):
                first, second = [await backend.create(SlotSpec(), name, snapshot) for name in "ab"]
                looked = await first.execute(LOOK)
                assert looked.success, looked.output
                again = await second.execute(LOOK)  # no slot changes the snapshot
                entries = [each.path for each in await first.changes()]
                sealed = await backend.seal(first)
                seen.append((await backend.changes(snapshot), looked.output, again.output, entries, len(sealed.layers)))
                await backend.destroy(second)
                await backend.forget(snapshot)
            assert seen[0] == seen[1]
            assert seen[0][1].count("five steps") == 0 < seen[0][1].count("c.bin")

    asyncio.run(main())


@pytest.mark.slots
def test_what_takes_a_slot_is_left_to_it() -> None:
    need_level("full")

    async def main() -> None:
        async with LocalBackend(rung=Rung.FULL) as backend:
            for path in ("/etc/passwd", "../x", "a/../../x", "/workspace", ".", "", "a//b", "/workspace/../x", "a/"):
                assert await backend.compose(SlotSpec(), {path: b""}) is None, path
            assert await backend.compose(SlotSpec(), {"large": b"x" * (1 << 20)}) is None
            assert await backend.compose(SlotSpec(), {str(number): b"" for number in range(1000)}) is None
            assert await backend.compose(SlotSpec(image="/nowhere"), {"a": b""}) is None
            assert await backend.compose(SlotSpec(mounts=(Mount("/usr", "/workspace/usr"),)), {"a": b""}) is None

    asyncio.run(main())


@pytest.mark.slots
def test_files_that_cannot_be_written_fail_as_in_a_slot() -> None:
    """Also if a client sends paths that lead out of the workspace, they stay in the layer."""
    need_level("full")

    async def main() -> None:
        async with LocalBackend(rung=Rung.FULL) as backend:
            for files in ({"a": b"", "a/b": b""}, {"x\0y": b""}, {"\udcff\ud800": b""}, {"n" * 300: b""}):
                with pytest.raises(OSError) as composed:
                    await backend.compose(SlotSpec(), files)
                with pytest.raises(OSError) as by_slot:
                    await made_by_a_slot(backend, files)
                assert composed.value.errno == by_slot.value.errno, files
            small = SlotSpec(limits=Limits(disk_bytes=1 << 16))
            with pytest.raises(OSError) as full:
                await backend.compose(small, {"a": b"x" * 100_000})
            assert full.value.errno == errno.ENOSPC
            server = backend._running_server()
            fields = {"limits": {"disk_bytes": None, "memory_bytes": None}, "files": [["/../../escaped", 4]]}
            made = await server.make("compose", fields, lambda made: ("forget", made), b"data")
            snapshot = Snapshot(made["layers"][0], tuple(made["layers"]), SlotSpec())
            assert [each.path for each in await backend.changes(snapshot)] == ["/escaped"]

    asyncio.run(main())
