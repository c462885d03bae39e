"""Checkpoints of a running slot: what they show, what they share, and that the slot notices nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import IsolationUnavailable, SandboxError, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec, Snapshot, View
from sandbox.bodies import WithSlot
from sandbox.processes import descendants
from sandbox.trees import fingerprint

pytestmark = pytest.mark.slots


MIXTURE = r"""
echo x > f; ln f hard; chmod 4711 f; touch -d @77 f; truncate -s 1T sparse; echo end >> sparse; mkfifo p; ln -s f link
mkdir -m 1700 d; touch d/$'na\nme\xff'; python3 -c 'import os; os.setxattr("f", "user.a", b"1")'
"""
BEAT = "(setsid bash -c 'while :; do echo >> beat; sleep 0.002; done' >/dev/null 2>&1 &); until [ -s beat ]; do :; done"

LOOK = r"""
stat -c '%n %F %a %h %s %u %Y' f hard sparse p d; stat -c %N link; ls -b d; tail -c 4 sparse; du -k sparse
python3 -c 'import os; print(os.listxattr("f"))'
"""


async def shown(backend: LocalBackend, snapshot: Snapshot, command: str) -> str:
    slot = await backend.create(SlotSpec(), "fork", snapshot)
    try:
        return (await slot.execute(command)).output
    finally:
        await backend.destroy(slot)


async def copied(slot: Slot) -> int:
    """How many bytes a further checkpoint had to copy."""
    assert isinstance(slot, LocalSlot)
    return int((await slot.requests.call("checkpoint", slot.lease())).fields["copied_bytes"])


def test_every_step_can_be_forked(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        steps = []
        for number in range(4):
            await slot.execute(f"echo {number} > step; touch only{number}; rm -f only{number - 1}")
            steps.append(await backend.checkpoint(slot))
        for number, snapshot in enumerate(steps):
            assert await shown(backend, snapshot, "cat step; ls") == f"{number}\nonly{number}\nstep\n"
        await backend.forget(steps[1])
        sealed = await backend.seal(slot)
        assert await shown(backend, sealed, "cat step") == "3\n"
        assert await shown(backend, steps[2], "cat step") == "2\n"

    on_each_rung(body)


def test_a_checkpoint_of_a_fork_stands_on_what_the_fork_stood_on(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir d; echo base > d/base; echo gone > gone")
        fork = await backend.create(SlotSpec(), "fork", await backend.seal(slot))
        await fork.execute("rm -r gone d; mkdir d; echo new > d/new")
        snapshot = await backend.checkpoint(fork)
        assert await shown(backend, snapshot, "find . -type f") == "./d/new\n"
        changes = {change.path: change.kind for change in await backend.changes(snapshot)}
        assert changes == {"/workspace/d/base": "deleted", "/workspace/d/new": "file", "/workspace/gone": "deleted"}

    on_each_rung(body)


def test_all_that_makes_a_file_is_kept(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(MIXTURE)
        before = (await slot.execute(LOOK)).output
        snapshot = await backend.checkpoint(slot)
        assert await shown(backend, snapshot, LOOK) == before

    on_each_rung(body)


def test_what_has_not_changed_is_not_copied_again(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("head -c 3000000 /dev/urandom > big; sleep 0.05")
        assert await copied(slot) >= 3_000_000
        await slot.execute("echo 12345 > small; sleep 0.05")
        assert await copied(slot) == 6
        assert await copied(slot) == 0

    on_each_rung(body)


def test_a_change_right_after_a_checkpoint_is_in_the_next(on_each_rung: WithSlot) -> None:
    """Times have a grain: the same size and the same time of change do not yet mean the same content."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        for number in range(20):
            await slot.write_text("f", f"{number:04}")
            snapshot = await backend.checkpoint(slot)
            assert await shown(backend, snapshot, "cat f") == f"{number:04}"

    on_each_rung(body)


