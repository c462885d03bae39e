"""Which folder of this machine a conversation in the terminal is about, and whether its sandbox gets a copy of it.

The rule for the current folder, if neither a flag nor a setting names one: a git checkout of one's own is shared; so is
another folder of one's own with at most `MAX_PLAIN_FILES` files. Never shared are the home directory and the folders
above it, hidden folders in it, folders of the system, and folders that others own or may write to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra_chat.workdir import MAX_BYTES, MAX_FILES, NONE, WorkFolder, fits, too_large
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from palaestra_chat.config import ChatOptions
    from palaestra_chat.store import ConversationRecord, ConversationStore

MAX_PLAIN_FILES = 2000
"""The maximum number of files of a folder that is shared although it is not a git checkout."""

_SYSTEM = frozenset({"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var"})


@dataclass(frozen=True, slots=True)
class Place:
    """The `folder` that a conversation is about. Its sandbox gets a copy of it if it is `shared`; `why` is the reason
    why it is not, unless the person asked for that."""

    folder: Path
    shared: bool
    why: str = ""

    @property
    def settings(self) -> Mapping[str, JSON]:
        """The settings to store with a conversation."""
        return {"cwd": str(self.folder), "workdir": str(self.folder) if self.shared else ""}

    @property
    def notice(self) -> str:
        """Why the sandbox is empty, for the person; nothing if the person asked for that."""
        if not self.why:
            return ""
        return f"The sandbox starts empty: {self.folder} {self.why}. To share a folder, start with --workdir DIR"


def current_place(named: str | None, cwd: Path) -> Place:
    """Return the place of a new conversation. `named` is the setting `workdir`. Raises `ConfigError` if that is no
    folder or too large to copy."""
    if named is not None and named != NONE:
        root = WorkFolder(Path(named).expanduser()).root
        if not fits(root, lean=True):
            raise too_large(root)
        return Place(root, shared=True)
    folder = cwd.resolve()
    why = "" if named == NONE else _unshared(folder)
    return Place(folder, shared=named != NONE and not why, why=why)


def place_of(record: ConversationRecord, cwd: Path) -> Place:
    """Return the place of a stored conversation."""
    folder = record.settings.get("cwd")
    if not folder:
        return current_place(NONE, cwd)
    shared = bool(record.settings.get("workdir", folder))
    place = Place(Path(str(folder)), shared=shared)
    return place if place.folder.is_dir() or not shared else replace(place, shared=False, why="does not exist any more")


def write_mode(store: ConversationStore, record: ConversationRecord, options: ChatOptions) -> str:
    """Return whether a conversation's changes are written back (the setting `write`): what the person has set for its
    folder or, without that, the setting. A flag concerns only the folder that the program started with."""
    for mode in store.users.allowed(_write_key(record)):
        return mode
    return "ask" if "write" in options.flags else options.config.write


def remember_write_mode(store: ConversationStore, record: ConversationRecord, mode: str) -> None:
    """Use this write mode for all conversations about the folder of this one."""
    key = _write_key(record)
    store.users.disallow(key, store.users.allowed(key))
    store.users.allow(key, [mode])


def _write_key(record: ConversationRecord) -> str:
    return f"{record.user}\0{record.settings.get('cwd', '')}\0write"


def short(folder: Path | str) -> str:
    """Return a folder as a person writes it, with `~` for the home directory."""
    folder, home = Path(folder), Path.home()
    return f"~/{folder.relative_to(home)}".removesuffix("/.") if folder.is_relative_to(home) else str(folder)


def _unshared(folder: Path) -> str:
    """Return why this folder is not shared unless it is named; nothing if it is shared."""
    home = Path.home().resolve()
    if home.is_relative_to(folder):
        return "is your home directory" if folder == home else "contains your home directory"
    try:
        about = folder.stat()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    checkout = _checkout(folder, home)
    if about.st_uid != os.getuid():
        return "belongs to another user"
    if not checkout and about.st_mode & stat.S_IWOTH:
        return "can be written to by other users"
    if not checkout and folder.parts[1] in _SYSTEM:
        return "belongs to the system"
    if not checkout and folder.is_relative_to(home) and folder.relative_to(home).parts[0].startswith("."):
        return "is in a hidden folder of your home directory"
    if not checkout and not fits(folder, files=MAX_PLAIN_FILES):
        return f"is not a git checkout and has more than {plural(MAX_PLAIN_FILES, 'file')}"
    if not fits(folder, lean=True):
        return f"has more than {MAX_FILES} files or {MAX_BYTES >> 20} MB"
    return ""


def _checkout(folder: Path, home: Path) -> bool:
    """Return whether the folder is in a git checkout of this user. The home directory, a hidden folder in it, and a
    folder of the system hold secrets also if git keeps their history."""
    for each in (folder, *folder.parents):
        if home.is_relative_to(each):
            return False
        if (each / ".git").exists():
            private = each.parent == home and each.name.startswith(".")
            system = len(each.parts) == 2 and each.name in _SYSTEM
            return each.stat().st_uid == os.getuid() and not private and not system
    return False
