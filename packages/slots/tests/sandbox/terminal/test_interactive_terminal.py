"""Typing into a terminal and looking at its screen, with a real emulator and without one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, TerminalSize
from palaestra_slots.sandbox.terminal.interactive_terminal import Terminal, key_code
from palaestra_slots.sandbox.terminal.screen import PlainScreen, open_screen
from sandbox.bodies import WithSlot

SHELL = ["bash", "--norc", "-i"]
ENV = {"PS1": "% "}


@pytest.mark.slots
@pytest.mark.parametrize("emulator", ["ghostty", "plain"])
def test_a_shell_is_typed_into_and_seen(with_slot: WithSlot, emulator: str) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        async with await Terminal.open(slot, SHELL, env=ENV, emulator=emulator) as terminal:
            assert (await terminal.wait_for(r"^% $|^%$")).emulated is (emulator == "ghostty")
            await terminal.send_keys("echo $((6 * 7))", "Enter")
            shot = await terminal.wait_for(r"(?m)^42$")
            assert shot.text.splitlines()[0] == "% echo $((6 * 7))"
            await terminal.send_text("Enter")
            await terminal.send_keys("C-u", "exit 3", "Enter")
            await terminal.process.wait(20)
            shot = await terminal.capture()
            assert (shot.running, shot.exit_code) == (False, 3)
        assert await slot.processes() == []

    with_slot(body)


@pytest.mark.slots
def test_a_full_screen_program_is_seen_as_on_a_terminal(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        # What editors do: the alternate screen, positions, a question to the terminal, cursor keys of their own.
        program = (
            "stty raw -echo; printf '\\033[?1049h\\033[?1h\\033[3;5Hmiddle\\033[1;1Htop\\033[6n';"
            "IFS= read -r -d R answer; IFS= read -r -n 3 key; printf '\\033[5;1H%q' \"$answer $key\"; read -r -n 1;"
            "printf '\\033[?1049l'; stty sane; echo; echo back"
        )
        async with await Terminal.open(slot, program, size=TerminalSize(10, 40), emulator="ghostty") as terminal:
            shot = await terminal.wait_for("middle")
            assert shot.text.splitlines() == ["top", "", "    middle"]
            assert shot.cursor == (0, 3)
            await terminal.send_keys("Up")
            shot = await terminal.wait_for(r"\$'")
            assert shot.text.splitlines()[4] == r"$'\E[1;4 \EOA'"
            await terminal.send_keys("q")
            shot = await terminal.wait_for("back")
            assert "middle" not in shot.text

    with_slot(body)


@pytest.mark.slots
def test_the_window_is_resized_for_both(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        async with await Terminal.open(slot, SHELL, env=ENV) as terminal:
            await terminal.resize(TerminalSize(5, 132))
            await terminal.send_keys("stty size; seq 20", "Enter")
            shot = await terminal.wait_for(r"(?m)^20\n%")
            assert shot.text.splitlines() == ["17", "18", "19", "20", "%"]
            assert shot.size == TerminalSize(5, 132)

    with_slot(body)


@pytest.mark.slots
def test_what_does_not_come_is_a_timeout_with_the_screen(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        async with await Terminal.open(slot, "echo shown; sleep 1000") as terminal:
            with pytest.raises(TimeoutError, match="shown"):
                await terminal.wait_for("never", timeout_s=0.2)
        async with await Terminal.open(slot, "echo gone") as terminal:
            with pytest.raises(TimeoutError, match="gone"):
                await terminal.wait_for("never", timeout_s=60)
        async with await Terminal.open(slot, "yes") as terminal:
            shot = await terminal.capture(timeout_s=0.3)
            assert shot.running
            assert set(shot.text.split()) == {"y"}

    with_slot(body)


def test_keys_send_what_xterm_sends() -> None:
    codes = {"Enter": b"\r", "C-c": b"\x03", "C-Space": b"\0", "C-[": b"\x1b", "Up": b"\x1b[A", "F5": b"\x1b[15~"}
    codes |= {"M-x": b"\x1bx", "M-Left": b"\x1b\x1b[D", "BSpace": b"\x7f", "BTab": b"\x1b[Z", "C-C": b"\x03"}
    assert {key: key_code(key) for key in codes} == codes
    assert key_code("Up", application_cursor=True) == b"\x1bOA"
    assert [key_code(text) for text in ("hello", "C-", "C-é", "M-", "M-word", "")] == [None] * 6


def test_an_emulator_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="vt52"):
        open_screen(TerminalSize(), "vt52")


def test_the_plain_screen_drops_control_sequences_and_keeps_the_last_lines() -> None:
    screen = PlainScreen(TerminalSize(3, 80))
    screen.feed(b"\x1b]0;title\x07\x1b[1;31mred\x1b[0m\r\n50%\r100%\r\nabc\b\bX\r\n\xc3\xa9nd")
    assert screen.text() == "100%\naXc\nénd"
    assert screen.cursor == (2, 3)
    screen.resize(TerminalSize(1, 80))
    assert screen.text() == "énd"


@given(st.data())
def test_the_plain_screen_does_not_mind_how_its_input_is_cut(data: st.DataObject) -> None:
    pieces = st.sampled_from(
        [b"a", b"\xc3\xa9", b"\xe2\x82\xac", b"\x1b[31m", b"\x1b]0;t\x07", b"\r\n", b"\x1b(B", b"\xff"]
    )
    stream = b"".join(data.draw(st.lists(pieces, max_size=12)))
    cut = data.draw(st.integers(0, len(stream)))
    whole, parts = PlainScreen(TerminalSize()), PlainScreen(TerminalSize())
    whole.feed(stream)
    parts.feed(stream[:cut])
    parts.feed(stream[cut:])
    assert parts.text() == whole.text()
