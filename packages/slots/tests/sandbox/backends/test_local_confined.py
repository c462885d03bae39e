"""The rungs without namespaces: `confined` keeps slots apart by users and Landlock, `none` does not.

The same file runs inside ordinary containers, as root and as somebody else (`test_containers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError, SlotLost
from palaestra_slots.core.types import AllowList, Limits, Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.isolation import self_test
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Mount, Rung, Slot, SlotSpec, View
from sandbox.processes import descendants, ignoring, table
from sandbox.somebody import SOMEBODY, as_somebody, interpreter

pytestmark = pytest.mark.slots

ROOT = os.geteuid() == 0
needs_users = pytest.mark.skipif(not ROOT, reason="without root there is one slot, and it is the caller's user")

DAEMON = "setsid sleep 1234 </dev/null >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done; pwd"
"""Leaves a process behind, seen under its own name, and says where the workspace is."""

Body = Callable[[LocalBackend, Slot], Awaitable[None]]


def confined(body: Body, spec: SlotSpec | None = None, rung: Rung = Rung.CONFINED) -> None:
    """Run a coroutine function with a backend on this rung and a slot of it."""

    async def main() -> None:
        backend = LocalBackend(rung=rung)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            await body(backend, await backend.create(spec or SlotSpec(), "test"))

    asyncio.run(main())


@contextlib.contextmanager
def turn_of_servers() -> Iterator[list[str]]:
    """The directories of servers with slots like these, while none is made or removed."""
    parent = f"/var/tmp/palaestra-slots-{os.geteuid()}"
    while True:
        try:
            fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield []
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(parent)):  # nobody removed it before it was ours
                    yield os.listdir(fd)
                    return
        finally:
            os.close(fd)


async def gone(path: str) -> bool:
    """Whether a file goes away in a moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while os.path.lexists(path):  # noqa: ASYNC110 - the kernel has no event for this
                await asyncio.sleep(0.005)
    return not os.path.lexists(path)


def test_commands_run_as_a_user_of_their_own_in_a_workspace_of_their_own() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (backend.rung, slot.rung) == (Rung.CONFINED, Rung.CONFINED)
        result = await slot.execute("echo $UID; pwd; cd ~ && pwd; cd $TMPDIR && echo x > f; exit 7")
        assert (result.exit_code, result.metadata["rung"]) == (7, "confined")
        uid, workspace, home = result.output.split()
        assert int(uid) != 0
        assert not ROOT or int(uid) != os.geteuid()
        assert os.path.dirname(workspace) == os.path.dirname(home)
        assert await slot.read_text("/tmp/f") == "x\n"
        assert (await slot.execute("pwd", cwd="/tmp")).output == f"{os.path.dirname(workspace)}/tmp\n"
        with pytest.raises(FileNotFoundError):
            await slot.execute("true", cwd="nowhere")
        assert (await slot.execute(["no-such-program"])).exit_code == 127

    confined(body)


@pytest.mark.skipif(
    not ROOT or os.path.lexists("/workspace"), reason="the link is made by root, where nothing is there"
)
def test_the_workspace_is_found_at_the_usual_path() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        other = await backend.create(SlotSpec(), "other")
        for name, each in (("one", slot), ("two", other)):
            assert (await each.execute(f"echo {name} > /workspace/f; cat f; cd /workspace; pwd")).output.split() == [
                name, "/workspace",
            ]  # fmt: skip

    confined(body)
    with turn_of_servers() as others:  # a server that runs beside this test keeps the link
        assert os.path.lexists("/workspace") == bool(others)


