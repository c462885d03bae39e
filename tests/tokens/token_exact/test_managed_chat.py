"""Token-exact chat over an engine that writes tokens as a model might: nothing is re-encoded, lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_messages import raises
from manual_clock import ManualClock
from palaestra_contract.agent_loop import HermesAgentLoop
from palaestra_slots.core.errors import ConfigError, EngineReplyError, EngineUnavailable
from palaestra_slots.core.types import JSON, Message, Outcome
from palaestra_tokens.engine import ChatCompletion, Sampled
from palaestra_tokens.ledger import verify_ledger
from palaestra_tokens.templates import ChatFormat, ChatTemplate
from palaestra_tokens.testing.fake_engine import CHATML, ToyEngine, toy_logprob, toy_tokenizer
from palaestra_tokens.token_exact.managed_chat import ManagedChat

TOKENIZER = toy_tokenizer(["hello there world, what is in the file? the answer is 42 <tool_call> {} terminal"] * 5)
FORMAT = ChatFormat(TOKENIZER)
END = TOKENIZER.stop_ids[0]
TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
HI: list[Message] = [{"role": "user", "content": "hello"}]
STRIPPING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


WITH_IDS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ IDS('m.tool_call_id') }}Return of {{ m.tool_call_id }}: {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ IDS('c.id') }}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Results say which call they answer, as those of Kimi K2 and Mistral do; `IDS` stands for the check of an id."""


class Hermes:
    """A parser in the contract's shape, and nothing more."""

    def parse(self, text: str) -> tuple[str | None, list[dict[str, JSON]] | None]:
        found = [json.loads(block) for block in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)]
        content = re.sub(r"\n?<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
        calls = [
            {"id": "random", "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for call in found
        ]
        return content or None, calls or None


def toy(*replies: str, **options: JSON) -> ToyEngine:
    return ToyEngine(TOKENIZER, iter(replies), **options)


def managed(engine: ToyEngine, **options: JSON) -> ManagedChat:
    chat_format = options.pop("chat_format", FORMAT)
    return ManagedChat(engine, chat_format, Hermes(), clock=ManualClock(), **options)


def said(completion: ChatCompletion) -> Message:
    message = completion.choices[0].message.model_dump()
    return {key: value for key, value in message.items() if value is not None}


async def talk(chat: ManagedChat, turns: int, messages: list[Message] | None = None, **request: JSON) -> list[Message]:
    """So many turns; calls are answered by a tool, other replies by the user."""
    messages = list(messages or HI)
    for _ in range(turns):
        reply = said(await chat.chat_completion(messages=messages, **request))
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "file.txt\n"})
        if not reply.get("tool_calls"):
            messages.append({"role": "user", "content": "go on"})
    return messages


def text_of(chat: ManagedChat, row: int = 0) -> str:
    return TOKENIZER.decode(chat.ledger.rows()[row].tokens)


def check(chat: ManagedChat) -> None:
    """What must hold whatever was said: the verifier agrees, and every log-probability is the one of its place."""
    verdict = verify_ledger(chat.ledger.record())
    assert verdict.ok, verdict.violation
    for row in chat.ledger.rows():
        for place, (token, mask, logprob) in enumerate(zip(row.tokens, row.masks, row.logprobs, strict=True)):
            assert (mask, logprob) in ((-100, 1.0), (token, toy_logprob(token, place)))


def test_lists_of_parts_are_their_text_and_no_other_thing_is_shown_to_the_model() -> None:
    chat = managed(toy("I look.\n" + CALL, "done"))
    asked: list[Message] = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    reply = said(asyncio.run(chat.chat_completion(messages=asked, tools=[TERMINAL])))
    parts = {**reply, "content": [{"type": "text", "text": reply["content"]}]}
    answer: Message = {"role": "tool", "tool_call_id": "call_1_0", "content": [{"type": "text", "text": "file.txt"}]}
    asyncio.run(chat.chat_completion(messages=[*asked, parts, answer], tools=[TERMINAL]))
    assert len(chat.ledger.rows()) == 1
    assert "system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>" in text_of(chat)
    assert "tool\nfile.txt<|im_end|>" in text_of(chat)
    check(chat)
    before = len(chat.ledger.turns)
    for wrong in ([{"type": "image_url", "image_url": {"url": "x"}}], {"x": 1}, 5):
        with pytest.raises(ConfigError, match=r"A message \(user\)"):
            asyncio.run(chat.chat_completion(messages=[{"role": "user", "content": wrong}]))
    nothing = managed(toy("done"))
    asyncio.run(nothing.chat_completion(messages=[{"role": "user", "content": None}]))
    assert "None" not in text_of(nothing)
    assert len(chat.ledger.turns) == before


