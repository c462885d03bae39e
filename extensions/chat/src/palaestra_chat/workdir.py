"""Shares a folder of this machine with a sandbox: the folder is copied into the sandbox as its workspace, and the
agent's changes are copied back if the person agrees. What programs make anew stays in the sandbox
(`generated_files.py`), and so does git's own bookkeeping (`git_files.py`).

The agent works on a copy, on every backend, so nothing it does reaches the folder before `apply`. Invariants: a file
that has changed on this machine since it was copied is never overwritten; what the agent did to files and symlinks is
written back, or left out with a `problem`; nothing is written outside the folder, not even through symlinks; files are
replaced atomically; symlinks out of the folder, files that make git run commands (`makes_git_run`) and files that
configure this program are not written; at most `MAX_FILES` files with `MAX_BYTES` bytes in total are written back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from palaestra.envs.config.dotenv import DOTENV
from palaestra_chat.folder_changes import FolderChange, history_only
from palaestra_chat.folders import settings_file
from palaestra_chat.generated_files import generated, ignored_by_git, is_left_out
from palaestra_chat.git_files import HISTORY, bare_repositories, fingerprint, history_of, makes_git_run, split
from palaestra_chat.host_git import give_identity
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.sandbox.slot import WORKSPACE, Mount, Rung, Slot, hides_system

T = TypeVar("T")

MAX_KEPT_BYTES = 256 << 20
"""The maximum total size of the earlier contents that are kept so that written changes can be taken back."""

MAX_BYTES, MAX_FILES = 512 << 20, 20_000
"""The maximum total size, in bytes, and the maximum number of files. Both apply to the folder when it is copied, and to
the changes in the sandbox."""

MOST_UNCOPIED = 64
"""The maximum number of generated folders that a sandbox has without a copy."""

MAX_HISTORY_BYTES = 64 << 20
"""The maximum size of what is new in a repository on this machine and copied into a sandbox that has its history."""

NONE = "none"
"""The value of the setting `workdir` for an empty sandbox."""

NOT_KEPT = "its earlier content was too large to keep"
CHANGED_HERE = "it changed on this machine in the meantime"
MAKES_GIT_RUN = "git could run commands from it on this machine"
CONFIGURES_CHAT = "it is one of your own chat settings, from which commands are run on this machine"
GIVES_KEYS = "commands on this machine read their API keys and the address of their model server from it"
LEADS_OUT = "it is a symlink that leads out of the shared folder"
BEHIND_A_LINK = "its path contains a symlink, or it is a folder on this machine"
FULL_FOLDER = "a file cannot take the place of its folder on this machine"
NOT_UTF_8 = "its name is not UTF-8"
NOT_A_FILE = "it is neither a file nor a symlink"
NEVER_WRITTEN = frozenset({MAKES_GIT_RUN, CONFIGURES_CHAT, GIVES_KEYS, LEADS_OUT, NOT_UTF_8, NOT_A_FILE})
"""The reasons for which a file is never written back."""

_LIST_BYTES = 32 << 20
_LIST = r"find . -xdev ! -type d ! -path './.palaestra-*' -printf '%P\0%y\0%s %T@\0%m\0%l\0' > "
"""Lists to a file, because names and the targets of links may be bytes that no text has. Does not list folders that a
slot has without a copy, because they are file systems of their own."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file in the workspace: its type as `find` prints it, its size and modification time, its permissions, and the
    target of a symlink."""

    type: str
    stamp: str
    permissions: int
    link: str


@dataclass(frozen=True, slots=True)
class _Written:
    """One file that was written to the folder: its content and mode before, its state after
    (`_content_fingerprint`), and the directories that were made for it, the outermost first. `lost` means that the
    content before was not kept."""

    path: str
    before: bytes | None
    mode: int
    after: str
    made: Sequence[Path] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What changed on this machine since the sandbox got its copy: the files that it has now (`copied`), those that the
    agent changed, too, and that it therefore has as they were (`both`), the repositories whose new `commits` and
    branches it has now, and those whose new `history` it does not have."""

    copied: Sequence[str] = ()
    both: Sequence[str] = ()
    commits: Sequence[str] = ()
    history: Sequence[str] = ()