@needs_users
def test_slots_cannot_read_write_signal_or_trace_each_other() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        place = (await slot.execute("echo secret > f; chmod 777 . f; pwd")).output.strip()
        assert (await slot.execute("sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > pid")).success
        pid = (await slot.read_text("pid")).strip()
        other = await backend.create(SlotSpec(), "other")
        for attempt in (
            f"cat {place}/f", f"ls {place}", f"ls {place}/../..", f": > {place}/g", f"kill -0 {pid}",
            f"cat /proc/{pid}/environ",
            f"ls -l /proc/{pid}/cwd/", f"rm -rf {place}/f", "ls /dev/shm", f"ln {place}/f l && cat l",
        ):  # fmt: skip
            assert not (await other.execute(attempt)).success, attempt
        assert (await slot.execute(f"cat f; kill -0 {pid} && echo alive")).output == "secret\nalive\n"

    confined(body)


def test_nothing_but_the_own_directories_can_be_written_and_the_system_read() -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        for path in ("/etc", "/usr", "/tmp", "/var/tmp", "/proc/sys/kernel", "..", "/dev", "/"):
            assert not (await slot.execute(f": > {path}/intruder")).success, path
        for path in ("/etc/shadow", "/etc/passwd", "/etc/group", "/var", "/home", "/root", "/run", "/sys", "../.."):
            assert not (await slot.execute(f"if [ -d {path} ]; then ls {path}; else cat {path}; fi")).success, path
        for command in ("mv ../workspace ../w", "rmdir ../tmp", "ln -s / ../s", "mknod n c 0 0", "mkfifo ../p"):
            assert not (await slot.execute(command)).success, command
        assert (await slot.execute("cat /etc/os-release >/dev/null && ls /usr/bin >/dev/null; python3 -c 1")).success
        assert (
            await slot.execute("mkdir -p a/b c && echo x > a/b/f && mv a/b/f c/g && mv a d && cat c/g")
        ).output == "x\n"

    confined(body)


def test_the_network_is_there_only_when_asked_for() -> None:
    probe = (
        "import socket\n"
        "for family in (socket.AF_INET, socket.AF_INET6):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
        "        try: socket.socket(family, kind); print('made')\n"
        "        except OSError as error: print(error.errno)\n"
        "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))\n"
    )

    async def off(_: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(["python3", "-c", probe])).output == "97\n" * 4 + "b'x'\n"

    async def on(_: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(["python3", "-c", probe])).output == "made\n" * 4 + "b'x'\n"

    confined(off)
    confined(on, SlotSpec(network=Network.ON))


def test_a_service_is_asked_in_the_network_that_it_has() -> None:
    serve = (
        "import socket; listener = socket.create_server(('127.0.0.1', 0)); print(listener.getsockname()[1], flush=1);"
        "connection, _ = listener.accept(); connection.sendall(b'you said ' + connection.recv(100))"
    )

    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn(["python3", "-c", serve])
        port = int((await anext(aiter(process.output()))).data)
        assert await slot.ask(port, b"hello") == b"you said hello"

    confined(body, SlotSpec(network=Network.ON))


def test_without_a_network_a_service_of_somebody_else_is_not_the_slots() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with socket.create_server(("127.0.0.1", 0)) as somebody_elses, pytest.raises(ConnectionRefusedError):
            await slot.ask(somebody_elses.getsockname()[1], b"hello")

    confined(body)


@needs_users
def test_a_slot_that_kills_everything_kills_its_own_commands() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        server, other = backend.server_pid, await backend.create(SlotSpec(), "other")
        await other.execute("sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > pid")
        await slot.execute("kill -9 -1; for i in 1 2 3; do (kill -9 -1); kill -9 $PPID; done")
        assert (await slot.execute("echo still here")).output == "still here\n"
        assert (await other.execute("kill -0 $(cat pid) && echo untouched")).output == "untouched\n"
        assert backend.server_pid == server

    confined(body)


@pytest.mark.skipif(ROOT, reason="with root the init is out of a command's reach")
def test_without_root_a_command_can_end_its_slot_and_no_more() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(SandboxError, match="one slot at a time"):
            await backend.create(SlotSpec(), "second")
        with pytest.raises(SlotLost):
            await slot.execute("(sleep 1000 &) ; kill -9 -1; kill -9 $PPID; sleep 10")
        await backend.destroy(slot)
        again = await backend.create(SlotSpec(), "again")
        assert (await again.execute("echo fine")).output == "fine\n"

    confined(body)


