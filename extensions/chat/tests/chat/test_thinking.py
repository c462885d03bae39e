"""Thinking in the content of a reply is no part of the answer, however the reply is cut into pieces."""

from __future__ import annotations

import pytest

from palaestra_chat.thinking import ThoughtSplitter, without_thoughts
from palaestra_tokens.engine import AssistantMessage, ChatChoice, ChatCompletion

REPLIES = [
    ("<think>a plan</think>\n\nThe answer", "a plan", "The answer"),
    ("\n<think>\na < b\n</think>The answer", "\na < b\n", "The answer"),
    ("<thinking>a</thinking> b", "a", "b"),
    ("[THINK]a[/THINK]b", "a", "b"),
    ("<seed:think>a</seed:think>\nb", "a", "b"),
    ("<think></think>\n\nb", "", "b"),
    ("<think>cut of", "cut of", ""),
    ("<b>bold</b> <think>no</think>", "", "<b>bold</b> <think>no</think>"),
    ("The tag <think> begins thinking", "", "The tag <think> begins thinking"),
    ("  indented", "", "  indented"),
]


@pytest.mark.parametrize(("reply", "thought", "answer"), REPLIES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size_give_the_same(reply: str, thought: str, answer: str, size: int) -> None:
    splitter = ThoughtSplitter()
    pieces = [splitter.take(reply[at : at + size]) for at in range(0, len(reply), size)]
    assert tuple(map("".join, zip(*pieces, strict=True))) == (thought, answer)


def said(message: AssistantMessage) -> tuple[str | None, str | None]:
    without_thoughts(ChatCompletion(choices=[ChatChoice(message=message)]))
    return message.reasoning_content, message.content


def test_a_whole_reply_is_split_unless_the_server_did() -> None:
    assert said(AssistantMessage(content="<think>a</think>b")) == ("a", "b")
    assert said(AssistantMessage(content="a plan\n</think>\n\nb")) == ("a plan", "b")
    assert said(AssistantMessage(content="<think>a</think>b", reasoning_content="c")) == ("c", "<think>a</think>b")
    for plain in ("`</think>` ends thinking", "<think", None, "Write <think>\n</think>\n around it"):
        assert said(AssistantMessage(content=plain)) == (None, plain)