def test_what_is_written_through_memory_is_seen(on_each_rung: WithSlot) -> None:
    """A page that is written again leaves no time of change."""
    program = """
import mmap, os, time
fd = os.open('m', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 4096); page = mmap.mmap(fd, 4096); page[:1] = b'a'
while True:
    if os.path.exists('now'): page[:1] = b'b'; page[1:2] = b'!'
    time.sleep(0.002)
"""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.write_text("p.py", program)
        await slot.execute("setsid python3 p.py >/dev/null 2>&1 & until grep -q a m; do :; done; sleep 0.05")
        await backend.checkpoint(slot)
        await slot.execute("touch now; until grep -q '!' m; do :; done")
        assert await shown(backend, await backend.checkpoint(slot), "head -c 2 m") == "b!"

    on_each_rung(body)


def test_the_slot_stands_still_and_then_goes_on(on_each_rung: WithSlot) -> None:
    """Two files are written in turns; a checkpoint never shows the second ahead of the first."""
    turns = "i=0; while :; do i=$((i+1)); echo $i > a; echo $i > b; done"

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(f"(setsid bash -c '{turns}' >/dev/null 2>&1 &); until [ -s b ]; do :; done")
        for _ in range(5):
            snapshot = await backend.checkpoint(slot)
            first, _, second = (await shown(backend, snapshot, "cat a; echo; cat b")).partition("\n\n")
            assert not first or not second or int(first) - int(second) in (0, 1)
        moving = 'x=$(cat a); until [ "$(cat a)" != "$x" ]; do :; done; echo moves'
        assert (await slot.execute(moving, timeout_s=10)).output == "moves\n"

    on_each_rung(body)


