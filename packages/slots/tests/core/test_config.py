"""Merging layers of settings: who wins, where a value came from, and what a mistake says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from golden_messages import check_message, raises
from palaestra_slots.core.config import (
    DEFAULT,
    ConfigLayer,
    Settings,
    local_path,
    merge,
    nearest,
    read_toml,
    read_yaml,
    sent_secret,
)
from palaestra_slots.core.errors import ConfigError


class Oven(Settings):
    degrees: int = Field(default=180, ge=0, description="Heat in Celsius.")
    name: str = "oven"
    extra: dict[str, object] | None = None
    api_key: str = "none"


def test_a_later_layer_wins_and_the_source_says_which() -> None:
    merged = merge(Oven, [ConfigLayer("file", {"degrees": 200, "name": "f"}), ConfigLayer("flags", {"degrees": 220})])
    assert (merged.value.degrees, merged.value.name) == (220, "f")
    assert merged.sources == {
        "degrees": "flags",
        "name": "file",
        "extra": DEFAULT,
        "api_key": DEFAULT,
    }


def test_a_path_in_a_home_directory_that_is_not_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    assert (local_path("~/.cache"), local_path("/a/~")) == (Path("/me/.cache"), Path("/a/~"))
    with raises(ConfigError, "~nobody-of-this-name/x", "HOME"):
        local_path("~nobody-of-this-name/x")


def test_a_secret_is_sent_as_a_header_can_carry_it() -> None:
    told = {"t\u00f6k": "t\u00f6k", " tok\r\n": "tok", "\n": None, "": None, None: None}
    assert {text: sent_secret(text, "token") for text in told} == told
    with raises(ConfigError, "token") as caught:
        sent_secret("a\nb", "token")
    assert "a\nb" not in str(caught.value)


def test_no_layers_give_the_defaults() -> None:
    assert merge(Oven, []).value == Oven()


def test_a_dotted_key_sets_one_entry_and_leaves_the_layer_below_as_it_was() -> None:
    below = {"extra": {"provider": {"sort": "price"}, "x": 1}}
    merged = merge(Oven, [ConfigLayer("file", below), ConfigLayer("flags", {"extra.provider.order": ["a"]})])
    assert merged.value.extra == {"provider": {"sort": "price", "order": ["a"]}, "x": 1}
    assert merged.sources["extra"] == "file, flags"
    assert below == {"extra": {"provider": {"sort": "price"}, "x": 1}}


def test_a_whole_mapping_replaces_the_one_below() -> None:
    merged = merge(Oven, [ConfigLayer("file", {"extra": {"a": 1}}), ConfigLayer("flags", {"extra": {"b": 2}})])
    assert merged.value.extra == {"b": 2}
    assert merged.sources["extra"] == "flags"


def test_an_unknown_key_names_its_layer_and_the_nearest_key() -> None:
    with raises(ConfigError, "oven.yaml", "degree", "degrees"):
        merge(Oven, [ConfigLayer("oven.yaml", {"degree": 200})])


def test_a_bad_value_names_the_key_as_written_the_value_and_the_source() -> None:
    with pytest.raises(ConfigError, match=r"--heat 'hot': .*integer.*\(from command line\)"):
        merge(Oven, [ConfigLayer("command line", {"degrees": "hot"}, {"degrees": "--heat"})])


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        merge(Oven, [ConfigLayer("file", {"degrees": -1, "name": 3})])
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["degrees", "name"]


def test_a_secret_is_not_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        merge(Oven, [ConfigLayer("file", {"api_key": ["sk-very-secret"]})])
    assert "sk-very" not in str(caught.value)
    assert "api_key (hidden)" in str(caught.value)


def test_making_settings_by_hand_raises_the_same_error() -> None:
    with raises(ConfigError, "degres", "Oven", "degrees"):
        Oven(degres=3)  # type: ignore[call-arg]


def test_nearest_is_silent_when_nothing_is_near() -> None:
    assert nearest("zzz", ["group_size"]) == ""
    check_message(nearest("Group_Sise", ["group_size"]), "group_size")


@given(st.lists(st.dictionaries(st.sampled_from(["degrees", "name"]), st.just(None)), max_size=4))
def test_each_field_comes_from_the_last_layer_that_names_it(shapes: list[dict[str, None]]) -> None:
    layers = [
        ConfigLayer(f"layer{i}", {key: i if key == "degrees" else str(i) for key in shape})
        for i, shape in enumerate(shapes)
    ]
    merged = merge(Oven, layers)
    for key in ("degrees", "name"):
        last = max((i for i, shape in enumerate(shapes) if key in shape), default=None)
        assert merged.sources[key] == (DEFAULT if last is None else f"layer{last}")
        assert str(getattr(merged.value, key)) == str({"degrees": 180, "name": "oven"}[key] if last is None else last)


@pytest.mark.parametrize(
    "text",
    [
        "a.KEY = 1",
        "'=' . \"\u2028\" . KEY = 1",
        'x = {y = [{"#".KEY = 1}]}',
        "[KEY]\nb = 1",
        'x = """\n\'\'\'"""""\n[[ \'a\' . KEY ]]',
        'x = \'\\\' # "\n"\\"".KEY = 1',
        "x = '''a''''\n\"\".KEY = ''",
    ],
)
def test_a_toml_key_has_few_parts(text: str) -> None:
    """A key takes the square of the time of its parts, a table's header its time again for each line below it."""
    read_toml(text.replace("KEY", ".".join("a" * 30)))
    for parts in (33, 500):
        with raises(RecursionError, "32"):
            read_toml(text.replace("KEY", ".".join("a" * parts)))


@given(st.text(alphabet="ab.# ", max_size=20))
def test_dots_in_toml_strings_comments_and_numbers_make_no_long_key(text: str) -> None:
    long = text + "." * 2000
    lines = [
        f"# {long}",
        rf'basic = "\"{long}" # {long}',
        f"literal = '\"{long}' # '{long}",
        f'lines = """""{long}"""""',
        rf"raw = '''\"{long}''''",
        f"numbers = [{', '.join(['0.5'] * 100)}]",
    ]
    assert read_toml("\n".join(lines)) == {
        "basic": f'"{long}',
        "literal": f'"{long}',
        "lines": f'""{long}""',
        "raw": rf"\"{long}'",
        "numbers": [0.5] * 100,
    }


_LARGE = f"a: &a {{{', '.join(f'k{n}: ' for n in range(5000))}}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{_LARGE}b: [{'{<<: *a}, ' * 100}]", "more than 100000 entries"),
        (f"{_LARGE}b: {{<<: [{'*a, ' * 100}]}}", "more than 100000 entries"),
        (f"a: 1{':1' * 400}.5", "OverflowError"),
    ],
    ids=["many mappings", "one mapping", "a number in base 60"],
)
def test_yaml_that_takes_much_more_than_its_size_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_yaml(text)
    assert len(read_yaml(f"{_LARGE}b: [{'{<<: *a}, ' * 9}]")["b"]) == 9
