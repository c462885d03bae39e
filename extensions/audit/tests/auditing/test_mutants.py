"""Mutants are wrong or named as doubtful, and variants keep the meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from palaestra_audit.mutants import mutants, reply_variants, variants

CODE = b'''"""Words."""

LIMIT = 3


def first(words):
    """The first words."""
    found = []
    for word in words:
        if len(found) < LIMIT and word:
            found.append(word)
    return found


def is_long(word):
    return len(word) > 5
'''


def ran(source: bytes) -> tuple[object, ...]:
    space: dict[str, object] = {}
    exec(compile(source, "work.py", "exec"), space)
    first, is_long = space["first"], space["is_long"]
    words = ["a", "", "bb", "ccc", "dddd", "eeeeee"]
    return tuple(first(words)), tuple(map(is_long, words)), is_long("fffff"), is_long("ffffff")  # type: ignore[operator]


def only(files: Mapping[str, bytes | None]) -> bytes:
    (data,) = files.values()
    assert data is not None
    return data


def test_variants_of_code_keep_its_results() -> None:
    found = {each.what: each for each in variants({}, {"work.py": CODE}, "first and is_long")}
    assert len(found) == 6
    for what, each in found.items():
        assert ran(only(each.files)) == ran(CODE), what
        assert only(each.files) != CODE
    assert [each.certain for each in found.values()] == [True, True, True, True, True, False]
    renamed = only(found["local names renamed in work.py"].files)
    assert b"found_value" in renamed
    assert b"LIMIT_value" not in renamed


OF = "    def of(self, words):\n        return"
HELPERS = (
    ("def _key(word):\n    return word.lower()\n", "def order(words):\n    return sorted(words, key=_key)\n"),
    ("def _key(word):\n    return [len(word)]\n", f"class Order:\n{OF} max(words, key=_key)\n"),
    (
        "class Order:\n    def _key(self, word):\n        return word[1:]\n",
        f"{OF} {{self._key(word) for word in words}}\n",
    ),
)


@pytest.mark.parametrize(("helper", "others"), HELPERS)
def test_other_values_of_a_helper_are_not_certainly_wrong(helper: str, others: str) -> None:
    def certain(after: str) -> set[bool]:
        before = after.replace("word.lower()", "word").replace("[len(word)]", "word").replace("word[1:]", "word")
        found = mutants({"work.py": before.encode()}, {"work.py": after.encode()})
        return {each.certain for each in found if each.what.startswith("wrong values")}

    assert certain(helper + others) == {False}
    assert certain((helper + others).replace("_key", "key")) == {True}  # somebody else may call it
    assert certain(helper) == {True}


def test_mutants_of_code_change_its_results() -> None:
    found = list(mutants({}, {"work.py": CODE}))
    changed = {}
    for each in found:
        try:
            changed[each.what] = ran(only(each.files)) != ran(CODE)
        except Exception:
            changed[each.what] = True
    assert all(changed.values()), changed
    whats = " ".join(changed)
    for part in ("results of work.py", "results of first of", "results of is_long of", "work.py:16: ", "work.py:10: "):
        assert part in whats, part
    assert {each.certain for each in found} == {True, False}


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({}, {"a.txt": b"1\n", "b.txt": b"word\n"}, {"a.txt left out", "b.txt left out"}),
        ({"a.txt": b"0\n"}, {"a.txt": b"0\n", "b.txt": b"1\n"}, set()),
        ({}, {"tests/test_a.py": b"assert 1\n", "a.txt": b"1\n"}, set()),
        ({"a.py": b"x = 1\n"}, {"a.py": b"x = 1  # one\n", "b.txt": b"1"}, {"a.py left out", "b.txt left out"}),
    ],
)
def test_files_are_left_out_if_there_are_several(
    before: dict[str, bytes], after: dict[str, bytes], names: set[str]
) -> None:
    found = {each.what: each for each in mutants(before, after) if each.what.endswith("left out")}
    assert set(found) == names
    if "a.py left out" in names:  # a comment has no meaning
        assert not found["a.py left out"].certain


def test_code_that_is_not_utf_8_has_no_mutants_by_lines() -> None:
    code = "def name():\n    return 'caf\xe9' + 'x'\n"
    for source in (code, f"# coding: latin-1\n{code}"):
        assert [each.what for each in mutants({}, {"work.py": source.encode("latin-1")})] == []
    # A vertical tab ends a line of a text, but not of Python code.
    (mutant,) = [
        each for each in mutants({}, {"work.py": b"a = '\x0b'\nb = 1 + c\n"}) if "2: 1 - c for 1 + c" in each.what
    ]
    assert only(mutant.files) == b"a = '\x0b'\nb = (1 - c)\n"


def test_only_names_of_the_body_are_renamed() -> None:
    source = b"size = 2\n\n\ndef work(a: size, b=size):\n    size = a + b\n    return size\n"
    (renamed,) = [each for each in variants({}, {"work.py": source}) if each.what.startswith("local names")]
    assert only(renamed.files).decode().splitlines()[-3:] == [
        "def work(a: size, b=size):", "    size_value = a + b", "    return size_value"
    ]  # fmt: skip


OBJECTS = b"""from pathlib import Path


