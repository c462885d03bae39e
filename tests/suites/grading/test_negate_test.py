"""Falsified tests: a small change, and the test fails where it passed."""

from __future__ import annotations

import ast
import copy
from importlib import resources
from random import Random

import pytest
import yaml

from palaestra.suites import hermes_swe
from palaestra.suites.grading import negate_test
from palaestra.suites.grading.negate_test import Site, find_sites
from palaestra.suites.hermes_swe.programming_task import parse_row


def changed_bodies(body: str, *, certain: bool = True) -> list[list[str]]:
    """The body with each alternative of each site."""
    (function,) = ast.parse("def test_ü():\n" + "".join(f"    {line}\n" for line in body.splitlines())).body
    assert isinstance(function, ast.FunctionDef)
    sites = [site for site in find_sites(function, Random(1)) if site.certain is certain]
    return [[applied(function, site, number) for number in range(len(site.alternatives))] for site in sites]


def applied(function: ast.FunctionDef, site: Site, number: int) -> str:
    memo: dict[int, object] = {}
    made = copy.deepcopy(function, memo)
    change = site.alternatives[number]
    setattr(memo[id(change.node)], change.field, change.value)
    return "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in made.body)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("assert f(1) == True", "assert f(1) == False"),
        ("assert f('ü', 1) == x", "assert f('ü', 1) != x"),
        ("assert f() != 1", "assert f() == 1"),
        ("assert f() is None", "assert f() is not None"),
        ("assert 1 not in f()", "assert 1 in f()"),
        ("assert len(x) >= 2", "assert len(x) < 2"),
        ("assert f()", "assert not f()"),
        ("assert not f(), 'why'", "assert f(), 'why'"),
        ("assert f() or g()", "assert not (f() or g())"),
        ("self.assertTrue(f())", "self.assertFalse(f())"),
        ("self.assertIn(1, x)", "self.assertNotIn(1, x)"),
        ("self.assertEqual(f(), g())", "self.assertNotEqual(f(), g())"),
        ("for a in (1, 2):\n    assert f(a)", "for a in (1, 2):\n    assert not f(a)"),
        ("with g():\n    assert f()", "with g():\n    assert not f()"),
    ],
)
def test_the_opposite_of_a_certain_assertion(body: str, changed: str) -> None:
    ((first, *others),) = changed_bodies(body)
    assert first == changed
    assert body not in others


@pytest.mark.parametrize(
    "body", ["for a in x:\n    assert f(a)", "if x:\n    assert f()", "if x:\n    return\nassert f()"]
)
def test_an_assertion_that_may_not_be_reached_is_not_certain(body: str) -> None:
    assert all(after.startswith(body) for site in changed_bodies(body) for after in site)
    assert changed_bodies(body, certain=False)


def test_a_test_without_assertions_gets_a_false_one() -> None:
    for body in ("f(1)", "x = g()\nx.close()"):
        (*_, (after, *_)) = changed_bodies(body)
        assert after.startswith(f"{body}\nassert ")
        assert not eval(after.rpartition("assert ")[2])


@pytest.mark.parametrize("body", ["f(lambda: ...)", "x = ...", "assert f() == ...", "assert f() == 1e999"])
def test_a_constant_without_another_value_is_no_site(body: str) -> None:
    (function,) = ast.parse(f"def test_a():\n    {body}").body
    assert isinstance(function, ast.FunctionDef)
    assert all(site.alternatives for site in find_sites(function, Random(1)))
    assert "assert f() == inf" not in [text for site in changed_bodies(body) for text in site]


def test_a_large_number_is_changed() -> None:
    ((first, *_),) = changed_bodies("assert f() == 1e20")
    assert first != "assert f() == 1e+20"


def test_each_assertion_is_a_site_and_so_is_an_expected_exception() -> None:
    assert [len(site) for site in changed_bodies("assert f() == 1\nassert g() == 'x'\nassert h()")] == [3, 3, 3]
    for body in ("with pytest.raises(E):\n    f()", "with self.assertRaises(E):\n    f()"):
        ((first, *_),) = changed_bodies(body)
        assert "Error" in first or "Iteration" in first
    assert any(
        "self.flakes('x = 1')" in each for (each, *_) in changed_bodies("self.flakes('x = 1', m.E)", certain=False)
    )


@pytest.mark.parametrize("value", ["7", "-7", "2.5", "'a b'", "[1, 2]", "(1, 'x')", "{'a': [1]}"])
@pytest.mark.parametrize("form", ["assert f(3) == {}", "assert {} == f(3)", "self.assertEqual(f(3), {})"])
def test_other_values_that_look_like_the_first(value: str, form: str) -> None:
    ((*found,),) = changed_bodies(form.format(value))
    before, after = form.split("{}")
    assert len(found) == len(set(found)) > 1
    for text in found:
        other = text[len(before) : len(text) - len(after)]
        assert eval(other) != eval(value)
        assert type(eval(other)) is type(eval(value))


@pytest.mark.parametrize("value", [7, 17, 240, -30, 2.5, 120.0])
def test_the_place_of_the_right_number_among_the_others_tells_nothing(value: float) -> None:
    (function,) = ast.parse(f"def test_a():\n    assert f(1) == {value!r}").body
    assert isinstance(function, ast.FunctionDef)
    ranks = []
    for seed in range(200):
        (site,) = find_sites(function, Random(seed))
        assert len(site.alternatives) == 3
        others = [each.value for each in site.alternatives if isinstance(each.value, int | float)]
        ranks.append(sorted([abs(value), *others]).index(abs(value)))
    assert all(20 < ranks.count(rank) < 90 for rank in range(4)), ranks


def test_no_string_is_in_the_middle_of_the_others() -> None:
    (function,) = ast.parse("def test_a():\n    assert f(1) == 'a long sentence, 12'").body
    assert isinstance(function, ast.FunctionDef)
    for seed in range(20):
        (site,) = find_sites(function, Random(seed))
        strings = ["a long sentence, 12", *(str(each.value) for each in site.alternatives)]
        assert [len(set(letters)) for letters in zip(*strings, strict=True)].count(4) == 1
        assert [len(set(letters)) for letters in zip(*strings, strict=True)].count(1) == len(strings[0]) - 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("assert f(a) == b", "assert f(a) != b"),
        ("assert a in f(b)", "assert a not in f(b)"),
        ("assert f(a)", "assert not f(a)"),
        ("assert f(a) is b", "assert f(a) is not b"),
        ("assert f(a) < b", "assert f(a) >= b"),
    ],
)
def test_the_set_of_variants_does_not_tell_which_one_is_right(one: str, other: str) -> None:
    variants = [{body, *(text for site in changed_bodies(body) for text in site)} for body in (one, other)]
    assert variants[0] == variants[1]


def test_every_built_in_task_can_be_falsified() -> None:
    text = resources.files(hermes_swe).joinpath("builtin.yaml").read_text(encoding="utf-8")
    for number, row in enumerate(yaml.safe_load(text), 1):
        task = parse_row(row, number, "prompt")
        for owner, function in negate_test.tests_in(ast.parse(task.suite.text).body, ""):
            assert find_sites(function, Random(number)), (task.id, owner, function.name)
