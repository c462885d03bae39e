"""Files and directories of this machine into a slot and out again, byte for byte, whatever they are called."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from palaestra_slots.sandbox.transfer import download_dir, upload_dir
from sandbox.bodies import Body

pytestmark = pytest.mark.slots

NAMES = ["plain", "with space", "new\nline", "ünïcode", "-dash", "qu'o\"te", "$(touch x)", "caf\udce9", ".hidden"]


@pytest.fixture(params=[Rung.FULL, Rung.USERNS, Rung.CONFINED, Rung.NONE], ids=lambda rung: rung.label)
def rung(request: pytest.FixtureRequest) -> Rung:
    return Rung(request.param)


def run_on(rung: Rung, body: Body) -> None:
    async def main() -> None:
        backend = LocalBackend(rung=rung)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            await body(backend, await backend.create(SlotSpec(), "test"))

    asyncio.run(main())


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree(top: Path) -> dict[str, object]:
    """What a directory holds: contents, targets, permission bits."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            key = str(path.relative_to(top))
            if stat.S_ISLNK(status.st_mode):
                found[key] = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                found[key] = (stat.S_IMODE(status.st_mode), path.read_bytes())
            elif stat.S_ISDIR(status.st_mode):
                found[key] = "directory"
    return found


@pytest.mark.slow
def test_a_large_file_goes_up_and_down_unchanged(rung: Rung, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    with source.open("wb") as file:
        for _ in range(50):
            file.write(os.urandom(1 << 20) * 4)  # 200 MiB, and no piece like another
    source.chmod(0o640)

    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert await slot.upload(source, "deep/big") == 200 << 20
        info = await slot.stat("deep/big")
        assert info is not None
        assert (info.size, info.mode) == (200 << 20, 0o640)
        assert await slot.download("deep/big", back) == 200 << 20

    run_on(rung, body)
    assert digest(back) == digest(source)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_with_odd_names_comes_back_as_it_was(rung: Rung, tmp_path: Path) -> None:
    there = tmp_path / "there"
    for folder in ("", "sub dir", "sub dir/déep\n", "empty"):
        (there / folder).mkdir(parents=True)
    for number, name in enumerate(NAMES):
        path = there / ("sub dir" if number % 2 else "") / name
        path.write_bytes(os.urandom(number * 1000))
        path.chmod(0o600 + number)
    (there / "nothing").write_bytes(b"")
    (there / "a link").symlink_to("sub dir/new\nline")
    (there / "dangling").symlink_to("/no/such")
    (there / "to a directory").symlink_to("sub dir")
    os.mkfifo(there / "fifo")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        sent = await upload_dir(slot, there, "in")
        assert sent.left_out == [str(there / "fifo")]
        got = await download_dir(slot, "in", tmp_path / "back")
        assert (got.files, got.size) == (sent.files, sent.size)
        again = await download_dir(slot, "in", tmp_path / "back")  # over what is there, links included
        assert (again.files, again.size) == (sent.files, sent.size)

    run_on(rung, body)
    assert tree(tmp_path / "back") == tree(there)


def test_what_an_agent_left_cannot_lead_a_download_elsewhere(tmp_path: Path) -> None:
    outside, back = tmp_path / "outside", tmp_path / "back"
    outside.mkdir()
    (back / "d").parent.mkdir()
    (back / "d").symlink_to(outside)
    (back / "f").symlink_to(outside / "f")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir -p out/d; echo x > out/d/x; echo f > out/f; mkfifo out/p; ln -s /etc out/etc")
        done = await download_dir(slot, "out", back)
        assert done.left_out == ["/workspace/out/p"]

    run_on(Rung.USERNS, body)
    assert list(outside.iterdir()) == []
    assert (back / "d/x").read_text() == "x\n"
    assert os.readlink(back / "etc") == "/etc"


def test_what_cannot_be_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(FileNotFoundError):
            await slot.download("nothing", tmp_path / "x")
        with pytest.raises(FileNotFoundError):
            await slot.upload(tmp_path / "nothing", "x")
        with pytest.raises(IsADirectoryError):
            await slot.download("/tmp", tmp_path / "x")
        with pytest.raises(NotADirectoryError):
            await download_dir(slot, "/etc/passwd", tmp_path / "d")
        await slot.write_text("file", "")
        with pytest.raises(NotADirectoryError):
            await upload_dir(slot, tmp_path, "file/in")
        await slot.make_link("link", "first")
        await slot.make_link("link", "second")
        await slot.make_dir("folder")
        with pytest.raises(OSError, match="/workspace/folder"):
            await slot.make_link("/workspace/folder", "x")
        described = await slot.stat("link")
        assert described is not None
        assert (described.kind, described.target) == ("symlink", "second")

    run_on(Rung.USERNS, body)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
