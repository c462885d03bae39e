"""Outputs in every form, made from what their writer meant: calls, text, thinking, and what goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forms import Form, Wanted
from palaestra_tokens.parsers import BrokenReason


def _schema(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


_TEXT, _WHOLE, _YES, _REAL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "number"}
TOOLS = [
    _schema("search", query=_TEXT, limit=_WHOLE, exact=_YES, score=_REAL, filters={"type": "object"},
            tags={"type": "array"}, cursor={"type": ["string", "null"]}),
    _schema("write_file", path=_TEXT, content=_TEXT, mode={"anyOf": [_WHOLE, {"type": "null"}]}),
    _schema("run", command=_TEXT, timeout_s=_REAL, env={"$ref": "#/properties/any"}, any={"type": "object"}),
    _schema("noop"),
]  # fmt: skip

CODE = 'def f(x):\n    if x < 3 and x > 1:\n        return {"a": [1, 2], \'b\': "}"}\n\n\treturn "é\\n"\n'
INTENTS: dict[str, Wanted] = {
    "one string": ("search", {"query": "hotels"}),
    "two strings": ("write_file", {"path": "a.txt", "content": "hello"}),
    "no arguments": ("noop", {}),
    "numbers": ("search", {"limit": 10, "score": 1.5}),
    "negative and zero": ("search", {"limit": -3, "score": 0}),
    "exponent": ("search", {"score": 1.5e-07}),
    "booleans": ("search", {"query": "q", "exact": True}),
    "false": ("search", {"exact": False}),
    "null": ("search", {"query": "q", "cursor": None}),
    "null in a union": ("write_file", {"path": "x", "mode": None}),
    "whole number in a union": ("write_file", {"path": "x", "mode": 420}),
    "nested": ("search", {"filters": {"a": {"b": [1, {"c": "}]"}]}}, "tags": ["x", "y,z", "]"]}),
    "empty containers": ("search", {"filters": {}, "tags": []}),
    "deep": ("search", {"filters": {"a": [[[[[{"b": {"c": {"d": []}}}]]]]]}}),
    "array of objects": ("search", {"tags": [{"id": 1, "text": "a: {b}"}, {"id": 2, "text": None}]}),
    "a type behind a reference": ("run", {"command": "env", "env": {"PATH": "/bin"}}),
    "braces in a string": ("search", {"query": '}} ]] {"name": "x"} {{ [['}),
    "brackets and parentheses": ("search", {"query": "a) ] b( [c"}),
    "code": ("write_file", {"path": "/tmp/f.py", "content": CODE}),
    "shell": ("run", {"command": "echo \"a\\\"b\" 'c' \\\\ $HOME `x` && cat <<'EOF'\n{}\nEOF"}),
    "heredoc": ("run", {"command": "cat > x.json <<EOF\n{\"a\": [1,\n 2]}\nEOF\n"}),
    "markup": ("run", {"command": "test 1 -lt 2 && echo '<b>&amp;</b>' > /tmp/x"}),
    "an HTML page": ("write_file", {"path": "i.html", "content": "<!doctype html>\n<p class=\"a\">x</p>\n</html>\n"}),
    "white space at the ends": ("write_file", {"path": "a", "content": "  two\n\n  lead\n"}),
    "only white space": ("write_file", {"path": "a", "content": "\n \t\n"}),
    "empty string": ("write_file", {"path": "a", "content": ""}),
    "line ends": ("write_file", {"path": "a", "content": "x\r\ny\r\n\rz"}),
    "a number as text": ("search", {"query": "007"}),
    "a boolean as text": ("search", {"query": "true"}),
    "JSON as text": ("write_file", {"path": "a.json", "content": '{"k": [1, 2]}'}),
    "quoted text": ("search", {"query": '"quoted"'}),
    "unicode": ("search", {"query": "北京 – München 🌧️ \u200be\u0301 \u2028 ｜▁"}),
    "control characters": ("search", {"query": "bell \x07 tab \t nul \x00 del \x7f"}),
    "backslashes": ("search", {"query": "C:\\new\\table \\u0041 \\"}),
    "a key that is a word of the format": ("run", {"command": "x", "any": {"name": "y", "arguments": {"z": 1}}}),
    "thinking tags in a string": ("write_file", {"path": "a", "content": "<think>no</think> </think> <think>"}),
    "an unknown tool": ("does_not_exist", {"a": "b"}),
    "an unknown argument": ("search", {"colour": "red"}),
    "long": ("write_file", {"path": "a", "content": "x y\n" * 1000}),
    "a name with dots and dashes": ("mcp.server__tool-name", {"a": "b"}),
}  # fmt: skip

SECTIONED = frozenset({"deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "kimi_k2", "minimax_m2"})
BEFORE, BETWEEN, AFTER = "I will check the weather.", "and", "Done."
ONE: Wanted = ("search", {"query": "hotels", "limit": 3})
TWO: Wanted = ("write_file", {"path": "a", "content": "b"})
THREE: Wanted = ("noop", {})

BROKEN_JSON = {
    "trailing comma": ('{"query": "hotels",}', BrokenReason.MALFORMED_JSON),
    "single quotes": ("{'query': 'hotels'}", BrokenReason.MALFORMED_JSON),
    "unquoted key": ('{query: "hotels"}', BrokenReason.MALFORMED_JSON),
    "line end in a string": ('{"query": "hot\nels"}', BrokenReason.MALFORMED_JSON),
    "wrong escape": ('{"query": "\\d"}', BrokenReason.MALFORMED_JSON),
    "missing comma": ('{"query": "hotels" "limit": 3}', BrokenReason.MALFORMED_JSON),
    "Python's words": ('{"exact": True}', BrokenReason.MALFORMED_JSON),
    "comment": ('{"query": "hotels" /* or inns */}', BrokenReason.MALFORMED_JSON),
    "leading zero": ('{"limit": 007}', BrokenReason.MALFORMED_JSON),
    "duplicate key": ('{"query": "a", "query": "b"}', BrokenReason.DUPLICATE_KEY),
    "duplicate key inside": ('{"filters": {"a": 1, "a": 1}}', BrokenReason.DUPLICATE_KEY),
    "not a number": ('{"score": NaN}', BrokenReason.NOT_FINITE),
    "infinity": ('{"score": -Infinity}', BrokenReason.NOT_FINITE),
    "a number too large": ('{"score": 1e999}', BrokenReason.NOT_FINITE),
    "too deep": ('{"tags": ' + "[" * 50_000 + "]" * 50_000 + "}", BrokenReason.TOO_DEEP),
    "text instead of an object": ('"hotels"', None),
    "JSON in text instead of an object": ('"{\\"query\\": \\"hotels\\"}"', None),
    "a list instead of an object": ('[{"query": "hotels"}]', None),
    "nothing instead of an object": ("null", None),
}


@dataclass(frozen=True)
class Case:
    """An output and what it must be read as. `errors` counts broken calls; `content` and `reasoning` are stripped."""

    id: str
    form: Form
    text: str
    calls: Sequence[Wanted]
    errors: int = 0
    content: str = ""
    reasoning: str = ""
    cut: bool = False
    thinking: bool | None = None
    reason: BrokenReason | None = None


def cases(form: Form) -> Iterator[Case]:
    """All cases of one form."""
    yield from _meant(form)
    yield from _surrounded(form)
    yield from _thought(form)
    yield from _truncated(form)
    yield from _misnamed(form)
    yield from _unended(form)
    if form.format in ("glm45", "glm47"):
        yield from _begun(form)
    if form.join.strip() == ",":
        yield from _bracket_too_many(form)
        yield from _no_calls_in_a_list(form)
    if form.format in SECTIONED:
        yield from _between_in_a_section(form)
    if form.json:
        yield from _broken_json(form)


def _meant(form: Form) -> Iterator[Case]:
    for intent, call in INTENTS.items():
        if not expressible(form, [call]):
            continue
        yield Case(intent, form, form.block([call]), [call])
    for tag in form.tags:
        calls: list[Wanted] = [
            ("write_file", {"path": "doc.md", "content": f"the tag {tag} ends, {tag} begins"}),
            THREE,
        ]
        yield Case(f"{tag!r} in a string", form, form.block(calls), calls)
    for calls in ([ONE, TWO], [ONE, TWO, THREE], [ONE, ONE], [THREE, THREE, THREE], [ONE] * 20):
        yield Case(f"{len(calls)} calls, first {calls[-1][0]}", form, form.block(calls), calls)


def _surrounded(form: Form) -> Iterator[Case]:
    before, after = form.before.format(BEFORE), form.after.format(AFTER)
    one = form.block([ONE])
    yield Case("no call", form, "Just an answer with {braces}, [brackets] and <tags>.", [],
               content="Just an answer with {braces}, [brackets] and <tags>.")  # fmt: skip
    yield Case("nothing", form, "", [])
    yield Case("text before", form, before + one, [ONE], content=BEFORE)
    yield Case("text after", form, one + after, [ONE], content=AFTER)
    yield Case("text on both sides", form, before + form.block([ONE, TWO]) + after, [ONE, TWO],
               content=f"{BEFORE}…{AFTER}")  # fmt: skip
    yield Case("two blocks", form, one + form.after.format(BETWEEN) + "\n" + form.block([TWO]), [ONE, TWO],
               content=BETWEEN)  # fmt: skip
    yield Case("white space around", form, f" \n\n{one}  \n", [ONE])
    if form.tags:
        mention = f"The model emits {form.tags[0]} before a call."
        if form.format not in ("gpt_oss", "mistral") or form.tags[0] == "[TOOL_CALLS]":
            yield Case("the mark in prose", form, mention, [], content=mention)


def _thought(form: Form) -> Iterator[Case]:
    thought = form.think.format("hm")
    quoting = form.think.format("maybe " + form.block([TWO])) if form.format != "gpt_oss" else thought
    reasoning = f"maybe {form.block([TWO])}".strip() if form.format != "gpt_oss" else "hm"
    yield Case("thinking before", form, thought + form.block([ONE]), [ONE], reasoning="hm")
    yield Case("a call quoted in thinking", form, quoting + form.block([ONE]), [ONE], reasoning=reasoning)
    if form.format == "gpt_oss":
        return
    opening = form.think.partition("{}")[0]
    yield Case("thinking that does not end", form, f"{opening}so {form.block([ONE])}", [],
               reasoning=f"so {form.block([ONE])}".strip())  # fmt: skip
    ending = form.think.partition("{}")[2]
    yield Case("thinking that began in the prompt", form, f"{form.block([TWO])}{ending}{form.block([ONE])}", [ONE],
               reasoning=form.block([TWO]).strip())  # fmt: skip

    yield from _mentioned(form, opening.strip(), ending.strip())


def _mentioned(form: Form, opening: str, ending: str) -> Iterator[Case]:
    """Tags of thinking that stand in text."""
    one, two = form.block([ONE]), form.block([TWO])
    says = f"I wrote `{opening}` into it."
    yield Case("a thinking tag in prose", form, form.before.format(says) + one, [ONE], content=says)
    yield Case("a thinking tag in prose after thinking", form, form.think.format("hm") + form.before.format(says) + one,
               [ONE], content=says, reasoning="hm")  # fmt: skip
    says = f"It writes {opening} and {ending} around it."
    yield Case("both thinking tags in prose", form, form.before.format(says) + one, [ONE], content=says)
    yield Case("both thinking tags in prose after a call", form, one + form.after.format(says), [ONE], content=says)
    says = f"See.\n{opening} is a tag."
    yield Case("a thinking tag that begins a line", form, form.before.format(says) + one, [ONE], content=says)
    yield Case("thinking after text", form, f"See.\n{opening}maybe {two}{ending}{one}", [ONE], content="See.",
               reasoning=f"maybe {two}".strip())  # fmt: skip
    yield Case("thinking after text, on lines", form, f"See.\n{opening}\nmaybe {two}\n{ending} \nSo:\n{one}", [ONE],
               content="See.…So:", reasoning=f"maybe {two}".strip())  # fmt: skip
    first, then = f"See.\n{opening} opens it:", f"{ending} ends it."
    yield Case("a call between thinking tags in prose that begin lines", form, f"{first}\n{one}\n{then}\n{two}", [TWO],
               1, content=f"{first}…{then}", reason=BrokenReason.MALFORMED_MARKUP)  # fmt: skip
    yield Case("thinking between calls", form, f"{one}\n{form.think.format('hm')}{two}", [ONE, TWO], reasoning="hm")
    first, then = f"First {opening} is it.", f"Then {ending} is it."
    yield Case("a call between thinking tags in prose", form, f"{first}\n{one}\n{then}\n{two}", [TWO], 1,
               content=f"{first}…{then}", reason=BrokenReason.MALFORMED_MARKUP)  # fmt: skip
    yield Case("an end of thinking in prose", form, f"{one}\nThe tag {ending} ends it.\n{two}", [ONE, TWO],
               content=f"The tag {ending} ends it.", thinking=False)  # fmt: skip
    yield Case("thinking that is known to have begun", form, f"hm {two}{ending}{one}", [ONE],
               reasoning=f"hm {two}".strip(), thinking=True)  # fmt: skip


def _truncated(form: Form) -> Iterator[Case]:
    """Cut in the middle of the second call, whose last character is still missing: only the first may run."""
    whole = form.block([ONE, TWO])
    last = len(form.block([ONE])) - len(form.close) + len(form.join)
    end = len(whole) - len(form.close)
    first = last + len(form.element(*_parts(TWO), 1)) // 3
    for place in range(first, end, max(1, (end - first) // 8)):
        yield Case(f"cut at {place - last} of the second call", form, whole[:place], [ONE], 1, cut=True,
                   reason=BrokenReason.UNCLOSED)  # fmt: skip
    runs = [ONE, TWO] if form.self_closing else [ONE]
    yield Case("cut after the second call", form, whole[:end] if form.close else whole[: end - (not form.self_closing)],
               runs, 2 - len(runs), cut=True)  # fmt: skip
    yield Case("complete although cut", form, whole, [ONE, TWO], cut=True)


def _broken_json(form: Form) -> Iterator[Case]:
    for kind, (text, reason) in BROKEN_JSON.items():
        if form.id == "mistral v11" and text == "null":
            continue  # the name would be `searchnull`
        broken = ("search", text, {})
        reason = reason or BrokenReason.NOT_AN_OBJECT
        if len(text) < 1000:
            yield Case(f"{kind}, alone", form, form.raw_block([broken]), [], 1)
            yield Case(f"{kind}, first", form, form.raw_block([broken, _raw(TWO)]), [TWO], 1)
            yield Case(f"{kind}, second", form, form.raw_block([_raw(ONE), broken]), [ONE], 1)
        yield Case(f"{kind}, between", form, form.raw_block([_raw(ONE), broken, _raw(TWO)]), [ONE, TWO], 1)
    if not form.open and '"name"' in form.block([ONE]):
        nameless = form.block([ONE]).replace('"name": "search", ', "")
        if form.id != "llama3 bare":
            yield Case("no name", form, nameless, [], 1, reason=BrokenReason.NO_NAME)


def _misnamed(form: Form) -> Iterator[Case]:
    for name in form.misnamed:
        broken = (name, json.dumps(ONE[1]), ONE[1])
        two, three = _raw(TWO), _raw(("noop", {}))
        yield Case(
            f"the name {name!r}, second", form, form.raw_block([two, broken]), [TWO], 1, reason=BrokenReason.NO_NAME
        )
        yield Case(f"the name {name!r}, between", form, form.raw_block([two, broken, three]), [TWO, THREE], 1,
                   reason=BrokenReason.NO_NAME)  # fmt: skip
        yield Case(f"the name {name!r}, twice", form, form.raw_block([two, broken, broken, two]), [TWO, TWO], 2,
                   reason=BrokenReason.NO_NAME)  # fmt: skip
        if form.id not in ("llama3 bare", "pythonic"):  # there a list or an object without a name is no call
            yield Case(f"the name {name!r}, first", form, form.raw_block([broken, two]), [TWO], 1,
                       reason=BrokenReason.NO_NAME)  # fmt: skip

    quoted = '"search"'
    if f"name={quoted}" in form.block([ONE]):
        for name in ("search", "'search'", '"search', 'search"', '"'):
            text = form.block([TWO, ONE, THREE]).replace(quoted, name)
            yield Case(f"the name {name}", form, text, [TWO, THREE], 1, reason=BrokenReason.NO_NAME)
        for wrong in (form.block([TWO, ONE, THREE]).replace(f" name={quoted}", ""), _closing_itself(form)):
            yield Case("no name in the tag", form, wrong, [TWO, THREE], 1, reason=BrokenReason.NO_NAME)


def _closing_itself(form: Form) -> str:
    """The second call's tag has no name and closes itself."""
    begin, _, end = form.element("", "{}", {}, 1).partition("\n")
    return form.block([TWO, ("", {}), THREE]).replace(f"{begin}\n{end}", begin.replace(">", "/>"))


