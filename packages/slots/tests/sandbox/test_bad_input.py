"""What cannot work is refused with an error of its kind, which names the thing and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra_slots.core.errors import ConfigError, ImageError, SandboxError, StaleLease
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Slot, SlotSpec, Snapshot, View
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes rights away from a child, which needs root")


def test_a_slot_of_another_epoch(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await backend.destroy(slot)
        for call in (slot.execute("true"), slot.write_text("f", "x"), slot.stat("f"), backend.checkpoint(slot)):
            with pytest.raises(StaleLease, match=rf"{slot.slot_id} \(epoch {slot.epoch}\) has ended"):
                await call

    with_slot(body)


def test_paths_that_lead_out_name_what_is_in_the_slot(on_each_rung: WithSlot, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        for path in (f"../../../../..{tmp_path}/secret", f"{tmp_path}/secret", "/proc/1/root/etc/shadow"):
            with pytest.raises(OSError) as caught:
                await slot.read_bytes(path)
            assert caught.value.errno in (errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EXDEV)
            assert str(caught.value.filename).endswith(("secret", "shadow"))
        for path, number in (("", errno.ENOENT), ("a\0b", errno.EINVAL), ("x" * 5000, errno.ENAMETOOLONG)):
            with pytest.raises(OSError) as caught:
                await slot.read_bytes(path)
            assert caught.value.errno == number
        shell = await slot.shell(cwd="/nowhere")
        for start in (slot.execute("true", cwd="/nowhere"), slot.spawn("true", cwd="/nowhere"), shell.run("true")):
            with raises(FileNotFoundError, "/nowhere"):
                await start

    on_each_rung(body)


def test_numbers_that_mean_nothing(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        for timeout_s in (-1.0, 0.0, float("nan"), float("inf")):
            with raises(ValueError, "timeout_s", timeout_s):
                await slot.execute("true", timeout_s=timeout_s)
        with pytest.raises(ValueError, match="max_output_bytes"):
            await slot.execute("true", max_output_bytes=-1)
        with pytest.raises(ValueError, match="negative"):
            await slot.read_bytes("f", offset=-1)
        with pytest.raises(ValueError, match="argv"):
            await slot.execute([])

    with_slot(body)


def test_a_long_time_is_no_bug(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        for timeout_s in (2.2e6, 1e18):
            assert (await slot.execute("echo hi", timeout_s=timeout_s)).output == "hi\n"
        shell = await slot.shell()
        assert (await shell.run("echo hi", timeout_s=1e7)).output == "hi\n"

    with_slot(body)


@pytest.mark.parametrize("image", ["", "/", "/.", "/etc"])
def test_what_is_no_root_file_system_of_its_own(with_slot: WithSlot, image: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(ImageError, match=f"the image '{image}'"):
            await backend.create(SlotSpec(image=image), "x")

    with_slot(body)


@pytest.mark.parametrize("image", ["roots/private", "backup.tar"])
def test_the_name_of_an_image_selects_nothing_in_the_working_directory(
    with_slot: WithSlot, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roots/private/bin").mkdir(parents=True)
    with tarfile.open(tmp_path / "backup.tar", "w") as archive:
        archive.add(tmp_path / "roots/private", ".")
    monkeypatch.chdir(tmp_path)

    async def body(backend: LocalBackend, slot: Slot) -> None:
        with raises(ImageError, image):
            await backend.create(SlotSpec(image=image), "x")
        await backend.destroy(await backend.create(SlotSpec(image=f"./{image}"), "x"))

    with_slot(body)


@pytest.mark.parametrize("name", ["memory_bytes", "cpus", "pids", "disk_bytes", "open_files"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none(name: str, value: float) -> None:
    with raises(ValueError, name, value):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_a_limit_is_a_whole_number_however_it_is_written() -> None:
    limits = Limits(memory_bytes=1e9, pids=64.0, cpus=0.5)  # type: ignore[arg-type]
    assert (limits.memory_bytes, limits.pids, limits.cpus) == (10**9, 64, 0.5)
    assert isinstance(limits.memory_bytes, int)
    with raises(ValueError, "disk_bytes"):
        Limits(disk_bytes=1.5)  # type: ignore[arg-type]


def test_images_and_mounts_that_are_not_there(with_slot: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        missing = str(tmp_path / "missing")
        with pytest.raises(ConfigError, match=f"image '{missing}'.* give "):
            await backend.create(SlotSpec(image=missing), "x")
        with pytest.raises(ConfigError, match=f"{missing}.*not a directory"):
            await backend.create(SlotSpec(mounts=(Mount(missing, "/opt/x"),)), "x")
        with pytest.raises(FileNotFoundError, match="missing"):
            await backend.load(missing, SlotSpec())
        assert (await slot.execute("echo usable")).output == "usable\n"

    with_slot(body)


def test_snapshots_that_nobody_has(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        foreign = Snapshot("layer-0", ("layer-0",), SlotSpec())
        for call in (backend.create(SlotSpec(), "x", foreign), backend.view(foreign, View()), backend.changes(foreign)):
            with pytest.raises(SandboxError, match="layer-0"):
                await call

    with_slot(body)


def test_a_full_disk_names_the_file(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        small = await backend.create(SlotSpec(limits=Limits(disk_bytes=1 << 20)), "small")
        with pytest.raises(OSError) as caught:
            await small.write_bytes("big/file", bytes(4 << 20))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/workspace/big/file")
        assert [entry.path for entry in await small.list_dir("big")] == []

    on_each_rung(body)


START = """
import asyncio, sys
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
async def main():
    try:
        async with LocalBackend(rung=Rung[sys.argv[1]]) as backend:
            await backend.create(SlotSpec(image=sys.argv[2] if len(sys.argv) > 2 else None), "x")
    except PalaestraError as error:
        print(type(error).__name__, error.exit_code, error)
