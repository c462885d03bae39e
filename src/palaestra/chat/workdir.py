"""A folder of this machine as the workspace of a sandbox: copied in, and its changes copied back if the person wants.

The agent works on a copy, on every backend, so nothing it does reaches the folder before `apply`. Invariants: a file
that has changed on this machine since it was copied is never overwritten; nothing is written outside the folder, also
through symlinks; a file is replaced whole.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palaestra.core.errors import ConfigError, SandboxError
from palaestra.sandbox.slot import WORKSPACE, Slot

MAX_BYTES, MAX_FILES = 512 << 20, 20_000
"""The largest folder that is copied."""

_LIST_BYTES = 16 << 20
_ARCHIVE = "/tmp/palaestra-folder.tar"  # noqa: S108 - a path in the slot, which nobody else shares
_LIST = r"find . -type f ! -path './.palaestra-*' -printf '%P\t%s\t%T@\0'"


@dataclass(frozen=True, slots=True)
class FolderChange:
    """One file that differs in the sandbox. `kind` is new, changed or deleted; `before` is the file on this machine,
    `after` that of the sandbox. `conflict`: the file on this machine is no longer the one that was copied."""

    path: str
    kind: str
    before: bytes | None
    after: bytes | None
    mode: int = 0o644
    conflict: bool = False

    def diff(self) -> str:
        """The change as a unified diff; one line for a file that is not text."""
        texts = [_text(data) for data in (self.before, self.after)]
        if None in texts:
            return f"{self.kind} binary file {self.path} ({len(self.after or b'')} bytes)\n"
        before, after = ((text or "").splitlines(keepends=True) for text in texts)
        names = (self.path if self.before is not None else "/dev/null"), self.path
        lines = difflib.unified_diff(before, after, names[0], names[1] if self.after is not None else "/dev/null")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass(slots=True)
class WorkFolder:
    """The folder `root`. Raises `ConfigError` if it is not one, or too large when it is copied."""

    root: Path
    _copied: dict[str, str] = field(default_factory=dict)
    _listed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise ConfigError(f"--workdir {self.root} is not a folder")
        self.root = self.root.resolve()

    async def fill(self, slot: Slot) -> None:
        """Copy the folder into a new slot's workspace."""
        with tempfile.NamedTemporaryFile(prefix="palaestra-", suffix=".tar") as file:
            self._copied = self._pack(Path(file.name))
            await slot.upload(Path(file.name), _ARCHIVE)
        done = await slot.execute(f"tar -xf {_ARCHIVE} -C {WORKSPACE} && rm -f {_ARCHIVE}", timeout_s=300)
        if not done.success:
            raise SandboxError(f"{self.root} could not be copied into the sandbox: {done.output.strip()[-500:]}")
        self._listed = await self._list(slot)

    async def changes(self, slot: Slot) -> list[FolderChange]:
        """The files of the sandbox that differ from the folder, by path."""
        now = await self._list(slot)
        found = []
        for path in sorted(set(now) | set(self._listed)):
            if now.get(path) == self._listed.get(path):
                continue
            before = self._read(path)
            conflict = _digest(before) != self._copied.get(path, "")
            if path not in now:
                if before is not None:
                    found.append(FolderChange(path, "deleted", before, None, conflict=conflict))
                continue
            try:
                after = await slot.read_bytes(f"{WORKSPACE}/{path}")
            except FileNotFoundError:  # removed meanwhile, or a name that is not UTF-8
                continue
            if after != before:
                info = await slot.stat(f"{WORKSPACE}/{path}")
                mode = (info.mode if info is not None else 0o644) & 0o777
                kind = "new" if before is None else "changed"
                found.append(FolderChange(path, kind, before, after, mode, conflict))
        return found

    def apply(self, changes: Sequence[FolderChange]) -> list[FolderChange]:
        """Write changes to the folder; returns those that were left out because of an unsafe path or a conflict, also
        with a file that was changed here since `changes` read it: a person may have thought for long."""
        left = []
        for change in changes:
            target = self.root / change.path
            if change.conflict or not self._inside(target) or self._read(change.path) != change.before:
                left.append(change)
                continue
            if change.after is None:
                with contextlib.suppress(FileNotFoundError):
                    target.unlink()
                self._copied.pop(change.path, None)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".palaestra-", dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(change.after)
                    os.fchmod(file.fileno(), change.mode)
                os.replace(name, target)
            except BaseException:
                os.unlink(name)
                raise
            self._copied[change.path] = _digest(change.after)
        return left

    async def accept(self, slot: Slot) -> None:
        """Take the sandbox's present files as known: what was not applied is not offered again."""
        self._listed = await self._list(slot)

    def _pack(self, archive: Path) -> dict[str, str]:
        """Write the folder's files to a tar archive; returns the hash of each."""
        copied: dict[str, str] = {}
        total = 0
        with tarfile.open(archive, "w") as tar:
            for path in self._files():
                name = path.relative_to(self.root).as_posix()
                info = tar.gettarinfo(path, name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if not info.isreg():
                    tar.addfile(info)
                    continue
                try:
                    data = path.read_bytes()
                except OSError:  # not readable for us: not for the agent either
                    continue
                total += len(data)
                if total > MAX_BYTES or len(copied) >= MAX_FILES:
                    raise ConfigError(
                        f"{self.root} is too large to be copied: {MAX_FILES} files with {MAX_BYTES >> 20} MB at most. "
                        "Name a smaller folder with --workdir"
                    )
                info.size, info.type = len(data), tarfile.REGTYPE
                tar.addfile(info, io.BytesIO(data))
                copied[name] = _digest(data)
        return copied

    def _files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self.root):
            folders.sort()
            here = Path(folder)
            yield from (here / name for name in folders)
            for name in sorted(files):
                if stat.S_IFMT((here / name).lstat().st_mode) in (stat.S_IFREG, stat.S_IFLNK):
                    yield here / name

    async def _list(self, slot: Slot) -> dict[str, tuple[str, str]]:
        """Size and time of every file of the workspace."""
        done = await slot.execute(_LIST, cwd=WORKSPACE, timeout_s=120, max_output_bytes=_LIST_BYTES, spill=False)
        if not done.success or done.metadata.get("truncated"):
            raise SandboxError(f"the files of the sandbox could not be listed: {done.output.strip()[-300:]}")
        entries = (entry.split("\t") for entry in done.output.split("\0") if entry.count("\t") == 2)
        return {path: (size, time) for path, size, time in entries}

    def _read(self, path: str) -> bytes | None:
        target = self.root / path
        try:
            return target.read_bytes() if self._inside(target) and not target.is_symlink() else None
        except OSError:
            return None

    def _inside(self, target: Path) -> bool:
        """Whether the directory of a path is in the folder, whatever symlinks are on the way."""
        return target.parent.resolve().is_relative_to(self.root) and not target.is_dir()


def _digest(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _text(data: bytes | None) -> str | None:
    if data is None:
        return ""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
