"""Random outputs in every form: no call lost, none invented, nothing repaired.

A tenth of the active Hypothesis profile's examples per form; see conftest.py for more of them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from corpus import BROKEN_JSON, SECTIONED, TOOLS, expressible
from forms import FORMS, MARK, Form, Wanted, dumps
from palaestra_tokens.parsers import ParsedCall, ParsedOutput, ReasoningPiece, TextPiece, Unwritable, get_parser

FEW = settings(
    max_examples=settings.default.max_examples // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)

MESSAGES = max(100, settings.default.max_examples // 10)
BITS = [
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    "'",
    "\n",
    "\r\n",
    "\t",
    " ",
    "</",
    "<",
    ">",
    "`",
    "```",
    ",",
    ":",
    "é",
    "🌧",
    "\0",
    "word ",
    "a",
    "name",
    '"name": ',
    "def f(x):\n    return",
    "\\n",
    "\\u00e9",
    "&lt;",
    "#",
    "$(x)",
    "0",
    "true",
    "null",
]

characters = st.characters(exclude_categories=["Cs"])
nasty = st.sampled_from(
    ['"', "\\", "{", "}", "[", "]", "'", "\n", "\r\n", "\t", " ", "</", "<", ">", "`", "```", ",", ":", "é", "🌧", "\0"]
)
words = st.lists(nasty | st.text(characters, max_size=4), max_size=12).map("".join)
prose = st.lists(
    st.sampled_from(["so", "I", "see", "now,", "well.", "é", "{x}", "a < b", "\n", "`<think>`", "`[THINK]`"]),
    min_size=1,
    max_size=6,
)
names = st.sampled_from(["search", "write_file", "run", "noop", "unknown_tool"])


def values(form: Form) -> st.SearchStrategy[object]:
    text = st.lists(words | st.sampled_from(form.tags or ("x",)), max_size=3).map("".join)
    scalar = (
        st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    )
    return st.recursive(
        scalar | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=6,
    )


def calls(form: Form) -> st.SearchStrategy[Wanted]:
    """Arguments of the types that the schemas give: text formats can say no others."""
    texts = st.lists(words | st.sampled_from(form.tags or ("x",)), max_size=4).map("".join)
    objects = st.dictionaries(words, values(form), max_size=3)
    search = st.fixed_dictionaries(
        {},
        optional={
            "query": texts,
            "limit": st.integers(),
            "exact": st.booleans(),
            "score": st.floats(allow_nan=False, allow_infinity=False),
            "filters": objects,
            "tags": st.lists(values(form), max_size=3),
        },
    )
    write = st.fixed_dictionaries({"path": texts, "content": texts})
    return (
        st.tuples(st.just("search"), search)
        | st.tuples(st.just("write_file"), write)
        | st.tuples(names, st.dictionaries(st.sampled_from(["a", "b_c", "D"]), texts, max_size=2))
    )


def confusable(form: Form, wanted: list[Wanted]) -> bool:
    """Whether a value of a format without quoting contains what, in that format, is the end of the value."""
    if form.json or form.format == "llama4_pythonic":
        return False
    inside = [str(value) for _, arguments in wanted for value in arguments.values()]
    return any(
        re.search(r"</?[｜\w:]*(?:parameter|function|invoke|arg_\w+|tool_calls?|function_calls)\b", v) for v in inside
    )


def random_call(form: Form, rng: random.Random) -> Wanted:
    """Like `calls`, but drawn a hundred times faster."""

    def text() -> str:
        bits = [
            rng.choice(BITS) if rng.random() < 0.8 else rng.choice(form.tags or BITS) for _ in range(rng.randrange(9))
        ]
        return "".join(bits)

    def value(depth: int) -> object:
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {text(): value(depth - 1) for _ in range(rng.randrange(4))}
        return [None, True, rng.randrange(-999, 10**9), rng.random() * 10 ** rng.randrange(-9, 20), text(), text()][
            kind
        ]

    name = rng.choice(["search", "search", "write_file", "noop", "unknown_tool"])
    if name == "noop":
        return name, {}
    if name != "search":
        return name, {key: text() for key in rng.sample(["path", "content", "a_b"], rng.randrange(1, 4))}
    everything = {
        "query": text(),
        "limit": rng.randrange(-9, 10**12),
        "exact": rng.random() < 0.5,
        "score": rng.random() * 1e9,
        "filters": {text(): value(2) for _ in range(rng.randrange(3))},
        "tags": [value(2) for _ in range(rng.randrange(3))],
    }
    return name, {key: everything[key] for key in rng.sample(sorted(everything), rng.randrange(len(everything) + 1))}


def sound(parsed: ParsedOutput, text: str) -> None:
    """Pieces are in order, do not overlap, and hold what stands there."""
    position = 0
    for piece in parsed.pieces:
        assert position <= piece.start <= piece.end <= len(text)
        position = piece.end
        if not isinstance(piece, ParsedCall | ReasoningPiece):
            assert piece.text == text[piece.start : piece.end]
        if isinstance(piece, TextPiece):
            assert piece.text.strip(" \t\r\n") or piece.text.strip() == ""


@forms
def test_calls_among_text_are_all_found_and_no_others(form: Form) -> None:
    parser = get_parser(form.format)

    @FEW
    @given(st.lists(calls(form), min_size=1, max_size=4), prose, prose)
    def check(wanted: list[Wanted], before: list[str], after: list[str]) -> None:
        assume(expressible(form, wanted) and not confusable(form, wanted))
        said = [" ".join(before), " ".join(after)]
        text = form.before.format(said[0]) + form.block(wanted) + form.after.format(said[1])
        parsed = parser.parse(text, tools=TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == wanted
        assert not parsed.errors
        assert [piece.text.strip() for piece in parsed.texts] == [piece.strip() for piece in said if piece.strip()]
        sound(parsed, text)
        assert len({call.id for call in parsed.calls}) == len(wanted)

    check()


@forms
def test_many_messages_lose_and_invent_no_call(form: Form) -> None:
    parser, rng = get_parser(form.format), random.Random(form.id)
    count = 0
    while count < MESSAGES:
        wanted = [random_call(form, rng) for _ in range(rng.randrange(4))]
        if not expressible(form, wanted) or confusable(form, wanted):
            continue
        count += 1
        said = " ".join(
            rng.choices(["so", "I", "see", "{x}", "a < b", "\n", "`<think>`", "`[THINK]`"], k=rng.randrange(4))
        ).strip()
        text = (form.before.format(said) if said else "") + (form.block(wanted) if wanted else "")
        parsed = parser.parse(text, tools=TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == wanted, text
        assert not parsed.errors, text
        assert [piece.text.strip() for piece in parsed.texts] == ([said] if said else []), text


@pytest.mark.parametrize("form", [form for form in FORMS if form.json], ids=lambda form: form.id)
def test_a_broken_call_costs_only_itself(form: Form) -> None:
    parser = get_parser(form.format)
    breakages = sorted(kind for kind, (text, _) in BROKEN_JSON.items() if len(text) < 1000 and text != "null")

    @FEW
    @given(st.lists(calls(form), max_size=2), st.sampled_from(breakages), st.lists(calls(form), max_size=2))
    def check(first: list[Wanted], kind: str, second: list[Wanted]) -> None:
        parts = [(name, dumps(arguments), arguments) for name, arguments in first + second]
        parts.insert(len(first), ("search", BROKEN_JSON[kind][0], {}))
        parsed = parser.parse(form.raw_block(parts), tools=TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == first + second
        assert len(parsed.errors) == 1
        assert not parsed.texts

    check()


def spoilt(form: Form, call: Wanted, index: int, rng: random.Random) -> str:
    """A call with its name gone, or one of its marks gone, doubled or repeated."""
    name, arguments = call
    text = form.element(name, dumps(arguments), arguments, index)
    own = MARK.findall(form.element(name, "{}", dict.fromkeys(arguments, 0), index))
    marks = [*re.finditer("|".join(map(re.escape, own)), text)] if own else []
    if not marks or rng.random() < 0.3:
        return form.element(rng.choice(form.misnamed), dumps(arguments), arguments, index)
    mark = rng.choice(marks)
    return text[: mark.start()] + mark[0] * rng.choice([0, 0, 2, 2, 3, 40]) + text[mark.end() :]


def told_apart(calls: list[Wanted]) -> list[Wanted]:
    """The same calls, each with a word in it that no other output has."""
    return [(name, arguments | {"path" if name == "write_file" else "query": f"word{index}word"})
            for index, (name, arguments) in enumerate(calls)]  # fmt: skip


@forms
def test_a_spoilt_call_is_answered_and_costs_no_other(form: Form) -> None:
    """A call may become an error, never text; none is invented, and those before the spoilt one all run."""
    parser, rng, untagged = get_parser(form.format), random.Random(form.id), replace(form, tags=())
    count = 0
    while count < MESSAGES:
        wanted = told_apart([random_call(untagged, rng) for _ in range(rng.randrange(2, 5))])
        if not expressible(form, wanted) or confusable(form, wanted):
            continue
        count += 1
        bad = rng.randrange(form.id in ("llama3 bare", "pythonic"), len(wanted))  # what comes first says what they are
        elements = [form.element(name, dumps(arguments), arguments, i) for i, (name, arguments) in enumerate(wanted)]
        elements[bad] = spoilt(form, wanted[bad], bad, rng)
        join = rng.choice([form.join, "\nthen\n"]) if form.format in SECTIONED else form.join
        text = form.open + join.join(elements) + form.close
        parsed = parser.parse(text, tools=TOOLS)
        sound(parsed, text)
        found = [(call.name, call.arguments) for call in parsed.calls]
        kept = max(0, bad - (form.id == "qwen3 coder in one section"))  # its end tag, too, must follow the last call
        assert found[:kept] == wanted[:kept], text
        answered = "".join([dumps(call.arguments) for call in parsed.calls] + [error.text for error in parsed.errors])
        for index in range(len(wanted)):
            assert index == bad or f"word{index}word" in answered, text
        assert [call for call in found if f"word{bad}word" not in dumps(call[1])] == [
            call for call in wanted if call in found and call != wanted[bad]
        ], text


@forms
def test_a_cut_output_runs_nothing_that_was_not_finished(form: Form) -> None:
    parser = get_parser(form.format)

    @FEW
    @given(st.lists(calls(form), min_size=1, max_size=3), st.data())
    def check(wanted: list[Wanted], data: st.DataObject) -> None:
        assume(expressible(form, wanted) and not confusable(form, wanted))
        whole = form.block(wanted)
        text = whole[: data.draw(st.integers(0, len(whole)))]
        parsed = parser.parse(text, tools=TOOLS, cut=True)
        found = [(call.name, call.arguments) for call in parsed.calls]
        assert found == wanted[: len(found)]
        assert len(parsed.errors) <= 1
        sound(parsed, text)

    check()


@forms
def test_whatever_a_model_writes_is_read_soundly(form: Form) -> None:
    parser = get_parser(form.format)
    block = form.block([("search", {"query": "q", "limit": 1}), ("noop", {})])
    bits = sorted({*form.tags, *re.findall(r"<[^>]*>|[\[\]{}\"':,;]|\w+|\s+", block), "<think>", "</think>", "\\", "'"})

    @FEW
    @given(
        st.lists(st.sampled_from(bits) | words, max_size=30).map("".join),
        st.booleans(),
        st.sampled_from([None, False, True]),
    )
    def check(text: str, cut: bool, thinking: bool | None) -> None:
        parsed = parser.parse(text, tools=TOOLS, cut=cut, thinking=thinking)
        sound(parsed, text)
        assert parser.parse(text, tools=TOOLS, cut=cut, thinking=thinking) == parsed

    check()


@forms
def test_what_is_rendered_is_read_back(form: Form) -> None:
    parser = get_parser(form.format)

    @FEW
    @given(st.lists(calls(form), max_size=3), prose)
    def check(wanted: list[Wanted], said: list[str]) -> None:
        text = " ".join(said).strip()
        written = [ParsedCall.of(name, arguments) for name, arguments in wanted]
        try:
            rendered = parser.render(written, text, tools=TOOLS)
        except Unwritable:
            assert confusable(form, wanted) or not expressible(form, wanted)
            return
        parsed = parser.parse(rendered, tools=TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == wanted
        assert parser.render(parsed.calls, (parsed.content or "").strip(), tools=TOOLS) == rendered

    check()
