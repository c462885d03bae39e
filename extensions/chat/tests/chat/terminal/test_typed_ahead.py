"""What is typed before a question, in a real pseudo-terminal: it answers no question, and none of it is lost."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys

from palaestra_chat.terminal.prompt import Prompt, _typed_ahead


@pytest.fixture
def terminal() -> Iterator[tuple[int, Vt100Input]]:
    master, slave = pty.openpty()
    with os.fdopen(slave) as keyboard:
        yield master, Vt100Input(keyboard)
    os.close(master)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("a message\r", "a message\n"),
        ("one\rtwo\rhalf a se", "one\ntwo\nhalf a se"),
        ("no line yet", "no line yet"),
        ("über\r", "über\n"),
        ("\x1b[A\x1b[1;5Dleft\x1bOP\r", "left\n"),
        ("\x1b", ""),
        ("", ""),
    ],
)
def test_what_waits_in_the_terminal_is_text(terminal: tuple[int, Vt100Input], typed: str, text: str) -> None:
    master, keyboard = terminal
    os.write(master, typed.encode())
    assert _typed_ahead(keyboard) == text
    assert _typed_ahead(keyboard) == ""


def test_keys_that_a_prompt_has_left_come_first(terminal: tuple[int, Vt100Input]) -> None:
    master, keyboard = terminal
    keys = [KeyPress("a", "a"), KeyPress(Keys.Enter, "\r"), KeyPress(Keys.Up, "\x1b[A"), KeyPress("b", "b")]
    store_typeahead(keyboard, [*keys, KeyPress(Keys.BracketedPaste, "two\nlines")])
    os.write(master, b"c\r")
    assert _typed_ahead(keyboard) == "a\nbtwo\nlinesc\n"


@pytest.mark.parametrize(
    ("kept", "typed", "entered", "left"),
    [
        ("", "a\nb\n", ["a", "b"], ""),
        ("half of ", "it\nnext", ["half of it"], "next"),
        ("two\nlines", "", [], "two\nlines"),
        ("two\nlines", " more\n", ["two\nlines more"], ""),
        ("", "\n\n", [], ""),
    ],
)
def test_whole_lines_are_messages_and_the_rest_stays_in_the_prompt(
    kept: str, typed: str, entered: list[str], left: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALAESTRA_STATE", str(tmp_path))
    with open(os.devnull, "w") as screen:
        nothing = lambda *_: False  # noqa: E731
        prompt = Prompt(screen, lambda: "", dict, nothing, nothing, nothing, nothing, nothing)
        prompt._kept = kept
        prompt._keep(typed)
        assert (prompt.take_entered(), prompt._kept) == (entered, left)
        assert prompt.take_entered() == []