asyncio.run(main())
"""


def start_in(world: str, *arguments: str) -> str:
    """What a start says in a mount namespace of its own that a shell script has changed first."""
    command = [*("unshare", "-m", "--propagation", "private", "sh", "-ec", f'{world}\nexec "$@"', "sh")]
    ran = subprocess.run(
        [*command, sys.executable, "-c", START, *arguments], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@needs_root
def test_no_right_to_control_groups() -> None:
    said = start_in(
        "for m in /sys/fs/cgroup/* /sys/fs/cgroup; do mountpoint -q $m && mount -o remount,ro,bind $m; done", "FULL"
    )
    assert said.startswith("IsolationUnavailable 5 ")
    assert "control groups cannot be made: Read-only file system: /sys/fs/cgroup" in said
    assert "userns" in said


@needs_root
def test_no_control_groups_at_all() -> None:
    said = start_in("umount -R -l /sys/fs/cgroup", "FULL")
    assert said.startswith("IsolationUnavailable 5 ")
    check_message(said, "hierarchy")


@needs_root
def test_no_user_namespaces() -> None:
    deny = "mount -t proc none /proc; echo 0 > /proc/sys/user/max_user_namespaces"
    ran = subprocess.run(
        ["unshare", "-Urpf", "-m", "sh", "-ec", f'{deny}\nexec "$@"', "sh", sys.executable, "-c", START, "USERNS"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if ran.returncode != 0:
        pytest.skip(f"no user namespace to take rights away in: {ran.stderr[-200:]}")
    assert ran.stdout.startswith("IsolationUnavailable 5 ")
    assert "user namespaces" in ran.stdout


@needs_root
def test_a_file_system_that_no_overlay_takes(tmp_path: Path) -> None:
    """As on a kernel without overlay: the mount is refused. An overlay of overlays is one too many."""
    stack = f"cd {tmp_path}; mkdir base l u1 w1 u2 w2; mount -t tmpfs none base; cd base\n"
    stack += "mkdir -p a/usr u1 w1 u2 w2 m1 m2\n"
    stack += "mount -t overlay -o lowerdir=a,upperdir=u1,workdir=w1 none m1\n"
    stack += "mount -t overlay -o lowerdir=m1,upperdir=u2,workdir=w2 none m2"
    said = start_in(stack, "FULL", str(tmp_path / "base/m2"))
    assert said.startswith(("SandboxError 1 ", "ConfigError 2 ", "IsolationUnavailable 5 "))
    assert "overlay" in said or "owners cannot be mapped" in said


def test_paths_may_be_objects_and_text_is_no_bytes(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.write_text(Path("/tmp/d/f"), "x")  # type: ignore[arg-type]
        assert await slot.read_text(Path("/tmp") / "d" / "f") == "x"  # type: ignore[call-overload]
        assert (await slot.execute("pwd", cwd=Path("/tmp/d"))).output == "/tmp/d\n"  # type: ignore[arg-type]
        assert (await slot.execute("cat", stdin="ü")).output == "ü"
        with raises(TypeError, "str"):
            await slot.write_bytes("f", "x")  # type: ignore[arg-type]
        with raises(TypeError, "str"):
            await slot.write_bytes("f", "x" * (1 << 20))  # type: ignore[arg-type]
        with raises(TypeError, "bytes"):
            await slot.read_bytes(b"f")  # type: ignore[arg-type]
        assert (await slot.execute("ls -A")).output == ""

    on_each_rung(body)


CROWD = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
async def main():
    async with LocalBackend(rung=Rung[sys.argv[1]]) as backend:
        slots = []
        try:
            while True:
                slots.append(await backend.create(SlotSpec(), "x"))
        except SandboxError as error:
            print(error)
        results = await asyncio.gather(*(slot.execute("sleep 0.2; echo ran") for slot in slots[:16]))
        print({result.output for result in results})
        await backend.destroy(slots.pop())
        slots.append(await backend.create(SlotSpec(), "x"))
        stats = (await slots[0].requests.call("stats", {})).fields
        print(stats["slots"] == stats["live"] == len(slots) >= 32)
asyncio.run(main())
"""


@pytest.mark.parametrize("rung", ["FULL", "USERNS", "CONFINED"])
def test_descriptors_end_before_slots_do(rung: str) -> None:
    ran = subprocess.run([sys.executable, "-c", CROWD, rung], capture_output=True, text=True, timeout=60)
    if "IsolationUnavailable" in ran.stderr:
        pytest.skip(ran.stderr[-300:])
    full, outputs, whole = ran.stdout.splitlines()
    assert "out of at most 256" in full
    assert (outputs, whole) == ("{'ran\\n'}", "True")


FEW = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung
try:
    asyncio.run(LocalBackend(rung=Rung[sys.argv[1]]).start())
except IsolationUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize("rung", ["FULL", "USERNS", "CONFINED", "NONE"])
def test_too_few_descriptors_are_no_slots_and_no_failed_commands(rung: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FEW, rung], capture_output=True, text=True, timeout=60)
    assert "only 100 files may be open" in ran.stdout
