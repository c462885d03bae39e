"""`palaestra acp` as a process, with the client of the protocol's own package."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import acp
import pytest
from acp import schema

from chat.chat_process import environment
from golden_messages import check_message
from palaestra_chat.acp.acp_agent import _chat_content
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.testing.echo_chat_server import EchoChatServer, reply_to

pytestmark = pytest.mark.slow


class Editor:
    """A client that keeps what it is told, and answers questions for permission with the next of `answers`."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[Any] = []
        self.answers: list[str] = []
        self.told = asyncio.Event()

    def on_connect(self, conn: object) -> None: ...

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)
        self.told.set()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **_: Any
    ) -> schema.RequestPermissionResponse:
        self.questions.append(tool_call)
        answer = self.answers.pop(0)
        assert answer in [option.option_id for option in options]
        outcome = schema.AllowedOutcome(outcome="selected", option_id=answer)
        return schema.RequestPermissionResponse(outcome=outcome)

    def text(self) -> str:
        return "".join(each.content.text for each in self.updates if each.session_update == "agent_message_chunk")


Scene = Callable[[acp.Agent, Editor, EchoChatServer], Coroutine[None, None, None]]


def play(folder: Path, scene: Scene, *more: str, served: EchoChatServer | None = None) -> None:
    async def go() -> None:
        async with asyncio.timeout(90), served or EchoChatServer() as server:
            words = ("acp", "--base-url", server.url, "--model", "echo", *more)
            editor = Editor()
            async with acp.spawn_agent_process(
                editor, "palaestra", *words, env=environment(folder), use_unstable_protocol=True
            ) as (agent, _):
                await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
                await scene(agent, editor, server)

    asyncio.run(go())


def test_an_editor_gets_text_calls_permissions_and_changes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("old\n")

    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        session = (await agent.new_session(cwd=str(work), mcp_servers=[])).session_id
        reply = await agent.prompt(session_id=session, prompt=[acp.text_block("say hello editor")])
        assert reply.stop_reason == "end_turn"
        assert editor.text() == "hello editor"

        editor.updates.clear()
        editor.answers = ["yes"]
        command = json.dumps({"command": "cat a.txt; echo new > a.txt"})
        await agent.prompt(session_id=session, prompt=[acp.text_block(f"call terminal {command}\nsay done")])
        states = [each.status for each in editor.updates if each.session_update.startswith("tool_call")]
        assert (states[0], states[-1]) == ("in_progress", "completed")
        [question] = editor.questions
        assert (question.content[0].old_text, question.content[0].new_text) == ("old\n", "new\n")
        assert (work / "a.txt").read_text() == "new\n"

        editor.answers = ["no", "once"]
        for blocked in (True, False):
            editor.updates.clear()
            command = json.dumps({"command": "rm -rf nothing"})
            await agent.prompt(session_id=session, prompt=[acp.text_block(f"call terminal {command}")])
            assert ("did not allow" in str(editor.updates)) == blocked

    play(tmp_path, scene)


def test_an_editor_gets_modes_a_plan_and_commands(tmp_path: Path) -> None:
    commands = tmp_path / "work/.claude/commands"
    commands.mkdir(parents=True)
    (commands / "tell.md").write_text("---\ndescription: Tell a word\n---\nsay told $ARGUMENTS")

    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        opened = await agent.new_session(cwd=str(tmp_path / "work"), mcp_servers=[])
        session = opened.session_id
        assert [mode.id for mode in opened.modes.available_modes] == ["plan", "ask", "auto"]
        assert opened.modes.current_mode_id == "auto"
        await agent.prompt(session_id=session, prompt=[acp.text_block("/tell twice")])
        assert editor.text() == "told twice"
        offered = [each for each in editor.updates if each.session_update == "available_commands_update"]
        assert ("tell", "Tell a word") in [(each.name, each.description) for each in offered[0].available_commands]

        steps = {"todos": [{"id": "1", "content": "look", "status": "in_progress"}]}
        await agent.prompt(session_id=session, prompt=[acp.text_block(f"call todo {json.dumps(steps)}")])
        [plan] = [each for each in editor.updates if each.session_update == "plan"]
        assert [(entry.content, entry.status) for entry in plan.entries] == [("look", "in_progress")]

        await agent.set_session_mode(mode_id="plan", session_id=session)
        await agent.prompt(
            session_id=session, prompt=[acp.text_block(f"call terminal {json.dumps({'command': 'ls'})}")]
        )
        assert "Plan mode is on" in str(editor.updates)
        with pytest.raises(acp.RequestError):
            await agent.set_session_mode(mode_id="root", session_id=session)

    play(tmp_path, scene)


