"""What MCP servers can be told, how their tools are called, and what a record of a run keeps of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra.tools.mcp.mcp_config import MCPServerConfig, checked_names, configured, hand_over, read_servers
from palaestra.tools.mcp.mcp_server import tool_names
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON


def test_names_are_what_model_servers_take_and_differ() -> None:
    names = tool_names("my.files", ["read-file", "read_file", "list", "x" * 80])
    assert names[2] == "mcp_my_files_list"
    assert len(set(names)) == 4
    assert all(
        name.startswith("mcp_my_files_") and len(name) <= 64 and name.replace("_", "").isalnum() for name in names
    )
    assert names == tool_names("my.files", ["read-file", "read_file", "list", "x" * 80])


def test_keys_that_only_other_clients_read_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    written = {"command": "a", "alwaysAllow": ["x"], "autoApprove": [], "icon": "i.png", "_comment": "mine"}
    assert configured({"a": written})["a"].command == "a"
    check_message(caplog.text, "alwaysAllow", "autoApprove", "icon")
    with pytest.raises(ConfigError, match="envFile"):  # this one could change what the server does
        configured({"a": {**written, "envFile": ".env"}})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "set either command"),
        ({"command": "a", "url": "http://b"}, "set either command"),
        ({"command": "a", "headers": {"X": "1"}}, "headers has no effect"),
        ({"url": "http://b", "cwd": "/"}, "cwd has no effect"),
        ({"url": "http://b", "type": "stdio"}, "type stdio cannot be used with url"),
        ({"url": "http://b", "type": "sse"}, "type"),
        ({"comand": "a"}, "Did you mean command"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, JSON], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"MCP server 'a': .*{problem}"):
        configured({"a": settings})


def test_variables_are_replaced_when_they_are_used_and_recorded_by_name() -> None:
    config = MCPServerConfig(url="http://${HOST:-localhost}/", headers={"Authorization": "Bearer ${T}", "Key": "plain"})
    with raises(ConfigError):
        hand_over({}, {"a": config})
    hand_over({}, {"off": config.model_copy(update={"enabled": False})})
    config.take_variables({"T": "secret", "U": "other"})
    assert config.resolved().url == "http://localhost/"
    assert config.resolved().headers["Authorization"] == "Bearer secret"
    kept = config.model_dump(mode="json")
    assert kept["headers"] == {"Authorization": "Bearer ${T}", "Key": "(hidden)"}
    assert "plain" not in repr(config)
    assert "secret" not in repr(config) + config.model_dump_json()


def test_a_value_that_nobody_handed_over_is_named() -> None:
    with raises(ConfigError):
        MCPServerConfig(command="a", env={"X": "${T}"}).resolved()


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text('{"mcpServers": {"files": {"command": "npx", "args": ["-y", "x"], "disabled": true}}}')
    (config,) = (MCPServerConfig(**each) for each in read_servers(path).values())
    assert (config.command, config.args, config.used) == ("npx", ["-y", "x"], False)
    path.write_text("web: {url: http://x}")
    assert list(read_servers(path)) == ["web"]
    path.write_text("- a")
    with raises(ConfigError):
        read_servers(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_servers(tmp_path / "none")


def test_the_printed_file_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[5] / "docs/tools/mcp.md").read_text()
    path = tmp_path / "mcp.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    configs = {name: MCPServerConfig(**each) for name, each in read_servers(path).items()}
    assert configs["files"].command == "npx"
    assert configs["tickets"].headers == {"Authorization": "Bearer ${TICKETS_TOKEN}"}


def test_servers_that_nobody_will_have_are_left_out() -> None:
    a, b = MCPServerConfig(command="a"), MCPServerConfig(command="b", enabled=False)
    assert MCPServers({"a": a, "b": b}).toolsets() == ["mcp-a"]
    assert MCPServers({"a": a}, without=["mcp-a"]).toolsets() == []
    with raises(ConfigError):
        checked_names({"a b": a})