@dataclass(slots=True)
class WorkFolder:
    """The shared folder `root`. Raises `ConfigError` if `root` is not a folder. `fill` raises `ConfigError` if the
    folder is too large."""

    root: Path
    lean: bool | None = None
    """Whether the copy leaves out generated folders (`is_left_out`), because the whole folder is too large. None before
    that was looked up."""
    staying: int = 0
    """The number of generated files that `changes` found, which stay in the sandbox."""
    _copied: dict[str, str] = field(default_factory=dict)
    """The state of each file when the folder and the sandbox last had the same."""
    _listed: dict[str, _Listed] = field(default_factory=dict)
    """How the sandbox listed each file at that time."""
    _seen: dict[str, _Listed] = field(default_factory=dict)
    """How it listed each file at the latest call of `changes`."""
    _written: list[_Written] = field(default_factory=list)
    _stamps: dict[str, tuple[int, int, int]] | None = None
    """The time, size and inode of each file of the folder when it was last compared with `_copied`. None before the
    folder is copied."""
    _told: dict[str, str] = field(default_factory=dict)
    """The repositories whose history was not copied, and which state of it."""
    _refreshed: list[tuple[str, str | None, _Listed | None]] = field(default_factory=list)
    """What `_copied` and `_listed` had for each file that `refresh` has copied, before that."""

    @property
    def refreshed(self) -> int:
        """The number of files that `refresh` has copied."""
        return len(self._refreshed)

    @property
    def written(self) -> int:
        """The number of files that have been written to the folder and not taken back."""
        return len(self._written)

    def copy(self, written: int | None = None, refreshed: int | None = None) -> WorkFolder:
        """Return the folder for another slot with the files of the time when `written` files had been written to the
        folder, and `refreshed` files had been copied again, by default now."""
        other = replace(
            self, _copied=dict(self._copied), _listed=dict(self._listed), _written=self._written[:written],
            _stamps=None if self._stamps is None else dict(self._stamps), _refreshed=list(self._refreshed),
        )  # fmt: skip
        other._forget_refreshed(len(self._refreshed) if refreshed is None else refreshed)
        return other

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise ConfigError(f"the folder to work in, {self.root}, does not exist or is not a folder")
        self.root = self.root.resolve()

    @property
    def place(self) -> str:
        """The path of the copy in a sandbox: that of the folder, or `/workspace` if the folder would hide a part of the
        sandbox's system."""
        return WORKSPACE if hides_system(str(self.root)) else str(self.root)

    async def uncopied(self) -> list[Mount]:
        """Return the folders that the copy leaves out, with their places in a slot that begins with them, if it
        can."""
        self.lean = not await asyncio.to_thread(fits, self.root)
        found = await asyncio.to_thread(_left_out, self.root) if self.lean else []
        return [Mount(str(each), f"{WORKSPACE}/{each.relative_to(self.root).as_posix()}") for each in found]

    async def fill(self, slot: Slot) -> None:
        """Copy the folder into a new slot's workspace, and the person's name for commits. Raises `ConfigError` if the
        folder is too large, and `SandboxError` if the copy fails."""
        with tempfile.NamedTemporaryFile(prefix="palaestra-", suffix=".tar") as file:
            if self.lean is None:
                await self.uncopied()
            self._stamps = await asyncio.to_thread(self._all_stamps)
            self._copied = await asyncio.to_thread(self._pack, Path(file.name))
            archive = await _scratch(slot, "tar")
            await slot.upload(Path(file.name), archive)
        done = await slot.execute(f"tar -xf {archive} && rm -f {archive}", timeout_s=300)
        if not done.success:
            raise SandboxError(
                f"{self.root} could not be copied into the sandbox: {without_middle(done.output.strip(), 500)}"
            )
        await give_identity(slot, self.root)
        self._listed = await self._list_workspace(slot)

    async def refresh(self, slot: Slot) -> Refreshed:
        """Copy the files into the slot that have changed on this machine and that the agent has not changed, without
        generated files. The history of a repository is copied as a whole or not at all. Each change is returned once.
        Raises `SandboxError` if the copy fails."""
        if self._stamps is None:
            return Refreshed()
        known, stamps = self._stamps, await asyncio.to_thread(self._all_stamps)
        moved = [path for path in sorted(stamps.keys() | known.keys()) if stamps.get(path) != known.get(path)]
        files = self._other([path for path in moved if ".git" not in path.split("/") and not generated(path)])
        repositories = [repository for repository in dict.fromkeys(map(history_of, moved)) if repository]
        histories = {each: [path for path in moved if history_of(path) == each] for each in repositories}
        histories = {each: paths for each, paths in histories.items() if self._other(filter(_is_history, paths))}
        self._stamps = {path: stamp for path, stamp in stamps.items() if history_of(path) is None}
        # What is not copied of a history counts as moved until it is.
        self._stamps |= {path: stamp for path, stamp in known.items() if history_of(path) is not None}
        if not files and not histories:
            return Refreshed()
        now = await self._list_workspace(slot)
        theirs = {path for path in now.keys() | self._listed.keys() if now.get(path) != self._listed.get(path)}
        copied = {path: file for path, file in files.items() if path not in theirs}
        committed = {history_of(path) for path in theirs if _is_history(path)}
        commits, history = [], []
        for repository, paths in histories.items():
            new = self._other(paths)
            if repository not in committed and sum(len(data or b"") for data, _ in new.values()) <= MAX_HISTORY_BYTES:
                commits.append(repository)
                copied |= new
                _copy_entries(self._stamps, stamps, paths)
            else:
                state = str([stamps.get(path) for path in filter(_is_history, paths)])
                if self._told.get(repository) != state:
                    history.append(repository)
                self._told[repository] = state
        if copied:
            await self._copy_again(slot, copied)
        both = [path for path in files if path in theirs]
        return Refreshed([path for path in files if path not in theirs], both, commits, history)

    def _other(self, paths: Iterable[str]) -> dict[str, tuple[bytes | None, int]]:
        """Return the content and the mode of those files of the folder that are not as they were copied."""
        found = {path: self._content_and_mode(path) for path in paths}
        return {
            path: file
            for path, file in found.items()
            if _content_fingerprint(path, *file) != self._copied.get(path, "")
        }

    async def _copy_again(self, slot: Slot, files: Mapping[str, tuple[bytes | None, int]]) -> None:
        """Replace these files in the slot by those with this content and mode; a content of None deletes the file."""
        with tempfile.NamedTemporaryFile(prefix="palaestra-", suffix=".tar") as file:
            with tarfile.open(file.name, "w") as tar:
                for path, (data, mode) in files.items():
                    info = tarfile.TarInfo(path)
                    info.mode, info.mtime = stat.S_IMODE(mode), int(time.time())
                    if data is not None and stat.S_ISLNK(mode):
                        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(data)
                        tar.addfile(info)
                    elif data is not None:
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
            archive = await _scratch(slot, "tar")
            await slot.upload(Path(file.name), archive)
        # Deleted first, because a folder may have the name of an earlier file.
        names = "\0".join(files).encode(errors="surrogateescape")
        command = f"xargs -0 rm -f -- && tar -xf {archive} && rm -f {archive}"
        done = await slot.execute(command, cwd=WORKSPACE, stdin=names, timeout_s=300)
        if not done.success:
            raise SandboxError(
                f"files that changed in {self.root} could not be copied into the sandbox: "
                f"{without_middle(done.output.strip(), 300)}"
            )
        now = await self._list_workspace(slot)
        for path, (data, mode) in files.items():
            self._refreshed.append((path, self._copied.get(path), self._listed.get(path)))
            _set_or_remove(self._copied, path, _content_fingerprint(path, data, mode) or None)
            _set_or_remove(self._listed, path, now.get(path))

    def _forget_refreshed(self, refreshed: int) -> None:
        """Forget all but the first `refreshed` files that were copied again, for a slot that does not have them."""
        while len(self._refreshed) > refreshed:
            path, copied, listed = self._refreshed.pop()
            _set_or_remove(self._copied, path, copied)
            _set_or_remove(self._listed, path, listed)
            if self._stamps is not None:
                self._stamps.pop(path, None)

    def _all_stamps(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for path in _walk_folder(self.root, lean=bool(self.lean)):
            with contextlib.suppress(OSError):
                info = path.lstat()
                if not stat.S_ISDIR(info.st_mode):
                    found[path.relative_to(self.root).as_posix()] = (info.st_mtime_ns, info.st_size, info.st_ino)
        return found

    async def changes(self, slot: Slot) -> list[FolderChange]:
        """Return the files and symlinks of the sandbox that differ from the folder, by path, without those that stay in
        the sandbox. Raises `SandboxError` if there are more changes than may be written back."""
        now = self._seen = await self._list_workspace(slot)
        paths = [path for path in sorted(set(now) | set(self._listed)) if now.get(path) != self._listed.get(path)]
        stay = {path for path in paths if generated(path)}
        stay |= await ignored_by_git(slot, [path for path in paths if path not in self._copied and path not in stay])
        self.staying = len(stay & set(now))
        paths = [path for path in paths if path not in stay]
        room = MAX_BYTES
        if len(paths) > MAX_FILES:
            raise self._too_much(f"{len(paths)} files")
        repositories = bare_repositories(set(now) | set(self._copied))
        found = []
        for path in paths:
            change = await self._change(slot, path, room)
            if change is not None:
                room -= len(change.after or b"")
                found.append(replace(change, problem=self._forbidden(change, repositories) or change.problem))
        return history_only(found)

    async def _change(self, slot: Slot, path: str, room: int) -> FolderChange | None:
        """Return how a file differs from that of the folder; None if it does not. At most `room` bytes are read."""
        entry = self._seen.get(path)
        before, here = self._content_and_mode(path)
        problem = CHANGED_HERE if _content_fingerprint(path, before, here) != self._copied.get(path, "") else ""
        if entry is None:
            return None if before is None else FolderChange(path, "deleted", before, None, 0, problem, here)
        kind = "new" if before is None else "changed"
        if entry.type == "l":
            after, mode = os.fsencode(entry.link), stat.S_IFLNK | 0o777
        elif entry.type != "f" or not _is_text(path):
            problem = NOT_A_FILE if entry.type != "f" else NOT_UTF_8
            return FolderChange(path, kind, before, None, stat.S_IFREG, problem, here)
        else:
            try:
                after = await slot.read_bytes(f"{WORKSPACE}/{path}", max_bytes=room)
            except FileNotFoundError:  # removed in the meantime
                return None
            except OSError as error:
                if error.errno == errno.EFBIG:
                    raise self._too_much(f"more than {MAX_BYTES >> 20} MB") from None
                raise
            mode = stat.S_IFREG | self._permissions(path, entry, here)
        if mode == here and not _differ(path, after, before):
            return None
        return FolderChange(path, kind, before, after, mode, problem, here)

    def _permissions(self, path: str, entry: _Listed, here: int) -> int:
        """Return the permissions that a file of the sandbox should have in the folder, where it has the mode `here`. A
        program that writes a file anew may give it other permissions only because its umask is another, so only
        whether the owner may execute it counts then, as in git."""
        before = self._listed.get(path)
        if not stat.S_ISREG(here):
            return entry.permissions & 0o777
        if before is not None and replace(before, permissions=entry.permissions) == entry:
            chmod = before.permissions != entry.permissions
            return entry.permissions & 0o777 if chmod else stat.S_IMODE(here)
        if before is None or not (before.permissions ^ entry.permissions) & stat.S_IXUSR:
            return stat.S_IMODE(here)
        return stat.S_IMODE(here) | (here & 0o444) >> 2 if entry.permissions & stat.S_IXUSR else here & 0o666

    def _forbidden(self, change: FolderChange, repositories: set[str]) -> str:
        """Return why a change may never be written back; nothing if it may."""
        path = change.path
        in_git = change.link and ".git" in path.lower().split("/")
        if in_git or makes_git_run(path, repositories) or makes_git_run(self._real(path), repositories):
            return MAKES_GIT_RUN
        if change.link and not self._leads_inside(path, os.fsdecode(change.after or b"")):
            return LEADS_OUT
        return self._configures(path)

    def _too_much(self, what: str) -> SandboxError:
        return SandboxError(
            f"the agent changed {what} of {self.root}; at most {MAX_FILES} files with {MAX_BYTES >> 20} MB can be "
            "written back, so nothing was. Have the agent delete files that you do not need, or pack them in an archive"
        )

    def apply(self, changes: Sequence[FolderChange]) -> list[FolderChange]:
        """Write changes to the folder. Returns the changes that were skipped, each with its `problem`. A file that
        changed on this machine after `changes` read it is also skipped, because the person may take a long time to
        decide."""
        left = []
        # The history of a repository is written as a whole or not at all.
        checked = [
            each if each.problem or history_of(each.path) is None else replace(each, problem=self._obstacle(each))
            for each in changes
        ]
        for change in self._in_order(history_only(checked)):
            # Not checked before, because a folder may be there only after the link of its name has been removed.
            target, problem = self.root / change.path, change.problem or self._obstacle(change)
            if not problem:
                try:
                    self._write_change(target, change)
                except OSError as error:
                    problem = f"it cannot be written: {error.strerror or error}"
            if problem:
                left.append(replace(change, problem=problem))
        return left

    def _in_order(self, changes: Sequence[FolderChange]) -> Iterator[FolderChange]:
        """Yield the changes so that a folder is emptied before a file or symlink takes its place. If the folder has
        other files, or the new one cannot be written, neither is done, and the changes have a `problem`."""
        deleted = {each.path for each in changes if each.after is None and not each.problem}
        new = {
            each.path: each.problem for each in changes if each.after is not None and _is_folder(self.root / each.path)
        }
        first = {place: {path for path in deleted if path.startswith(f"{place}/")} for place in new}
        kept = {place for place, problem in new.items() if problem or self._files_below(place) - first[place]}
        early = set().union(*first.values())
        blocked = kept.union(*(first[place] for place in kept))
        for change in sorted(changes, key=lambda each: each.path not in early):
            if change.path in blocked:
                change = replace(change, problem=change.problem or FULL_FOLDER)
            elif change.path in first:
                self._remove_empty(change.path)
            yield change

    def _remove_empty(self, path: str) -> None:
        for folder, _, _ in os.walk(self.root / path, topdown=False):
            with contextlib.suppress(OSError):  # then it is an obstacle
                os.rmdir(folder)

    def _files_below(self, path: str) -> set[str]:
        """Return the paths of all files and symlinks in a folder of this machine."""
        found: set[str] = set()
        for folder, folders, files in os.walk(self.root / path):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            found |= {(Path(folder) / name).relative_to(self.root).as_posix() for name in (*files, *links)}
        return found

    def decline(self, change: FolderChange) -> None:
        """Leave the person's file as it is: `changes` returns this change no more, but every later one."""
        _set_or_remove(self._listed, change.path, self._seen.get(change.path))

    def _obstacle(self, change: FolderChange) -> str:
        """Return why a change cannot be written; nothing if it can."""
        target = self.root / change.path
        if not self._is_writable(target):
            return BEHIND_A_LINK
        if change.link and not self._leads_inside(change.path, os.fsdecode(change.after or b"")):
            return LEADS_OUT
        before, here = self._content_and_mode(change.path)
        unread = before is None and os.path.lexists(target)
        other = stat.S_ISLNK(here) != stat.S_ISLNK(change.mode_before) or _differ(change.path, before, change.before)
        return CHANGED_HERE if unread or other else ""

    def take_back(self, written: int, refreshed: int | None = None) -> list[FolderChange]:
        """Undo all but the first `written` files that were written to the folder, the latest first. Returns what was
        not undone, each with its `problem`: a file that has changed on this machine since then keeps its content. The
        slot of that time has only the first `refreshed` files that were copied again, by default all."""
        left: dict[str, FolderChange] = {}
        while len(self._written) > written:
            last = self._written.pop()
            now, here = self._content_and_mode(last.path)
            change = FolderChange(last.path, "restored", now, last.before, last.mode, mode_before=here)
            problem = NOT_KEPT if last.lost else "" if self._is_writable(self.root / last.path) else CHANGED_HERE
            if _content_fingerprint(last.path, now, here) != last.after:
                problem = CHANGED_HERE
            if not problem and last.path not in left:
                try:
                    self._replace(self.root / last.path, change)
                    for folder in reversed(last.made):
                        folder.rmdir()
                except OSError as error:
                    problem = "" if error.errno == errno.ENOTEMPTY else f"it cannot be written: {error.strerror}"
            if problem:
                left.setdefault(last.path, replace(change, problem=problem))
        self._forget_refreshed(len(self._refreshed) if refreshed is None else refreshed)
        return list(left.values())

    def _write_change(self, target: Path, change: FolderChange) -> None:
        """Write a change, and remember what was there before."""
        made = [folder for folder in target.parents if folder.is_relative_to(self.root) and not folder.exists()][::-1]
        self._replace(target, change)
        _set_or_remove(self._listed, change.path, self._seen.get(change.path))
        after = _content_fingerprint(change.path, change.after, change.mode)
        self._written.append(_Written(change.path, change.before, change.mode_before, after, made))
        room = MAX_KEPT_BYTES
        for place in range(len(self._written) - 1, -1, -1):
            kept = self._written[place]
            room -= len(kept.before or b"")
            if room < 0 and kept.before:
                self._written[place] = replace(kept, before=b"", lost=True)

    def _replace(self, target: Path, change: FolderChange) -> None:
        if change.after is None:
            with contextlib.suppress(FileNotFoundError):
                target.unlink()
            self._copied.pop(change.path, None)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".palaestra-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                if not change.link:
                    file.write(change.after)
                    os.fchmod(file.fileno(), stat.S_IMODE(change.mode))
            if change.link:
                os.unlink(name)
                os.symlink(change.after, os.fsencode(name))
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        self._copied[change.path] = _content_fingerprint(change.path, change.after, change.mode)

    def _pack(self, archive: Path) -> dict[str, str]:
        """Write the folder's files to a tar archive; returns the state of each."""
        copied: dict[str, str] = {}
        total = 0
        with tarfile.open(archive, "w") as tar:
            for path in _walk_folder(self.root, lean=bool(self.lean)):
                name = path.relative_to(self.root).as_posix()
                info = tar.gettarinfo(path, name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if info.issym():
                    copied[name] = _content_fingerprint(name, os.fsencode(info.linkname), stat.S_IFLNK)
                if not (info.isreg() or info.islnk()):
                    tar.addfile(info)
                    continue
                try:
                    data = path.read_bytes()
                except OSError:  # the agent gets no file that this process cannot read
                    continue
                total += len(data)
                if total > MAX_BYTES or len(copied) >= MAX_FILES:
                    raise too_large(self.root)
                info.size, info.type, info.linkname = len(data), tarfile.REGTYPE, ""
                tar.addfile(info, io.BytesIO(data))
                copied[name] = fingerprint(name, data)
        return copied

    async def _list_workspace(self, slot: Slot) -> dict[str, _Listed]:
        """Return every file and symlink in the workspace."""
        listed = await _scratch(slot, "list")
        done = await slot.execute(f"{_LIST}{listed}", cwd=WORKSPACE, timeout_s=120)
        if not done.success:
            raise SandboxError(
                f"the files of the sandbox could not be listed: {without_middle(done.output.strip(), 300)}"
            )
        try:
            fields = (await slot.read_bytes(listed, max_bytes=_LIST_BYTES)).split(b"\0")
        except OSError as error:
            raise SandboxError(f"the files of the sandbox could not be listed: {error}") from None
        names = map(os.fsdecode, fields[:-1])
        return {
            path: _Listed(kind, stamp, int(mode, 8), link)
            for path, kind, stamp, mode, link in zip(*[names] * 5, strict=True)
        }

    def _content_and_mode(self, path: str) -> tuple[bytes | None, int]:
        """Return the content and the mode of a file of the folder, or the target of a symlink and its mode. The content
        is None if there is neither."""
        target = self.root / path
        try:
            mode = target.lstat().st_mode if self._is_writable(target) else 0
            if stat.S_ISLNK(mode):
                return os.fsencode(os.readlink(target)), mode
            return (target.read_bytes(), mode) if stat.S_ISREG(mode) else (None, 0)
        except OSError:
            return None, 0

    def _leads_inside(self, path: str, link: str) -> bool:
        """Return whether a symlink at `path` with the target `link` leads to a place in the folder."""
        try:
            return ((self.root / path).parent / link).resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # a loop
            return False

    def _real(self, path: str) -> str:
        """Return the path with the symlinks in its directory resolved. If they lead out of the folder, return `path`
        unchanged."""
        target = self.root / path
        parent = target.parent.resolve()
        return (parent.relative_to(self.root) / target.name).as_posix() if parent.is_relative_to(self.root) else path

    def _configures(self, path: str) -> str:
        """Return why a file would configure this program: it is one of the chat's own settings, whose hooks and servers
        run on this machine, or a `.env` file. Returns an empty text for all other files."""
        own, target = settings_file().parent, self.root / path
        real = target.parent.resolve() / target.name
        links = {each.resolve() for each in own.glob("*") if each.is_symlink()}
        if real.is_relative_to(own.resolve()) or target.resolve() in links:
            return CONFIGURES_CHAT
        keys = {(folder / DOTENV).resolve() for folder in (self.root, real.parent)}
        return GIVES_KEYS if target.name.lower() == DOTENV or target.resolve() in keys else ""

    def _is_writable(self, target: Path) -> bool:
        """Return whether a file may be written at `target`: no symlink leads to it, and it is not itself a
        directory."""
        return target.parent.resolve() == target.parent and not _is_folder(target)


def _is_folder(target: Path) -> bool:
    return target.is_dir() and not target.is_symlink()


def too_large(root: Path) -> ConfigError:
    """Return the error for a folder that cannot be copied."""
    return ConfigError(
        f"{root} is too large: at most {MAX_FILES} files with {MAX_BYTES >> 20} MB in total can be copied. Name a "
        "smaller folder with --workdir, or an empty sandbox with --workdir none"
    )


def fits(root: Path, *, files: int = MAX_FILES, lean: bool = False) -> bool:
    """Return whether a folder has at most this many files and `MAX_BYTES` bytes. `lean` does not count what a lean copy
    leaves out."""
    count, size = 0, 0
    for path in _walk_folder(root, lean=lean):
        info = path.lstat()
        if stat.S_ISREG(info.st_mode):
            count, size = count + 1, size + info.st_size
            if count > files or size > MAX_BYTES:
                return False
    return True


async def _scratch(slot: Slot, kind: str) -> str:
    """Return the path of a file in the slot that is in no snapshot."""
    folder = "/tmp"  # noqa: S108 - a path in the slot, which nobody else shares
    if slot.rung < Rung.USERNS:  # such a slot has a folder of its own in place of /tmp
        folder = (await slot.execute('printf %s "${TMPDIR:-/tmp}"', timeout_s=60)).output or folder
    return f"{folder}/palaestra-folder.{kind}"


def _left_out(root: Path) -> list[Path]:
    """Return the outermost folders that a lean copy leaves out, but for byte code, at most `MOST_UNCOPIED`."""
    found: list[Path] = []
    for folder, folders, _ in os.walk(root):
        left = sorted(name for name in folders if is_left_out(Path(folder, name)))
        found += [Path(folder, name) for name in left if name != "__pycache__" and not Path(folder, name).is_symlink()]
        folders[:] = sorted(set(folders).difference(left))
    return found[:MOST_UNCOPIED]


def _walk_folder(root: Path, *, lean: bool) -> Iterator[Path]:
    """Yield the folders, files and symlinks of a folder, each folder before what is in it."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not (lean and is_left_out(here / name)))
        yield from (here / name for name in folders)
        for name in sorted(files):
            if stat.S_IFMT((here / name).lstat().st_mode) in (stat.S_IFREG, stat.S_IFLNK):
                yield here / name


def _is_history(path: str) -> bool:
    return history_of(path) is not None and split(path)[1] in HISTORY


def _copy_entries(to: dict[str, T], source: Mapping[str, T], paths: Iterable[str]) -> None:
    for path in paths:
        _set_or_remove(to, path, source.get(path))


def _set_or_remove(files: dict[str, T], path: str, value: T | None) -> None:
    if value is None:
        files.pop(path, None)
    else:
        files[path] = value


def _content_fingerprint(path: str, data: bytes | None, mode: int) -> str:
    """Return what identifies the content of a file, or the target of a symlink; nothing if there is neither."""
    return f"link to {os.fsdecode(data)}" if data is not None and stat.S_ISLNK(mode) else fingerprint(path, data)


def _differ(path: str, one: bytes | None, other: bytes | None) -> bool:
    return one != other and fingerprint(path, one) != fingerprint(path, other)


def _is_text(path: str) -> bool:
    return not any("\udc80" <= each <= "\udcff" for each in path)
