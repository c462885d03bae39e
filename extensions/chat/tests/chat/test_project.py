"""Instructions, skills, commands and permissions: what a project's folder may say, and what it may not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.tools.builtin.terminal import TERMINAL
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra.tools.runtime.runtime import CheckedCall
from palaestra.tools.tool import ToolRun
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.permissions import Mode, rule_of
from palaestra_chat.project import Project, command_description, command_message
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.echo_chat_server import EchoChatServer


def skill(folder: Path, name: str, text: str = "steps") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: How to {name}\n---\n{text}")


def project(folder: Path) -> Project:
    (folder / "repo/sub/deep").mkdir(parents=True)
    (folder / "own").mkdir()
    (folder / "repo/.git").mkdir()
    return Project(folder / "repo/sub", folder / "own")


def test_instructions_come_from_the_repository_and_the_person(tmp_path: Path) -> None:
    made = project(tmp_path)
    for path, text in (
        ("AGENTS.md", "above the repository"), ("repo/AGENTS.md", "the root's"), ("repo/sub/CLAUDE.md", "the folder's"),
        ("repo/sub/deep/AGENTS.md", "nested"), ("own/AGENTS.md", "my own"),
    ):  # fmt: skip
        (tmp_path / path).write_text(text)
    prompt = str(made.prompt("Be helpful."))
    assert (
        prompt.index("Be helpful.") < prompt.index("my own") < prompt.index("the root's") < prompt.index("the folder's")
    )
    assert "above the repository" not in prompt
    assert "deep/AGENTS.md" in prompt
    assert "nested" not in prompt


async def test_a_project_offers_skills_and_commands_but_no_files_of_others(tmp_path: Path) -> None:
    made = project(tmp_path)
    (tmp_path / "secret").mkdir()
    skill(tmp_path / "secret", "stolen", "a secret")
    skill(tmp_path / "repo/sub/.claude/skills", "build")
    skill(tmp_path / "own/skills", "build", "my steps")
    skill(tmp_path / "own/skills", "review")
    (tmp_path / "repo/sub/.claude/skills/stolen").symlink_to(tmp_path / "secret/stolen")
    (tmp_path / "repo/sub/.agents").mkdir()
    (tmp_path / "repo/sub/.agents/skills").symlink_to(tmp_path / "secret")
    assert sorted(made.skills()) == ["build", "review"]
    assert "- review: How to review" in str(made.prompt(None))
    (tool,) = made.skill_tools()
    read = await tool.run({"name": "build"}, ToolRun())
    assert "my steps" in str(read)

    commands = tmp_path / "repo/sub/.claude/commands"
    commands.mkdir()
    (commands / "fix.md").write_text("---\ndescription: Fix an issue\n---\nFix issue $ARGUMENTS now.")
    (commands / "bad name.md").write_text("x")
    (commands / "out.md").symlink_to(tmp_path / "secret/stolen/SKILL.md")
    assert list(made.commands()) == ["/fix"]
    assert command_description(commands / "fix.md") == "Fix an issue"
    assert command_message(commands / "fix.md", "12") == "Fix issue 12 now."
    with pytest.raises(ConfigError, match="cannot be read"):
        command_message(commands / "gone.md", "")


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("git status", "command git"), ("./run.sh", "command ./run.sh"), ("git status; rm x", "tool terminal"),
        ("git $(rm x)", "tool terminal"), ("git status\nrm x", "tool terminal"), ("git log > x", "tool terminal"),
        ("FOO=1 git x", "tool terminal"),
    ],
)  # fmt: skip
def test_a_rule_covers_a_program_only_if_nothing_else_runs(command: str, rule: str) -> None:
    assert rule_of(CheckedCall(TERMINAL, {"command": command}, ToolRun())) == rule


@pytest.mark.slots
async def test_modes_refuse_and_ask_and_remember_for_one_folder(tmp_path: Path) -> None:
    asked: list[str] = []

    async def approve(request: ApprovalRequest) -> ApprovalAnswer:
        asked.append(request.question)
        return ApprovalAnswer.ALWAYS

    async def run(talk: Conversation, command: str) -> dict[str, JSON]:
        message = f"call terminal {json.dumps({'command': command})}"
        events = [event async for event in talk.send(message)]
        return json.loads(events[-1].text)  # type: ignore[union-attr,no-any-return]

    async def scene() -> None:
        with ConversationStore(tmp_path / "c.sqlite") as store:
            async with asyncio.timeout(60), EchoChatServer() as server:
                config = APIServerConfig(base_url=server.url, model_name="echo")
                for folder, questions in (("a", 2), ("a", 2), ("b", 3)):
                    settings = ChatSettings(toolsets=("terminal", "file"), mode="plan", rules_folder=tmp_path / folder)
                    async with ChatService(config, store, settings) as chat:
                        talk = Conversation.begin(chat, People(approve=approve))
                        assert "Plan mode" in str(await run(talk, "echo x > file"))
                        assert talk.seat.slot is None
                        check_message(server.asked[0]["messages"][-1]["content"], "Plan mode")
                        talk.permissions.switch(Mode.ASK)
                        assert (await run(talk, "echo one"))["exit_code"] == 0
                        if folder == "a":
                            assert (await run(talk, "echo two; true"))["exit_code"] == 0
                        assert "Plan mode is off" in str(server.asked)
                        assert len(asked) == questions
                        talk.permissions.switch(Mode.AUTO)
                        assert (await run(talk, "ls | cat"))["exit_code"] == 0
                        assert len(asked) == questions

    await scene()
    assert all("sandbox" in question for question in asked)
