"""JSON without forgiveness, Python literals without evaluation, and bare text typed by schema."""

from __future__ import annotations

import ast
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.formats.llama import keyword_arguments
from palaestra_tokens.parsers.parser import BrokenReason, Malformed
from palaestra_tokens.parsers.scan import ArgumentTypes, decode_members, decode_object, parse_json, typed

literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def reason_of(text: str) -> BrokenReason:
    with pytest.raises(Malformed) as caught:
        parse_json(text)
    return caught.value.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{'a': 1}", BrokenReason.MALFORMED_JSON),
        ('{"a": 1,}', BrokenReason.MALFORMED_JSON),
        ('{"a": 1} x', BrokenReason.MALFORMED_JSON),
        ("", BrokenReason.MALFORMED_JSON),
        ('{"a": {"b": 1, "b": 2}}', BrokenReason.DUPLICATE_KEY),
        ("[NaN]", BrokenReason.NOT_FINITE),
        ("[-1e999]", BrokenReason.NOT_FINITE),
        ("9" * 5000, BrokenReason.NOT_FINITE),
        ("[" * 50_000, BrokenReason.TOO_DEEP),
    ],
)
def test_nothing_is_forgiven(text: str, reason: BrokenReason) -> None:
    assert reason_of(text) is reason


def test_members_keep_their_text() -> None:
    members = decode_members('{ "name" : "f" , "arguments":{"a":  1.50} }')
    assert members["arguments"].text == '{"a":  1.50}'
    assert members["arguments"].value == {"a": 1.5}
    assert decode_members("{}") == {}
    for text in ('{"a": 1, "a": 2}', "{1: 2}", '{"a" 1}', '{"a": 1 "b": 2}', "[1]", '{"a": 1,}'):
        with pytest.raises(Malformed):
            decode_members(text)
    with pytest.raises(Malformed):
        decode_object("[1]")


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), literals, max_size=4))
def test_python_values_are_read_as_python_reads_them(arguments: dict[str, JSON]) -> None:
    text = f"({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    assert keyword_arguments(text) == arguments


@pytest.mark.parametrize(
    "literal",
    [
        r"'a\'b'",
        r'"a\"b"',
        "'''a\n'b''c'''",
        r"'\x41\u00e9\U0001F327\101'",
        r"r'\d'",
        "'a' \"b\"",
        "'\\\n'",
        r"'\q\.'",
        "10",
        "-2.5e-3",
        ".5",
        "0x1F",
        "[1, 2,]",
        "{'a': [None, True]}",
        "''",
        '""""""',
    ],
)
def test_quotings_and_numbers(literal: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meant = ast.literal_eval(literal)
    assert keyword_arguments(f"(a={literal})") == {"a": meant}


@pytest.mark.parametrize(
    "arguments",
    [
        "1",
        "a=1, a=2",
        "a=b",
        "a=1+1",
        "a=(1, 2)",
        "a={1: 2}",
        "a={'b': 1, 'b': 2}",
        "a=f'x'",
        "a=true",
        "a=007",
        "a=1 b=2",
        "**a",
        "a==1",
        "a='\\x4'",
        "a='\\U99999999'",
        "a=" + "[" * 200 + "]" * 200,
        "a=1e999",
        "a={'b'}",
        "a=",
        "a='x",
    ],
)
def test_what_is_no_keyword_literal_is_malformed(arguments: str) -> None:
    with pytest.raises(Malformed):
        keyword_arguments(f"({arguments})")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"string"}, "5"),
        ("5", set(), "5"),
        ("5.0", {"number"}, 5.0),
        ("5.5", {"integer"}, "5.5"),
        ("007", {"integer"}, "007"),
        ("abc", {"integer"}, "abc"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("true", {"string", "boolean"}, True),
        ("True", {"string", "boolean"}, "True"),
        ("None", {"object", "null"}, None),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ('{"a": 1, "a": 2}', {"object"}, '{"a": 1, "a": 2}'),
        ('"a"', {"object"}, '"a"'),
        ("[NaN]", {"array"}, "[NaN]"),
        (" 5 ", {"integer"}, 5),
        ("['a', 'b']", {"array"}, ["a", "b"]),
        ("{'a': [True, None], 'b': -1}", {"object"}, {"a": [True, None], "b": -1}),
        ("\n['it\\'s', \"x\"]\n", {"array", "null"}, ["it's", "x"]),
        ("[{'path': 'a'}, {'path': 'b'}]", {"array"}, [{"path": "a"}, {"path": "b"}]),
        ("['a',]", {"array"}, ["a"]),
        ("['a']", {"array", "string"}, "['a']"),
        ("['a']", {"string"}, "['a']"),
        ("['a']", {"object"}, "['a']"),
        ("['a'", {"array"}, "['a'"),
        ("{'a': 1, 'a': 2}", {"object"}, "{'a': 1, 'a': 2}"),
        ("[open('x')]", {"array"}, "[open('x')]"),
        ("{'a'}", {"object", "array"}, "{'a'}"),
        ("[1e999]", {"array"}, "[1e999]"),
        ("[" * 5000 + "]" * 5000, {"array"}, "[" * 5000 + "]" * 5000),
    ],
)
def test_text_becomes_what_its_type_says_or_stays_text(text: str, types: set[str], value: JSON) -> None:
    found = typed(text, frozenset(types))
    assert found == value
    assert type(found) is type(value)


def test_types_are_found_through_unions_references_and_constants() -> None:
    parameters = {
        "type": "object",
        "$defs": {"id": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {
            "union": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "reference": {"$ref": "#/$defs/id"},
            "loop": {"$ref": "#/$defs/loop"},
            "nowhere": {"$ref": "#/$defs/missing"},
            "choice": {"enum": [1, 2]},
            "constant": {"const": 7},
            "words": {"enum": ["1", "2"]},
            "nullable": {"type": "integer", "nullable": True},
            "object": {"properties": {}},
            "list": {"items": {}},
            "python": {"type": "dict"},
            "odd": True,
        },
        "additionalProperties": {"type": "boolean"},
    }
    types = ArgumentTypes([{"name": "f", "parameters": parameters}, {"function": "odd"}, {"name": "g"}])
    read = {key: types.value("f", key, "7") for key in ("union", "reference", "choice", "constant", "nullable")}
    assert read == dict.fromkeys(read, 7)
    assert {types.value("f", key, "7") for key in ("loop", "nowhere", "words", "odd", "object")} == {"7"}
    assert types.value("f", "nullable", "null") is None
    assert types.value("f", "object", "{}") == types.value("f", "python", "{}") == {}
    assert types.value("f", "list", "[]") == []
    assert types.value("f", "any other", "true") is True
    assert types.value("unknown", "a", "1") == types.value("g", "a", "1") == "1"
