"""The trainer that a run feeds (`palaestra feed`). An extension provides the connection, by entry points in the group
`palaestra.feeds`: `trainer` and `tracking`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, cast

from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.evaluate import Gate, OnGroup
from palaestra.envs.run.run_folder import RunOutput
from palaestra.rollouts.runner import Totals
from palaestra_slots.core.io import plugins

GROUP = "palaestra.feeds"
_WHAT = "the connection to a trainer"


class Feed(Protocol):
    """The connection of one run to its trainer."""

    async def run(self, roll_out: Callable[[OnGroup, Gate], Awaitable[Totals]], keep: OnGroup) -> Totals:
        """Send the groups of `roll_out` to the trainer. The gate that `roll_out` gets admits groups as the trainer
        needs them. `keep` writes a group to the disk first."""

    def step(self) -> int:
        """Return the step that the trainer last reported; 0 before its first report."""


OpenFeed: TypeAlias = Callable[[BaseEnvConfig, RunOutput, Callable[[str], None], Callable[[int | None], None]], Feed]
AskTracking: TypeAlias = Callable[[str, str | None], Awaitable[dict[str, str]]]


def make_feed(
    config: BaseEnvConfig, output: RunOutput, note: Callable[[str], None], on_limit: Callable[[int | None], None]
) -> Feed:
    """Return the connection of a run, not yet open. `on_limit` gets the number of tokens that the trainer accepts.
    Raises `ConfigError` if no extension provides one."""
    return cast("OpenFeed", plugins.load_named(GROUP, "trainer", _WHAT))(config, output, note, on_limit)


async def trainers_tracking(config: BaseEnvConfig) -> dict[str, str]:
    """Return the `project` and `group` under which the trainer tracks its training run, if it reports them."""
    ask = cast("AskTracking", plugins.load_named(GROUP, "tracking", _WHAT))
    return await ask(config.rollout_server_url, config.rollout_server_token)
