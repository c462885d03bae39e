"""What a trajectory server tells an environment: as much of its answers as is read. No I/O.

Source: the routes of atroposlib 0.4. An answer of another shape comes from something that is no trajectory server.
"""

from __future__ import annotations

import msgspec


class Registered(msgspec.Struct):
    """`POST /register-env`. All but `status` is there when that is "success"."""

    status: str
    env_id: int = -1
    wandb_name: str | None = None
    num_steps: int | None = None
    starting_step: int | None = None


class Batches(msgspec.Struct):
    """`GET /info`: sequences of a batch and tokens of a sequence; -1 where no trainer has said."""

    batch_size: int
    max_token_len: int


class EnvStatus(msgspec.Struct):
    """`GET /status-env`. Sizes of queues are in groups of the environment that asks; the original does not say whether
    what waits is enough for a batch and makes none up (`starving`)."""

    current_step: int
    queue_size: int
    self_queue_size: int
    env_weight: float
    starving: bool = False
