"""Unpacks untrusted archives: the layers of images on disk, and the archives in rows of data sets.

    a directory with bin/ or usr/       the root itself (a debootstrap tree, an unpacked image)
    a directory with oci-layout         an OCI image layout (image-spec, image-layout.md): index.json, blobs/
    a tar file of a root                `docker export`, `debootstrap --make-tarball`, `tar -C root -c .`
    a tar file with manifest.json       `docker save`
    a tar file with oci-layout          an OCI image layout in one file

Layers may be plain or compressed with gzip, bzip2 or xz; those of OCI layouts and of `docker save` also with zstd.
Blobs of OCI layouts are checked against their digests.

Nothing in an archive is trusted. Every name is opened below the target directory (openat2, RESOLVE_IN_ROOT), so that no
`..`, link or race leads out of it. The filters of `tarfile` are not used. Devices (a slot has its own), set-uid and
set-gid bits (a slot ignores them, but users of the host could use them) and extended attributes with file capabilities
are left out. The memory that an archive takes is bounded, as are its entries, their depth and the size of their files;
sparse files are refused.

Whiteouts follow the OCI image specification, layer.md: `.wh.NAME` removes NAME of the layers below, and `.wh..wh..opq`
removes all entries that the layers below have in its directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import stat
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any

from palaestra_slots.core.errors import ImageError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.durable_files import open_regular
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slotd import syscalls

_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_WINDOW_BITS = 27
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_JSON_BYTES, _PIECE_BYTES = 16 << 20, 1 << 20

OpenBlob = Callable[[str], IO[bytes]]  # opens a file of the image by name; raises KeyError or OSError

MAX_DEPTH = 256
MAX_ENTRIES = 2_000_000

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_IDS, _NOBODY = 65536, 65534
_TIMES = 1 << 34
_MAX_HEADER_BYTES, _MAX_HEADERS = 1 << 20, 8
_BLOCK_BITS = 12  # every file takes a block of the disk, also an empty one
_LONGEST_NAME = 4096
_MAX_SAVED = 10_000  # entries of an archive of layers, which has few for each layer
_MAX_LZMA_BYTES = 256 << 20  # the largest preset of xz needs 65 MiB
_LAYOUT, _SAVED = "OCI layout", "docker save"
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


class Entry(tarfile.TarInfo):
    """A tar entry that rejects names and extended headers of more than 1 MiB in total, and sparse files. `tarfile`
    itself would read names, headers and maps of sparse files of any size into memory, and headers before headers by
    recursion; a compressed archive can claim terabytes."""

    def _proc_member(self, archive: Archive) -> tarfile.TarInfo:
        if self.type in _HEADERS:
            archive.headers.append(self.size)
            # `tarfile` keeps global headers for all later entries, so these add up over the whole archive.
            archive.global_bytes += self.size if self.type == tarfile.XGLTYPE else 0
            size = max(sum(archive.headers), archive.global_bytes)
            if not 0 <= self.size <= size <= _MAX_HEADER_BYTES or len(archive.headers) > _MAX_HEADERS:
                raise tarfile.ReadError(f"it has {len(archive.headers)} headers of {size} bytes")
        else:
            archive.headers.clear()
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        try:
            return super()._proc_member(archive)  # type: ignore[misc,no-any-return]  # documented in its source only
        except (ValueError, TypeError, LookupError, OverflowError) as error:  # `tarfile` expects valid numbers
            raise tarfile.ReadError(f"it has a damaged header: {error}") from error

    def _refuse_sparse(self, *_: object) -> None:
        raise tarfile.ReadError("it has a sparse file; make the archive without --sparse")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class Archive(tarfile.TarFile):
    """An untrusted tar archive: reading its entries with `entries` takes a bounded amount of memory, whatever the
    archive contains and however it is compressed."""

    tarinfo = Entry

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.headers: list[int] = []
        self.global_bytes = 0
        super().__init__(*arguments, **options)

    @classmethod
    def xzopen(cls, name: Any, mode: Any = "r", fileobj: Any = None, preset: Any = None, **options: Any) -> Archive:
        """Open an archive that is compressed with xz. Its header chooses how much memory its decompression takes."""
        file = lzma.LZMAFile(fileobj or name)  # noqa: SIM115 - the archive closes it
        buffer = file._buffer  # type: ignore[attr-defined]  # the class has no parameter for the limit
        reader = type(buffer.raw)(
            file._fp,  # type: ignore[attr-defined]
            lzma.LZMADecompressor,
            trailing_error=lzma.LZMAError,
            memlimit=_MAX_LZMA_BYTES,
        )
        file._buffer = io.BufferedReader(reader)  # type: ignore[attr-defined]
        try:
            archive = cls.taropen(name, mode, file, **options)
        except (lzma.LZMAError, EOFError) as error:
            file.close()
            raise tarfile.ReadError(str(error)) from error
        except BaseException:
            file.close()
            raise
        archive._extfileobj = False  # type: ignore[attr-defined]  # closes `file` with the archive
        return archive

    def entries(self) -> Iterator[tarfile.TarInfo]:
        """Yield the entries, which can be iterated over once."""
        while (member := self.next()) is not None:
            self.members.clear()  # type: ignore[attr-defined]  # `tarfile` would keep every entry
            yield member


def layers(path: str) -> Iterator[Archive]:
    """Yield the layers of the image at `path`, lowest first. Each layer stays open until the next one is requested.
    Raises `ImageError`."""
    with _readable(path):
        if os.path.isdir(path):
            yield from _of_layout(path, _file_opener(path))
            return
        kind = _archive_kind(path)
        with Archive.open(path) as archive:  # opened again, because entries have been read already
            if kind == _LAYOUT:
                yield from _of_layout(path, _member_opener(archive))
            elif kind == _SAVED:
                yield from _of_saved(path, _member_opener(archive))
            else:
                yield archive


def stated_config(path: str) -> dict[str, JSON] | None:
    """Return what an OCI layout or an archive of `docker save` states about its commands: `Env`, `WorkingDir` and
    `User`. Return None for a root file system, which states nothing. Raises `ImageError`."""
    with _readable(path):
        if os.path.isdir(path):
            return _config_of_layout(path, _file_opener(path)) if is_layout(path) else None
        kind = _archive_kind(path)
        if kind is None:
            return None
        with Archive.open(path) as archive:
            return (_config_of_layout if kind == _LAYOUT else _config_of_saved)(path, _member_opener(archive))


def _archive_kind(path: str) -> str | None:
    """Return how an archive holds an image, or None if it holds a root file system."""
    with Archive.open(path) as archive:
        names = _first_names(archive)
    if "oci-layout" in names or "index.json" in names:
        return _LAYOUT
    return _SAVED if "manifest.json" in names else None


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn the errors of a damaged image into `ImageError`."""
    try:
        yield
    except (tarfile.TarError, EOFError, LookupError, TypeError, AttributeError, ValueError, OSError) as error:
        if isinstance(error, ImageError):
            raise
        with open(path, "rb") if os.path.isfile(path) else io.BytesIO() as file:
            hint = _compression_hint(file.read(4))
        raise ImageError(f"{path} cannot be read as an image: {error or type(error).__name__}{hint}") from error


