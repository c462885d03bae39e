"""How an environment presents itself to a trainer's server, and where it stands with it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """How an environment presents itself. `patience_s` is how long the server may be silent before the feed gives up;
    `poll_s` the time between questions while it waits for the trainer, `heartbeat_s` afterwards."""

    name: str
    group_size: int
    max_token_length: int
    weight: float = 1.0
    min_batch_allocation: float | None = None
    max_batches_offpolicy: int = 3
    patience_s: float = 600.0
    poll_s: float = 1.0
    heartbeat_s: float = 1.0


@dataclass(slots=True)
class Standing:
    """What the server last said. Sizes of queues are in groups of ours, `batch_size` in sequences.

    `keeps` says that the server knows deliveries and keeps them; `alone`, that nobody else's groups are there;
    `starving`, that what waits makes up no batch, although it is enough for one.
    """

    env_id: int
    name: str
    batch_size: int
    most_tokens: int | None
    num_steps: int
    step: int
    weight: float = 1.0
    queue: int = 0
    own_queue: int = 0
    keeps: bool = True
    alone: bool = False
    starving: bool = False
