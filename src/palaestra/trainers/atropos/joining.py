"""Registering an environment with a trajectory server: wait until its trainer has started, and learn where we stand.

Not for what is sent then (`feed`), nor for how long to wait for a server that is silent: the caller's `patience` says.
"""

from __future__ import annotations

from collections.abc import Callable

from palaestra.core.clock import Clock
from palaestra.core.errors import TrainerRefused, TrainerUnavailable
from palaestra.core.types import JSON
from palaestra.trainers.atropos.client import TrajectoryClient
from palaestra.trainers.atropos.standing import FeedSettings, Standing


async def joined(
    client: TrajectoryClient,
    settings: FeedSettings,
    note: Callable[[str], None],
    *,
    patience: Callable[[TrainerUnavailable], None],
    clock: Clock,
) -> Standing:
    """Register, however long the trainer takes. `patience` is called with each silence of the server and may raise it.

    Raises `TrainerRefused` for a server that does not take the environment.
    """
    said = ""
    while True:
        try:
            standing = await _attempt(client, settings)
            if standing is not None:
                _note_fit(client, settings, standing, note)
                return standing
            reason = "waiting for the trainer to start"
        except TrainerUnavailable as error:
            patience(error)
            reason = f"waiting: {error}"
        if reason != said:
            note(reason)
            said = reason
        await clock.sleep(max(settings.poll_s, 0.0))


async def _attempt(client: TrajectoryClient, settings: FeedSettings) -> Standing | None:
    """Register, and ask for the size of batches; None while the server has no trainer that started."""
    registration = {
        "max_token_length": settings.max_token_length,
        "desired_name": settings.name,
        "weight": settings.weight,
        "group_size": settings.group_size,
        "min_batch_allocation": settings.min_batch_allocation,
    }
    answer = await client.ask("POST", "/register-env", registration)
    if answer.status == 422:
        raise TrainerRefused(f"{client.url} does not take this environment: {answer.detail}")
    if answer.status != 200 or answer.body.get("status") != "success":
        return None
    info, root = await client.ask("GET", "/info"), await client.ask("GET", "/")
    return _standing(answer.body, info.body, root.body) if info.status == root.status == 200 else None


def _standing(registered: JSON, info: JSON, root: JSON) -> Standing:
    """Where we stand. A server that names itself keeps what it takes; the original does not."""
    return Standing(
        env_id=registered["env_id"],
        name=str(registered.get("wandb_name")),
        batch_size=max(1, info["batch_size"]),
        most_tokens=info["max_token_len"] if info["max_token_len"] > 0 else None,
        num_steps=registered.get("num_steps") or -1,
        step=registered.get("starting_step") or 0,
        keeps="server" in root,
    )


def _note_fit(
    client: TrajectoryClient, settings: FeedSettings, standing: Standing, note: Callable[[str], None]
) -> None:
    size = settings.group_size
    note(f"registered with {client.url} as {standing.name}, batches of {standing.batch_size} sequences")
    if standing.batch_size % size:
        note(f"groups of {size} do not fill a batch of {standing.batch_size} sequences exactly")