def _bracket_too_many(form: Form) -> Iterator[Case]:
    bracket = ")" if form.format == "llama4_pythonic" else "}"
    for number in (1, 2, 40):
        spoilt = form.element(*_parts(ONE), 1) + bracket * number
        text = form.open + form.join.join([form.element(*_parts(THREE), 0), spoilt, form.element(*_parts(TWO), 2)])
        yield Case(f"{number} brackets too many", form, text + form.close, [THREE, TWO], 1)


def _no_calls_in_a_list(form: Form) -> Iterator[Case]:
    """Elements of a list that are no calls, or no comma after one: those around it run all the same."""
    one, two, three = (form.element(*_parts(call), index) for index, call in enumerate((ONE, TWO, THREE)))
    for element in ("5", "null", "", '"x, y"', '"[x]"', "[1, 2]", f"[{three}]", "so it is", '"' + 'x\\"' * 20 + '"'):
        listed = form.join.join([one, element, two])
        yield Case(f"{element!r} among the calls", form, form.open + listed + form.close, [ONE, TWO], 1)
        listed = form.join.join([one, element, element, two])
        yield Case(f"{element!r} twice", form, form.open + listed + form.close, [ONE, TWO], 2)
        if not element and form.format == "llama4_pythonic":
            continue  # Python allows a comma at the end
        listed = form.join.join([one, element])
        yield Case(f"{element!r} at the end", form, form.open + listed + form.close, [ONE], 1)
    yield Case("no comma", form, f"{form.open}{one} {two}{form.join}{three}{form.close}", [TWO, THREE], 1)


