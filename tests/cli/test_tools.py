"""`palaestra tools`: everything is listed, and what is missing is listed with its reason."""

from __future__ import annotations

import json

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.tools.registry.build import builtin_tools
from palaestra.tools.registry.distributions import DISTRIBUTIONS
from palaestra.tools.registry.toolsets import TOOLSETS


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["tools", *words]) == 0
    return capsys.readouterr().out


def test_json_has_every_tool_with_its_schema_and_availability(capsys: pytest.CaptureFixture[str]) -> None:
    seen = json.loads(printed(capsys, "--json"))
    tools = {tool["name"]: tool for tool in seen["tools"]}
    assert list(tools)[: len(builtin_tools())] == [tool.name for tool in builtin_tools()]
    assert tools["terminal"]["missing"] is None
    assert tools["terminal"]["parameters"]["required"] == ["command"]
    assert "image_base_url" in tools["image_generate"]["missing"]
    toolsets = {toolset["name"]: toolset for toolset in seen["toolsets"]}
    assert set(TOOLSETS) <= set(toolsets)
    assert toolsets["file"]["available"]
    assert not toolsets["vision"]["available"]
    assert list(toolsets["vision"]["missing"]) == ["vision_analyze"]
    assert [each["name"] for each in seen["distributions"]] == list(DISTRIBUTIONS)


def test_the_list_for_people_names_everything_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    for tool in builtin_tools():
        assert tool.name in text
    check_message(text, "missing", "vision model")
    check_message(text, "vision", "1 missing")
    assert "terminal_tasks   terminal 97, file 97, web 97" in text
