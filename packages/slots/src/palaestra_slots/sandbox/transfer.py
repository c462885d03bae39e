"""Copies whole directories into a slot and out of it, entry by entry through the slot's file calls, without a shell.

Links are copied as links and never followed. Permission bits are kept, but owners and times are not. Sockets, devices
and fifos are left out and listed. Invariant: nothing is written outside of the two directories, whatever names or links
the other side has.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.sandbox.slot import Slot

AT_ONCE = 16  # the maximum number of concurrent transfers


@dataclass(slots=True)
class Transferred:
    """The result of a transfer: the size in bytes of each file and link (0) by its path below the directory, and the
    paths that were left out because they are neither a file, a link nor a directory."""

    sizes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def files(self) -> int:
        """The number of files and links."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """The total size of the files in bytes."""
        return sum(self.sizes.values())


async def upload_dir(slot: Slot, local: Path, path: str) -> Transferred:
    """Copy the contents of a directory on this machine into a directory of the slot, which is created if it does not
    exist. Raises OSError."""
    done, jobs = Transferred(), _Jobs()
    await slot.make_dir(path)
    trail = [(local, path)]
    while trail:
        here, there = trail.pop()
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            source, target = Path(entry.path), posixpath.join(there, entry.name)
            name, mode = os.path.relpath(source, local), entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                await jobs.add(slot.make_link(target, os.readlink(source)), done, name)
            elif stat.S_ISDIR(mode):
                await slot.make_dir(target)
                trail.append((source, target))
            elif stat.S_ISREG(mode):
                await jobs.add(slot.upload(source, target), done, name)
            else:
                done.left_out.append(str(source))
    await jobs.finish()
    return done


async def download_dir(slot: Slot, path: str, local: Path) -> Transferred:
    """Copy the contents of a directory of the slot into a directory on this machine, which is created if it does not
    exist. Raises OSError."""
    done, jobs = Transferred(), _Jobs()
    local.mkdir(parents=True, exist_ok=True)
    trail = [(path, local)]
    while trail:
        there, here = trail.pop()
        for entry in await slot.list_dir(there):
            target = here / posixpath.basename(entry.path)
            name = os.path.relpath(target, local)
            if target.is_symlink() or (entry.kind == "symlink" and target.is_file()):
                target.unlink()  # an existing link must not redirect the copy
            if entry.kind == "symlink":
                target.symlink_to(entry.target)
                done.sizes[name] = 0
            elif entry.kind == "dir":
                target.mkdir(exist_ok=True)
                trail.append((entry.path, target))
            elif entry.kind == "file":
                await jobs.add(_downloaded(slot, entry.path, target, entry.mode), done, name)
            else:
                done.left_out.append(entry.path)
    await jobs.finish()
    return done


async def _downloaded(slot: Slot, path: str, target: Path, mode: int) -> int:
    size = await slot.download(path, target)
    # An agent chose the mode, and its set-user bit would have a meaning on this machine.
    target.chmod(mode & 0o777)
    return size


class _Jobs:
    """Transfers in progress. The first failure cancels the other transfers and is raised."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    async def add(self, job: Awaitable[int | None], done: Transferred, name: str) -> None:
        """Begin a transfer, whose size is recorded under `name`. If `AT_ONCE` transfers are then running, wait until
        one has ended."""

        async def run() -> None:
            done.sizes[name] = await job or 0

        self._running.add(asyncio.create_task(run()))
        if len(self._running) >= AT_ONCE:
            await self._wait(asyncio.FIRST_COMPLETED)

    async def finish(self) -> None:
        """Wait for all transfers."""
        while self._running:
            await self._wait(asyncio.ALL_COMPLETED)

    async def _wait(self, until: str) -> None:
        try:
            finished, self._running = await asyncio.wait(self._running, return_when=until)
            for task in finished:
                task.result()
        except BaseException:
            await end_tasks(*self._running)
            self._running.clear()
            raise
