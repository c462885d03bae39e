"""A conversation whose process is killed at random moments: no lost, doubled or unordered turn, no repeated effect."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from palaestra_chat.history import UNKNOWN
from palaestra_chat.store import ConversationStore
from palaestra_slots.core.types import Message
from palaestra_tokens.testing.echo_chat_server import EchoChatServer

pytestmark = pytest.mark.slow

KILLS = 20
CHILD = Path(__file__).with_name("killed_child.py")


async def run_child(folder: Path, url: str, kill_after_s: float | None) -> str:
    child = await asyncio.create_subprocess_exec(sys.executable, CHILD, folder, url, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    lines: list[str] = []

    async def read() -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            lines.append(line.decode())

    while (await child.stdout.readline()).strip() != b"ready":
        assert child.returncode is None
    reading = asyncio.create_task(read())
    if kill_after_s is not None:
        await asyncio.sleep(kill_after_s)
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    await child.wait()
    await reading
    return "".join(lines)


def check_well_formed(messages: list[Message]) -> None:
    """Every call has one result, and the history ends with an answer."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        else:
            assert not waiting
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
    assert not waiting
    assert messages[-1]["role"] == "assistant"


async def test_a_conversation_survives_kills(tmp_path: Path) -> None:
    rng = random.Random(24)
    unknown = kills = 0

    async def go() -> None:
        nonlocal unknown, kills
        async with EchoChatServer(delay_s=0.002) as server:
            for number in range(1000):
                if kills >= KILLS:
                    return
                folder = tmp_path / str(number)
                folder.mkdir()
                for _ in range(6):
                    output = await run_child(folder, server.url, rng.uniform(0.0, 0.5))
                    if "done" in output:
                        break
                    kills += 1
                else:
                    output = await run_child(folder, server.url, None)
                assert "done" in output
                unknown += check(folder)

    await go()
    assert unknown  # at least one call was cut off in the middle, or the test has not tested it


def check(folder: Path) -> int:
    """Check what a finished conversation has stored; returns its number of calls with an unknown outcome."""
    with ConversationStore(folder / "c.sqlite") as store:
        [conversation] = store.conversations()
        turns = store.turns.of(conversation.id)
        assert [turn.message_id for turn in turns] == [f"m{number}" for number in range(len(turns))]
        assert [(turn.state, turn.outcome) for turn in turns] == [("done", "natural")] * 6
        assert [turn.answer for turn in turns] == [f"answer {number}" for number in range(6)]
        check_well_formed(store.history(conversation.id))
        effects = [effect for turn in turns for effect in store.effects.of(turn)]
        said = [message for turn in turns for _, message in store.turns.messages_of(turn)]
        done = Counter((folder / "effects").read_text().split())
        assert len(effects) == len({effect.payload["name"] for effect in effects})  # none began twice
        for effect in effects:
            times = done[effect.payload["name"]]
            assert effect.state in ("ended", "unknown")
            assert times == 1 if effect.state == "ended" else times <= 1
        unknown = sum(effect.state == "unknown" for effect in effects)
        assert sum(UNKNOWN in str(message["content"]) for message in said) == unknown
        return unknown
