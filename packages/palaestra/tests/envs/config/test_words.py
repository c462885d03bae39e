"""Words of a command line by the type of the field they are for."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from palaestra.envs.config.layers import Annotation, describe, read_words


class Mode(Enum):
    STOP = "stop-train"
    NONE = "none"


@pytest.mark.parametrize(
    ("annotation", "words", "value"),
    [
        (str, ["5"], "5"),
        (str, ["true"], "true"),
        (str, ["None"], "None"),
        (str, [""], ""),
        (str | None, ["None"], None),
        (Optional[int], ["None"], None),  # noqa: UP045
        (int, ["-1"], "-1"),  # numbers stay text here: the field's own validation reads them
        (bool, [], True),
        (bool, ["false"], False),
        (bool, ["Yes"], True),
        (bool | None, ["none"], None),
        (list[str], ["terminal", "file"], ["terminal", "file"]),
        (list[str] | None, ["terminal,file"], ["terminal", "file"]),
        (list[str], ['["a,b", "c"]'], ["a,b", "c"]),
        (list[str], [""], []),
        (list[str], [], []),
        (list[str] | None, ["None"], None),
        (Sequence[int], ["1", "2"], ["1", "2"]),
        (Union[str, list[str], None], ["a,b"], "a,b"),  # noqa: UP007 - such fields split for themselves
        (Union[str, list[str], None], ["a", "b"], ["a", "b"]),  # noqa: UP007
        (dict[str, Any], ['{"a": {"b": 1}}'], {"a": {"b": 1}}),
        (dict[str, Any] | None, ["a=1", "b=x=y"], {"a": 1, "b": "x=y"}),
        (Mapping[str, int], ["a=1,b=2"], {"a": 1, "b": 2}),
        (dict[str, Any] | None, ["None"], None),
        (Mode, ["STOP"], Mode.STOP),
        (Mode, ["stop-train"], Mode.STOP),
        (Mode, ["None"], Mode.NONE),
        (Literal[1, "two"], ["1"], 1),
        (Literal[1, "two"], ["two"], "two"),
        (int | str, ["5"], 5),
        (int | str, ["five"], "five"),
        (Any, ["[1, 2]"], [1, 2]),
        (Any, ["True"], True),
        (Any, ["NaN"], "NaN"),
        (Any, ["a", "2"], ["a", 2]),
        (Annotated[bool, Field(description="x")], ["0"], False),
    ],
)
def test_words_are_read_by_the_type(annotation: Annotation, words: list[str], value: object) -> None:
    read = read_words(annotation, words)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("annotation", "words", "message"),
    [
        (str, [], "needs a value"),
        (int, ["1", "2"], "takes one value, got 2"),
        (bool, ["maybe"], "neither true nor false"),
        (list[str], ['["a"'], "not a JSON list"),
        (dict[str, Any], ["{"], "neither a JSON object"),
        (dict[str, Any], ["novalue"], "neither JSON nor key=value"),
        (dict[str, Any], ["=1"], "neither JSON nor key=value"),
    ],
)
def test_what_cannot_be_read_says_why(annotation: Annotation, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_words(annotation, words)


@given(st.text())
def test_a_text_field_holds_any_text(text: str) -> None:
    assert read_words(str, [text]) == text


@given(st.lists(st.text(), min_size=2))
def test_several_words_of_a_list_are_kept_in_order(words: list[str]) -> None:
    assert read_words(list[str], words) == [word.strip() for word in words if word.strip()]


def test_types_are_described_as_people_say_them() -> None:
    assert describe(str | None) == "text|None"
    assert describe(list[str] | None) == "list|None"
    assert describe(Mode) == "stop-train|none"
    assert describe(Literal["a", "b"]) == "a|b"
    assert describe(dict[str, Any]) == "mapping"
