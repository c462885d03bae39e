"""Tracks groups on their way to a trainer: their form on the wire, the record of deliveries, and the groups that a
server without a store may lose.

Invariant: only sampled tokens go to a trainer, unless the user allows placeholder tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra.rollouts.export.atropos import group_line
from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import open_lines
from palaestra_slots.core.types import JSON

DELIVERIES_SCHEMA = "palaestra.deliveries/1"

VERSIONS = "policy_versions"
"""The key of `group_overrides` for the (start, stop, version) of each row's sampled spans. Atropos's own server has no
field for them, but passes on the overrides of a group unchanged."""

_SENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages")
_SENT_TOO = ("generation_params", "overrides", "images")


def fitting(group: Group, most_tokens: int | None) -> Group:
    """Return the group without rollouts that have no reward, no output of the model, or a row of more than
    `most_tokens`, and without those that continue a rollout of another run."""
    most = most_tokens or 1 << 62
    kept = [each for each in group.scored if not (each.unsaid or each.origin) and longest_row(each) <= most]
    return msgspec.structs.replace(group, trajectories=kept)


def longest_row(trajectory: Trajectory) -> int:
    """Return the number of tokens in the longest row."""
    return max((tokens for tokens, _ in trajectory.row_sizes), default=0)


def scored_data(
    group: Group, *, group_size: int, messages: bool = False, placeholders: bool = False
) -> dict[str, JSON] | None:
    """Return the group in the shape of `/scored_data`, or None if nothing in it can be trained on.

    If the number of rows is not `group_size`, `group_overrides` contains the number. Raises `ConfigError` for rows
    without sampled tokens, unless `placeholders` is true.
    """
    line = group_line(group, env="", model="", messages=messages)
    if line is None:
        return None
    if not placeholders and not all(_was_sampled(trajectory) for trajectory in group.scored):
        raise ConfigError(
            f"group {group.group_id} has no sampled tokens, so it cannot be trained on: use a token-exact server "
            f"(--openai.server_type vllm, sglang or transformers), or set --env.allow_placeholder_tokens true"
        )
    count = len(line["tokens"])
    overrides = line["group_overrides"] | ({"group_size": count} if count != group_size else {})
    if "versions" in line:
        overrides |= {VERSIONS: line["versions"]}
    sent = {name: line[name] for name in (*_SENT, *_SENT_TOO) if line.get(name)}
    return sent | ({"group_overrides": overrides} if overrides else {})


def _was_sampled(trajectory: Trajectory) -> bool:
    return bool(trajectory.row_sizes) and (trajectory.row is None or trajectory.row.source != "placeholder")


class Deliveries:
    """The file of a run that lists the groups delivered to the trainer, so that a resumed run sends only the remaining
    groups.

    Raises `DiskError` if it cannot be opened, and `ConfigError` for a damaged line or a different schema.
    """

    def __init__(self, path: Path) -> None:
        self._done: set[str] = set()
        self._file = open_lines(path, DELIVERIES_SCHEMA)
        for number, line in self._file.lines():
            try:
                self._done.add(msgspec.json.decode(line, type=dict[str, str])["delivery_id"])
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
                self._file.close()
                raise ConfigError(
                    f"{path}: line {number} is damaged ({error!r}). Fix or remove it; a group that is not listed is "
                    "sent again"
                ) from None

    def __contains__(self, delivery_id: str) -> bool:
        return delivery_id in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, delivery_id: str) -> None:
        """Record that the trainer's server has this group. Raises `DiskError` and then leaves no part of the record."""
        self._file.append(msgspec.json.encode({"delivery_id": delivery_id}) + b"\n")
        self._done.add(delivery_id)

    def close(self) -> None:
        """Flush and close. Idempotent. Raises `DiskError`."""
        self._file.close()


@dataclass(slots=True)
class GivenGroup:
    """A group that the server has accepted and, as far as this process knows, not used yet. `number` is its place among
    all accepted groups; `waited` is true once the server has reported that the group waits."""

    number: int
    delivery_id: str
    line: dict[str, JSON]
    waited: bool = False


@dataclass(frozen=True, slots=True)
class QuestionTime:
    """The state at a status request: how many groups had been sent, and whether another was being sent."""

    given: int
    busy: bool


class UnsavedGroups:
    """The groups that an environment has sent, one after the other, to one process of an original server.

    An original server holds groups only in memory and does not report which of them its trainer took. But groups of one
    size leave the server in the order in which they came, so the number of waiting groups shows which ones wait, and no
    group leaves before the groups fill a batch. Therefore the server gets one batch at a time. The server combines
    short groups in ways that it does not report, so after the first short group no group is remembered or held back any
    more.

    Invariant: a group is sent again only if it was waiting at the last status request, or cannot have left. A group
    that filled a batch after that request may have been taken, so it is not sent again.
    """

    def __init__(self, group_size: int) -> None:
        self.given: list[GivenGroup] = []
        self._group_size = group_size
        self._short = False
        self._count = 0
        self._busy = False

    def room(self, batch_size: int) -> bool:
        """Return whether one more group may be sent, so that at most one batch waits."""
        return self._short or not self.given or (len(self.given) + 1) * self._group_size <= batch_size

    def begin(self) -> None:
        """Record that a group is being sent."""
        self._count += 1
        self._busy = True

    def end(self, delivery_id: str, line: dict[str, JSON], *, taken: bool) -> None:
        """Record whether the server accepted the group (`taken`)."""
        self._busy = False
        if len(line["tokens"]) != self._group_size:
            self._short = True
            self.given.clear()
        elif taken and not self._short:
            self.given.append(GivenGroup(self._count, delivery_id, line))

    def asking(self) -> QuestionTime:
        """Return the state at the time when a status request is sent, to be passed to `heard` with the answer."""
        return QuestionTime(self._count, self._busy)

    def heard(self, waiting: int, asked: QuestionTime) -> None:
        """Record the server's answer, which is the number of this environment's groups that wait."""
        older = sum(each.number <= asked.given for each in self.given)
        del self.given[: max(0, older - waiting)]
        if not asked.busy and not self._busy and self._count == asked.given:
            for each in self.given:
                each.waited = True

    def lost(self, batch_size: int, *, alone: bool) -> tuple[list[GivenGroup], list[GivenGroup]]:
        """Record that the server is gone; return the groups to send again, and those that its trainer may have.

        `alone` is true if the server had no groups of another environment with which to fill a batch.
        """
        given, self.given, self._short = self.given, [], False
        untouched = alone and len(given) * self._group_size < batch_size
        if untouched or all(each.waited for each in given):
            return given, []
        return [], given