def test_a_timeout_kills_whatever_the_command_has_started() -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        script = "import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0: time.sleep(1000)\n os._exit(0)\n"
        await slot.write_text("daemon.py", script + "time.sleep(1000)\n")
        result = await slot.execute("echo before; sleep 1000 & python3 daemon.py", timeout_s=1.0)
        assert (result.metadata["timeout"], result.output) == (True, "before\n")
        if ROOT:
            own = "for p in /proc/[0-9]*; do [ -O $p ] && read -r line < $p/stat && echo $line; done 2>/dev/null"
            left = (await slot.execute(own)).output
            assert "(bash)" in left
            assert "(sleep)" not in left
            assert "(python3)" not in left

    confined(body)


def test_destroying_a_slot_leaves_nothing_of_it() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        place, left = (await slot.execute("pwd; echo /dev/shm/palaestra-left-$UID")).output.split()
        deep = "import os\nfor _ in range(300): os.mkdir('d' * 100); os.chdir('d' * 100)\n"
        assert (await slot.execute(["python3", "-c", deep])).success
        await slot.execute("mkdir closed; chmod 0 closed")
        if ROOT:  # elsewhere it is the user's own
            await slot.execute(f"echo x > {left}")
        started = "for i in 1 2 3; do (setsid sleep 1000 </dev/null >/dev/null 2>&1 &); done; (python3 -c 'import os\n"
        started += "while True: os.fork() and os._exit(0)' </dev/null >/dev/null 2>&1 &)" if ROOT else "pass')"
        await slot.execute(started)
        await backend.destroy(slot)
        inside = [process.name for process in descendants(backend.server_pid)]
        assert "sleep" not in inside
        assert "python3" not in inside
        assert await gone(os.path.dirname(place))
        assert not os.path.lexists(left)

    confined(body)


def test_files_are_reached_at_the_paths_of_every_backend() -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        await slot.write_text("sub/a.txt", "hello", mode=0o600)
        await slot.write_text("/root/.rc", "home")
        assert (
            await slot.execute("cat sub/a.txt ~/.rc; stat -c %a sub/a.txt; rm sub/a.txt; echo new > b")
        ).output == "hellohome600\n"
        assert [entry.path for entry in await slot.list_dir(".")] == ["/workspace/b", "/workspace/sub"]
        assert [entry.path for entry in await slot.list_dir("sub")] == []
        entry = await slot.stat("/workspace/b")
        assert entry is not None
        assert (entry.path, entry.size) == ("/workspace/b", 4)
        assert await slot.stat("missing") is None
        with pytest.raises(FileNotFoundError) as missing:
            await slot.read_text("missing")
        assert missing.value.filename == "/workspace/missing"
        await slot.remove("sub")
        assert await slot.stat("sub") is None
        assert "NAME" in await slot.read_text("/etc/os-release")
        for path in ("/etc/shadow", "/etc/passwd", "/proc/1/environ", "/var/log", "/home"):
            with pytest.raises((PermissionError, FileNotFoundError)):
                await slot.read_bytes(path)
        for path in ("/etc/new", "/new", "/var/tmp/new", "/etc/hostname"):
            with pytest.raises(PermissionError):
                await slot.write_text(path, "x")
            assert not path.endswith("new") or not os.path.lexists(path)
        with pytest.raises(PermissionError):
            await slot.remove("/usr/bin/env")

    confined(body)


def test_links_of_the_slot_lead_the_server_nowhere() -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        await slot.execute("ln -s /etc/shadow s; ln -s / r; ln -s ../../.. up; ln -s /etc/passwd ~/p")
        for path in ("s", "r/etc/shadow", "up/etc/shadow", "../../../../etc/shadow", "/root/p"):
            with pytest.raises((FileNotFoundError, PermissionError)):
                await slot.read_bytes(path)
        await slot.write_text("r/etc/made", "inside")
        assert not os.path.lexists("/etc/made")

    confined(body)


