"""`tokenize_for_trainer`, and the tokenizer that environments see."""

from __future__ import annotations

import pytest

from golden_messages import raises
from palaestra_contract.chat_tokenizer import ChatTokenizer
from palaestra_contract.helpers.training_tokens import tokenize_for_trainer
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.testing.fake_engine import toy_tokenizer

CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(toy_tokenizer(["It is 3. Sure? Yes. Add."]))


def trained(tokenizer: ChatTokenizer, row: dict[str, list[int]]) -> str:
    """The text of the tokens that are trained on."""
    assert len(row["tokens"]) == len(row["masks"])
    assert all(mask in (-100, token) for token, mask in zip(row["tokens"], row["masks"], strict=True))
    return tokenizer.decode([mask for mask in row["masks"] if mask != -100])


def test_by_default_only_the_last_message_is_trained_on(tokenizer: ChatTokenizer) -> None:
    row = tokenize_for_trainer(tokenizer, CHAT)
    assert set(row) == {"tokens", "masks"}
    assert tokenizer.decode(row["tokens"]).count("<|im_start|>") == len(CHAT)
    assert trained(tokenizer, row) == "Yes.<|im_end|>\n"


def test_every_assistant_turn_can_be_trained_on(tokenizer: ChatTokenizer) -> None:
    row = tokenize_for_trainer(tokenizer, CHAT, include_messages=True, train_on_all_assistant_turns=True)
    assert trained(tokenizer, row) == "It is 3.<|im_end|>\nYes.<|im_end|>\n"
    assert row["messages"] is CHAT
    agents = [{**each, "role": "agent"} if each["role"] == "assistant" else each for each in CHAT]
    said = tokenize_for_trainer(tokenizer, agents, train_on_all_assistant_turns=True)
    # The template renders the role, so a turn of `agent` differs from the generation prompt by its header.
    assert len([mask for mask in said["masks"] if mask != -100]) > 0


def test_an_end_that_the_model_did_not_write_is_removed() -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = ChatTokenizer(toy_tokenizer(chat_template=template))
    whole, cut = (tokenize_for_trainer(tokenizer, CHAT, finish_reason=reason) for reason in ("stop", "length"))
    assert whole["tokens"][-1] == tokenizer.eos_token_id
    assert cut == {key: ids[:-1] for key, ids in whole.items()}


def test_a_plain_tokenizer_is_enough_and_none_is_not() -> None:
    plain = toy_tokenizer()
    assert tokenize_for_trainer(plain, CHAT) == tokenize_for_trainer(ChatTokenizer(plain), CHAT)
    with raises(ConfigError, "self.tokenizer", "tokenizer_name"):
        tokenize_for_trainer(None, CHAT)


def test_a_conversation_becomes_ids_text_or_the_answer_of_a_call(tokenizer: ChatTokenizer) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.endswith("Yes.<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text
    call = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert (call["input_ids"], call.attention_mask) == (ids, [1] * len(ids))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, chat_template="{{ messages | length }}") == "5"
    open_ended = tokenizer.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert open_ended.endswith("<|im_start|>assistant\nYes.")
    with raises(ConfigError):
        tokenizer.apply_chat_template([])


def test_special_tokens_vocabulary_and_calls(tokenizer: ChatTokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<|im_end|>", end, None)
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == end
    assert end in tokenizer.all_special_ids
    assert len(tokenizer) == tokenizer.vocab_size + 3 == len(tokenizer.get_vocab())
    assert tokenizer.decode(tokenizer.encode("Add."), skip_special_tokens=True) == "Add."
    assert tokenizer.decode(end) == "<|im_end|>"
    assert tokenizer.batch_decode([[end]], skip_special_tokens=True) == [""]
    assert "".join(tokenizer.tokenize("Add.")) == "Add."
    both = tokenizer(["Add.", "It is 3. Sure?"], padding=True)
    assert len({len(row) for row in both["input_ids"]}) == 1
    assert sum(both["attention_mask"][0]) == len(tokenizer.encode("Add."))
    assert tokenizer("It is 3.", truncation=True, max_length=1)["input_ids"] == tokenizer.encode("It is 3.")[:1]
