"""Archives and folders of tasks that attack whoever unpacks them on the host. They meet no isolation level."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import resource
import shutil
import stat
import subprocess
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ImageError, PrepareError, TaskError
from palaestra_slots.images.dockerfile import ImageRecipe, check_images, image_config, parse
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.task_files import check_links, read_task_bytes
from palaestra_slots.sandbox.images.unpack import unpack_files
from palaestra_suites.swe.authoring import sdist
from palaestra_suites.swe.repository import RepositoryCache
from palaestra_suites.swe.swe_row import SweRow, load_rows
from palaestra_suites.terminal_bench.find_tasks import load_tasks
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


def _header(kind: bytes, size: int = 0, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _extended(kind: bytes, **values: str) -> bytes:
    """An extended header, or a GNU one whose body is the only value."""
    body = "".join(values.values()).encode()
    if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE):
        records = ((f" {key}={value}\n", len(key) + len(value) + 3) for key, value in values.items())
        body = "".join(f"{size + len(str(size + len(str(size))))}{text}" for text, size in records).encode()
    return _header(kind, len(body)) + body + bytes(-len(body) % 512)


def _sparse() -> bytes:
    count = 3 << 20
    body = b"%d\n" % count + b"0\n0\n" * count
    versions = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "1"}
    return _extended(tarfile.XHDTYPE, **versions) + _header(tarfile.REGTYPE, len(body)) + body + bytes(1024)


def _old_sparse() -> bytes:
    """A GNU header that says that a block with more of the map follows, and so does each of these blocks."""
    header, pair = bytearray(_header(tarfile.GNUTYPE_SPARSE)), b"00000000001\0" * 2
    header[386:482], header[482:483], header[148:156] = pair * 4, b"1", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + (pair * 21 + b"1" + bytes(7)) * (32 << 11)


def _dictionary() -> bytes:
    """An archive of which the header of xz says that 1.5 GiB of it are needed again. Its directories are real."""
    packed = bytearray(lzma.compress(tar([*ROOT, ("large", bytes(1 << 20))])))
    end = 12 + (packed[12] + 1) * 4  # of the block's header: xz-file-format, 3.1
    assert packed[14:16] == b"\x21\x01"  # LZMA2, whose only property is the dictionary
    packed[16] = 37
    packed[end - 4 : end] = zlib.crc32(packed[12 : end - 4]).to_bytes(4, "little")
    return bytes(packed)


def _deep_tree() -> bytes:
    """Directories below links to directories: no name is long, and the tree is deeper than Python can remove."""
    path = "/".join("d" * 200)
    links = [(f"l{n}", f"-> {f'l{n - 1}/' if n else ''}{path}") for n in range(8)]
    return tar([*ROOT, (path, None), *(entry for link in links for entry in (link, (f"{link[0]}/{path}", None)))])


_KEPT = "x" * 1_000_000
_BOMBS: dict[str, Callable[[], bytes]] = {
    "names before names": lambda: _extended(tarfile.GNUTYPE_LONGNAME, a="x\0") * 2000 + tar(ROOT),
    "extended headers before extended headers": lambda: _extended(tarfile.XHDTYPE, a="b") * 2000 + tar(ROOT),
    "headers for all": lambda: b"".join(
        _extended(tarfile.XGLTYPE, **{f"k{n}": _KEPT}) + _header(tarfile.REGTYPE) for n in range(60)
    ),
    "headers of directories": lambda: b"".join(
        _extended(tarfile.XHDTYPE, k=_KEPT + str(n)) + _header(tarfile.DIRTYPE, name=f"usr/{n}") for n in range(60)
    ) + tar(ROOT),
    "a map of a sparse file": _sparse,
    "an older map of a sparse file": _old_sparse,
    "a dictionary": _dictionary,
    "directories that no entry names": lambda: b"".join(
        _extended(tarfile.XHDTYPE, path="/".join([str(n), *["d" * 14] * 250])) + _header(tarfile.REGTYPE)
        for n in range(10)
    ) + tar(ROOT),
    "deep directories": _deep_tree,
    "a target with a NUL": lambda: _extended(tarfile.XHDTYPE, linkpath="a\0b") + _header(tarfile.SYMTYPE) + bytes(1024),
    "deep settings": lambda: tar([("manifest.json", b"[" * 100_000)]),
    "many names": lambda: b"".join(
        _extended(tarfile.XHDTYPE, path=f"{n}/{_KEPT}") + _header(tarfile.REGTYPE) for n in range(60)
    ),
}  # fmt: skip
_HARMLESS = {"image": ("headers of directories",),
             "row": ("headers of directories", "deep settings")}  # fmt: skip


@pytest.mark.parametrize("bomb", _BOMBS)
@pytest.mark.parametrize("kind", ["image", "row"])
def test_no_archive_takes_more_than_its_share(tmp_path: Path, kind: str, bomb: str) -> None:
    """Small archives that need much memory, many directories, or a deep stack."""
    data, place = _BOMBS[bomb](), tmp_path / "place"
    data = data if bomb == "a dictionary" else gzip.compress(data, 1)
    place.mkdir()
    (tmp_path / "image.tar").write_bytes(data)
    refused = contextlib.nullcontext() if bomb in _HARMLESS[kind] else pytest.raises(ImageError)
    tracemalloc.start()
    try:
        with refused:
            if kind == "row":
                unpack_files(data, str(place), "row", 8 << 20)
            else:
                directory(tmp_path / "store", tmp_path / "image.tar", max_image_bytes=8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    if kind == "image" and bomb not in _HARMLESS[kind]:
        assert os.listdir(tmp_path / "store/partial") == []


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
            read_task_bytes(folder / name)
        if name != "fifo":
            with pytest.raises(TaskError):
                check_links(folder)
        (folder / name).unlink()
    (folder / "tests/deep").symlink_to("../../secret")
    with pytest.raises(TaskError):
        check_links(folder)


def _alias_bomb(merge: str) -> str:
    """YAML of 9 levels, each of which refers ten times to the one before."""
    first = "{k: 1}" if merge else "[x, y]"
    levels = (f"b{n}: &a{n} {{{merge}[{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9))
    text = "\n".join([f"a: &a0 {first}", *levels])
    return f"{text}\n" if merge else text.replace("{[", "[").replace("]}", "]") + "\n"


_WRONG: dict[str, tuple[str, str]] = {
    "aliases": ("task.yaml", _alias_bomb("") + "instruction: x\nmax_agent_timeout_sec: *a8\n"),
    "merged mappings": ("task.yaml", _alias_bomb("<<: ") + "instruction: x\n"),
    "merged services": ("docker-compose.yaml", _alias_bomb("<<: ") + "services: {a: {}}\n"),
    "a number of many digits": ("task.yaml", f"instruction: x\nmax_agent_timeout_sec: {'9' * 400}\n"),
    "no end": ("task.yaml", "instruction: x\nmax_agent_timeout_sec: .inf\n"),
    "a key of many parts": ("task.toml", f"{'a.' * 30_000}b = 1\n"),
    "a key of many parts after a quoted one": ("task.toml", f'"=".{"a." * 1000}b = 1\n'),
    "a key of many parts in a table": ("task.toml", f"x = {{{'a.' * 1000}b = 1}}\n"),
    "a number that is too long to be read": ("task.toml", f"[verifier]\ntimeout_sec = {'9' * 5000}\n"),
    "a timeout of many digits": ("task.toml", f"[verifier]\ntimeout_sec = {'9' * 400}\n"),
    "memory without an end": ("task.toml", "[environment]\nmemory_mb = inf\n"),
    "a hole": ("instruction.md", ""),
}


@pytest.mark.parametrize("attack", _WRONG)
def test_a_task_that_cannot_be_read_leaves_the_others(tmp_path: Path, attack: str) -> None:
    """Small files that need much time or memory, or numbers that are too large for their use."""
    name, text = _WRONG[attack]
    harbor = {"task.toml": "", "instruction.md": "x", "environment/Dockerfile": "FROM x", "tests/test.sh": "true"}
    older = {"task.yaml": "instruction: x", "Dockerfile": "FROM x", "run-tests.sh": "true", "tests/a.py": ""}
    for folder, files in (("good", harbor), ("wrong", (older if ".yaml" in name else harbor) | {name: text})):
        for each, content in files.items():
            (tmp_path / folder / each).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / each).write_text(content)
    if attack == "a hole":
        os.truncate(tmp_path / "wrong" / name, 200 << 20)
    for link in "abcdef":  # 40 levels of these are 10^31 folders
        (tmp_path / link).symlink_to(".")
    loaded = load_tasks(str(tmp_path), tmp_path / "cache")
    assert [task.name for task in loaded.tasks] == ["good"]
    assert [left_out.name for left_out in loaded.left_out] == ["wrong"]


@pytest.mark.parametrize("image", [None, "--help", "-a", "--volume=/:/host", "docker-archive:/root/x.tar", "dir:/etc"])
async def test_a_container_tool_gets_no_file_and_no_flag_of_a_task(tmp_path: Path, image: str | None) -> None:
    """The Dockerfile is a link (None), or the image's name is a flag or a path of this machine."""
    secret, tool, log = tmp_path / "secret", tmp_path / "tool", tmp_path / "log"
    secret.write_text("secret")
    tool.write_text(f'#!/bin/sh\n[ "$1" = info ] && exit 0\necho "$@" >> {log}\nexit 1\n')
    tool.chmod(0o755)
    (tmp_path / "environment").mkdir()
    dockerfile = tmp_path / "environment/Dockerfile"
    dockerfile.symlink_to(secret)
    recipe = ImageRecipe(dockerfile.parent, dockerfile if image is None else None, image)
    with pytest.raises(TaskError, match="is a link" if image is None else "is not the name of an image"):
        await ImageBuilder(tmp_path / "roots", tool=str(tool)).root(recipe)
    assert not log.exists()