def test_a_turn_is_cancelled_and_a_session_is_listed_loaded_and_forked(tmp_path: Path) -> None:
    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        await agent.prompt(session_id=session, prompt=[acp.text_block("say first")])
        editor.told.clear()
        command = json.dumps({"command": "echo go; sleep 60"})
        prompt = [acp.text_block(f"call terminal {command}")]
        asked = asyncio.create_task(agent.prompt(session_id=session, prompt=prompt))
        while not any(getattr(each, "status", "") == "in_progress" for each in editor.updates):
            await editor.told.wait()
            editor.told.clear()
        await agent.cancel(session_id=session)
        assert (await asked).stop_reason == "cancelled"

        listed = await agent.list_sessions(cwd=str(tmp_path))
        assert [(each.session_id, each.title) for each in listed.sessions] == [(session, "say first")]
        forked = (await agent.fork_session(session_id=session, cwd=str(tmp_path), mcp_servers=[])).session_id
        assert forked != session
        await agent.close_session(session_id=session)
        editor.updates.clear()
        await agent.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])
        assert editor.updates[1].content.text == "first"
        with pytest.raises(acp.RequestError):
            await agent.prompt(session_id="nothing", prompt=[acp.text_block("hi")])
        with pytest.raises(acp.RequestError) as refused:
            await agent.new_session(cwd=f"{tmp_path}/gone", mcp_servers=[])
        check_message(refused.value.data["details"], f"{tmp_path}/gone")

    play(tmp_path, scene)


def test_an_editor_decides_on_calls_that_change_the_host(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[4] / "packages/palaestra/tests/tools/mcp/host_writer.py")
    settings = tmp_path / "mcp.json"
    settings.write_text(json.dumps({"mcpServers": {"fs": {"command": sys.executable, "args": [script]}}}))
    file = tmp_path / "written"

    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        arguments = {"path": str(file), "content": "new"}
        for answer in ("no", "once"):
            editor.answers = [answer]
            prompt = [acp.text_block(f"call mcp_fs_write {json.dumps(arguments)}")]
            await agent.prompt(session_id=session, prompt=prompt)
            assert file.exists() == (answer == "once")
        question = editor.questions[0]
        assert (question.kind, question.raw_input) == ("other", arguments)
        check_message(question.title, "'write'", "'fs'")
        assert str(file) in question.content[0].content.text

    play(tmp_path, scene, "--mcp", str(settings))