def identity(path: str) -> str:
    """Return a digest in hexadecimal that identifies an image: for an OCI layout the manifest's digest, for a file the
    SHA-256 of its content."""
    if os.path.isdir(path):
        try:
            with _file_opener(path)("index.json") as file:
                return str(_entry_for_machine(_parse_object(file))["digest"]).rpartition(":")[2]
        except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"{path} cannot be read as an image: {error}") from error
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_layout(path: str) -> bool:
    """Return whether a directory is an OCI layout and not a root file system."""
    return os.path.isfile(os.path.join(path, "oci-layout")) or (
        os.path.isfile(os.path.join(path, "index.json")) and os.path.isdir(os.path.join(path, "blobs"))
    )


def _of_layout(path: str, open_blob: OpenBlob) -> Iterator[Archive]:
    for layer in _layout_manifest(path, open_blob)["layers"]:
        with _verified_blob(open_blob, layer["digest"], path) as file:
            yield from _layer(file, path)


def _layout_manifest(path: str, open_blob: OpenBlob) -> dict[str, JSON]:
    with open_blob("index.json") as file:
        entry = _entry_for_machine(_parse_object(file))
    while True:
        with _verified_blob(open_blob, entry["digest"], path) as file:
            manifest = _parse_object(file)
        if "layers" in manifest:
            return manifest
        entry = _entry_for_machine(manifest)  # an index in the index: one image for several machines