@pytest.mark.parametrize(
    ("parser", "reply", "ids"),
    [
        ("mistral", '[TOOL_CALLS]terminal[ARGS]{"command": "ls"}', []),
        ("mistral", '[TOOL_CALLS]terminal[CALL_ID]abcDEF123[ARGS]{"command": "ls"}', ["abcDEF123"]),
        ("mistral", '[TOOL_CALLS] [{"name": "terminal", "arguments": {}, "id": "abcDEF123"}]', ["abcDEF123"]),
        ("mistral", '[TOOL_CALLS]terminal[CALL_ID]x[ARGS]{"command": ', []),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>functions.terminal:1<|tool_call_argument_begin|>{]<|tool_call_end|>",
            ["functions.terminal:0", "functions.terminal:1"],
        ),
    ],
)  # fmt: skip
async def test_calls_have_the_ids_that_the_family_wants(parser: str, reply: str, ids: list[str]) -> None:
    """Mistral's template refuses others; Kimi's model is told by the id that it gave which call a result answers."""
    check_id = "'' if ID | length == 9 else raise_exception('ids have nine letters')" if parser == "mistral" else "''"
    template = re.sub(r"IDS\('([\w.]+)'\)", lambda found: f"({check_id.replace('ID', found[1])})", WITH_IDS)
    chat = ManagedChat(toy(reply, reply, "done"), ChatFormat(TOKENIZER, template), parser, clock=ManualClock())
    messages = await talk(chat, 3, tools=[TERMINAL])
    asked = [
        [call["id"] for call in message.get("tool_calls", ())] for message in messages[1::2] if "tool_calls" in message
    ]
    given = re.findall("Return of ([^:]+:?[0-9]*): ", text_of(chat))
    assert given == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert len(given) == 2 * max(1, len(ids))
    assert not ids or asked[0] == ids
    assert len(chat.ledger.rows()) == 1
    check(chat)


@pytest.mark.parametrize("ends", [True, False], ids=["end token returned", "end token stripped"])
async def test_a_conversation_with_tools_is_one_row_as_the_template_writes_it(ends: bool) -> None:
    chat = managed(toy("I look.\n" + CALL, "it is file.txt", rate=0.5, ends=ends))
    messages = await talk(chat, 2, tools=[TERMINAL])
    (row,) = chat.ledger.rows()
    call = {"function": {"name": "terminal", "arguments": {"command": "ls"}}}
    history = [messages[0], {**messages[1], "tool_calls": [call]}, *messages[2:4]]
    expected = ChatTemplate(CHATML).render(history, tools=[TERMINAL], add_generation_prompt=False)
    assert text_of(chat) == expected.removesuffix("\n" if ends else "<|im_end|>\n")
    end = "<|im_end|>" if ends else ""
    trained = TOKENIZER.decode([token for token in row.masks if token != -100])
    assert trained == f"I look.\n{CALL}{end}it is file.txt{end}"
    check(chat)


async def test_the_engine_is_given_the_ledger_and_what_is_new() -> None:
    asked: list[list[int]] = []

    class Listening(ToyEngine):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            asked.append(list(input_ids))
            return await super().generate(input_ids, sampling)

    chat = managed(Listening(TOKENIZER, iter(["hello there", "the answer", "is 42"]), rate=1.0))
    await talk(chat, 3)
    tokens = chat.ledger.rows()[0].tokens
    assert all(tokens[: len(prompt)] == prompt for prompt in asked)
    assert tokens != TOKENIZER.encode(text_of(chat)), "the engine should have written non-canonical tokens"
    check(chat)


