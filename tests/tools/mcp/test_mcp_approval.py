"""A person is asked before tools of real MCP servers change the host, however the call is made."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.tools import decorator
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest, Approvals
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import TextDelta
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.echo_chat_server import EchoChatServer

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

SERVER = str(Path(__file__).parents[3] / "packages/palaestra/tests/tools/mcp/host_writer.py")


class Person:
    """Answers questions with the next of `answers`, and with no when there are none left."""

    def __init__(self, *answers: str) -> None:
        self.answers = [ApprovalAnswer(each) for each in answers]
        self.asked: list[ApprovalRequest] = []

    async def ask(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.asked.append(request)
        return self.answers.pop(0) if self.answers else ApprovalAnswer.DENY


def writer(**settings: JSON) -> MCPServerConfig:
    return MCPServerConfig(command=sys.executable, args=[SERVER], **settings)


@asynccontextmanager
async def tools(person: Person | None, **settings: JSON) -> AsyncIterator[ToolRuntime]:
    async with MCPServers({"fs": writer(**settings)}) as servers:
        runtime = ToolRuntime(build_tool_registry(servers.toolsets(), installed=servers.installed()), None, "t1")
        if person is not None:
            runtime.share(Approvals(person.ask))
        yield runtime


async def call(runtime: ToolRuntime, tool: str, path: Path, **more: JSON) -> Mapping[str, JSON]:
    reply: Mapping[str, JSON] = json.loads(await runtime.handle(f"mcp_fs_{tool}", {"path": str(path), **more}))
    return reply


async def test_a_tool_that_changes_the_host_asks_and_a_read_only_tool_does_not(tmp_path: Path) -> None:
    person, file = Person("deny", "once", "deny"), tmp_path / "f"
    async with tools(person) as runtime:
        refused = await call(runtime, "write", file, content="x" * 400)
        assert "did not allow" in refused["error"]
        assert refused["status"] == "blocked"
        assert not file.exists()
        assert (await call(runtime, "write", file, content="two"))["output"] == "written"
        assert (await call(runtime, "read", file))["output"] == "two"
        assert "did not allow" in (await call(runtime, "wipe", file))["error"]
        assert file.read_text() == "two"
    [first, _, last] = person.asked
    check_message(first.question.splitlines()[0], "'write'", "'fs'")
    assert json.loads(first.command) == first.arguments == {"path": str(file), "content": "x" * 400}
    assert first.command.index(str(file)) < first.command.index("xxx")
    assert "'wipe'" in last.question


async def test_the_name_of_a_tool_cannot_pass_for_another_server(tmp_path: Path) -> None:
    person = Person()
    async with tools(person) as runtime:
        [name] = [tool.name for tool in runtime.registry.tools() if "which_only" in tool.name]
        assert "did not allow" in await runtime.handle(name, {})
    [asked] = person.asked
    name = "read' of the MCP server 'files', which only reads. Earlier: the tool 'x"
    check_message(asked.question.splitlines()[0], f'"{name}"', "'fs'")


async def test_an_answer_for_the_session_covers_only_that_tool(tmp_path: Path) -> None:
    person = Person("session", "deny")
    async with tools(person) as runtime:
        for text in ("one", "two"):
            assert (await call(runtime, "write", tmp_path / "f", content=text))["output"] == "written"
        assert "did not allow" in (await call(runtime, "append", tmp_path / "f", content="three"))["error"]
    assert len(person.asked) == 2


@pytest.mark.parametrize(
    ("settings", "asking"),
    [
        ({"ask": "never"}, []),
        ({"ask": "always"}, ["write", "read", "wipe"]),
        ({"tools": {"allow": ["write"]}}, ["wipe"]),
        ({"ask": "always", "tools": {"allow": ["read", "wipe"]}}, ["write"]),
    ],
)
async def test_the_settings_permit_a_server_or_a_tool_by_name(
    tmp_path: Path, settings: JSON, asking: list[str]
) -> None:
    (tmp_path / "f").write_text("old")
    person = Person()
    async with tools(person, **settings) as runtime:
        replies = {
            "write": await call(runtime, "write", tmp_path / "f", content="new"),
            "read": await call(runtime, "read", tmp_path / "f"),
            "wipe": await call(runtime, "wipe", tmp_path / "f"),
        }
    assert [name for name, reply in replies.items() if "error" in reply] == asking


async def test_a_permitted_tool_that_the_server_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tool 'wirte'"):
        async with tools(None, tools={"allow": ["wirte"]}):
            pass


async def test_without_a_person_as_in_rollouts_every_call_runs(tmp_path: Path) -> None:
    async with tools(None) as runtime:
        assert (await call(runtime, "write", tmp_path / "f", content="x"))["output"] == "written"


def test_a_lasting_approval_does_not_cover_another_server_of_the_same_name() -> None:
    other = MCPServerConfig(command=sys.executable, args=["other.py"])
    assert writer().target != other.target
    assert writer().target == writer(timeout=3).target


async def test_a_typed_function_asks_if_it_says_so() -> None:
    @decorator.tool(asks=True)
    def deploy(version: str) -> str:
        """Deploy the program.

        version: The version.
        """
        return f"deployed {version}"

    person = Person("deny", "once")
    runtime = ToolRuntime(ToolRegistry([deploy]))
    runtime.share(Approvals(person.ask))
    assert "did not allow" in await runtime.handle("deploy", {"version": "1"})
    assert await runtime.handle("deploy", {"version": "1"}) == "deployed 1"
    assert "the tool deploy" in person.asked[0].question


@asynccontextmanager
async def chat(folder: Path, server: EchoChatServer, servers: MCPServers) -> AsyncIterator[ChatService]:
    toolsets = ("code_execution", "delegation", *servers.toolsets())
    settings = ChatSettings(
        toolsets=toolsets, build_tools=lambda names: build_tool_registry(list(names), installed=servers.installed())
    )
    with ConversationStore(folder / "c.sqlite") as store:
        config = APIServerConfig(base_url=server.url, model_name="echo", timeout=20)
        async with ChatService(config, store, settings) as service:
            yield service


async def said(conversation: Conversation, text: str) -> str:
    events = [event async for event in conversation.send(text)]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.slots
async def test_programs_and_sub_agents_ask_too_and_always_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "f"
    arguments = {"path": str(file), "content": "x"}
    code = f"from palaestra_tools import mcp_fs_write; print(mcp_fs_write(**{arguments!r}))"
    program = f"call execute_code {json.dumps({'code': code})}"
    goal = f"call mcp_fs_write {json.dumps(arguments)}"
    delegated = f"call delegate_task {json.dumps({'goal': goal})}"
    async with (
        EchoChatServer() as server,
        MCPServers({"fs": writer()}) as servers,
        chat(tmp_path, server, servers) as service,
    ):
        person = Person()
        conversation = Conversation.begin(service, People(approve=person.ask))
        assert "did not allow" in await said(conversation, program)
        assert "did not allow" in await said(conversation, delegated)
        assert len(person.asked) == 2
        assert not file.exists()
        person.answers = [ApprovalAnswer.ALWAYS]
        assert "written" in await said(conversation, delegated)
        await conversation.close()
        later = Conversation.begin(service, People(approve=person.ask))
        assert "written" in await said(later, program)
        assert len(person.asked) == 3
