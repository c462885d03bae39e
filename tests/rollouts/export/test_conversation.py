import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.core.printable import StyledText
from palaestra.rollouts.export.html import PageBudget, conversation, diff_spans

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
message_keys = st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"])


def call(call_id, name="terminal", arguments='{"command": "ls"}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def answer(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def words(block):
    return "".join(span.text for span in block.spans)


def read(*messages, turns=0):
    return conversation(list(messages), PageBudget(), turns)


def test_an_answer_stands_with_the_call_it_belongs_to_whatever_the_order():
    (entry,) = read(asks(call("a"), call("b")), answer("b", "second"), answer("a", "first"))
    results = [one.result for one in entry.calls]
    assert [words(result.fields.blocks[0][1]) for result in results if result] == ["first", "second"]


def test_an_id_that_comes_again_in_a_later_turn_gets_its_own_answer():
    first, second = read(asks(call("a")), answer("a", "one"), asks(call("a")), answer("a", "two"))
    assert first.calls[0].result != second.calls[0].result
    assert words(second.calls[0].result.fields.blocks[0][1]) == "two"


def test_an_answer_to_nothing_and_a_call_without_answer_are_both_shown():
    entries = read(answer("ghost", "who asked?"), asks(call("a")))
    assert entries[0].role == "tool"
    assert words(entries[0].result.fields.blocks[0][1]) == "who asked?"
    assert entries[1].calls[0].result is None


def test_a_command_is_a_block_and_a_number_stands_beside_its_name():
    (entry,) = read(asks(call("a", arguments='{"command": "ls", "timeout": 5, "path": "a.py", "x": {"y": [1]}}')))
    arguments = entry.calls[0].arguments
    assert [(name, words(block)) for name, block in arguments.blocks] == [("command", "ls")]
    assert arguments.inline == (("timeout", "5"), ("path", "a.py"), ("x", '{"y": [1]}'))


@pytest.mark.parametrize("arguments", ['{"command": "ls', "[1]", '"ls"', "[" * 100_000, 7])
def test_malformed_arguments_are_shown_as_they_are(arguments):
    (entry,) = read(asks(call("a", arguments=arguments)))
    assert entry.calls[0].malformed
    assert words(entry.calls[0].arguments.blocks[0][1])[:100] == str(arguments)[:100]


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_no_arguments_are_not_malformed(arguments):
    (entry,) = read(asks(call("a", arguments=arguments)))
    assert not entry.calls[0].malformed


def test_a_terminal_reply_is_taken_apart():
    reply = {"output": "line\n", "exit_code": 2, "error": "Exit code: 2", "truncated": True}
    (entry,) = read(asks(call("a")), answer("a", json.dumps(reply)))
    result = entry.calls[0].result
    assert (result.exit_code, words(result.error)) == (2, "Exit code: 2")
    assert [(name, words(block)) for name, block in result.fields.blocks] == [("output", "line")]
    assert result.fields.inline == (("truncated", "true"),)


def test_reasoning_is_told_from_speech_wherever_it_came():
    spoken = {
        "role": "assistant",
        "content": "<think>hm</think>\nyes",
        "reasoning_content": "field",
        "reasoning": "field",
    }
    cut_off = {"role": "assistant", "content": "<think>never closed"}
    asked = {"role": "user", "content": "what does <think>this</think> mean?"}
    first, second, third = read(spoken, cut_off, asked)
    assert [words(block) for block in first.reasoning] == ["field", "hm"]
    assert words(first.content) == "yes"
    assert ([words(block) for block in second.reasoning], second.content) == (["never closed"], None)
    assert words(third.content) == asked["content"]


def test_turns_are_counted_from_the_models_own_first_message():
    example = {"role": "assistant", "content": "an example in the prompt"}
    own = {"role": "assistant", "content": "mine"}
    assert [entry.turn for entry in read(example, own, own, turns=2)] == [None, 0, 1]
    assert [entry.turn for entry in read(own, turns=3)] == [2]


def test_parts_of_a_message_are_all_shown():
    parts = [
        {"type": "text", "text": "look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    (entry,) = read({"role": "user", "content": parts})
    assert words(entry.content) == 'look:\n[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]'


def test_a_megabyte_is_cut_in_the_middle_with_a_note():
    block = PageBudget().block("a" * 500_000 + "b" * 500_000)
    shown = words(block)
    assert len(shown) < 101_000
    assert shown.startswith("aaa")
    assert shown.endswith("bbb")
    assert "900,000 characters are not shown here" in shown
    assert block.long


def test_a_full_page_still_gives_a_taste_of_everything():
    page = PageBudget(block_chars=5_000, page_chars=6_000)
    assert not page.full
    assert len(words(page.block("a" * 5_000))) == 5_000
    assert len(words(page.block("b" * 5_000))) == 5_000
    assert page.full
    assert len(words(page.block("c" * 5_000))) < 1_100


def test_a_patch_is_coloured_by_its_lines():
    assert list(diff_spans("--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new\n same")) == [
        StyledText("--- a\n", "t-hunk"),
        StyledText("+++ b\n", "t-hunk"),
        StyledText("@@ -1 +1 @@\n", "t-hunk"),
        StyledText("-old\n", "t-del"),
        StyledText("+new\n", "t-add"),
        StyledText(" same", ""),
    ]


@given(st.lists(st.dictionaries(message_keys, json_values, max_size=5), max_size=5), st.integers(0, 3))
def test_no_shape_of_messages_is_too_strange_to_show(messages, turns):
    assert len(conversation(messages, PageBudget(), turns)) <= len(messages)
