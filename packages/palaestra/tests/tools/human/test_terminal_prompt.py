"""A person who is asked at a real terminal: what counts as an answer, and what the terminal is like afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator

import pytest

from golden_messages import check_message, raises
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra.tools.human.terminal_prompt import TerminalPerson
from palaestra_slots.core.errors import ConfigError

REQUEST = ApprovalRequest("rm -rf build", ["deletes whole directories"], "t1")


class Desk:
    """A terminal with somebody before it."""

    def __init__(self) -> None:
        self.leader, self.follower = pty.openpty()
        os.set_blocking(self.leader, False)
        self.path = os.ttyname(self.follower)
        self.shown = ""

    def close(self) -> None:
        os.close(self.leader)
        os.close(self.follower)

    async def sees(self, text: str) -> None:
        """Wait until the text is on the screen, and look no more at what came up to it."""
        loop, more = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.leader, more.set)
        try:
            while text not in self.shown:
                more.clear()
                await more.wait()
                with contextlib.suppress(BlockingIOError):
                    self.shown += os.read(self.leader, 1 << 16).decode()
        finally:
            loop.remove_reader(self.leader)
        self.shown = self.shown.partition(text)[2]

    def types(self, keys: str) -> None:
        os.write(self.leader, keys.encode())


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    before = termios.tcgetattr(made.follower)
    yield made
    assert termios.tcgetattr(made.follower) == before, "the terminal is as it was"
    made.close()


def asked(desk: Desk, question: Callable[[TerminalPerson], Awaitable[object]], *keys: str) -> object:
    """What comes of a question when these keys are pressed, each after a prompt."""

    async def scenario() -> object:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            answering = group.create_task(_awaited(question(TerminalPerson(desk.path))))
            for each in keys:
                await desk.sees("[n] " if question is approving else "): ")
                desk.types(each)
            return await answering

    return asyncio.run(scenario())


async def _awaited(question: Awaitable[object]) -> object:
    return await question


def approving(person: TerminalPerson) -> Awaitable[object]:
    return person.approve(REQUEST)


def choosing(person: TerminalPerson) -> Awaitable[object]:
    return person.answer("Which file?", ["a.txt", "b.txt"])


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (["y\r"], ApprovalAnswer.ONCE),
        (["Yes\n"], ApprovalAnswer.ONCE),
        (["s\r"], ApprovalAnswer.SESSION),
        (["n\r"], ApprovalAnswer.DENY),
        (["\r"], ApprovalAnswer.DENY),
        (["what?\r", "yy\x7f\r"], ApprovalAnswer.ONCE),
        (["\x03"], ApprovalAnswer.DENY),
        (["y\x03"], ApprovalAnswer.DENY),
        (["\x04"], ApprovalAnswer.DENY),
        (["\xff\r", "n\r"], ApprovalAnswer.DENY),
    ],
)
def test_only_a_yes_is_a_yes(desk: Desk, keys: list[str], answer: ApprovalAnswer) -> None:
    assert asked(desk, approving, *keys) is answer


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (["2\r"], "b.txt"),
        (["3\r"], "3"),
        (["neither, thank you\r"], "neither, thank you"),
        (["\r", " ä \r"], "ä"),
        (["\x03"], None),
        (["\x04"], None),
    ],
)
def test_an_answer_is_a_choice_or_words(desk: Desk, keys: list[str], answer: str | None) -> None:
    assert asked(desk, choosing, *keys) == answer


def test_what_was_typed_before_the_question_is_no_answer(desk: Desk) -> None:
    desk.types("y\r")
    assert asked(desk, approving, "n\r") is ApprovalAnswer.DENY


async def test_a_long_call_does_not_push_the_question_out_of_sight(desk: Desk) -> None:
    about = "The agent calls the tool 'pay' of the MCP server 'bank', which may change things"
    lines = "\n".join(map(str, range(500)))
    request = ApprovalRequest(lines, ["may change things"], "t", "the tool 'pay' of the MCP server 'bank'", {}, "k")
    asking = asyncio.ensure_future(TerminalPerson(desk.path).approve(request))
    await desk.sees(f"{about}:\r\n  | 0\r\n")
    await desk.sees(f"  | 499\r\n{about}\r\nRun it? y: ")
    desk.types("n\r")
    assert await asking is ApprovalAnswer.DENY


async def test_what_a_model_wrote_cannot_pass_for_the_question(desk: Desk) -> None:
    sly = "rm -rf a\r\x1b[2J\nRun it? \u202e\x07"
    asking = asyncio.ensure_future(
        TerminalPerson(desk.path).approve(ApprovalRequest(sly, ["deletes", "kills"], "t\x1b[0m"))
    )
    await desk.sees("A command of task t\\x1b[0m deletes, kills:\r\n")
    await desk.sees("  | rm -rf a\\r\\x1b[2J\r\n  | Run it? \\u202e\\x07\r\nRun it? y: ")
    desk.types("n\r")
    assert await asking is ApprovalAnswer.DENY


async def test_a_question_has_its_time_and_half_an_answer_is_none(desk: Desk) -> None:
    person = TerminalPerson(desk.path, timeout_s=0.3)
    asking = asyncio.ensure_future(person.approve(REQUEST))
    await desk.sees("[n] ")
    desk.types("y")
    assert await asking is ApprovalAnswer.DENY
    await desk.sees("No answer in 0.3 s.")
    assert await person.answer("Which?", []) is None
    os.set_blocking(desk.follower, False)
    with pytest.raises(BlockingIOError):
        os.read(desk.follower, 1)


async def test_questions_come_one_at_a_time_and_one_that_is_given_up_leaves_the_terminal(desk: Desk) -> None:
    person = TerminalPerson(desk.path)
    first = asyncio.ensure_future(person.approve(REQUEST))
    await desk.sees("[n] ")
    second = asyncio.ensure_future(person.answer("Which?", []))
    third = asyncio.ensure_future(person.answer("Where?", []))
    first.cancel()
    await desk.sees("  | Which?\r\nYour answer (Ctrl-C: none): ")
    assert "Where" not in desk.shown
    desk.types("this\r")
    assert await second == "this"
    await desk.sees("  | Where?\r\nYour answer (Ctrl-C: none): ")
    desk.types("there\r")
    assert await third == "there"


async def test_a_terminal_that_is_hung_up_says_no() -> None:
    desk = Desk()
    asking = asyncio.ensure_future(TerminalPerson(desk.path).approve(REQUEST))
    await desk.sees("[n] ")
    os.close(desk.leader)
    assert await asking is ApprovalAnswer.DENY
    os.close(desk.follower)


def test_without_a_terminal_nobody_can_be_asked() -> None:
    with raises(ConfigError, "/dev/null", "Inappropriate", "ioctl"):
        TerminalPerson("/dev/null")
    code = "from palaestra.tools.human.terminal_prompt import TerminalPerson; TerminalPerson()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, start_new_session=True
    )
    check_message(done.stderr, "/dev/tty", "address")


SCRIPT = """
import json
from palaestra import ToolSession
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra.tools.human.approval import Approvals
from palaestra.tools.builtin.clarify import User
from palaestra.tools.human.terminal_prompt import TerminalPerson

