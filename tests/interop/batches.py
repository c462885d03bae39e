"""A trainer over HTTP, as it talks to either server, and what it got."""

from __future__ import annotations

from collections.abc import Iterable

from talking import Talk, trainer

from interop.peer import until
from palaestra_slots.core.types import JSON

Row = tuple[list[int], list[int], list[float], float]
"""Tokens, masks, log-probabilities and score of one rollout."""


def delivered(groups: Iterable[JSON]) -> list[list[Row]]:
    """What a trainer got."""
    names = ("tokens", "masks", "inference_logprobs", "scores")
    return [list(zip(*(group[name] for name in names), strict=True)) for group in groups]


async def take(api: Talk) -> list[JSON]:
    """The trainer's next batch."""
    batch: list[JSON] = []

    async def came() -> bool:
        batch.extend((await api.get("/batch"))["batch"] or [])
        return bool(batch)

    await until(came, "a batch")
    return batch


async def begin(api: Talk, batch_size: int) -> None:
    """A trainer registers and starts, as it does again after its server was restarted."""
    await api.post("/register", trainer(batch_size=batch_size, max_token_len=4096, starting_step=0, num_steps=-1))
    assert (await api.get("/batch"))["batch"] is None
