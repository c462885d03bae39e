"""What comes out of a slot, and what must not come out of it or get into it."""

from __future__ import annotations

import asyncio
import os
import resource
import time

import pytest

from abuse.arena import Arena, python
from palaestra_slots.core.errors import StaleLease
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.slot import Slot, SlotSpec

pytestmark = [pytest.mark.slots, pytest.mark.slow]


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_flood_is_counted_and_not_kept(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await slot.execute("head -c 300000000 /dev/zero", max_output_bytes=10_000)
        assert result.metadata["output_total_bytes"] == 300_000_000
        assert len(result.output) < 20_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_flood_does_not_delay_the_neighbours(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        flood = asyncio.ensure_future(slot.execute("cat /dev/zero", timeout_s=1.5))
        quick = await arena.backend.create(SlotSpec(), "quick")
        calls = 0
        while not flood.done():
            started = time.monotonic()
            assert (await quick.execute("echo")).success
            assert time.monotonic() - started < 1.0
            calls += 1
        assert calls >= 5
        assert (await flood).metadata["timeout"]
        await arena.backend.destroy(quick)

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_bytes_that_are_no_text_arrive(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        data = bytes(range(256)) * 16
        await slot.write_bytes("data", data)
        assert await slot.read_bytes("data") == data
        pieces: list[bytes] = []
        result = await slot.execute("cat data", on_output=pieces.append)
        assert b"".join(pieces) == data
        assert "\ufffd" in result.output

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_verdict_is_not_what_is_printed(arena: Arena) -> None:
    """Standard output, a forged status and a guess at the channel change nothing; descriptor 3 alone is the verdict."""

    async def case(slot: Slot) -> None:
        await slot.write_text("agent.sh", 'echo "{\\"score\\": 1.0}"; (echo fake >&3) 2>/dev/null; exit 0')
        graded = await slot.execute("bash agent.sh 3>&-; printf real >&3", verdict=True)
        assert graded.verdict == b"real"
        ungraded = await slot.execute("(echo fake >&3) 2>/dev/null; ls -l /proc/self/fd | wc -l")
        assert ungraded.verdict == b""

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_the_verdict_channel_has_no_second_name(arena: Arena) -> None:
    """A grader that closes descriptor 3 before it runs the agent's code has closed all there is."""

    async def case(slot: Slot) -> None:
        forge = "for fd in /proc/self/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && (echo fake >&$n) 2>/dev/null; done; :"
        await slot.write_text("agent.sh", forge)
        graded = await slot.execute("exec 4>&3 3>&-; bash agent.sh 4>&-; printf real >&4", verdict=True)
        assert graded.verdict == b"real"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_verdict_without_end_is_cut(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        result = await slot.execute("head -c 40000000 /dev/zero >&3; echo through", verdict=True)
        assert result.output == "through\n"
        assert len(result.verdict) == 16 << 20

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_commands_longer_than_a_message_arrive_or_are_refused(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        assert (await slot.execute(f"x={'a' * 100_000}; echo ${{#x}}")).output == "100000\n"
        many = await slot.execute(["printf", "%s", *["b" * 1000] * 500])
        assert many.metadata["output_total_bytes"] == 500_000
        one = await slot.execute(["echo", "c" * 200_000])
        assert one.exit_code == 126
        assert "too long" in one.output
        assert (await slot.execute("echo usable")).output == "usable\n"

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_no_secret_of_the_environment_comes_in(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "hunter2")

    async def case(slot: Slot) -> None:
        inherited = set((await slot.execute(["env"])).output.split())
        usual = {"PATH", "HOME", "LANG", "TERM", "TMPDIR", "GIT_CONFIG_NOSYSTEM"}
        assert {line.partition("=")[0] for line in inherited} <= usual
        found = await slot.execute("cat /proc/*/environ | tr '\\0' '\\n' | grep -c -e SECRET -e hunter2")
        assert found.output.endswith("0\n")

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_no_descriptor_of_ours_comes_in(arena: Arena) -> None:
    """Without namespaces a command finds its own workspace, by name only, at one number more."""
    program = "import os\nfor n in os.listdir('/proc/self/fd'):\n  try: print(n, os.readlink('/proc/self/fd/' + n))\n"
    program += "  except OSError: pass"

    async def case(slot: Slot) -> None:
        lines = (await python(slot, program)).output.splitlines()
        more = [line.split()[1] for line in lines if line.split()[0] not in "012"]
        assert not more or (not arena.contained and {os.path.basename(path) for path in more} == {"workspace"})

    arena.face(case)


@pytest.mark.contained_on("full", "userns", "confined")
def test_a_former_holder_is_refused(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        former = await arena.backend.create(SlotSpec(), "former")
        await arena.backend.destroy(former)
        for call in (former.execute("true"), former.read_bytes("x"), former.write_bytes("x", b""), former.list_dir()):
            with pytest.raises(StaleLease, match="epoch"):
                await call
        assert isinstance(former, LocalSlot)
        former.released = False  # a client that has lost count
        with pytest.raises(StaleLease, match=former.slot_id):
            await former.execute("true")

    arena.face(case)


@pytest.mark.contained_on("full", "userns")
def test_the_paths_of_the_host_are_not_told(arena: Arena) -> None:
    async def case(slot: Slot) -> None:
        told = await slot.execute(
            "cat /proc/mounts /proc/self/mountinfo /proc/1/cmdline /proc/self/cgroup; env; hostname"
        )
        told_of = [secret for secret in (os.getcwd(), "palaestra") if secret in told.output]
        assert bool(told_of) != arena.contained

    arena.face(case)
