"""The contract's questions about all tools at once."""

from __future__ import annotations

import pytest

from golden_messages import check_message
from palaestra.tools.registry.toolsets import TOOLSETS
from palaestra_contract import (
    TOOL_TO_TOOLSET_MAP,
    TOOLSET_REQUIREMENTS,
    check_tool_availability,
    check_toolset_requirements,
    get_all_tool_names,
    get_available_toolsets,
    get_toolset_for_tool,
)


def test_tools_and_their_toolsets() -> None:
    assert set(TOOL_TO_TOOLSET_MAP) <= set(get_all_tool_names())
    assert TOOL_TO_TOOLSET_MAP["patch"] == "file"
    assert get_toolset_for_tool("web_search") == "web"
    assert get_toolset_for_tool("todo_list") == "todo"
    assert get_toolset_for_tool("nothing") is None


def test_a_toolset_is_available_when_one_of_its_tools_is() -> None:
    available = check_toolset_requirements()
    assert set(TOOLSETS) <= set(available)
    assert available["terminal"]
    assert available["debugging"]
    assert not available["image_gen"]
    assert get_available_toolsets()["safe"]["missing"]["image_generate"].startswith("no image model")
    assert TOOLSET_REQUIREMENTS["todo"] == {"name": "todo", "env_vars": [], "tools": ["todo"]}


def test_what_is_missing_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    available, unavailable = check_tool_availability()
    assert "file" in available
    missing = {each["name"]: each for each in unavailable}
    assert "speech_base_url" in missing["tts"]["missing"]["text_to_speech"]
    assert not set(available) & set(missing)
    check_message(caplog.text, "toolset", "tts")
    caplog.clear()
    check_tool_availability(quiet=True)
    assert caplog.text == ""
