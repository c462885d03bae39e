"""Makes the tiny model: a folder with a Qwen3 model with random weights, its tokenizer and its chat template.

After some training steps, the model writes well-formed tool calls most of the time, so that rollouts run tools and last
several turns. Its replies do not depend on the question. Invariant: the same seed, sizes, training steps and library
versions give the same tokenizer and weights; nothing is downloaded. It needs the extra `train` (tokenizers, torch,
transformers).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_tokens.engines.torch_decoder import quiet_loading
from palaestra_tokens.testing.fake_engine import train_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

VOCABULARY = 1024
"""The number of tokens learned from the text, including the 256 bytes but not the marks."""

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
"""Marks that are never text."""

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Marks that are one token each and count as text."""

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
    """Train and return a byte-level tokenizer, which is the same each time. Takes a fraction of a second."""
    return train_bpe(training_text(), VOCABULARY, SPECIAL, TAGS)


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer and the chat template into a model's folder."""
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
    """Return a ChatML template with tools in the Hermes form. A longer conversation only appends text to a shorter
    one."""
    return (resources.files(__package__) / "chat_template.jinja").read_text(encoding="utf-8")


def training_text() -> Iterator[str]:
    """Return text as in agents' prompts: words, shell commands, and a little Python and JSON."""
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


BATCH, LENGTH = 8, 128
"""Sequences per step, and tokens per sequence."""

LONGEST_REPLY = 72
LEARNING_RATE = 3e-3
_UNTRAINED = -100

_CALLS = (
    ("terminal", {"command": "ls"}),
    ("terminal", {"command": "pwd"}),
    ("terminal", {"command": "echo hello > note.txt"}),
    ("terminal", {"command": "wc -l *"}),
    ("read_file", {"path": "note.txt"}),
)
_ANSWERS = ("Done.", "The answer is in the file.", "There are 3 lines.")


def practise(
    model: PreTrainedModel, tokenizer: Tokenizer, *, steps: int, seed: int, replies: Sequence[str] = ()
) -> float:
    """Train `model` in place on `replies`, by default calls of built-in tools and answers, and return the last step's
    loss in nats per token.

    The model learns replies at random places after random text, so that it also replies to longer prompts than it has
    seen in training.
    """
    import torch

    rng, texts = random.Random(seed), list(training_text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1.0 - step / steps))
    loss_value = float("nan")
    model.train()
    for _ in range(steps):
        said = [rng.choice(replies) if replies else _random_reply(rng) for _ in range(BATCH)]
        rows = [_example(tokenizer, texts, reply, rng) for reply in said]
        ids = torch.tensor([row[0] for row in rows])
        labels = torch.tensor([row[1] for row in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss_value = float(loss.detach())
    model.eval()
    return loss_value


def _example(tokenizer: Tokenizer, texts: Sequence[str], reply: str, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return `ids[LENGTH]` and `labels[LENGTH]`: some text, the start of a reply, a reply, and padding. Only the reply
    is learned.

    The amount of text must not depend on the reply, because otherwise the distance to the start would reveal the
    reply's length.
    """
    said = tokenizer.encode(reply + TURN_END, add_special_tokens=False).ids
    start = tokenizer.encode(f"{TURN_END}\n{TURN_START}assistant\n", add_special_tokens=False).ids
    ids: list[int] = []
    while len(ids) < LENGTH:
        ids += tokenizer.encode(rng.choice(texts), add_special_tokens=False).ids
    ids = ids[: rng.randrange(LENGTH - LONGEST_REPLY - len(start))] + start
    labels = [_UNTRAINED] * len(ids) + said
    room = LENGTH - len(labels)
    return ids + said + [0] * room, labels + [_UNTRAINED] * room


def _random_reply(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_ANSWERS)
    calls = [rng.choice(_CALLS) for _ in range(1 if rng.random() < 0.85 else 2)]
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


CONTEXT_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A new model. `practice_loss` is the loss of the last step in nats per token, or None if there were no training
    steps."""

    path: Path
    parameters: int
    vocabulary: int
    practice_loss: float | None = None


def make_tiny(
    out: Path,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 3,
    practice: int = 0,
    replies: Sequence[str] = (),
    force: bool = False,
) -> TinyModel:
    """Make the folder `out`. `practice` is the number of training steps, which take some hundredths of a second each.
    They teach `replies`, in equal shares; by default, they teach calls of built-in tools and short answers.

    Raises `ConfigError` if the extra is missing, a size is invalid, a reply has `LONGEST_REPLY` tokens or more, or
    `out` is not empty and `force` is not set.
    """
    try:
        import torch
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"Making a model needs the extra 'train' ({error}): {install_command('train', 'palaestra-tokens')}"
        ) from None
    if hidden < 32 or hidden % 32 or not 1 <= layers <= 64:
        raise ConfigError(f"The hidden size ({hidden}) must be a multiple of 32, and the layers ({layers}) 1 to 64.")
    tokenizer = train_tokenizer()
    for each in replies:
        if len(tokenizer.encode(each, add_special_tokens=False).ids) >= LONGEST_REPLY:
            raise ConfigError(f"The reply {each!r:.60} has {LONGEST_REPLY} tokens or more.")
    _claim(out, force)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays unchanged
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        loss, threads = None, torch.get_num_threads()
        if practice:
            torch.set_num_threads(1)  # with a model of this size, more threads are slower
            try:
                loss = practise(model, tokenizer, steps=practice, seed=seed, replies=replies)
            finally:
                torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        do_sample=True,
        temperature=1.0,
    )
    with quiet_loading():
        model.save_pretrained(out)
    # `save_pretrained` may write it for its owner only, but a server may run as another user.
    # `save_pretrained` writes it for its owner only, but a server may run as another user.
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, out)
    parameters = sum(weight.numel() for weight in model.parameters())
    return TinyModel(out, parameters, config.vocab_size, loss)


def _claim(out: Path, force: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {out}: {error.strerror}.") from None
    if taken and not force:
        raise ConfigError(f"{out} is not empty: name a new folder, or overwrite it with --force.")
