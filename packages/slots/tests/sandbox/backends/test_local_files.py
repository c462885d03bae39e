"""Files of a slot from outside: what they return, what they refuse, and that no path leads out."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.slot import FileInfo, Slot
from palaestra_slots.sandbox.slotd.files import MAX_NESTED
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


def test_what_is_written_is_read(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        data = os.urandom(1_500_000)
        await slot.write_bytes("deep/er/data", data)
        assert await slot.read_bytes("/workspace/deep/er/data") == data
        assert await slot.read_bytes("deep/er/data", offset=1_400_000) == data[1_400_000:]
        assert (await slot.execute("stat -c '%U %a' deep/er deep/er/data")).output == "root 755\nroot 644\n"
        await slot.write_text("empty", "")
        assert await slot.read_text("empty") == ""
        assert await slot.read_text("nothing", missing="gone") == "gone"

    on_each_rung(body)


@pytest.fixture
def private_umask() -> Iterator[None]:
    """That of a careful user."""
    usual = os.umask(0o077)
    yield
    os.umask(usual)


def test_modes_do_not_depend_on_who_started_the_server(private_umask: None, on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.write_text("made/f", "")
        await slot.execute("mkdir own; : > own/f")
        assert (await slot.execute("stat -c %a made made/f own own/f")).output.split() == ["755", "644", "755", "644"]

    on_each_rung(body)


def test_writing_replaces_and_keeps_mode_and_owner(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("echo old > f; chmod 750 f; ln -s f link; exec 5< f; (sleep 0.1; cat <&5 > seen) &")
        await slot.write_text("link", "new")
        assert (await slot.execute("readlink link; cat f; stat -c %a f")).output == "f\nnew750\n"
        await slot.write_text("f", "x", mode=0o600)
        info = await slot.stat("f")
        assert info is not None
        assert (info.kind, info.size, info.mode) == ("file", 1, 0o600)
        names = [entry.path for entry in await slot.list_dir()]
        assert [name for name in names if name.startswith("/workspace/.")] == []

    with_slot(body)


def test_listing_and_description(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir d; echo abc > d/f; ln -s nowhere d/l; mkfifo d/p; touch d/$'caf\\xe9'")
        listed: list[FileInfo] = await slot.list_dir("d")
        assert [(entry.path, entry.kind) for entry in listed] == [
            ("/workspace/d/caf\udce9", "file"),
            ("/workspace/d/f", "file"),
            ("/workspace/d/l", "symlink"),
            ("/workspace/d/p", "other"),
        ]
        assert await slot.stat("d/l/x") is None
        assert await slot.stat("d/f/x") is None
        assert (await slot.read_text("d/caf\udce9")) == ""

    with_slot(body)


def test_a_name_may_be_as_long_as_names_can_be(on_each_rung: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        for name in ("n" * 255, "名" * 85):
            await slot.write_text(name, "in")
            assert await slot.read_text(name) == "in"
            assert await slot.download(name, tmp_path / name) == 2
            assert await slot.upload(tmp_path / name, name) == 2
        assert len(await slot.list_dir()) == len(list(tmp_path.iterdir())) == 2

    on_each_rung(body)


def test_a_claimed_terabyte_comes_as_what_is_there(on_each_rung: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        make = "import os\nf = open('f', 'wb'); f.truncate(1 << 40)\n"
        make += "for at in (5, 1 << 30, 1 << 39): f.seek(at); f.write(os.urandom(300_000)); f.flush()\n"
        made = await slot.execute(["python3", "-c", make])
        assert made.success, made.output
        assert await slot.download("f", tmp_path / "f") == (tmp_path / "f").stat().st_size == 1 << 40
        assert (tmp_path / "f").stat().st_blocks * 512 < 4 << 20
        look = "import sys\nf = open('f', 'rb')\nfor at in (0, 1 << 30, 1 << 39, (1 << 40) - 9):\n"
        look += "  f.seek(at - (at > 0) * 9); print(f.read(300_020).hex())"
        there = await slot.execute(["python3", "-c", look], max_output_bytes=4 << 20)
        here = await asyncio.create_subprocess_exec(
            sys.executable, "-c", look, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        assert there.output.encode() == (await here.communicate())[0]
        await slot.write_bytes("dense", os.urandom(1_000_001))
        assert await slot.download("dense", tmp_path / "dense") == 1_000_001
        assert (tmp_path / "dense").read_bytes() == await slot.read_bytes("dense")

    on_each_rung(body)


def test_what_is_nested_too_deep_is_left_to_commands(with_slot: WithSlot) -> None:
    """Each directory on the way takes a descriptor of the server's, which all slots share."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(
            ["python3", "-c", f"import os\nfor _ in range({MAX_NESTED + 10}): os.mkdir('n'); os.chdir('n')"]
        )
        with pytest.raises(OSError, match="nested more than"):
            await slot.remove("n")
        assert (await slot.execute("rm -rf n && ls")).output == ""

    with_slot(body)


