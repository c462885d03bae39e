"""Archives and folders of tasks that attack whoever unpacks them on the host. They meet no isolation level."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import resource
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from palaestra.core.errors import ImageError, PrepareError, TaskError
from palaestra.sandbox.images.unpack import unpack_files
from palaestra.suites.swe.authoring import sdist
from palaestra.suites.task_files import check_links, read_bytes
from sandbox.images.test_image_store import ROOT, Entry, directory, layout, tar

FILE = b"#!attack"


def _outside(tmp_path: Path) -> Callable[[], None]:
    """Makes a file next to the place of unpacking; the result asserts that nothing there has changed."""
    kept = tmp_path / "outside"
    kept.mkdir()
    (kept / "file").write_bytes(b"kept")
    before = (kept / "file").stat()

    def check() -> None:
        after = (kept / "file").stat()
        assert os.listdir(kept) == ["file"]
        assert (kept / "file").read_bytes() == b"kept"
        assert (after.st_mode, after.st_nlink, after.st_uid) == (before.st_mode, before.st_nlink, before.st_uid)

    return check


def _attacks(out: Path) -> list[list[Entry]]:
    """`out` is the absolute path of the directory outside."""
    return [
        [("a", f"-> {out}"), ("a/evil", FILE)],
        [("a", f"-> {out}"), ("a", None), ("a/evil", FILE)],
        [("a", None), ("a/b", None), ("a/b", f"-> {out}"), ("a/b/evil", FILE)],
        [("a", f"-> {out}"), ("a/.wh.file", b"")],
        [("a", f"-> {out}"), ("a/.wh..wh..opq", b"")],
        [("a", f"-> {out}/file"), ("a", FILE)],
        [("a", f"-> {out}/file"), ("b", "=> a"), ("b", FILE)],
        [("a", f"-> {out}"), ("b", "=> a/file"), ("b", FILE)],
        [("a", "=> ../outside/file"), ("a", FILE)],
        [("a", f"=> {out}/file"), ("a", FILE)],
        [("a", "-> /proc/self/cwd"), ("a/evil", FILE)],
        [("a", "-> /proc/self/fd"), *((f"a/{fd}/evil", FILE) for fd in range(3, 12))],
        [(f"{out}/evil", FILE)],
        [("./a/../../outside/evil", FILE)],
        [("a\0/../../outside/evil", FILE)],
        [("a", "-> b"), ("b", "-> a"), ("a/evil", FILE)],
        [(".wh...", b""), (".wh.", b""), (".wh..", b"")],
    ]


@pytest.mark.parametrize("number", range(17))
@pytest.mark.parametrize("kind", ["image", "row"])
def test_nothing_outside_is_reached(tmp_path: Path, kind: str, number: int) -> None:
    check, place = _outside(tmp_path), tmp_path / "place"
    place.mkdir()
    data = tar([*ROOT, *_attacks(tmp_path / "outside")[number]])
    try:
        if kind == "row":
            unpack_files(data, str(place), "row", 1 << 20)
        else:
            (tmp_path / "image.tar").write_bytes(data)
            directory(tmp_path / "store", tmp_path / "image.tar")
    except ImageError:
        pass
    check()


_HEADERS: list[dict[str, str]] = [
    {"path": "OUT/evil"},
    {"path": "../outside/evil"},
    {"path": "a/../../outside/evil"},
    {"path": "x\0/../../outside/evil"},
    {"linkpath": "OUT/file"},
    {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "../outside/evil",
        "GNU.sparse.realsize": "7",
    },
    {"GNU.sparse.map": "0,7,99999999999,-1", "GNU.sparse.size": "7"},
    {"GNU.sparse.map": "x", "GNU.sparse.numblocks": "1"},
    {"size": "-1"},
    {"size": "99999999999999"},
    {"size": "x"},
    {"uid": "-5", "gid": "99999999999999", "mtime": "nan"},
    {"mtime": "1e400"},
    {"hdrcharset": "BINARY", "path": "\udcff/../../outside/evil"},
    {"SCHILY.xattr.trusted.overlay.redirect": "/outside", "SCHILY.xattr.user.overlay.opaque": "y"},
]
"""Extended headers that say something else than the plain header. Source: pax(1), GNU tar's manual."""


@pytest.mark.parametrize("kind", ["image", "row"])
def test_an_extended_header_names_nothing_outside(tmp_path: Path, kind: str) -> None:
    """Also with each type of entry, the unknown ones among them, and twice in one archive."""
    check = _outside(tmp_path)
    types = (
        tarfile.REGTYPE,
        tarfile.LNKTYPE,
        tarfile.SYMTYPE,
        tarfile.DIRTYPE,
        tarfile.CONTTYPE,
        b"S",
        b"V",
        b"M",
        b"Z",
    )
    for number, header in enumerate(_HEADERS):
        for entry_type in types:

            def change(info: tarfile.TarInfo, header: dict[str, str] = header, entry_type: bytes = entry_type) -> None:
                if info.name == "x":
                    info.type = entry_type
                    info.pax_headers = {key: text.replace("OUT", f"{tmp_path}/outside") for key, text in header.items()}

            place = tmp_path / f"place-{number}-{entry_type.hex()}"
            place.mkdir()
            try:
                data = tar([*ROOT, ("x", FILE), ("x", FILE)], change)
            except (ValueError, UnicodeEncodeError):  # the writer cannot say it
                continue
            try:
                if kind == "row":
                    unpack_files(data, str(place), "row", 1 << 20)
                else:
                    (tmp_path / "image.tar").write_bytes(data)
                    directory(tmp_path / f"store-{number}-{entry_type.hex()}", tmp_path / "image.tar")
            except ImageError:
                pass
            with contextlib.suppress(PrepareError):
                sdist.read_sdist(gzip.compress(data, 1), "sdist")
            check()
            for path in place.rglob("*"):
                assert not [name for name in os.listxattr(path, follow_symlinks=False) if "overlay" in name]