_ENDS = re.compile(r"</[^<>]*>|<｜tool▁call▁end｜>|<[|]tool_call_end[|]>|<[|]call[|]>")


def _begun(form: Form) -> Iterator[Case]:
    """The output ends where a further argument begins, though it was not cut: the call is not whole."""
    whole = form.block([ONE, TWO])
    last = whole.rfind("<arg_key>")
    for size in range(2, len("<arg_key>content")):
        yield Case(f"ends {size} into an argument", form, whole[: last + size], [ONE], 1, reason=BrokenReason.UNCLOSED)


def _unended(form: Form) -> Iterator[Case]:
    """One of the first call's end tags is not there."""
    first = form.element(*_parts(TWO), 0)
    for found in _ENDS.finditer(first):
        if form.id == "qwen3 coder" and found[0] == "</tool_call>":
            continue  # then the next call's tag follows, and both could be meant
        gone = first[: found.start()] + first[found.end() :]
        for siblings in ([ONE], [THREE], [THREE, ONE]):
            others = [form.element(*_parts(call), 1 + index) for index, call in enumerate(siblings)]
            text = form.open + form.join.join([gone, *others]) + form.close
            yield Case(f"no {found[0]} at {found.start()}, before {len(others)}", form, text, siblings, 1)
            yield Case(f"no {found[0]} at {found.start()}, before {len(others)}, cut", form, text, siblings, 1,
                       cut=True)  # fmt: skip