@pytest.mark.skipif(not ROOT, reason="without root nobody can read it any more")
def test_a_workspace_that_was_closed_can_be_begun_in_by_the_next() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("echo 1 > f; chmod 000 /workspace ~")
        grader = await backend.create(SlotSpec(), "grader", await backend.seal(slot))
        assert (await grader.execute("cat f; cd ~ && ls -d .")).output == "1\n.\n"

    confined(body)


def test_the_proof_is_held_by_any_shell() -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        lines = (await slot.execute(["sh", "-c", self_test.CONFINED_SCRIPT])).output.splitlines()
        facts = {word: [line.partition(" ")[2].strip()] for line in lines for word in line.split()[:1]}
        assert all(self_test.confined_claims(facts, server_is_root=ROOT).values()), facts

    confined(body)


CLOSED = {
    "a file": "echo x > f; chmod 000 f",
    "a directory": "mkdir d; echo x > d/f; chmod 000 d",
    "a directory for writing": "mkdir d; echo x > d/f; chmod 500 d .",
    "one that cannot be entered": "mkdir d; echo x > d/f; chmod 400 d; chmod 000 .",
    "long names": f"for i in $(seq 40); do mkdir {'n' * 200}; cd {'n' * 200}; done; echo x > ~/../workspace/f",
}


@pytest.mark.parametrize("command", CLOSED.values(), ids=CLOSED)
def test_what_was_closed_by_its_owner_is_graded_all_the_same(command: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(command)).exit_code == 0
        await slot.changes()
        sealed = await backend.seal(slot)
        path = "/workspace/f" if "d/f" not in command else "/workspace/d/f"
        assert path in [change.path for change in await backend.changes(sealed)]
        for view, there in ((View(only=("/workspace",)), True), (View(without=(path,)), False)):
            graded = await backend.create(SlotSpec(), "graded", await backend.view(sealed, view))
            assert (await graded.stat(path) is not None) is there
            await backend.destroy(graded)

    confined(body)


def test_a_sealed_slot_starts_others_and_shows_views() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir -p tests src; echo 1 > tests/t; echo 1 > src/s; ln -s tests link; echo h > ~/h")
        base = await backend.seal(slot)
        agent = await backend.create(SlotSpec(), "agent", base)
        assert (await agent.execute("cat tests/t src/s ~/h; stat -c %u src | grep -c $UID")).output == "1\n1\nh\n1\n"
        await agent.execute(
            "echo 2 > tests/t; echo 2 > src/s; echo x > conftest.py; rm -r link; mkdir link; echo > link/y"
        )
        changes = {change.path: change.kind for change in await agent.changes()}
        assert changes == {
            "/workspace/tests/t": "file", "/workspace/src/s": "file", "/workspace/conftest.py": "file",
            "/workspace/link": "dir", "/workspace/link/y": "file",
        }  # fmt: skip
        sealed = await backend.seal(agent)
        view = await backend.view(
            sealed, View(only=("/workspace",), without=("tests", "/workspace/tests", "/workspace/conftest.py"))
        )
        grader = await backend.create(SlotSpec(), "grader", view)
        assert (await grader.execute("cat tests/t src/s ~/h; ls")).output.split() == [
            "1",
            "2",
            "h",
            "link",
            "src",
            "tests",
        ]
        await backend.destroy(grader)
        whole = await backend.create(SlotSpec(), "whole", sealed)
        assert (await whole.execute("cat tests/t; ls conftest.py")).output == "2\nconftest.py\n"
        assert {change.path for change in await backend.changes(view)} == {
            "/workspace/src/s", "/workspace/link", "/workspace/link/y",
        }  # fmt: skip
        await backend.destroy(whole)
        for snapshot in (base, sealed, view):
            await backend.forget(snapshot)

    confined(body)


