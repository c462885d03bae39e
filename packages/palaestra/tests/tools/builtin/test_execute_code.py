"""Programs that call tools: what they can do, what bounds them, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.tools.builtin.execute_code import FOLDER, MAX_CALLS
from palaestra.tools.decorator import tool
from palaestra.tools.inner_calls import InnerCalls
from palaestra.tools.programs.host_channel import BrokenChannel, ProgramChannel
from palaestra_slots.core.errors import IsolationUnavailable, SlotLost
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


async def run(desk: Desk, code: str, **arguments: JSON) -> JSON:
    return await desk.call("execute_code", code=code, **{"timeout": 60, **arguments})


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS, Rung.CONFINED, Rung.NONE], ids=lambda rung: rung.label)
def test_a_program_calls_the_agents_tools_in_every_rung(rung: Rung) -> None:
    async def main() -> None:
        async with LocalBackend(rung=rung) as backend:
            desk = Desk(await backend.create(SlotSpec(), "tools-test"))
            reply = await run(
                desk,
                "from palaestra_tools import write_file, terminal\n"
                "for n in range(3):\n"
                "    write_file(f'f{n}.txt', str(n) * n)\n"
                "print(terminal('cat f*.txt')['output'], terminal(command='exit 3')['exit_code'])\n",
            )
            assert reply == {"output": "122 3\n", "exit_code": 0, "error": None, "tool_calls_made": 5}
            assert await desk.slot.list_dir(FOLDER) == []
            calls = desk.tools.state(InnerCalls).taken(2)
            assert {call.turn for call in calls} == {2}
            assert [call.tool for call in calls] == ["write_file"] * 3 + ["terminal"] * 2
            assert calls[1].arguments == '{"path": "f1.txt", "content": "1"}'
            assert '"output": "122"' in calls[3].reply

    in_a_slot(main)


def test_calls_are_checked_as_a_models_are(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await run(
            desk,
            "import palaestra_tools as t\n"
            "print(t.write_file('a.txt', 7)['error'])\n"
            "print(t.call_tool('write_file', {'path': 'a.txt'})['error'])\n"
            "print(t.call_tool('no_such')['error'])\n"
            "print(t.call_tool('execute_code', {'code': ''})['error'])\n"
            "print(t.read_file('a.txt')['error'])\n"
            "t.write_file('a.txt', mode='w')\n",
        )
        said = reply["output"].splitlines()
        assert said[0].startswith("Invalid arguments: argument 'content' must be string")
        assert said[1].startswith("Invalid arguments: missing required argument 'content'")
        assert said[2].startswith("Unknown tool 'no_such'")
        assert said[3].startswith("execute_code cannot be called by a program")
        assert "a.txt" in said[4]
        assert "unexpected keyword argument 'mode'" in reply["output"]
        assert (reply["exit_code"], reply["tool_calls_made"]) == (1, 5)

    at_desk(scenario)


def test_the_printed_program(at_desk: AtDesk) -> None:
    page = (Path(__file__).parents[5] / "docs/tools/sub_agents.md").read_text()
    program = re.search(r"```python\n(from palaestra_tools.*?)```", page, re.DOTALL)
    assert program is not None

    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.txt", "first\nTODO: second\n")
        reply = await run(desk, program[1])
        assert (reply["exit_code"], reply["tool_calls_made"]) == (0, 2), reply
        assert "a.txt" in reply["output"]
        assert "1|first" in reply["output"]

    at_desk(scenario)


def test_the_number_of_calls_is_limited(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await run(desk, "from palaestra_tools import todo\nwhile True:\n    todo()\n")
        assert f"{MAX_CALLS} calls" in reply["output"]
        assert (reply["exit_code"], reply["tool_calls_made"]) == (1, MAX_CALLS)

    at_desk(scenario)


def test_threads_of_a_program_take_turns(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await run(
            desk,
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from palaestra_tools import terminal\n"
            "with ThreadPoolExecutor(8) as pool:\n"
            "    print(sorted(pool.map(lambda n: terminal(f'echo {n}')['output'].strip(), range(8))))\n",
        )
        assert reply["output"] == f"{[str(n) for n in range(8)]}\n"

    at_desk(scenario)


def test_long_requests_and_replies_and_printed_floods_go_through(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await run(
            desk,
            "from palaestra_tools import write_file, read_file\n"
            "text = 'é' * 1_000_000\n"
            "print(write_file('big.txt', text)['bytes_written'])\n"
            "for n in range(24_000):\n"
            "    print(f'line {n} ' + 'x' * 90)\n",
        )
        assert reply["exit_code"] == 0
        assert reply["output"].startswith("2000000\nline 0 xx")
        assert reply["output"].endswith("line 23999 " + "x" * 90 + "\n")
        assert "OUTPUT CUT HERE" in reply["output"]
        assert reply["output_total_bytes"] == 8 + sum(len(f"line {n} ") + 91 for n in range(24_000))
        assert len(reply["output"]) <= 50_000
        shorter = await run(desk, "for n in range(9_000): print('y' * 20)")
        assert shorter["output_total_chars"] == 9_000 * 21
        assert len(await desk.slot.read_bytes(shorter["full_output_path"])) == 9_000 * 21
        refused = await run(desk, "from palaestra_tools import todo\ntodo('x' * 9_000_000)")
        assert "RuntimeError: the arguments" in refused["output"]

    at_desk(scenario)


@pytest.mark.parametrize("timeout", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_at_its_time_limit_a_program_is_killed_with_all_that_it_started(at_desk: AtDesk, timeout: int) -> None:
    async def scenario(desk: Desk) -> None:
        code = (
            "import subprocess\n"
            "subprocess.Popen(['sleep', '4711'])\n"
            "print('so far')\n"
            "from palaestra_tools import terminal\n"
            "terminal('sleep 4712')\n"
        )
        reply = await run(desk, code, timeout=timeout)
        assert reply["exit_code"] == 124
        assert f"longer than {timeout}s" in reply["error"]
        if timeout > 1:  # a busy machine may not come so far in a second
            assert reply["output"] == "so far\n"
        assert (await desk.slot.execute("pgrep -f 'sleep 471[12]'")).output == ""
        assert await desk.slot.processes() == []

    at_desk(scenario)


def test_a_cancelled_call_leaves_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        @tool
        async def here() -> str:
            """Tell that the program runs."""
            running.set()
            return ""

        running = asyncio.Event()
        desk.tools.registry.register(here)
        code = "from palaestra_tools import here\nhere()\nimport subprocess\nsubprocess.run(['sleep', '4713'])\n"
        call = asyncio.ensure_future(run(desk, code))
        await running.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await desk.slot.execute("pgrep -f 'sleep 4713'")).output == ""
        assert await desk.slot.processes() == []
        assert await desk.slot.list_dir(FOLDER) == []

    at_desk(scenario)


@pytest.mark.parametrize(
    ("code", "exit_code", "output"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import os, signal\nprint('a')\nos.kill(os.getpid(), signal.SIGKILL)", 137, "a\n"),
        ("import os\nprint('b')\nos.write(2, b'c')\nos._exit(3)", 3, "b\nc"),
        ("import os\nif os.fork() == 0:\n    os.setsid(); os.execvp('sleep', ['sleep', '4714'])\nprint('d')", 0, "d\n"),
        ("import sys\nprint(repr(sys.stdin.read()), __name__)", 0, "'' __main__\n"),
    ],
    ids=["exit", "killed", "at-once", "a-daemon-holds-the-pipe", "stdin"],
)
def test_its_true_end_is_told(at_desk: AtDesk, code: str, exit_code: int, output: str) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await run(desk, code)
        assert (reply["output"], reply["exit_code"], reply["error"]) == (output, exit_code, None)

    at_desk(scenario)


def test_a_program_that_kills_what_carries_its_calls_is_ended_with_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        code = (
            "import os, signal, time\nprint('a', flush=True)\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)\n"
        )
        reply = await run(desk, code)
        assert reply["exit_code"] == 137
        check_message(reply["error"])
        assert await desk.slot.processes() == []

    at_desk(scenario)


@pytest.mark.parametrize("said", ["hello, who is there?", r"o99999999\n", r"x3\nabc", r"C-1\n", r"e3\nabc", r"\n"])
def test_what_is_no_frame_ends_a_channel(at_desk: AtDesk, said: str) -> None:
    async def answer(request: bytes | None) -> bytes:
        raise AssertionError("nothing was asked")

    async def scenario(desk: Desk) -> None:
        process = await desk.slot.spawn(["bash", "-c", f"printf '{said}'; cat"])
        async with asyncio.timeout(20):
            with pytest.raises(BrokenChannel):
                await ProgramChannel(process, 1000).serve(answer)

    at_desk(scenario)


def test_the_worlds_failure_inside_a_call_is_not_told_to_the_program(at_desk: AtDesk) -> None:
    @tool
    async def lose() -> str:
        """Lose the slot."""
        raise SlotLost("gone")

    async def scenario(desk: Desk) -> None:
        desk.tools.registry.register(lose)
        with pytest.raises(SlotLost):
            await run(desk, "from palaestra_tools import lose\nlose()\n")
        assert await desk.slot.processes() == []

    at_desk(scenario)


def test_children_of_a_program_cannot_call_tools(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        code = (
            "import os, palaestra_tools\n"
            "if os.fork() == 0:\n"
            "    try:\n        palaestra_tools.todo()\n"
            "    except RuntimeError as error:\n        print(error, flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\nprint(palaestra_tools.todo()['summary']['total'])\n"
        )
        reply = await run(desk, code)
        assert reply["output"] == "only the program itself can call tools, not the processes that it has started\n0\n"

    at_desk(scenario)


def test_there_is_nothing_that_others_could_connect_to(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        code = "print(open('/proc/net/unix').read().count('/'), open('/proc/net/tcp').read().count(':') )"
        before = (await desk.slot.execute(["python3", "-c", code])).output
        assert (await run(desk, f"{code}\nimport palaestra_tools"))["output"] == before

    at_desk(scenario)


def test_a_slot_without_python_says_so() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            desk = Desk(await backend.create(SlotSpec(env=(("PATH", "/nowhere"),)), "tools-test"))
            assert "no python3" in (await run(desk, "print(1)"))["error"]
            assert await desk.slot.list_dir(FOLDER) == []

    in_a_slot(main)


def in_a_slot(main: Callable[[], Coroutine[None, None, None]]) -> None:
    try:
        asyncio.run(main())
    except IsolationUnavailable as error:
        pytest.skip(str(error))