def test_an_editor_chooses_the_model_and_brings_servers_and_the_user_has_hooks(tmp_path: Path) -> None:
    own = tmp_path / "config" / "palaestra"
    own.mkdir(parents=True)
    (own / "chat.yaml").write_text("env: {models: {other: {model_name: other-model}}}\n")
    hook = {"type": "command", "command": "echo no wiping >&2; exit 2"}
    hooks = {"hooks": {"PreToolUse": [{"matcher": "mcp__my_fs__wipe", "hooks": [hook]}]}}
    (own / "hooks.json").write_text(json.dumps(hooks))
    (own / "hooks.json").chmod(0o600)
    script = str(Path(__file__).parents[4] / "packages/palaestra/tests/tools/mcp/host_writer.py")
    file = tmp_path / "written"
    mine = schema.McpServerStdio(name="my fs", command=sys.executable, args=[script], env=[])
    gone = schema.HttpMcpServer(type="http", name="gone", url="http://127.0.0.1:9/mcp", headers=[])

    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        opened = await agent.new_session(cwd=str(tmp_path), mcp_servers=[mine, gone])
        session = opened.session_id
        assert "MCP server 'gone'" in str(editor.updates)
        model, mode = opened.config_options
        assert (model.category, model.current_value) == ("model", "echo")
        assert [option.value for option in model.options] == ["other", "echo"]
        assert (mode.category, mode.current_value) == ("mode", "auto")

        async def said(text: str) -> None:
            await agent.prompt(session_id=session, prompt=[acp.text_block(text)])

        changed = await agent.set_config_option(config_id="model", session_id=session, value="other")
        assert changed.config_options[0].current_value == "other"
        await said("say hello")
        assert server.asked[-1]["model"] == "other-model"
        for option, value in (("model", "nobody"), ("mode", "root"), ("colour", "red")):
            with pytest.raises(acp.RequestError):
                await agent.set_config_option(config_id=option, session_id=session, value=value)
        await agent.set_config_option(config_id="mode", session_id=session, value="ask")
        assert [u.current_mode_id for u in editor.updates if u.session_update == "current_mode_update"] == ["ask"]

        editor.answers = ["no", "once"]
        for written in (False, True):
            await said(f"call mcp_my_fs_write {json.dumps({'path': str(file), 'content': 'new'})}")
            assert file.exists() == written
        check_message(editor.questions[0].title, "'write'", "'my_fs'")
        await said(f"call mcp_my_fs_wipe {json.dumps({'path': str(file)})}")
        assert "no wiping" in str(editor.updates)
        assert (file.read_text(), editor.answers) == ("new", [])

        old = schema.SseMcpServer(type="sse", name="old", url="http://127.0.0.1:9/sse", headers=[])
        with pytest.raises(acp.RequestError) as refused:
            await agent.new_session(cwd=str(tmp_path), mcp_servers=[old])
        assert "transport sse" in str(refused.value.data)
        image = acp.image_block("aGVsbG8=", "image/png")
        with pytest.raises(acp.RequestError) as refused:
            await agent.prompt(session_id=session, prompt=[image])
        check_message(str(refused.value.data))

    play(tmp_path, scene)


