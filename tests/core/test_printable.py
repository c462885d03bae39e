import contextlib
import os
import pty
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.printable import one_line, printable, without_middle

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=())) | st.text(
    st.sampled_from("\x1b[]0;1m38\x07\\P a\r\n")
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J\x1b[Hclean", "clean"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bascii", "ascii"),
        ("cut\x1b", "cut\u241b"),
        ("a\x00b\x08c\x7f", "a\u2400b\u2408c\u2421"),
        ("line\r\nnext\rover", "line\nnext\u240dover"),
        ("tab\there", "tab\there"),
        ("user\u202etxt.exe", "user\u27e8U+202E\u27e9txt.exe"),
        ("\x9b31m\ud800", "\ufffd31m\ufffd"),
    ],
)
def test_what_would_act_is_taken_out_or_shown(raw, shown):
    assert printable(raw) == shown


@given(ANY_TEXT)
def test_nothing_that_acts_survives(raw):
    shown = printable(raw)
    assert all(char in "\t\n" or unicodedata.category(char) not in {"Cc", "Cs"} for char in shown)


def test_a_megabyte_of_unfinished_sequences_takes_no_time():
    assert printable("\x1b]" * 500_000) == ""
    assert printable("\x1b[" * 500_000).count("\u241b") < 500_001


def on_a_terminal(tmp_path: Path, *argv: str) -> bytes:
    """What the command writes to a terminal of its own."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, *argv], stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while data := os.read(master, 4096):
            shown += data
    process.wait()
    os.close(master)
    return shown


EVIL = "\x1b]0;owned\x07\x1b[2Jtext\x9b31m"
PRINTING = f"""
import sys, logging
from palaestra_slots.core.printable import guard_terminals
guard_terminals()
print({EVIL!r}); sys.stderr.write({EVIL!r}); logging.warning({EVIL!r})
sys.stdout.writelines([{EVIL!r}])
for byte in {EVIL!r}.encode(): sys.stdout.buffer.write(bytes([byte]))
sys.stdout.buffer.write({EVIL!r}.encode()); sys.stdout.buffer.flush()
raise RuntimeError({EVIL!r})
"""


def test_no_escape_sequence_reaches_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "evil_env.py").write_text(f"raise ValueError({EVIL!r})")
    shown = on_a_terminal(tmp_path, "-c", PRINTING)
    shown += on_a_terminal(tmp_path, "-m", "palaestra.cli.main", f"no{EVIL}command")
    shown += on_a_terminal(tmp_path, "-m", "palaestra.cli.main", "run", "evil_env.py")
    shown += on_a_terminal(tmp_path, "-m", "palaestra.cli.main", "status", f"no{EVIL}folder")
    assert shown.count(b"text") >= 9
    assert b"\x1b" not in shown
    assert b"\x07" not in shown
    assert "\x9b".encode() not in shown


@given(st.text(), st.integers(0, 60))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, most: int) -> None:
    cut = without_middle(text, most, "<{}>")
    if len(text) <= most:
        assert cut == text
        return
    head, tail = most // 2, most - most // 2
    assert cut == f"{text[:head]}<{len(text) - most}>{text[len(text) - tail :]}"


def test_one_line_keeps_the_cause_at_the_end_of_a_very_long_text() -> None:
    line = one_line("setup failed:\n" + "hint: \x1b[31mUsing 'master'\n" * 9000 + "fatal: unable to access", 100)
    assert line.startswith("setup failed: hint: Using")
    assert line.endswith("fatal: unable to access")
    assert len(line) <= 103