@pytest.mark.parametrize(
    "dockerfile",
    [
        "FROM docker-archive:/root/x.tar",
        "FROM\tdir:/etc",
        "FROM --platform=linux/amd64 \\\n  oci:/srv/private",
        "ARG BASE=oci-archive:/root/x.tar\nFROM $BASE",
        "FROM ${BASE:-dir:/etc}",
        "ARG BASE=python\nFROM $BASE\nARG BASE=dir:/etc\nFROM $BASE",
        "ARG BASE=dir:/etc\nFROM python\nARG BASE=python\nFROM $BASE",
        "FROM python\nCOPY --chown=a --from=dir:/etc shadow /x",
        "FROM python\nRUN --mount=type=cache,target=/x --mount=type=bind,from=dir:/etc,target=/y cat /y/shadow",
        'FROM python\nRUN --mount=type=cache --mount=type=bind,"FROM=dir:/etc",target=/y cat /y/shadow',
    ],
)
async def test_a_dockerfile_names_no_files_of_this_machine_as_an_image(tmp_path: Path, dockerfile: str) -> None:
    tool, log, place = tmp_path / "tool", tmp_path / "log", tmp_path / "environment/Dockerfile"
    tool.write_text(f'#!/bin/sh\n[ "$1" = build ] && echo "$@" >> {log}\nexit 0\n')
    tool.chmod(0o755)
    place.parent.mkdir()
    place.write_text(f"{dockerfile}\n")
    with raises(TaskError, "Dockerfile, line "):
        await ImageBuilder(tmp_path / "roots", tool=str(tool)).root(ImageRecipe(place.parent, place))
    assert not log.exists()