def test_a_full_session_goes_on_and_its_commands_work(tmp_path: Path) -> None:
    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        asked = "Summarize this conversation" in str(messages[-1].get("content"))
        return {"content": "SUMMARY"} if asked else reply_to(messages)

    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id

        async def said(text: str) -> str:
            editor.updates.clear()
            await agent.prompt(session_id=session, prompt=[acp.text_block(text)])
            return editor.text()

        for number in range(8):
            assert await said(f"say answer {number}\n{'x' * 8000}") == f"answer {number}"
        with pytest.raises(acp.RequestError) as refused:
            await said(f"say never {'z' * 100_000}")
        assert "/undo removes the message" in str(refused.value.data)
        check_message(await said("/undo"))
        assert await said("/compact") == "SUMMARY"
        assert await said("say on") == "on"
        listed = await agent.list_sessions(cwd=str(tmp_path))
        assert [each.title.startswith("say answer 0") for each in listed.sessions] == [True]

    play(tmp_path, scene, served=EchoChatServer(window=10_000, reply=reply))


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("my%20file%20%C3%BC.txt", "my file ü.txt"),
        ("src/a.py#L10:20", "src/a.py#L10:20"),
        ("src", "src"),
        ("../other%23.txt", "{parent}/other#.txt (not in the sandbox)"),
    ],
)
def test_files_that_an_editor_mentions_have_the_paths_of_the_sandbox(tmp_path: Path, address: str, path: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    place = f"{tmp_path}/{address[3:]}" if address.startswith("../") else f"{work}/{address}"
    said = _chat_content([schema.ResourceContentBlock(type="resource_link", name="it", uri=f"file://{place}")], work)
    assert said == f"[it]({path.format(parent=tmp_path)})"
    text = schema.TextResourceContents(uri=f"file://{place}", text="x")
    said = _chat_content([schema.EmbeddedResourceContentBlock(type="resource", resource=text)], work)
    assert said == f'<file name="{path.format(parent=tmp_path)}">\nx\n</file>'


def test_other_addresses_stay_as_they_are() -> None:
    for folder in (None, Path("/tmp")):
        said = _chat_content(
            [schema.ResourceContentBlock(type="resource_link", name="it", uri="https://x.org/a%20b")], folder
        )
        assert said == "[it](https://x.org/a%20b)"


def test_a_file_that_is_no_image_is_named_and_refuses_no_message(tmp_path: Path) -> None:
    blob = schema.BlobResourceContents(uri=f"file://{tmp_path}/a.pdf", blob="JVBERi0=", mime_type="application/pdf")
    said = _chat_content([schema.EmbeddedResourceContentBlock(type="resource", resource=blob)], tmp_path)
    assert str(said).startswith("[a.pdf] (application/pdf")


def test_an_editor_learns_that_the_reply_filled_the_window_and_the_next_message_is_answered(tmp_path: Path) -> None:
    async def scene(agent: Any, editor: Editor, server: EchoChatServer) -> None:
        session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        reply = await agent.prompt(session_id=session, prompt=[acp.text_block("say on")])
        assert reply.stop_reason == "max_tokens"
        assert len(editor.text()) > 4000
        thoughts = [each.content.text for each in editor.updates if each.session_update == "agent_thought_chunk"]
        assert "window of model echo" in thoughts[-1]
        assert (await agent.prompt(session_id=session, prompt=[acp.text_block("say more")])).stop_reason == "end_turn"

    def endless(messages: Sequence[Message]) -> dict[str, JSON]:
        return {"content": "on " * 9000} if messages[-1]["content"] == "say on" else reply_to(messages)

    play(tmp_path, scene, "--toolsets", "todo", served=EchoChatServer(window=6000, lists_window=True, reply=endless))


def test_an_editor_that_is_gone_leaves_what_it_was_told_in_its_log(tmp_path: Path) -> None:
    """The editor closes the connection while a session has unwritten changes, and answers nothing more."""
    project = tmp_path / "project"
    project.mkdir()

    async def leave(server: EchoChatServer) -> str:
        process = await asyncio.create_subprocess_exec(
            "palaestra", "acp", "--base-url", server.url, "--model", "echo", env=environment(tmp_path),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        async def call(number: int, method: str, **params: object) -> Any:
            send = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            process.stdin.write(json.dumps(send).encode() + b"\n")
            while line := await process.stdout.readline():
                reply = json.loads(line)
                if reply.get("id") == number and "method" not in reply:
                    return reply["result"]
                if "id" in reply:
                    cancelled = {"jsonrpc": "2.0", "id": reply["id"], "result": {"outcome": {"outcome": "cancelled"}}}
                    process.stdin.write(json.dumps(cancelled).encode() + b"\n")
            return None

        await call(1, "initialize", protocolVersion=1, clientCapabilities={})
        session = (await call(2, "session/new", cwd=str(project), mcpServers=[]))["sessionId"]
        text = 'call write_file {"path": "n.txt", "content": "x"}'
        await call(3, "session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])
        _, log = await process.communicate(b"")
        assert process.returncode == 0
        return log.decode()

    async def go() -> str:
        async with asyncio.timeout(90), EchoChatServer() as server:
            return await leave(server)

    log = asyncio.run(go())
    assert "Traceback" not in log
    assert "unwritten changes" in log
