"""How calls of tools that touch the world are named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra.rollouts.recorded_tools.recorded_session import call_key, reports_failure, with_defaults
from palaestra_slots.core.types import JSON

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUES))
def test_the_order_of_arguments_does_not_matter(arguments: dict[str, JSON]) -> None:
    assert call_key("t", arguments) == call_key("t", dict(reversed(arguments.items())))


@given(st.dictionaries(st.text(), st.integers(-(2**53), 2**53), min_size=1))
def test_a_whole_number_is_the_same_however_it_is_written(arguments: dict[str, int]) -> None:
    assert call_key("t", arguments) == call_key("t", {name: float(value) for name, value in arguments.items()})


@given(VALUES, VALUES)
def test_other_arguments_are_another_call(one: JSON, other: JSON) -> None:
    def shape(value: JSON) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{name!r}:{shape(value[name])}" for name in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(shape, value)) + "]"
        return repr(int(value) if isinstance(value, float) and value.is_integer() else value)

    assert (call_key("t", one) == call_key("t", other)) == (shape(one) == shape(other))


def test_the_tool_and_what_came_before_are_part_of_the_name() -> None:
    keys = {call_key("a", {}), call_key("b", {}), call_key("a", {}, "x"), call_key("a", {}, "y")}
    assert len(keys) == 4


def test_defaults_stand_for_what_was_left_out() -> None:
    parameters = {"query": {"type": "string"}, "limit": {"type": "integer", "default": 5}, "odd": True}
    assert with_defaults({"query": "x"}, parameters) == {"query": "x", "limit": 5}
    assert with_defaults({"limit": 1}, parameters) == {"limit": 1}


def test_a_reply_says_whether_it_failed() -> None:
    assert reports_failure({"error": "no"})
    assert not reports_failure({"error": None})
    assert not reports_failure({"output": "error"})
    assert not reports_failure("error")
