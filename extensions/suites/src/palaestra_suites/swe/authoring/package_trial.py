"""Run a package's tests in slots, unchanged or with some files changed.

The package's files are unpacked into one slot, which is saved as a snapshot. Every run starts from this snapshot
without a network, and uses the same functions that grade agents.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from palaestra_slots.sandbox.slot import WORKSPACE, SlotSource, SlotSpec, Snapshot
from palaestra_suites.grading.harness import TestRun
from palaestra_suites.grading.repository_tests import run_files
from palaestra_suites.swe.authoring.sdist import SourceFile
from palaestra_suites.swe.workspace import unpack
from palaestra_suites.toolchain.toolchain import Toolchain

REPO_DIR = f"{WORKSPACE}/repo"


class PackageTrial:
    """One package that is ready to test. Concurrent runs each have their own slot."""

    def __init__(self, slots: SlotSource, name: str, spec: SlotSpec, snapshot: Snapshot, toolchain: Toolchain) -> None:
        self._slots = slots
        self._name = name
        self._spec = spec
        self._snapshot = snapshot
        self._toolchain = toolchain

    async def run(self, tests: Sequence[str], *, timeout_s: float, changed: Mapping[str, str] | None = None) -> TestRun:
        """Run all tests in these files. `changed` maps files of the package to their changed texts. Raises
        `InfraError`."""
        slot = await self._slots.acquire(f"build-{self._name}", spec=self._spec, snapshot=self._snapshot)
        try:
            for path, text in (changed or {}).items():
                await slot.write_bytes(f"{REPO_DIR}/{path}", text.encode())
            return await run_files(slot, self._toolchain, REPO_DIR, tests, timeout_s=timeout_s)
        finally:
            await self._slots.release(slot)


@asynccontextmanager
async def open_trial(
    slots: SlotSource, name: str, files: Mapping[str, SourceFile], toolchain: Toolchain
) -> AsyncIterator[PackageTrial]:
    """Prepare a snapshot of the package and yield its trial. The snapshot is removed when the block ends."""
    spec = SlotSpec(mounts=toolchain.mounts)
    slot = await slots.acquire(f"build-{name}", spec=spec)
    try:
        await unpack(slot, _tar(files), REPO_DIR)
    except BaseException:
        await slots.release(slot)
        raise
    snapshot = await slots.seal(slot)
    try:
        full_values = (*toolchain.pytest_args, "-o", "verbosity_assertions=2")  # for the problem statements
        yield PackageTrial(slots, name, spec, snapshot, replace(toolchain, pytest_args=full_values))
    finally:
        await slots.snapshots.forget(snapshot)


def _tar(files: Mapping[str, SourceFile]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, file in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(file.data), 0o755 if file.executable else 0o644
            tar.addfile(member, io.BytesIO(file.data))
    return buffer.getvalue()
