"""What an environment is told of the queues and of its share, from which it decides when to begin a group. Pure.

Source of the keys and their meaning: `/status-env` of atroposlib 0.4, without its packing of others' groups. `starving`
is ours.
"""

from __future__ import annotations

from palaestra.core.types import JSON
from palaestra.trainers.atropos.exchange import MIN_ENV_WEIGHT, Exchange


def env_status(exchange: Exchange, env_id: int, now_s: float) -> dict[str, JSON]:
    """What an environment asks for again and again. Queue sizes are in its groups, its own and those of others that
    no minimum holds for them."""
    own = exchange.env(env_id)
    alive = [env for env in exchange.envs if exchange.alive(env, now_s)]
    work = {id(env): env.registration.max_token_length * max(0.0, env.registration.weight) for env in exchange.envs}
    total = sum(work[id(env)] for env in alive)
    sequences: dict[int | None, int] = {}
    for each in exchange.queue:
        sequences[each.env_id] = sequences.get(each.env_id, 0) + each.sequences
    batch_size = exchange.trainer.batch_size if exchange.trainer else 0
    others = 0
    for other, count in sequences.items():
        least = 0.0 if other is None else exchange.envs[other].registration.min_batch_allocation or 0.0
        others += 0 if other == env_id else max(0, count - int(batch_size * least))
    unit, mine = own.registration.group_size, sequences.get(env_id, 0)
    return {
        "current_step": exchange.step,
        "queue_size": (mine + others) // unit,
        "unallocated_fraction": max(0.0, 1.0 - exchange.allocated(now_s)),
        "self_queue_size": mine // unit,
        "max_group_size": max((each.sequences for each in exchange.queue), default=1),
        "starving": exchange.starving(now_s),
        "env_weight": min(1.0, max(MIN_ENV_WEIGHT, work[id(own)] / total if total else 0.0)),
    }