class Listening:
    """The tokenizer, and what it was asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        return TOKENIZER.encode(text)

    def __getattr__(self, name: str) -> JSON:
        return getattr(TOKENIZER, name)


async def test_only_what_is_new_is_encoded_and_never_what_was_sampled() -> None:
    tokenizer = Listening()
    replies = [f"unlike any other {number}\n{CALL}" for number in range(40)]
    chat = managed(toy(*replies, rate=0.2), chat_format=ChatFormat(tokenizer))
    messages = await talk(chat, 1, tools=[TERMINAL])
    before = len(tokenizer.encoded)
    await talk(chat, 39, messages, tools=[TERMINAL])
    per_turn = tokenizer.encoded[before:]
    assert len(per_turn) == 39
    assert not any("unlike any other" in text for text in per_turn)
    assert set(per_turn) == {"<|im_end|>\n<|im_start|>tool\nfile.txt\n<|im_end|>\n<|im_start|>assistant\n"}
    check(chat)


async def test_a_reply_cut_by_length_stays_cut_and_the_conversation_goes_on() -> None:
    chat = managed(toy("hello there world", "ok"))
    first = await chat.chat_completion(messages=HI, max_tokens=2)
    messages = [*HI, said(first), {"role": "user", "content": "what"}]
    second = await chat.chat_completion(messages=messages)
    assert [first.choices[0].finish_reason, second.choices[0].finish_reason] == ["length", "stop"]
    assert first.usage is not None
    assert first.usage.completion_tokens == 2
    assert text_of(chat).count("<|im_end|>") == 4
    assert chat.ledger.rows()[0].masks.count(END) == 1, "the end that the model did not say is not trained"
    check(chat)


async def test_calls_read_as_objects_and_as_dicts_with_ids_of_the_turn() -> None:
    completion = await managed(toy(CALL + "\n" + CALL)).chat_completion(messages=HI, tools=[TERMINAL])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls or ()
    assert (first.id, second["id"]) == ("call_1_0", "call_1_1")
    assert first.function.name == second["function"]["name"] == "terminal"
    assert json.loads(first["function"]["arguments"]) == {"command": "ls"}


async def test_without_tools_nothing_is_a_call() -> None:
    completion = await managed(toy(CALL)).chat_completion(messages=HI)
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].message.content == CALL


@pytest.mark.parametrize("history", ["template", "append"])
async def test_a_template_that_strips_thinking(history: str) -> None:
    chat_format = ChatFormat(TOKENIZER, STRIPPING)
    thoughts = [f"<think>\nhm {number}\n</think>\n\nhello {number}" for number in range(3)]
    chat = managed(toy(*thoughts, rate=0.3), chat_format=chat_format, history=history)
    messages = await talk(chat, 3)
    assert messages[1] == {"role": "assistant", "content": "hello 0", "reasoning_content": "hm 0"}
    rows = chat.ledger.rows()
    if history == "append":
        assert [row.reason for row in rows] == ["start"]
        assert text_of(chat).count("<think>") == 3
    else:
        assert [row.reason for row in rows] == ["start", "template_rewrite", "template_rewrite"]
        assert [text_of(chat, row).count("<think>") for row in range(3)] == [1, 1, 1]
    assert sum(mask != -100 for row in rows for mask in row.masks) == sum(t.sampled_tokens for t in chat.ledger.turns)
    check(chat)


async def test_thinking_that_stays_is_no_rewrite() -> None:
    chat = managed(
        toy("<think>\nhm\n</think>\n\nhello", "there", "world"), chat_format=ChatFormat(TOKENIZER, STRIPPING)
    )
    reply = said(await chat.chat_completion(messages=HI))
    tool = {"role": "tool", "tool_call_id": "x", "content": "1"}
    await chat.chat_completion(messages=[*HI, reply, tool])
    assert [row.reason for row in chat.ledger.rows()] == ["start"]
    check(chat)


THINKS_AFTER_USERS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n"
    "{{ '<think></think>' if '/no_think' in messages[0].content else '<think>\n' }}{% endif %}"
)
"""Opens the thinking after a user, as DeepSeek R1's does, and not where the system's message says so, as Nemotron's."""


async def test_a_prompt_opens_the_thinking_in_one_turn_and_not_in_the_next() -> None:
    chat_format = ChatFormat(TOKENIZER, THINKS_AFTER_USERS)
    chat = managed(toy(f"hm\n</think>\n\n{CALL}", "42"), chat_format=chat_format)
    asked = said(await chat.chat_completion(messages=HI, tools=[TERMINAL]))
    result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "1"}
    answered = said(await chat.chat_completion(messages=[*HI, asked, result], tools=[TERMINAL]))
    assert asked["reasoning_content"] == "hm"
    assert answered == {"role": "assistant", "content": "42"}
    check(chat)