def test_what_is_unpacked_has_no_power(tmp_path: Path) -> None:
    """Devices, set-user-id bits, capabilities and fifos."""
    kinds = {"device": tarfile.CHRTYPE, "disk": tarfile.BLKTYPE, "fifo": tarfile.FIFOTYPE, "set": tarfile.REGTYPE}

    def change(info: tarfile.TarInfo) -> None:
        if info.name in kinds:
            info.type, info.mode, info.devmajor, info.devminor = kinds[info.name], 0o6777, 1, 1
            info.pax_headers = {"SCHILY.xattr.security.capability": "\x01\0\0\x02\xff\xff\xff\xff"}

    place = tmp_path / "place"
    place.mkdir()
    for name in kinds:
        with contextlib.suppress(ImageError):
            unpack_files(tar([(name, b"")], change), str(place), "row", 1 << 20)
    assert os.listdir(place) == ["set"]
    for entry in os.scandir(place):
        status = entry.stat(follow_symlinks=False)
        assert stat.S_ISREG(status.st_mode)
        assert not status.st_mode & 0o6000
        assert os.listxattr(entry.path) == []


def _bomb(kind: bytes, size: int) -> bytes:
    """A small compressed archive with a header of a claimed size that it also has."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    return packed.getvalue()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_of_any_size_takes_no_memory(tmp_path: Path, kind: bytes) -> None:
    """`tarfile` reads names and extended headers into memory; 300 MB of zeros are 1 MB compressed."""
    data, place = _bomb(kind, 300 << 20), tmp_path / "place"
    place.mkdir()
    (tmp_path / "image.tar").write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError):
        unpack_files(data, str(place), "row", 1 << 20)
    with pytest.raises(ImageError):
        directory(tmp_path / "store", tmp_path / "image.tar")
    with pytest.raises(PrepareError):
        sdist.read_sdist(data, "sdist")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_folder_that_claims_to_be_an_image_opens_nothing(tmp_path: Path) -> None:
    """Its index or a blob is a fifo, a link or a device, or not what the format says."""
    broken: list[Callable[[Path], object]] = [
        lambda index: os.mkfifo(index),
        lambda index: index.symlink_to("/etc/hostname"),
        lambda index: index.symlink_to("/dev/zero"),
        lambda index: index.mkdir(),
        lambda index: index.write_text("[" * 100_000),
        lambda index: index.write_text('{"manifests": [[]]}'),
        lambda index: index.write_text('{"manifests": 3}'),
        lambda index: index.write_text('{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}'),
        lambda index: index.write_text('{"manifests": [{"digest": 7}]}'),
    ]
    for number, attack in enumerate(broken):
        image = layout(tmp_path / f"image-{number}", [tar(ROOT)])
        (image / "index.json").unlink()
        attack(image / "index.json")
        with pytest.raises(ImageError):
            directory(tmp_path / "store", image)
    image = layout(tmp_path / "blobs", [tar(ROOT)])
    for blob in (image / "blobs/sha256").iterdir():
        blob.unlink()
        os.mkfifo(blob)
    with pytest.raises(ImageError):
        directory(tmp_path / "store", image)


def test_a_layer_that_unpacks_to_more_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    """Many copies of one file, and one that is sparse."""

    def grow(info: tarfile.TarInfo) -> None:
        if info.name == "sparse":
            info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0"}

    for entries in ([(f"f{n}", bytes(1 << 20)) for n in range(40)], [("sparse", b"x")]):
        image = tmp_path / "image.tar"
        image.write_bytes(tar([*ROOT, *entries], grow))
        with pytest.raises(ImageError):
            directory(tmp_path / "store", image, max_image_bytes=8 << 20)
        left = sum(each.stat().st_blocks for each in (tmp_path / "store").rglob("*") if each.is_file())
        assert left * 512 < 1 << 20
        image.unlink()


def test_files_of_a_task_lead_nowhere(tmp_path: Path) -> None:
    folder, secret = tmp_path / "task", tmp_path / "secret"
    secret.write_text("secret")
    (folder / "tests").mkdir(parents=True)
    attacks: dict[str, Callable[[Path], object]] = {
        "link": lambda path: path.symlink_to(secret),
        "fifo": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path),
    }
    for name, attack in attacks.items():
        attack(folder / name)
        with pytest.raises(TaskError):
            read_bytes(folder / name)
        if name != "fifo":
            with pytest.raises(TaskError):
                check_links(folder)
        (folder / name).unlink()
    (folder / "tests/deep").symlink_to("../../secret")
    with pytest.raises(TaskError):
        check_links(folder)