def test_limits_hold_for_each_process() -> None:
    limits = Limits(memory_bytes=200 << 20, disk_bytes=1 << 20, open_files=40, pids=20)

    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert "MemoryError" in (await slot.execute(["python3", "-c", "bytearray(300 << 20)"])).output
        assert not (await slot.execute("head -c 3000000 /dev/zero > f")).success
        assert (
            "Too many open files"
            in (await slot.execute(["python3", "-c", "[open('/dev/null') for _ in range(60)]"])).output
        )
        assert (await slot.execute("ulimit -c")).output == "0\n"
        if ROOT:
            bomb = await slot.execute("b() { b | b & }; b; sleep 0.3; echo over", timeout_s=3.0)
            assert "Resource temporarily unavailable" in bomb.output
            other = await backend.create(SlotSpec(), "other")
            assert (await other.execute("echo fine")).output == "fine\n"

    confined(body, SlotSpec(limits=limits))


def test_when_the_server_is_killed_nothing_stays() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        place = (await slot.execute(DAEMON)).output.strip()
        [server] = [process for process in descendants(backend.server_pid) if process.parent == backend.server_pid]
        sleepers = [process.pid for process in descendants(backend.server_pid) if process.name == "sleep"]
        assert sleepers
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(SlotLost):
            await slot.execute("true")
        assert await gone(os.path.dirname(os.path.dirname(place)))
        assert not {process.pid for process in table()} & set(sleepers)
        again = await backend.create(SlotSpec(), "again")
        assert (await again.execute("echo back")).output == "back\n"

    confined(body)


async def commands_until_it_fails(slot: Slot) -> None:
    while True:  # the server may answer until it notices that its watcher is gone
        await slot.execute("true")


@needs_users
def test_the_next_start_finishes_what_watcher_and_server_left() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        place = (await slot.execute(DAEMON)).output.strip()
        sleepers = [process.pid for process in descendants(backend.server_pid) if process.name == "sleep"]
        os.kill(backend.server_pid, signal.SIGKILL)
        with pytest.raises(SlotLost):
            await asyncio.wait_for(commands_until_it_fails(slot), 20)
        assert os.path.isdir(os.path.dirname(place))
        again = await backend.create(SlotSpec(), "again")
        assert (await again.execute("echo back")).output == "back\n"
        assert not os.path.lexists(os.path.dirname(place))
        assert not {process.pid for process in table()} & set(sleepers)

    confined(body)


def test_what_the_rung_does_not_have_is_refused(tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await backend.destroy(slot)
        (tmp_path / "usr").mkdir()
        for spec, words in (
            (SlotSpec(image=str(tmp_path)), "for an image"),
            (SlotSpec(network=AllowList(("example.org",))), "list of hosts"),
            (SlotSpec(mounts=(Mount(str(tmp_path), "/elsewhere"),)), "cannot mount"),
        ):
            with pytest.raises(SandboxError, match=words):
                await backend.create(spec, "test")

    confined(body)
    with pytest.raises(ConfigError, match="required"):
        asyncio.run(LocalBackend(rung=Rung.CONFINED, require=Rung.USERNS).start())
    with pytest.raises(ConfigError, match="required"):
        asyncio.run(LocalBackend.from_isolation("none", require_sandbox=True).start())


def test_the_rung_none_runs_commands_as_the_caller_and_says_so() -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("echo $UID; echo x > f; (exec 3<>/dev/tcp/127.0.0.1/1) 2>&1")
        assert result.output.startswith(f"{os.geteuid()}\n")
        assert "refused" in result.output
        assert (backend.rung, result.metadata["rung"]) == (Rung.NONE, "none")
        snapshot = await backend.seal(slot)
        again = await backend.create(SlotSpec(), "again", snapshot)
        assert await again.read_text("f") == "x\n"
        assert (await again.execute("sleep 1000 & sleep 1000", timeout_s=0.3)).exit_code == 124

    confined(body, rung=Rung.NONE)


_OUT_OF_REACH = """
import asyncio, sys
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec

async def main():
    command = sys.argv[1] + " -c 'import os, time; os.setresuid(0, 0, 0); print(0, flush=True); time.sleep(30)'"
    async with LocalBackend(rung=Rung.NONE) as backend:
        slot, other = [await backend.create(SlotSpec(), name) for name in ("one", "two")]
        print((await slot.execute(command, timeout_s=0.5)).exit_code)
        process = await slot.spawn(command)
        await process.read(wait_s=5.0)
        await process.signal(15)
        print((await slot.execute("echo alive")).output, end="")
        await backend.destroy(slot)
        print((await other.execute("echo untouched")).output, end="")

asyncio.run(asyncio.wait_for(main(), 25))
"""


@needs_users
def test_on_the_rung_none_what_has_become_root_costs_no_more_than_its_slot() -> None:
    """As `sudo` does. It can be neither signalled nor killed, and nobody waits for its end."""
    python = interpreter()
    if python is None:
        pytest.skip("no Python that another user can run")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(os.path.realpath(python), f"{folder}/sudo")
        os.chmod(program, 0o4755)
        if as_somebody(program, "-c", "import os; os.setresuid(0, 0, 0)").returncode:
            pytest.skip("set-user-id programs change no user here")
        ran = as_somebody(python, "-c", _OUT_OF_REACH, program, timeout_s=40)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "exe").startswith(program):
                os.kill(int(process.name), signal.SIGKILL)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == "124\nalive\nuntouched\n"


