"""`palaestra serve tools` and `serve executor` as processes: how they are told, reached and ended."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from golden_messages import check_message, raises
from palaestra.cli.main import cli
from palaestra.cli.server_options import read_token
from palaestra.tools.registry.registry import ToolRegistry
from palaestra_contract import serve_tools
from palaestra_contract.serve_tools import executor_settings
from palaestra_contract.tools.payloads import ToolExecutorExecuteRequest
from palaestra_contract.tools.tool_server import ToolServer
from palaestra_contract.tools.tool_server_client import ToolServerLink
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from sessions.asking import Client
from stand_ins.fake_nomad import fake_nomad

DOCS = Path(__file__).parents[4] / "docs/tools/servers.md"
TOOLS = DOCS.read_text().partition("```python\n# my_tools.py\n")[2].partition("```")[0]


@contextmanager
def serving(*argv: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and its address; killed in the end."""
    command = [sys.executable, "-m", "palaestra", "serve", *argv, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            told = process.stderr.read()
            if process.wait() == 5:
                pytest.skip(told)
            raise AssertionError(told)
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slots
@pytest.mark.slow
async def test_an_executor_reaches_the_tools_of_a_tool_server_and_ends_when_told(tmp_path: Path) -> None:
    tools, token = tmp_path / "my_tools.py", tmp_path / "token"
    tools.write_text(TOOLS)
    token.write_text("sesame\n")

    async def scenario(url: str) -> None:
        async with Client(url, "sesame") as client:
            assert (await client.call("t1", "shout", {"text": "hi"}))["output"] == "HI"
            assert (await client.get("/status"))[1]["pool"]["acquired_slots"] == 0
            assert await client.bash("t1", "echo here") == "here\n"

    with serving("tools", str(tools), "--token-file", str(token)) as (_, tool_server):
        env = {
            "PATH": "/usr/bin:/bin",
            "TOOL_EXECUTOR_TOOL_SERVER_URL": tool_server,
            "TOOL_EXECUTOR_TOOL_SERVER_TOKEN": "sesame",
            "TOOL_EXECUTOR_TOKEN": "sesame",
            "TOOL_EXECUTOR_JOB_ID": "old",
        }
        with serving("executor", "--slots", "2", "--toolset", "default", env=env) as (process, url):
            await scenario(url)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            check_message(process.stderr.read(), "TOOL_EXECUTOR_JOB_ID", "TOOL_EXECUTOR_NOMAD_ADDRESS")
            assert process.wait(30) == 0


@pytest.mark.slots
@pytest.mark.slow
async def test_an_executor_has_its_slots_in_nomad() -> None:
    async def scenario(url: str) -> None:
        async with Client(url, "") as client:
            assert await client.bash("t1", "echo here") == "here\n"

    with fake_nomad() as nomad:
        env = {
            "PATH": "/usr/bin:/bin",
            "TOOL_EXECUTOR_NOMAD_ADDRESS": nomad.url,
            "TOOL_EXECUTOR_JOB_ID": "mine",
            "TOOL_EXECUTOR_SLOTS": "2",
            "TERMINAL_NOMAD_DRIVER": "raw_exec",
        }
        with serving("executor", "--slots", "2", "--toolset", "default", env=env) as (process, url):
            assert list(nomad.jobs) == ["mine"]
            await scenario(url)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert "no effect" not in process.stderr.read()
            assert process.wait(30) == 0
        assert nomad.jobs == {}


CLASSES = """
from palaestra import Tool, ToolResult, ToolSchema

class Shout(Tool):
    schema = ToolSchema("shout", "Shout.", {"text": {"type": "string"}}, ("text",))

    async def execute(self, text):
        return ToolResult(True, text.upper())

class Prefix(Shout):
    def __init__(self, word):
        self.word = word

    schema = ToolSchema("prefix", "Put a word before.", {"text": {"type": "string"}}, ("text",))

    async def execute(self, text):
        return ToolResult(True, self.word + text)

PREFIX = Prefix("EXT:")
"""


@pytest.mark.slow
async def test_subclasses_of_tool_are_served(tmp_path: Path) -> None:
    file = tmp_path / "classes.py"
    file.write_text(CLASSES)

    async def scenario(url: str) -> None:
        async with Client(url) as client:
            assert (await client.call("t1", "shout", {"text": "hi"}))["output"] == "HI"
            assert (await client.call("t1", "prefix", {"text": "hi"}))["output"] == "EXT:hi"

    with serving("tools", str(file)) as (_, url):
        await scenario(url)


def test_a_tool_class_that_needs_arguments_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "classes.py"
    file.write_text(CLASSES.replace("PREFIX =", "# "))
    with pytest.raises(ConfigError, match=r"Prefix\(\)"):
        serve_tools._tools_of(file)


@pytest.mark.slots
@pytest.mark.slow
async def test_sub_agents_of_an_executors_clients_ask_the_server_that_was_named() -> None:
    async with LoopbackServer(FakeAnswer(completion("It is done."))) as server:
        flags = ["--slots", "1", "--base-url", f"{server.url}/v1", "--model", "m"]
        env = {"PATH": "/usr/bin:/bin", "TOOL_EXECUTOR_API_KEY": "sesame"}
        with serving("executor", *flags, env=env) as (_, url):
            async with Client(url) as client:
                result = await client.call("t1", "delegate_task", {"goal": "do it"})
    assert json.loads(result["output"])["results"][0]["summary"] == "It is done."
    assert server.seen[-1].body["model"] == "m"
    assert server.seen[-1].headers["Authorization"] == "Bearer sesame"


@pytest.mark.slots
@pytest.mark.slow
def test_an_executor_plays_a_recording_without_a_network(tmp_path: Path) -> None:
    tools, folder = tmp_path / "my_tools.py", tmp_path / "recorded"
    tools.write_text(TOOLS)

    async def scenario(url: str, *, text: str = "hi") -> dict[str, JSON]:
        async with Client(url) as client:
            assert await client.bash("t1", "echo here") == "here\n"
            return await client.call("t1", "shout", {"text": text})

    env = {"PATH": "/usr/bin:/bin", "TOOL_EXECUTOR_WORLD": "record", "TOOL_EXECUTOR_WORLD_FILE": str(folder)}
    with serving("tools", str(tools)) as (_, tool_server):
        env["TOOL_EXECUTOR_TOOL_SERVER_URL"] = tool_server
        with serving("executor", "--toolset", "default", env=env) as (_, url):
            recorded = asyncio.run(scenario(url))
    assert recorded["output"] == "HI"
    with serving("executor", "--toolset", "default", env={**env, "TOOL_EXECUTOR_WORLD": "replay"}) as (_, url):
        played = asyncio.run(scenario(url))  # the tool server is gone
        assert {**played, "uniq_id": None} == {**recorded, "uniq_id": None}
        check_message(asyncio.run(scenario(url, text="new"))["error"])


@pytest.mark.slots
@pytest.mark.slow
def test_an_executor_has_the_tools_of_the_contract_and_says_which_are_missing() -> None:
    async def scenario(url: str) -> None:
        async with Client(url) as client:
            assert await client.bash("t1", "echo here") == "here\n"
            assert (await client.call("t1", "bash_stateful", {"command": "cd /tmp"}))["success"]
            assert (await client.call("t1", "terminal_stateful", {"command": "pwd"}))["output"] == "/tmp\n"
            assert (await client.call("t1", "write_file", {"path": "f", "content": "x"}))["success"]
            assert (await client.call("t1", "read_file", {"path": "f"}))["output"] == "1|x"
            crawled = await client.call("t1", "web_crawl", {"url": "http://127.0.0.1:1/"})
            assert "private" in crawled["output"] + crawled["error"] + str(crawled["metadata"])
            for name in ("image_generate", "mixture_of_agents", "vision_analyze"):
                refused = await client.call("t1", name, {})
                assert refused["error"].startswith(f"{name} cannot be used here: ")
            assert (await client.call("t1", "nothing", {}))["error"] == "Unknown tool: nothing"

    with serving("executor", env={"PATH": "/usr/bin:/bin"}) as (_, url):
        asyncio.run(scenario(url))
    with serving("executor", env={"PATH": "/usr/bin:/bin", "TOOL_EXECUTOR_ALLOW_NETWORK": "false"}) as (_, url):
        asyncio.run(without_a_network(url))


async def without_a_network(url: str) -> None:
    async with Client(url) as client:
        for name in ("web_crawl", "web_extract"):
            assert (await client.call("t1", name, {"url": "http://1.1.1.1/"}))["error"] == f"Unknown tool: {name}"


async def test_a_token_with_the_new_line_of_its_file_is_the_same_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets that a cluster hands over as variables end with one; so do files."""
    monkeypatch.setenv("TOOL_SERVER_TOKEN", "sesame\n")
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "two").write_text("open\nsesame\n")
    assert read_token(None, "TOOL_SERVER_TOKEN") == read_token(tmp_path / "token", "TOOL_SERVER_TOKEN") == "sesame"
    with raises(ConfigError):
        read_token(tmp_path / "two", "TOOL_SERVER_TOKEN")

    async def listed() -> list[str]:
        server = ToolServer(ToolRegistry(), token="sesame")
        async with server.serving("127.0.0.1", 0) as url:
            link = ToolServerLink(url, "sesame\n")
            try:
                return [schema.name for schema in await link.offered()]
            finally:
                await link.aclose()

    assert await listed() == []


def test_variables_are_honoured_named_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    settings = executor_settings(
        {
            "TOOL_EXECUTOR_ALLOW_NETWORK": "false",
            "TOOL_EXECUTOR_ACQUIRE_TIMEOUT_S": "5",
            "TOOL_EXECUTOR_SLOTS": "4",
            "TOOL_EXECUTOR_MAX_BATCH_SIZE": "9",
        }
    )
    assert (settings.allow_network, settings.acquire_timeout_s) == (False, 5.0)
    said = capsys.readouterr().err
    check_message(said, "TOOL_EXECUTOR_SLOTS", "TOOL_EXECUTOR_NOMAD_ADDRESS")
    check_message(said, "TOOL_EXECUTOR_MAX_BATCH_SIZE")
    with raises(ConfigError, "ALOW_NETWORK", "TOOL_EXECUTOR_ALLOW_NETWORK"):
        executor_settings({"TOOL_EXECUTOR_ALOW_NETWORK": "1"})
    with pytest.raises(ConfigError, match=r"TOOL_EXECUTOR_ACQUIRE_TIMEOUT_S 'x'"):
        executor_settings({"TOOL_EXECUTOR_ACQUIRE_TIMEOUT_S": "x"})


def test_a_tool_server_without_external_tools_says_so(tmp_path: Path) -> None:
    tools = tmp_path / "my_tools.py"
    tools.write_text(TOOLS.replace("(external=True)", ""))
    refused = CliRunner().invoke(cli, ["serve", "tools", str(tools)], standalone_mode=False).exception
    assert isinstance(refused, ConfigError)
    check_message(str(refused), "shout")


def test_bodies_are_importable_from_the_package() -> None:
    import palaestra

    assert palaestra.ToolExecutorExecuteRequest is ToolExecutorExecuteRequest
    call = palaestra.ToolCall("bash", {"command": "ls"})
    assert palaestra.ToolCallPayload.from_tool_call(call).to_tool_call() == call
    result = palaestra.ToolResult(False, "out", "error", {"exit_code": 1}, "u1")
    assert palaestra.ToolResultPayload.from_tool_result(result).to_tool_result() == result
