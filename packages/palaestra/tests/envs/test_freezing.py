"""Slots that stand still while the model thinks: what was left running goes on with the next call, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import Recording
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.engines.scripted import ScriptedEngine

pytestmark = pytest.mark.slots

BEATS = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["terminal"])
def beats():
    yield Task(id="one", prompt="Beat.", solution=[
        ToolStep("terminal", {"command": "while :; do echo >> beat; sleep 0.05; done", "background": True}),
        "until test -s beat; do sleep 0.01; done; wc -l < beat > beats",
        "wc -l < beat >> beats; n=$(wc -l < beat); until [ $(wc -l < beat) != $n ]; do sleep 0.01; done",
        "echo on >> beats",
    ])

@beats.score
async def stood_still(task, sandbox):
    before, after, on = (await sandbox.read_text("beats")).split()
    return 1.0 if on == "on" else 0.0, {"beats": float(after) - float(before)}
"""


@pytest.mark.parametrize("freeze", ["true", "false"])
def test_a_run_whose_slots_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freeze: str) -> None:
    """The model takes a second for each reply, in which what beats twenty times a second stands still, or does not."""
    monkeypatch.chdir(tmp_path)
    Path("beats_env.py").write_text(BEATS)
    session = ScriptedEngine.session

    class Slow:
        def __init__(self, server: ChatServer) -> None:
            self.server = server

        async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
            await asyncio.sleep(1)
            return await self.server.chat_completion(messages=messages, **request)

    monkeypatch.setattr(ScriptedEngine, "session", lambda self, context: Slow(session(self, context)))
    command = ["run", "beats_env.py", "--policy", "oracle", "--group", "1", "--env.freeze_slots", freeze]
    assert main(command) == 0
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    ((rollout,),) = [group.trajectories for group in Recording(journal)]
    assert rollout.reward == 1.0, rollout.error
    assert (rollout.metrics["beats"] < 6) == (freeze == "true")
