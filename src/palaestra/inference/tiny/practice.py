"""A few seconds of training, after which the tiny model writes well-formed tool calls most of the time.

Not for learning a task: replies do not depend on the question. What it is good for: rollouts whose tools really run and
whose conversations go on for several turns, sampled by a real model. Replies are learned at random places after random
text, so that they also come after prompts that are longer than any seen here.

Extra: `train` (torch).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from palaestra.inference.tiny.tokens import TURN_END, TURN_START, training_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

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


def practise(model: PreTrainedModel, tokenizer: Tokenizer, *, steps: int, seed: int) -> float:
    """Train `model` in place; the last step's loss in nats per token."""
    import torch

    rng, texts = random.Random(seed), list(training_text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1.0 - step / steps))
    loss_value = float("nan")
    model.train()
    for _ in range(steps):
        rows = [_row(tokenizer, texts, rng) for _ in range(BATCH)]
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


def _row(tokenizer: Tokenizer, texts: Sequence[str], rng: random.Random) -> tuple[list[int], list[int]]:
    """`ids[LENGTH]` and `labels[LENGTH]`: some text, the start of a reply, a reply, padding; only the reply is learned.

    How much text there is must not depend on the reply, or its length could be told from the distance to the start.
    """
    reply = tokenizer.encode(_reply(rng) + TURN_END, add_special_tokens=False).ids
    start = tokenizer.encode(f"{TURN_END}\n{TURN_START}assistant\n", add_special_tokens=False).ids
    ids: list[int] = []
    while len(ids) < LENGTH:
        ids += tokenizer.encode(rng.choice(texts), add_special_tokens=False).ids
    ids = ids[: rng.randrange(LENGTH - LONGEST_REPLY - len(start))] + start
    labels = [_UNTRAINED] * len(ids) + reply
    room = LENGTH - len(labels)
    return ids + reply + [0] * room, labels + [_UNTRAINED] * room


def _reply(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_ANSWERS)
    calls = [rng.choice(_CALLS) for _ in range(1 if rng.random() < 0.85 else 2)]
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
