"""A page's tree as text: the compact and the full form, references, and what does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra_toolsets.browser.accessibility_tree import Numbers, PageView, parse, show

TREE = r"""
- banner [ref=e2]:
  - heading "A \"quoted\" title" [level=1] [ref=e3]
  - text: Some text
- 'link "Go: on" [ref=e4] [cursor=pointer]':
  - /url: /next
- generic [ref=e5] [cursor=pointer]:
  - generic [ref=e6]: press me
- textbox "Name" [active] [ref=e7]: 'it''s'
- checkbox "All" [checked] [disabled] [ref=e8]
- paragraph [ref=e9]: "[ref=e99] @e1"
- iframe [ref=e10]:
  - button "Inner" [ref=f1e2]
"""


def _show(source: str = TREE, *, full: bool = False, most_chars: int = 10_000, skipped_lines: int = 0) -> PageView:
    return show(source, Numbers(), 1, full=full, most_chars=most_chars, skipped_lines=skipped_lines)


def test_the_compact_form_has_what_can_be_used() -> None:
    shown = _show()
    assert shown.text.splitlines() == [
        '- heading "A "quoted" title" [level=1] @e1',
        '- link "Go: on" @e2',
        "- generic [clickable] @e3: press me",
        '- textbox "Name" @e4: it\'s',
        '- checkbox "All" [checked] [disabled] @e5',
        "- iframe @e6",
        '  - button "Inner" @e7',
    ]
    assert (shown.elements, shown.left_out, shown.cut) == (7, 5, 0)


def test_the_full_form_has_every_line() -> None:
    shown = _show(full=True)
    assert len(shown.text.splitlines()) == len(TREE.strip().splitlines())
    assert shown.left_out == 0
    assert "  - text: Some text" in shown.text
    assert "  - /url: /next" in shown.text
    assert "- paragraph @e8: [ref=e99] @e1" in shown.text


def test_what_does_not_fit_is_counted_and_can_be_skipped_to() -> None:
    first = _show(full=True, most_chars=60)
    rest = _show(full=True, skipped_lines=first.lines - first.cut)
    assert first.cut > 0
    assert rest.cut == 0
    assert first.text.splitlines() + rest.text.splitlines() == _show(full=True).text.splitlines()


def test_long_names_are_cut_in_words() -> None:
    shown = _show(f'- button "{"x" * 900}" [ref=e1]', full=True)
    assert "[700 more characters]" in shown.text
    assert len(shown.text) < 300


def test_a_reference_is_an_elements_own_within_a_document() -> None:
    numbers = Numbers()
    first, second = parse(TREE)[1], parse(TREE)[3]
    assert numbers.of(1, first) == numbers.of(1, first) == "@e1"
    assert numbers.of(1, second) == "@e2"
    assert numbers.of(2, first) == "@e3"
    known = numbers.find(" e3 ")
    assert known is not None
    assert (known.document, known.own) == (2, "e3")
    assert numbers.find("@e4") is None
    assert numbers.find("e3; drop") is None


@given(st.text(max_size=300))
def test_no_text_of_a_page_ends_the_reading(source: str) -> None:
    assert _show(source, full=True).lines == len(parse(source))
    assert _show(source).lines <= len(parse(source))
