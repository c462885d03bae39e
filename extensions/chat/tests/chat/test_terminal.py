"""`palaestra chat` in a real pseudo-terminal, against a streaming server on the loopback."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from chat.chat_process import environment
from palaestra_chat.store import ConversationStore
from palaestra_chat.terminal.renderers import diff_lines
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.testing.echo_chat_server import EchoChatServer, reply_to

pytestmark = pytest.mark.slow

HOST_WRITER = str(Path(__file__).parents[4] / "packages/palaestra/tests/tools/mcp/host_writer.py")
"""A real MCP server whose tools write files on the host."""
CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = "(plan|ask|auto) · "
"""The line above the prompt while nothing runs. The prompt itself is there all the time."""


@contextmanager
def echo_server(delay_s: float = 0.0, server: EchoChatServer | None = None) -> Iterator[EchoChatServer]:
    """The server, on a thread of its own, because a terminal is read by blocking calls."""
    loop = LoopThread("echo")
    server = server or EchoChatServer(delay_s=delay_s)
    try:
        loop.wait(server.__aenter__())
        yield server
        loop.wait(server.__aexit__())
    finally:
        loop.close()


@contextmanager
def terminal(
    folder: Path, url: str, *words: str, model: str = "echo", home: Path | None = None, **variables: str
) -> Iterator[pexpect.spawn]:
    child = pexpect.spawn(
        "palaestra", ["chat", "--base-url", url, "--model", model, *words], cwd=str(folder),
        env={**environment(home or folder), "TERM": "xterm-256color", **variables}, timeout=40, dimensions=(40, 110),
        encoding="utf-8", codec_errors="replace",
    )  # fmt: skip
    try:
        yield child
    finally:
        child.close(force=True)


def terminal_call(command: str, **more: JSON) -> str:
    return f"call terminal {json.dumps({'command': command, **more})}"


def seen(child: pexpect.spawn, pattern: str) -> None:
    """Wait for a pattern. The terminal answers where its cursor is, as a real one does."""
    while child.expect([r"\x1b\[6n", pattern]) == 0:
        child.send("\x1b[1;1R")


def asked(server: EchoChatServer, requests: int) -> None:
    """Wait until the server has had this many requests."""
    until = time.monotonic() + 30
    while len(server.asked) < requests and time.monotonic() < until:
        time.sleep(0.02)


def finish(child: pexpect.spawn) -> str:
    """End by Ctrl-D; returns the last lines."""
    seen(child, PROMPT)
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    return str(child.before)


def messages(folder: Path) -> list[dict[str, JSON]]:
    with ConversationStore(folder / "state" / "conversations.sqlite") as store:
        return store.history(store.conversations()[0].id)


def test_text_and_a_tool_call_stream_into_the_scrollback(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send("say **bold** and `code`\r")
        seen(child, r"\x1b\[1mbold\x1b\[0m and ")  # styled, without its markers
        seen(child, PROMPT)
        child.send(f"{terminal_call('for i in $(seq 30); do echo row $i; done')}\r")
        seen(child, "● terminal")
        seen(child, "earlier lines")
        seen(child, "row 30\\b")
        assert "--resume" in finish(child)
        assert "\x1b[?1049h" not in child.before  # never the alternate screen


def test_an_approval_shows_all_of_the_command(tmp_path: Path) -> None:
    """Also what a terminal would take for a title, and not show."""
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        command = "true #\x1b]; rm -rf nothing\x07\nrm -rf more"
        child.send(f"{terminal_call(command)}\r")
        seen(child, r"  \| true #\\x1b\]; rm -rf nothing\\x07\r\n  \| rm -rf more\r\n")
        seen(child, "Run it")
        time.sleep(0.3)
        child.send("n\r")
        seen(child, "did not allow")


def test_a_call_that_changes_the_host_shows_server_tool_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text(
        json.dumps({"mcpServers": {"fs": {"command": sys.executable, "args": [HOST_WRITER]}}})
    )
    file = tmp_path / "written"
    call = f"call mcp_fs_write {json.dumps({'path': str(file), 'content': 'a' + chr(27) + '[8m' + chr(0x202E)})}"
    with echo_server() as server, terminal(tmp_path, server.url, "--mcp", "mcp.json") as child:
        for answer, result in (("n", "did not allow"), ("s", "│ "), ("", "│ ")):
            seen(child, PROMPT)
            child.send(f"{call}\r")
            if answer:
                seen(
                    child, r"calls the tool 'write' of the MCP server 'fs', which may change things outside the sandbox"
                )
                seen(child, r'\|  "path": "[^"]*written",\r\n  \|  "content": "a\\u001b\[8m\\u202e"')
                seen(child, "Run it")
                time.sleep(0.3)
                child.send(f"{answer}\r")
            seen(child, result)
            assert file.exists() == (answer != "n")
        finish(child)


def test_approval_no_then_yes(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        for answer, result in (("n", "did not allow"), ("y", "no output")):
            child.send(f"{terminal_call('rm -rf nothing')}\r")
            seen(child, "deletes whole directories")
            seen(child, "Run it")
            time.sleep(0.3)  # what was typed before the question does not count
            child.send(f"{answer}\r")
            seen(child, result)
            seen(child, PROMPT)
        child.send(f"{terminal_call('rm -rf nothing')}\r")
        seen(child, "Run it")
        time.sleep(0.3)
        child.send(CTRL_C)
        seen(child, "interrupted")
        seen(child, PROMPT)
        child.send(CTRL_D)
        child.expect(pexpect.EOF)
    results = [str(message["content"]) for message in messages(tmp_path) if message["role"] == "tool"]
    assert ["blocked" in result for result in results] == [True, False, False]
    assert "Interrupted" in results[2]


def test_ctrl_c_interrupts_an_approved_command_and_a_turn_that_begins(tmp_path: Path) -> None:
    """A prompt takes the signal over while it asks, and the chat is still loading when the first message is sent."""
    with echo_server(delay_s=0.3) as server, terminal(tmp_path, server.url) as child:
        seen(child, "›")
        child.send(f"say {'word ' * 50}\r")
        seen(child, r"\x1b\[\?2004l")  # the prompt has ended; the message has not been sent
        child.send(CTRL_C)
        seen(child, "interrupted")
        seen(child, PROMPT)
        child.send(f"{terminal_call('rm -rf nothing; echo started; sleep 60')}\r")
        seen(child, "Run it")
        time.sleep(0.3)
        child.send("y\r")
        seen(child, "│ started")
        child.send(CTRL_C)
        seen(child, "interrupted")
        finish(child)


def test_ctrl_c_interrupts_the_model_and_a_command_and_keeps_the_conversation(tmp_path: Path) -> None:
    with echo_server(delay_s=0.3) as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send(f"say {' '.join(f'word{number}' for number in range(200))}\r")
        asked(server, 1)
        time.sleep(1.0)
        child.send(CTRL_C)
        seen(child, "interrupted")
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo started; sleep 60')}\r")
        seen(child, "│ started")
        child.send(CTRL_C)
        seen(child, "interrupted")
        seen(child, PROMPT)
        child.send("say still there\r")
        asked(server, 3)
        finish(child)
    assert [message["role"] for message in messages(tmp_path)][-2:] == ["user", "assistant"]


def test_a_message_steers_the_running_turn_and_commands_wait(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo began; sleep 4; seq 20')}\x1b\rsay never\r")
        seen(child, "│ began")
        seen(child, "terminal echo began.*Esc stops")
        child.send("say steered\r")
        seen(child, "queued: say steered")
        child.send("/mode plan\r")  # this command does not wait
        seen(child, "only tools that read")
        child.send("/undo\r")
        seen(child, "2 queued")
        seen(child, "13 earlier lines")
        seen(child, "undone; the files are as they were")
        seen(child, "plan · ")
        child.send("/show 1\r")
        seen(child, "began")
        child.send("\x1b[Z")  # Shift-Tab
        seen(child, "ask · ")
        child.send(CTRL_D)
        child.expect(pexpect.EOF)
    sent = [str(message["content"]) for message in server.asked[-1]["messages"] if message["role"] == "user"]
    assert sent[-1] == "say steered"
    assert len(server.asked) == 2  # no turn of its own


def test_a_background_process_has_a_status_and_a_notice(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('sleep 3; echo built it', background=True)}\r")
        seen(child, "1 background process")
        child.send("/background\r")
        seen(child, "proc_[0-9a-f]+ +running")
        seen(child, "ended with exit code 0")
        seen(child, "built it")
        finish(child)


def test_commands_a_file_and_a_fork(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk\n")
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send("say read @notes.txt\r")
        seen(child, r"auto · echo · [1-9]\d* tokens")  # the turn has ended
        for typed, shown in (
            ("/cost", "1 model call,"), ("/tools", "terminal"), ("/save boats", "named"), ("/model", "echo"),
            ("/fork", "with 1 turn\\b"), ("/resume boats", "is this conversation"), ("/background", "no background"),
            ("/undo 3", "takes no argument"), ("/undo", "undone"), ("/stop", "no turn is running"),
            ("/stop all", "use /stop or"), ("/stop processes", "ended 0 background"),
            ("/sandbox now", "/sandbox write"), ("/sandbox diff", "0 files differ"),
            ("/model ecko", "does not list"), ("/model echo", "echo"), ("/nonsense", "unknown command"),
            ("/help", "/background"),
        ):  # fmt: skip
            child.send(f"{typed}\r")
            seen(child, shown)
            seen(child, PROMPT)
        child.send("/exit\r")
        child.expect(pexpect.EOF)
    assert "remember the milk" in str(server.asked[0]["messages"][-1]["content"])


def test_a_wrong_flag_ends_the_prompt_with_the_reason(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url, "--isolatoin", "best") as child:
        seen(child, "unknown flag --isolatoin")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 2


def test_changes_of_the_shared_folder_are_shown_and_asked_about(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("old\n")
    with echo_server() as server, terminal(tmp_path, server.url, "--workdir", str(work)) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo new > a.txt')}\r")
        seen(child, r"-old")
        seen(child, r"\+new")
        seen(child, "Write to")
        time.sleep(0.3)
        child.send("y\r")
        seen(child, r"wrote 1 file\b")
        finish(child)
    assert (work / "a.txt").read_text() == "new\n"


@pytest.mark.parametrize("at_once", [True, False])
def test_no_message_is_lost_that_is_entered_while_a_question_opens(tmp_path: Path, at_once: bool) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("old\n")
    sent = [f"say word-{number}." for number in range(12)]
    with echo_server() as server, terminal(work, server.url, "--workdir", ".", home=tmp_path) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo new > a.txt')}\r")
        seen(child, r"\+new")  # the question follows at once
        for text in ["\r".join(sent)] if at_once else sent:
            child.send(f"{text}\r")
            time.sleep(0.02)
        until, said = time.monotonic() + 40, ""
        while not all(text in said for text in sent) and time.monotonic() < until:
            if child.expect([r"\x1b\[6n", r"\[n\] ", pexpect.TIMEOUT], timeout=1) == 0:
                child.send("\x1b[1;1R")
            said = str([message["content"] for asked in server.asked for message in asked["messages"]])
        assert [text for text in sent if text not in said] == []


def test_a_sentence_that_a_question_interrupts_stays_whole(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("old\n")
    with echo_server() as server, terminal(work, server.url, "--workdir", ".", home=tmp_path) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('sleep 2; echo new > a.txt')}\r")
        seen(child, "● terminal")
        child.send("say one whole sen")
        seen(child, "Write to")
        child.send("tence of mine\r")
        seen(child, "no answer")
        asked(server, 3)
        assert any("say one whole sentence of mine" in str(each["messages"][-1]["content"]) for each in server.asked)


def test_the_last_letter_of_a_sentence_approves_nothing(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('sleep 2; echo ok')}\r")
        seen(child, "● terminal")
        child.send(f"{terminal_call('rm -rf nothing')}\r")  # waits, and steers the turn
        child.send("say wh")
        seen(child, "Run it")
        child.send("y\r")
        seen(child, "no answer")
        seen(child, "Run it")
        time.sleep(1.5)
        child.send("n\r")
        seen(child, "did not allow")
        seen(child, PROMPT)
        asked(server, 3)
    assert any("say why" in str(each["messages"]) for each in server.asked)


def test_a_commit_is_written_with_the_files_that_were_declined_before(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (work / "a.txt").write_text("old\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=work, check=True)
    with echo_server() as server, terminal(work, server.url, home=tmp_path) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo new > a.txt')}\r")
        seen(child, "Write to")
        time.sleep(1.5)
        child.send("n\r")
        seen(child, PROMPT)
        child.send(f"{terminal_call(' '.join([*git, 'commit', '-qam', 'second']))}\r")
        seen(child, "Write to")
        time.sleep(1.5)
        child.send("y\r")
        seen(child, r"wrote \d+ files")
        finish(child)
    status = subprocess.run([*git, "status", "--short"], cwd=work, check=True, capture_output=True, text=True)
    assert (status.stdout, (work / "a.txt").read_text()) == ("", "new\n")


def test_a_diff_says_what_it_does_not_show() -> None:
    shown = "\n".join(diff_lines("".join(f"+{number}\n" for number in range(205))))
    assert "+199" in shown
    assert "+200" not in shown
    assert "5 more lines" in shown


def test_a_command_that_was_cut_off_is_reported_and_not_repeated(tmp_path: Path) -> None:
    with echo_server() as server:
        with terminal(tmp_path, server.url) as child:
            seen(child, PROMPT)
            child.send(f"{terminal_call('echo began; sleep 60')}\r")
            seen(child, "│ began")
            child.kill(9)
            child.wait()
        with terminal(tmp_path, server.url, "-c") as child:
            seen(child, "is continued")
            seen(child, "Outcome unknown: terminal echo began")
            finish(child)
        assert len(server.asked) == 2
    assert [message["role"] for message in messages(tmp_path)][1:] == ["user", "assistant", "tool", "assistant"]


def begun(folder: Path) -> bool:
    """Whether there is a conversation to continue."""
    with ConversationStore(folder / "state" / "conversations.sqlite") as store:
        return any(store.turns.of(each.id, every=True) for each in store.conversations())


def test_a_killed_chat_is_resumed_without_a_lost_or_doubled_turn(tmp_path: Path) -> None:
    rng = random.Random(7)
    sent = 0
    with echo_server(delay_s=0.02) as server:
        for kill in range(20):
            with terminal(tmp_path, server.url, *(["-c"] if begun(tmp_path) else [])) as child:
                seen(child, PROMPT)
                child.send(f'both terminal {{"command": "echo {kill}"}}\nsay answer {kill}\r'.replace("\n", "\x1b\r"))
                sent += 1
                seen(child, f"answer {kill}")  # the message, as it was typed
                if kill % 4:
                    asked(server, len(server.asked) + 1)
                time.sleep(rng.uniform(0.0, 0.5))
                child.kill(9)
                child.wait()
        with terminal(tmp_path, server.url, "-c") as child:
            finish(child)
    with ConversationStore(tmp_path / "state" / "conversations.sqlite") as store:
        [turns] = filter(None, (store.turns.of(each.id) for each in store.conversations()))
        assert all(turn.state == "done" for turn in turns)
        answers: list[str] = []
        for turn in turns:
            said = [message for _, message in store.turns.messages_of(turn)]
            asked_for = [str(each["content"]).rpartition("say ")[2] for each in said if each["role"] == "user"]
            # a message that came while the resumed turn still ran is in that turn
            assert [each["role"] for each in said] == [*(["user", "assistant", "tool"] * len(asked_for)), "assistant"]
            assert turn.answer == asked_for[-1]
            answers += asked_for
        assert len(answers) == len(set(answers))  # none doubled
        assert len(answers) > sent // 2  # a message that was killed before it was sent is in no turn


def test_a_full_conversation_is_compacted_and_its_advice_works(tmp_path: Path) -> None:
    def reply(sent: Sequence[Message]) -> dict[str, JSON]:
        asked = "Summarize this conversation" in str(sent[-1].get("content"))
        return {"content": "the summary"} if asked else reply_to(sent)

    window = EchoChatServer(window=3000, reply=reply)
    with echo_server(server=window) as server, terminal(tmp_path, server.url, "--toolsets", "todo") as child:
        child.logfile_read = shown = io.StringIO()
        for number in range(6):
            seen(child, PROMPT)
            child.send(f"\x1b[200~say answer {number} {'x' * 1800}\x1b[201~\r")
            seen(child, f"answer {number}")
            asked(server, number + 1)
        seen(child, PROMPT)
        child.send(f"\x1b[200~say never {'z' * 16_000}\x1b[201~\r")
        seen(child, "Send the message in parts")
        seen(child, "/undo removes the last message, /compact replaces")
        seen(child, PROMPT)
        child.send("/undo\r")
        seen(child, "undone")
        seen(child, PROMPT)
        child.send("/compact\r")
        seen(child, "the summary")
        seen(child, PROMPT)
        child.send("say on we go\r")
        seen(child, "on we go")
        finish(child)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
        assert "replaced with a summary" in " ".join(text.split())  # the notice is wrapped


def test_ctrl_c_twice_ends_the_chat(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send(f"something typed{CTRL_C}")
        child.send(CTRL_C)
        seen(child, "Ctrl-C again ends the chat")
        child.send("say still here\r")
        asked(server, 1)
        seen(child, PROMPT)
        time.sleep(3.2)  # the first one was long ago
        child.send(CTRL_C)
        seen(child, "Ctrl-C again ends the chat")
        child.send(CTRL_C)
        seen(child, "continue with")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


def test_two_ctrl_c_end_a_chat_that_has_unwritten_changes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with echo_server() as server, terminal(work, server.url, "--workdir", ".", home=tmp_path) as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('echo new > a.txt')}\r")
        seen(child, "Write to")
        time.sleep(0.3)
        child.send("n\r")
        seen(child, PROMPT)
        child.send(CTRL_C)
        seen(child, "not written: 1 change")
        seen(child, "Ctrl-C again ends the chat")
        child.send(CTRL_C)
        child.expect(pexpect.EOF)
    assert list((tmp_path / "state").glob("**/*.patch"))


def test_files_that_belong_to_no_folder_are_not_lost_without_a_word(tmp_path: Path) -> None:
    with echo_server() as server, terminal(tmp_path, server.url, "--workdir", "none") as child:
        seen(child, PROMPT)
        child.send(f"{terminal_call('mkdir -p notes; echo x > notes/a.txt; echo y > b.sh')}\r")
        seen(child, PROMPT)
        child.send(CTRL_D)
        seen(child, "2 files would end with the sandbox")
        child.send(CTRL_D)
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


def test_a_long_paste_is_folded_and_sent_whole(tmp_path: Path) -> None:
    text = "\n".join(f"line {number} of it" for number in range(500))
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        child.logfile_read = shown = io.StringIO()
        seen(child, PROMPT)
        child.send(f"say none of this: \x1b[200~{text}\x1b[201~ and \x1b[200~{text}\x1b[201~")
        seen(child, r"\[pasted 500 lines\][\s\S]*\[pasted 500 lines, 2\]")
        child.send("\r")
        asked(server, 1)
        seen(child, "998 more lines|996 more lines")
        finish(child)
        assert "line 400 of it" not in shown.getvalue().partition("more lines")[0]
        assert server.asked[0]["messages"][-1]["content"] == f"say none of this: {text} and {text}"
    with echo_server() as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send("\x1b[A\r")  # also after a restart
        asked(server, 1)
        assert server.asked[0]["messages"][-1]["content"] == f"say none of this: {text} and {text}"


def test_cost_counts_what_was_undone_or_interrupted(tmp_path: Path) -> None:
    with echo_server(delay_s=0.05) as server, terminal(tmp_path, server.url) as child:
        seen(child, PROMPT)
        child.send("say one\r")
        asked(server, 1)
        seen(child, r"auto · echo · [1-9]")
        child.send("/undo\r")
        seen(child, "undone")
        seen(child, PROMPT)
        child.send("/cost\r")
        seen(child, r"1 model call, [1-9]\d* tokens read, [1-9]\d* written")
        seen(child, PROMPT)
        child.send(f"say {' '.join(f'word{number}' for number in range(200))}\r")
        asked(server, 2)
        time.sleep(1.0)
        child.send("\x1b")
        seen(child, "interrupted")
        seen(child, PROMPT)
        child.send("/cost\r")
        seen(child, r"2 model calls, [1-9]\d* tokens read, [1-9]\d* written")
        seen(child, "are estimates")
        finish(child)


def test_a_warning_is_a_note_above_the_prompt(tmp_path: Path) -> None:
    many = EchoChatServer(models=[f"model-{number}" for number in range(25)])
    with echo_server(server=many) as server, terminal(tmp_path, server.url, model="other") as child:
        seen(child, PROMPT)
        child.send("say x\r")
        seen(child, "note: .*does not list model 'other'")
        seen(child, r"and\s+15\s+more")
        finish(child)