def test_commands_wait_for_a_checkpoint_and_those_that_run_go_on(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("seq 3000 | xargs touch")
        running = asyncio.ensure_future(slot.execute("sleep 0.1; echo ran"))
        results = await asyncio.gather(backend.checkpoint(slot), *(slot.execute(f"echo {n}") for n in range(5)))
        assert [result.output for result in results[1:]] == [f"{n}\n" for n in range(5)]
        assert (await running).output == "ran\n"

    on_each_rung(body)


def test_a_slot_can_be_forked_several_times_at_once(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        kept = (await slot.requests.call("stats", {})).fields["layers"]
        await slot.execute(f"seq 3000 | xargs touch; {BEAT}")

        async def look() -> str:
            async with slot.fork() as fork:
                return (await fork.execute("ls | wc -l")).output

        looks = [look() for _ in range(3)]
        results = await asyncio.gather(*looks, slot.execute("echo ran"), slot.freeze())
        assert results[:3] == ["3001\n"] * 3
        assert results[3].output == "ran\n"
        moving = 'x=$(wc -l < beat); until [ "$(wc -l < beat)" != "$x" ]; do :; done; echo moves'
        assert (await slot.execute(moving, timeout_s=10)).output == "moves\n"
        assert (await slot.requests.call("stats", {})).fields["layers"] == kept

    on_each_rung(body)


@pytest.mark.parametrize("end", ["destroy", "seal"])
def test_the_end_of_a_slot_waits_for_its_checkpoint(with_slot: WithSlot, end: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("seq 5000 | xargs touch")
        making = asyncio.ensure_future(backend.checkpoint(slot))
        await asyncio.sleep(0.01)
        await getattr(backend, end)(slot)
        assert making.done()
        assert await shown(backend, await making, "ls | wc -l") == "5000\n"

    with_slot(body)


def test_a_snapshot_that_nobody_waits_for_any_more_is_dropped(on_each_rung: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        await slot.execute("seq 1000 | xargs touch")
        base = await backend.checkpoint(slot)
        await backend.save(base, str(tmp_path))
        kept = (await slot.requests.call("stats", {})).fields["layers"]
        for make in (
            lambda: backend.checkpoint(slot),
            lambda: backend.view(base, View(without=("/workspace/7",))),
            lambda: backend.load(str(tmp_path), SlotSpec()),
            lambda: backend.seal(slot),
        ):
            making = asyncio.ensure_future(make())
            await asyncio.sleep(0)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            assert (await slot.requests.call("stats", {})).fields["layers"] == kept
        assert await shown(backend, base, "ls | wc -l") == "1000\n"

    on_each_rung(body)


def test_what_had_stopped_itself_stays_stopped(on_each_rung: WithSlot) -> None:
    state = "cat /proc/$(cat pid)/stat | cut -d' ' -f3"

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(f"setsid sleep 1000 & echo $! > pid; kill -STOP $!; until [ $({state}) = T ]; do :; done")
        await backend.checkpoint(slot)
        assert (await slot.execute(state)).output == "T\n"

    on_each_rung(body)


def test_what_stands_on_a_forgotten_snapshot_can_be_kept_all_the_same(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.write_text("a", "1")
        base = await backend.seal(slot)
        other = await backend.create(SlotSpec(), "other", base)
        await backend.forget(base)
        with pytest.raises(SandboxError, match="layer-"):
            await backend.create(SlotSpec(), "late", base)
        await other.write_text("b", "2")
        live = await backend.checkpoint(other)
        async with other.fork() as copy:
            assert await copy.read_text("b") == "2"
        sealed = await backend.seal(other)
        for snapshot in (live, sealed):
            again = await backend.create(SlotSpec(), "again", snapshot)
            assert (await again.execute("cat a b")).output == "12"
            await backend.destroy(again)
            await backend.forget(snapshot)
        assert not backend.stats()["slots"]

    on_each_rung(body)


def test_a_frozen_slot_goes_on_with_the_next_call(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(BEAT)
        assert isinstance(slot, LocalSlot)
        assert await slot.freeze() >= 1
        other = await backend.create(SlotSpec(), "other")
        await other.execute("sleep 0.05")
        moving = "x=$(wc -l < beat); until [ $(wc -l < beat) != $x ]; do :; done; echo moves"
        assert (await slot.execute(moving, timeout_s=10)).output == "moves\n"
        await slot.freeze()
        await backend.destroy(slot)

    on_each_rung(body)


def test_a_command_that_runs_during_a_freeze_goes_on(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        started = asyncio.Event()
        async with await slot.shell() as shell:
            for run in (slot.execute, shell.run):
                started.clear()
                command = run("echo started; sleep 0.3; echo ran", timeout_s=20, on_output=lambda _: started.set())
                running = asyncio.ensure_future(command)
                await started.wait()
                assert await slot.freeze() >= 1
                assert (await running).output == "started\nran\n"
        for _ in range(30):  # the slot's init may be starting the command, and is then suspended with it
            ran, _, _ = await asyncio.gather(slot.execute("echo ran", timeout_s=20), slot.spawn("true"), slot.freeze())
            assert ran.output == "ran\n"

    on_each_rung(body)


def test_a_frozen_slot_does_nothing(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(BEAT)
        assert isinstance(slot, LocalSlot)
        await slot.freeze()
        init = next(p.pid for p in descendants(backend.server_pid) if p.name == "slot-init")
        states = [Path(f"/proc/{p.pid}/stat").read_text().rpartition(") ")[2][0] for p in descendants(init)]
        assert states
        assert set(states) == {"T"}

    on_each_rung(body)


def test_a_holder_of_a_slot_can_try_something_in_a_fork_of_it(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        forks = []

        async def spoil() -> None:
            async with slot.fork() as fork:
                forks.append(fork)
                assert (await fork.execute("cat step; rm -r d step; ls; pgrep sleep")).output == "1\n"
                await slot.write_text("step", "2")
                assert await fork.stat("step") is None
                raise ZeroDivisionError

        await slot.execute("echo 1 > step; mkdir d; sleep 1000 >/dev/null 2>&1 & echo $! > d/pid")
        before = (await slot.requests.call("stats", {})).fields
        with pytest.raises(ZeroDivisionError):
            await spoil()
        assert (await slot.execute('cat step; kill -0 "$(cat d/pid)" && echo lives')).output == "2lives\n"
        assert (await slot.requests.call("stats", {})).fields == before
        with pytest.raises(StaleLease):
            await forks[0].execute("true")

    on_each_rung(body)


async def test_a_rung_without_layers_says_so() -> None:
    backend = LocalBackend(rung=Rung.CONFINED)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        slot = await backend.create(SlotSpec(), "x")
        with pytest.raises(SandboxError, match="checkpoint needs layers"):
            await backend.checkpoint(slot)
        with pytest.raises(SandboxError, match="checkpoint needs layers"):
            async with slot.fork():
                pass
        assert (await slot.execute("echo on")).output == "on\n"


def test_the_pool_forks_a_lease_that_goes_on() -> None:
    async def main() -> None:
        async with SlotPool(SlotPoolConfig(max_slots=2), LocalBackend()) as pool:
            slot = await pool.acquire("a")
            await slot.write_text("f", "1")
            fork = await pool.acquire("b", snapshot=await pool.checkpoint(slot))
            await slot.write_text("f", "2")
            assert await fork.read_text("f") == "1"
            assert pool.acquired_slots == 2

    asyncio.run(main())


def test_a_slot_that_continues_a_checkpoint_has_the_change_as_its_own(on_each_rung: WithSlot) -> None:
    """Its seal shows what changed since the prepared workspace, and a view of it what was prepared."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkdir d; echo old > d/kept; echo old > d/gone; echo old > /var/tmp/planted")
        prepared = await backend.seal(slot)
        slot = await backend.create(SlotSpec(), "parent", prepared)
        await slot.execute("rm d/gone; echo new > d/kept; ln d/kept d/link; echo bad > /var/tmp/planted")
        point = replace(await backend.checkpoint(slot), continued=True)
        await slot.execute("echo parent > d/parent")
        one, other = [await backend.create(SlotSpec(), name, point) for name in ("one", "other")]
        await one.execute("echo 2 >> d/kept; echo mine > d/mine")
        assert (await other.execute("cat d/link; ls d")).output.split() == ["new", "kept", "link"]
        assert {change.path for change in await other.changes()} == {
            "/workspace/d/gone", "/workspace/d/kept", "/workspace/d/link", "/var/tmp/planted",
        }  # fmt: skip
        await backend.forget(point)
        sealed = await backend.seal(one, View(only=("/workspace",)))
        assert len(sealed.layers) == 1 + len(prepared.layers)
        expected = "new\n2\nnew\n2\nmine\nold\n"
        assert await shown(backend, sealed, "cat d/kept d/link d/mine /var/tmp/planted") == expected
        assert await shown(backend, sealed, "ls d") == "kept\nlink\nmine\n"

    on_each_rung(body)


PREPARED = """
mkdir d e deep; echo old | tee d/kept d/gone e/kept gone > deep/old; echo old > taken; mkdir -p /opt/bin /opt/lib/tools
echo 'echo prepared' > /opt/bin/tool; chmod 755 /opt/bin/tool; echo old > /opt/lib/tools/a
"""
WORK = r"""
rm -r d gone e/kept; mkdir d; echo new > d/new; mv taken moved; rm -r deep; echo file > deep
rm -r /opt/lib/tools; mkdir /opt/lib/tools; echo bad > /opt/lib/tools/b
echo 'echo replaced' > /opt/bin/tool; echo 'echo planted' > /opt/bin/planted
head -c 50000000 /dev/urandom > large
"""
LEFT_OUT = View(
    without=(
        *("/opt/bin/tool", "/opt/bin/planted", "/opt/lib/tools/a"),
        *("/workspace/gone", "/workspace/d/kept", "/workspace/deep/old"),
    )
)
LOOK_AROUND = r"""
stat -c '%n %F %a %u' f hard sparse p d e; stat -c %s f hard sparse; stat -c %Y f
stat -c %N link; tail -c 4 sparse; du -k sparse
python3 -c 'import os; print(os.listxattr("f"))'; sha256sum large; test f -ef hard; echo $?
find . /opt/bin /opt/lib/tools -mindepth 1 | LC_ALL=C sort -u; sh /opt/bin/tool
cat d/* e/* moved gone deep deep/old /opt/lib/tools/*
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "view",
    [LEFT_OUT, View(only=("/workspace",), without=("/workspace/d",)), View(only=("/workspace/d", "/workspace/hard"))],
    ids=["without", "only", "parts"],
)
def test_a_view_of_a_snapshot_on_disk_shows_what_a_view_in_memory_shows(
    on_each_rung: WithSlot, tmp_path: Path, view: View
) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        assert (await slot.execute(PREPARED)).success
        slot = await backend.create(SlotSpec(), "work", await backend.seal(slot))
        assert isinstance(slot, LocalSlot)
        assert (await slot.execute(WORK + MIXTURE.replace("mkdir -m", "chmod").replace("-s 1T", "-s 9M"))).success
        sealed = await backend.seal(slot)
        await backend.save(sealed, str(tmp_path))
        before = fingerprint(tmp_path)
        loaded = await backend.load(str(tmp_path), SlotSpec())
        assert len(loaded.layers) == 2
        narrow, expected = await backend.view(loaded, view), await backend.view(sealed, view)
        assert await backend.changes(narrow) == await backend.changes(expected)
        assert await shown(backend, narrow, LOOK_AROUND) == await shown(backend, expected, LOOK_AROUND)
        assert await shown(backend, loaded, LOOK_AROUND) == await shown(backend, sealed, LOOK_AROUND)
        assert fingerprint(tmp_path) == before
        for snapshot in (loaded, narrow):
            await backend.forget(snapshot)
        folder = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no view keeps a folder in use that is forgotten
        os.close(folder)

    on_each_rung(body)


def test_a_view_of_a_large_snapshot_on_disk_holds_nothing_up(on_each_rung: WithSlot, tmp_path: Path) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        await slot.execute("head -c 64000000 /dev/zero > large; echo 1 > small")
        await backend.save(await backend.checkpoint(slot), str(tmp_path))
        loaded = await backend.load(str(tmp_path), SlotSpec())
        view = View(without=("/workspace/small",))
        kept = (await slot.requests.call("stats", {})).fields["layers"]
        making = asyncio.ensure_future(backend.view(loaded, view))
        await asyncio.sleep(0)
        asking = asyncio.ensure_future(slot.requests.call("stats", {}))
        ended: list[str] = []
        for name, task in (("view", making), ("stats", asking)):
            task.add_done_callback(lambda _, name=name: ended.append(name))
        await backend.forget(await making)
        assert ended == ["stats", "view"]
        making = asyncio.ensure_future(backend.view(loaded, view))
        await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        forgotten = asyncio.ensure_future(backend.view(loaded, view))
        await asyncio.sleep(0)
        await slot.requests.call("stats", {})
        await backend.forget(loaded)  # the copy is not disturbed
        assert await shown(backend, await forgotten, "ls; wc -c < large") == "large\n64000000\n"
        assert (await slot.requests.call("stats", {})).fields["layers"] == kept  # one is new, one is forgotten

    on_each_rung(body)


def test_a_snapshot_on_disk_that_cannot_be_copied_is_a_failure_of_the_sandbox(
    on_each_rung: WithSlot, tmp_path: Path
) -> None:
    """An error of the system's own could count as a failure of the work in it."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert isinstance(slot, LocalSlot)
        await slot.execute("echo 1 > f")
        await backend.save(await backend.checkpoint(slot), str(tmp_path))
        (tmp_path / "0/root" / "/".join("d" * 500)).mkdir(parents=True)
        loaded = await backend.load(str(tmp_path), SlotSpec())
        kept = (await slot.requests.call("stats", {})).fields["layers"]
        with raises(SandboxError):
            await backend.view(loaded, View(without=("/workspace/f",)))
        assert (await slot.requests.call("stats", {})).fields["layers"] == kept

    on_each_rung(body)
