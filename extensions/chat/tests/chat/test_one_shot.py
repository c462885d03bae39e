"""`palaestra chat -p` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from aiohttp import web

from chat.chat_process import environment
from golden_messages import check_message
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.echo_chat_server import EchoChatServer

pytestmark = pytest.mark.slow


MCP_SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("boats")


@server.tool()
def knots(speed: int) -> str:
    "Twice the speed."
    return str(2 * speed)


server.run()
"""


class Ran:
    """What a command printed and returned."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()

    @property
    def events(self) -> list[dict[str, JSON]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def chat(folder: Path, *words: str, stdin: bytes = b"", interrupt_after: bytes = b"") -> Ran:
    process = await asyncio.create_subprocess_exec(
        "palaestra", "chat", *words, cwd=folder, env=environment(folder),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    before = b""
    if interrupt_after:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.close()
        while interrupt_after not in before:
            before += await process.stdout.readline()
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate(None if interrupt_after else stdin)
    assert process.returncode is not None
    return Ran(process.returncode, before + out, err)


def play(scene: Callable[[EchoChatServer], Coroutine[None, None, None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(90), EchoChatServer() as server:
            await scene(server)

    asyncio.run(go())


def test_one_answer_with_stdin_and_a_tool(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo")
        ran = await chat(tmp_path, "-p", "say the words below", *words, stdin=b"piped in\n")
        assert (ran.code, ran.out, ran.err) == (0, "the words below\n", "")
        assert server.asked[-1]["messages"][-1]["content"] == "say the words below\n\npiped in"
        ran = await chat(tmp_path, "-c", "-p", 'call terminal {"command": "echo hi"}', "--json", *words)
        kinds = list(dict.fromkeys(event["type"] for event in ran.events))
        assert kinds == ["conversation", "tool_call", "tool_output", "tool_result", "text", "end"]
        assert len(server.asked[-1]["messages"]) == 6  # the earlier turn, too
        ran = await chat(tmp_path, "-p", "say", *words, stdin=b"caf\xe9\r\n\xff\xfeon")
        assert (ran.code, server.asked[-1]["messages"][-1]["content"]) == (0, "say\n\ncaf\ufffd\n\ufffd\ufffdon")
        listed = await chat(tmp_path, "--list", "--json")
        assert [row["turns"] for row in json.loads(listed.out)] == [1, 2]
        assert "piped" in (await chat(tmp_path, "--search", "piped")).out

    play(scene)


@pytest.mark.parametrize("write", ["yes", "no"])
def test_nothing_follows_the_end_and_the_changes_are_written_before_it(tmp_path: Path, write: str) -> None:
    async def scene(server: EchoChatServer) -> None:
        folder = tmp_path / "work"
        folder.mkdir()
        (folder / "a.txt").write_text("one\n")
        words = ("--base-url", server.url, "--model", "echo", "--workdir", str(folder), "--write", write)
        ran = await chat(tmp_path, "-p", 'call terminal {"command": "echo new > b.txt"}', "--json", *words)
        kinds = [event["type"] for event in ran.events]
        assert (kinds.count("end"), kinds[-2:]) == (1, ["notice", "end"])
        assert (folder / "b.txt").exists() == (write == "yes")

    play(scene)


def test_a_file_that_piped_text_names_is_not_read(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo")
        for name in ("mine", "secret"):
            (tmp_path / f"{name}.txt").write_text(f"the text of {name}")
        ran = await chat(tmp_path, "-p", "say @mine.txt", *words, stdin=f"and @{tmp_path}/secret.txt".encode())
        assert ran.code == 0
        said = server.asked[-1]["messages"][-1]["content"]
        assert "the text of mine" in said
        assert "and @" in said
        assert "the text of secret" not in said

    play(scene)


def test_the_shared_folder_is_copied_and_written_back_only_if_allowed(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        folder = tmp_path / "work"
        (folder / "sub").mkdir(parents=True)
        (folder / "sub/a.txt").write_text("one\n")
        (folder / "AGENTS.md").write_text("Speak of boats.")
        command = json.dumps({"command": "cat sub/a.txt && echo two > sub/a.txt && echo new > b.txt && rm AGENTS.md"})
        words = (
            "--base-url",
            server.url,
            "--model",
            "echo",
            "--workdir",
            str(folder),
            "-p",
            f"call terminal {command}",
        )
        ran = await chat(tmp_path, *words)
        assert "one" in ran.out
        assert "--write yes" in ran.err
        assert (folder / "sub/a.txt").read_text() == "one\n"
        assert "Speak of boats." in server.asked[-1]["messages"][0]["content"]
        ran = await chat(tmp_path, *words, "--write", "yes")
        assert (folder / "sub/a.txt").read_text() == "two\n"
        assert (folder / "b.txt").read_text() == "new\n"
        assert not (folder / "AGENTS.md").exists()

    play(scene)


def test_a_file_is_attached_where_the_message_names_it_and_not_where_piped_text_does(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("the secret\n")
    (tmp_path / "log.txt").write_text("the log\n")

    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo")
        ran = await chat(tmp_path, "-p", "say @log.txt @lgo.txt", *words, stdin=b"see @key.txt\n")
        assert "lgo.txt" in ran.err
        sent = str(server.asked[-1]["messages"][-1]["content"])
        assert "the log" in sent
        assert "@key.txt" in sent
        assert "the secret" not in sent

    play(scene)


def test_the_list_has_one_line_for_each_conversation(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        await chat(tmp_path, "-p", "say a", "--base-url", server.url, "--model", "echo", stdin=b"line 1\nline 2\n")
        listed = (await chat(tmp_path, "--list")).out.splitlines()
        assert len(listed) == 1
        assert listed[0].endswith("1 turn   say a line 1 line 2")
        assert len((await chat(tmp_path, "--search", "line")).out.splitlines()) == 1
        assert (await chat(tmp_path, "--search", "nowhere")).out == "nothing found\n"

    play(scene)


def test_failures_have_exit_codes_and_say_what_to_do(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        ran = await chat(tmp_path, "-p", "hi", "--base-url", "http://127.0.0.1:9", "--model", "m")
        assert ran.code == 4
        assert "127.0.0.1:9" in ran.err
        assert (await chat(tmp_path, "-p", "hi", "--writ", "yes")).code == 2
        assert (await chat(tmp_path, "-p", "hi", "--resume", "x", "--base-url", server.url)).code == 2
        ran = await chat(tmp_path)  # no terminal
        assert ran.code == 2
        assert "-p" in ran.err
        words = ("-p", 'call terminal {"command": "rm -rf x"}', "--base-url", server.url, "--model", "echo")
        assert "blocked" in (await chat(tmp_path, *words)).out
        assert "blocked" not in (await chat(tmp_path, *words, "--yes")).out

    play(scene)


def test_an_interrupt_ends_the_command_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo", "--json")
        ran = await chat(
            tmp_path, "-p", 'call terminal {"command": "echo go; sleep 50"}', *words, interrupt_after=b"tool_output"
        )
        assert ran.code == 130
        assert ran.events[-1]["outcome"] == "interrupted"
        assert (await chat(tmp_path, "-c", "-p", "say on", *words)).events[-1]["text"] == "on"

    play(scene)


def test_the_prompt_appears_before_anything_heavy_is_imported() -> None:
    heavy = "('pydantic', 'aiohttp', 'msgspec')"
    module = "palaestra_chat.terminal.chat_terminal"
    script = f"import {module}, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("broken", [{"command": "false"}, {"command": "/no/such"}, {"url": "http://127.0.0.1:9/mcp"}])
def test_an_mcp_server_that_does_not_start_costs_its_tools(tmp_path: Path, broken: dict[str, str]) -> None:
    async def scene(server: EchoChatServer) -> None:
        for more, code in (({}, 0), ({"required": True}, 2)):
            (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"boats": {**broken, **more}}}))
            ran = await chat(tmp_path, "-p", "hello", "--base-url", server.url, "--model", "echo", "--mcp", "mcp.json")
            assert (ran.code, "hello" in ran.out) == (code, code == 0)
            assert "MCP server 'boats'" in ran.err

    play(scene)


def test_mcp_servers_of_the_settings_are_tools(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    servers = {"mcpServers": {"boats": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))

    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo", "--mcp", "mcp.json", "--json")
        for yes, said in (((), "did not allow this call"), (("--yes",), "8")):
            ran = await chat(tmp_path, "-p", 'call mcp_boats_knots {"speed": 4}', *words, *yes)
            assert ran.code == 0
            results = [event["text"] for event in ran.events if event["type"] == "tool_result"]
            assert said in results[0]
            notices = [event["text"] for event in ran.events if event.get("kind") == "approval"]
            assert bool(notices) != bool(yes)
            assert all("'knots' of the MCP" in each and '"speed": 4' in each for each in notices)

    play(scene)


def test_the_time_limit_of_the_settings_ends_a_command(tmp_path: Path) -> None:
    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo", "--json", "--env.terminal_timeout", "1")
        ran = await chat(tmp_path, "-p", 'call terminal {"command": "sleep 60; echo no"}', *words)
        (result,) = (json.loads(event["text"]) for event in ran.events if event["type"] == "tool_result")
        assert (result["exit_code"], "no" in result["output"]) == (124, False)

    play(scene)


def test_a_tool_server_that_ends_during_a_call_does_not_end_the_turn(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER.replace("return", "__import__('os')._exit(1)\n    return"))
    servers = {"mcpServers": {"boats": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))

    async def scene(server: EchoChatServer) -> None:
        words = ("--base-url", server.url, "--model", "echo", "--mcp", "mcp.json", "--json", "--yes")
        ran = await chat(tmp_path, "-p", 'call mcp_boats_knots {"speed": 4}', *words)
        assert (ran.code, ran.events[-1]["outcome"]) == (0, "natural")
        check_message(next(e["text"] for e in ran.events if e["type"] == "tool_result"))

    play(scene)


@pytest.mark.parametrize("door", ["chat", "acp"])
def test_no_variable_of_the_folder_reaches_a_conversation(tmp_path: Path, door: str) -> None:
    """A clone's `.env` starts no server, changes no isolation, and gets no key. It is not even read."""
    touch = json.dumps({"x": {"command": "touch", "args": [str(tmp_path / "started")]}})

    async def scene(server: EchoChatServer) -> None:
        async with EchoChatServer() as theirs:
            folder = tmp_path / "clone"
            folder.mkdir()
            (folder / ".env").write_text(
                f"PALAESTRA_ENV_MCP_SERVERS='{touch}'\nPALAESTRA_ENV_ISOLATION=none\n"
                f"OPENAI_BASE_URL={theirs.url}\nATROPOS_SERVER_BASE_URL={theirs.url}\nATROPOS_SERVER_API_KEY=k\n"
                "no line of such a file\n"
            )
            mine = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-mine", "ATROPOS_SERVER_MODEL": "echo"}
            words = ["chat", "-p", 'call terminal {"command": "id"}', "--json"] if door == "chat" else ["acp"]
            process = await asyncio.create_subprocess_exec(
                "palaestra", *words, cwd=folder, env={**environment(tmp_path), **mine},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            out, err = await process.communicate(b"")
            assert process.returncode == 0, err.decode()
            assert ".env" not in err.decode()
            if door == "chat":
                assert b"uid=0(root)" in out  # of a slot, in which there is no such file:
                assert "isolation" not in err.decode()
                assert server.asked
            assert not theirs.asked
            assert not (tmp_path / "started").exists()

    play(scene)


@pytest.mark.parametrize("words", [("half of it",), ("half", " of", " it"), ("<think>half</think>",)])
async def test_text_of_a_connection_that_broke_is_not_part_of_the_answer(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    asked = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for word in words if asked == 1 else ("all", " of it"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if asked == 1:
            assert request.transport is not None
            request.transport.abort()
            return reply
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with listening(app, "127.0.0.1", 0, shutdown_s=0.1) as url:
        ran = await chat(tmp_path, "-p", "hello", "--base-url", f"{url}/v1", "--model", "m")
    assert (ran.code, ran.out, asked) == (0, "all of it\n", 2), ran.err
