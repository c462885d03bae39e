"""Invariant A1: a tool runs only with an object that its schema accepts; everything else is one error."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_messages import check_message
from palaestra.tools.arguments import InvalidArguments, compiled
from palaestra.tools.tool import ToolSchema
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

COMMAND = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "timeout": {"type": "integer", "minimum": 1, "default": 60},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
    },
    "required": ["command"],
}
NOTHING_REQUIRED = {"type": "object", "properties": {"query": {"type": "string"}}, "required": []}


def parse_arguments(raw: JSON, schema: Mapping[str, JSON] | ToolSchema) -> dict[str, JSON]:
    return compiled(schema).parse(raw)


def refusal(raw: object, schema: object = COMMAND) -> str:
    with pytest.raises(InvalidArguments) as caught:
        parse_arguments(raw, schema)  # type: ignore[arg-type]
    return str(caught.value)


def test_valid_arguments_come_back_as_written_without_defaults() -> None:
    assert parse_arguments('{"command": "ls"}', COMMAND) == {"command": "ls"}
    assert parse_arguments({"command": "ls", "timeout": 5}, COMMAND) == {"command": "ls", "timeout": 5}


def test_an_integer_is_one_however_it_is_written() -> None:
    read = parse_arguments('{"command": "ls", "timeout": 5.0}', COMMAND)
    assert (read["timeout"], type(read["timeout"])) == (5, int)
    either = {"type": "object", "properties": {"n": {"type": ["integer", "null"]}, "x": {"type": "number"}}}
    assert list(map(type, parse_arguments('{"n": 1e3, "x": 1.0}', either).values())) == [int, float]
    assert "must be integer, got 5.5" in refusal('{"command": "ls", "timeout": 5.5}')


def test_a_mapping_is_copied() -> None:
    given_arguments = {"command": "ls"}
    assert parse_arguments(given_arguments, COMMAND) is not given_arguments


@pytest.mark.parametrize("raw", ["", "  \n", None])
def test_empty_means_no_arguments_only_where_none_are_required(raw: str | None) -> None:
    assert parse_arguments(raw, NOTHING_REQUIRED) == {}
    assert "none were given" in refusal(raw)
    assert "command (string, required)" in refusal(raw)


@pytest.mark.parametrize("raw", ['{"command": "ls', '{"command": "a\nb"}', "{'command': 'ls'}", '{"command": "ls"} x'])
def test_malformed_json_is_refused_with_the_place(raw: str) -> None:
    message = refusal(raw)
    assert message.startswith("Invalid JSON")
    assert "line 1" in message
    assert "not executed" in message


@pytest.mark.parametrize(
    ("raw", "kind"), [("[1]", "a list"), ('"ls"', "a string"), ("3", "a number"), ("null", "null"), ("true", "boolean")]
)
def test_json_that_is_no_object_is_refused(raw: str, kind: str) -> None:
    assert kind in refusal(raw)
    assert kind in refusal(json.loads(raw)) or raw in {'"ls"', "null"}


@pytest.mark.parametrize(
    "raw",
    [
        '{"command": NaN}',
        '{"command": "a", "command": "b"}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"timeout": ' + "1" * 9999,
        '{"command": "\\ud800"}',
        '{"command": "\ud800"}',
    ],
)
def test_what_only_a_lenient_parser_accepts_is_refused(raw: str) -> None:
    assert refusal(raw).startswith("Invalid")


def test_an_escaped_surrogate_pair_is_text_like_any_other() -> None:
    assert parse_arguments('{"command": "\\ud83d\\ude00"}', COMMAND) == {"command": "😀"}


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    message = refusal('{"command": "ls", "timeot": 3}')
    check_message(message, "timeot", "timeout")


def test_all_wrong_names_are_told_at_once() -> None:
    message = refusal('{"cmd": "ls"}')
    check_message(message, "command")
    assert "unknown argument 'cmd'" in message


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ('{"command": 3}', "argument 'command' must be string, got 3"),
        ('{"command": "x", "timeout": "60"}', "argument 'timeout' must be integer, got \"60\""),
        ('{"command": "x", "timeout": 0}', "argument 'timeout' must be bigger than or equal to 1, got 0"),
        ('{"command": "x", "timeout": true}', "argument 'timeout' must be integer"),
        ('{"command": "x", "mode": "medium"}', "argument 'mode' must be one of ['fast', 'slow']"),
    ],
)
def test_nothing_is_coerced(raw: str, part: str) -> None:
    assert part in refusal(raw)


def test_what_is_plainly_meant_is_told_and_still_not_run() -> None:
    quoted = "(a string; send the integer itself, without quotes around it)"
    assert quoted in refusal({"command": "x", "timeout": "60"})
    assert "quotes" not in refusal({"command": "x", "timeout": "soon"})
    assert "quotes" not in refusal({"command": "x", "timeout": "1.5"})
    assert refusal({}).endswith('Expected: command (string, required), timeout (integer), mode ("fast"|"slow").')


def test_null_counts_as_left_out_only_where_it_has_no_other_meaning() -> None:
    assert parse_arguments({"command": "x", "timeout": None, "mode": None}, COMMAND) == {"command": "x"}
    refusal({"command": None})
    refusal({"command": "x", "unknown": None})
    either = {"properties": {"n": {"type": ["integer", "null"]}, "m": {"type": "string"}, "o": {"enum": ["a"]}}}
    assert parse_arguments({"n": None, "m": None, "o": None}, either) == {"n": None}
    assert "'m'" in refusal({"n": None, "m": 1, "o": None}, either)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
            ["a", 1],
            ["a", "b"],
        ),
        ({"type": "array", "items": [{"type": "string"}], "additionalItems": False}, ["a"], ["a", 1]),  # draft 7
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, 1, 0),  # draft 4
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2}, [1, 1], [1]),
        ({"type": "string", "pattern": r"^\p{L}+$"}, "é", "1"),
        ({"type": "string", "pattern": r"^(?<name>\d)\/$"}, "1/", "1"),
        ({"type": "string", "pattern": r"^[\w-.]+$"}, "a.b", 1),  # not a pattern that can be read: not checked
        ({"type": "string", "format": "date-time"}, "tomorrow", 1),
    ],
)
def test_schemas_are_those_of_the_newest_draft_and_of_ecma_patterns(schema: JSON, right: JSON, wrong: JSON) -> None:
    around = {"properties": {"x": schema}}
    assert parse_arguments({"x": right}, around) == {"x": right}
    refusal({"x": wrong}, around)


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        (
            {
                "if": {"properties": {"k": {"const": "x"}}},
                "then": {"properties": {"v": {"type": "integer"}}, "required": ["v"]},
            },
            {"k": "x", "v": 1},
            {"k": "x"},
        ),
        ({"required": ["ghost"]}, {"ghost": 1}, {}),
        ({"dependentSchemas": {"k": {"required": ["v"]}}}, {"k": "y", "v": 2}, {"k": "y"}),
        ({"dependentRequired": {"k": ["v"]}}, {"k": "y", "v": 2}, {"k": "y"}),
    ],
)
def test_an_argument_may_be_named_beside_the_properties(
    more: dict[str, JSON], right: dict[str, JSON], wrong: dict[str, JSON]
) -> None:
    schema = {"type": "object", "properties": {"k": {"type": "string"}}, **more}
    assert parse_arguments(right, schema) == right
    refusal(wrong, schema)


def test_a_pattern_takes_linear_time() -> None:
    around = {"properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}
    refusal({"x": "a" * 100_000 + "b"}, around)


def test_a_value_that_json_does_not_have_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    open_schema = {"type": "object", "additionalProperties": True}
    for value in (object(), float("nan"), deep):
        refusal({"x": value}, {"properties": {"x": {"type": ["number", "string", "array"]}}, **open_schema})


def test_a_schema_may_be_open_to_unknown_names() -> None:
    assert parse_arguments('{"x": 1}', {**NOTHING_REQUIRED, "additionalProperties": True}) == {"x": 1}


def test_every_form_of_a_schema_is_understood_and_compiled_once() -> None:
    function = {"name": "terminal", "description": "", "parameters": COMMAND}
    schema = ToolSchema("terminal", "", COMMAND["properties"], ("command",))
    forms = [COMMAND, function, {"type": "function", "function": function}, schema, schema.to_dict()]
    assert len({id(compiled(form)) for form in forms}) == 1  # type: ignore[arg-type]


def test_a_tool_with_an_argument_called_parameters_is_not_mistaken_for_a_function() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}}}
    assert parse_arguments('{"name": "x", "parameters": {"y": 1}}', schema) == {"name": "x", "parameters": {"y": 1}}


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "https://example.org/schema.json"}])
def test_a_schema_that_cannot_be_used_is_a_configuration_error_and_fetches_nothing(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="JSON schema"):
        parse_arguments("{}", schema)


def test_the_caches_stay_bounded() -> None:
    first = compiled({"type": "object", "properties": {}, "title": "first"})
    for number in range(600):
        compiled({"type": "object", "properties": {}, "x-number": number})
    assert compiled({"type": "object", "properties": {}, "title": "first"}) is not first


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.one_of(
        st.text(),
        JSON_VALUES.map(json.dumps),
        st.dictionaries(st.sampled_from(["command", "timeout", "mode"]), JSON_VALUES).map(json.dumps),
    )
)
def test_any_text_gives_a_valid_object_or_one_refusal(raw: str) -> None:
    try:
        arguments = parse_arguments(raw, COMMAND)
    except InvalidArguments:
        return
    assert isinstance(arguments["command"], str)
    assert arguments.get("mode", "fast") in {"fast", "slow"}
    assert set(arguments) <= set(COMMAND["properties"])
    given = json.loads(raw)
    assert {name: given[name] for name in given if name in arguments or given[name] is not None} == arguments


def test_very_many_unknown_arguments_are_not_all_told() -> None:
    with pytest.raises(InvalidArguments) as refused:
        parse_arguments({f"x{number}": 1 for number in range(20_000)}, {"properties": {"path": {"type": "string"}}})
    check_message(str(refused.value), "19988")
    assert len(str(refused.value)) < 1000
