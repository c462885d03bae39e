"""Registering an environment with a trajectory server: wait until its trainer has started, and learn where we stand.

Not for what is sent then (`feed`), nor for how long to wait for a server that is silent: the caller's `patience` says.
"""

from __future__ import annotations

from collections.abc import Callable

from palaestra.core.clock import Clock
from palaestra.core.errors import TrainerRefused, TrainerUnavailable
from palaestra.core.types import JSON
from palaestra.trainers.atropos.feed_settings import FeedSettings, Standing
from palaestra.trainers.atropos.http_client import Answer, TrajectoryClient
from palaestra.trainers.atropos.server_answers import Batches, Registered

_NO_SUCH_SERVER = frozenset({401, 403, 404, 405})
"""What another program says to a registration, and a trajectory server never does."""


async def joined(
    client: TrajectoryClient,
    settings: FeedSettings,
    note: Callable[[str], None],
    *,
    patience: Callable[[TrainerUnavailable], None],
    clock: Clock,
    again: bool = False,
) -> Standing:
    """Register, however long the trainer takes. `patience` is called with each silence of the server and may raise it.

    `again` says that it was a trajectory server before, so that whatever answers now may be a proxy in its place.
    Raises `TrainerRefused` for a server that does not take the environment, or is none.
    """
    said = ""
    while True:
        try:
            standing = await _attempt(client, settings, again)
            if isinstance(standing, Standing):
                _note_fit(client, settings, standing, note)
                return standing
            reason = standing
        except TrainerUnavailable as error:
            patience(error)
            reason = f"waiting: {error}"
        if reason != said:
            note(reason)
            said = reason
        await clock.sleep(max(settings.poll_s, 0.0))


async def _attempt(client: TrajectoryClient, settings: FeedSettings, again: bool) -> Standing | str:
    """Register, and ask for the size of batches; what is waited for while that cannot be."""
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
    if answer.status in _NO_SUCH_SERVER and not again:
        raise TrainerRefused(
            f"{client.url} is no trajectory server, or one behind a proxy that does not let us through: "
            f"{answer.detail}. Say where the trainer's server is with --env.rollout_server_url"
        )
    if answer.status != 200:
        return _waiting(answer)
    registered = answer.read(Registered)
    if registered.status != "success":
        return "waiting for the trainer to start"
    info, root = await client.ask("GET", "/info"), await client.ask("GET", "/")
    for each in (info, root):
        if each.status != 200:
            return _waiting(each)
    return _standing(registered, info.read(Batches), root.body)


def _waiting(answer: Answer) -> str:
    return f"waiting: {answer.asked} says {answer.detail}"


def _standing(registered: Registered, info: Batches, root: JSON) -> Standing:
    """Where we stand. A server that names itself keeps what it takes; the original does not."""
    return Standing(
        env_id=registered.env_id,
        name=str(registered.wandb_name),
        batch_size=max(1, info.batch_size),
        most_tokens=info.max_token_len if info.max_token_len > 0 else None,
        num_steps=registered.num_steps or -1,
        step=registered.starting_step or 0,
        keeps=isinstance(root, dict) and "server" in root,
    )


def _note_fit(
    client: TrajectoryClient, settings: FeedSettings, standing: Standing, note: Callable[[str], None]
) -> None:
    size = settings.group_size
    note(f"registered with {client.url} as {standing.name}, batches of {standing.batch_size} sequences")
    if standing.batch_size % size:
        note(f"groups of {size} do not fill a batch of {standing.batch_size} sequences exactly")
