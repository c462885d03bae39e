"""Outlines give what rendering gives, for whatever a template does with texts, and spare it where texts are alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palaestra_slots.core.types import Message
from palaestra_tokens.templates.jinja import ChatTemplate
from palaestra_tokens.templates.outlines import Blank, BlankRecording, Opaque, Outlines, traced

CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": {"x": "mark"}}}],
}
TOLD = {
    "as it is": "{{ m.content }}",
    "without its edges": "{{ m.content | trim }}",
    "as JSON": "{{ m.content | tojson }}",
    "added to": "{% set x = '<' + m.content + '>' %}{{ x + x }}",
    "joined to": "{% set x = '<' ~ m.content ~ 1 %}{{ x.strip() }}",
    "begun with": "{% if m.content.startswith('<a>') and not m.content.endswith('</a>') %}A{% endif %}{{ m.content }}",
    "searched": "{% if 'zz' in m.content %}Z{% elif m.content not in ['', 'q'] %}N{% endif %}{{ m.content }}",
    "asked whether there": "{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}{{ m.content or 'no' }}",
    "asked what it is": "{% if m.content is string and m.content is iterable %}{{ m.content }}{% endif %}",
    "its length": "{{ m.content | length }}{{ 'long' if m.content | length > 3 }}",
    "its letters": "{{ m.content[0] }}{{ m.content[-1:] }}",
    "cut after thinking": "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
    "a macro's": "{% macro f(c) %}{{ c }}{% endmacro %}{% set x = f(m.content) | trim %}{{ 'Z' if 'zz' in x }}{{ x }}",
    "a block's": "{% set x %}<{{ m.content }}>{% endset %}{{ x.upper() }}{{ x | replace('a', 'b') }}",
    "gathered": "{% set ns = namespace(x='') %}{% set ns.x = ns.x + m.content %}{{ ns.x | trim }}",
    "in a list": "{{ [m.content, '.'] | join(' ') | trim }}{{ [m.content] | first | upper }}",
    "formatted": "{{ '%5s' % m.content }}{{ '{:>4}'.format(m.content) }}",
    "repeated": "{{ m.content * 2 }}",
    "in an object": "{{ {'c': m.content} | tojson }}{{ m | tojson }}",
    "a key": "{{ {'zz': 1}.get(m.content, 2) }}{{ 'in' if m.content in 'azzb' }}",
    "sought": "{{ 'in' if m.content in 'azzb' }}{{ m.content }}",
    "compared": "{{ 'same' if m.content == 'zz' }}{{ m.content is none }}{{ 'id' if m.tool_call_id == 'call_1' }}",
    "one with the other": "{{ 'first' if m.tool_call_id == messages[1].tool_calls[0].id }}{{ m.content }}",
    "in other words": "{{ m.content.title() }}{{ m.content | capitalize }}{{ m.content | safe }}",
    "its lines": "{% for line in m.content.splitlines() %}{{ line | trim }};{% endfor %}",
}
"""What a template does with the text `m.content`, by words for it."""

TEXTS = st.lists(st.sampled_from(["zz", "<a>", "</a>", " ", "\n", "q", "</think>", '"', "\\", "é"]), max_size=4).map(
    "".join
)


@functools.cache
def compiled(told: str) -> tuple[ChatTemplate, ChatTemplate]:
    """The template that tells every message, for prompts and for measuring."""
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: " + told + "{% endfor %}")
    return template, traced(template)


class Case:
    """Outlines of one template; `renderings` counts what was rendered for prompts."""

    def __init__(self, told: str) -> None:
        self.template, tracing = compiled(told)
        self.renderings = 0
        self.outlines = Outlines(self.render, lambda: tracing.render)

    def render(self, messages: Sequence[Message]) -> str:
        self.renderings += 1
        return self.template.render(messages)

    def measured(self, *contents: str, call_id: str = "call_1") -> str | None:
        ready = [CALLING, *({"role": "tool", "tool_call_id": call_id, "content": text} for text in contents)]
        return self.outlines.measured("case", [HEAD], ready, lambda rendered: (rendered, ""))[0]

    def rendered(self, *contents: str, call_id: str = "call_1") -> str:
        after = [{"role": "tool", "tool_call_id": call_id, "content": text} for text in contents]
        return self.template.render([HEAD, CALLING, *after])


HEAD: Message = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@settings(max_examples=30)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(["call_1", "other"])), min_size=2, max_size=6))
@example([("x", "y", "call_1"), ("zz", " y ", "other"), ("", "<a>", "call_1"), ("q", "q</think>\nz", "call_1")])
def test_outlines_give_what_rendering_gives(told: str, steps: list[tuple[str, str, str]]) -> None:
    case = Case(told)
    for first, second, call_id in steps:
        try:
            wanted = case.rendered(first, second, call_id=call_id)
        except Exception as error:
            with pytest.raises(type(error)):
                case.measured(first, second, call_id=call_id)
        else:
            assert case.measured(first, second, call_id=call_id) == wanted


@pytest.mark.parametrize(
    "name", ["as it is", "without its edges", "as JSON", "joined to", "begun with", "a macro's", "gathered"]
)
def test_like_texts_are_rendered_once(name: str) -> None:
    case = Case(TOLD[name])
    case.measured("one", "two")
    rendered = case.renderings
    assert case.measured(" three\n", 'four "4"') == case.rendered(" three\n", 'four "4"')
    assert case.renderings == rendered


@pytest.mark.parametrize("name", ["cut after thinking", "in a list", "formatted", "a key", "its lines", "in an object"])
def test_what_cannot_be_told_again_is_rendered_every_time(name: str) -> None:
    case = Case(TOLD[name])
    case.measured("one")
    rendered = case.renderings
    case.measured("two")
    assert case.renderings == rendered + 1


def test_another_answer_makes_another_outline() -> None:
    case = Case(TOLD["begun with"])
    for text in ("plain", "<a>x", "<a>x</a>"):
        case.measured(text)
    rendered = case.renderings
    assert [case.measured(text) for text in ("more", "<a>y", "<a>y</a>")] == [
        case.rendered(text) for text in ("more", "<a>y", "<a>y</a>")
    ]
    assert case.renderings == rendered


def test_messages_that_are_more_than_texts_are_rendered() -> None:
    case = Case("{{ m.content if m.content is string else m.content[0].text }}")
    for text in ("one", "two"):
        ready = [CALLING, {"role": "user", "content": [{"type": "text", "text": text}]}]
        assert text in str(case.outlines.measured("case", [HEAD], ready, lambda rendered: (rendered, ""))[0])


def test_other_roles_and_fields_are_another_form() -> None:
    case = Case("{{ m.name | default('nobody') }}{{ m.content }}")
    for message in (
        {"role": "tool", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "user", "name": "c", "content": "d"},
        {"role": "user", "id": "e", "content": "f"},
    ):
        found = case.outlines.measured("case", [HEAD], [CALLING, message], lambda rendered: (rendered, ""))
        assert found == (case.template.render([HEAD, CALLING, message]), "")


def test_an_outline_that_upsetting_texts_upset_is_not_kept() -> None:
    case = Case("{{ (' ' ~ m.content) | trim }}")
    case.outlines = Outlines(case.render, lambda: case.template.render)  # as if what joins texts were not watched
    for text in ("one", " two ", "three"):
        assert case.measured(text) == case.rendered(text)


def test_a_blank_refuses_what_would_show_its_letters() -> None:
    blank = Blank(BlankRecording(), "text")
    for look in (
        hash,
        repr,
        list,
        "{}".format,
        str.join,
        lambda b: {b: 1},
        lambda b: b.split("e"),
        lambda b: b.encode(),
    ):
        with pytest.raises(Opaque):
            look(blank) if look is not str.join else blank.join(["a"])


def test_a_blank_answers_for_its_text() -> None:
    recording = BlankRecording()
    blank = Blank(recording, " text ")
    assert len(blank) == 6
    assert " te" in blank
    assert blank == " text "
    assert blank != "text"
    assert blank
    assert (blank != 5) is True
    assert recording.texts[blank.strip().number] == "text"  # type: ignore[attr-defined]
    assert recording.texts[("<" + blank + ">").number] == "< text >"  # type: ignore[attr-defined]
