"""Commands in local slots: what they see, how they end, what is kept of their output."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import SlotLost, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import WORKSPACE, ExecutionResult, Rung, Slot, SlotSpec
from sandbox.bodies import WithSlot
from sandbox.processes import descendants, ignoring

pytestmark = pytest.mark.slots


async def until_there(slot: Slot, path: str) -> None:
    """Returns once a command has made the file. The wait is inside the slot, where a shell can do it."""
    await slot.execute(f"until [ -e {path} ]; do :; done", timeout_s=20)


def test_a_command_runs_and_reports(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("pwd; echo err >&2; cat; exit 3", stdin=b"in\n", env={"X": "1"})
        assert (result.success, result.output, result.error) == (False, "/workspace\nerr\nin\n", "Exit code: 3")
        assert result.metadata["exit_code"] == result.metadata["returncode"] == 3
        assert result.metadata["rung"] == backend.rung.label == slot.rung.label
        assert result.metadata["timeout"] is False
        assert result.metadata["sandboxed"] is (slot.rung is not Rung.NONE)
        assert (result.metadata["network_isolated"], result.metadata["stateful"]) == (True, False)
        assert result.slot_id == slot.slot_id

    on_each_rung(body)


def test_openings_of_watched_files_are_counted_by_whatever_path(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        for name in ("a", "b"):
            await slot.write_text(f"watched/{name}", name)
        watched = [f"{WORKSPACE}/watched/{name}" for name in ("a", "b", "missing", "")]
        opened = {
            "true": 0,
            "cat watched/a": 1,
            "cat watched/a watched/a; cat < watched/a": 3,
            "ln -s watched l && cat l/a; ln watched/a h && cat h; cd watched && cat /proc/self/cwd/a": 3,
            "for each in $(seq 50); do read line < watched/a; done": 50,
        }
        for command, times in opened.items():
            result = await slot.execute(command, watched=watched)
            assert list(result.metadata["opened"].values()) == [times, 0], (command, result)
        assert "opened" not in (await slot.execute("cat watched/a")).metadata
        killed = await slot.execute("kill -9 $$", watched=watched)
        assert (killed.metadata["signal"], killed.exit_code) == (9, 137)
        assert "signal" not in (await slot.execute("sh -c 'kill -9 $$'; exit $?")).metadata

    on_each_rung(body)


def test_standard_error_can_be_kept_apart(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        both = await slot.execute("echo out; echo err >&2; echo 7 >&3; exit 3", stderr=True, verdict=True)
        assert (both.output, both.error, both.verdict) == ("out\n\n[stderr]\nerr\n", "Exit code: 3", b"7\n")
        assert (both.metadata["stdout"], both.metadata["stderr"]) == ("out\n", "err\n")
        assert (await slot.execute("echo out", stderr=True)).output == "out\n"
        assert (await slot.execute("echo err >&2", stderr=True)).output == "err\n"
        flood = await slot.execute("head -c 500000 /dev/zero | tr '\\0' x >&2", stderr=True, max_output_bytes=100)
        assert (flood.metadata["stdout"], "499900 of 500000 bytes left out" in flood.metadata["stderr"]) == ("", True)
        late = await slot.execute("echo err >&2; sleep 60", stderr=True, timeout_s=0.3)
        assert (late.metadata["stderr"], late.metadata["timeout"]) == ("err\n", True)
        daemon = await slot.execute("(until [ -e f ]; do :; done; echo late >&2; touch g) & echo out", stderr=True)
        assert daemon.output == "out\n"
        await slot.write_text("f", "")
        await until_there(slot, "g")  # its standard error is still read
        missing = await slot.execute(["no-such-program"], stderr=True)
        assert missing.output == missing.metadata["stderr"] != ""

    on_each_rung(body)


def test_an_argv_is_passed_as_it_is(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        arguments = ["a b", "$HOME", "[x]", "", "naïve \udce9", "'\"\n"]
        result = await slot.execute(["python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *arguments])
        assert result.output.strip() == ascii(arguments)

    with_slot(body)


def test_the_environment_holds_nothing_of_the_host(with_slot: WithSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        names = {line.split("=")[0] for line in (await slot.execute("env", env={"MINE": "1"})).output.splitlines()}
        assert names - {"PWD", "SHLVL", "_"} == {"PATH", "HOME", "LANG", "TERM", "MINE"}

    with_slot(body)


def test_programs_that_cannot_run_end_as_in_a_shell(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(["no-such-program"])).exit_code == 127
        await slot.write_text("script", "#!/bin/sh\n")
        assert (await slot.execute(["./script"])).exit_code == 126
        assert (await slot.execute(["/workspace"])).exit_code == 126
        with raises(FileNotFoundError):
            await slot.execute("true", cwd="/no/such")
        with pytest.raises(NotADirectoryError):
            await slot.execute("true", cwd="/workspace/script")

    on_each_rung(body)


def test_what_no_program_can_be_given_is_a_failed_command(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute("echo a\0b")).exit_code == 126
        assert (await slot.execute(["echo", "a\0b"])).exit_code == 126
        assert (await slot.execute("echo \ud800")).exit_code == 126
        assert (await slot.execute("true", env={"A=B": "x", "": "y"})).exit_code in (0, 126)
        await slot.write_text("f", "a\ud800\udcffb")
        assert (await slot.execute("echo alive")).output == "alive\n"
        with pytest.raises(ValueError, match="program"):
            await slot.execute([])

    with_slot(body)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(with_slot: WithSlot, timeout_s: float) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(ValueError, match="timeout_s"):
            await slot.execute("true", timeout_s=timeout_s)

    with_slot(body)


def test_death_by_signal_is_a_shell_status(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute("kill -TERM $$")).exit_code == 143

    with_slot(body)


def test_commands_have_no_signal_ignored_that_the_caller_ignores(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        for number in (signal.SIGQUIT, signal.SIGUSR1):
            assert (await slot.execute(["sh", "-c", f"kill -{number:d} $$"])).exit_code == 128 + number

    with ignoring(signal.SIGQUIT, signal.SIGUSR1):  # as a script's `&` does with the first
        on_each_rung(body)


def test_a_verdict_is_apart_from_the_output(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("echo out; head -c 300000 /dev/zero >&3; echo v >&3", verdict=True)
        assert result.output == "out\n"
        assert result.verdict == b"\0" * 300000 + b"v\n"
        assert (await slot.execute("echo v >&3")).exit_code != 0

    with_slot(body)


def test_a_flood_is_bounded_and_counted(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("echo START; head -c 50000000 /dev/zero; echo END", max_output_bytes=1000)
        assert result.metadata["output_total_bytes"] == 50_000_010
        assert result.metadata["truncated"] is True
        assert result.output.startswith("START\n")
        assert result.output.endswith("END\n")
        assert "49999010 of 50000010 bytes left out" in result.output
        assert len(result.output) < 1100

    with_slot(body)


def test_output_can_be_followed(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        pieces: list[bytes] = []
        first = asyncio.Event()

        def take(data: bytes) -> None:
            pieces.append(data)
            first.set()

        running = asyncio.ensure_future(
            slot.execute("echo one; until [ -e go ]; do sleep 0.01; done; head -c 1000000 /dev/zero", on_output=take)
        )
        await asyncio.wait_for(first.wait(), 10)
        assert b"".join(pieces) == b"one\n"
        await slot.write_text("go", "")
        assert (await running).success
        assert len(b"".join(pieces)) == 1_000_004

    with_slot(body)


def test_an_error_of_the_follower_ends_the_command(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        def refuse(data: bytes) -> None:
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            await slot.execute("echo x; sleep 1000", on_output=refuse)
        assert "sleep" not in (await slot.execute("ps ax -o comm")).output

    with_slot(body)


def test_a_flood_holds_up_nobody_else(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        other = await backend.create(SlotSpec(), "other")
        flood = asyncio.ensure_future(slot.execute("yes", timeout_s=1.0))
        waits = []
        while not flood.done():
            started = time.monotonic()
            assert (await other.execute("echo ok")).output == "ok\n"
            waits.append(time.monotonic() - started)
        assert (await flood).metadata["timeout"] is True
        assert sorted(waits)[len(waits) // 2] < 0.25

    with_slot(body)


def test_a_timeout_keeps_the_output_and_kills_the_whole_tree(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        command = (
            "echo begun; sleep 1001 & setsid sleep 1002 & (setsid sh -c 'sleep 1003 & sleep 1004' &) ;"
            'python3 -c \'import os; os.fork() or (os.setsid(), os.fork() or os.execlp("sleep", "sleep", "1005"))\';'
            "until [ $(pgrep -c sleep) = 5 ]; do :; done; echo all; sleep 1006"
        )
        result = await slot.execute(command, timeout_s=1.5)
        assert result.output == "begun\nall\n"
        assert result.exit_code == 124
        assert result.error == "Command timed out after 1.5s"
        assert (await slot.execute("pgrep -c sleep")).output == "0\n"

    on_each_rung(body)


def test_background_processes_outlive_their_call_and_a_later_timeout(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute("(while :; do echo tick; date +%s%N > beat; sleep 0.02; done) & echo started")
        assert result.output.startswith("started\n") or "tick" in result.output
        assert result.metadata["duration_s"] < 5
        assert (await slot.execute("sleep 1000", timeout_s=0.2)).metadata["timeout"] is True
        before = await slot.read_text("beat")
        await slot.execute('until [ "$(cat beat)" != "$OLD" ] && [ -s beat ]; do :; done', env={"OLD": before.strip()})
        assert await slot.read_text("beat") != before

    with_slot(body)


def test_a_fork_bomb_is_contained_and_ended(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        result = await slot.execute(":(){ :|:& };:; sleep 1000", timeout_s=1.0)
        assert result.exit_code == 124
        assert (await slot.execute("echo alive")).output == "alive\n"

    with_slot(body)


def test_a_cancelled_call_has_killed_its_command_when_it_returns(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        running = asyncio.ensure_future(slot.execute("touch begun; sleep 1000"))
        await until_there(slot, "begun")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await slot.execute("pgrep -c sleep")).output == "0\n"

    with_slot(body)


def test_commands_of_one_slot_run_side_by_side(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("mkfifo pipe")
        results: tuple[ExecutionResult, ExecutionResult] = await asyncio.gather(
            slot.execute("cat pipe", timeout_s=20), slot.execute("echo across > pipe", timeout_s=20)
        )
        assert results[0].output == "across\n"

    with_slot(body)


def test_a_long_command_line_and_input_pass(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(["printf", "%s", "x" * 120_000], max_output_bytes=200_000)).output == "x" * 120_000
        many = ["/bin/echo", "-n", *(["y" * 1000] * 300)]
        assert (await slot.execute(many)).metadata["output_total_bytes"] == 300 * 1001 - 1
        assert (await slot.execute(["/bin/echo", "x" * 4_000_000])).exit_code == 126
        assert (await slot.execute("wc -c", stdin=b"z" * 5_000_000)).output == "5000000\n"

    with_slot(body)


def test_a_slot_that_dies_is_lost_and_not_a_failed_command(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        running = asyncio.ensure_future(slot.execute("touch begun; sleep 1000"))
        await until_there(slot, "begun")
        (init,) = [process for process in descendants(backend.server_pid) if process.name == "slot-init"]
        os.kill(init.pid, signal.SIGKILL)
        with pytest.raises(SlotLost):
            await running
        with pytest.raises(SlotLost):
            await slot.execute("true")
        await backend.destroy(slot)
        with pytest.raises(StaleLease):
            await slot.read_text("x")

    with_slot(body)