@pytest.mark.parametrize(
    "dockerfile",
    [
        "# syntax=docker/dockerfile:1\nARG V=3.13\nFROM python:${V}-slim AS base\nFROM base\nCOPY --from=0 /a /b",
        "FROM scratch\nCOPY --from=ghcr.io/a/b:latest@sha256:" + "0" * 64 + " /a /b\nRUN <<E\nfrom x import y\nE",
    ],
)
def test_ordinary_names_of_images_are_accepted(dockerfile: str) -> None:
    check_images(dockerfile)


def test_instructions_of_a_dockerfile_stay_small() -> None:
    doubled = "FROM x\nENV A=xxxxxxxxxx\n" + "ENV A=$A$A$A$A$A$A$A$A$A$A\n" * 9
    with pytest.raises(TaskError, match="longer than 128 KiB"):
        image_config(parse(doubled)[-1].instructions)
    ((_, run),) = (stage.instructions for stage in parse("FROM x\nRUN " + "[" * 100_000))
    assert run.exec_form is None


def _git(*argv: str | Path) -> str:
    settings = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(["git", *settings, *map(str, argv)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("attack", ["above", "link", "git file", "alternates", "references"])
async def test_a_row_names_no_repository_of_this_machine(tmp_path: Path, attack: str) -> None:
    """Whose files would be in the workspace of its task."""
    private, data = tmp_path / "private", tmp_path / "data"
    _git("init", "-q", "-b", "main", private)
    (private / "secret").write_text("secret")
    _git("-C", private, "add", "-A")
    _git("-C", private, "commit", "-qm", "x")
    commit = _git("-C", private, "rev-parse", "HEAD").strip()
    _git("init", "-q", "-b", "main", data / "repo")
    named = "../private" if attack == "above" else "repo"
    match attack:
        case "link":
            shutil.rmtree(data / "repo")
            (data / "repo").symlink_to(private)
        case "git file":
            shutil.rmtree(data / "repo/.git")
            (data / "repo/.git").write_text(f"gitdir: {private}/.git\n")
        case "alternates":
            (data / "repo/.git/objects/info/alternates").write_text(f"{private}/.git/objects\n")
            (data / "repo/.git/refs/heads/main").write_text(f"{commit}\n")
        case "references":
            for name in ("objects", "refs"):
                shutil.rmtree(data / "repo/.git" / name)
                (data / "repo/.git" / name).symlink_to(private / ".git" / name)
    row = {
        "instance_id": "a__b-1", "repo": "a/b", "base_commit": commit, "problem_statement": "x", "repo_path": named,
        "kind": "oracle", "FAIL_TO_PASS": ["test_a.py::test_a"],
    }  # fmt: skip
    (data / "rows.jsonl").write_text(json.dumps(row))
    (found,) = load_rows(data / "rows.jsonl")
    if isinstance(found, SweRow):
        with pytest.raises(TaskError, match="outside of it"):
            await RepositoryCache(tmp_path / "cache").read_file(found, "secret")
    else:
        assert "folder of the data set" in str(found)
