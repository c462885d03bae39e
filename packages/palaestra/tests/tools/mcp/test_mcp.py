"""Tools of real MCP servers, over both transports: what models see of them, and what is left when they or we end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core import redaction
from palaestra_slots.core.errors import ToolServerRefused, ToolServerUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from programs import killed_after
from tools.mcp.serving import command, http_server, living

pytest.importorskip("mcp", reason="needs the extra 'mcp'")


async def no_slot() -> Slot:
    raise AssertionError("tools of MCP servers need no slot")


class Agent:
    """The tools of one server as an agent calls them."""

    def __init__(self, servers: MCPServers) -> None:
        registry = build_tool_registry(servers.toolsets(), installed=servers.installed())
        self.tools = ToolRuntime(registry, no_slot, "task-1")
        self.registry = registry

    async def call(self, tool: str, **arguments: JSON) -> JSON:
        return json.loads(await self.tools.handle(f"mcp_test_{tool}", arguments))

    async def output(self, tool: str, **arguments: JSON) -> str:
        return str((await self.call(tool, **arguments))["output"])


@asynccontextmanager
async def agent_of(**settings: JSON) -> AsyncIterator[Agent]:
    async with MCPServers({"test": MCPServerConfig(**settings)}) as servers:
        yield Agent(servers)


async def test_what_a_command_offers_is_a_toolset() -> None:
    settings = MCPServerConfig(
        **command(env={"TOKEN": "${SECRET}-${OTHER:-x}"}, tools={"exclude": ["fail", "die"]}, max_reply_chars=200)
    )
    settings.take_variables({"SECRET": "s3"})
    async with MCPServers({"test": settings}) as servers:
        agent = Agent(servers)
        assert agent.registry.list_tools()[:2] == ["mcp_test_add", "mcp_test_visit"]
        assert agent.registry.get("mcp_test_fail") is None
        assert agent.registry.get("mcp_test_die_once") is not None
        assert agent.registry.parallel_safe() == {"mcp_test_add"}
        (visit,) = (each for each in agent.registry.definitions() if each["function"]["name"] == "mcp_test_visit")
        assert visit["function"]["description"] == "Go to a place."
        assert visit["function"]["parameters"]["$defs"]["Place"]["required"] == ["city"]

        assert await agent.call("add", a=1, b=2) == {"output": "3"}
        wrong = await agent.call("visit", place={"floor": 1})
        assert "place" in wrong["error"]
        assert "city" in wrong["error"]
        went = json.loads(await agent.output("visit", place={"city": "Elis"}))
        assert went == {"city": "Elis", "floor": 0, "tags": []}
        shown = await agent.output("show")
        assert shown.splitlines() == [
            "look:",
            "[image: image/png, 100 bytes, not shown]",
            "[resource file:///notes.txt: notes, text/plain]",
            "[resource mem://a]",
            "inside",
            "[resource mem://b: image/png, 100 bytes, not shown]",
        ]
        much = await agent.call("long", chars=5000)
        assert len(much["output"]) < 300
        assert "(4800 characters left out)" in much["output"]
        assert much["output_total_chars"] == 5000
        assert await asyncio.gather(agent.output("wait"), agent.output("release")) == ["released", "ok"]
        assert await agent.output("variable", name="TOKEN") == "s3-x"


async def test_a_server_that_dies_is_opened_once_more_and_nothing_of_it_stays() -> None:
    async def scenario(marker: str) -> list[int]:
        async with agent_of(**command()) as agent:
            failed = await agent.call("fail", why="no reason")
            assert "fail" in failed["error"]
            pids = [int(await agent.output("pid")), int(await agent.output("child"))]
            with pytest.raises(ToolServerUnavailable, match=r"'test' .*die(?s:.*)I am dying"):
                await agent.call("die")
            assert await agent.output("die_once", marker=marker) == "second time"
            assert living(*pids) == []  # the child too, which had left the server's group
            return [*pids, int(await agent.output("pid")), int(await agent.output("child"))]

    pids = await scenario(f"/tmp/palaestra-mcp-{os.getpid()}")
    Path(f"/tmp/palaestra-mcp-{os.getpid()}").unlink()
    assert len(set(pids)) == 4
    assert living(*pids) == []


async def test_an_older_server_is_understood_and_keeps_the_tools_it_began_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = str(Path(__file__).with_name("old_server.py"))
    async with agent_of(command=sys.executable, args=["-S", old]) as agent:
        assert agent.registry.list_tools() == ["mcp_test_echo", "mcp_test_more"]
        assert [await agent.output("echo", text=text) for text in ("a", "b")] == ["a", "b"]
    told = [each.getMessage() for each in caplog.records if each.name.startswith("palaestra.tools.mcp")]
    assert told == ["MCP server 'test' has changed its tools; this run keeps those that it began with"]


@pytest.mark.parametrize(
    ("cursor", "tools"), [("", ["echo", "more"]), ("2", ["echo", "more"]), ("again", ["echo", "more"])]
)
async def test_a_cursor_that_comes_again_ends_the_list(cursor: str, tools: list[str]) -> None:
    old = str(Path(__file__).with_name("old_server.py"))
    async with agent_of(command=sys.executable, args=["-S", old, cursor]) as agent:
        assert agent.registry.list_tools() == [f"mcp_test_{name}" for name in tools]


async def test_a_server_that_is_not_ready_in_time_is_ended_and_its_last_words_told(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        f"import os, sys, time; open({str(told)!r}, 'w').write(str(os.getpid())); "
        "print('warming up', file=sys.stderr, flush=True); time.sleep(600)"
    )
    with pytest.raises(ToolServerUnavailable, match=r" 6 s.*connect_timeout(?s:.*)warming up"):
        async with agent_of(command=sys.executable, args=["-S", "-c", program], connect_timeout=6):
            pass
    assert living(int(told.read_text())) == []


async def test_a_program_that_is_not_there_is_named() -> None:
    async with MCPServers({"test": MCPServerConfig(command="no-such-program", required=False)}) as servers:
        registry = build_tool_registry(servers.toolsets(), installed=servers.installed())
        assert registry.list_tools() == []
        check_message(registry.missing["mcp-test"], "no-such-program")
    with raises(ToolServerUnavailable, "no-such-program"):
        async with agent_of(command="no-such-program"):
            pass


@pytest.mark.parametrize(("arguments", "warned"), [(["--api-key", "${T}"], True), (["--port", "80"], False)])
async def test_a_key_on_a_servers_command_line_is_a_warning_and_hidden(
    arguments: list[str], warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setattr(redaction, "_known_pattern", None)
    config = MCPServerConfig(command="no-such-program", args=arguments, required=False)
    config.take_variables({"T": "plain-but-secret"})
    async with MCPServers({"test": config}):
        pass
    assert ("MCP server 'test' contain a key" in caplog.text) is warned
    assert "plain-but-secret" not in caplog.text
    assert ("plain-but-secret" in redaction.redacted("it said plain-but-secret")) is not warned


async def test_a_server_at_an_address_wants_its_token_and_is_missed_when_it_is_gone() -> None:
    with http_server("sesame") as url:
        with pytest.raises(ToolServerRefused, match="status 401: check its headers"):
            async with agent_of(url=url, headers={"Authorization": "Bearer wrong"}):
                pass
        async with agent_of(url=url, headers={"Authorization": "Bearer sesame"}) as agent:
            assert await agent.output("add", a=1, b=2) == "3"
            async with agent_of(url=url, headers={"Authorization": "Bearer sesame"}, timeout=0.2) as hasty:
                assert await hasty.call("wait") == {"error": "The tool did not answer within 0.2 s."}
            assert await asyncio.gather(agent.output("wait"), agent.output("release")) == ["released", "ok"]
            os.kill(int(await agent.output("pid")), signal.SIGKILL)
            with pytest.raises(ToolServerUnavailable, match=f"'test' .*{url}"):
                await agent.call("add", a=1, b=2)


def test_the_leash_ends_a_server_when_we_are_killed() -> None:
    """The server ignores what it is told, and its child has left its group and its pipes."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(PIDS, flush=True); time.sleep(600)"
    child = deaf.replace("print(PIDS, flush=True);", "")
    parent = deaf.replace(
        "print(PIDS",
        f"import os, subprocess; c = subprocess.Popen(['{sys.executable}', '-S', '-c', {child!r}], "
        "start_new_session=True, stdin=-3, stdout=-3, stderr=-3); print(os.getpid(), c.pid",
    )
    ours = (
        "import subprocess, sys, time; from palaestra_slots.core.io.supervised_command import supervised; "
        f"subprocess.Popen(supervised(sys.executable, '-S', '-c', {parent!r})); "
        "time.sleep(600)"
    )
    with killed_after([sys.executable, "-c", ours], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        descriptors = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        try:
            for descriptor in descriptors:
                assert select.select([descriptor], [], [], 30)[0], "it outlived us"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    assert len(pids) == 2