class Words:
    def add(self, word):
        self.word = word
        return self

    def place(self):
        return Path(self.word)

    def find(self, word):
        if word != self.word:
            return None
        return 1

    def show(self):
        print(self.word)
"""


def test_mutants_that_keep_the_results_are_not_certain() -> None:
    found = {each.what.rpartition(" of ")[0]: each for each in mutants({}, {"work.py": OBJECTS})}
    by_function = {what.rpartition(" ")[2]: each for what, each in found.items() if " the results of " in what}
    assert {name: each.certain for name, each in by_function.items()} == {"place": True, "find": True, "show": False}
    space: dict[str, object] = {"__name__": "work"}
    exec(compile(only(by_function["place"].files), "work.py", "exec"), space)
    assert space["Words"]().add("a").place() is None  # type: ignore[operator]
    assert space["Words"]().add("a").find("b") is None  # type: ignore[operator]


def test_documents_beside_the_work_are_not_blamed() -> None:
    found = list(mutants({}, {"CHANGES.rst": b"version 2\n", "work.py": b"x = 1\n"}))
    assert not [each.what for each in found if each.certain and "CHANGES" in each.what]
    assert any(each.certain for each in mutants({}, {"README.md": b"version 2\n"}))


def test_work_that_only_prints_is_certainly_wrong_only_without_its_calls() -> None:
    source = b"def show(word):\n    print(word)\n    return None\n"
    found = {each.what: each.certain for each in mutants({}, {"work.py": source})}
    assert found == {
        "wrong values of the right type in place of the results of work.py": False,
        "None in place of the results of work.py": False,
        "an early end of the functions of work.py": True,
    }
    shown = list(mutants({}, {"work.py": b"print('a')\n"}))
    assert {each.what for each in shown if not each.certain} == {"work.py:1: 'ax' for 'a'"}
    assert len(shown) > 1


@pytest.mark.parametrize(
    ("text", "varied"),
    [
        (b'{"a": [1, "x y"]}\n', True),
        (b'[\n  1.5,\n  {"b": null}\n]', True),
        (b'{"a": 1, "a": 2}', False),
        (b"[1.50]", False),
        (b"12", False),
        (b'{"a": 1}\n{"a": 2}\n', False),
    ],
)
def test_json_is_laid_out_anew_if_every_reader_gets_the_same(text: bytes, varied: bool) -> None:
    found = [each for each in variants({}, {"a.json": text}) if "JSON" in each.what]
    assert [json.loads(only(each.files)) for each in found] == ([json.loads(text)] if varied else [])
    assert all(only(each.files) != text for each in found)


NAMES = b"""WORDS = {'and', 'or'}


def title(text):
    return ' '.join(_small(each) for each in text.split())


def shorten(text):
    if not text:
        raise ValueError('nothing to shorten in ' + text)
    return text[:3]


def _small(word):
    return word if word in WORDS else word.capitalize()