def _config_of_layout(path: str, open_blob: OpenBlob) -> dict[str, JSON] | None:
    entry = _layout_manifest(path, open_blob).get("config")
    if not entry:
        return None
    with _verified_blob(open_blob, entry["digest"], path) as file:
        return dict(_parse_object(file).get("config") or {})


def _of_saved(path: str, open_blob: OpenBlob) -> Iterator[Archive]:
    for name in _saved_manifest(path, open_blob)["Layers"]:
        with open_blob(name) as file:
            yield from _layer(file, path)


def _saved_manifest(path: str, open_blob: OpenBlob) -> dict[str, JSON]:
    with open_blob("manifest.json") as file:
        images = _bounded_json(file)
    if len(images) != 1:
        raise ImageError(f"{path} contains {len(images)} images; save only one image to a file")
    return dict(images[0])


def _config_of_saved(path: str, open_blob: OpenBlob) -> dict[str, JSON] | None:
    name = _saved_manifest(path, open_blob).get("Config")
    if not name:
        return None
    with open_blob(name) as file:
        return dict(_parse_object(file).get("config") or {})


def _layer(file: IO[bytes], path: str) -> Iterator[Archive]:
    start = file.read(4)
    file.seek(0)
    if start == _ZSTD:
        with Archive.open(fileobj=_Zstd(file, path), mode="r|") as layer:  # the reader cannot go back
            yield layer
        return
    with Archive.open(fileobj=file) as layer:
        yield layer


class _Zstd(io.RawIOBase):
    """The content of a layer that is compressed with zstd. Its frames choose how much memory their decompression takes:
    of windows, up to 128 MiB, which is zstd's own limit."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        if sys.version_info >= (3, 14):
            from compression import zstd

            self._error: type[Exception] = zstd.ZstdError
            options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_BITS}
            self._file: IO[bytes] = zstd.ZstdFile(file, options=options)
            return
        try:
            import zstandard
        except ImportError:
            raise ImageError(
                f"{path} has a layer that is compressed with zstd: {install_command('zstd', 'palaestra-slots')}, or "
                "use an image whose layers are compressed with gzip"
            ) from None
        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _ZSTD_WINDOW_BITS)
        self._file = decompressor.stream_reader(file, read_across_frames=True, closefd=False)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._file.read(size)
        except self._error as error:
            raise tarfile.ReadError(f"its zstd data is damaged: {error}") from error


def architecture() -> str:
    """Return the name of this machine's architecture in images, such as `amd64`."""
    return _MACHINES.get(platform.machine(), platform.machine())


def _entry_for_machine(index: dict[str, JSON]) -> dict[str, JSON]:
    """Return the index's entry for this machine's architecture. If the index has only one entry, return that entry,
    whatever its architecture. Raises `ImageError` if there is no such entry."""
    entries: list[dict[str, JSON]] = index["manifests"]
    wanted = architecture()
    fitting = [entry for entry in entries if (entry.get("platform") or {}).get("architecture") == wanted]
    if not entries or (len(entries) > 1 and not fitting):
        raise ImageError(f"none of the image's {len(entries)} entries is for {wanted}")
    return fitting[0] if fitting else entries[0]


