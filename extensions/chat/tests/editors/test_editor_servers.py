"""The settings of the MCP servers that an editor names."""

from __future__ import annotations

import pytest
from acp import schema

from golden_messages import check_message
from palaestra_chat.acp.editor_servers import editor_servers
from palaestra_slots.core.errors import ConfigError


def stdio(name: str = "files", command: str = "/bin/files", *args: str) -> schema.McpServerStdio:
    return schema.McpServerStdio(
        name=name, command=command, args=list(args), env=[schema.EnvVariable(name="KEY", value="${HOME}")]
    )


def test_values_are_literal_and_names_fit_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/secret")
    servers = editor_servers([stdio("My files!", "/bin/files", "--root=${HOME}", "$PATH")], (), lambda _: None)
    resolved = servers["My_files"].resolved()
    assert (resolved.command, resolved.args) == ("/bin/files", ["--root=${HOME}", "$PATH"])
    assert resolved.env == {"KEY": "${HOME}"}
    http = schema.HttpMcpServer(
        type="http", name="t", url="http://localhost/${X}", headers=[schema.HttpHeader(name="A", value="b")]
    )
    resolved = editor_servers([http], (), lambda _: None)["t"].resolved()
    assert (resolved.url, resolved.headers) == ("http://localhost/${X}", {"A": "b"})


def test_a_server_of_the_settings_keeps_its_name() -> None:
    notices: list[str] = []
    assert editor_servers([stdio()], {"files"}, notices.append) == {}
    check_message(notices[0], "files")


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ([stdio(command="./server")], "must name an absolute path"),
        ([stdio(), stdio()], "two MCP servers"),
        ([stdio("!?")], "needs a name"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error(servers: list[schema.McpServerStdio], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        editor_servers(servers, (), lambda _: None)
