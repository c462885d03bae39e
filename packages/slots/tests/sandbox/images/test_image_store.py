"""Images from files: what is unpacked is what the format says, stays inside, and is unpacked once."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ImageError
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.server_backend import environment
from palaestra_slots.sandbox.slot import SlotSpec

Entry = tuple[str, bytes | str | None]
"""A name, and its bytes; None for a directory, `-> x` for a link, `=> x` for a hard link."""

ROOT: list[Entry] = [("usr", None), ("usr/bin", None), ("usr/bin/tool", b"#!x"), ("bin", "-> usr/bin")]


def tar(entries: Sequence[Entry], change: Callable[[tarfile.TarInfo], None] = lambda _: None) -> bytes:
    """A layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.SYMTYPE if content.startswith("-> ") else tarfile.LNKTYPE
                info.linkname = content[3:]
            else:
                info.size = len(content)
            change(info)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def layout(folder: Path, layers: Sequence[bytes], config: object = None) -> Path:
    """An OCI layout."""
    (folder / "blobs" / "sha256").mkdir(parents=True)

    def put(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / "sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    about = {} if config is None else {"config": put(json.dumps({"config": config}).encode())}
    content = {"schemaVersion": 2, "layers": [put(layer) for layer in layers], **about}
    manifest = put(json.dumps(content).encode())
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    return folder


def directory(store: Path, image: Path, **limits: int) -> Path:
    """Where the image is unpacked."""

    async def main() -> str:
        images = ImageStore(str(store), **limits)
        try:
            return await images.directory(str(image))
        finally:
            await images.aclose()

    return Path(asyncio.run(main()))


def test_a_root_in_a_tar_file(tmp_path: Path) -> None:
    def owned(info: tarfile.TarInfo) -> None:
        info.uid, info.gid, info.mtime = 7, 100_000, 1_000_000
        info.mode = 0o4755 if info.name.endswith("tool") else info.mode

    image = tmp_path / "root.tar.gz"
    entries = [*ROOT, ("bin/more", b"through a link"), ("usr/hard", "=> usr/bin/tool"), ("./etc/deep/x", b"1")]
    image.write_bytes(gzip.compress(tar(entries, owned)))
    root = directory(tmp_path / "store", image)
    assert (root / "usr/bin/tool").read_bytes() == b"#!x"
    assert (root / "usr/bin/more").read_bytes() == b"through a link"
    assert (root / "usr/hard").stat().st_ino == (root / "usr/bin/tool").stat().st_ino
    assert (root / "etc/deep/x").read_bytes() == b"1"
    status = (root / "usr/bin/tool").stat()
    assert status.st_mode & 0o7777 == 0o755
    assert status.st_mtime == (root / "usr").stat().st_mtime == 1_000_000
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (7, 65534)


def test_layers_of_an_oci_layout(tmp_path: Path) -> None:
    first = tar([*ROOT, ("a", None), ("a/gone", b"1"), ("a/kept", b"2"), ("b", None), ("b/old", b"3"), ("c", b"file")])
    second = tar([("a/.wh.gone", b""), ("b/new", b"4"), ("b/.wh..wh..opq", b""), ("c", None), ("c/now", b"5")])
    image = layout(tmp_path / "oci", [gzip.compress(first), second])
    root = directory(tmp_path / "store", image)
    assert sorted(os.listdir(root / "a")) == ["kept"]
    assert sorted(os.listdir(root / "b")) == ["new"]
    assert (root / "c/now").read_bytes() == b"5"
    packed = tmp_path / "oci.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(image, ".")
    again = directory(tmp_path / "store", packed)
    assert again != root
    assert (again / "c/now").read_bytes() == b"5"


def test_what_docker_save_writes(tmp_path: Path) -> None:
    image = tmp_path / "saved.tar"
    manifest = json.dumps([{"Config": "c.json", "RepoTags": None, "Layers": ["1/layer.tar", "2/layer.tar"]}]).encode()
    layers = [("1/layer.tar", tar(ROOT)), ("2/layer.tar", tar([("usr/bin/.wh.tool", b"")]))]
    image.write_bytes(tar([*layers, ("c.json", b"{}"), ("manifest.json", manifest)]))
    root = directory(tmp_path / "store", image)
    assert os.listdir(root / "usr/bin") == []


@pytest.mark.parametrize(
    "entries",
    [
        [("../evil", b"x")],
        [("a", "-> ../../.."), ("a/evil", b"x")],
        [("a", "-> /"), ("a/evil", b"x")],
        [("a", "-> .."), ("b", "=> a/../../etc/hostname")],
        [("usr/evil", "=> /etc/hostname")],
        [("/".join("d" * 300), None)],
    ],
)
def test_nothing_is_written_outside(tmp_path: Path, entries: list[Entry]) -> None:
    image = tmp_path / "root.tar"
    image.write_bytes(tar([*ROOT, *entries]))
    with contextlib.suppress(ImageError):
        directory(tmp_path / "store", image)
    assert sorted(os.listdir(tmp_path)) in (["root.tar", "store"], ["root.tar"])
    assert not os.path.lexists("/evil")
    assert not any("evil" in name for name in os.listdir(tmp_path / "store"))


@pytest.mark.parametrize("name", [".wh...", "usr/.wh...", "usr/.wh..", "usr/bin/.wh."])
def test_a_whiteout_hides_only_an_entry_of_its_directory(tmp_path: Path, name: str) -> None:
    """`..` would be the directory that holds the images."""
    kept = tmp_path / "store/partial/kept"
    kept.mkdir(parents=True)
    image = layout(tmp_path / "image", [tar(ROOT), tar([(name, b"")])])
    with pytest.raises(ImageError, match="whiteout"):
        directory(tmp_path / "store", image)
    assert kept.is_dir()


def test_what_cannot_be_an_image_is_named(tmp_path: Path) -> None:
    whole = tar(ROOT)
    zstd = layout(tmp_path / "zstd", [b"\x28\xb5\x2f\xfd" + bytes(600)])
    damaged = layout(tmp_path / "damaged", [whole])
    for blob in (damaged / "blobs/sha256").iterdir():
        if blob.stat().st_size > 2000:
            blob.write_bytes(whole[:-1] + b"x")
    cases = {
        "junk.tar": b"junk" * 1000, "empty.tar": b"",
        "cut.tar.gz": gzip.compress(tar([*ROOT, ("f", os.urandom(9000))]))[:5000],
        "cut.tar": tar([*ROOT, ("f", bytes(90_000))])[:40_000], "rootless.tar": tar([("readme", b"x")]),
    }  # fmt: skip
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
    for image in (*(tmp_path / name for name in cases), zstd, damaged, tmp_path / "missing.tar"):
        with pytest.raises(ImageError, match=image.name):
            directory(tmp_path / "store", image)
    assert os.listdir(tmp_path / "store/partial") == []


def test_an_image_that_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    image = tmp_path / "large.tar"
    image.write_bytes(tar([*ROOT, ("usr/large", bytes(100_000))]))
    with pytest.raises(ImageError, match=r"large\.tar.*50000 bytes"):
        directory(tmp_path / "store", image, max_image_bytes=50_000)
    assert os.listdir(tmp_path / "store/partial") == []


def test_a_file_is_unpacked_once_and_anew_when_it_has_changed(tmp_path: Path) -> None:
    image, store = tmp_path / "root.tar", tmp_path / "store"
    image.write_bytes(tar(ROOT))
    first = directory(store, image)
    before = first.stat().st_ino
    shutil.copy(image, tmp_path / "same.tar")
    assert directory(store, image) == directory(store, tmp_path / "same.tar") == first
    assert first.stat().st_ino == before
    image.write_bytes(tar([*ROOT, ("new", b"")]))
    assert (directory(store, image) / "new").exists()


async def test_what_is_used_least_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    images = [tmp_path / f"{number}.tar" for number in range(3)]
    for number, image in enumerate(images):
        image.write_bytes(tar([*ROOT, (f"usr/{number}", bytes(1000))]))
    in_use = ImageStore(str(tmp_path / "store"), max_bytes=2500)
    other = ImageStore(str(tmp_path / "store"), max_bytes=2500)
    first = await in_use.directory(str(images[0]))
    second = await other.directory(str(images[1]))
    await other.aclose()
    os.utime(f"{first}.json", (1, 1))  # used longest ago, and still in use
    third = await other.directory(str(images[2]))
    assert (os.path.isdir(first), os.path.isdir(second), os.path.isdir(third)) == (True, False, True)
    await in_use.aclose()
    await other.aclose()


async def test_an_image_that_another_process_removes_is_no_error(tmp_path: Path) -> None:
    images = [tmp_path / f"{number}.tar" for number in range(3)]
    for number, image in enumerate(images):
        image.write_bytes(tar([*ROOT, (f"usr/{number}", bytes(1000))]))
    store = ImageStore(str(tmp_path / "store"), max_bytes=2500)
    first = await store.directory(str(images[0]))
    await store.aclose()
    shutil.rmtree(first)  # its record stays, as after a kill between the two
    for image in images[1:]:
        assert os.path.isdir(await store.directory(str(image)))
    assert not os.path.exists(f"{first}.json")
    await store.aclose()


def _unpack(store: str, image: str) -> None:
    assert (directory(Path(store), Path(image)) / "usr/large").stat().st_size == 3_000_000


def test_many_processes_unpack_one_image_once(tmp_path: Path) -> None:
    image = tmp_path / "root.tar"
    image.write_bytes(tar([*ROOT, ("usr/large", bytes(3_000_000))]))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_unpack, args=(str(tmp_path / "store"), str(image))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert os.listdir(tmp_path / "store/partial") == []


async def test_a_caller_that_gives_up_leaves_nothing_half_done(tmp_path: Path) -> None:
    image = tmp_path / "root.tar"
    image.write_bytes(tar([*ROOT, *((f"usr/{number}", bytes(100)) for number in range(20_000))]))
    store = ImageStore(str(tmp_path / "store"))
    asking = asyncio.ensure_future(store.directory(str(image)))
    partial = tmp_path / "store/partial"
    while not partial.exists() or not os.listdir(partial):  # noqa: ASYNC110 - a thread makes it
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await store.aclose()
    assert os.listdir(tmp_path / "store/partial") == []


AT_EXIT = """
import asyncio, atexit, sys
from palaestra_slots.sandbox.images.image_store import ImageStore
loop, store = asyncio.new_event_loop(), ImageStore(sys.argv[1])
print(loop.run_until_complete(store.directory(sys.argv[2])))
atexit.register(lambda: loop.run_until_complete(store.aclose()))
"""


def test_images_are_released_while_the_interpreter_exits(tmp_path: Path) -> None:
    """A script's tools that it never closed end then, when no thread can be started any more."""
    image = tmp_path / "root.tar"
    image.write_bytes(tar(ROOT))
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "store"), str(image)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert str(tmp_path / "store") in ended.stdout
    assert ended.stderr == ""


