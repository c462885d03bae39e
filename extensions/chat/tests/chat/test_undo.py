"""Undo, rewind and fork restore the files of the time: those of the sandbox and those written to the shared folder."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra_chat.conversation import Conversation
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import TurnEnded
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.echo_chat_server import EchoChatServer

pytestmark = pytest.mark.slots

SEQUENCES, STEPS, AT_ONCE = int(os.environ.get("UNDO_SEQUENCES", "30")), 7, 8
"""The suite plays 30 sequences; 100 take about three times as long."""
Files = dict[str, str]


def played(turns: list[tuple[str, str]], start: Files) -> Files:
    """Replay turns from the start on a dictionary of files. A text of None deletes the file."""
    files = dict(start)
    for path, text in turns:
        if text == "deleted":
            files.pop(path, None)
        else:
            files[path] = text + "\n"
    return files


def message(turn: tuple[str, str]) -> str:
    path, text = turn
    command = f"rm -f {path}" if text == "deleted" else f"mkdir -p $(dirname {path}); echo {text} > {path}"
    return f"call terminal {json.dumps({'command': command})}"


async def take_turn(talk: Conversation, turn: tuple[str, str]) -> None:
    events = [event async for event in talk.send(message(turn))]
    assert isinstance(events[-1], TurnEnded)
    assert events[-1].outcome == "natural", events[-1].error


async def in_sandbox(talk: Conversation) -> Files:
    slot = await talk.seat.sandbox()
    done = await slot.execute("find . -type f ! -path './.palaestra-*' -exec grep -H '' {} +", cwd="/workspace")
    lines = (line.split(":", 1) for line in done.output.splitlines())
    return {path.removeprefix("./"): text + "\n" for path, text in lines}


def on_disk(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def one_sequence(chat: ChatService, seed: int) -> None:
    """Random turns, undos, rewinds and forks; afterwards each conversation has the files of its own turns."""
    rng = random.Random(seed)
    talks: list[tuple[Conversation, list[tuple[str, str]]]] = [(Conversation.begin(chat), [])]
    numbers = 0
    for _ in range(STEPS):
        talk, turns = rng.choice(talks)
        stored = [each.number for each in talk.history.turns() if each.kind == "message"]
        what = rng.choices(("turn", "undo", "rewind", "fork"), (6, 2, 1, 1))[0] if turns else "turn"
        if what == "turn":
            numbers += 1
            text = "deleted" if rng.random() < 0.2 else f"text{numbers}"
            turns.append((rng.choice(("a", "b", "d/c", "d/e")), text))
            await take_turn(talk, turns[-1])
        elif what == "undo":
            turns.pop()
            await talk.undo()
        elif what == "rewind":
            place = rng.randrange(len(turns))
            del turns[place:]
            await talk.rewind(before=stored[place])
        else:
            place = rng.randrange(len(turns))
            talks.append((await talk.fork(stored[place]), turns[: place + 1]))
    for talk, turns in talks:
        assert await in_sandbox(talk) == played(turns, {}), (seed, turns)
        assert len(talk.history.turns()) == len(turns)
        await talk.close()


def run(folder: Path, settings: dict[str, JSON], scene: Callable[[ChatService], Awaitable[None]]) -> None:
    async def go() -> None:
        with ConversationStore(folder / "c.sqlite") as store:
            async with asyncio.timeout(240), EchoChatServer() as server:
                config = APIServerConfig(base_url=server.url, model_name="echo", timeout=60)
                chosen = ChatSettings(toolsets=("terminal",), checkpoints=100, **settings)
                async with ChatService(config, store, chosen) as chat:
                    await scene(chat)

    asyncio.run(go())


def test_files_equal_a_replay_after_random_undos_and_forks(tmp_path: Path) -> None:
    async def scene(chat: ChatService) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def limited(seed: int) -> None:
            async with places:
                await one_sequence(chat, seed)

        async with asyncio.TaskGroup() as group:
            for seed in range(SEQUENCES):
                group.create_task(limited(seed))

    run(tmp_path, {}, scene)


def test_what_was_written_to_the_shared_folder_is_taken_back(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_text("old\n")
    (work / "a").chmod(0o755)
    before = on_disk(work)

    async def scene(chat: ChatService) -> None:
        talk = Conversation.begin(chat)
        folder = talk.slots.folder
        assert folder is not None
        for turn in (("a", "one"), ("d/e/b", "two"), ("a", "three"), ("c", "four")):
            await take_turn(talk, turn)
            slot = talk.seat.slot
            assert slot is not None
            assert folder.apply(await folder.changes(slot)) == []
        other = await talk.fork(3)
        assert await in_sandbox(other) == {"a": "three\n", "d/e/b": "two\n"}

        (work / "c").write_text("mine\n")
        undone = await talk.rewind(before=4)
        assert [change.path for change in undone.left] == ["c"]
        check_message([change.problem for change in undone.left])
        assert on_disk(work) == {"a": "three\n", "d/e/b": "two\n", "c": "mine\n"}
        (work / "c").unlink()
        undone = await talk.rewind(before=1)
        assert (undone.turns, undone.left) == (3, [])
        assert "3 changes in" in undone.files
        assert on_disk(work) == before
        assert (work / "a").stat().st_mode & 0o777 == 0o755
        assert not (work / "d").exists()
        assert await in_sandbox(talk) == before

    run(tmp_path, {"workdir": work}, scene)


def test_going_back_does_not_take_back_what_the_person_changed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "mine").write_text("old\n")

    async def scene(chat: ChatService) -> None:
        talk = Conversation.begin(chat)
        await take_turn(talk, ("a", "one"))
        await take_turn(talk, ("b", "two"))
        (work / "mine").write_text("person\n")
        (work / "added").write_text("person\n")
        await take_turn(talk, ("c", "three"))
        assert "mine" in talk.history.messages[-4]["content"]  # the model has been told
        assert (await in_sandbox(talk))["mine"] == "person\n"
        fork = await talk.fork(1)
        await talk.rewind(before=2)
        for each in (talk, fork):
            folder, slot = each.slots.folder, each.seat.slot
            assert folder is not None
            assert slot is not None
            assert {change.path for change in await folder.changes(slot)} == {"a"}
            await take_turn(each, ("d", "four"))
            person = {"mine": "person\n", "added": "person\n"}
            assert await in_sandbox(each) == {"a": "one\n", "d": "four\n", **person}
        assert on_disk(work) == person

    run(tmp_path, {"workdir": work}, scene)


def test_files_that_cannot_be_restored_are_reported(tmp_path: Path) -> None:
    async def scene(chat: ChatService) -> None:
        talk = Conversation.begin(chat)
        await take_turn(talk, ("a", "one"))
        await talk.close()
        again = Conversation.open(chat, talk.id)
        check_message((await again.rewind(before=1)).files)
        await take_turn(again, ("a", "two"))
        await again.checkpoints.clear()
        undone = await again.rewind(before=again.history.turns()[-1].number)
        check_message(undone.files)
        assert await in_sandbox(again) == {"a": "two\n"}

    run(tmp_path, {}, scene)
