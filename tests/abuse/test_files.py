"""Files: too large, too many, too deep, not files at all, and not one's own."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from abuse.arena import Arena, python
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec

pytestmark = [pytest.mark.slots, pytest.mark.slow]


@pytest.mark.contained_on("full", "userns")
def test_a_full_disk_is_the_slots_own(arena: Arena) -> None:
    """Without namespaces one file is bounded, their sum is not: three of 20 MB fit where 32 MiB are allowed."""

    async def case(slot: Slot) -> None:
        if not arena.contained:
            result = await slot.execute(
                "for n in 1 2 3; do head -c 20000000 /dev/zero > f$n; done; du -cb f? | tail -1"
            )
            assert result.output == "60000000\ttotal\n"
        result = await slot.execute("head -c 100000000 /dev/zero > big || echo refused; rm -f f?")
        assert "refused" in result.output
        if not arena.contained:
            return
        assert "No space left" in result.output
        with pytest.raises(OSError, match="space"):
            await slot.write_bytes("more", bytes(8 << 20))
        await slot.execute("rm big")
        await slot.write_bytes("more", b"fits")

    arena.face(case, memory_bytes=512 << 20)


@pytest.mark.contained_on("full", "userns")
def test_inodes_run_out_before_the_machine_does(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        result = await slot.execute("seq 20000 | xargs touch; rm -rf *")
        assert ("No space left" in result.output) == arena.contained

    arena.face(case, memory_bytes=512 << 20)


@pytest.mark.contained_on("full", "userns")
def test_extended_attributes_take_no_more_than_the_disk(arena: Arena) -> None:
    """They are kernel memory, which the size of a tmpfs does not count."""
    fill = """
import os
written = 0
for place in ('.', '/tmp', '/dev/shm'):
    try:
        for n in range(20000):
            open(f'{place}/{n}', 'w').close()
            for name in 'abcdefgh': os.setxattr(f'{place}/{n}', f'user.{name}', b'x' * 60000); written += 60000
    except OSError: pass
