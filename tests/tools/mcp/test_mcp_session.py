"""MCP servers of a `ToolSession`, over both transports: started when they are wanted, ended with the session."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra_contract import ToolSession, ToolSessionConfig
from palaestra_slots.core.errors import ConfigError, InfraError, IsolationUnavailable, ToolServerUnavailable
from palaestra_slots.core.types import JSON
from tools.mcp.serving import command, http_server, living

pytest.importorskip("mcp", reason="needs the extra 'mcp'")


def call(session: ToolSession, name: str, /, **arguments: JSON) -> JSON:
    return json.loads(session.handle(name, arguments, "t"))


def names(definitions: list[dict[str, JSON]]) -> set[str]:
    return {each["function"]["name"] for each in definitions}


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """A file of two servers: a command, and one that listens at an address and wants a token."""
    with http_server("sesame") as url:
        servers = {
            "near": command(env={"KEY": "${KEY}"}),
            "far": {"url": url, "headers": {"Authorization": "Bearer ${TOKEN:-sesame}"}},
        }
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        yield tmp_path / "mcp.json"


def test_a_server_starts_with_the_first_call_of_its_tools_and_ends_with_the_session(told: Path) -> None:
    with ToolSession(config=ToolSessionConfig(mcp=told, variables={"KEY": "hidden"})) as session:
        assert call(session, "todo")["todos"] == []
        assert "mcp_near_add" not in call(session, "nothing")["error"], "nobody has asked for the server yet"
        assert call(session, "mcp_near_add", a=1, b=2) == {"output": "3"}
        assert call(session, "mcp_near_variable", name="KEY") == {"output": "hidden"}
        assert "place" in call(session, "mcp_near_visit", place={"floor": 1})["error"]
        unknown = call(session, "mcp_near_subtract", a=1, b=2)["error"]
        assert "'mcp_near_subtract'" in unknown
        assert "'mcp_near_add'" in unknown
        assert "mcp_far_add" not in unknown
        assert call(session, "mcp_far_add", a=1, b=2) == {"output": "3"}
        pids = [int(call(session, f"mcp_near_{what}")["output"]) for what in ("pid", "child")]
        assert living(*pids) == pids
    assert living(*pids) == []


def test_definitions_are_those_of_the_servers_too(told: Path) -> None:
    with ToolSession(config=ToolSessionConfig(mcp=told, variables={"KEY": "x"})) as session:
        everything = session.definitions()
        assert {"terminal", "mcp_near_add", "mcp_far_add"} <= names(everything)
        assert names(everything).isdisjoint({"delegate_task", "tmux", "clarify", "image_generate"})
        assert names(session.definitions(["todo", "mcp-far"])) >= {"todo", "mcp_far_add"}
        assert all(
            name == "todo" or name.startswith("mcp_far_") for name in names(session.definitions(["todo", "mcp-far"]))
        )
        assert not any(name.startswith("mcp_near_") for name in names(session.definitions(None, ["mcp-near"])))
        with pytest.raises(ConfigError, match=r"'mcp-fa'\. Did you mean 'mcp-far'"):
            session.definitions(["mcp-fa"])


@pytest.mark.slots
def test_programs_call_the_servers_tools(told: Path) -> None:
    program = "from palaestra_tools import mcp_near_add, mcp_far_add\n"
    program += "print(mcp_near_add(a=1, b=2)['output'], mcp_far_add(a=3, b=4)['output'])"
    with ToolSession(config=ToolSessionConfig(mcp=told, variables={"KEY": "x"})) as session:
        try:
            reply = call(session, "execute_code", code=program)
        except IsolationUnavailable as error:
            pytest.skip(str(error))
    assert reply["output"] == "3 7\n"


def test_a_registry_of_ones_own_is_left_as_it_was(told: Path) -> None:
    own = ToolRegistry(build_tool_registry(["todo"]).tools())
    with ToolSession(own, config=ToolSessionConfig(mcp=told, variables={"KEY": "x"})) as session:
        assert call(session, "mcp_far_add", a=1, b=2) == {"output": "3"}
    assert own.list_tools() == ["todo"]


def test_a_server_that_cannot_be_had_is_told_by_who_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    absent: dict[str, JSON] = {"command": "no-such-program"}
    with ToolSession(config=ToolSessionConfig(mcp={"gone": absent})) as session:
        assert call(session, "todo")["todos"] == []
        for _ in range(2):
            with pytest.raises(ToolServerUnavailable, match=r"'gone'(?s:.*)no-such-program cannot"):
                call(session, "mcp_gone_add", a=1)
        with pytest.raises(ToolServerUnavailable, match="no-such-program cannot be run"):
            session.definitions()
    with ToolSession(config=ToolSessionConfig(mcp={"mcpServers": {"gone": {**absent, "required": False}}})) as session:
        assert "todo" in names(session.definitions())
        assert "MCP server 'gone'" in caplog.text


@pytest.mark.parametrize(
    ("mcp", "problem"),
    [
        ({"a": {"command": "x", "env": {"KEY": "${NOT_THERE}"}}}, r"MCP server 'a': \$\{NOT_THERE\} is not set"),
        ({"a": {}}, r"MCP server 'a': .*set either command"),
        ({"a": "x"}, "expected servers by name under mcpServers"),
        ({"a b": {"command": "x"}}, "'a b' cannot be a server's name"),
        ("nowhere.json", "cannot read the MCP servers in nowhere.json"),
    ],
)
def test_what_cannot_be_a_server_is_refused_at_once(mcp: JSON, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ToolSession(config=ToolSessionConfig(mcp=mcp))


def test_a_server_that_is_being_started_ends_with_the_session(tmp_path: Path) -> None:
    pid, raised = tmp_path / "pid", list[BaseException]()
    program = f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    server = {"command": sys.executable, "args": ["-S", "-c", program]}
    session = ToolSession(config=ToolSessionConfig(mcp={"slow": server}))

    def wants() -> None:
        try:
            call(session, "mcp_slow_add")
        except InfraError as error:
            raised.append(error)

    waiting = threading.Thread(target=wants)
    waiting.start()
    while not (pid.exists() and pid.read_text().endswith("\n")):
        time.sleep(0.02)
    session.close()
    waiting.join()
    assert "'slow'" in str(raised[0])
    assert living(int(pid.read_text())) == []
