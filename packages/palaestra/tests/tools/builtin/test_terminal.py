"""The terminal tool in a real slot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra.tools.builtin.terminal import (
    MAX_COMMAND_BYTES,
    MAX_KEPT_BYTES,
    MAX_OUTPUT_CHARS,
    clamp_timeout,
    cut_output,
)
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


def test_a_command_gives_its_output_and_exit_code(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        assert await desk.call("terminal", command="echo out; echo err >&2; exit 3") == {
            "output": "out\nerr\n", "exit_code": 3, "error": None
        }  # fmt: skip
        assert (await desk.call("terminal", command="pwd"))["output"] == "/workspace\n"
        assert (await desk.call("terminal", command="cd /tmp && export A=1"))["exit_code"] == 0
        assert (await desk.call("terminal", command="pwd; echo $A"))["output"] == "/workspace\n\n"

    at_desk(scenario)


def test_workdir_is_where_the_command_runs(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("sub dir/x", "")
        assert (await desk.call("terminal", command="pwd", workdir="sub dir"))["output"] == "/workspace/sub dir\n"
        assert (await desk.call("terminal", command="pwd", workdir="/tmp"))["output"] == "/tmp\n"
        reply = await desk.call("terminal", command="touch ran", workdir="nowhere")
        assert reply["exit_code"] != 0
        check_message(reply["error"], "nowhere")
        assert await desk.slot.stat("ran") is None

    at_desk(scenario)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"command": "touch ran; echo a\0b"}, "contains a NUL character; nothing was run"),
        ({"command": "touch ran; echo \ud800"}, "half of a surrogate pair; nothing was run"),
        ({"command": "touch ran; : " + "x" * MAX_COMMAND_BYTES}, "but at most 131071 can be run; nothing was run"),
        ({"command": "touch ran", "workdir": "x" * 300}, "cannot be used"),
        ({"command": "touch ran", "workdir": "loop"}, "workdir loop cannot be used"),
        ({"command": "touch ran", "workdir": "a\0b"}, "cannot contain a NUL character; nothing was run"),
        ({"command": "touch ran", "workdir": "loop", "background": True}, "Nothing was started in loop"),
    ],
)
def test_what_cannot_be_run_is_told(at_desk: AtDesk, arguments: dict[str, JSON], part: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.execute("ln -s loop loop")
        reply = await desk.call("terminal", **arguments)
        assert part in reply["error"]
        assert len(reply["error"]) < 500
        assert await desk.slot.stat("ran") is None

    at_desk(scenario)


def test_the_longest_command_that_can_be_run_is_run(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        longest = "echo ok; : "
        reply = await desk.call("terminal", command=longest + "x" * (MAX_COMMAND_BYTES - len(longest)))
        assert reply == {"output": "ok\n", "exit_code": 0, "error": None}

    at_desk(scenario)


def test_a_command_that_takes_too_long_is_killed_and_its_output_kept(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await desk.call("terminal", command="echo begun; sleep 600", timeout=1)
        assert (reply["output"], reply["exit_code"]) == ("begun\n", 124)
        assert "timed out after 1s" in reply["error"]
        own = await desk.call("terminal", command="exit 124")
        assert own == {"output": "", "exit_code": 124, "error": None}

    at_desk(scenario)


def test_long_output_is_cut_and_the_whole_is_in_the_slot(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await desk.call("terminal", command="seq 1 20000")
        whole = "".join(f"{n}\n" for n in range(1, 20001))
        assert len(reply["output"]) <= MAX_OUTPUT_CHARS
        assert reply["output"].startswith("1\n2\n")
        assert reply["output"].endswith("19999\n20000\n")
        assert reply["output_total_chars"] == len(whole)
        assert await desk.slot.read_text(reply["full_output_path"]) == whole
        again = await desk.call("terminal", command="seq 1 20000")
        assert again["full_output_path"] == reply["full_output_path"]

    at_desk(scenario)


def test_output_too_large_to_keep_tells_its_size(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        size = 2 * MAX_KEPT_BYTES
        reply = await desk.call("terminal", command=f"head -c {size} /dev/zero | tr '\\0' x; echo; echo end")
        assert len(reply["output"]) <= MAX_OUTPUT_CHARS
        assert reply["output"].endswith("x\nend\n")
        assert reply["output_total_bytes"] == size + 5
        assert reply["full_output_bytes"] == 4 << 20  # of the slot's making: the first megabytes
        assert (await desk.slot.read_bytes(reply["full_output_path"])) == b"x" * reply["full_output_bytes"]

    at_desk(scenario)


def test_a_command_has_no_stdin(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        assert (await desk.call("terminal", command="cat; echo done"))["output"] == "done\n"

    at_desk(scenario)


@pytest.mark.parametrize(("asked", "given"), [(-5, 1.0), (30, 30.0), (10**9, 600.0)])
def test_time_limits_stay_within_what_a_call_may_ask_for(asked: float, given: float) -> None:
    assert clamp_timeout(asked) == given


@pytest.mark.parametrize("text", ["\0" * 60_000, "\0" * 30_000, "\x1b[31m\x01" * 20_000, '"' * 60_000, "\n" * 120_000])
def test_a_cut_output_is_bounded_as_it_is_sent_and_never_repeats_text(text: str) -> None:
    shown = cut_output(text, f"{len(text)} characters")
    assert len(json.dumps(shown, ensure_ascii=False)) <= 2 * MAX_OUTPUT_CHARS + 200
    assert sum(shown.count(character) for character in set(text) - {"\n"}) <= len(text) + 100


def test_output_of_control_characters_is_cut_and_saved(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await desk.call("terminal", command="head -c 30000 /dev/zero")
        assert "OUTPUT CUT HERE" in reply["output"]
        assert reply["output_total_chars"] == 30_000
        assert "full_output_path" in reply
        plain = await desk.call("terminal", command="seq 9000 | tr -d '\\n'; echo")
        assert "OUTPUT CUT HERE" not in plain["output"]

    at_desk(scenario)


def test_a_cut_output_fills_its_bound_exactly() -> None:
    assert len(cut_output("x" * 60_000, "60000 characters")) == MAX_OUTPUT_CHARS
