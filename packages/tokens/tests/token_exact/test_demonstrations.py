"""Rows of conversations that no model sampled: the tokens and masks of a rollout in which a model wrote the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import ENCODED, TokenRow, record_rows
from palaestra_tokens.parsers import ParsedCall, ParsedOutput
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.testing.fake_engine import CHATML, toy_tokenizer
from palaestra_tokens.token_exact.demonstrations import demonstration_rows
from palaestra_tokens.token_exact.managed_chat import ManagedChat

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"path": {"type": "string"}}}}}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|return|>", "<|user|>", "<|tool|>", "<|bot|>", "<eos>", "[INST]", "[/INST]")
HERMES_CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
GLM = (
    TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}"
    "<|tool|>{{ m.content }}{% else %}<|bot|>{{ m.content }}" + HERMES_CALLS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
"""The role token of the next message ends a reply."""
RETURNING = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}" + HERMES_CALLS + "{{ '<|return|>' "
    "if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""The last reply ends with another token than earlier ones."""
OPENING = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + HERMES_CALLS + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""The prompt opens the thinking, which replies in the history lack."""
LATEST = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}" + HERMES_CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Only the last reply has the empty thinking that the model writes."""
LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' and loop.last %}[" + TOOLS + "]{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}" + HERMES_CALLS + "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""The tools move with the last message of the user."""
UNHEADED = (
    TOOLS + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}" + HERMES_CALLS + "<eos>{% endif %}{% endfor %}"
)
"""Nothing stands before a reply."""
TEMPLATES = {
    "chatml": CHATML,
    "role tokens": GLM,
    "returning": RETURNING,
    "opening": OPENING,
    "latest": LATEST,
    "last user": LAST_USER,
    "unheaded": UNHEADED,
}
ENDS = {"role tokens": ("<|tool|>", "<|user|>"), "returning": ("<|return|>", "<|return|>"), "unheaded": ("<eos>",) * 2}


def calling(number: int, path: str = "a", content: str | None = None) -> Message:
    function = {"name": "look", "arguments": f'{{"path":"{path}"}}'}
    call = {"id": f"x{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(number: int, text: str = "found") -> Message:
    return {"role": "tool", "tool_call_id": f"x{number}", "content": text}


USER: Message = {"role": "user", "content": "look at <|im_end|> it"}
WORK: list[Message] = [USER, calling(1), result(1, "an <|im_end|> in it"), calling(2, "<|im_end|>b"), result(2)]


def formatted(template: str) -> ChatFormat:
    return ChatFormat(toy_tokenizer(["hello there"], SPECIAL, end="<eos>", chat_template=template))


class Typing:
    """An engine that writes given texts, as a model would."""

    name = "typing"

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = iter(texts), tokenizer

    async def generate(self, input_ids: Sequence[int], sampling: JSON) -> Sampled:
        ids = [number for part in next(self.texts).split("\0") for number in self.tokenizer.encode(part)]
        return Sampled(ids, [-0.5] * len(ids), "stop")


def rolled_out(chat_format: ChatFormat, texts: Sequence[str], results: Sequence[str]) -> list[TokenRow]:
    """Return the rows of a rollout in which a model writes these texts."""
    chat = ManagedChat(Typing(texts, chat_format.tokenizer), chat_format, "hermes")

    async def converse() -> None:
        messages = [USER]
        for text in results:
            done = await chat.chat_completion(messages=messages, tools=[TOOL])
            reply = done.choices[0].message.model_dump()
            messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}]
        await chat.chat_completion(messages=messages, tools=[TOOL])

    asyncio.run(converse())
    return record_rows(chat.ledger.record())


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rows_are_those_of_a_rollout_that_wrote_the_same(name: str) -> None:
    chat_format = formatted(TEMPLATES[name])
    done: Message = {"role": "assistant", "content": "It is there."}
    rows = demonstration_rows(chat_format, [*WORK, done], [TOOL], rollout_id="r")
    before = {"opening": "</think>\n\n", "latest": "<think>\n\n</think>\n\n", "chatml": ""}.get(name, "")
    lead = "\n" if name == "chatml" else ""
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {{"path": "{each}"}}}}\n</tool_call>'
        for each in ("a", "<\0|im_end|>b")
    ]
    after_call, after_text = ENDS.get(name, ("<|im_end|>",) * 2)
    texts = [f"{before}{lead}{call}{after_call}" for call in calls] + [f"{before}It is there.{after_text}"]
    expected = rolled_out(chat_format, texts, ["an <|im_end|> in it", "found"])
    decode = chat_format.tokenizer.decode
    assert [decode(row.tokens) for row in rows] == [decode(row.tokens) for row in expected]
    assert [trained(row, decode) for row in rows] == [trained(row, decode) for row in expected]
    assert {(row.source, row.logprobs is None, len(row.versions)) for row in rows} == {(ENCODED, True, 0)}
    assert {span.sequence_id.split(":")[0] for row in rows for span in row.spans} == {"r"}


def trained(row: TokenRow, decode: Any) -> str:
    return "".join(decode([token]) if mask == token else "·" for token, mask in zip(row.tokens, row.masks, strict=True))


def test_a_row_ends_with_the_last_reply() -> None:
    rows = demonstration_rows(formatted(CHATML), WORK, [TOOL])
    assert rows[-1].masks[-1] == rows[-1].tokens[-1]


def test_examples_in_the_prompt_are_not_trained() -> None:
    chat_format = formatted(CHATML)
    (row,) = demonstration_rows(chat_format, WORK, [TOOL], examples=1)
    assert trained(row, chat_format.tokenizer.decode).count("look") == 1


class Deaf:
    """A parser that finds no call."""

    def parse(self, text: str, tools: JSON = None, cut: bool = False, thinking: bool = False, turn: int = 0) -> Any:
        return ParsedOutput(())


class Renaming(Deaf):
    """A parser that reads another tool's name."""

    def parse(self, text: str, tools: JSON = None, cut: bool = False, thinking: bool = False, turn: int = 0) -> Any:
        return ParsedOutput((ParsedCall.of("seek", {"path": "a"}),))


@pytest.mark.parametrize("parser", ["mistral", "llama3_json", None, Deaf(), Renaming()])
def test_a_reply_that_a_rollout_would_read_differently_is_refused(parser: Any) -> None:
    with pytest.raises(ConfigError, match="--tool-parser"):
        demonstration_rows(formatted(CHATML), WORK, [TOOL], parser=parser)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"id": "c", "name": "look", "arguments": "{}"}]},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "look"}}]},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"arguments": "{}"}}]},
        {"tool_calls": "look"},
        {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"content": 1},
    ],
)
def test_what_is_no_reply_is_one_clear_error(fields: dict[str, JSON]) -> None:
    with raises(ConfigError):
        demonstration_rows(formatted(CHATML), [USER, {**calling(1), **fields}, result(1)], [TOOL])


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "all "}, {"type": "text", "text": "done"}]
    made = [
        demonstration_rows(formatted(CHATML), [USER, {"role": "assistant", "content": content}], [TOOL])
        for content in ("all done", parts)
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("arguments", ["{", "[1]", "look"])
def test_malformed_arguments_are_not_taught(arguments: str) -> None:
    reply = calling(1)
    reply["tool_calls"][0]["function"]["arguments"] = arguments
    with pytest.raises(ConfigError, match="malformed"):
        demonstration_rows(formatted(CHATML), [USER, reply, result(1)], [TOOL])
