"""A few seconds of training, after which the tiny model writes well-formed tool calls most of the time.

Not for learning a task: replies do not depend on the question. What it is good for: rollouts whose tools really run and
whose conversations go on for several turns, sampled by a real model. Replies are learned at random places after random
text, so that they also come after prompts that are longer than any seen here.

Extra: `train` (torch).
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from palaestra.inference.tiny.tokens import TURN_END, TURN_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

BATCH, LENGTH = 16, 72
"""Sequences per step, and tokens per sequence."""

FARTHEST = 8_000
"""Sequences begin at positions up to here."""

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

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1.0 - step / steps))
    loss_value = float("nan")
    model.train()
    for _ in range(steps):
        rows = [_row(tokenizer, rng) for _ in range(BATCH)]
        ids = torch.tensor([row[0] for row in rows])
        labels = torch.tensor([row[1] for row in rows])
        starts = torch.tensor([[rng.randrange(FARTHEST)] for _ in range(BATCH)])
        loss = model(input_ids=ids, position_ids=starts + torch.arange(LENGTH), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss_value = float(loss.detach())
    model.eval()
    return loss_value


def _row(tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[int]]:
    """`ids[LENGTH]` and `labels[LENGTH]`: random text, the start of a reply, a reply; only the reply is learned."""
    reply = tokenizer.encode(_reply(rng) + TURN_END, add_special_tokens=False).ids
    start = tokenizer.encode(f"{TURN_END}\n{TURN_START}assistant\n", add_special_tokens=False).ids
    room = LENGTH - len(start) - len(reply)
    noise = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(room)]
    ids = [*noise, *start, *reply]
    return ids, [_UNTRAINED] * (room + len(start)) + reply


def _reply(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_ANSWERS)
    calls = [rng.choice(_CALLS) for _ in range(1 if rng.random() < 0.85 else 2)]
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
