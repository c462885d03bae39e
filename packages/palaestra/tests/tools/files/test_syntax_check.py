"""The syntax check parses, never runs, and survives whatever a model writes."""

from __future__ import annotations

import argparse
import gc
import inspect
import threading
import time
import warnings

import pytest

from golden_messages import check_message
from palaestra.tools.files.syntax_check import MAX_CHECKED_CHARS, check_syntax


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", "x = '\\d'\n"),
        ("a.pyi", ""),
        ("a.json", "{}"),
        ("a.yaml", "a: [1]\nb: &x {}\nc: *x"),
        ("a.toml", "a = 1"),
    ],
)
def test_what_parses_is_ok(path: str, text: str) -> None:
    assert check_syntax(path, text) == "ok"


@pytest.mark.parametrize(
    ("path", "text", "part"),
    [
        ("a.py", "x = 1\ndef f(:\n", "line 2"),
        ("a.py", "a = '\0'", "null bytes"),
        ("A.JSON", '{"a": }', "line 1 column 7"),
        ("a.yml", "a: 1\nb: [1", "line"),
        ("a.yaml", "a: \x01", "YAML"),
        ("a.toml", "a = ", "TOML"),
    ],
)
def test_what_does_not_parse_is_told_with_its_place(path: str, text: str, part: str) -> None:
    assert part in str(check_syntax(path, text))


@pytest.mark.parametrize("path", ["a.txt", "Makefile", "a.c"])
def test_other_files_are_not_checked(path: str) -> None:
    assert check_syntax(path, "(") is None


@pytest.mark.parametrize("text", ["(" * 50_000, "-" * 50_000 + "1", "a" + ".a" * 50_000, "x" + "+x" * 50_000])
def test_deep_nesting_is_an_answer_and_no_crash(text: str) -> None:
    assert check_syntax("a.py", text) is not None


def test_deep_json_and_long_files_are_not_checked() -> None:
    assert "too deeply" in str(check_syntax("a.json", "[" * 100_000))
    assert "longer than" in str(check_syntax("a.py", "#" * (MAX_CHECKED_CHARS + 1)))


def test_files_are_checked_in_several_threads_at_once() -> None:
    text, filters = inspect.getsource(argparse), list(warnings.filters)
    found: list[str | None] = []

    def pause(phase: str, info: object) -> None:  # lets the threads take turns in the middle of a file
        time.sleep(0)

    def work() -> None:
        found.extend(check_syntax("a.py", text) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    gc.callbacks.append(pause)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        gc.callbacks.remove(pause)
    assert found == ["ok"] * 80
    assert list(warnings.filters) == filters


def test_nothing_is_built_or_run() -> None:
    assert check_syntax("a.yaml", "!!python/object/apply:os.system ['exit 1']") == "ok"
    assert check_syntax("a.py", "raise SystemExit") == "ok"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.yaml", "[" * 100_000),
        ("a.yaml", "- " * 50_000),
        ("a.toml", "a." * 60_000),
        ("a.toml", "'\u2028'" + '."\u2028".a' * 900 + " = 1"),
    ],
)
def test_a_text_that_would_take_minutes_is_not_checked(path: str, text: str) -> None:
    check_message(check_syntax(path, text))