def _between_in_a_section(form: Form) -> Iterator[Case]:
    calls = [ONE, TWO, THREE]
    for kind, between, content, reasoning in (
        ("text", f"\n{BETWEEN}\n", f"{BETWEEN}…{BETWEEN}", ""),
        ("thinking", "\n<think>hm</think>\n", "", "hm\n\nhm"),
    ):
        whole = replace(form, join=between).block(calls)
        yield Case(f"{kind} between the calls of a section", form, whole, calls, content=content, reasoning=reasoning)
        yield Case(f"{kind} between the calls of a section that is not closed", form, whole.removesuffix(form.close),
                   calls, content=content, reasoning=reasoning)  # fmt: skip
    nothing = f"{form.open.strip()} so {form.close.strip()}"
    yield Case("a section without a call", form, f"{nothing}\n{form.block([ONE])}", [ONE], 1,
               reason=BrokenReason.MALFORMED_MARKUP)  # fmt: skip
    after = f"{form.block([ONE])} Then {form.close.strip()} again."
    yield Case("the end of a section twice", form, after, [ONE], content=f"Then {form.close.strip()} again.")


def _raw(call: Wanted) -> tuple[str, str, dict[str, Any]]:
    return call[0], json.dumps(call[1]), call[1]


def _parts(call: Wanted) -> tuple[str, str, dict[str, Any]]:
    return _raw(call)


def expressible(form: Form, calls: Sequence[Wanted]) -> bool:
    """Whether the form can write these calls at all: bare text cannot hold everything."""
    if form.format == "qwen3_coder" and any("\r" in str(value)[-1:] for _, args in calls for value in args.values()):
        return False
    return not (
        form.format in ("glm45", "glm47", "qwen3_coder") and any("." in name and "__" not in name for name, _ in calls)
    )