async def test_a_message_decides_whether_the_prompt_opens_the_thinking() -> None:
    chat = managed(toy("42"), chat_format=ChatFormat(TOKENIZER, THINKS_AFTER_USERS))
    messages = [{"role": "system", "content": "/no_think"}, *HI]
    assert said(await chat.chat_completion(messages=messages)) == {"role": "assistant", "content": "42"}


SAID_LAST = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role != 'tool' %}"
    "<|im_start|>{{ m.role }}\n{% set at = loop.index0 %}{% for c in m.tool_calls or [] %}"
    "({{ c.function.arguments | tojson }}){% set result = messages[at + loop.index] %}"
    "{% if result is defined and result.role == 'tool' %}=({{ result.content }}){% endif %}{% endfor %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes each call's result right behind the call, and what was said beside them last, as Gemma's does."""


@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("reply", [f"I look. {CALL}", f"{CALL}\n{CALL}"], ids=["said beside a call", "two calls"])
async def test_results_are_shown_where_the_template_writes_them_ahead_of_the_reply(history: str, reply: str) -> None:
    chat = managed(toy(reply, "hello", "there"), chat_format=ChatFormat(TOKENIZER, SAID_LAST), history=history)

    async def go() -> None:
        asked = said(await chat.chat_completion(messages=HI, tools=[TERMINAL]))
        messages = [*HI, asked]
        for number, call in enumerate(asked["tool_calls"]):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"})
        messages.append(said(await chat.chat_completion(messages=messages, tools=[TERMINAL])))
        await chat.chat_completion(messages=[*messages, *HI], tools=[TERMINAL])

    await go()
    assert [row.reason for row in chat.ledger.rows()] == ["start", "template_rewrite"]
    last = text_of(chat, -1)
    assert all(f"=(result {number})" in last for number in range(reply.count(CALL)))
    assert last.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>")
    check(chat)


@pytest.mark.parametrize("chat_format", [FORMAT, ChatFormat(TOKENIZER, STRIPPING)], ids=["appends", "rewrites"])
async def test_a_replys_own_message_may_be_sent_back(chat_format: ChatFormat) -> None:
    chat = managed(toy("<think>\nhm\n</think>\n\nhello", "there"), chat_format=chat_format)
    reply = (await chat.chat_completion(messages=HI)).choices[0].message
    await chat.chat_completion(messages=[*HI, reply, *HI])
    assert len(chat.ledger.turns) == 2
    check(chat)


def test_a_replys_own_calls_may_be_sent_back() -> None:
    chat = managed(toy(CALL, "hello", "there"))

    async def go() -> list[Message]:
        reply = (await chat.chat_completion(messages=HI, tools=[TERMINAL])).choices[0].message
        calls = {"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls}
        result = {"role": "tool", "tool_call_id": "x", "content": "1"}
        await chat.chat_completion(messages=[*HI, calls, result], tools=[TERMINAL])
        return [*HI, {"role": "assistant", "content": "", "tool_calls": [{"name": "terminal"}]}, result]

    wrong = asyncio.run(go())
    assert [row.reason for row in chat.ledger.rows()] == ["start"]
    with raises(ConfigError):
        asyncio.run(chat.chat_completion(messages=wrong, tools=[TERMINAL]))
    check(chat)


async def test_a_parser_that_raises_leaves_no_trace_of_the_turn() -> None:
    class Raising(Hermes):
        def parse(self, text: str) -> tuple[str | None, list[dict[str, JSON]] | None]:
            if text == "world":
                raise RuntimeError("no such text")
            return super().parse(text)

    chat = ManagedChat(toy("hello", "world", "there"), FORMAT, Raising(), clock=ManualClock())
    reply = said(await chat.chat_completion(messages=HI, tools=[TERMINAL]))
    messages = [*HI, reply, *HI]
    with pytest.raises(RuntimeError, match="no such text"):
        await chat.chat_completion(messages=messages, tools=[TERMINAL])
    assert said(await chat.chat_completion(messages=messages, tools=[TERMINAL]))["content"] == "there"
    assert len(chat.ledger.turns) == 2
    assert "world" not in text_of(chat)
    assert text_of(chat).count("<|im_start|>user") == 2
    check(chat)


async def test_a_template_without_tools_is_refused_before_anything_is_sampled() -> None:
    engine = toy("hello")
    chat = managed(engine, chat_format=ChatFormat(TOKENIZER, STRIPPING))
    with raises(ConfigError, "terminal"):
        await chat.chat_completion(messages=HI, tools=[TERMINAL])
    assert engine.requests == 0


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"n": 0}, "n is 0"),
        ({"tools": ["f"]}, "A tool is 'f', but"),
        ({"tools": [{"type": "function"}]}, "A tool is "),
        ({"messages": ["hello"]}, "Message 0 is 'hello'"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "without a function name.*'x'"),
    ],
)
async def test_a_request_of_another_shape_is_refused(request_: JSON, complaint: str) -> None:
    engine = toy("hello")
    with pytest.raises(ConfigError, match=complaint):
        await managed(engine).chat_completion(**{"messages": HI, **request_})
    assert engine.requests == 0


