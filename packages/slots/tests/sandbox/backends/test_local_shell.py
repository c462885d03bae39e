"""Stateful shells in local slots: what stays, how a command ends, what happens when the shell does."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import SlotLost, StaleLease, TaskError
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.isolation.self_test import prove
from palaestra_slots.sandbox.local.local_slot import SHELL_FILES, LocalShell
from palaestra_slots.sandbox.slot import Slot, SlotSpec, TerminalSize
from palaestra_slots.sandbox.slotd.exec import pipes
from palaestra_slots.sandbox.slotd.exec.stateful_shell import LOOK_EVERY_S
from sandbox.bodies import WithSlot
from sandbox.processes import descendants

pytestmark = pytest.mark.slots


async def output_of(shell: LocalShell, command: str) -> str:
    result = await shell.run(command, timeout_s=20)
    return result.output


def test_state_stays(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell(env={"GIVEN": "yes"})
        await shell.run("mkdir -p a/b; cd a/b; export X=1; declare -A m=([k]=v); f() { echo f$1; }; alias hi='echo hi'")
        assert await output_of(shell, "pwd; echo $X ${m[k]} $GIVEN; f 2") == "/workspace/a/b\n1 v yes\nf2\n"
        assert await output_of(shell, "hi; env | grep ^X=") == "hi\nX=1\n"
        assert (await shell.run("(exit 7)")).exit_code == 7
        assert await output_of(shell, "echo $?") == "7\n"
        result = await shell.run("true")
        assert result.metadata["shell_restarted"] is False
        assert result.metadata["rung"] == backend.rung.label
        assert (await slot.execute("pwd; echo $X")).output == "/workspace\n\n"

    on_each_rung(body)


def test_a_slot_of_too_few_open_files_for_a_shell_says_so(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await backend.destroy(slot)  # a rung may have one at a time
        few = await backend.create(SlotSpec(limits=Limits(open_files=SHELL_FILES - 1)), "few")
        with raises(TaskError, SHELL_FILES - 1):
            await few.shell()
        await backend.destroy(few)
        enough = await backend.create(SlotSpec(limits=Limits(open_files=SHELL_FILES)), "enough")
        assert await output_of(await enough.shell(), "echo fine > a; cat a") == "fine\n"

    on_each_rung(body)


def test_output_is_what_the_command_wrote_and_nothing_else(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        assert await output_of(shell, "true") == ""
        assert await output_of(shell, "printf 'no newline'") == "no newline"
        assert await output_of(shell, "sleep 100 & echo started") == "started\n"
        assert await output_of(shell, "true & wait $!") == ""
        assert await output_of(shell, "set -x; echo traced") == "++ echo traced\ntraced\n"
        assert await output_of(shell, "set +x") == "++ set +x\n"
        assert await output_of(shell, "no-such-program") == "bash: no-such-program: command not found\n"
        assert await output_of(shell, "echo ! !! '$x' \"!x\"") == "! !! $x !x\n"
        assert await output_of(shell, "cat <<E\nhere\nE") == "here\n"
        binary = await shell.run("printf '\\377\\000\\376'")
        assert binary.output == "\ufffd\0\ufffd"
        syntax = await shell.run("echo before\nif")
        assert syntax.output.startswith("before\n")
        assert "syntax error" in syntax.output
        assert syntax.exit_code != 0
        assert await output_of(shell, "echo alive") == "alive\n"

    with_slot(body)


def test_errors_that_end_scripts_do_not_end_the_shell(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=kept")
        for command in (
            "echo ${y?none}",
            "set -u; echo $nope; set +u",
            "return 4",
            "break",
            "shopt -s nosuch",
            "echo ${x!!}",
        ):
            assert (await shell.run(command)).metadata["shell_restarted"] is False, command
        assert await output_of(shell, "set +u; echo $X") == "kept\n"

    with_slot(body)


def test_input_is_the_callers_and_otherwise_empty(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        assert (await shell.run("cat", stdin=b"mine\n")).output == "mine\n"
        assert await output_of(shell, "cat; read x; echo got $?") == "got 1\n"
        assert (await shell.run("wc -c", stdin=b"z" * 3_000_000)).output == "3000000\n"
        assert (await shell.run("wc -c", stdin="ä" * 3)).output == "6\n"

    with_slot(body)


def test_a_timeout_interrupts_and_the_shell_lives_on(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=kept; cd /usr; (while :; do sleep 1000; done) & old=$!")
        command = "echo begun; setsid sleep 1001 & (setsid sh -c 'sleep 1002 & sleep 1003' &); sleep 1004; echo never"
        result = await shell.run(command, timeout_s=0.5)
        assert result.output == "begun\n"
        assert result.exit_code == 124
        assert result.error == "Command timed out after 0.5s"
        assert result.metadata["shell_restarted"] is False
        assert await output_of(shell, "echo $X; pwd; kill -0 $old && echo old lives") == "kept\n/usr\nold lives\n"
        assert (await slot.execute("pgrep -fc 'sleep 100[1-4]'")).output == "0\n"
        for loop in ("while :; do :; done", "for i in 1 2 3; do sleep 5; done", "sleep 5 | cat", "echo $(sleep 5)"):
            result = await shell.run(f"{loop}; echo never", timeout_s=0.2)
            assert (result.output, result.metadata["shell_restarted"]) == ("", False), loop
        assert await output_of(shell, "echo $X") == "kept\n"

    on_each_rung(body)


def test_a_shell_that_does_not_come_back_is_killed_and_says_so(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=lost; sleep 1000 & ")
        result = await shell.run("trap '' INT; echo begun; while :; do :; done", timeout_s=0.3)
        assert (result.output, result.exit_code, result.metadata["shell_restarted"]) == ("begun\n", 124, True)
        after = await shell.run('echo "[$X]"; pgrep -c sleep')
        assert after.output == "[]\n1\n"
        assert after.metadata["shell_restarted"] is False

    with_slot(body)


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("set -e; false; echo never", 1), ("exec true", 0), ("kill -9 $$", 137)]
)
def test_a_command_that_ends_the_shell_says_so(with_slot: WithSlot, command: str, code: int) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=lost; cd /")
        result = await shell.run(f"echo out; {command}")
        assert (result.output, result.exit_code, result.metadata["shell_restarted"]) == ("out\n", code, True)
        after = await shell.run('echo "[$X]"; pwd')
        assert (after.output, after.metadata["shell_restarted"]) == ("[]\n/workspace\n", False)

    with_slot(body)


@pytest.mark.parametrize("command", ["exec sleep 600", "trap 'exit 5' INT; sleep 600"])
def test_a_shell_that_ends_by_the_interrupt_of_a_timeout_takes_its_command_along(
    on_each_rung: WithSlot, command: str
) -> None:
    """What earlier commands have left in the background stays."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=1; sleep 601 &")
        late = await asyncio.wait_for(shell.run(f"sleep 602 & echo begun; {command}", timeout_s=1), 20)
        assert (late.exit_code, late.output) == (124, "begun\n")
        assert (late.metadata["timeout"], late.metadata["shell_restarted"]) == (True, True)
        assert (await slot.execute("pgrep -a sleep")).output.split(maxsplit=1)[1] == "sleep 601\n"
        assert await output_of(shell, "echo X=$X") == "X=\n"

    on_each_rung(body)