def _bounded_json(file: IO[bytes]) -> JSON:
    try:
        return json.loads(file.read(_MAX_JSON_BYTES))
    except RecursionError:
        raise KeyError("it is nested too deeply") from None


def _parse_object(file: IO[bytes]) -> dict[str, JSON]:
    loaded = _bounded_json(file)
    if not isinstance(loaded, dict):
        raise KeyError("an object was expected")
    return loaded


@contextlib.contextmanager
def _verified_blob(open_blob: OpenBlob, digest: str, path: str) -> Iterator[IO[bytes]]:
    """Yield a blob after its bytes have been checked against its digest."""
    kind, _, value = digest.partition(":")
    if kind not in ("sha256", "sha512") or not value.isalnum():
        raise ImageError(f"{path} names a blob {digest!r}, which is not a digest")
    with open_blob(f"blobs/{kind}/{value}") as file:
        digested = hashlib.new(kind)
        while data := file.read(_PIECE_BYTES):
            digested.update(data)
        if digested.hexdigest() != value:
            raise ImageError(f"{path} is damaged: the content of blob {digest} does not match the digest")
        file.seek(0)
        yield file


def _file_opener(folder: str) -> OpenBlob:
    return lambda name: open_regular(os.path.join(folder, name))


def _member_opener(archive: Archive) -> OpenBlob:
    names: dict[str, tarfile.TarInfo] = {}
    for member in islice(archive.entries(), _MAX_SAVED):
        if member.isfile() and len(member.name) <= _LONGEST_NAME:
            member.pax_headers = {}
            names[member.name.removeprefix("./")] = member

    def opener(name: str) -> IO[bytes]:
        file = archive.extractfile(names[name])
        assert file is not None
        return file

    return opener


def _first_names(archive: Archive) -> set[str]:
    """Return the names in an archive that show its kind. Read it up to the first name that shows that the archive holds
    a root file system."""
    found = set()
    for count, member in enumerate(islice(archive.entries(), _MAX_SAVED)):
        name = member.name.removeprefix("./")
        if name in ("oci-layout", "index.json", "manifest.json"):
            found.add(name)
        if count > 0 and name.partition("/")[0] in ("bin", "etc", "usr", "lib", "dev"):
            break
    return found


def _compression_hint(start: bytes) -> str:
    return "; it is compressed with zstd: use gzip instead" if start == _ZSTD else ""