async def test_an_edited_history_is_a_segment_that_says_so() -> None:
    chat = managed(toy("hello", "there", "world"))
    messages = await talk(chat, 2)
    messages[1] = {**messages[1], "content": "hullo"}
    await chat.chat_completion(messages=[*messages[:4], {"role": "user", "content": "x"}])
    rows = chat.ledger.rows()
    assert [row.reason for row in rows] == ["start", "history_edit"]
    assert "hullo" in text_of(chat, 1)
    assert TOKENIZER.decode([mask for mask in rows[1].masks if mask != -100]) == "world<|im_end|>"
    check(chat)


async def test_other_tools_are_an_edited_history() -> None:
    chat = managed(toy("hello", "there", "world"))
    more = {"type": "function", "function": {"name": "more", "parameters": {}}}
    messages = await talk(chat, 1, tools=[TERMINAL])
    messages = await talk(chat, 1, messages, tools=[{**TERMINAL}])
    await talk(chat, 1, messages, tools=[TERMINAL, more])
    assert [row.reason for row in chat.ledger.rows()] == ["start", "history_edit"]
    check(chat)


async def test_a_change_in_place_of_an_earlier_message_is_an_edit() -> None:
    chat = managed(toy("hello", "there"))
    messages = await talk(chat, 1, [{"role": "user", "content": "hello"}])
    messages[0]["content"] = "HELLO"
    await chat.chat_completion(messages=messages)
    assert [row.reason for row in chat.ledger.rows()] == ["start", "history_edit"]


async def test_compaction_and_sub_agents_are_declared_by_the_caller() -> None:
    chat = managed(toy("hello", "there", "world", "42", "is"))
    messages = await talk(chat, 1)
    helper = chat.child()
    await talk(helper, 2, [{"role": "user", "content": "a sub-task"}])
    messages = await talk(chat, 1, messages)
    chat.declare("compaction")
    await talk(chat, 1, [{"role": "user", "content": "summary of it all"}])
    assert [row.reason for row in chat.ledger.rows()] == ["start", "subagent", "compaction"]
    assert [turn.segment for turn in chat.ledger.turns] == [0, 1, 1, 0, 2]
    check(chat)


async def test_a_declared_reason_waits_for_the_request_that_succeeds() -> None:
    engine = toy("hello", "there")
    chat = managed(engine)
    await talk(chat, 1)
    chat.declare("compaction")
    chat._engine = Answering(EngineUnavailable("down"))
    with pytest.raises(EngineUnavailable):
        await chat.chat_completion(messages=[{"role": "user", "content": "summary"}])
    chat._engine = engine
    await chat.chat_completion(messages=[{"role": "user", "content": "summary"}])
    assert [row.reason for row in chat.ledger.rows()] == ["start", "compaction"]


