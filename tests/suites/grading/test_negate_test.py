"""Tests made false: a small change, and it cannot hold where it held."""

from __future__ import annotations

from importlib import resources
from random import Random

import pytest
import yaml

from palaestra.suites import hermes_swe
from palaestra.suites.grading.negate_test import find_negations
from palaestra.suites.grading.python_source import apply_edits
from palaestra.suites.hermes_swe.programming_task import parse_row


def made_false(body: str) -> list[str]:
    """Every way for a test of this body, as its lines that have changed."""
    source = "def test_ü():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    found = find_negations(source, Random(1)).get("test_ü", ())
    changed = [apply_edits(source, [edit]).splitlines() for edit in found]
    return [
        line.strip() for lines in changed for line, was in zip(lines, source.splitlines(), strict=True) if line != was
    ]


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("assert f(1) == True", ["assert f(1) == False"]),
        ("assert 'ü', f() == 'ü'", []),
        ("assert f('ü', 1) == x", ["assert f('ü', 1) != x"]),
        ("assert f() != 1", ["assert f() == 1"]),
        ("assert f() is None", ["assert f() is not None"]),
        ("assert 1 not in f()", ["assert 1 in f()"]),
        ("assert len(x) >= 2", ["assert len(x) < 2"]),
        ("assert f()", ["assert not f()"]),
        ("assert not f(), 'why'", ["assert f(), 'why'"]),
        ("self.assertTrue(f())", ["self.assertFalse(f())"]),
        ("self.assertIn(1, x)", ["self.assertNotIn(1, x)"]),
        ("self.assertEqual(f(), g())", ["self.assertNotEqual(f(), g())"]),
        ("x = f()\nassert x", ["assert not x"]),
        ("for a in (1, 2):\n    assert f(a)", ["assert not f(a)"]),
        ("with g():\n    assert f()", ["assert not f()"]),
        ("for a in x:\n    assert f(a)", []),
        ("if x:\n    assert f()", []),
        ("if x:\n    return\nassert f()", []),
        ("with pytest.raises(E):\n    assert f()", []),
        ("with self.assertRaises(E):\n    f()", []),
        ("f()", []),
    ],
)
def test_the_opposite(body: str, changed: list[str]) -> None:
    assert made_false(body) == changed


@pytest.mark.parametrize("value", ["7", "-7", "2.5", "'a b'", '"a b"', "[1, 2]", "(1, 'x')", "{'a': [1]}"])
@pytest.mark.parametrize("form", ["assert f(3) == {}", "assert {} == f(3)", "self.assertEqual(f(3), {})"])
def test_another_value_that_looks_like_the_first(value: str, form: str) -> None:
    found = made_false(form.format(value))
    assert found
    before, after = form.split("{}")
    for line in found:
        assert line.startswith(before)
        other = line[len(before) : len(line) - len(after)]
        assert eval(other) != eval(value)
        assert type(eval(other)) is type(eval(value))
        assert abs(len(other) - len(value)) <= 1


def test_an_expected_value_comes_before_the_opposite_and_an_empty_one_has_no_other() -> None:
    assert len(made_false("assert g() == 1\nassert f()")) == 1
    (line,) = made_false("assert f() == 1\nassert g() == 2")
    assert line.startswith("assert g()")
    assert made_false("assert f() == []") == ["assert f() != []"]
    assert made_false("assert f() == '\\n'") == ["assert f() != '\\n'"]


def test_what_is_no_python_has_no_find_negations() -> None:
    assert find_negations("def test(:", Random(1)) == {}


def test_every_built_in_task_has_tests_that_can_be_made_false() -> None:
    text = resources.files(hermes_swe).joinpath("builtin.yaml").read_text(encoding="utf-8")
    tried = 0
    for number, row in enumerate(yaml.safe_load(text), 1):
        task = parse_row(row, number, "prompt")
        found = find_negations(task.suite.text, Random(number))
        assert found, task.id
        tried += sum(map(len, found.values()))
        for name, edits in found.items():
            assert name in task.suite.names
            for edit in edits:
                assert apply_edits(task.suite.text, [edit]) != task.suite.text
    assert tried > 15
