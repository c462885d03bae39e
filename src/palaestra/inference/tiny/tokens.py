"""The tiny model's tokenizer: byte-level BPE, trained on text that is written here.

Byte-level: every text and every byte can be encoded, so decoding what a random model sampled gives back something,
replacement characters included. Invariant: equal versions of the `tokenizers` library give equal tokenizers.

Extra: `train` (the tokenizers library).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 1024
"""Tokens learned from the text, the 256 bytes among them; the marks come on top."""

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
"""Marks that are never text."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Marks that are one token each, and text."""

_WORDS = (
    "the of a file line lines number name write read list run command test tests error output answer value result is "
    "are was not in to from for with and or how many what which print return import def class self true false none "
    "add remove change create copy move count find search show make build first last next new old word words text "
    "directory folder path user tool system model data set get key json string integer object type description"
)
_COMMANDS = (
    "ls -la",
    "cat notes.txt",
    "wc -l < data.csv",
    "grep -n 'def main' src/app.py",
    "python3 -m pytest -q tests/test_app.py",
    'echo "done" > answer.txt',
    "find . -name '*.py' | head -20",
    "sed -n '1,40p' README.md",
    "git diff --stat HEAD",
    "mkdir -p out && cp a.txt out/b.txt",
)


def train_tokenizer() -> Tokenizer:
    """A new tokenizer, the same each time. Takes a fraction of a second."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer and the chat template as a model's folder has them."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    (out / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def chat_template() -> str:
    """ChatML with tools in the Hermes form, prefix-preserving."""
    return (resources.files(__package__) / "chat_template.jinja").read_text(encoding="utf-8")


def training_text() -> Iterator[str]:
    """Words, shell commands, a little Python and JSON: what the prompts of agents are made of."""
    for first, second in itertools.product(_WORDS.split(), repeat=2):
        yield f"{first} {second}"
    for word in _WORDS.split():
        yield f"def {word}_lines(path: str) -> int:\n    return len(open(path).readlines())\n"
        yield json.dumps({"type": "function", "function": {"name": word, "parameters": {"type": "object"}}})
        yield json.dumps({"name": word, "arguments": {"command": f"cat {word}.txt"}})
    for command in _COMMANDS:
        yield json.dumps({"name": "terminal", "arguments": {"command": command}})
        yield f"{command}\n"
    for number in range(200):
        yield f"{number} lines, {number * 7} bytes, exit code {number % 3}\n"