async def test_several_choices_are_segments_and_each_can_go_on() -> None:
    chat = managed(toy("hello", "there", "world", "42"))
    completion = await chat.chat_completion(messages=HI, n=3)
    second: Message = {"role": "assistant", "content": completion.choices[1].message.content}
    await chat.chat_completion(messages=[*HI, second, {"role": "user", "content": "what"}])
    assert [choice.message.content for choice in completion.choices] == ["hello", "there", "world"]
    assert [row.reason for row in chat.ledger.rows()] == ["start", "branch", "branch"]
    assert [turn.segment for turn in chat.ledger.turns] == [0, 1, 2, 1]
    check(chat)


class LastFirst:
    """Lets each request of a batch wait for the one after it, so that replies arrive in reverse order."""

    name = "last first"

    def __init__(self, engine: ToyEngine, count: int) -> None:
        self._engine, self._turn, self._moved = engine, count, asyncio.Condition()

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        sampled = await self._engine.generate(input_ids, sampling)
        mine = self._engine.requests
        async with self._moved:
            await self._moved.wait_for(lambda: self._turn == mine)
            self._turn -= 1
            self._moved.notify_all()
        return sampled


@pytest.mark.parametrize("chats", [True, False])
async def test_choices_are_in_the_order_of_the_nodes(chats: bool) -> None:
    """Environments read the choices and the nodes in step."""
    chat = ManagedChat(LastFirst(toy("hello", "there", "world"), 3), FORMAT)
    if chats:
        found = [each.message.content for each in (await chat.chat_completion(messages=HI, n=3)).choices]
    else:
        found = [each.text for each in (await chat.completion(prompt="hello ", n=3)).choices]
    nodes = chat.get_state()["nodes"]
    texts = [TOKENIZER.decode([each for each in node.masked_tokens if each != -100][:-1]) for node in nodes]
    pairs = list(zip(found, texts, strict=True))
    assert [said for said, _ in pairs] == ["world", "there", "hello"]
    assert all(said == text for said, text in pairs)


def test_a_text_can_be_continued_several_times() -> None:
    chat = managed(toy("hello", "there", "world"))
    done = asyncio.run(chat.completion(prompt="say: ", n=3))
    assert [(each.index, each.text) for each in done.choices] == [(0, "hello"), (1, "there"), (2, "world")]
    assert done.usage is not None
    masks = [each for node in chat.get_state()["nodes"] for each in node.masked_tokens if each != -100]
    assert done.usage.completion_tokens == len(masks)
    with pytest.raises(ConfigError, match="n is 0"):
        asyncio.run(chat.completion(prompt="say: ", n=0))


async def test_requests_at_the_same_time_do_not_meet_in_one_row() -> None:
    chat = managed(toy("hello", "there", "world"))
    messages = await talk(chat, 1)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(chat.chat_completion(messages=messages))
    assert [row.reason for row in chat.ledger.rows()] == ["start", "branch"]
    check(chat)


async def test_aborts_are_hidden_and_the_policy_is_kept_per_token() -> None:
    replies = ["hello there world, what is in the file", "the answer is 42", "hello"]
    chat = managed(toy(*replies, abort_rate=0.6, rate=0.3, seed=3))
    messages = await talk(chat, 3)
    assert [message["content"] for message in messages if message["role"] == "assistant"] == replies
    (row,) = chat.ledger.rows()
    assert len({version for _, _, version in row.versions}) > 3
    assert [turn.finish_reason for turn in chat.ledger.turns] == ["stop"] * 3
    check(chat)


async def test_what_an_abort_used_up_counts_towards_the_limit() -> None:
    chat = managed(toy("hello there world, what is in the file", abort_rate=0.7, seed=1))
    completion = await chat.chat_completion(messages=HI, max_tokens=6)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6
    assert completion.choices[0].finish_reason == "length"
    check(chat)


class Answering:
    """An engine that gives one answer for ever, or raises it."""

    name = "odd"

    def __init__(self, answer: Sampled | Exception) -> None:
        self.answer = answer

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Sampled([5, 6], [-1.0], "stop"), "2 token ids with 1 log-probabilities"),
        (Sampled([5], [], "stop"), "1 token ids with 0 log-probabilities"),
        (Sampled([5, 10**6], [-1.0, -1.0], "stop"), "token id 1000000, which the tokenizer"),
        (Sampled([-1], [-1.0], "stop"), "token id -1"),
        (Sampled([5], [float("nan")], "stop"), "an impossible log-probability"),
        (Sampled([5], [0.5], "stop"), "an impossible log-probability"),
        (Sampled([5] * 9, [-1.0] * 9, "stop"), "9 tokens, more than the 8 requested"),
        (Sampled([5], [-1.0], "content_filter"), "finish reason 'content_filter'"),
    ],
)
async def test_an_answer_that_cannot_be_right_is_a_typed_error_and_no_row(answer: Sampled, complaint: str) -> None:
    chat = ManagedChat(Answering(answer), FORMAT, clock=ManualClock())
    with raises(EngineReplyError, "Engine", "odd", complaint):
        await chat.chat_completion(messages=HI, max_tokens=8)
    assert chat.ledger.rows() == []


