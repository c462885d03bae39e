"""Tokens and masks of a finished conversation: `tokenize_for_trainer` as Atropos environments call it.

The conversation is rendered and encoded again, so the tokens may differ from those that the model sampled. Environments
that need the sampled tokens use `self.server.managed_server()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palaestra_contract.chat_tokenizer import chat_tokenizer
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engine import plain_messages

UNMASKED_ROLES = ["assistant", "agent"]
"""The roles whose messages a trainer trains on."""

MASKED = -100
"""The mask of a token that is not trained on."""


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Message],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, JSON]:
    """Return `tokens[T]` and `masks[T]` of a conversation, and its `messages` if `include_messages` is true.

    A token that is trained on has its own id as its mask; any other token has -100. By default, only the tokens after
    the last message's generation prompt are trained on; with `train_on_all_assistant_turns`, those of every message
    with a role in `UNMASKED_ROLES`. After the finish reason `length`, a last end-of-turn token is removed, because the
    model did not write it. Raises `ConfigError` if the tokenizer has no chat template.
    """
    if tokenizer is None:
        raise ConfigError(
            "tokenize_for_trainer needs a tokenizer, but self.tokenizer is None: set tokenizer_name in config_init, or "
            "--env.tokenizer_name to a model's folder or name"
        )
    encoder = chat_tokenizer(tokenizer)
    messages = plain_messages(chat)

    def ids(until: int, *, generates: bool = False) -> list[int]:
        rendered = encoder.apply_chat_template(
            messages[:until], tokenize=True, add_generation_prompt=generates, return_dict=False
        )
        return [int(number) for number in rendered]

    tokens = ids(len(messages))
    if train_on_all_assistant_turns:
        masks = [MASKED] * len(tokens)
        for index, message in enumerate(messages):
            if message["role"] in UNMASKED_ROLES:
                start, turn = len(ids(index, generates=True)), ids(index + 1)
                masks[start : len(turn)] = turn[start : len(masks)]
    else:
        prefix = len(ids(len(messages) - 1, generates=True))
        masks = [MASKED] * prefix + tokens[prefix:]
    if finish_reason == "length" and tokens[-1] == encoder.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    row: dict[str, JSON] = {"tokens": tokens, "masks": masks}
    return row | {"messages": chat} if include_messages else row
