"""Toolsets: enabled, then disabled; unknown names are told with the nearest known one."""

from __future__ import annotations

import pytest

from golden_messages import raises
from palaestra.tools.registry.build import builtin_tools
from palaestra.tools.registry.toolsets import ALIASES, TOOL_ALIASES, TOOLSETS, Toolset, resolve_toolsets
from palaestra_slots.core.errors import ConfigError

TERMINAL = ["terminal", "process"]
FILE = ["read_file", "write_file", "patch", "search_files"]


@pytest.mark.parametrize(
    ("enabled", "disabled", "expected"),
    [
        (["default"], None, TERMINAL + FILE),
        (["file", "terminal"], [], TERMINAL + FILE),
        (["terminal"], None, TERMINAL),
        (["file_tools"], None, FILE),
        (["default"], ["terminal_tools"], FILE),
        (["terminal"], ["terminal"], []),
        (["hermes-cli"], ["hermes-slack"], []),
        (["debugging"], ["web"], TERMINAL + FILE),
        (["web", "browser"], ["browser"], ["web_search", "web_extract"]),
        (["safe"], ["vision_tools", "moa_tools"], ["web_search", "web_extract", "image_generate"]),
        ([], None, []),
    ],
)
def test_enabled_then_disabled(enabled: list[str] | None, disabled: list[str] | None, expected: list[str]) -> None:
    assert resolve_toolsets(enabled, disabled) == expected


def test_no_choice_means_every_tool_but_those_on_request() -> None:
    on_request = {name for toolset in TOOLSETS.values() if toolset.on_request for name in toolset.tools}
    assert sorted(resolve_toolsets()) == sorted({tool.name for tool in builtin_tools()} - on_request)


def test_every_alias_names_something_under_a_name_that_is_free() -> None:
    assert set(ALIASES.values()) <= set(TOOLSETS)
    assert not set(ALIASES) & set(TOOLSETS)
    names = {tool.name for tool in builtin_tools()}
    assert set(TOOL_ALIASES.values()) <= names
    assert not set(TOOL_ALIASES) & names


def test_an_unknown_toolset_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'terminl'.*'terminal'"):
        resolve_toolsets(["terminl"])
    with pytest.raises(ConfigError, match=": browser, clarify, code_execution"):
        resolve_toolsets(None, ["wbe"])


def test_a_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(ConfigError, match="list of names"):
        resolve_toolsets("file")


def test_what_is_no_name_is_told() -> None:
    for name in (None, 3, ["file"]):
        with raises(ConfigError, repr(name)):
            resolve_toolsets([name])  # type: ignore[list-item]


def test_disabling_a_toolset_leaves_the_tools_of_those_it_includes() -> None:
    table = {"web": Toolset("", ("web_search",)), "browser": Toolset("", ("browser_click",), includes=("web",))}
    assert resolve_toolsets(None, ["browser"], table) == ["web_search"]


def test_includes_in_a_circle_end() -> None:
    table = {"a": Toolset("", ("x",), includes=("b",)), "b": Toolset("", ("y",), includes=("a",))}
    assert resolve_toolsets(["a"], None, table) == ["x", "y"]