def test_a_command_can_be_given_up_at_any_moment(on_each_rung: WithSlot) -> None:
    """Also while its shell is starting, and an interrupt ends it."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        for turns in (1, 2, 3, 5, 8, 10, 20, 30, 40, 60):
            shell = await slot.shell()
            running = asyncio.ensure_future(shell.run("cd /tmp; echo $PWD"))
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait_for(asyncio.wait([running]), 20)
            assert await output_of(shell, "echo on") == "on\n"
            await shell.aclose()

    on_each_rung(body)


def test_a_shell_that_dies_between_commands_is_not_silent(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        pid = (await shell.run("X=lost; echo $$")).output.strip()
        await slot.execute(f"kill -9 {pid}; while [ -d /proc/{pid} ]; do :; done")
        result = await shell.run('echo "[$X]"')
        assert (result.output, result.metadata["shell_restarted"]) == ("[]\n", True)

    with_slot(body)


def test_a_cancelled_command_is_dead_and_the_shell_is_not(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("X=kept")
        running = asyncio.ensure_future(shell.run("touch begun; sleep 1000"))
        await slot.execute("until [ -e begun ]; do :; done", timeout_s=20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await slot.execute("pgrep -c sleep")).output == "0\n"
        assert await output_of(shell, "echo $X") == "kept\n"

    with_slot(body)


def test_a_callback_that_raises_when_its_command_has_ended_leaves_the_shell_alone(with_slot: WithSlot) -> None:
    """What is written just before the end is read after it; there is nothing to kill then, now or later."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        def refuse(data: bytes) -> None:
            raise LookupError(data)

        shell = await slot.shell()
        for _ in range(6):  # some may still run when their output is read
            with pytest.raises(LookupError):
                await shell.run("echo said", on_output=refuse)
            result = await shell.run("sleep 1000 & echo on; sleep 0.02; echo and on")
            assert (result.output, result.metadata["shell_restarted"]) == ("on\nand on\n", False)
            await shell.run("exit")
            assert (await slot.execute("sleep 0.05; pgrep -c sleep; pkill sleep")).output == "1\n"

    with_slot(body)


