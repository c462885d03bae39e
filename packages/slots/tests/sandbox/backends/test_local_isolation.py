"""What a slot cannot see, reach or use up; each on every rung that should hold it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.types import Limits, Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Rung, Slot, SlotSpec
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


def test_the_host_is_out_of_sight(on_each_rung: WithSlot, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    home = os.path.expanduser("~")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        script = f"""
            cat /etc/shadow /etc/gshadow {tmp_path}/secret /proc/1/environ /proc/1/root/host/etc/passwd
            ls -A {home}/.ssh /home /run /var/lib /host /slots /lower
            grep -v -e ^root: -e ^daemon: -e ^nobody: /etc/passwd
        """
        result = await slot.execute(script)
        lines = [line for line in result.output.splitlines() if not line.startswith(("cat: ", "ls: ")) and line]
        assert lines == ["/home:", "/run:", "lock", "/var/lib:"] or lines == ["/home:", "/run:", "/var/lib:"]

    on_each_rung(body)


def test_nothing_of_the_host_is_named(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        output = (await slot.execute("cat /proc/mounts /proc/self/mountinfo /proc/1/cmdline; hostname")).output
        assert str(Path(__file__).parents[5]) not in output
        assert "palaestra_slots/sandbox" not in output
        assert output.endswith("slot\n")

    on_each_rung(body)


def test_slots_do_not_see_each_other(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        other = await backend.create(SlotSpec(), "other")
        await other.execute("sleep 1000 & ipcmk -Q; touch /tmp/x /dev/shm/x /workspace/x /usr/x /var/tmp/x")
        output = (
            await slot.execute("ps ax -o comm=; ipcs -q | grep -c ^0x; ls /tmp /dev/shm . /var/tmp; ls /usr/x")
        ).output
        assert "sleep" not in output
        assert "0\n" in output
        assert "\nx\n" not in output

    on_each_rung(body)


def test_pid_1_cannot_be_reached(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("kill -9 1; kill -STOP 1; kill -9 -1")
        look = "cat /proc/1/mem /proc/1/environ; cd /proc/1/cwd; readlink -v /proc/1/exe /proc/1/fd/0; "
        result = await slot.execute(look + "echo x > /proc/1/mem; :")
        assert result.success
        # Without root a slot's root is the owner of all: it can count init's descriptors, and open or read none.
        lines = [line for line in result.output.splitlines() if "enied" not in line]
        assert "->" not in result.output
        assert not lines or backend.rung is Rung.USERNS
        assert all(line.startswith(("total", "lr", "l-w")) for line in lines)

    on_each_rung(body)


def test_without_network_not_even_the_hosts_loopback(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            probe = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached; :"
            assert (await slot.execute(probe)).output == ""
            online = await backend.create(SlotSpec(network=Network.ON), "online")
            own_network = os.access("/dev/net/tun", os.R_OK | os.W_OK)  # without it, a warning is given
            assert (await online.execute(probe)).output == ("" if own_network else "reached\n")
        assert (await slot.execute("cat /etc/resolv.conf")).exit_code != 0
        served = "python3 -m http.server --bind 127.0.0.1 80 &\n"
        served += "until (exec 3<>/dev/tcp/127.0.0.1/80) 2>/dev/null; do :; done; echo up"
        assert "up\n" in (await slot.execute(served, timeout_s=20)).output

    on_each_rung(body)


def test_a_fork_can_have_another_network(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        resolver = "cat /etc/resolv.conf"  # which only slots with a network have
        online = await backend.create(SlotSpec(network=Network.ON), "online")
        async with online.fork() as same, online.fork(network=Network.OFF) as without:
            assert (await same.execute(resolver)).success
            assert not (await without.execute(resolver)).success
            assert without.spec.network is Network.OFF

    on_each_rung(body)


def test_privileges_cannot_be_regained(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        attempts = {
            "mount": "mount -t tmpfs none /mnt",
            "unmount": "umount /proc",
            "user namespace": "unshare -U true",
            "namespace": "unshare -m true",
            "device": "mknod /tmp/d b 254 0",
            "chroot": "chroot / true",
            "sysctl": "echo x > /proc/sys/kernel/core_pattern",
            "host name": "hostname other",
            "clock": "date -s 2001-01-01",
            "routes": "ip link set lo down",
        }
        for name, attempt in attempts.items():
            assert not (await slot.execute(attempt)).success, name
        calls = "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
        calls += "for n in (425, 321, 323, 298, 250, 304): print(c.syscall(n, 0, 0, 0, 0, 0), end=' ')"
        assert (await slot.execute(["python3", "-c", calls])).output == "-1 " * 6
        family = "import socket\nfor f in (40, 38, 17):\n  try: socket.socket(f); print('open')\n  except OSError: pass"
        assert (await slot.execute(["python3", "-c", family])).output == ""

    on_each_rung(body)


def test_root_in_the_slot_is_nobody_outside(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        if backend.rung is not Rung.FULL:
            pytest.skip("the rung full is not available")
        result = await slot.execute(
            "id -u; cat /proc/self/uid_map; touch /usr/bin/new /etc/new; chown 5:6 /etc/new; ls -n /etc/new"
        )
        lines = result.output.splitlines()
        assert lines[0] == "0"
        assert int(lines[1].split()[1]) >= 1 << 30
        assert lines[2].split()[2:4] == ["5", "6"]

    with_slot(body)
    assert not os.path.exists("/usr/bin/new")


def test_limits_hold_and_the_slot_survives(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        if backend.rung is not Rung.FULL:
            pytest.skip("the rung full is not available")
        limits = Limits(memory_bytes=64 << 20, pids=20, disk_bytes=8 << 20, open_files=32)
        small = await backend.create(SlotSpec(limits=limits), "small")
        hog = await small.execute(["python3", "-c", "x = bytearray(200 << 20)"])
        assert (hog.exit_code, hog.metadata["oom"]) == (137, True)
        assert (await small.execute("true")).metadata["oom"] is False
        forks = (
            "import os, time\ntry:\n  while os.fork(): pass\n  time.sleep(99)\nexcept OSError as e: print(e.strerror)"
        )
        assert (await small.execute(["python3", "-c", forks])).output == "Resource temporarily unavailable\n"
        await small.execute(["pkill", "-9", "python3"])
        assert "No space left" in (await small.execute("head -c 20000000 /dev/zero > f; rm f")).output
        assert "No space left" in (await small.execute("seq 40000 | xargs touch")).output
        files = "import os\ntry:\n  while True: os.dup(0)\nexcept OSError as e: print(e.strerror)"
        assert (await small.execute(["python3", "-c", files])).output == "Too many open files\n"
        assert (await slot.execute("echo fine")).output == "fine\n"

    with_slot(body)


def test_mounts_are_read_only_and_change_nothing(on_each_rung: WithSlot, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "tool").write_text("t")
    spec = SlotSpec(
        mounts=(
            Mount(str(tmp_path), "/opt/tools/a"),
            Mount(str(tmp_path), "/workspace/b"),
            Mount(str(tmp_path), "/tmp/c/d"),
        )
    )

    async def body(backend: LocalBackend, slot: Slot) -> None:
        mounted = await backend.create(spec, "mounted")
        assert (await mounted.execute("cat /opt/tools/a/tool b/tool /tmp/c/d/tool; touch b/x")).output.startswith(
            "ttttouch: cannot"
        )
        assert await mounted.changes() == []
        forked = await backend.create(spec, "forked", await backend.seal(mounted))
        assert await forked.read_text("b/tool") == "t"

    on_each_rung(body)


def test_an_image_is_the_whole_root(on_each_rung: WithSlot, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in ("bin", "etc", "usr"):
        (tmp_path / folder).mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    busy = "/bin/busybox" if os.path.exists("/bin/busybox") else None

    async def body(backend: LocalBackend, slot: Slot) -> None:
        image = await backend.create(SlotSpec(image=str(tmp_path)), "image")
        assert sorted(entry.path for entry in await image.list_dir("/") if entry.kind == "dir") == [
            "/bin", "/dev", "/etc", "/proc", "/root", "/sys", "/tmp", "/usr", "/workspace",
        ]  # fmt: skip
        assert (await image.execute("true")).exit_code == 127
        assert busy is None or (await image.execute([busy, "true"])).exit_code == 127
        await image.write_text("f", "x")
        sealed = await backend.seal(image)
        assert [change.path for change in await backend.changes(sealed)] == ["/workspace/f"]
        with pytest.raises(ConfigError, match="image"):
            await backend.create(SlotSpec(), "other image", sealed)
        assert sorted(os.listdir(tmp_path)) == ["bin", "etc", "usr"]

    on_each_rung(body)


async def test_what_cannot_be_had_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for rung in (Rung.CONFINED, Rung.NONE):
        with pytest.raises(ConfigError, match=rung.label):
            await LocalBackend(rung=rung, require=Rung.USERNS).start()
    with pytest.raises(ConfigError, match="userns"):
        await LocalBackend(rung=Rung.USERNS, require=Rung.FULL).start()
    with pytest.raises(ConfigError, match="best"):
        LocalBackend.from_isolation("strong")
    with pytest.raises(SandboxError, match="start"):
        await LocalBackend().create(SlotSpec(), "early")
    async with LocalBackend() as backend:
        with pytest.raises(ConfigError, match="missing"):
            await backend.create(SlotSpec(image=str(tmp_path / "missing")), "x")
        with raises(ConfigError):
            await backend.create(SlotSpec(mounts=(Mount(str(tmp_path / "missing"), "/opt/x"),)), "x")
        with pytest.raises(ConfigError, match="absolute"):
            await backend.create(SlotSpec(mounts=(Mount(str(tmp_path), "opt"),)), "x")