_BESIDE = """
import asyncio
from palaestra_slots.sandbox.snapshots import folder
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung
from palaestra_slots.sandbox.service.service_client import socket_path

async def main():
    for _ in range(2):
        async with LocalBackend(rung=Rung.CONFINED):
            folder.SnapshotStore(folder.default_folder()).open()
            socket_path("beside")

asyncio.run(main())
print("both")
"""


@needs_users
def test_who_has_no_home_keeps_slots_workspaces_and_services_apart() -> None:
    """All of them are below /var/tmp then."""
    with contextlib.suppress(KeyError):
        pytest.skip(f"uid {SOMEBODY} is {pwd.getpwuid(SOMEBODY).pw_name} here, who has a home")
    python = interpreter()
    if python is None:
        pytest.skip("no Python that another user can run")
    ran = as_somebody(python, "-c", _BESIDE)
    for kind in ("", "snapshots-"):
        with contextlib.suppress(OSError):  # it is not empty: somebody else's
            os.rmdir(f"/var/tmp/palaestra-{kind}{SOMEBODY}")
    if "no isolation is available" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert ran.stdout == "both\n", ran.stderr[-2000:]


async def test_the_rung_none_is_never_chosen() -> None:
    async with LocalBackend() as backend:
        assert backend.rung >= Rung.CONFINED


@pytest.mark.parametrize("rung", [Rung.CONFINED, Rung.NONE])
def test_commands_start_as_on_the_other_rungs(rung: Rung) -> None:
    """No signal is ignored that the caller ignores, and a program that is a directory is not the one to start in."""

    async def body(_: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(["sh", "-c", "kill -QUIT $$"])).exit_code == 128 + signal.SIGQUIT
        directory = (await slot.execute("pwd")).output.strip()
        assert (await slot.execute([directory], cwd=directory)).exit_code == 126

    with ignoring(signal.SIGQUIT):
        confined(body, rung=rung)


async def test_a_pool_has_as_many_places_as_the_rung() -> None:
    pool = SlotPool(SlotPoolConfig(max_slots=3), LocalBackend(rung=Rung.CONFINED))
    try:
        await pool.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with pool:
        assert pool.total_slots == (3 if ROOT else 1)

        async def use(name: str) -> str:
            slot = await pool.acquire(name)
            try:
                return (await slot.execute(f"echo {name}")).output.strip()
            finally:
                await pool.release(slot)

        assert await asyncio.gather(*map(use, "abcd")) == list("abcd")