print(written >> 20)
"""

    async def case(slot: Slot) -> None:
        if arena.contained:  # otherwise it takes all memory of the machine
            assert int((await python(slot, fill)).output) <= 64

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_path_too_deep_to_name_is_dropped_with_its_slot(arena: Arena) -> None:
    deep = "import os\nfor _ in range(600): os.mkdir('n' * 200); os.chdir('n' * 200)"

    async def case(slot: Slot) -> None:
        assert (await python(slot, deep)).success
        started = time.monotonic()
        await arena.backend.destroy(slot)
        assert time.monotonic() - started < 2

    arena.face(case, memory_bytes=512 << 20)


@pytest.mark.contained_on("full", "userns", "confined")
def test_what_is_not_a_file_is_not_waited_for(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        await slot.execute("mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/tty tty; ln -s /proc/self/mem mem")
        await python(slot, "import socket; socket.socket(socket.AF_UNIX).bind('socket')")
        made = () if arena.ground.rung is Rung.CONFINED else ("socket",)  # where no socket can be made
        for name in ("pipe", "zero", "tty", "mem", *made, "/dev/full", "/proc/kmsg"):
            with pytest.raises(OSError):
                await asyncio.wait_for(slot.read_bytes(name), 10)
        for name in ("pipe", *made, "/dev/full", "/proc/kmsg"):
            with pytest.raises(OSError):
                await asyncio.wait_for(slot.write_bytes(name, b"x"), 10)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_file_that_claims_to_be_huge_is_refused_by_its_claim(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        made = await slot.execute("truncate -s 1T sparse")
        assert made.success == (arena.ground.rung > Rung.CONFINED)  # there a file cannot be that long
        if made.success:
            with pytest.raises(OSError, match="limit"):
                await slot.read_bytes("sparse")

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_links_lead_nowhere_but_into_the_slot(arena: Arena, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("host")

    async def case(slot: Slot) -> None:
        ways = (f"{tmp_path}/secret", "/proc/1/root/etc/passwd", "/proc/self/cwd/secret", "/../../../../../etc/shadow",
                "/proc/self/root/etc/shadow", "/host/etc/passwd", "/proc/1/fd/3")  # fmt: skip
        for number, target in enumerate(ways):
            await slot.execute(["ln", "-s", target, f"link{number}"])
            for path in (target, f"link{number}"):
                with pytest.raises(OSError):
                    await slot.read_bytes(path)
        await slot.execute(f"ln -s {tmp_path} out")
        with pytest.raises(OSError):
            await slot.write_bytes("out/new", b"x")
        assert os.listdir(tmp_path) == ["secret"]

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_race_of_links_is_lost_by_the_racer(arena: Arena, tmp_path: Path) -> None:
    """A directory and a link to the host's take turns at one name while files are read and written through it."""
    tmp_path.chmod(0o777)
    (tmp_path / "f").write_text("host")
    race = f"""
import os
os.makedirs('real'); open('real/f', 'w').write('slot'); os.symlink({str(tmp_path)!r}, 'link')
os.symlink('/proc/1/root', 'magic')
while True:
    for name in ('real', 'link', 'magic'):
        os.rename(name, 'turn'); os.rename('turn', name)
"""

    async def case(slot: Slot) -> None:
        racing = asyncio.ensure_future(python(slot, race, timeout_s=2.0))
        seen = set()
        while not racing.done():
            for call in (slot.read_bytes("turn/f"), slot.write_bytes("turn/f", b"slot")):
                try:
                    seen.add(await call)
                except OSError:
                    continue
            await asyncio.sleep(0)
        assert seen <= {b"slot", b"", None}
        assert (tmp_path / "f").read_text() == "host"
        assert os.listdir(tmp_path) == ["f"]

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_system_is_written_as_a_copy_or_not_at_all(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        before = os.stat("/usr/bin/env")
        await slot.execute("echo x >> /usr/bin/env; rm -rf /usr/bin/env; mv /usr/bin /usr/gone; echo x > /etc/passwd")
        after = os.stat("/usr/bin/env")
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_set_user_program_gains_nothing(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        script = "cp /usr/bin/id . && chmod 6755 id; ./id -u; grep -c '^NoNewPrivs:.1' /proc/self/status; "
        script += "awk '/^CapEff/ {print $2}' /proc/self/status"
        uid, no_new, capabilities = (await slot.execute(script)).output.split()
        assert no_new == "1"
        assert int(capabilities, 16) & ~0x4FB == 0
        assert uid == (await slot.execute("id -u")).output.strip()

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_devices_are_not_made(arena: Arena) -> None:
    make = """
import os, stat
for kind, major, minor in ((stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 254, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 10, 229)):
    for folder in ('/workspace', '/tmp', '/dev', '/dev/shm', '/usr'):
        try:
            os.mknod(f'{folder}/d', 0o600 | kind, os.makedev(major, minor))
            print(folder, os.open(f'{folder}/d', os.O_RDWR))
        except OSError: pass
"""

    async def case(slot: Slot) -> None:
        assert (await python(slot, make)).output == ""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_core_is_dumped(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        crash = "ulimit -c unlimited 2>/dev/null; ulimit -c; sleep 10 & kill -SEGV $!; wait; ls"
        result = await slot.execute(crash)
        assert result.output.startswith("0\n")
        assert "core" not in result.output.replace("core dumped", "").splitlines()[-1:]

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_nothing_of_one_lease_is_in_the_next(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        await slot.execute(
            "touch left ~/left $TMPDIR/left /tmp/left /dev/shm/left /var/tmp/left /usr/local/left;"
            "echo 'echo planted' > ~/.bashrc; ipcmk -Q; ipcmk -M 4096; ipcmk -S 1"
        )
        await arena.backend.destroy(slot)
        after = await arena.backend.create(SlotSpec(), "after")
        look = "ls -A . ~ $TMPDIR /tmp /dev/shm /var/tmp /usr/local 2>/dev/null | grep -c -e left -e bashrc;"
        look += "ipcs | grep -c ^0x"
        assert (await after.execute(look)).output == "0\n0\n"
        await arena.backend.destroy(after)

    arena.face(case)