async def test_an_engine_that_aborts_for_ever_is_unavailable() -> None:
    chat = ManagedChat(Answering(Sampled([], [], "abort")), FORMAT, clock=ManualClock())
    with raises(EngineUnavailable, "200", "times"):
        await chat.chat_completion(messages=HI)
    assert chat.ledger.rows() == []


async def test_a_failed_request_leaves_no_trace() -> None:
    engine = toy("hello", "there")
    chat = managed(engine)
    messages = await talk(chat, 1)
    chat._engine = Answering(EngineUnavailable("down"))
    with pytest.raises(EngineUnavailable):
        await chat.chat_completion(messages=messages)
    chat._engine = engine
    await chat.chat_completion(messages=messages)
    assert [row.reason for row in chat.ledger.rows()] == ["start"]
    check(chat)


async def test_a_cancelled_request_leaves_no_trace() -> None:
    class Stuck(ToyEngine):
        async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
            if self.requests == 1:
                self.requests += 1
                await asyncio.Event().wait()
            return await super().generate(input_ids, sampling)

    chat = managed(Stuck(TOKENIZER, iter(["hello", "there"])))
    messages = await talk(chat, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await chat.chat_completion(messages=messages)
    await chat.chat_completion(messages=messages)
    assert [row.reason for row in chat.ledger.rows()] == ["start"]
    check(chat)


async def test_the_agent_loop_runs_over_it_and_brings_the_nodes_home() -> None:
    async def tool(name: str, arguments: Mapping[str, JSON], task_id: str | None) -> str:
        return json.dumps({"output": f"{name} {arguments['command']}"})

    async with managed(toy("I look.\n" + CALL, "it is there", rate=0.4)) as chat:
        loop = HermesAgentLoop(chat, [TERMINAL], {"terminal"}, tool_handler=tool, max_tokens=200)
        result = await loop.run([{"role": "system", "content": "be brief"}, *HI])
    assert result.outcome is Outcome.NATURAL
    assert result.managed_state is not None
    (node,) = result.managed_state["nodes"]
    assert node.tokens == node["tokens"] == chat.ledger.rows()[0].tokens
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    assert node.full_text.endswith("it is there<|im_end|>")
    assert "terminal ls" in node.full_text
    assert node.metadata["finish_reason"] == "stop"
    check(chat)


REPLY = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<" not in text),
    st.just(CALL),
    st.just("<think>\nhm\n</think>\n\nso"),
)


@settings(max_examples=40, deadline=None)
@given(
    replies=st.lists(REPLY, min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.2, 1.0]),
    abort_rate=st.sampled_from([0.0, 0.4]),
    ends=st.booleans(),
    max_tokens=st.sampled_from([None, 3]),
    seed=st.integers(0, 99),
)
def test_any_conversation_keeps_every_invariant(
    replies: list[str], rate: float, abort_rate: float, ends: bool, max_tokens: int | None, seed: int
) -> None:
    chat = managed(toy(*replies, rate=rate, abort_rate=abort_rate, ends=ends, seed=seed))
    asyncio.run(talk(chat, len(replies), tools=[TERMINAL], max_tokens=max_tokens))
    check(chat)
    (row,) = chat.ledger.rows()
    again = managed(toy(*replies, rate=0.0, ends=ends))
    asyncio.run(talk(again, len(replies), tools=[TERMINAL]))
    if max_tokens is None:
        assert TOKENIZER.decode(row.tokens) == text_of(again), "other tokens, the same text"
    assert not re.search(r"<\|im_end\|>\s*<\|im_end\|>", text_of(again).replace("assistant\n<|im_end|>", ""))