class Unpacking:
    """Unpacks one image into an empty directory: call `add` for each layer, lowest first, then `finish`.

    If `as_image` is false, it unpacks an archive of plain files: whiteouts and owners have no meaning, and fifos and
    devices are errors.
    """

    def __init__(
        self, directory: str, image: str, max_bytes: int, stop: threading.Event, as_image: bool = True
    ) -> None:
        self.bytes = 0
        self._as_image = as_image
        self._image, self._max_bytes, self._stop = image, max_bytes, stop
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._entries = 0
        self._root_depth = _depth(self._root)
        self._directories: dict[str, tarfile.TarInfo] = {}
        self._made: set[int] = set()  # hashes of paths, because paths may be long
        self._parent: tuple[str, int] | None = None

    def add(self, layer: Archive) -> None:
        """Unpack one layer. Raises `ImageError` if the layer is invalid."""
        self._made.clear()
        for member in layer.entries():
            if self._stop.is_set():
                raise ImageError(f"{self._image}: unpacking was cancelled")
            self._count_entry()
            path = self._clean(member.name)
            if path:
                try:
                    self._put(layer, member, path)
                except ImageError:
                    raise
                except (OSError, ValueError) as error:  # ValueError: a link's target contains a NUL
                    problem = error.strerror if isinstance(error, OSError) else error
                    raise ImageError(f"{self._image}: cannot unpack {member.name[:200]!r}: {problem}") from error
            elif member.isdir():
                # The entry `./`: the mode and owner of the root itself, which are set after its contents.
                self._directories[""] = member

    def finish(self) -> None:
        """Give the directories their modes and times, now that they are complete. Raises `ImageError` if `as_image` is
        true and the image is not a root file system."""
        self._leave_parent()
        # Innermost first, because its own mode may close a directory to this user.
        for path, member in sorted(self._directories.items(), reverse=True):
            with contextlib.suppress(OSError), self._open_beneath(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                self._adopt(fd, member)
        names = set(os.listdir(self._root))
        if self._as_image and not names & {"bin", "usr"}:
            raise ImageError(f"{self._image} is not a root file system: it has neither /bin nor /usr")

    def close(self) -> None:
        """Close the directory."""
        self._leave_parent()
        os.close(self._root)

    def _count_entry(self) -> None:
        """Count an entry, or a directory that no entry names."""
        most = min(MAX_ENTRIES, self._max_bytes >> _BLOCK_BITS)
        self._entries += 1
        if self._entries > most:
            raise ImageError(f"{self._image}: more than {most} entries")

    def _clean(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name or len(parts) > MAX_DEPTH:
            raise ImageError(f"{self._image} is not valid: it names {name[:200]!r}")
        return "/".join(parts)

    def _put(self, layer: Archive, member: tarfile.TarInfo, path: str) -> None:
        folder, _, name = path.rpartition("/")
        parent = self._folder_descriptor(folder)
        # Marks of an image layer. Source: "Representing Changes" in the OCI image specification, layer.md.
        if self._as_image and name == _OPAQUE:
            self._clear(parent, folder)
        elif self._as_image and name.startswith(_WHITEOUT):
            hidden = name[len(_WHITEOUT) :]
            if hidden in ("", ".", ".."):
                raise ImageError(f"{self._image} is not valid: it has a whiteout of {hidden!r}")
            _remove_entry(parent, hidden)
        elif member.isdir():
            self._put_directory(parent, name, path, member)
        else:
            self._put_other(layer, member, parent, name)
        self._note_path(path)

    def _put_directory(self, parent: int, name: str, path: str, member: tarfile.TarInfo) -> None:
        status = _stat_or_none(parent, name)
        if status is not None and stat.S_ISLNK(status.st_mode):
            with contextlib.suppress(OSError), self._open_beneath(path, os.O_PATH | os.O_DIRECTORY):
                return  # as with `bin -> usr/bin`: entries go to the directory behind the link
        if status is None or not stat.S_ISDIR(status.st_mode):
            _remove_entry(parent, name)
            self._make_directory(parent, name, 0o700)
        member.pax_headers = {}  # may take 1 MiB
        self._directories[path] = member

    def _put_other(self, layer: Archive, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if self._as_image and (member.ischr() or member.isblk()):
            return
        _remove_entry(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            if self._as_image and os.geteuid() == 0:
                os.chown(name, _id(member.uid), _id(member.gid), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            with self._open_beneath(self._clean(member.linkname), os.O_PATH | os.O_NOFOLLOW) as target:
                # By its descriptor, because a path would be followed from this machine's root.
                os.link(f"/proc/self/fd/{target}", name, dst_dir_fd=parent, follow_symlinks=True)
        elif member.isfifo() and self._as_image:
            os.mkfifo(name, member.mode & 0o777, dir_fd=parent)
        elif member.isreg():
            self._put_file(layer, member, parent, name)
        else:
            raise ImageError(f"{self._image}: {member.name!r} has a type that cannot be unpacked")

    def _put_file(self, layer: Archive, member: tarfile.TarInfo, parent: int, name: str) -> None:
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
        if self._as_image and os.geteuid() == 0:
            os.fchown(fd, _id(member.uid), _id(member.gid))
        own = 0o700 if member.isdir() else 0o600
        os.fchmod(fd, member.mode & 0o1777 if self._as_image else member.mode & 0o755 | own)
        time_s = _time(member.mtime)
        os.utime(fd, (time_s, time_s))

    def _clear(self, parent: int, folder: str) -> None:
        """Remove the entries of lower layers from a directory."""
        for name in os.listdir(parent):
            path = f"{folder}/{name}" if folder else name
            # An opaque mark hides only lower layers, wherever it stands among the entries of its own (layer.md).
            if hash(path) not in self._made:
                _remove_entry(parent, name)
            elif (status := _stat_or_none(parent, name)) is not None and stat.S_ISDIR(status.st_mode):
                with self._open_beneath(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                    self._clear(fd, path)

    def _note_path(self, path: str) -> None:
        while path and hash(path) not in self._made:
            self._made.add(hash(path))
            path = path.rpartition("/")[0]

    def _folder_descriptor(self, folder: str) -> int:
        """Return a descriptor of the directory for the next entries, and make the directory if it is missing."""
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
            self._make_directory(parent, name, 0o755)
        finally:
            os.close(parent)
        self._count_entry()
        return syscalls.openat2(self._root, folder, flags, _INSIDE)

    def _make_directory(self, parent: int, name: str, mode: int) -> None:
        """Make a directory. Links can make the path of its parent shorter than it is, and removing deeper trees fails
        in Python."""
        if _depth(parent) - self._root_depth >= MAX_DEPTH:
            raise ImageError(f"{self._image} is not valid: its directories are nested too deeply")
        os.mkdir(name, mode, dir_fd=parent)

    def _leave_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    @contextlib.contextmanager
    def _open_beneath(self, path: str, flags: int) -> Iterator[int]:
        fd = syscalls.openat2(self._root, path or ".", flags, _INSIDE)
        try:
            yield fd
        finally:
            os.close(fd)


def unpack(layers: Iterable[Archive], directory: str, image: str, max_bytes: int, stop: threading.Event) -> int:
    """Unpack all layers, lowest first, into an empty directory; returns the total size of the files in bytes."""
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


def unpack_files(data: bytes, directory: str, name: str, max_bytes: int) -> None:
    """Unpack an archive of plain files, compressed or not, into a directory. Error messages call the archive `name`.

    Raises `ImageError`. Links in the archive are created and may lead anywhere; do not follow them.
    """
    _unpack_plain(io.BytesIO(data), directory, name, max_bytes)


def unpack_file(path: str, directory: str, name: str, max_bytes: int) -> None:
    """Unpack the archive at `path` as `unpack_files` does."""
    with open(path, "rb") as file:
        _unpack_plain(file, directory, name, max_bytes)


def _unpack_plain(file: IO[bytes], directory: str, name: str, max_bytes: int) -> None:
    unpacking = Unpacking(directory, name, max_bytes, threading.Event(), as_image=False)
    try:
        with Archive.open(fileobj=file) as archive:
            unpacking.add(archive)
        unpacking.finish()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        raise ImageError(f"{name} cannot be unpacked: {error}") from error
    finally:
        unpacking.close()


def _remove_entry(parent: int, name: str) -> None:
    """Remove an entry of a directory and everything below it if the entry exists."""
    status = _stat_or_none(parent, name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    elif status is not None:
        os.unlink(name, dir_fd=parent)


def _stat_or_none(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _depth(directory: int) -> int:
    return os.readlink(f"/proc/self/fd/{directory}").count("/")


def _id(number: int) -> int:
    """Map owners beyond a slot's range to the uid of `nobody`."""
    return number if 0 <= number < _IDS else _NOBODY


def _time(seconds: float) -> float:
    """Map times that a file system may not hold, such as NaN, to 0."""
    return seconds if 0 <= seconds < _TIMES else 0.0
