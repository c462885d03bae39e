"""One meaning of globs, whatever engine does the search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.tools.files.globs import name_filter, simple_names
from palaestra.tools.tool import ToolMistake


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("*.py", "src/a/b.py", True),
        ("*.py", "src/a/b.pyc", False),
        ("*.{ts,tsx}", "src/a.tsx", True),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "src/a/b.py", False),
        ("src/**/*.py", "src/a/b/c.py", True),
        ("src/**/*.py", "src/c.py", True),
        ("**/test_*.py", "test_a.py", True),
        ("./src/**", "src/a/b", True),
        ("[ab].py", "a.py", True),
        ("[!ab].py", "a.py", False),
        ("[!ab].py", "c.py", True),
        ("a[1.py", "a[1.py", True),
        ("?.py", "ab.py", False),
        ("a+b.py", "a+b.py", True),
        ("*", ".hidden", True),
    ],
)
def test_globs_match_base_names_or_paths(glob: str, path: str, expected: bool) -> None:
    assert name_filter(glob, ".", True)(path) is expected


def test_paths_are_taken_from_the_root_of_the_search() -> None:
    assert name_filter("a/*.py", "src", True)("src/a/b.py")
    assert name_filter("a/*.py", "/workspace/src/", True)("/workspace/src/a/b.py")
    assert name_filter("b.py", "src/a/b.py", False)("src/a/b.py")


def test_a_loose_glob_without_wildcards_is_a_part_of_the_name() -> None:
    assert name_filter("test", ".", True, loose=True)("src/my_tests.py")
    assert not name_filter("src", ".", True, loose=True)("src/a.py")
    assert not name_filter("test", ".", True)("src/my_tests.py")


def test_only_plain_globs_are_given_to_engines() -> None:
    assert simple_names("*.{py,pyi}") == ["*.py", "*.pyi"]
    assert [simple_names(glob) for glob in (None, "src/*.py", "[ab].py", "*.{py,a b}")] == [[], [], [], []]


def test_alternatives_are_bounded() -> None:
    with pytest.raises(ToolMistake):
        simple_names("{a,b}" * 20)


@given(st.text(alphabet="ab*?[]{},!^/\\-.", max_size=12), st.text(alphabet="ab/.", max_size=8))
def test_any_glob_is_a_filter_or_one_refusal(glob: str, path: str) -> None:
    try:
        matches = name_filter(glob, ".", True)
    except ToolMistake:
        return
    assert matches(path or "a") in {True, False}


def test_a_glob_that_means_nothing_is_refused() -> None:
    with pytest.raises(ToolMistake, match="cannot be used"):
        name_filter("[b-a].py", ".", True)


def test_stars_beside_other_letters_cross_directories() -> None:
    assert name_filter("src/**.py", ".", True)("src/a/b.py")
    assert name_filter("src/**.py", ".", True)("src/b.py")
    assert name_filter("src/te**", ".", True)("src/tests/a.py")
    assert not name_filter("src/te**", ".", True)("src/a/tests.py")
    assert not name_filter("a/**", ".", True)("a")


def test_a_name_made_to_match_in_endless_ways_is_answered() -> None:
    assert not name_filter("*a" * 12 + "*b", ".", True)("a" * 250)
    assert name_filter("*a" * 12 + "*b", ".", True)("a" * 250 + "b")
    assert not name_filter("**/a/" * 12 + "b", ".", True)("a/" * 250 + "c")


def test_braces_in_braces_and_long_globs_are_refused() -> None:
    for glob in ("{" * 5000 + "}" * 5000, "a" * 5000):
        with pytest.raises(ToolMistake):
            name_filter(glob, ".", True)
