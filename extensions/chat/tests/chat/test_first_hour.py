"""What people do with a terminal agent in their first hour: the keys that each thing takes here, all pressed for real.

docs/chat/keys.md lists the keys. `keys_elsewhere.tsv` has those of three other programs, from their documentation of
November 2026; they were not tried.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pexpect

from chat.test_terminal import asked, echo_server, seen, terminal, terminal_call

PAGE = Path(__file__).parents[4] / "docs" / "chat" / "keys.md"
ELSEWHERE = Path(__file__).with_name("keys_elsewhere.tsv")
KEYS = {
    "Enter": "\r", "Alt-Enter": "\x1b\r", "Esc": "\x1b", "Shift-Tab": "\x1b[Z", "Up": "\x1b[A", "Ctrl-D": "\x04",
    "Ctrl-G": "\x07", "Ctrl-O": "\x0f", "Ctrl-X": "\x18", "Alt-P": "\x1bp",
}  # fmt: skip
SETTLED_S = 1.2
"""After this time, a single key answers a question."""


def press(child: pexpect.spawn, keys: str, text: str = "") -> None:
    """Press these keys, with the text in place of `…`."""
    for key in keys.split():
        child.send(text if key == "…" else KEYS.get(key, key))


def idle(child: pexpect.spawn, mode: str = "(plan|ask|auto)") -> None:
    """Wait until nothing runs in this mode."""
    seen(child, f"{mode} · echo")


def test_everything_of_the_first_hour(tmp_path: Path) -> None:
    work, editor = tmp_path / "work", tmp_path / "editor"
    work.mkdir()
    (work / "notes.txt").write_text("remember the milk\n")
    editor.write_text('#!/bin/sh\nprintf "say from the editor" > "$1"\n')
    editor.chmod(0o755)
    used: dict[str, str] = {}

    def last_message(requests: int) -> str:
        asked(server, requests)
        return str(server.asked[requests - 1]["messages"][-1]["content"])

    def does(thing: str, keys: str, text: str = "") -> None:
        used[thing] = keys
        press(child, keys, text)

    with (
        echo_server(delay_s=0.01) as server,
        terminal(work, server.url, "--workdir", str(work), "--write", "no", home=tmp_path, EDITOR=str(editor)) as child,
    ):
        idle(child)
        does("send a message", "… Enter", "say first answer")
        assert last_message(1) == "say first answer"
        child.send("say one")
        does("begin a new line", "Alt-Enter")
        press(child, "… Enter", "say two")
        assert last_message(2) == "say one\nsay two"
        does("repeat an earlier message", "Up Enter")
        assert last_message(3) == "say one\nsay two"
        does("attach a file", "@ … Enter", "notes.txt")
        assert "remember the milk" in last_message(4)

        press(child, "… Enter", terminal_call("sleep 2; echo slept"))
        seen(child, "Esc stops")
        does("correct the agent while it works", "… Enter", "say corrected")
        asked(server, 6)
        assert [message["role"] for message in server.asked[5]["messages"][-2:]] == ["tool", "user"]
        assert "say corrected" in last_message(6)
        press(child, "… Enter", terminal_call("echo began; sleep 60"))
        seen(child, "│ began")
        does("stop the agent", "Esc")
        seen(child, "interrupted")

        press(child, "… Enter", terminal_call("seq 100 140"))
        seen(child, "earlier lines")
        asked(server, 9)
        idle(child)
        does("see the whole output of the last command", "Ctrl-O")
        seen(child, r"│\S* 100\r")
        seen(child, r"│\S* 140\r")
        does("run a command of your own", "! … Enter", "echo mine > mine.txt; ls; exit 3")
        seen(child, "exit code 3")
        does("show the changes to your files", "Ctrl-X d")
        seen(child, r"\+mine")
        press(child, "… Enter", "say told")
        assert "ended with exit code 3" in last_message(10)
        assert "mine.txt" in last_message(10)

        does("plan without changing anything", "Shift-Tab")
        idle(child, "plan")
        press(child, "Shift-Tab")
        idle(child, "ask")
        calls = 10
        for thing, key, shown in (
            ("refuse a call", "n", "did not allow"),
            ("allow a call once", "y", "made once"),
            ("allow such calls always", "a", "made always"),
        ):
            press(child, "… Enter", terminal_call(f"printf 'made %s\\n' {'once' if key == 'y' else 'always'}; true"))
            seen(child, "Run it")
            time.sleep(SETTLED_S)
            does(thing, key)
            seen(child, shown)
            asked(server, calls := calls + 2)
            idle(child)

        does("undo the last turn and its changes to files", "Ctrl-X u")
        seen(child, "undone")
        idle(child)
        does("go back to an earlier turn, with the files", "Esc Esc 2 Enter")
        seen(child, "turns undone")
        idle(child)
        does("write a message in your editor", "Ctrl-G")
        seen(child, "from the editor")
        press(child, "Enter")
        idle(child)
        does("switch the model", "Alt-P … Enter", "echo")
        idle(child)
        does("see tokens and cost", "Ctrl-X s")
        seen(child, "tokens read")
        does("summarize a long conversation", "Ctrl-X c")
        seen(child, "too short|messages|nothing to|summar")
        idle(child)
        does("begin a new conversation", "Ctrl-X n")
        seen(child, "a new conversation")
        idle(child)
        does("write instructions for the project", "/init Enter")
        seen(child, "AGENTS.md")
        idle(child)
        does("continue an earlier conversation", "Ctrl-X l 2 Enter")
        seen(child, "continues ")
        idle(child)
        does("end the chat", "Ctrl-D")
        child.expect(pexpect.EOF)
    assert used == documented()


def documented() -> dict[str, str]:
    """Return the keys of each thing on the page."""
    return dict(rows())


def rows() -> list[tuple[str, str]]:
    """Return the rows of the page's table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [(thing, own) for thing, own in cells]


def test_nothing_takes_more_keys_than_elsewhere() -> None:
    def count(keys: str) -> int:
        return sum(len(key) if key.startswith("/") and len(key) > 1 else key != "…" for key in keys.split())

    lines = [line.split("\t") for line in ELSEWHERE.read_text().splitlines()[1:]]
    elsewhere = {thing: others for thing, *others in lines}
    assert len(rows()) >= 20
    for thing, own in rows():
        least = min(count(keys) for keys in elsewhere[thing] if not keys.startswith("none"))
        assert count(own) <= least, thing


def test_every_key_of_the_page_is_in_the_help() -> None:
    from palaestra_chat.terminal.slash_commands import KEYS as told

    chords: Sequence[str] = [own for _, own in rows() if re.match(r"(Ctrl|Alt|Shift|Esc)\S*$", own)]
    assert [key for key in chords if key not in told] == []
