"""Shells that wait for their one command: the same as a bash that is started for it, whatever the command."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import re
import signal

import pytest

from palaestra.core.errors import IsolationUnavailable, SlotLost
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.slot import WORKSPACE, ExecutionResult, Rung, Slot, SlotSpec
from sandbox.bodies import WithSlot
from sandbox.processes import descendants

pytestmark = pytest.mark.slots

WARM = SlotSpec(warm_shell=True)
_WAITS = r"""until pgrep -xf '/bin/bash -c exec "\$0" -c "\$BASH_EXECUTION_STRING"'; do :; done"""


async def waiting(slot: Slot) -> str:
    """The pid of the shell that waits, as soon as one does. The wait is inside the slot."""
    result = await slot.execute(["sh", "-c", _WAITS], timeout_s=20)
    assert result.success, result.error
    return result.output.strip()


async def is_there(slot: Slot, pid: str) -> bool:
    return (await slot.execute(["test", "-e", f"/proc/{pid}"])).success


COMMANDS = [
    "true", "", "  # nothing", "exit 3", "return 3", "false; echo $?", "exit 300", "no-such-program; echo $?",
    "if", "echo 'a", "echo )", "x=(", "\n\nno-such\necho $LINENO", "cat <<E\nunfinished",
    "kill -9 $$", "kill $$", "sh -c 'kill -11 $$'", "sh -c 'kill -11 $$'; echo $?", "kill -INT $$; echo on",
    "set -e; false; echo no", "set -u; echo $x; echo no", "echo ${x?oops}; echo no", "trap 'echo bye $?' EXIT; exit 4",
    "exec echo replaced; echo no", "exec no-such; echo no", "cd /nowhere; echo $? $PWD", "shopt -s expand_aliases",
    "echo $0 $- $# $_ \"$*\"", "echo $BASH_EXECUTION_STRING 'a\"b' \\\\ $SECONDS $SHLVL $LINENO $BASH_SUBSHELL",
    "f() { caller; echo ${FUNCNAME[@]} ${BASH_SOURCE[@]} ${BASH_LINENO[@]}; return 7; }; f",
    "echo out; echo err >&2; echo out", "cat; read x; echo $?", "history; fc -l",
    "python3 -c 'import os; print(os.getppid())'",
    "test -t 0 || test -t 1 || echo no terminal", "ps -o ppid=,sid=,pgid= $$ | tr -s ' ' | grep -c \" 1 $$ $$\"",
    "(exit 5); echo $?; false | true; echo ${PIPESTATUS[@]}", "echo $$ | grep -c . >&2; exit 9", "yes | head -c 3000",
    "readlink /proc/$$/fd/*; ls /proc/$$/fd; readlink /proc/$$/cwd", "printf '\\x00\\xff\\n'", "env | sort",
    "declare -p OLDPWD PWD; cd /; cd -", "echo é \x01 \x7f '\x01\x7f'; echo \"$BASH_EXECUTION_STRING\" | od -c",
]  # fmt: skip


def seen(result: ExecutionResult) -> tuple[str, int, str, object]:
    """What there is to compare: not the numbers of processes and pipes."""
    output = re.sub(r"line (\d+): +\d+ ", r"line \1: PID ", result.output)
    output = re.sub(r"pipe:\[\d+\]", "pipe", output)
    return output, result.exit_code, result.error, result.metadata["shell"]


def test_a_command_is_told_as_by_a_fresh_bash(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, cold: Slot) -> None:
        warm = await backend.create(WARM, "warm")
        for command in COMMANDS:
            pid = await waiting(warm)
            assert seen(await warm.execute(command)) == seen(await cold.execute(command)), command
            assert not await is_there(warm, pid), command

    on_each_rung(body)


_STATE = (
    "declare -p; declare -f; set -o; shopt; ulimit -a; umask; alias; trap; hash; jobs -l; dirs; times | wc -l; "
    "type echo; enable -a; bind -v; complete; mapfile -t status < /proc/$$/status; "
    "printf '%s\\n' \"${status[@]}\" | grep -v -E 'Pid|pid|pgid|sid|Vm|Rss|ctxt|SigQ|State|allowed'"
)
_OF_ONE_PROCESS = ("BASHPID", "SRANDOM", "EPOCH", "RANDOM", "PIPESTATUS", "BASH_ARGC", "SECONDS")


def test_nothing_else_about_the_shell_is_different(on_each_rung: WithSlot) -> None:
    """But what the docs name: what `declare -p` shows of PIPESTATUS, BASH_ARGC and SECONDS."""

    async def body(backend: LocalBackend, cold: Slot) -> None:
        warm = await backend.create(WARM, "warm")
        await waiting(warm)
        results = [await slot.execute(_STATE, max_output_bytes=1 << 20) for slot in (warm, cold)]
        lines = [
            [line for line in result.output.splitlines() if not any(word in line for word in _OF_ONE_PROCESS)]
            for result in results
        ]
        assert len(lines[0]) > 150
        assert "\n".join(difflib.unified_diff(*lines, lineterm="", n=0)) == ""

    on_each_rung(body)


def test_each_shell_runs_one_command(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        pids = []
        for _ in range(3):
            pids.append(await waiting(slot))
            assert (await slot.execute("echo $$; x=1; cd /; umask 0")).output.strip() == pids[-1]
        assert len(set(pids)) == 3
        assert (await slot.execute("echo $x; pwd; umask")).output == "\n/workspace\n0022\n"

    on_each_rung(body)


def test_commands_at_once_each_have_their_own(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        await waiting(slot)
        results = await asyncio.gather(*(slot.execute(f"sleep 0.0{i}; echo {i}") for i in range(8)))
        assert [result.output for result in results] == [f"{i}\n" for i in range(8)]

    on_each_rung(body)


def test_directory_and_environment_are_those_of_the_call(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, cold: Slot) -> None:
        spec = SlotSpec(warm_shell=True, env=(("OWN", "slot"), ("KEPT", "it's")))
        slot = await backend.create(spec, "warm")
        text = bytes(range(1, 256)).decode(errors="surrogateescape")
        odd = "a 'b' $c \\ \n`d`\té"
        pid = await waiting(slot)
        show = 'echo $$ "$OWN" "$KEPT" "$PWD"; env -0 | grep -zc .; printf %s "$ODD$TEXT" | od -An -c'
        env = {"OWN": "call", "ODD": odd, "TEXT": text}
        got = (await slot.execute(show, env=env)).output.splitlines()
        assert got[0] == f"{pid} call it's /workspace"
        expected = (await cold.execute(show, env={**env, "KEPT": "it's"})).output.splitlines()
        assert got[1:] == expected[1:]
        pid = await waiting(slot)
        assert (await slot.execute("echo $$ $OWN $PWD ${ODD-none}")).output == f"{pid} slot /workspace none\n"

    on_each_rung(body)


def test_what_a_waiting_shell_cannot_be_given_starts_another(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        pid = await waiting(slot)
        assert (await slot.execute("cat", stdin=b"in")).output == "in"
        assert (await slot.execute("echo good >&3", verdict=True)).verdict == b"good\n"
        assert (await slot.execute(f"echo {'x' * 5000} | wc -c")).output == "5001\n"
        assert (await slot.execute("echo $SHLVL", env={"SHLVL": "6"})).output == "7\n"
        assert (await slot.execute("env | grep a.b", env={"a.b": "1"})).output == "a.b=1\n"
        assert (await slot.execute("f", env={"BASH_FUNC_f%%": "() { echo made; }"})).output == "made\n"
        assert (await slot.execute("echo $-", env={"SHELLOPTS": "noglob"})).output == "fhBc\n"
        assert (await slot.execute("echo ${PS1-no} ${PS2-no}", env={"PS1": "$ ", "PS2": "> "})).output == "no no\n"
        assert (await slot.execute("shopt -o ignoreeof", env={"IGNOREEOF": "3"})).output == "ignoreeof      \toff\n"
        assert (await slot.execute(["echo", "argv"])).output == "argv\n"
        assert (await slot.execute("echo a\0b")).exit_code == 126
        with pytest.raises(FileNotFoundError):
            await slot.execute("pwd", cwd="nowhere")
        await slot.make_dir("it's here")
        assert (await slot.execute("pwd", cwd="it's here")).output == "/workspace/it's here\n"
        assert pid == await waiting(slot)  # it is still there
        assert (await slot.execute("echo $$; pwd")).output == f"{pid}\n/workspace\n"

    on_each_rung(body)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ("rm -r /workspace; mkdir /workspace; cp -r /kept/. /workspace", "/workspace"),
        ("mv /workspace /elsewhere; mkdir /workspace; cp -r /kept/. /workspace", "/workspace"),
        ("mv /workspace /elsewhere; ln -s /elsewhere /workspace", "/elsewhere"),
    ],
)
def test_a_workspace_that_was_moved_is_not_waited_in(change: str, place: str) -> None:
    """In its place the next one waits; behind a link none does."""

    async def main() -> None:
        backend = LocalBackend(rung=Rung.FULL)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            slot = await backend.create(WARM, "warm")
            await slot.write_text("f", "kept")
            pid = await waiting(slot)
            moved = await slot.execute(["sh", "-c", f"cp -r /workspace /kept && cd / && {change}"])
            if not moved.success:
                pytest.skip(f"the workspace is a mount here: {moved.output}")
            assert (await slot.execute("cat f; pwd -P; echo $PWD")).output == f"kept{place}\n{place}\n"
            if place == WORKSPACE:
                assert pid != await waiting(slot)
            for _ in range(3):
                assert (await slot.execute("cat f; pwd -P; echo $PWD")).output == f"kept{place}\n{place}\n"

    asyncio.run(main())


def test_a_shell_that_was_killed_while_it_waited_is_noticed(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        for name in ("KILL", "TERM", "SEGV"):
            pid = await waiting(slot)
            await slot.execute(["sh", "-c", f"kill -{name} {pid}; while [ -e /proc/{pid} ]; do :; done"])
            assert (await slot.execute("echo fine; exit 5")).output == "fine\n"
        pid = await waiting(slot)
        killer = ["sh", "-c", f"kill -STOP {pid}; (sleep 0.2; kill -KILL {pid}) >/dev/null 2>&1 &"]
        await slot.execute(killer)  # it is given a command and never begins
        assert (await slot.execute("echo fine; exit 5", timeout_s=20)).output == "fine\n"
        assert (await slot.execute(f"echo $$ | grep -c {pid}")).output == "0\n"

    on_each_rung(body)


def test_a_timeout_kills_what_the_command_started_and_nothing_else(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        await waiting(slot)
        daemon = "setsid sleep 1001 >/dev/null 2>&1 & echo $!"
        others = [(await slot.execute(["sh", "-c", daemon])).output.strip()]  # younger than the waiting shell
        others.append(str((await slot.spawn(["sleep", "1002"])).pid))
        tree = "(setsid sleep 1003 &) ; sleep 1004 & echo part; sleep 1005; echo no"
        result = await slot.execute(tree, timeout_s=0.3)
        assert (result.output, result.exit_code, result.metadata["timeout"]) == ("part\n", 124, True)
        assert (await slot.execute(["pgrep", "-f", "sleep 100[345]"])).output == ""
        assert [await is_there(slot, pid) for pid in others] == [True, True]

    on_each_rung(body)


def test_a_cancelled_command_is_dead(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        pid = await waiting(slot)
        running = asyncio.create_task(slot.execute("echo > begun; sleep 1006"))
        await slot.execute(["sh", "-c", "until [ -e begun ]; do :; done"], timeout_s=20)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert not await is_there(slot, pid)
        assert (await slot.execute(["pgrep", "-f", "sleep 1006"])).output == ""
        assert (await slot.execute("echo on")).output == "on\n"

    on_each_rung(body)


def test_what_runs_on_in_the_background_runs_on(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        await waiting(slot)
        result = await slot.execute("(while :; do echo more; sleep 0.01; done) & echo $! > pid; exit 2")
        assert result.exit_code == 2
        pid = (await slot.read_text("pid")).strip()
        assert await is_there(slot, pid)
        assert (await slot.execute(f"kill {pid}; echo $?")).output == "0\n"

    on_each_rung(body)


def test_frozen_forked_and_sealed_slots_have_theirs(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        pid = await waiting(slot)
        await slot.freeze()
        assert (await slot.execute("echo $$ > f; echo $$")).output == f"{pid}\n"
        await waiting(slot)
        async with slot.fork() as fork:
            own = await waiting(fork)
            assert (await fork.execute("echo $$; cat f")).output == f"{own}\n{pid}\n"
        own = await waiting(slot)
        assert (await slot.execute("echo $$")).output == f"{own}\n"
        sealed = await backend.seal(slot)
        after = await backend.create(WARM, "after", sealed)
        own = await waiting(after)
        assert (await after.execute("echo $$; cat f")).output == f"{own}\n{pid}\n"

    on_each_rung(body)


def test_a_slot_that_dies_takes_its_shells_along_and_nothing_else(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, other: Slot) -> None:
        slots = [await backend.create(WARM, f"warm-{number}") for number in range(4)]
        running = [asyncio.ensure_future(slot.execute("echo > begun; sleep 1007")) for slot in slots]
        for slot in slots:
            await slot.execute(["sh", "-c", "until [ -e begun ]; do :; done"], timeout_s=20)
        named = [process for process in descendants(backend.server_pid) if process.name == "slot-init"]
        inits = [process for process in named if process.parent not in {init.pid for init in named}]
        assert len(inits) == 5  # and what one of them has forked to become a command
        for init in sorted(inits)[1:]:
            os.kill(init.pid, signal.SIGKILL)
        assert [type(error) for error in await asyncio.gather(*running, return_exceptions=True)] == [SlotLost] * 4
        assert (await other.execute("echo on")).output == "on\n"
        slot = await backend.create(WARM, "next")
        pid = await waiting(slot)
        assert (await slot.execute("echo $$")).output == f"{pid}\n"

    on_each_rung(body)


def test_the_whole_output_of_a_long_one_is_in_a_file(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(WARM, "warm")
        pid = await waiting(slot)
        pieces: list[bytes] = []
        result = await slot.execute("echo $$; seq 20000", max_output_bytes=1000, on_output=pieces.append)
        whole = f"{pid}\n" + "".join(f"{i}\n" for i in range(1, 20001))
        assert b"".join(pieces).decode() == whole
        assert await slot.read_text(str(result.metadata["full_output_path"])) == whole

    on_each_rung(body)


@pytest.mark.parametrize("name", ["BASH_ENV", "POSIXLY_CORRECT", "SHELLOPTS", "SECONDS"])
def test_no_shell_waits_where_it_would_not_start_the_same(with_slot: WithSlot, name: str) -> None:
    async def body(backend: LocalBackend, cold: Slot) -> None:
        value = {"BASH_ENV": "/workspace/rc", "SHELLOPTS": "noglob"}.get(name, "1")
        slot = await backend.create(SlotSpec(warm_shell=True, env=((name, value),)), "warm")
        await slot.write_text("rc", "echo from rc\n")
        await cold.write_text("rc", "echo from rc\n")
        for _ in range(2):
            result = await slot.execute("echo $- ; shopt -o posix")
            assert seen(result) == seen(await cold.execute("echo $- ; shopt -o posix", env={name: value}))
        assert (await slot.execute(["pgrep", "bash"])).output == ""

    with_slot(body)


def test_a_bash_that_is_none_is_not_waited_for(with_slot: WithSlot) -> None:
    """One that does not look at BASH_ENV, one that is a script, and then none at all."""

    async def body(backend: LocalBackend, _: Slot) -> None:
        if backend.rung is not Rung.FULL:
            pytest.skip("the system's files cannot be changed on this rung")
        for bash in (
            "cp /bin/dash /bin/bash",
            "printf '#!/bin/sh\nexec /bin/real \"$@\"' > /bin/bash; chmod +x /bin/bash",
            ":",
        ):
            slot = await backend.create(WARM, "warm")
            await slot.execute(["sh", "-c", f"mv /bin/bash /bin/real; {bash}; kill -9 $(pgrep bash)"])
            for _ in range(4):
                assert (await slot.execute("echo fine; exit 6")).output == "fine\n"

    with_slot(body)


def test_a_rung_without_namespaces_has_none() -> None:
    async def main() -> None:
        backend = LocalBackend(rung=Rung.CONFINED)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            slot = await backend.create(WARM, "warm")
            for _ in range(2):
                assert (await slot.execute("echo fine; exit 6")).output == "fine\n"

    asyncio.run(main())
