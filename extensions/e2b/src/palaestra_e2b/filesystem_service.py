"""The service `filesystem.Filesystem` of a sandbox: entries, directories, moves and watches.

Paths are resolved inside the slot, where no link or `..` leads out. Moving runs `mv` in the slot.
"""

from __future__ import annotations

import asyncio
import posixpath
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

from palaestra_e2b.connect_protocol import flag_field, number_field, text_field
from palaestra_e2b.sandbox_users import SandboxUser
from palaestra_e2b.sandboxes import HostedSandbox
from palaestra_e2b.templates import DEFAULT_USER, absolute
from palaestra_e2b.watchers import DirectoryWatcher, Event, walk
from palaestra_e2b.wire_errors import RpcError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import FileInfo, Slot

_MOST_DEPTH, _MOST_LINKS = 64, 10
_MOVE_S = 60.0
_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_FORMATS = {"file": stat.S_IFREG, "dir": stat.S_IFDIR, "symlink": stat.S_IFLNK, "other": 0}

Message = dict[str, JSON]


async def entry_of(slot: Slot, info: FileInfo, own_home: str) -> Message:
    """Return an entry in the API's words. A link has the type of what it leads to. `user` and `root` are one account:
    its files below `own_home`, the home of `user`, are shown as those of `user`."""
    kind, is_link = info.kind, info.kind == "symlink"
    if is_link and await _is_dir(slot, info.path):
        kind = "dir"
    entry: Message = {
        "name": posixpath.basename(info.path) or "/",
        "type": _TYPES.get("file" if kind == "symlink" else kind, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size),
        "mode": info.mode,
        "permissions": stat.filemode(_FORMATS[info.kind] | info.mode),
        "owner": _owner_name(info.uid, info.path, own_home),
        "group": _owner_name(info.gid, info.path, own_home),
        "modifiedTime": datetime.fromtimestamp(info.mtime, UTC).isoformat().replace("+00:00", "Z"),
    }
    return entry | ({"symlinkTarget": await _target(slot, info), "isSymlink": True} if is_link else {})