def test_removal(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(
            "mkdir -p /tmp/outside d/e; touch /tmp/outside/kept d/e/f; ln -s /tmp/outside d/link; mkfifo d/p;"
            'python3 -c \'import os\nfor _ in range(700): os.mkdir("n"); os.chdir("n")\''
        )
        for path in ("d", "n", "never/was"):
            await slot.remove(path)
        assert await slot.list_dir() == []
        assert await slot.stat("/tmp/outside/kept") is not None
        with pytest.raises(OSError, match="root"):
            await slot.remove("/")

    with_slot(body)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none", FileNotFoundError),
        ("dir", IsADirectoryError),
        ("file/x", NotADirectoryError),
        ("fifo", PermissionError),
        ("/dev/zero", PermissionError),
        ("/proc/1/environ", PermissionError),
        ("loop", OSError),
        ("", FileNotFoundError),
        ("a\0b", OSError),
        ("a\ud800b", OSError),
        ("x" * 300, OSError),
        ("a/" * 2500, OSError),
    ],
)
def test_reading_what_is_no_file_is_a_plain_error(with_slot: WithSlot, path: str, error: type[OSError]) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir dir; touch file; mkfifo fifo; ln -s loop loop")
        with pytest.raises(error) as raised:
            await slot.read_bytes(path)
        assert raised.value.filename in (path, f"/workspace/{path}", ascii(path))
        assert (await slot.execute("echo ok")).output == "ok\n"

    with_slot(body)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("dir", IsADirectoryError),
        ("dir/", IsADirectoryError),
        ("fifo", OSError),
        ("file/x", NotADirectoryError),
        ("loop", OSError),
        ("/proc/sys/kernel/hostname", OSError),
        ("/dev/null", OSError),
        ("a/" * 2500 + "f", OSError),
    ],
)
def test_writing_over_what_is_no_file_is_a_plain_error(with_slot: WithSlot, path: str, error: type[OSError]) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir dir; touch file; mkfifo fifo; ln -s loop loop")
        with pytest.raises(error):
            await slot.write_bytes(path, b"x")
        assert (await slot.execute("echo ok")).output == "ok\n"

    with_slot(body)


def test_a_file_that_is_too_large_is_refused_with_the_limit(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("truncate -s 1T sparse; echo abc > small")
        with pytest.raises(OSError, match=r"1099511627776 .* 67108864") as raised:
            await slot.read_bytes("sparse")
        assert raised.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="limit of 3"):
            await slot.read_bytes("small", max_bytes=3)
        assert await slot.read_bytes("small", max_bytes=3, offset=1) == b"bc\n"

    with_slot(body)


def test_a_full_disk_is_an_error_and_leaves_no_piece(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        from palaestra_slots.core.types import Limits
        from palaestra_slots.sandbox.slot import SlotSpec

        small = await backend.create(SlotSpec(limits=Limits(disk_bytes=4 << 20)), "small")
        with pytest.raises(OSError, match="No space") as raised:
            await small.write_bytes("big", bytes(5 << 20))
        assert raised.value.errno == errno.ENOSPC
        assert await small.list_dir() == []
        assert (await small.execute("head -c 6000000 /dev/zero > f")).exit_code != 0
        await slot.write_text("other", "fine")

    with_slot(body)


def test_no_path_leads_out_of_the_slot(on_each_rung: WithSlot, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(
            f"ln -s {secret} abs; ln -s ../../../../../../..{secret} rel; ln -s / root; ln -s /proc/1/root r"
        )
        for path in ("abs", "rel", f"root{secret}", f"r{secret}", f"../../../..{secret}", f"/proc/self/root{secret}"):
            with pytest.raises(OSError):
                await slot.read_bytes(path)
        await slot.write_text(f"root{secret}", "slot")
        await slot.write_text("abs", "slot")
        assert (await slot.execute(["cat", str(secret)])).output == "slot"

    on_each_rung(body)
    assert secret.read_text() == "host"


def test_a_race_of_links_leads_nowhere(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(
            "mkdir real; echo inside > real/passwd; (while :; do ln -sfn real x; ln -sfn /etc x; done) &"
        )
        for _ in range(300):
            try:
                text = await slot.read_text("x/passwd")
            except OSError:
                continue
            assert text == "inside\n" or text.startswith("root:x:0:0:root:/root:/bin/bash\ndaemon:")

    with_slot(body)


def test_a_link_for_a_folder_right_below_the_root_is_resolved_inside(with_slot: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(f"mkdir -p {tmp_path}; ln -s ../../workspace /near; ln -s {tmp_path} /far; ln -s / /whole")
        for name, found in (("near", "/workspace"), ("far", str(tmp_path)), ("whole", "")):
            await slot.write_text(f"/{name}/written-{name}", name)
            assert await slot.read_text(f"{found}/written-{name}") == name
        with pytest.raises(NotADirectoryError):
            await slot.write_text("/workspace/written-near/x", "x")

    with_slot(body)
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_upload_leaves_nothing(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        writing = asyncio.ensure_future(slot.write_bytes("big", bytes(40 << 20)))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await slot.list_dir() == []

    with_slot(body)


def test_an_upload_of_what_cannot_be_read_to_its_end_leaves_nothing(with_slot: WithSlot, tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "the disk is broken")
            return super().read(size)

    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        with raises(OSError):
            await slot.requests.upload_file({**slot.lease(), "path": "f"}, Failing(bytes(8 << 20)))
        assert (await slot.execute("ls -A")).output == ""

    with_slot(body)


def test_set_id_bits_can_be_written_but_gain_nothing(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.write_text("f", "", mode=0o4755)
        info = await slot.stat("f")
        assert info is not None
        assert info.mode == 0o4755
        assert stat.S_ISUID & info.mode
        assert "nosuid" in (await slot.execute("grep ' / ' /proc/mounts")).output

    with_slot(body)
