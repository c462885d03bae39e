"""Conversations on a real loop, with real slots and a streaming server on the loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from aiohttp import web

from golden_messages import check_message, raises
from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
from palaestra_chat.conversation import NEW_SANDBOX, Conversation, People
from palaestra_chat.conversation_files import COPIED_SANDBOX
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn import STOPPED
from palaestra_chat.turn_events import Event, Notice, TextDelta, ToolBegun, ToolEnded, ToolOutput, TurnEnded
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import SGLangEngine, TokenServer, VLLMEngine
from palaestra_tokens.ledger import LedgerRecord, record_rows
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.echo_chat_server import EchoChatServer
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer

SETTINGS = ChatSettings(toolsets=("terminal", "file", "session_search", "clarify"))


@asynccontextmanager
async def service(
    folder: Path, server: EchoChatServer, settings: ChatSettings = SETTINGS
) -> AsyncIterator[ChatService]:
    config = APIServerConfig(base_url=server.url, model_name="echo", timeout=20)
    with ConversationStore(folder / "c.sqlite") as store:
        async with ChatService(config, store, settings) as opened:
            yield opened


def play(folder: Path, scene: Callable[[ChatService, EchoChatServer], Coroutine[None, None, None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(60), EchoChatServer() as server, service(folder, server) as opened:
            await scene(opened, server)

    asyncio.run(go())


async def said(conversation: Conversation, text: JSON, **options: str) -> list[Event]:
    return [event async for event in conversation.send(text, **options)]


def ended(events: list[Event]) -> TurnEnded:
    assert isinstance(events[-1], TurnEnded)
    return events[-1]


def terminal(command: str, **more: JSON) -> str:
    return f"terminal {json.dumps({'command': command, **more})}"


def test_a_turn_streams_text_and_stores_it(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        events = await said(conversation, "say one two three")
        assert [event.text for event in events if isinstance(event, TextDelta)] == ["one", " two", " three"]
        end = ended(events)
        assert (end.outcome, end.text, end.turn, end.model_calls) == ("natural", "one two three", 1, 1)
        assert end.prompt_tokens > 0
        assert chat.store.history(conversation.id) == conversation.history.messages
        assert [message["role"] for message in conversation.history.messages] == ["system", "user", "assistant"]

    play(tmp_path, scene)


def test_a_tool_call_has_events_and_a_journal(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        events = await said(conversation, f"call {terminal('echo hello; echo more')}")
        begun = next(event for event in events if isinstance(event, ToolBegun))
        assert (begun.name, begun.preview) == ("terminal", "echo hello; echo more")
        assert "".join(event.text for event in events if isinstance(event, ToolOutput)) == "hello\nmore\n"
        result = next(event for event in events if isinstance(event, ToolEnded))
        assert json.loads(result.text)["output"] == "hello\nmore\n"
        assert "hello" in ended(events).text
        [turn] = conversation.history.turns()
        [effect] = chat.store.effects.of(turn)
        assert (effect.state, effect.name, effect.result) == ("ended", "terminal", result.text)

    play(tmp_path, scene)


def test_a_refused_call_is_shown_and_the_next_one_runs(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        events = await said(conversation, f"both nothing {{}} ;; {terminal('echo ran')}")
        results = {event.name: event for event in events if isinstance(event, ToolEnded)}
        assert "nothing" in results["nothing"].error
        assert not results["terminal"].error
        assert len([m for m in conversation.history.messages if m["role"] == "tool"]) == 2

    play(tmp_path, scene)


def test_a_known_message_is_answered_once(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        first = await said(conversation, "say this", message_id="m1")
        again = await said(conversation, "say this", message_id="m1")
        assert ended(again) == replace_end(ended(first), replayed=True)
        assert len(server.asked) == 1
        assert len(conversation.history.turns()) == 1

    play(tmp_path, scene)


def replace_end(end: TurnEnded, **changes: JSON) -> TurnEnded:
    return TurnEnded(**{name: changes.get(name, getattr(end, name)) for name in end.__struct_fields__})


def test_interrupting_the_model_keeps_what_it_said(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        server.gate = asyncio.Event()
        conversation = Conversation.begin(chat)
        events: list[Event] = []
        async for event in conversation.send("say never more"):
            events.append(event)
            if isinstance(event, TextDelta):
                assert conversation.interrupt()
        assert (ended(events).outcome, ended(events).text) == ("interrupted", "never")
        server.gate.set()
        assert conversation.history.messages[-1]["role"] == "assistant"
        assert ended(await said(conversation, "say still here")).text == "still here"

    play(tmp_path, scene)


def test_interrupting_a_command_stops_it(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        events: list[Event] = []
        async for event in conversation.send(f"both {terminal('echo go; sleep 60')} ;; {terminal('echo other')}"):
            events.append(event)
            if isinstance(event, ToolOutput):
                conversation.interrupt()
        assert ended(events).outcome == "interrupted"
        roles = [message["role"] for message in conversation.history.messages]
        assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
        assert STOPPED in conversation.history.messages[3]["content"]
        assert "Not run" in conversation.history.messages[4]["content"]
        assert chat.store.history(conversation.id) == conversation.history.messages
        [effect] = chat.store.effects.of(conversation.history.turns()[0])
        assert effect.state == "interrupted"
        again = await said(conversation, f"call {terminal('pgrep -f [s]leep; echo end')}")
        assert json.loads(ended(again).text)["output"] == "end\n"

    play(tmp_path, scene)


def test_leaving_the_iterator_interrupts(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        events = conversation.send(f"call {terminal('sleep 60')}")
        assert isinstance(await anext(events), ToolBegun)
        await events.aclose()
        assert not conversation.busy
        assert conversation.history.turns()[0].outcome == "interrupted"

    play(tmp_path, scene)


def test_approvals_once_session_always_and_no(tmp_path: Path) -> None:
    answers = [ApprovalAnswer.DENY, ApprovalAnswer.ONCE, ApprovalAnswer.ALWAYS]
    asked: list[str] = []

    async def approve(request: ApprovalRequest) -> ApprovalAnswer:
        asked.append(request.command)
        return answers[len(asked) - 1]

    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat, People(approve=approve))
        await said(conversation, f"call {terminal('mkdir -p x; touch x/y')}")
        refused = ended(await said(conversation, f"call {terminal('rm -rf x')}"))
        assert json.loads(refused.text)["status"] == "blocked"
        assert "y" in ended(await said(conversation, f"call {terminal('ls x')}")).text
        allowed = ended(await said(conversation, f"call {terminal('rm -rf x')}"))
        assert json.loads(allowed.text)["exit_code"] == 0
        for _ in range(2):
            await said(conversation, f"call {terminal('rm -rf z')}")
        assert len(asked) == 3
        await conversation.close()
        await said(Conversation.begin(chat, People(approve=approve)), f"call {terminal('rm -rf z')}")
        assert len(asked) == 3  # `always` holds in other conversations too

    play(tmp_path, scene)


def test_a_background_process_is_reported_to_the_person_and_the_model(tmp_path: Path) -> None:
    notices: asyncio.Queue[Notice] = asyncio.Queue()

    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat, People(notice=notices.put_nowait), key="agent:main:cli")
        await said(conversation, f"call {terminal('sleep 0.3; echo built', background=True)}")
        assert await chat.processes.has_active_for_session("agent:main:cli")
        notice = await notices.get()
        assert notice.kind == "process"
        assert "exit code 0" in notice.text
        assert "built" in notice.text
        await said(conversation, "say ok")
        assert notice.source in server.asked[-1]["messages"][-1]["content"]

    play(tmp_path, scene)


def test_the_person_and_the_model_learn_what_became_of_the_sandbox(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        await said(conversation, f"call {terminal('echo 1 > a')}")
        copy = await conversation.fork()
        assert [(notice.kind, notice.text) for notice in copy.notices.take()] == [("sandbox", COPIED_SANDBOX)]
        assert copy.notices.take() == []
        await said(copy, f"call {terminal('cat a')}")
        asked = server.asked[-2]["messages"][-1]["content"]
        assert COPIED_SANDBOX in asked
        assert NEW_SANDBOX not in asked
        await conversation.close()
        told: list[Notice] = []
        again = Conversation.open(chat, conversation.id, People(notice=told.append))
        events = await said(again, "say hello")
        assert [notice.text for notice in told] == [NEW_SANDBOX]
        assert [event.text for event in events if isinstance(event, Notice)] == [NEW_SANDBOX]
        assert NEW_SANDBOX in server.asked[-1]["messages"][-1]["content"]

    play(tmp_path, scene)


def test_a_model_is_checked_against_the_list_of_the_server(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        with raises(ConfigError, "ecko", "echo"):
            await conversation.use_model("ecko")
        assert await conversation.use_model("echo")
        app = web.Application()  # a server without a list
        async with listening(app, "127.0.0.1", 0) as url, service(tmp_path / "b", server) as other:
            other.server = APIServerConfig(base_url=f"{url}/v1", model_name="m", timeout=5)
            unlisted = Conversation.begin(other)
            assert not await unlisted.use_model("anything")
            assert unlisted.model.name == "anything"

    (tmp_path / "b").mkdir()
    play(tmp_path, scene)


def test_undo_retry_fork_and_compact(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        await said(conversation, f"call {terminal('echo 1 > a; cat a')}")
        await said(conversation, "say second")
        assert await conversation.undo() == "say second"
        assert len(conversation.history.turns()) == 1
        await said(conversation, "say third")
        events = [event async for event in conversation.retry()]
        assert ended(events).text == "third"
        assert [turn.content for turn in conversation.history.turns()] == [
            f"call {terminal('echo 1 > a; cat a')}",
            "say third",
        ]

        other = await conversation.fork(1)
        assert other.history.messages == conversation.history.messages[: len(other.history.messages)]
        assert json.loads(ended(await said(other, f"call {terminal('cat a')}")).text)["output"] == "1\n"
        with pytest.raises(ConfigError):
            await conversation.fork(77)

        summary = await conversation.compact()
        assert [message["role"] for message in conversation.history.messages] == ["system", "user", "assistant"]
        assert summary in conversation.history.messages[1]["content"]
        await said(conversation, "say after")
        assert len(server.asked[-1]["messages"]) == 4
        assert chat.store.history(conversation.id) == conversation.history.messages

    play(tmp_path, scene)


def test_search_finds_earlier_conversations(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        first = Conversation.begin(chat, title="boats")
        await said(first, "say the zeppelin landed in Oslo")
        second = Conversation.begin(chat)
        found = json.loads(ended(await said(second, 'call session_search {"query": "zeppelin"}')).text)
        assert [match["session_id"] for match in found["results"]] == [first.id]
        assert "Oslo" in found["results"][0]["excerpts"][0]["text"]

    play(tmp_path, scene)


def test_a_conversation_is_resumed_with_its_history_by_one_process_at_a_time(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat, title="named")
        await said(conversation, "say first")
        async with service(tmp_path, server) as other:
            with pytest.raises(ConfigError, match="already open"):
                Conversation.open(other, "named")
            await conversation.close()
            resumed = Conversation.open(other, "named")
            assert not resumed.unfinished
            assert ended(await said(resumed, "say second")).turn == 2
            assert len(server.asked[-1]["messages"]) == 4

    play(tmp_path, scene)


def test_a_server_that_fails_ends_the_turn_and_the_next_message_works(tmp_path: Path) -> None:
    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        conversation = Conversation.begin(chat)
        conversation.model.use(APIServerConfig(base_url="http://127.0.0.1:9/v1", timeout=3))
        end = ended(await said(conversation, "say nothing"))
        assert (end.outcome, end.text) == ("api_error", "")
        assert "127.0.0.1:9" in end.error
        assert conversation.history.messages[-1]["role"] == "assistant"
        conversation.model.use(chat.server)  # type: ignore[arg-type]
        assert ended(await said(conversation, "say back")).text == "back"

    play(tmp_path, scene)


async def test_a_limit_of_model_calls_ends_the_turn(tmp_path: Path) -> None:
    async with EchoChatServer() as server, service(tmp_path, server, replace(SETTINGS, max_turns=1)) as chat:
        conversation = Conversation.begin(chat)
        end = ended(await said(conversation, f"call {terminal('echo hi')}"))
        assert end.outcome == "max_turns"
        check_message(end.error, 1)
        assert conversation.history.messages[-1]["role"] == "assistant"
        end = ended(await said(conversation, "say more"))
        assert end.outcome == "natural"


@pytest.mark.parametrize(("kind", "make"), [("sglang", SGLangEngine), ("vllm", VLLMEngine)])
async def test_a_token_exact_server_streams_and_leaves_a_ledger_as_a_rollout_does(
    tmp_path: Path, kind: Literal["sglang", "vllm"], make: type[TokenServer]
) -> None:
    call = f'<tool_call>\n{{"name": "terminal", "arguments": {json.dumps({"command": "echo hi"})}}}\n</tool_call>'
    tokenizer = toy_tokenizer([call])
    engine = ToyEngine(tokenizer, iter([call, "all of it is done <b", "and again"]))
    async with TokenLoopback(engine, tokenizer, kind=kind) as server:
        config = APIServerConfig(base_url=server.url, model_name="toy", server_type=kind)
        with ConversationStore(tmp_path / "c.sqlite") as store:
            async with ChatService(make(config, tokenizer=tokenizer), store, SETTINGS) as chat:
                conversation = Conversation.begin(chat)
                events = await said(conversation, "hello")
                assert any(isinstance(event, ToolEnded) and "hi" in event.text for event in events)
                assert ended(events).text == "all of it is done <b"
                pieces = [event.text for event in events if isinstance(event, TextDelta)]
                assert len(pieces) > 3
                assert "".join(pieces) == "all of it is done <b"  # and nothing of the call
                assert ended(await said(conversation, "once more")).text == "and again"
            [(part, first, last, record)] = store.ledgers.of(conversation.id)
            assert (part, first, last) == (1, 1, 2)
            ledger = msgspec.msgpack.decode(record, type=LedgerRecord)
            [row] = record_rows(ledger)
            sampled = [number for number, mask in zip(row.tokens, row.masks, strict=True) if mask != -100]
            assert tokenizer.decode(sampled).count("<|im_end|>") == len(ledger.turns) == 3


async def test_a_compaction_opens_a_declared_segment(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer([])
    engine = ToyEngine(tokenizer, iter(["one", "two", "the summary", "three"]))
    async with TokenLoopback(engine, tokenizer, kind="sglang") as server:
        config = APIServerConfig(base_url=server.url, model_name="toy", server_type="sglang")
        with ConversationStore(tmp_path / "c.sqlite") as store:
            async with ChatService(SGLangEngine(config, tokenizer=tokenizer), store, SETTINGS) as chat:
                conversation = Conversation.begin(chat)
                await said(conversation, "first")
                await said(conversation, "second")
                assert await conversation.compact() == "the summary"
                assert ended(await said(conversation, "third")).text == "three"
            [(_, first, last, record)] = store.ledgers.of(conversation.id)
            assert (first, last) == (1, 4)
            ledger = msgspec.msgpack.decode(record, type=LedgerRecord)
            assert [segment.reason for segment in ledger.segments][1:] == ["compaction", "compaction"]
            assert len(ledger.turns) == 4


@pytest.mark.parametrize("reached", ["message", "call", "result"])
def test_a_continued_turn_knows_that_its_sandbox_is_new_before_it_goes_on(tmp_path: Path, reached: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages: list[dict[str, JSON]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]

    async def scene(chat: ChatService, server: EchoChatServer) -> None:
        killed = Conversation.begin(chat)
        killed.history.change_settings(sandbox=True)
        turn = killed.history.begin([{"type": "text", "text": "say on"}], None)
        killed.history.messages += messages[: {"message": 0, "call": 1, "result": 2}[reached]]
        killed.history.write(turn)
        await killed.close()

        again = Conversation.open(chat, killed.id)
        assert again.unfinished
        assert ended([event async for event in again.resume()]).outcome == "natural"
        asked = server.asked[-1]["messages"]
        assert NEW_SANDBOX in str(asked[-1]["content"])
        roles = [message["role"] for message in asked]
        assert ("user", "user") not in pairwise(roles)
        assert chat.store.history(killed.id) == again.history.messages
        await said(again, "say more")
        told = [message for message in server.asked[-1]["messages"] if message["role"] != "assistant"]
        assert str(told).count(NEW_SANDBOX) == 1

    play(tmp_path, scene)