async def stat_entry(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Return the entry at a path."""
    return {"entry": await entry_of(user.slot, await _existing(user.slot, path_of(message, user)), user.own_home)}


async def list_dir(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Return the entries below a directory."""
    path, depth = path_of(message, user), number_field(message, "depth") or 1
    if depth > _MOST_DEPTH:
        raise RpcError("invalid_argument", f"depth is at most {_MOST_DEPTH}")
    await _existing(user.slot, path)
    if not await _is_dir(user.slot, path):
        raise RpcError("invalid_argument", f"path is not a directory: {path}")
    return {"entries": [await entry_of(user.slot, info, user.own_home) async for info in walk(user.slot, path, depth)]}


async def make_dir(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Make a directory and its parents. Raises `RpcError` if it exists."""
    path = path_of(message, user)
    found = await user.slot.stat(path)
    if found is not None:
        if found.kind == "dir" or await _is_dir(user.slot, path):
            raise RpcError("already_exists", f"directory already exists: {path}")
        raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}")
    await user.slot.make_dir(path)
    return {"entry": await entry_of(user.slot, await _existing(user.slot, path), user.own_home)}


async def move(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Move an entry; the parents of the destination are made."""
    source, target = path_of(message, user, "source"), path_of(message, user, "destination")
    await _existing(user.slot, source)
    await user.slot.make_dir(posixpath.dirname(target))
    done = await user.slot.execute(["mv", "-T", "--", source, target], cwd="/", timeout_s=_MOVE_S)
    if not done.success:
        raise RpcError("invalid_argument", f"{source} was not moved: {done.output.strip()[-300:]}")
    return {"entry": await entry_of(user.slot, await _existing(user.slot, target), user.own_home)}


async def remove(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Remove an entry with everything below it; a missing one is no error."""
    path = path_of(message, user)
    if path == "/":
        raise RpcError("invalid_argument", "the root directory cannot be removed")
    await user.slot.remove(path)
    return {}


async def create_watcher(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Begin to watch a directory."""
    return {"watcherId": await sandbox.watchers.add(await _watcher(user, message))}


async def get_watcher_events(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Return the events since the last call."""
    watcher = sandbox.watchers.find(text_field(message, "watcherId", required=True))
    if not watcher.over:
        await watcher.look()
    return {"events": [await _event(watcher, each) for each in watcher.take()]}


async def remove_watcher(sandbox: HostedSandbox, slot: Slot, user: SandboxUser, message: Message) -> Message:
    """Stop watching."""
    await sandbox.watchers.remove(text_field(message, "watcherId", required=True))
    return {}


async def watch(
    sandbox: HostedSandbox, user: SandboxUser, message: Message, keepalive_s: float, is_gone: Callable[[], bool]
) -> AsyncIterator[Message]:
    """Yield the messages of a stream of events until the caller leaves or the directory is gone."""
    name = await sandbox.watchers.add(watcher := await _watcher(user, message))
    yield {"start": {}}
    quiet_s = 0.0
    try:
        while not is_gone() and not watcher.over:
            try:
                async with asyncio.timeout(1.0):
                    await watcher.news.wait()
            except TimeoutError:
                quiet_s += 1.0
                if quiet_s >= keepalive_s:
                    quiet_s = 0.0
                    yield {"keepalive": {}}
                continue
            quiet_s = 0.0
            for each in watcher.take():
                yield {"filesystem": await _event(watcher, each)}
    finally:
        if not watcher.over:
            await sandbox.watchers.remove(name)


UNARY: dict[str, Callable[[HostedSandbox, Slot, SandboxUser, Message], Awaitable[Message]]] = {
    "Stat": stat_entry, "ListDir": list_dir, "MakeDir": make_dir, "Move": move, "Remove": remove,
    "CreateWatcher": create_watcher, "GetWatcherEvents": get_watcher_events, "RemoveWatcher": remove_watcher,
}  # fmt: skip
"""Maps the names of the unary calls to their functions."""


def path_of(message: Message, user: SandboxUser, name: str = "path") -> str:
    """Return a path of a message as an absolute path in the sandbox. Raises `RpcError`."""
    path = text_field(message, name)
    if "\0" in path or len(path) > 4096:
        raise RpcError("invalid_argument", f"{name} is not a path: it holds a null character or is too long")
    return absolute(path, user.home)


async def _watcher(user: SandboxUser, message: Message) -> DirectoryWatcher:
    path = path_of(message, user)
    if not await _is_dir(user.slot, path):
        await _existing(user.slot, path)
        raise RpcError("invalid_argument", f"path {path} is not a directory")
    return DirectoryWatcher(
        user.slot, user.own_home, path, flag_field(message, "recursive"), flag_field(message, "includeEntry")
    )


async def _event(watcher: DirectoryWatcher, event: Event) -> Message:
    found: Message = {"name": event.name, "type": event.kind}
    if watcher.include_entry and event.entry is not None:
        found["entry"] = await entry_of(watcher.slot, event.entry, watcher.own_home)
    return found


async def _existing(slot: Slot, path: str) -> FileInfo:
    found = await slot.stat(path)
    if found is None:
        raise RpcError("not_found", f"path not found: {path}")
    return found


async def _is_dir(slot: Slot, path: str) -> bool:
    """Return whether a path leads to a directory; its last link is followed, in the slot."""
    found = await slot.stat(f"{path.rstrip('/')}/.")
    return found is not None and found.kind == "dir"


async def _target(slot: Slot, info: FileInfo) -> str:
    """Return the path to which a link leads, over further links."""
    path = info.path
    for _ in range(_MOST_LINKS):
        found = await slot.stat(path)
        if found is None or found.kind != "symlink":
            return path
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), found.target))
    return info.target


def _owner_name(number: int, path: str, own_home: str) -> str:
    if number:
        return str(number)
    return DEFAULT_USER if path == own_home or path.startswith(f"{own_home}/") else "root"
