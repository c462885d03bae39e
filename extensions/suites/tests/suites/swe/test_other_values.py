"""Tests in other languages that compare with other values: what changes in their text, and what does not."""

from __future__ import annotations

import re

import pytest

from palaestra_suites.swe.language_tests import falsify
from palaestra_suites.swe.languages import LANGUAGES

FILES = {"go": "a_test.go", "rust": "tests/a.rs", "ruby": "test/test_a.rb", "c": "test_a.c", "javascript": "a.test.js"}
HEADS = {
    "go": ("func TestA(t *testing.T) {\n", "}\n"),
    "rust": ("#[test]\nfn a() {\n", "}\n"),
    "ruby": ("  def test_a\n", "  end\n"),
    "c": ("int main(void) {\n", "}\n"),
    "javascript": ("test('a', () => {\n", "});\n"),
}
CHANGED = [
    ("go", "if Add(1, 2) != ~3~ { t.Fail() }"),
    ("go", 'assert.Equal(t, ~"word"~, f(2))'),
    ("rust", "assert_eq!(add(-1, 2), -~3~);"),
    ("rust", "assert_eq!(f(2), Some(~3u8~));"),
    ("rust", 'assert!(f("a == 2)") == ~"x"~ && ~7~ == g(1));'),
    ("ruby", "assert_equal ~2~, add(-5, 2)"),
    ("ruby", "expect(f(2)).to eq ~'ab'~"),
    ("c", "assert(add(1, 2) == ~3~); assert(~0~ != f(2));"),
    ("c", "EXPECT_EQ(~2.5~, f(3));"),
    ("c", "return add(0, 1) != ~100~;"),
    ("javascript", "assert.strictEqual(keep(3), ~3~);"),
    ("javascript", "expect(f(1)).toEqual([~1~, 2]);"),
    ("javascript", "expect(f(1)).to.deep.equal(-~1.5~);"),
]
KEPT = [
    ("go", "for i := 0; i == 3; i++ { f(2) }"),
    ("rust", "// assert_eq!(f(1), 2);"),
    ("rust", 'assert_eq!(format!("{}", 1), "a {}");'),
    ("c", "while (f(1) != 3) g(2);"),
    ("c", "assert(f(x, 0xFF) == 0xFF);"),
    ("javascript", "assert.ok(f(1, 2));"),
]


@pytest.mark.parametrize(("language", "text"), CHANGED)
def test_only_the_values_that_a_test_compares_with_change(language: str, text: str) -> None:
    head, end = HEADS[language]
    whole = f"{head}    {text.replace('~', '')}\n{end}"
    (made,) = falsify(LANGUAGES[language], {FILES[language]: whole}, late=True).values()
    values = text.split("~")[1::2]
    kept = text.split("~")[::2]
    pattern = re.escape(f"{head}    ") + r"([^\s,();]+)".join(map(re.escape, kept)) + re.escape(f"\n{end}")
    found = re.fullmatch(pattern, made)
    assert found is not None, made
    assert all(now != value for now, value in zip(found.groups(), values, strict=True)), made


@pytest.mark.parametrize(("language", "text"), KEPT)
def test_a_test_that_compares_with_no_value_ends_with_a_check_that_fails(language: str, text: str) -> None:
    head, end = HEADS[language]
    whole = f"{head}    {text}\n{end}"
    (made,) = falsify(LANGUAGES[language], {FILES[language]: whole}, late=True).values()
    assert made.startswith(f"{head}    {text}\n")
    assert len(made) > len(whole)