def test_layers_of_zstd_are_unpacked(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lowest, upper = (
        tar([*ROOT, ("usr/data", os.urandom(70_000) * 3)]),
        tar([("usr/bin/more", b"more"), ("link", "=> usr/bin/more")]),
    )
    half = len(upper) // 2
    frames = zstandard.compress(upper[:half]) + zstandard.compress(upper[half:])
    root = directory(tmp_path / "store", layout(tmp_path / "image", [zstandard.compress(lowest), frames]))
    assert (root / "usr/data").stat().st_size == 210_000
    assert (root / "link").read_bytes() == b"more"
    bomb = zstandard.ZstdCompressor(level=19).compress(tar([*ROOT, ("usr/zeros", bytes(9 << 20))]))
    assert len(bomb) < 10_000
    with pytest.raises(ImageError, match="larger than"):
        directory(tmp_path / "store", layout(tmp_path / "bomb", [bomb]), max_image_bytes=4 << 20)
    window = b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(600)  # a window of 2 GiB
    with raises(ImageError):
        directory(tmp_path / "store", layout(tmp_path / "window", [window]))


@pytest.mark.parametrize(
    ("name", "made", "found"),
    [
        ("debian-12-python3-pandas", ("debian-12-python3-pandas.tar", "debian-12-python3-pandas.json"), True),
        ("debian-12", ("debian-12/", "debian-12.json"), True),
        ("debian-12", ("debian-12.tar",), False),  # nothing says that it is one
        ("debian-13", ("debian-12.tar", "debian-12.json"), False),
        ("sub/debian-12", ("sub/debian-12.tar", "sub/debian-12.json"), False),
        ("debian:12", ("debian:12.tar", "debian:12.json"), False),
    ],
)
def test_a_made_root_file_system_has_its_name(name: str, made: Sequence[str], found: bool, tmp_path: Path) -> None:
    """The name is the one that `palaestra images list` shows; it selects nothing else of this machine."""
    roots = tmp_path / "roots"
    for each in made:
        (roots / each).parent.mkdir(parents=True, exist_ok=True)
        if each.endswith("/"):
            (roots / each / "usr").mkdir(parents=True)
        else:
            (roots / each).write_bytes(b"{}" if each.endswith(".json") else tar(ROOT))

    async def directory() -> str:
        store = ImageStore(str(tmp_path / "unpacked"), pulled=tmp_path / "pulled", made=roots)
        try:
            return await store.directory(name)
        finally:
            await store.aclose()

    if found:
        assert (Path(asyncio.run(directory())) / "usr").is_dir()
    else:
        with pytest.raises(ImageError, match="not pulled"):
            asyncio.run(directory())


@pytest.mark.parametrize(
    ("config", "variables"),
    [
        ({"Env": ["PATH=/opt/go/bin:/usr/bin", "GOFLAGS=-mod=mod", "EMPTY="]},
         {"PATH": "/opt/go/bin:/usr/bin", "GOFLAGS": "-mod=mod", "EMPTY": ""}),
        ({"Env": ["NOTHING", "=x", "A=1\0B=2", "C=3", "LD_PRELOAD=/lib/x.so", "LD_AUDIT=/lib/x.so"]}, {"C": "3"}),
        ({"Env": None}, {}),
        ({}, {}),
        (["no object"], {}),
        (None, {}),
    ],
)  # fmt: skip
def test_an_image_states_variables_also_to_later_runs(
    config: object, variables: dict[str, str], tmp_path: Path
) -> None:
    image = layout(tmp_path / "oci", [tar(ROOT)], config)

    async def stated(record: Callable[[Path], None]) -> dict[str, str]:
        images = ImageStore(str(tmp_path / "store"))
        try:
            found = dict(images.variables(await images.directory(str(image))))
            record(next((tmp_path / "store").glob("*.json")))
            return found
        finally:
            await images.aclose()

    def as_earlier_versions_wrote_it(path: Path) -> None:
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "env"}))

    for record in (lambda _: None, as_earlier_versions_wrote_it, lambda _: None):
        assert asyncio.run(stated(record)) == variables


def test_the_variables_of_an_image_stand_below_those_of_the_slot() -> None:
    spec = SlotSpec(image="x", env=(("HOME", "/work"), ("PATH", "/own")))
    of_image = {"PATH": "/image", "HOME": "/image", "LANG": "C", "JAVA_HOME": "/opt/java"}
    made = environment(spec, "/usual", of_image)
    assert (made["PATH"], made["HOME"], made["LANG"], made["JAVA_HOME"]) == ("/own", "/work", "C", "/opt/java")
    assert environment(SlotSpec(image="x"), "/usual", of_image)["PATH"] == "/image"
    assert environment(SlotSpec(), "/usual")["PATH"] == "/usual"
