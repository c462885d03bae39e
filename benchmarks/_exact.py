"""Token-exact chat in benchmarks: saves the tiny model's tokenizer, and encodes a conversation as an engine's token
replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _instant_server import token_reply

from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import Tokenizer


def saved_tokenizer(folder: str) -> str:
    """Save the tokenizer of all token-exact cases, and return its path."""
    path = Path(folder, "tokenizer")
    path.mkdir()
    save_tokenizer(train_tokenizer(), path)
    return str(path)


def said(tokenizer: Tokenizer, calls: Sequence[Mapping[str, object]], last: str) -> list[bytes]:
    """Return one reply for each call, in Hermes format, and the final message."""
    texts = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls] + [last]
    (turn_end,) = tokenizer.stop_ids[:1]
    return [token_reply([*tokenizer.encode(text), turn_end]) for text in texts]


def turn_counter(tokenizer: Tokenizer) -> Callable[[bytes], int]:
    """Return a function that counts the replies in a request's token ids."""
    opening = re.compile(rb"\b%d\b" % tokenizer.encode("<|im_start|>")[0])
    at_first: list[int] = []

    def turns(body: bytes) -> int:
        """Count the replies. Each turn adds the beginnings of two messages to the prompt: a tool result and the next
        reply."""
        count = len(opening.findall(body))
        at_first[:] = [min(count, *at_first)] if at_first else [count]
        return (count - at_first[0]) // 2

    return turns