person = TerminalPerson()
with ToolSession(shared=[Approvals(person.approve), User(person.answer)]) as session:
    try:
        session.handle("write_file", {"path": "d/f", "content": ""})
    except IsolationUnavailable:
        print("SKIP")
    else:
        for name, arguments in (
            ("terminal", {"command": "rm -r d"}),
            ("terminal", {"command": "ls"}),
            ("terminal", {"command": "rm -r d; ls"}),
            ("clarify", {"question": "Really?", "choices": ["yes", "no"]}),
        ):
            print(json.dumps(json.loads(session.handle(name, arguments))))
"""


@pytest.mark.slots
async def test_a_session_asks_at_the_terminal_it_was_started_from(desk: Desk) -> None:
    """The terminal controls the program, so that Ctrl-C would end it."""
    os.set_inheritable(desk.follower, True)
    becomes = f"import fcntl, os, termios; os.setsid(); fcntl.ioctl({desk.follower}, termios.TIOCSCTTY, 0)\n"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", becomes + SCRIPT], stdout=asyncio.subprocess.PIPE, pass_fds=[desk.follower]
    )
    assert process.stdout is not None
    for prompt, keys in (("[n] ", "\x03"), ("[n] ", "y\r"), ("none): ", "1\r")):
        seeing = asyncio.ensure_future(desk.sees(prompt))
        ending = asyncio.ensure_future(process.wait())
        await asyncio.wait([seeing, ending], return_when=asyncio.FIRST_COMPLETED)
        if not seeing.done():
            seeing.cancel()
            break
        await seeing
        desk.types(keys)
    told = (await process.stdout.read()).decode().splitlines()
    assert await process.wait() == 0
    if told == ["SKIP"]:
        pytest.skip("no slots here")
    refused, after, allowed, said = map(json.loads, told)
    assert refused["status"] == "blocked"
    assert after["output"] == "d\n"
    assert allowed["output"] == ""
    assert said["user_response"] == "yes"
