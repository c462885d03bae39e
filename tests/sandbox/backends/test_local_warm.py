"""Waiting shells: a command in one is a command in a fresh `bash -c`, and nothing of it is there for the next."""

from __future__ import annotations

import asyncio
import re

import pytest

from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.base import ExecutionResult, Slot
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

BANK = [
    "true", "false", "exit 3", "echo out; echo err >&2", "pwd; echo $OLDPWD; echo $0 $# \"$*\" $- $SHLVL",
    "nosuch", "echo a\n\nnosuch\necho $LINENO", "kill -TERM $$", "kill -9 $BASHPID", "set -e; false; echo never",
    "set -u; echo $nope; echo never", "echo ${x?unset}", "return 4", "cat; read x; echo $?", "echo $REPLY[$_x]",
    "trap 'echo bye' EXIT; exit 2", "(exit 4)", "exec echo replaced", "f() { echo $FUNCNAME; }; f",
    "echo $BASH_EXECUTION_STRING", "env | sort | grep -v ^_=", "ls -l /proc/self/fd | grep -c :", "ulimit -a", "umask",
    "echo $PPID", "jobs; set -o | head -30", "shopt", "compgen -v | grep -v 'BASH_\\|PIPESTATUS'",
    "sleep 0.01 & wait; echo $?", "cat <<E\nhere $0\nE", "printf '\\377'", "echo 'quo\"ted' \"$(echo sub)\"",
    "# only a comment", "", "echo tail\\", "cd /; pwd", "tty; stty size", "readlink /proc/$$/fd/0",
    "echo $((1/0)); echo never", "trap", "x=1", "wait; echo $?",
]  # fmt: skip


def shown(result: ExecutionResult) -> tuple[int, str]:
    return result.exit_code, re.sub(r"\bpid \d+|pipe:\[\d+\]|line \d+: +\d+ ", "", result.output)


def test_a_waiting_shell_does_what_a_fresh_one_does(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        fresh = [shown(await slot.execute(command)) for command in BANK]
        await slot.prewarm()
        for command, expected in zip(BANK, fresh, strict=True):
            result = await slot.execute(command)
            assert result.metadata["warm"] is True
            assert shown(result) == expected, command

    with_slot(body)


def test_nothing_of_one_command_is_there_for_the_next(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.prewarm(2)
        for _ in range(4):
            result = await slot.execute('echo "[$X] $(pwd) $(type -t f) $-"; cd /; export X=1; f() { :; }; set -f')
            assert re.fullmatch(r"\[\] /workspace  \w+\n", result.output), result.output
            assert "f" not in result.output.split()[-1]

    with_slot(body)


def test_what_a_waiting_shell_cannot_do_a_fresh_one_does(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.prewarm()
        assert "warm" in (await slot.execute("true")).metadata
        verdict = await slot.execute("echo v >&3", verdict=True)
        assert (verdict.verdict, "warm" in verdict.metadata) == (b"v\n", False)
        given = await slot.execute("cat", stdin=b"mine")
        assert (given.output, "warm" in given.metadata) == ("mine", False)
        assert "warm" not in (await slot.execute(["echo", "argv"])).metadata
        assert (await slot.execute("echo a\0b")).exit_code == 126
        await slot.write_text("rc", "echo sourced")
        assert (await slot.execute("true", env={"BASH_ENV": "/workspace/rc"})).output == "sourced\n"

    with_slot(body)


def test_another_directory_or_environment_is_served_and_then_waited_for(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.prewarm()
        kinds = [await slot.execute("pwd; echo $X", cwd="/usr", env={"X": "1"}) for _ in range(3)]
        assert [result.output for result in kinds] == ["/usr\n1\n"] * 3
        assert ["warm" in result.metadata for result in kinds] == [False, True, True]
        with pytest.raises(FileNotFoundError):
            await slot.execute("true", cwd="/no/such")
        with pytest.raises(FileNotFoundError):
            await slot.execute("true", cwd="/no/such")
        assert (await slot.execute("echo alive")).output == "alive\n"
        await slot.prewarm(0)
        assert "warm" not in (await slot.execute("echo alive")).metadata

    with_slot(body)


def test_limits_hold_in_a_waiting_shell(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.prewarm()
        daemon = await slot.execute("sleep 2000 & echo started")
        assert daemon.output == "started\n"
        command = "echo begun; sleep 1001 & setsid sleep 1002 & (setsid sh -c 'sleep 1003 & sleep 1004' &); sleep 1005"
        result = await slot.execute(command, timeout_s=0.5)
        assert (result.output, result.exit_code, result.metadata["warm"]) == ("begun\n", 124, True)
        assert (await slot.execute("pgrep -fc 'sleep [1]00[1-5]'; pgrep -fc 'sleep [2]000'")).output == "0\n1\n"
        flood = await slot.execute("echo START; head -c 5000000 /dev/zero; echo END", max_output_bytes=100)
        assert flood.metadata["output_total_bytes"] == 5_000_010
        assert (flood.output[:6], flood.output[-4:]) == ("START\n", "END\n")
        running = asyncio.ensure_future(slot.execute("touch begun; sleep 1000"))
        await slot.execute("until [ -e begun ]; do :; done", timeout_s=20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await slot.execute("pgrep -fc 'sleep [1]000'")).output == "0\n"

    with_slot(body)


def test_a_waiting_shell_that_is_killed_is_replaced(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.prewarm(3)
        for _ in range(3):
            await slot.execute(["bash", "-c", "kill -9 -1; true"])
            assert (await slot.execute("echo alive")).output == "alive\n"
        pieces: list[bytes] = []
        await slot.execute("echo one; echo two", on_output=pieces.append)
        assert b"".join(pieces) == b"one\ntwo\n"

    with_slot(body)
