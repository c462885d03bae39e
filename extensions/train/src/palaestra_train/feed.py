"""`serve`: sends the groups of a run to a trainer as they finish, in addition to the run's own files.

Invariant: a group is on disk before it is sent. A resumed run sends only groups that the trainer has not received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.evaluate import Gate, OnGroup
from palaestra.envs.run.run_folder import RunOutput
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Totals
from palaestra_slots.core.errors import TrainerUnavailable
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON
from palaestra_train.atropos.connection import FeedSettings, TrainerConnection, TrajectoryClient
from palaestra_train.atropos.feed import feeding
from palaestra_train.atropos.groups import Deliveries, fitting, longest_row, scored_data

ASK_S = 5.0
"""The maximum seconds to wait until the trainer's server reports its tracker's project. The run also works without the
answer."""

EQUAL, TOO_LONG = "had equal scores", "had only rollouts that are too long"
"""The reasons why a group is not sent."""


def feed_settings(config: BaseEnvConfig, name: str) -> FeedSettings:
    return FeedSettings(
        name=config.wandb_name or name,
        group_size=config.group_size,
        max_token_length=config.max_token_length,
        weight=config.inference_weight,
        min_batch_allocation=config.min_batch_allocation,
        max_batches_offpolicy=config.max_batches_offpolicy,
    )


async def trainers_tracking(url: str, token: str | None = None) -> dict[str, str]:
    """Return the `project` and `group` under which the trainer at `url` tracks its training run, if it reports them."""
    client = TrajectoryClient(url, token=token, timeout_s=ASK_S)
    try:
        answer = await client.ask("GET", "/wandb_info")
    except TrainerUnavailable:
        return {}
    finally:
        await client.aclose()
    told = answer.body if answer.status == 200 and isinstance(answer.body, dict) else {}
    return {name: told[name] for name in ("project", "group") if isinstance(told.get(name), str) and told[name]}


class Serving:
    """One run that feeds a trainer."""

    def __init__(
        self,
        config: BaseEnvConfig,
        output: RunOutput,
        note: Callable[[str], None],
        on_limit: Callable[[int | None], None] = lambda most_tokens: None,
    ) -> None:
        self._on_limit = on_limit
        self._connection: TrainerConnection | None = None
        self._config = config
        self._output = output
        self._note = note
        self._unsent: Counter[str] = Counter()

    async def run(self, roll_out: Callable[[OnGroup, Gate], Awaitable[Totals]], keep: OnGroup) -> Totals:
        """Send the groups of `roll_out` to the trainer. The gate that `roll_out` gets admits groups as the trainer
        needs them."""
        config, deliveries = self._config, Deliveries(self._output.folder.path / "deliveries.jsonl")
        settings = feed_settings(config, self._output.env)
        try:
            url, token = config.rollout_server_url, config.rollout_server_token
            async with feeding(settings, url, deliveries, token=token, note=self._note) as feed:
                most_tokens = (await feed.connection.standing()).most_tokens
                self._on_limit(most_tokens)
                self._connection = feed.connection

                def hand_on(group: Group) -> None:
                    keep(group)
                    delivery_id = self._delivery_id(group)
                    feed.offer(delivery_id, None if delivery_id in deliveries else self._line(group, most_tokens))

                return await roll_out(hand_on, feed.admit)
        finally:
            left = "".join(f"; {count} {why}" for why, count in self._unsent.items())
            self._note(f"{plural(len(deliveries), 'group')} delivered to {config.rollout_server_url}{left}")
            deliveries.close()

    def step(self) -> int:
        """Return the step that the trainer last reported; 0 before its first report."""
        standing = self._connection.current if self._connection is not None else None
        return 0 if standing is None else standing.step

    def _delivery_id(self, group: Group) -> str:
        return f"{self._output.folder.run_id}/{group.group_id}"

    def _line(self, group: Group, most_tokens: int | None) -> dict[str, JSON] | None:
        """Return the line to send; None if nothing can be sent, for example because the scores are equal or every
        rollout is too long for the trainer."""
        sent = fitting(group, most_tokens)
        if self._config.ensure_scores_are_not_same and (group.same_scores or sent.same_scores):
            self._count_unsent(
                EQUAL, f"group {group.group_id} is not sent: its scores are equal (ensure_scores_are_not_same)"
            )
            return None
        line = scored_data(
            sent,
            group_size=self._config.group_size,
            messages=self._config.include_messages,
            placeholders=self._config.allow_placeholder_tokens,
        )
        said = [each for each in group.scored if each.row_sizes and not each.unsaid]
        if line is None and said:
            shortest = min(map(longest_row, said))
            self._count_unsent(
                TOO_LONG,
                f"group {group.group_id} is not sent: its shortest rollout has {shortest} tokens, but the trainer "
                f"accepts {most_tokens}. Offer fewer tools (--env.enabled_toolsets), or raise the trainer's limit",
            )
        return line

    def _count_unsent(self, why: str, told: str) -> None:
        """Count a group that is not sent. The first group for each reason is reported, because a trainer may be waiting
        for it."""
        self._unsent[why] += 1
        if self._unsent[why] == 1:
            self._note(told)