"""


def test_names_and_messages_that_the_prompt_does_not_have_are_changed() -> None:
    found = {each.what: each for each in variants({}, {"a.py": NAMES}, "Write title(text) in a.py.")}
    private = found["helpers with private names renamed in a.py"]
    assert private.certain
    assert only(private.files).count(b"_small_other") == 2
    public = found["functions that the prompt does not name renamed in a.py"]
    assert (public.certain, b"def shorten_other" in only(public.files), b"def title(" in only(public.files)) == (
        False, True, True
    )  # fmt: skip
    message = found["other words in the messages of errors in a.py"]
    assert not message.certain
    assert b"nothing to shorten" not in only(message.files)
    assert b"cannot be used: " in only(message.files)
    asked = "title, shorten and _small raise ValueError('nothing to shorten in ...')."
    kept = {each.what for each in variants({}, {"a.py": NAMES}, asked)}
    assert not {what for what in kept if "renamed in" in what and "local" not in what} | {
        w for w in kept if "mess" in w
    }
    # A function that the file had before belongs to others too.
    before = {"a.py": b"def _small(word):\n    return word\n"}
    assert not [each for each in variants(before, {"a.py": NAMES}, "") if "private" in each.what]


def test_texts_are_changed_unless_only_people_read_them() -> None:
    whats = [each.what for each in mutants({}, {"a.py": NAMES}) if " for '" in each.what]
    assert sorted(what.partition(": ")[2] for what in whats) == ["' x' for ' '", "'andx' for 'and'", "'orx' for 'or'"]


@pytest.mark.parametrize(
    ("path", "data", "made"),
    [
        ("a.txt", b"2\n3\n29\n", b"2\n3\n38\n"),
        ("a.txt", b"2\n29\n", None),
        ("a.sh", b"a\nb\nc\n", None),
        ("a.json", b"{\n 1\n}\n", None),
    ],
)
def test_only_the_end_of_a_text_is_changed(path: str, data: bytes, made: bytes | None) -> None:
    found = [each for each in mutants({}, {path: data}) if "last line" in each.what]
    assert [only(each.files) for each in found] == ([] if made is None else [made])


@pytest.mark.parametrize(
    ("reply", "others"),
    [
        ("55", {"55\n"}),
        ("13 / 24", {"13 / 24\n", "13/24"}),
        ("1, 2 3", {"1, 2 3\n", "1,2 3"}),
        ("Yes, it is.", {"Yes, it is.\n", "Yes, it is"}),
        ('{"a": 1}', {'{"a": 1}\n', '{\n  "a": 1\n}'}),
    ],
)
def test_other_forms_of_a_reply_mean_the_same(reply: str, others: set[str]) -> None:
    assert {text for _, text in reply_variants(reply)} == others


EQUAL = b'''"""Words."""
import re

first = 1


def longest(words, least=2):
    kept = sorted(word for word in words if len(word) > 3)
    return kept[0] if kept else min(words, default=None) if first == 1 else max(words)
'''


def test_expressions_are_written_in_another_way_with_the_same_values() -> None:
    (made,) = (each for each in variants({}, {"a.py": EQUAL}, "Use max().") if each.what.startswith("other equal"))
    assert made.certain
    text = (made.files["a.py"] or b"").decode()
    assert not re.search(r"\b(sorted|min|len)\(", text)
    assert "max(words)" in text  # the prompt names it
    assert text.index("sorted_of = sorted") < text.index("first = 1")
    results = []
    for source in (EQUAL, made.files["a.py"]):
        space: dict[str, Any] = {}
        exec(source or b"", space)
        results.append([space["longest"](words) for words in (["ab", "abcde", "abcd"], ["b", "a"], [])])
    assert results[0] == results[1] == ["abcd", "a", None]


@pytest.mark.parametrize(
    "code", [b"def f(x, len):\n    return len(x)\n", b"from a import *\ndef f(x):\n    return len(x)\n"]
)
def test_a_name_that_may_be_bound_is_no_built_in_function(code: bytes) -> None:
    assert not any(each.what.startswith("other equal") for each in variants({}, {"a.py": code}))


def test_a_function_of_several_values_becomes_its_opposite() -> None:
    code = b"def f(x):\n    return min(x, default=0) + len([each for each in x if any(each)])\n"
    found = {each.what for each in mutants({}, {"a.py": code})}
    assert {"a.py:2: max(x, default=0) for min(x, default=0)", "a.py:2: all(each) for any(each)"} <= found