def test_commands_of_one_shell_wait_for_each_other(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        results = await asyncio.gather(*(shell.run(f"n={number}; sleep 0.01; echo $n") for number in range(10)))
        assert [result.output for result in results] == [f"{number}\n" for number in range(10)]

    with_slot(body)


def test_shells_of_one_slot_are_apart(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        first, second = await slot.shell(), await slot.shell(cwd="/usr")
        await first.run("X=1")
        assert await output_of(second, 'pwd; echo "[$X]"') == "/usr\n[]\n"
        await first.aclose()
        await first.aclose()
        with pytest.raises(ProcessLookupError, match="closed"):
            await first.run("true")
        assert await output_of(second, "echo alive") == "alive\n"

    with_slot(body)


def test_background_output_comes_with_the_next_command(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("(until [ -e go ]; do sleep 0.01; done; echo from behind; touch done) &")
        await slot.execute("touch go; until [ -e done ]; do :; done", timeout_s=20)
        assert await output_of(shell, "echo mine") == "from behind\nmine\n"

    with_slot(body)


def test_a_background_flood_between_commands_holds_nobody_up(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("(head -c 20000000 /dev/zero; touch done) &")
        await slot.execute("until [ -e done ]; do :; done", timeout_s=20)
        result = await shell.run("echo; echo mine", max_output_bytes=1000)
        assert result.output.endswith("\nmine\n")
        assert result.metadata["output_total_bytes"] < 1_000_000

    with_slot(body)


def test_a_background_flood_does_not_keep_the_loop_busy(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        def written() -> int:
            return int(Path(f"/proc/{flood}/io").read_text().partition("wchar: ")[2].split()[0])

        shell = await slot.shell()
        await shell.run("yes & until [ $(cat /proc/$!/comm) = yes ]; do :; done", timeout_s=20)
        flood = next(process.pid for process in descendants(backend.server_pid) if process.name == "yes")
        begun, before = time.monotonic(), written()
        await asyncio.sleep(0.5)
        after = written()
        pauses = (time.monotonic() - begun) / LOOK_EVERY_S
        assert 0 < after - before < (pauses + 10) * pipes.READ_BYTES
        assert (await shell.run("kill %1", timeout_s=20)).exit_code == 0

    on_each_rung(body)


def test_writing_to_the_status_descriptor_does_not_forge_the_next_status(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("echo garbage >&98; echo 999 0 >&98; printf '\\377' >&98")
        assert (await shell.run("sleep 0.05; false")).exit_code == 1

    with_slot(body)


def test_the_state_can_be_carried_to_another_slot(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run(
            "mkdir -p 'a b'; cd 'a b'; export X=$'tab\\tnew\\nline'; local_only=2; f() { echo f; };"
            "declare -a l=(1 '2 3'); shopt -s extglob; set -u; umask 077; readonly R=1; alias q='echo q'"
        )
        state = await shell.state()
        snapshot = await backend.seal(slot)
        other = await backend.create(SlotSpec(), "fork", snapshot)
        fork = await other.shell(state=state)
        assert await output_of(
            fork, 'pwd; echo "$X"; echo $local_only ${l[1]}; f; q; umask; shopt extglob | cut -f2'
        ) == ("/workspace/a b\ntab\tnew\nline\n2 2 3\nf\nq\n0077\non\n")
        assert "unbound" in await output_of(fork, "echo $nothing")
        with pytest.raises(StaleLease):
            await shell.run("true")

    with_slot(body)


def test_long_commands_and_odd_ones(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        text = "x" * 1_000_000
        assert (await shell.run(f"y={text}; echo ${{#y}}")).output == "1000000\n"
        assert await output_of(shell, "echo ${#y}; # comment") == "1000000\n"
        assert await output_of(shell, "") == ""
        assert (await shell.run("echo a\0b")).exit_code == 126
        assert (await shell.run("echo \ud800")).exit_code == 126
        assert await output_of(shell, "echo \udce9") == "\ufffd\n"
        assert await output_of(shell, "# nothing") == ""
        assert await output_of(shell, "echo a\\") == (await slot.execute("echo a\\")).output
        assert (await shell.run("exec >log; echo hidden; exec >&99")).output == ""
        assert await output_of(shell, "cat log") == "hidden\n"

    with_slot(body)


def test_output_is_bounded_counted_and_spilled(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        result = await shell.run("seq 100000", max_output_bytes=100)
        assert result.metadata["output_total_bytes"] == 588_895
        assert result.output.startswith("1\n2\n")
        assert result.output.endswith("100000\n")
        path = result.metadata["full_output_path"]
        assert await output_of(shell, f"wc -c < {path}; tail -n 1 {path}") == "588895\n100000\n"

    with_slot(body)


def test_a_directory_that_is_not_there_and_a_lost_slot(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        nowhere = await slot.shell(cwd="/no/such")
        with pytest.raises(FileNotFoundError):
            await nowhere.run("true")
        shell = await slot.shell()
        running = asyncio.ensure_future(shell.run("touch begun; sleep 1000"))
        await slot.execute("until [ -e begun ]; do :; done", timeout_s=20)
        await backend.destroy(slot)
        with pytest.raises(SlotLost):
            await running
        await shell.aclose()

    with_slot(body)


def test_a_root_without_bash_has_a_plain_shell(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        if (await slot.execute("rm /usr/bin/bash")).exit_code:
            pytest.skip("the system's files are nobody's on this rung")
        await prove(slot, server_is_root=os.geteuid() == 0)
        shell = await slot.shell()
        assert "no-such: not found" in await output_of(shell, "no-such; echo x >&2; echo y")
        result = await shell.run("cd /usr; X=1; f() { echo f$1; }; cat", stdin=b"in\n")
        assert (result.output, result.metadata["shell"]) == ("in\n", "sh")
        assert await output_of(shell, "pwd; echo $X; f 2; (exit 3)") == "/usr\n1\nf2\n"
        assert await output_of(shell, "echo $?") == "3\n"
        assert (await shell.run("sleep 5; echo never", timeout_s=0.3)).metadata["shell_restarted"] is False
        assert await output_of(shell, "echo $X") == "1\n"
        assert (await shell.run("exit 4")).metadata["shell_restarted"] is True
        assert (await slot.execute("echo alive")).output == "alive\n"

    on_each_rung(body)


def test_the_server_keeps_no_descriptor_of_what_has_ended(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        server = next(process for process in descendants(backend.server_pid) if process.name == "slotd")
        folder = Path(f"/proc/{server.pid}/fd")
        kept = []
        for _ in range(4):
            other = await backend.create(SlotSpec(), "other")
            shell, ended = await other.shell(), await other.shell()
            await shell.run("sleep 1000 & true")
            await ended.run("exit 1")
            await other.execute("echo; seq 1000", max_output_bytes=10)
            processes = [await other.spawn("cat"), await other.spawn("cat", terminal=TerminalSize())]
            await processes[0].kill()
            await backend.destroy(other)
            kept.append(len(list(folder.iterdir())))
        assert kept == [kept[0]] * 4

    with_slot(body)
