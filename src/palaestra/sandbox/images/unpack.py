"""Putting the layers of an image into a directory, trusting nothing that they say.

Every name is opened below the directory (openat2, RESOLVE_IN_ROOT), so that no `..`, link or race leads out of it.
Left out: devices (a slot has its own), set-uid and set-gid bits (a slot takes no notice, the host's users would), and
extended attributes, file capabilities among them.

Whiteouts as in the OCI image specification, layer.md: `.wh.NAME` takes NAME of the layers below away, `.wh..wh..opq`
everything that they have in its directory.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import shutil
import stat
import tarfile
import threading
import zlib
from collections.abc import Iterable, Iterator

from palaestra.core.errors import ImageError
from palaestra.sandbox.slotd import syscalls

MAX_DEPTH = 256
MAX_ENTRIES = 5_000_000

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_IDS, _NOBODY = 65536, 65534
_PIECE_BYTES = 1 << 20
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


class Unpacking:
    """One image on its way into an empty directory. `add` each layer, lowest first, then `finish`."""

    def __init__(self, directory: str, image: str, max_bytes: int, stop: threading.Event) -> None:
        self.bytes = 0
        self._image, self._max_bytes, self._stop = image, max_bytes, stop
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._entries = 0
        self._directories: dict[str, tarfile.TarInfo] = {}
        self._made: set[str] = set()
        self._parent: tuple[str, int] | None = None

    def add(self, layer: tarfile.TarFile) -> None:
        """One layer. Raises `ImageError` for what cannot be an image's."""
        self._made.clear()
        while (member := layer.next()) is not None:
            layer.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if self._stop.is_set():
                raise ImageError(f"{self._image}: unpacking was given up")
            self._entries += 1
            path = self._clean(member.name)
            if self._entries > MAX_ENTRIES:
                raise ImageError(f"{self._image}: more than {MAX_ENTRIES} entries")
            if path:
                try:
                    self._put(layer, member, path)
                except OSError as error:
                    raise ImageError(f"{self._image}: cannot unpack {member.name!r}: {error.strerror}") from error
            elif member.isdir():
                self._directories[""] = member

    def finish(self) -> None:
        """Give the directories their modes and times, now that nothing is put into them any more."""
        self._leave_parent()
        for path, member in sorted(self._directories.items(), reverse=True):
            with contextlib.suppress(OSError), self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                self._adopt(fd, member)
        names = set(os.listdir(self._root))
        if not names & {"bin", "usr"}:
            raise ImageError(f"{self._image} holds no root file system: there is no /bin and no /usr in it")

    def close(self) -> None:
        """Let go of the directory."""
        self._leave_parent()
        os.close(self._root)

    def _clean(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name or len(parts) > MAX_DEPTH:
            raise ImageError(f"{self._image} is no image: it names {name[:200]!r}")
        return "/".join(parts)

    def _put(self, layer: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        folder, _, name = path.rpartition("/")
        parent = self._enter(folder)
        if name == _OPAQUE:
            self._clear(parent, folder)
        elif name.startswith(_WHITEOUT):
            _remove(parent, name[len(_WHITEOUT) :])
        elif member.isdir():
            self._put_directory(parent, name, path, member)
        else:
            self._put_other(layer, member, parent, name)
        self._note(path)

    def _put_directory(self, parent: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        status = _status(parent, name)
        if status is not None and stat.S_ISLNK(status.st_mode):
            with contextlib.suppress(OSError), self._opened(path, os.O_PATH | os.O_DIRECTORY):
                return  # as with `bin -> usr/bin`: what comes is for the directory it leads to
        if status is None or not stat.S_ISDIR(status.st_mode):
            _remove(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
        self._directories[path] = member

    def _put_other(self, layer: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if member.ischr() or member.isblk():
            return
        _remove(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            if os.geteuid() == 0:
                os.chown(name, _id(member.uid), _id(member.gid), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            with self._opened(self._clean(member.linkname), os.O_PATH | os.O_NOFOLLOW) as target:
                os.link(f"/proc/self/fd/{target}", name, dst_dir_fd=parent, follow_symlinks=True)
        elif member.isfifo():
            os.mkfifo(name, member.mode & 0o777, dir_fd=parent)
        elif member.isreg():
            self._put_file(layer, member, parent, name)
        else:
            raise ImageError(f"{self._image}: {member.name!r} is of a kind that no image has")

    def _put_file(self, layer: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        self.bytes += member.size
        if self.bytes > self._max_bytes:
            raise ImageError(f"{self._image} is larger than {self._max_bytes} bytes, the limit of one image")
        source = layer.extractfile(member)
        assert source is not None
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            with open(fd, "wb", closefd=False) as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
            self._adopt(fd, member)
        finally:
            os.close(fd)

    def _adopt(self, fd: int, member: tarfile.TarInfo) -> None:
        if os.geteuid() == 0:
            os.fchown(fd, _id(member.uid), _id(member.gid))
        os.fchmod(fd, member.mode & 0o1777)
        os.utime(fd, (member.mtime, member.mtime))

    def _clear(self, parent: int, folder: str) -> None:
        """Take away what is not of this layer."""
        for name in os.listdir(parent):
            path = f"{folder}/{name}" if folder else name
            if path not in self._made:
                _remove(parent, name)
            elif (status := _status(parent, name)) is not None and stat.S_ISDIR(status.st_mode):
                with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                    self._clear(fd, path)

    def _note(self, path: str) -> None:
        while path and path not in self._made:
            self._made.add(path)
            path = path.rpartition("/")[0]

    def _enter(self, folder: str) -> int:
        """The directory that the next entries go into, made where it is missing."""
        if self._parent is None or self._parent[0] != folder:
            self._leave_parent()
            self._parent = (folder, self._open_folder(folder))
        return self._parent[1]

    def _open_folder(self, folder: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return syscalls.openat2(self._root, folder or ".", flags, _INSIDE)
        except FileNotFoundError:
            above, _, name = folder.rpartition("/")
            parent = self._open_folder(above)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        finally:
            os.close(parent)
        return syscalls.openat2(self._root, folder, flags, _INSIDE)

    def _leave_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        fd = syscalls.openat2(self._root, path or ".", flags, _INSIDE)
        try:
            yield fd
        finally:
            os.close(fd)


def unpack(layers: Iterable[tarfile.TarFile], directory: str, image: str, max_bytes: int, stop: threading.Event) -> int:
    """All layers, lowest first, into an empty directory; the bytes of its files."""
    unpacking = Unpacking(directory, image, max_bytes, stop)
    try:
        for layer in layers:
            unpacking.add(layer)
        unpacking.finish()
        return unpacking.bytes
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ImageError(f"{image} is damaged: {error}") from error
    finally:
        unpacking.close()


def _remove(parent: int, name: str) -> None:
    """Remove what a layer below has at a name. Nothing there is fine."""
    status = _status(parent, name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    elif status is not None:
        os.unlink(name, dir_fd=parent)


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _id(number: int) -> int:
    """Owners beyond a slot's range are nobody there."""
    return number if 0 <= number < _IDS else _NOBODY
