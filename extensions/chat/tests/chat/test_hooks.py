"""Hooks of the user around the tool calls of a conversation: real commands, a real loop and real slots."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolRun, ToolSchema
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.hooks import Hook, read_hooks
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import ToolEnded, TurnEnded
from palaestra_chat.workdir import CONFIGURES_CHAT, GIVES_KEYS, WorkFolder
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.echo_chat_server import EchoChatServer


@dataclass
class Played:
    """What a person saw, and the arguments with which the tool ran."""

    results: list[ToolEnded] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    ended: TurnEnded | None = None
    ran: list[str] = field(default_factory=list)
    asked: list[ApprovalRequest] = field(default_factory=list)


def hooks_file(folder: Path, before: Sequence[JSON] = (), after: Sequence[JSON] = (), matcher: str = "Bash") -> Path:
    path = folder / "hooks.json"
    groups = {name: [{"matcher": matcher, "hooks": list(hooks)}] for name, hooks in
              (("PreToolUse", before), ("PostToolUse", after))}  # fmt: skip
    path.write_text(json.dumps({"hooks": groups}))
    path.chmod(0o600)
    return path


def command(text: str, **more: JSON) -> dict[str, JSON]:
    return {"type": "command", "command": text, **more}


def reply(**special: JSON) -> str:
    return f"cat > /dev/null; echo '{json.dumps({'hookSpecificOutput': special})}'"


def play(folder: Path, *, calls: int = 1, answer: ApprovalAnswer | None = None, mode: str = "auto") -> Played:
    """Let the model call a tool called terminal, which needs no sandbox, with the hooks of `folder`."""
    played = Played()

    async def run(arguments: dict[str, JSON], run: ToolRun) -> str:
        played.ran.append(arguments["command"])
        return json.dumps({"output": "done", "exit_code": 0})

    schema = ToolSchema("terminal", "Run.", {"command": {"type": "string"}}, ("command",))
    tool = FunctionTool(schema, run)

    async def approve(request: ApprovalRequest) -> ApprovalAnswer:
        played.asked.append(request)
        assert answer is not None
        return answer

    async def go() -> None:
        settings = ChatSettings(build_tools=lambda _: ToolRegistry([tool]), hooks=read_hooks(folder), mode=mode)
        async with asyncio.timeout(30), EchoChatServer() as server:
            config = APIServerConfig(base_url=server.url, model_name="echo", timeout=20)
            with ConversationStore(folder / "c.sqlite") as store:
                async with ChatService(config, store, settings) as service:
                    people = People(approve=approve, notice=lambda notice: played.notices.append(notice.text))
                    conversation = Conversation.begin(service, people)
                    lines = [f"call terminal {json.dumps({'command': f'ls {n}'})}" for n in range(calls)]
                    async for event in conversation.send("\n".join(lines)):
                        if isinstance(event, ToolEnded):
                            played.results.append(event)
                        if isinstance(event, TurnEnded):
                            played.ended = event

    asyncio.run(go())
    assert played.ended is not None
    assert played.ended.outcome == "natural"
    return played


def test_a_hook_gets_the_call_and_refuses_with_a_reason(tmp_path: Path) -> None:
    got = tmp_path / "got.json"
    hooks_file(tmp_path, [command(f"cat > {got}; pwd > {tmp_path}/where; echo not that >&2; exit 2")])
    played = play(tmp_path)
    assert played.ran == []
    check_message(played.results[0].error, "not that")
    event = json.loads(got.read_text())
    assert (event["hook_event_name"], event["tool_name"], event["tool_input"]) == (
        "PreToolUse", "Bash", {"command": "ls 0"},
    )  # fmt: skip
    assert (event["permission_mode"], event["tool_use_id"]) == ("auto", "call_0_0")
    assert (tmp_path / "where").read_text().strip() == str(tmp_path)


def test_a_hook_changes_arguments_and_another_adds_a_note(tmp_path: Path) -> None:
    changed = reply(hookEventName="PreToolUse", updatedInput={"command": "pwd"})
    noted = reply(hookEventName="PostToolUse", additionalContext="format it")
    blocked = """cat > got; echo '{"decision": "block", "reason": "a test fails"}'"""
    hooks_file(tmp_path, [command(changed)], [command(noted), command(blocked)])
    played = play(tmp_path)
    assert played.ran == ["pwd"]
    notes = json.loads(played.results[0].text)["hook_notes"]
    assert notes == ["format it", "a test fails"]
    assert json.loads((tmp_path / "got").read_text())["tool_response"] == {"output": "done", "exit_code": 0}
    assert played.ended is not None
    check_message(played.ended.text, "hook", "pwd")


def test_changed_arguments_are_checked(tmp_path: Path) -> None:
    hooks_file(tmp_path, [command(reply(updatedInput={"cmd": 1}))])
    played = play(tmp_path)
    assert played.ran == []
    check_message(played.results[0].error)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sleep 60 & sleep 60", "did not end within 0.5 s"),
        ("echo oops >&2; exit 1", "failed with exit code 1: oops"),
        ("kill -9 $$", "failed with exit code -9"),
        ("/no/such/program", "failed with exit code 127"),
        ("echo hello", "printed something else than a JSON object"),
        ("""echo '{"decision": "maybe"}'""", "unknown decision: 'maybe'"),
        ("yes", "printed more than 1 MiB"),
    ],
)
def test_a_hook_that_fails_is_reported_and_the_turn_goes_on(tmp_path: Path, text: str, problem: str) -> None:
    hooks_file(tmp_path, [command(text, timeout=0.5 if "sleep" in text else 10)])
    began_s = time.monotonic()
    played = play(tmp_path, calls=2)
    assert time.monotonic() - began_s < 20
    assert played.ran == ["ls 0", "ls 1"]
    [notice] = played.notices
    assert problem in notice
    assert "terminal" in notice


@pytest.mark.parametrize("left", ["sleep 60 &", "sleep 60 2>/dev/null &", "setsid sleep 60 & sleep 0.1;"])
def test_what_a_hook_leaves_in_the_background_does_not_delay_its_answer(tmp_path: Path, left: str) -> None:
    hooks_file(tmp_path, [command(f"{left} echo not that >&2; exit 2", timeout=30)])
    began_s = time.monotonic()
    played = play(tmp_path)
    assert time.monotonic() - began_s < 20
    assert played.ran == []
    assert "not that" in played.results[0].error
    subprocess.run(["pkill", "-f", "^sleep 60$"], check=False)


def test_a_guard_that_fails_refuses_the_call_if_it_is_set_to(tmp_path: Path) -> None:
    hooks_file(tmp_path, [command("exit 1", onFailure="block")])
    played = play(tmp_path)
    assert played.ran == []
    check_message(played.results[0].error)
    assert "terminal" in played.notices[0]


@pytest.mark.parametrize("mode", ["ask", "plan"])
def test_a_hook_allows_what_would_ask_but_not_in_plan_mode(tmp_path: Path, mode: str) -> None:
    hooks_file(tmp_path, [command(reply(permissionDecision="allow"))])
    played = play(tmp_path, mode=mode)
    assert played.ran == (["ls 0"] if mode == "ask" else [])
    assert played.asked == []


@pytest.mark.parametrize("answer", [ApprovalAnswer.ONCE, ApprovalAnswer.DENY])
def test_a_hook_asks_the_person_once(tmp_path: Path, answer: ApprovalAnswer) -> None:
    hooks_file(tmp_path, [command(reply(permissionDecision="ask", permissionDecisionReason="costs money"))])
    played = play(tmp_path, answer=answer, mode="ask")
    [question] = played.asked
    assert "costs money" in question.question
    assert len(played.ran) == (answer is ApprovalAnswer.ONCE)


def test_matchers_name_tools_as_here_and_as_in_claude_code() -> None:
    async def run(arguments: JSON, run: ToolRun) -> str:
        return ""

    def tool(name: str, toolset: str = "file") -> FunctionTool:
        return FunctionTool(ToolSchema(name, "", {}), run, toolset)

    def names(tools: Hook) -> list[str | None]:
        return [tools.name_for(each) for each in (tool("write_file"), tool("mcp_fs_write", "mcp-fs"))]

    assert names(Hook("x")) == ["write_file", "mcp_fs_write"]
    assert names(Hook("x", frozenset({"Write", "Edit"}))) == ["Write", None]
    assert names(Hook("x", frozenset({"write_file"}))) == ["write_file", None]
    assert names(Hook("x", __import__("re").compile("mcp__fs__.*"))) == [None, "mcp__fs__write"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ('{"PreToolUse": []}', "expected"),
        ('{"hooks": {"PreToolUse": [{"hooks": [{"type": "prompt", "prompt": "x"}]}]}}', "type 'prompt'"),
        ('{"hooks": {"PreToolUse": [{"matcher": "(", "hooks": []}]}}', "regular expression"),
        ('{"hooks": {"PreToolUse": [{"hooks": [{"command": "x", "timeout": -1}]}]}}', "timeout"),
        ('{"hooks": {"PreToolUse": [{"hooks": [{"command": "x", "if": "Bash(rm *)"}]}]}}', "`if`"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "hooks.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        read_hooks(tmp_path)


def test_a_file_that_others_can_change_is_refused_and_other_events_are_named(tmp_path: Path) -> None:
    assert not read_hooks(tmp_path).before
    path = tmp_path / "hooks.json"
    path.write_text('{"hooks": {"Stop": [{"hooks": []}]}, "model": "x"}')
    path.chmod(0o600)
    assert read_hooks(tmp_path).ignored == ["Stop"]
    path.chmod(0o666)
    with raises(ConfigError, path):
        read_hooks(tmp_path)


def left_by_the_agent(root: Path, names: Sequence[str], problem: str) -> list[str]:
    """The files that are not written back for this reason, after the agent has written them all."""

    async def go() -> list[str]:
        backend, folder = LocalBackend(), WorkFolder(root)
        try:
            await backend.start()
            slot = await backend.create(spec=SlotSpec(), trajectory_id="t")
            await folder.fill(slot)
            for name in names:
                await slot.write_bytes(f"/workspace/{name}", b"evil")
            left = folder.apply(await folder.changes(slot))
            return [change.path for change in left if change.problem == problem]
        finally:
            await backend.aclose()

    return asyncio.run(go())


@pytest.mark.slots
def test_the_agent_cannot_write_hooks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "home" / ".config" / "palaestra"
    own.mkdir(parents=True)
    dotfiles = tmp_path / "home" / "dotfiles"
    dotfiles.mkdir()
    (dotfiles / "chat.yaml").write_text("env: {}\n")
    (own / "chat.yaml").symlink_to(dotfiles / "chat.yaml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own.parent))
    names = (".config/palaestra/hooks.json", "dotfiles/chat.yaml", "dotfiles/other")
    assert left_by_the_agent(tmp_path / "home", names, CONFIGURES_CHAT) == list(names[:2])
    assert (tmp_path / "home" / "dotfiles" / "other").read_bytes() == b"evil"
    assert not (own / "hooks.json").exists()


@pytest.mark.slots
def test_the_agent_cannot_write_keys_back(tmp_path: Path) -> None:
    """Neither in the folder nor in one below it, nor through a link that the folder has."""
    (tmp_path / "keys").write_text("OPENAI_API_KEY=mine\n")
    (tmp_path / ".env").symlink_to("keys")
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep")
    names = (".ENV", "deep/.env", "deep/a.env", "deep/env", "keys", "new/.env/file")
    assert left_by_the_agent(tmp_path, names, GIVES_KEYS) == [".ENV", "deep/.env", "keys"]
    assert (tmp_path / "keys").read_text() == "OPENAI_API_KEY=mine\n"
    assert (tmp_path / "new/.env/file").read_bytes() == b"evil"
