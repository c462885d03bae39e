"""Conversations that fill the model's context window, with a server that enforces one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from itertools import chain, repeat
from pathlib import Path

import pytest
from aiohttp import web

from golden_messages import check_message
from palaestra_chat.conversation import Conversation, People
from palaestra_chat.one_shot import list_conversations
from palaestra_chat.service import ChatService, ChatSettings
from palaestra_chat.store import ConversationStore
from palaestra_chat.turn_events import Event, Notice, TurnEnded
from palaestra_slots.core.errors import ContextExceeded, EngineError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import SGLangEngine, VLLMEngine
from palaestra_tokens.testing import TokenLoopback, ToyEngine, toy_tokenizer
from palaestra_tokens.testing.echo_chat_server import EchoChatServer, reply_to

WINDOW = 3000
COMMAND = "head -c 30000 /dev/zero | tr '\\0' y"
"""Prints ten times as many characters as the window has tokens."""


def summarizing(messages: Sequence[Message]) -> dict[str, JSON]:
    """Summarize if asked to, and answer like the echo server otherwise."""
    last = str(messages[-1].get("content"))
    return {"content": f"SUMMARY {len(messages)}"} if "Summarize this conversation" in last else reply_to(messages)


@asynccontextmanager
async def chat(
    folder: Path, server: EchoChatServer, *, timeout_s: float = 20, **settings: JSON
) -> AsyncIterator[ChatService]:
    options = {"toolsets": (), "system_prompt": "Be brief.", **settings}
    config = APIServerConfig(base_url=server.url, model_name="echo", timeout=timeout_s)
    with ConversationStore(folder / "c.sqlite") as store:
        async with ChatService(config, store, ChatSettings(**options)) as service:
            yield service


async def said(conversation: Conversation, text: str) -> TurnEnded:
    events: list[Event] = [event async for event in conversation.send(text)]
    assert isinstance(events[-1], TurnEnded)
    return events[-1]


def words(number: int, chars: int = 1200) -> str:
    return f"say answer {number}\nabout {number} {'x' * chars}"


def whole(messages: Sequence[Message]) -> bool:
    """Whether every call has a result and every result a call, as servers require."""
    calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    return calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize("known", ["listed", "openai", "vllm", "silent", "setting"])
async def test_a_long_conversation_goes_on_past_the_window(tmp_path: Path, known: str) -> None:
    refuses = known if known in ("openai", "vllm", "silent") else "openai"
    server = EchoChatServer(window=WINDOW, refuses=refuses, lists_window=known == "listed", reply=summarizing)
    settings = {"context_tokens": WINDOW} if known == "setting" else {}
    notices: list[Notice] = []
    async with asyncio.timeout(30), server, chat(tmp_path, server, **settings) as service:
        conversation = Conversation.begin(service, People(notice=notices.append))
        for number in range(20):
            end = await said(conversation, words(number))
            assert (end.outcome, end.text) == ("natural", f"answer {number}")
            assert 0 < end.context_tokens < WINDOW
        if known in ("listed", "setting"):
            assert server.refused == 0
        assert conversation.context.size == (None if known == "silent" else WINDOW)
        assert notices
        assert all(notice.kind == "compaction" for notice in notices)
        assert conversation.history.title.startswith("say answer 0")
        assert "say answer 0" in list_conversations(service.store, as_json=False)
        assert service.store.history(conversation.id) == conversation.history.messages
        stored = [str(message["content"]) for message in service.store.turns.said(conversation.id)]
        assert all(words(number) in stored for number in range(20))
        assert "SUMMARY" in str(conversation.history.messages[1]["content"])


async def test_a_full_conversation_of_an_earlier_version_is_compacted_in_pieces_that_fit(tmp_path: Path) -> None:
    free = EchoChatServer(reply=summarizing)
    async with free, chat(tmp_path, free) as service:
        conversation = Conversation.begin(service)
        for number in range(12):
            await said(conversation, words(number, 3000))
        name = conversation.id
    tight = EchoChatServer(window=WINDOW, reply=summarizing)
    async with tight, chat(tmp_path, tight) as service:
        conversation = Conversation.open(service, name)
        assert await conversation.compact() == "SUMMARY 1"
        assert conversation.context.tokens < 200
        assert (await said(conversation, "say after")).text == "after"
        assert len(tight.asked) > 4


@pytest.mark.slots
@pytest.mark.parametrize("known", [True, False])
async def test_outputs_larger_than_the_window_are_shortened_within_a_turn(tmp_path: Path, known: bool) -> None:
    call = f"call terminal {json.dumps({'command': COMMAND})}"
    made = 0

    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        nonlocal made
        if messages[-1]["role"] == "tool" or messages[-1]["content"] == "go":
            made += 1
            return reply_to([{"role": "user", "content": call if made <= 5 else "say done"}])
        return summarizing(messages)

    server = EchoChatServer(window=WINDOW, lists_window=known, reply=reply)
    notices: list[Notice] = []
    async with server, chat(tmp_path, server, toolsets=("terminal",)) as service:
        conversation = Conversation.begin(service, People(notice=notices.append))
        end = await said(conversation, "go")
        assert (end.outcome, end.text, end.model_calls >= 6) == ("natural", "done", True)
        assert whole(conversation.history.messages)
        assert any("shortened" in notice.text for notice in notices)
        assert service.store.history(conversation.id) == conversation.history.messages
        assert sum("y" * 20_000 in str(each["content"]) for each in service.store.turns.said(conversation.id)) == 5
        name = conversation.id
        await conversation.close()
        again = Conversation.open(service, name)
        assert again.context.tokens == end.context_tokens
        assert (await said(again, "say more")).text == "more"


def endless(messages: Sequence[Message]) -> dict[str, JSON]:
    """Write without an end if asked to."""
    last = str(messages[-1].get("content"))
    return {"content": "and on " * WINDOW} if last.startswith("write") else summarizing(messages)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("known", ["listed", "setting", "unknown"])
async def test_a_reply_that_fills_the_window_is_kept_and_the_next_message_is_answered(
    tmp_path: Path, known: str, before: int
) -> None:
    server = EchoChatServer(window=WINDOW, lists_window=known == "listed", reply=endless)
    settings = {"context_tokens": WINDOW} if known == "setting" else {}
    async with server, chat(tmp_path, server, **settings) as service:
        conversation = Conversation.begin(service)
        for number in range(before):
            await said(conversation, words(number))
        asked = len(server.asked)
        end = await said(conversation, "write a long story")
        assert (end.outcome, end.model_calls, len(server.asked) - asked) == ("length", 1, 1)
        assert end.text.startswith("and on and on")
        assert end.text == conversation.history.messages[-1]["content"]
        assert end.error.startswith(
            "the reply was cut off after" if known == "unknown" else "the reply filled the window of model echo:"
        )
        end = await said(conversation, "say more")
        assert (end.outcome, end.text) == ("natural", "more")
        assert end.context_tokens < WINDOW / 2


class WindowedEngine(ToyEngine):
    window_tokens = 2000


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_reply_of_exact_tokens_that_fills_the_window_is_kept(tmp_path: Path, kind: JSON) -> None:
    tokenizer = toy_tokenizer([])
    engine = WindowedEngine(tokenizer, chain(["on " * 3000], repeat("more")))
    settings = ChatSettings(toolsets=(), system_prompt="Be brief.")
    async with TokenLoopback(engine, tokenizer, kind=kind) as server:
        config = APIServerConfig(base_url=server.url, model_name="toy", server_type=kind)
        make = VLLMEngine if kind == "vllm" else SGLangEngine
        with ConversationStore(tmp_path / "c.sqlite") as store:
            async with ChatService(make(config, tokenizer=tokenizer), store, settings) as service:
                conversation = Conversation.begin(service)
                end = await said(conversation, "write")
                assert (end.outcome, end.text[:6]) == ("length", "on on ")
                check_message(end.error, "toy")
                end = await said(conversation, "again")
                assert (end.outcome, end.text) == ("natural", "more")


async def test_a_limit_of_replies_that_ends_one_is_named_whatever_the_window_has_left(tmp_path: Path) -> None:
    server = EchoChatServer(window=WINDOW, lists_window=True, reply=endless)
    async with server, chat(tmp_path, server, max_tokens=WINDOW - 200) as service:
        conversation = Conversation.begin(service)
        end = await said(conversation, "write")
        assert (end.outcome, end.error) == ("length", f"the reply was cut off at its limit of {WINDOW - 200} tokens")
        assert (await said(conversation, "say more")).text == "more"


@pytest.mark.parametrize("listed", [True, False])
async def test_a_call_that_fills_the_window_is_not_blamed_on_the_message(tmp_path: Path, listed: bool) -> None:
    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        call = f"call nothing {json.dumps({'text': 'x' * (4 * WINDOW - 300)})}"
        return reply_to([{"role": "user", "content": call}]) if messages[-1]["content"] == "go" else reply_to(messages)

    server = EchoChatServer(window=WINDOW, lists_window=listed, reply=reply)
    async with server, chat(tmp_path, server) as service:
        conversation = Conversation.begin(service)
        end = await said(conversation, "go")
        assert end.outcome == "api_error"
        check_message(end.error)
        assert (await said(conversation, "say more")).text == "more"


async def test_a_message_larger_than_the_window_is_refused_with_its_size_and_the_next_one_is_answered(
    tmp_path: Path,
) -> None:
    server = EchoChatServer(window=WINDOW, reply=summarizing)
    async with server, chat(tmp_path, server) as service:
        conversation = Conversation.begin(service)
        await said(conversation, "say first")
        before = list(conversation.history.messages)
        end = await said(conversation, f"say never {'z' * 40_000}")
        assert (end.outcome, end.text) == ("api_error", "")
        check_message(end.error, WINDOW)
        assert isinstance(conversation.failure, ContextExceeded)
        assert str(await conversation.undo()).startswith("say never")
        assert conversation.history.messages == before
        assert (await said(conversation, "say second")).text == "second"
        await said(conversation, f"say never {'z' * 40_000}")
        assert (await said(conversation, "say third")).text == "third"  # also without /undo
        await said(conversation, f"say never {'z' * 40_000}")
        await conversation.compact()
        assert (await said(conversation, "say fourth")).text == "fourth"


async def test_a_system_prompt_larger_than_the_window_is_a_clear_error(tmp_path: Path) -> None:
    server = EchoChatServer(window=WINDOW, reply=summarizing)
    async with server, chat(tmp_path, server, system_prompt="p" * 20_000) as service:
        conversation = Conversation.begin(service)
        for _ in range(2):
            end = await said(conversation, "say hi")
            check_message(end.error)


async def test_undo_restores_the_history_that_a_compaction_summarized(tmp_path: Path) -> None:
    server = EchoChatServer(reply=summarizing)
    async with server, chat(tmp_path, server) as service:
        conversation = Conversation.begin(service)
        for number in range(3):
            await said(conversation, words(number))
        before = list(conversation.history.messages)
        await said(conversation, words(3))
        await conversation.compact()
        assert len(conversation.history.messages) == 3
        assert await conversation.undo() == words(3)
        assert conversation.history.messages == before == service.store.history(conversation.id)


async def test_undo_keeps_a_compaction_of_earlier_turns_only(tmp_path: Path) -> None:
    server = EchoChatServer(window=WINDOW, lists_window=True, reply=summarizing)
    async with server, chat(tmp_path, server) as service:
        conversation = Conversation.begin(service)
        number = 0
        while not any("SUMMARY" in str(message["content"]) for message in conversation.history.messages):
            await said(conversation, words(number))
            number += 1
        assert await conversation.undo() == words(number - 1)
        assert [message["role"] for message in conversation.history.messages] == ["system", "user", "assistant"]
        assert "SUMMARY" in str(conversation.history.messages[1]["content"])
        assert (await said(conversation, "say more")).text == "more"


def test_a_fork_and_a_reopened_conversation_have_the_compacted_history_and_the_first_title(tmp_path: Path) -> None:
    async def main() -> None:
        server = EchoChatServer(window=WINDOW, lists_window=True, reply=summarizing)
        async with server, chat(tmp_path, server) as service:
            conversation = Conversation.begin(service)
            for number in range(8):
                await said(conversation, words(number))
            fork = await conversation.fork()
            assert fork.history.messages == conversation.history.messages == service.store.history(fork.id)
            assert fork.history.title == conversation.history.title
            assert fork.history.title.startswith("say answer 0")
            assert (await said(fork, "say more")).text == "more"
            earlier = await conversation.fork(conversation.history.turns()[-1].number)
            assert earlier.history.messages == conversation.history.messages

    asyncio.run(main())


async def test_a_compaction_that_fails_loses_nothing(tmp_path: Path) -> None:
    broken = False

    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        asked = "Summarize this conversation" in str(messages[-1].get("content"))
        return {"content": ""} if asked and broken else summarizing(messages)

    server = EchoChatServer(reply=reply)
    async with chat(tmp_path, await server.__aenter__(), timeout_s=1) as service:
        conversation = Conversation.begin(service)
        for number in range(3):
            await said(conversation, words(number))
        before = list(conversation.history.messages)
        broken = True
        with pytest.raises(EngineError, match="empty summary"):
            await conversation.compact()
        await server.__aexit__()
        with pytest.raises(EngineError):
            await conversation.compact()
        assert conversation.history.messages == before == service.store.history(conversation.id)
        assert await conversation.undo() == words(2)


async def test_an_overflow_whose_compaction_fails_ends_the_turn_and_keeps_the_history(tmp_path: Path) -> None:
    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        if "Summarize this conversation" in str(messages[-1].get("content")):
            raise web.HTTPBadRequest(text="broken")
        return reply_to(messages)

    server = EchoChatServer(window=WINDOW, reply=reply)
    config = {"context_tokens": None}
    async with server, chat(tmp_path, server, **config) as service:
        conversation = Conversation.begin(service)
        number = 0
        while (end := await said(conversation, words(number))).outcome == "natural":
            number += 1
        assert end.outcome == "api_error"
        history = service.store.history(conversation.id)
        assert all(words(each) in [message["content"] for message in history] for each in range(number + 1))
        assert await conversation.undo() == words(number)
        assert (await said(conversation, "say short")).text == "short"


@pytest.mark.parametrize(
    "empty", [{"content": ""}, {"content": " \n"}, {"content": "", "reasoning_content": "Well."}, "call"]
)
async def test_one_empty_summary_costs_no_history(tmp_path: Path, empty: JSON) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    wrong = {"content": None, "tool_calls": [call]} if empty == "call" else empty
    summaries = 0

    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        nonlocal summaries
        if "Summarize this conversation" not in str(messages[-1].get("content")):
            return reply_to(messages)
        summaries += 1
        return wrong if summaries == 1 else {"content": "SUMMARY"}

    server = EchoChatServer(window=WINDOW, reply=reply)
    async with server, chat(tmp_path, server, context_tokens=WINDOW) as service:
        conversation = Conversation.begin(service)
        for number in range(10):
            assert (await said(conversation, words(number))).outcome == "natural"
        assert summaries > 1
        assert "SUMMARY" in str(conversation.history.messages[1]["content"])


async def test_without_any_summary_the_history_stays_as_long_as_it_fits_and_the_notice_says_what_is_lost(
    tmp_path: Path,
) -> None:
    def reply(messages: Sequence[Message]) -> dict[str, JSON]:
        asked = "Summarize this conversation" in str(messages[-1].get("content"))
        return {"content": ""} if asked else reply_to(messages)

    server, notices = EchoChatServer(window=WINDOW, reply=reply), list[Notice]()
    async with server, chat(tmp_path, server, context_tokens=WINDOW) as service:
        conversation = Conversation.begin(service, People(notice=notices.append))
        number, tokens = 0, 0
        while not notices:
            tokens = conversation.context.tokens
            assert (await said(conversation, words(number))).outcome == "natural"
            number += 1
        assert tokens > 0.8 * WINDOW  # the limit at which a conversation is compacted
        assert "replaced with a summary" not in notices[0].text
        assert "left out" in notices[0].text


@pytest.mark.slots
async def test_a_turn_that_was_compacted_and_then_killed_is_resumed(tmp_path: Path) -> None:
    call = f"call terminal {json.dumps({'command': COMMAND})}"
    (tmp_path / "killed").mkdir()
    server = EchoChatServer(window=WINDOW, lists_window=True, reply=summarizing)
    async with server, chat(tmp_path, server, toolsets=("terminal",)) as service:

        def copied(notice: Notice) -> None:
            """Copy the store as a process that is killed now would leave it."""
            with (
                closing(sqlite3.connect(tmp_path / "c.sqlite")) as now,
                closing(sqlite3.connect(tmp_path / "killed" / "c.sqlite")) as copy,
            ):
                now.backup(copy)

        conversation = Conversation.begin(service, People(notice=copied))
        await said(conversation, "say before")
        end = await said(conversation, f"{call}\n{call}\nsay done")
        assert end.text == "done"
    server = EchoChatServer(window=WINDOW, lists_window=True, reply=summarizing)
    async with server, chat(tmp_path / "killed", server, toolsets=("terminal",)) as service:
        killed = Conversation.open(service, conversation.id)
        assert killed.unfinished
        assert whole(killed.history.messages)
        events = [event async for event in killed.resume()]
        assert isinstance(events[-1], TurnEnded)
        assert events[-1].text == "done"
