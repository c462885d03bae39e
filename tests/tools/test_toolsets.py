"""Toolsets: enabled, then disabled; unknown names are told with the nearest known one."""

from __future__ import annotations

import pytest

from palaestra.core.errors import ConfigError
from palaestra.tools.toolsets import Toolset, resolve_toolsets

ALL = ["terminal", "process", "read_file", "write_file", "patch", "search_files"]


@pytest.mark.parametrize(
    ("enabled", "disabled", "expected"),
    [
        (None, None, ALL),
        (["default"], None, ALL),
        (["file", "terminal"], [], ALL),
        (["terminal"], None, ALL[:2]),
        (["file_tools"], None, ALL[2:]),
        (["default"], ["terminal_tools"], ALL[2:]),
        (["terminal"], ["terminal"], []),
        (None, ["default"], []),
        ([], None, []),
    ],
)
def test_enabled_then_disabled(enabled: list[str] | None, disabled: list[str] | None, expected: list[str]) -> None:
    assert resolve_toolsets(enabled, disabled) == expected


def test_an_unknown_toolset_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Unknown toolset 'terminl'\. Did you mean 'terminal'"):
        resolve_toolsets(["terminl"])
    with pytest.raises(ConfigError, match="Available toolsets: default, file, terminal"):
        resolve_toolsets(None, ["web"])


def test_a_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(ConfigError, match="list of names"):
        resolve_toolsets("file")


def test_disabling_a_toolset_leaves_the_tools_of_those_it_includes() -> None:
    table = {"web": Toolset("", ("web_search",)), "browser": Toolset("", ("browser_click",), includes=("web",))}
    assert resolve_toolsets(None, ["browser"], table) == ["web_search"]


def test_includes_in_a_circle_end() -> None:
    table = {"a": Toolset("", ("x",), includes=("b",)), "b": Toolset("", ("y",), includes=("a",))}
    assert resolve_toolsets(["a"], None, table) == ["x", "y"]
