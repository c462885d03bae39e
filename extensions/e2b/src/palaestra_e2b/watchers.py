"""Watches directories of a sandbox for changes.

A directory is listed `_EVERY_S` seconds apart and compared with the last list. This works at every isolation level and
needs no program in the sandbox, but two changes of one file between two lists are one event, and a renamed file is a
`remove` and a `create`. Lists and events are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from palaestra_e2b.wire_errors import RpcError
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.sandbox.slot import FileInfo, Slot

MOST_WATCHERS, MOST_ENTRIES, MOST_EVENTS = 32, 10_000, 10_000
_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """One change: its kind in the API's words, the path below the watched directory, and the entry if it is left."""

    kind: str
    name: str
    entry: FileInfo | None


@dataclass(slots=True, eq=False)
class DirectoryWatcher:
    """One watched directory."""

    slot: Slot
    own_home: str
    path: str
    recursive: bool
    include_entry: bool
    seen: dict[str, FileInfo] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self) -> None:
        """List the directory for the first time. Raises OSError."""
        self.seen = await self._listed()
        self.task = asyncio.get_running_loop().create_task(self._poll())

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        found = list(self.events)
        self.events.clear()
        self.news.clear()
        return found

    async def look(self) -> None:
        """Compare the directory with the last list."""
        async with self.looking:
            now = await self._listed()
            for path in self.seen.keys() - now.keys():
                self._add_event("EVENT_TYPE_REMOVE", path, None)
            for path, entry in now.items():
                before = self.seen.get(path)
                if before is None or before.kind != entry.kind:
                    self._add_event("EVENT_TYPE_CREATE", path, entry)
                if entry.kind == "file" and (
                    entry.size > 0 if before is None else (before.mtime, before.size) != (entry.mtime, entry.size)
                ):
                    self._add_event("EVENT_TYPE_WRITE", path, entry)
                if before is not None and before.mode != entry.mode:
                    self._add_event("EVENT_TYPE_CHMOD", path, entry)
            self.seen = now

    async def stop(self) -> None:
        """End the watch."""
        self.over = True
        self.news.set()
        await end_tasks(self.task)

    def _add_event(self, kind: str, path: str, entry: FileInfo | None) -> None:
        self.events.append(Event(kind, path.removeprefix(self.path).lstrip("/"), entry))
        self.news.set()

    async def _poll(self) -> None:
        with contextlib.suppress(PalaestraError, OSError):
            while True:
                await asyncio.sleep(_EVERY_S)
                await self.look()
        self.over = True
        self.news.set()

    async def _listed(self) -> dict[str, FileInfo]:
        depth = None if self.recursive else 1
        return {entry.path: entry async for entry in walk(self.slot, self.path, depth)}


class Watchers:
    """The watchers of one sandbox, by id."""

    def __init__(self) -> None:
        self._watching: dict[str, DirectoryWatcher] = {}

    async def add(self, watcher: DirectoryWatcher) -> str:
        """Begin to watch, and return the watcher's id. Raises `RpcError` or OSError."""
        if len(self._watching) >= MOST_WATCHERS:
            raise RpcError("resource_exhausted", f"the sandbox has {MOST_WATCHERS} watchers; stop one first")
        await watcher.begin()
        name = secrets.token_hex(8)
        self._watching[name] = watcher
        return name

    def find(self, name: str) -> DirectoryWatcher:
        """Return the watcher with an id. Raises `RpcError`."""
        if name not in self._watching:
            raise RpcError("not_found", f"watcher {name!r:.50} not found")
        return self._watching[name]

    async def remove(self, name: str) -> None:
        """Stop a watcher and forget it. Raises `RpcError`."""
        watcher = self.find(name)
        del self._watching[name]
        await watcher.stop()

    async def aclose(self) -> None:
        """Stop all watchers."""
        for name in list(self._watching):
            await self.remove(name)


async def walk(slot: Slot, path: str, depth: int | None) -> AsyncIterator[FileInfo]:
    """Yield the entries below a directory, down to a depth and each before those below it; links are not followed.
    Raises `RpcError` for more than `MOST_ENTRIES`, and OSError if the directory cannot be listed."""
    count, waiting = 0, [(entry, 1) for entry in reversed(await slot.list_dir(path))]
    while waiting:
        entry, level = waiting.pop()
        count += 1
        if count > MOST_ENTRIES:
            raise RpcError("resource_exhausted", f"{path} has more than {MOST_ENTRIES} entries")
        yield entry
        if entry.kind == "dir" and (depth is None or level < depth):
            try:
                waiting += [(each, level + 1) for each in reversed(await slot.list_dir(entry.path))]
            except OSError as error:
                if isinstance(error, PalaestraError):
                    raise  # otherwise, it was removed meanwhile, or is /proc
