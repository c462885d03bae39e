"""Stored conversations as exports: consent, redaction, tokens; and the same transcript through chat, batch and RL."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import palaestra
from palaestra import Task, environment
from palaestra.rollouts.export.exporter import ExportMeta
from palaestra.rollouts.export.formats import exporter_named
from palaestra_chat.conversation import Conversation
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.stored_groups import NO_CONSENT, SECRET, UNREAD, session_groups
from palaestra_chat.turn_events import TurnEnded
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import SGLangEngine
from palaestra_tokens.ledger import LedgerRecord, record_rows
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.echo_chat_server import EchoChatServer
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer

SETTINGS = ChatSettings(toolsets=("terminal",), system_prompt=None)
KEY = "sk-" + "abcdefgh" * 3
CALL = f"call terminal {json.dumps({'command': 'echo hi; exit 3'})}"
TRANSCRIPT = f"{CALL}\ncall terminal {{}}\ncall terminal {json.dumps({'command': 'pwd'})}\nsay all done"


async def talk(service: ChatService, *texts: str, user: str = "") -> Conversation:
    conversation = Conversation.begin(service, user=user)
    for text in texts:
        events = [event async for event in conversation.send(text)]
        assert isinstance(events[-1], TurnEnded)
        assert events[-1].outcome == "natural"
    return conversation


async def test_only_consented_conversations_are_exported_and_without_secrets(tmp_path: Path) -> None:
    with ConversationStore(tmp_path / "c.sqlite") as store:
        async with EchoChatServer() as server:
            config = APIServerConfig(base_url=server.url, model_name="echo")
            async with ChatService(config, store, SETTINGS) as service:
                await talk(service, f"say my key is {KEY}", CALL, user="a")
                await talk(service, "say no", user="b")
        left_out: Counter[str] = Counter()
        assert not list(session_groups(store, [], left_out, tokens=False))
        assert left_out == {NO_CONSENT: 2}
        store.users.set_consent("a", True)
        out = io.BytesIO()
        groups = session_groups(store, [], left_out, tokens=False)
        report = exporter_named("openai").export(groups, out, ExportMeta(everything=True))
        assert report.records == 1
        assert KEY.encode() not in out.getvalue()
        row = json.loads(out.getvalue())
        assert [message["role"] for message in row["messages"]] == [
            "user", "assistant", "user", "assistant", "tool", "assistant"]  # fmt: skip
        assert {tool["function"]["name"] for tool in json.loads(row["tools"])} == {"terminal", "process"}


@pytest.mark.slow
async def test_one_transcript_is_the_same_through_chat_batch_and_rl(tmp_path: Path) -> None:
    @environment(toolsets=["terminal"])
    def one():  # type: ignore[no-untyped-def]
        yield Task(id="one", prompt=TRANSCRIPT)

    @one.score
    async def score() -> float:
        return 1.0

    async with EchoChatServer() as server:
        config = APIServerConfig(base_url=server.url, model_name="echo")
        with ConversationStore(tmp_path / "c.sqlite") as store:
            async with ChatService(config, store, SETTINGS) as service:
                chat = (await talk(service, TRANSCRIPT)).history.messages
        rl = await palaestra.run(one(), server=config, group_size=1, folder=tmp_path / "runs")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": TRANSCRIPT}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "palaestra", "batch", prompts, "--base-url", server.url, "--model", "echo"),
            *("--toolsets", "terminal", "--run-name", "b"), cwd=tmp_path,
        )  # fmt: skip
        assert await process.wait() == 0
        batch = palaestra.open_run(tmp_path / "data" / "b")
        asked = [each["tools"] for each in server.asked]
        assert all(tools == asked[0] for tools in asked)  # the model saw the same tools, too
        rl, batch = rl.trajectories[0].messages, batch.trajectories[0].messages
    assert len(chat) == 8
    assert chat == rl == batch


def test_one_transcript_has_the_same_tokens_through_chat_and_rl(tmp_path: Path) -> None:
    @environment(toolsets=["terminal"])
    def one():  # type: ignore[no-untyped-def]
        yield Task(id="one", prompt="go")

    @one.score
    async def score() -> float:
        return 1.0

    call = f'<tool_call>\n{{"name": "terminal", "arguments": {json.dumps({"command": "echo hi"})}}}\n</tool_call>'
    tokenizer = toy_tokenizer([call, "done"])

    async def ledger(door: str) -> tuple[list[Message], LedgerRecord | None, JSON]:
        async with TokenLoopback(ToyEngine(tokenizer, iter([call, "done"])), tokenizer, kind="sglang") as server:
            config = APIServerConfig(base_url=server.url, model_name="toy", server_type="sglang")
            engine = SGLangEngine(config, tokenizer=tokenizer)
            if door == "rl":
                run = await palaestra.run(one(), server=engine, group_size=1, folder=tmp_path / "runs")
                [trajectory] = run.trajectories
                return trajectory.messages, trajectory.ledger, None
            with ConversationStore(tmp_path / "c.sqlite") as store:
                store.users.set_consent("", True)
                async with ChatService(engine, store, SETTINGS) as service:
                    messages = (await talk(service, "go")).history.messages
                [group] = session_groups(store, [], Counter(), tokens=True)
                return messages, group.trajectories[0].ledger, group.tools

    chat, chat_ledger, _ = asyncio.run(ledger("chat"))
    rl, rl_ledger, _ = asyncio.run(ledger("rl"))
    assert chat == rl
    assert chat_ledger is not None
    assert rl_ledger is not None
    [left], [right] = record_rows(chat_ledger), record_rows(rl_ledger)
    assert (left.tokens, left.masks, left.logprobs) == (right.tokens, right.masks, right.logprobs)


async def test_tokens_of_a_conversation_with_a_secret_stay_out(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(["fine"])

    with ConversationStore(tmp_path / "c.sqlite") as store:
        async with TokenLoopback(ToyEngine(tokenizer, iter(["fine"] * 4)), tokenizer, kind="sglang") as server:
            config = APIServerConfig(base_url=server.url, model_name="toy", server_type="sglang")
            async with ChatService(SGLangEngine(config, tokenizer=tokenizer), store, replace(SETTINGS)) as service:
                await talk(service, f"my key is {KEY}")
                taken_back = await talk(service, f"my key is {KEY}")
                await taken_back.undo()
                assert [event async for event in taken_back.send("hello")]
                await talk(service, "nothing secret")
        store.users.set_consent("", True)
        left_out: Counter[str] = Counter()
        groups = list(session_groups(store, [], left_out, tokens=True))
        assert left_out[SECRET] == 2
        assert ["nothing secret" in str(group.trajectories[0].messages) for group in groups] == [True]


async def test_tokens_that_only_a_sub_agent_saw_stay_out(tmp_path: Path) -> None:
    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    show = f"printf sk-; for i in 1 2 3; do printf {KEY[3:11]}; done"
    replies = [call("delegate_task", goal="look"), call("terminal", command=show), "seen", "fine"]
    tokenizer = toy_tokenizer(replies)
    engine = ToyEngine(tokenizer, iter(replies))

    with ConversationStore(tmp_path / "c.sqlite") as store:
        async with TokenLoopback(engine, tokenizer, kind="sglang") as server:
            config = APIServerConfig(base_url=server.url, model_name="toy", server_type="sglang")
            settings = ChatSettings(toolsets=("terminal", "delegation"), system_prompt=None)
            async with ChatService(SGLangEngine(config, tokenizer=tokenizer), store, settings) as service:
                await talk(service, "go")
        store.users.set_consent("", True)
        [(*_, raw)] = store.ledgers.of(store.conversations()[0].id)
        rows = record_rows(msgspec.msgpack.decode(raw, type=LedgerRecord))
        assert any(KEY in tokenizer.decode(row.tokens) for row in rows)
        left_out: Counter[str] = Counter()
        for group in session_groups(store, [], left_out, tokens=True):
            for trajectory in group.trajectories:
                assert not any(KEY in tokenizer.decode(row.tokens) for row in trajectory.rows)
        assert left_out[UNREAD] == 1
